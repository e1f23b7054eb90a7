// What makes steps of kernels of our own: where operands lie, what of them a kernel can read, and
// how they become a step's inputs and outputs.
//
// A class for each kind of step is derived from it. Set-up code: slow, may throw CompileError or
// PackError; by one thread per draft, which outlives it.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/concat_affine.h"
#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/runtime/own_quantized.h"
#include "jit/onednn/runtime/packed_weights.h"
#include "jit/onednn/runtime/plan_draft.h"

namespace llga {

class StepMaker {
 public:
  explicit StepMaker(PlanDraft& draft) : draft_(draft) {}

  // A step that copies an input of the group to dense memory, which is read in its place.
  void replaceByCopy(const Operand& input);

  // Steps that copy images in planes to channels last, to be read in their place: operands of what
  // follows a convolution, and of pointwise functions that read channels last, too.
  void replacePlanes();

  // Contiguous images, copied to channels last by a step: where they will be.
  std::pair<Slot, Layout> interleaved(const Layout& from);

 protected:
  // --- how values lie ------------------------------------------------------------------------
  static bool isContiguous(const Layout& layout);

  static bool isChannelsLast(const Layout& layout, const Operand& like);

  struct PixelStrides {
    int64_t image;
    int64_t pixel;
  };

  // Of images, or volumes, whose channels lie side by side and whose pixels lie evenly, line by
  // line; nothing for others. There may be memory in between, as of a part of all channels.
  static std::optional<PixelStrides> pixelStridesOf(const Layout& images);

  // Of dense memory in which a pixel's channels lie side by side.
  static Shape pixelStrides(const Shape& sizes);

  // Of the channels of images whose numbers have so many bytes; nothing where it can't be.
  static std::optional<Concat> concatOf(const std::vector<Layout>& parts, int64_t item);

  // The images are, and the result may be.
  bool overChannelsLast(const Operand& data, const Operand& result) const;

  bool mayBeChannelsLast(const Operand& result) const;

  // Likewise, or such as bindImages() brings into that order.
  bool takesImages(const Ops& ops, const Operand& data, const Operand& result) const;

  // No addend at all, or one that a kernel for channels-last images can read.
  bool mayAdd(const std::optional<Operand>& addend, const Operand& result) const;

  // Of a result that may have any, but like an addend; empty if that is not possible.
  Shape denseStrides(const std::optional<Operand>& addend, const Operand& result) const;

  // Strides of the result of a linear layer, whose operands bindRows() can bind, or, of images, a
  // pointwise convolution, where all are dense rows; nothing where they are not, or the result may
  // not have such. `moved`: those of rows that are the result by views and transpositions, or
  // empty.
  std::optional<Shape> rowStrides(bool image, const Operand& data,
                                  const std::optional<Operand>& addend, const Operand& result,
                                  const Shape& moved = {}) const;

  // A group whose only result a step writes: `result`, of channels-last images from `data`.
  bool isFromImages(const Operand& data, const Operand& result) const;

  // Of what replacePlanes() replaces.
  std::vector<Operand> planesBesideChannelsLast() const;

  // Makes steps read something else in the place of a value.
  void replace(size_t id, const std::pair<Slot, Layout>& by);

  // Whether it is what the group gives, and all of that.
  bool isOnlyResult(const Operand& result) const;

  // --- what they hold ------------------------------------------------------------------------
  // Numbers of float32 are to be computed as such, or oneDNN would: without AMX it has no products
  // that are faster.
  bool isStrict(const Operand& data) const;

  // A constant weight, if all its numbers are finite, of which others make NaN of the padding's
  // zeros, and its memory stays; else an undefined tensor.
  at::Tensor finiteWeight(const Operand& operand) const;

  // Of a weight whose first dimension are its outputs: (row, column and channel of a convolution's
  // window) by outputs.
  static at::Tensor matrixOf(const at::Tensor& weight);

  // What the batch norm multiplies each channel with, and what it adds then; nothing if its
  // parameters are no constants.
  std::optional<std::pair<std::vector<float>, std::vector<float>>> scaleAndShift(
      const OpSpec& norm) const;

  // What is computed of a real number becomes what is computed of the one it is kept as.
  static void rescale(float& scale, float& shift, const Scale& from, const Scale& to);

  // --- what a step reads ---------------------------------------------------------------------
  // Makes it an input of the step; its index there.
  static size_t bind(Plan::Step& step, const Slot& slot, const Layout& layout);

  // What a step reads first.
  void bindData(Plan::Step& step, const Operand& data) const;

  void bindDataOrConstant(Plan::Step& step, const Operand& operand);

  // Data that lies in this order, densely as all that groups read; false for other data.
  bool bindAs(Plan::Step& step, const Operand& data, const Shape& strides);

  // As bindData(); a few planes are interleaved first.
  void bindImages(Plan::Step& step, const Ops& ops, const Operand& data);

  // A weight in the order of a kernel of our own.
  size_t bindPacked(Plan::Step& step, const Layout& weight, PackedWeightPtr packed);

  size_t bindPacked(Plan::Step& step, const Operand& weight, PackedWeightPtr packed);

  // `ordered`: the numbers of `weight`, as they are or narrower, in that order.
  size_t bindOrdered(Plan::Step& step, const Operand& operand, const at::Tensor& weight,
                     const at::Tensor& ordered);

  // `matrix`: the numbers of `weight`, inputs by outputs; `sizes`: in panels.
  size_t bindPanels(Plan::Step& step, const Operand& operand, const at::Tensor& weight,
                    const at::Tensor& matrix, const Shape& sizes);

  size_t bindParameter(Plan::Step& step, const Operand& operand, const at::Tensor& value);

  // The constant bias of a convolution, so many times; 0 if it has none.
  size_t bindBias(Plan::Step& step, const std::vector<Operand>& inputs, int64_t times = 1);

  // What is added to the result, which may take its place unless it is the data, whose rows are
  // read again; 0 if nothing is.
  size_t bindAddend(Plan::Step& step, const std::optional<Operand>& addend, const Operand& result);

  // Likewise to rows, one behind the other, behind a step that copies it there if it lies
  // otherwise.
  size_t bindAddedRows(Plan::Step& step, bool image, const std::optional<Operand>& addend,
                       const Operand& result);

  // Rows one behind the other; likewise behind a step that copies them.
  size_t bindRows(Plan::Step& step, const Operand& rows);

  // As bindData(), of what rowStrides() says a linear layer or, of images, a convolution can take.
  void bindDataRows(Plan::Step& step, bool image, const Operand& data);

  // --- what it makes -------------------------------------------------------------------------
  void addChannelsLastResult(Plan::Step& step, const Operand& result);

  // As oneDNN calls what computes it.
  static const char* kindOf(const OpSpec& op);

  // --- values of groups that are not lowered, and copies -------------------------------------
  // Where an input of the group or a constant is, as it lies.
  std::pair<Slot, Layout> located(const Value* value);

  // Likewise, or of a copy, if there is memory between its numbers.
  std::pair<Slot, Layout> locatedDense(const Value* value);

  // Numbers of float32, by channel.
  std::pair<Slot, Layout> parameter(const Value* value);

  // A constant, as dense numbers of float32.
  std::pair<Slot, Layout> keptAsFloats(size_t id, const at::Tensor& value);

  // Where the value is by rows, after a step that copies it there.
  std::pair<Slot, Layout> copied(const std::pair<Slot, Layout>& from, const Value* value);

  std::pair<Slot, Layout> copied(const std::pair<Slot, Layout>& from, size_t id,
                                 at::ScalarType type);

  std::pair<Slot, Layout> copied(const std::pair<Slot, Layout>& from, const Layout& to,
                                 at::ScalarType type);

  // The dimensions of the copy lie in the order that they have.
  std::pair<Slot, Layout> withoutGaps(const std::pair<Slot, Layout>& from, at::ScalarType type);

  // What copies numbers of this type.
  static Plan::Kernel copyBetween(const Layout& from, const Layout& to, at::ScalarType type);

  PlanDraft& draft_;
};

}  // namespace llga

// Where a kernel of our own is to stand in for oneDNN's: what is known of its speed.
//
// Decisions only; steps/ makes the steps of a plan. Stateless but for the environment, which is
// read once.
#pragma once

#include <array>
#include <optional>
#include <unordered_map>
#include <vector>

#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/depthwise_convolution.h"
#include "jit/onednn/runtime/depthwise_volume.h"
#include "jit/onednn/runtime/direct_convolution.h"
#include "jit/onednn/runtime/excitation.h"
#include "jit/onednn/runtime/expansion.h"
#include "jit/onednn/runtime/gemv.h"
#include "jit/onednn/runtime/grouped_convolution.h"
#include "jit/onednn/runtime/layout.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/matrix_product.h"
#include "jit/onednn/runtime/reduction.h"
#include "jit/onednn/runtime/tiled_convolution.h"
#include "jit/onednn/runtime/transposed_convolution.h"
#include "jit/onednn/runtime/way.h"
#include "jit/onednn/runtime/winograd.h"

namespace llga {

// Of one partition, in the order of the subgraph.
using Ops = std::vector<const OpSpec*>;

// The last two of an image's sizes, or of a window's: vertical, horizontal.
std::array<int64_t, 2> pair(const Shape& values);

// A flag that may not have been set at all.
bool isSet(const OpSpec& op, Attr flag);

Ops opsOf(const LoweredGraph& graph);

// What the op does to its data, if that is all it does.
Rectifier rectifierOf(const OpSpec& op);

// The ops that the table lowers GELU's tanh form to, if `op` is the first one of them and all are
// among `ops`; or none.
Ops tanhGelu(const OpSpec& op, const Ops& ops);

// The mean over all pixels of an image.
bool isGlobalMean(const OpSpec& op);

// False if the environment holds LLGA_FUSER_OWN_KERNELS=off: all is left to oneDNN.
bool ownKernels();

// Whether those for AVX2 stand in for oneDNN's or PyTorch's: not for what those have for AVX-512.
bool ownAvx2Kernels();

// Whether those stand in, on any processor that has AVX2, which read memory more than they compute
// or do what oneDNN is slow at.
bool ownKernelsAnywhere();

// False if that is off, or the environment holds LLGA_FUSER_WINOGRAD=off.
bool winogradIsOn();

// Of the op that computes it, by value.
std::unordered_map<size_t, OpKind> producerKinds(const LoweredGraph& graph);

// A product of two tensors of the same sizes, of three dimensions at least, one or both of which
// are behind an activation.
struct FoundGate {
  std::array<Operand, 2> data;
  std::array<std::optional<Activation>, 2> activations;
  Operand result;
};
// The whole group; nothing for any other one.
std::optional<FoundGate> gate(const LoweredGraph& graph);

// An activation that is faster in a pass of its own over the data than in oneDNN's, of float32 or
// bfloat16.
struct ActivationApart {
  Activation activation;
  Ops ops;
  size_t from;
  size_t to;
};

// The activation of `value` that ops[i] begins; `i` moves on to the last op of it.
std::optional<Activation> activationFrom(const Ops& ops, size_t& i, const Operand& value);

// Those at the end of the group, which are applied in place: of float32 results that are neither
// tiny nor too large for the caches. And GELU's tanh form, of bfloat16 too, wherever it is.
// `group_outputs`: index by value.
std::vector<ActivationApart> activationsApart(
    const LoweredGraph& graph, const std::unordered_map<size_t, size_t>& group_outputs);

// The one that is all of a group, of float32 data that is not tiny; nothing for other groups.
std::optional<ActivationApart> loneActivation(
    const LoweredGraph& graph, const std::unordered_map<size_t, size_t>& group_outputs);

// A convolution in small groups, and maybe ReLU; nothing for other partitions. The images have to
// be channels last.
std::optional<GroupedConvolution> groupedConvolution(const Ops& ops, const LoweredGraph& graph);

// A depthwise convolution that makes several channels of each one, and maybe ReLU or its like;
// nothing for other partitions. Image and result have to be channels last.
std::optional<DepthwiseConvolution> depthwiseConvolution(const Ops& ops, const LoweredGraph& graph);

// A transposed convolution with few output channels, and maybe ReLU or its like; nothing for other
// partitions. The images have to be channels last.
std::optional<TransposedConvolution> transposedConvolution(const Ops& ops,
                                                           const LoweredGraph& graph);

// A depthwise convolution of volumes, and maybe ReLU or its like; nothing for other partitions. The
// strides of the data are not known yet; its channels have to lie side by side, and the result
// channels last.
std::optional<DepthwiseVolume> depthwiseVolume(const Ops& ops, const LoweredGraph& graph);

template <typename Kernel>
struct AddedConvolution {
  Kernel kernel;
  std::optional<Operand> addend;  // like the result
};

// A convolution, and maybe an addition and ReLU, that takes less time by Winograd's algorithm, or
// is to be computed that way whatever it takes; nothing for other partitions, other ways, or where
// that is off. Images and addend have to be channels last.
std::optional<AddedConvolution<WinogradConvolution>> winogradConvolution(const Ops& ops,
                                                                         const LoweredGraph& graph,
                                                                         Way way);

// A small convolution, or one of a few planes, and maybe SiLU, or an addition and another
// activation; nothing for other partitions. The strides of images and result are not known yet;
// with an addend, that and the result have to be channels last.
std::optional<AddedConvolution<DirectConvolution>> directConvolution(const Ops& ops,
                                                                     const LoweredGraph& graph);

// What AMX computes of a convolution of channels-last images, or a transposed one whose windows do
// not overlap, with a weight of these sizes and numbers of so many bytes; nothing for other ops.
std::optional<TiledConvolution> tiledConvolution(const OpSpec& op, const Shape& weight,
                                                 int64_t item);

// The weight of such a transposed convolution as that of a pointwise one: (row, column and output;
// input; 1; 1).
at::Tensor asPointwise(const at::Tensor& weight);

// A convolution of bfloat16 images, and maybe SiLU, or an addition and another activation, that AMX
// computes; nothing for other partitions. Images and addend have to be channels last.
std::optional<AddedConvolution<NarrowConvolution>> narrowConvolution(const Ops& ops,
                                                                     const LoweredGraph& graph);

// Whether a partition is a convolution of images in this layout that oneDNN is slow to bring into
// the order of channels last, which its kernels take: two to four large planes each.
bool isConvolutionOfPlanes(const Ops& ops, const Layout& images);

// A linear layer or pointwise convolution, and maybe an addition and an activation.
struct FoundLinear {
  bool image;
  int64_t rows;
  Operand data;
  Operand weight;  // inputs x outputs; of a convolution the other way round
  std::vector<Operand> biases;
  std::optional<Operand> addend;  // like the result
  Operand result;
  Rectifier rectifier = Rectifier::none;
  std::optional<Activation> activation = {};  // behind it
  // By output: what the sums are multiplied with behind the addend, and what is added then. Without
  // an activation.
  std::optional<Operand> scale = {};
  std::optional<Operand> shift = {};
  // Like the result, which it multiplies behind all else; then there is no addend.
  std::optional<Operand> factor = {};
  // Strides of the result, if views and transpositions are behind all else; else empty.
  Shape moved = {};
  bool if_narrow = false;  // only with a weight whose numbers are all of bfloat16
};

// Of float32 data with constant parameters, where oneDNN is slow or `way` asks for it; nothing for
// other partitions and other ways. Rows have to be contiguous, images channels last.
std::optional<FoundLinear> linear(const Ops& ops, const LoweredGraph& graph, Way way);

// A product of matrices, and maybe numbers it is multiplied with, before and behind an addition.
struct FoundProduct {
  struct Factor {
    Operand number;
    bool divides;
  };

  Operand a;
  Operand b;
  bool transpose_a;
  bool transpose_b;
  Operand result;
  std::optional<Factor> before = {};
  std::optional<Operand> addend = {};  // like the result
  std::optional<Factor> behind = {};
};

// Of float32, and not by one constant matrix; nothing for other partitions.
std::optional<FoundProduct> product(const Ops& ops, const LoweredGraph& graph);

// Whether this kernel is expected to be faster than oneDNN's.
bool paysProduct(const MatrixProduct& arranged);
// Likewise, of a pointwise convolution of planes: its weight by the pixels of each image, not
// arranged yet.
bool paysProductOfPlanes(const MatrixProduct& product);

struct FoundNarrowLinear {
  NarrowLinear kernel;
  const OpSpec* op;
  Operand data;
  Operand weight;
  bool outputs_last;  // in the weight
  std::optional<Operand> bias;
  std::optional<Operand> addend;  // like the result
  Operand result;                 // of bfloat16 or float32
  Shape moved = {};               // as of FoundLinear
  // Like the result, which it multiplies; then there is no addend.
  std::optional<Operand> factor = {};
};

// A partition that is a linear layer or a pointwise convolution of bfloat16 data, with constant
// parameters, and maybe an addition and an activation, or an activation and a multiplication (a
// gated unit), where oneDNN is slower; nothing for others. Or one whose sums become float32, to
// which maybe more is added. Rows have to be contiguous, images channels last.
std::optional<FoundNarrowLinear> narrowLinear(const Ops& ops, const LoweredGraph& graph);

struct FoundExpansion {
  Expansion kernel;
  Operand data;
  Operand result;
  // Whose weights and biases it takes.
  const OpSpec* pointwise;
  const OpSpec* depthwise;
  const OpSpec* projection;       // or null
  std::optional<Operand> addend;  // like the result
  // Constants, by channel: of the activations before and behind the depthwise one.
  std::array<std::optional<Operand>, 2> slopes = {};
};

// A whole group that is a pointwise convolution of float32 or bfloat16 images and a depthwise one,
// each maybe with an activation, and maybe another pointwise one, a cast to float32, an addition
// and a rectifier, or the concatenation of what both give; nothing for other groups, or where that
// is slower. Images and addend have to be channels last. In the place of the pointwise one may be a
// small convolution of a few float32 planes, of any strides.
std::optional<FoundExpansion> expansion(const LoweredGraph& graph);

struct FoundReduction {
  Reduction::Type type;
  Reduction::Kind kind;
  Shape axes;
  Operand data;
  Operand result;
};

// The mean, sum or 2-norm of float32 or bfloat16 data over dimensions of not too many numbers, or a
// pooling that is a mean over all pixels; nothing for other partitions. The kernel is for
// dimensions that lie side by side in memory.
std::optional<FoundReduction> reduction(const Ops& ops);

struct FoundExcitation {
  Excitation kernel;
  Operand data;
  Operand result;
  // Whose weights and biases it takes.
  const OpSpec* squeeze;
  const OpSpec* excite;
};

// A whole group that is a squeeze and excitation of float32 or bfloat16 images, which have to be
// channels last; nothing for other groups.
std::optional<FoundExcitation> excitation(const LoweredGraph& graph);

struct Shuffle {
  std::vector<const Value*> parts;
  std::vector<const Value*> chunks;
  int64_t groups;
  int64_t pixels;  // of all images together
  at::ScalarType dtype;
};

// A whole group that concatenates channels, shuffles them and maybe cuts the result into chunks, as
// join_shuffle leaves it; nothing for other groups. No oneDNN op stands for it.
std::optional<Shuffle> findShuffle(const Graph& subgraph, const Facts& facts);

}  // namespace llga

// How one aten node becomes oneDNN Graph ops.
//
// An entry of the op table is a function that receives a Lowering: it reads the node's arguments
// by their schema names, checks its conditions and emits oneDNN Graph ops. A condition that does
// not hold is a refusal: `lowering.refuse("what was found, what is needed")`. The text ends up in
// the report, so it names sizes and options. Nothing is emitted when an entry refuses.
//
// The aten node itself stays as it is in the IR. Several ops for one node (silu = sigmoid and
// multiply) are fine: the bridge keeps the node only if they all land in one partition.
//
// Used at compile time only, by one thread per graph.
#pragma once

#include <oneapi/dnnl/dnnl_graph.hpp>

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/quantization.h"

namespace llga {

using OpKind = dnnl::graph::op::kind;
using Attr = dnnl::graph::op::attr;
using DataType = dnnl::graph::logical_tensor::data_type;

// Thrown by Lowering::refuse and caught by the bridge; never leaves the compile-time code.
struct Refused {
  std::string reason;
};

// One tensor of the oneDNN graph under construction.
struct Operand {
  size_t id = 0;
  at::ScalarType dtype = at::kFloat;
  std::optional<Shape> sizes;
  bool constant = false;

  dnnl::graph::logical_tensor logicalTensor() const;
  int64_t rank() const { return sizes ? static_cast<int64_t>(sizes->size()) : -1; }
};

// A constant that the lowering made up or converted: a {1} tensor for a scalar, a bias in another
// data type. Made when a partition that reads it is compiled, not before.
using ConstantMaker = std::function<at::Tensor()>;

// Value of an op's attribute, in the types that oneDNN Graph has.
using AttrValue =
    std::variant<bool, int64_t, float, std::string, std::vector<int64_t>, std::vector<float>>;

// A oneDNN Graph op to be. oneDNN's own op objects can be added to one graph only: copies share
// their values, which keep pointers to the ops of a graph that is gone. So each graph builds anew.
class OpSpec {
 public:
  OpSpec(const Node* node, size_t id, OpKind kind, std::vector<Operand> inputs,
         std::vector<Operand> outputs);

  // For each T of AttrValue.
  template <typename T>
  OpSpec& set_attr(Attr name, const T& value);

  // Of an attribute that was set, and that is a T.
  template <typename T>
  T get_attr(Attr name) const {
    const auto found = std::find_if(attributes_.begin(), attributes_.end(),
                                    [&](const auto& known) { return known.first == name; });
    return std::get<T>(found->second);
  }

  const Node* node() const { return node_; }
  size_t id() const { return id_; }
  OpKind kind() const { return kind_; }
  const std::vector<Operand>& inputs() const { return inputs_; }
  const std::vector<Operand>& outputs() const { return outputs_; }
  const std::vector<std::pair<Attr, AttrValue>>& attributes() const { return attributes_; }
  std::string name() const;
  dnnl::graph::op build() const;

 private:
  const Node* node_;
  size_t id_;
  OpKind kind_;
  std::vector<Operand> inputs_;
  std::vector<Operand> outputs_;
  std::vector<std::pair<Attr, AttrValue>> attributes_;
};

// The oneDNN graph of a block or of a group's subgraph, as far as it has been lowered.
struct LoweredGraph {
  std::vector<OpSpec> ops;
  // Operands that are values of the IR.
  std::unordered_map<size_t, const Value*> values;
  // Operands made by lowering.
  std::unordered_map<size_t, ConstantMaker> constants;
  // Constant operands whose layout oneDNN should choose: weights.
  std::unordered_set<size_t> packable;
  // Every operand by id.
  std::unordered_map<size_t, Operand> operands;
};

std::optional<DataType> toDataType(at::ScalarType dtype);

class Lowering {
 public:
  Lowering(const Node* node, const Facts& facts, size_t& next_id);

  const Node* node() const { return node_; }
  [[noreturn]] void refuse(const std::string& reason) const;

  // --- arguments by schema name -------------------------------------------------------------
  bool has(const char* name) const;  // the schema has such an argument
  const Value* arg(const char* name) const;
  bool isNone(const char* name) const;
  // Always true when compiling; partitioning may see host values that are computed at run time.
  bool isKnown(const char* name) const { return facts_.constant(arg(name)).has_value(); }
  // A list of integers, if it is known.
  std::optional<Shape> knownInts(const Value* list) const;
  // Adds the numbers of a node that pads pixels, which are begin and end of the last dimension
  // first. Where they are not known it adds none: any make the same partition.
  void addPadding(const Node* padding, Shape& pads_begin, Shape& pads_end) const;
  int64_t integer(const char* name) const;
  double number(const char* name) const;  // int or float
  bool flag(const char* name) const;
  std::string text(const char* name) const;
  Shape ints(const char* name) const;
  // A list of `n` integers; a single one stands for all, as in PyTorch.
  Shape ints(const char* name, size_t n) const;

  // --- facts --------------------------------------------------------------------------------
  at::ScalarType dtype(const Value* value) const;
  const Shape& sizes(const Value* value) const;
  std::optional<Shape> maybeSizes(const Value* value) const;
  int64_t rank(const Value* value) const { return static_cast<int64_t>(sizes(value).size()); }
  // False only where the rank is known and another one: partitioning may know less than compiling.
  bool mayHaveRank(const Value* value, int64_t rank) const;
  bool isConstantTensor(const Value* value) const;
  // A dimension of `value` as PyTorch counts it (negative from the end) -> 0 .. rank-1; as it is
  // where the rank is unknown.
  int64_t dim(int64_t index, const Value* value) const;

  // --- operands -----------------------------------------------------------------------------
  Operand in(const Value* value);
  Operand in(const char* name) { return in(arg(name)); }
  // A constant weight that is packed into the layout the compiled partition asks for. Only where
  // the op takes the weight as it is: oneDNN 3.2 loops for ever when it has to choose a layout
  // behind a reshape into groups or a transpose. `data` is the argument that it is multiplied with:
  // if that is in 8 bit, an 8-bit weight stays so, and is packed if packable(); else it is a float.
  Operand weight(const char* name, const char* data, bool pack = true);
  // The transpose of a constant 2-dim weight, as a view, for MatMul without transpose_b; packed.
  Operand transposedWeight(const char* name, const char* data);
  // False for an 8-bit weight with 8-bit data whose packed form would hold sums beside the numbers:
  // where the data is signed or has a zero point, oneDNN appends what corrects for that.
  bool packable(const char* name, const char* data) const;
  // A value that is stored in 8 bit.
  Operand quantized(const Value* value, const QuantParams& params);
  // A tensor argument in data type `dtype`: constants are converted once, others get a TypeCast.
  Operand inAs(const char* name, at::ScalarType dtype);
  Operand out(size_t index = 0);
  Operand temp(at::ScalarType dtype, std::optional<Shape> sizes = std::nullopt);
  Operand scalar(double value, at::ScalarType dtype);
  Operand constant(at::ScalarType dtype, Shape sizes, ConstantMaker make);

  // --- ops ----------------------------------------------------------------------------------
  // Returns the op for its attributes; refuses where an input and the output should agree in data
  // type and do not.
  OpSpec& emit(OpKind kind, const std::vector<Operand>& inputs,
               const std::vector<Operand>& outputs);
  void emitQuantization(OpKind kind, const Operand& input, const Operand& output,
                        const QuantParams& params);
  // Refuses unless all floating-point tensors of the node have one supported data type.
  void requireOneDtype() const;
  // An unknown rank passes, for the same reason.
  void requireRank(const Value* value, int64_t low, int64_t high) const;

  void commit(LoweredGraph& graph) &&;

 private:
  size_t argIndex(const char* name) const;
  c10::IValue host(const char* name) const;
  Operand add(Operand operand);
  Operand operandOf(const Value* value, at::ScalarType type);
  Operand dequantized(const QuantizedConstant& weight, bool transposed, bool packable);
  Operand floats(const QuantizedConstant& weight, bool transposed);
  // Of an argument that is dequantized, and maybe cast.
  std::optional<QuantParams> quantization(const char* data) const;

  const Node* node_;
  const Facts& facts_;
  size_t& next_id_;
  mutable std::unordered_map<const Value*, Shape> sizes_;
  std::vector<OpSpec> ops_;
  std::unordered_map<size_t, const Value*> values_;
  std::unordered_map<size_t, ConstantMaker> constants_;
  std::unordered_set<size_t> packable_;
  std::unordered_map<size_t, Operand> operands_;
};

std::string toText(const Shape& shape);

// Whether these are images of one pixel each.
bool isOnePixel(const Shape& sizes);

}  // namespace llga

// Names and small questions of the TorchScript IR that passes, op table and operator share.
// No oneDNN here. Everything is stateless and may be called from any thread that owns the graph.
#pragma once

#include <torch/csrc/jit/ir/ir.h>

#include <optional>
#include <string>
#include <vector>

namespace llga {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Symbol;
using torch::jit::Value;

// The operator that runs one partition: variadic, pure, with the Subgraph attribute.
Symbol fusionGroupKind();

// The operator that computes what depends on sizes alone: variadic, with the Subgraph attribute.
Symbol oncePerSizesKind();

// int list on a FusionGroup, one entry per output: 1 if oneDNN may choose the memory layout.
Symbol anyLayoutAttr();
// int list on a FusionGroup, one entry per output: 1 if no tensor over its memory outlives the
// call.
Symbol callLocalAttr();
// int list on a FusionGroup, one entry per input: 1 if the value comes from another FusionGroup
// whose output layout is oneDNN's choice, so that the buffer belongs to the fuser alone.
Symbol groupOwnedAttr();
// int list on a FusionGroup, one entry per input: for a view of such a value, or what is read in
// the place of a copy, the order in which the dimensions would lie in eager's memory, from the
// outermost in, encoded; 0 for all else.
Symbol viewedOrderAttr();
// Of up to 8 dimensions: their octal digits, the first one's last, behind a one; 0 for none.
int64_t encodedOrder(const std::vector<int64_t>& order);
std::vector<int64_t> decodedOrder(int64_t code);
// int list on a FusionGroup, one entry per input: 1 if the group falls back when the input holds
// NaN or an infinity.
Symbol mustBeFiniteAttr();
// string on a node that stayed outside every group: why.
Symbol refusedAttr();
// int on a node that a pass of ours put in and that is taken out again if nothing fused it.
Symbol insertedAttr();

// int on the softmax of an attention, or on one that is a node of its own, whose group was made for
// a kernel of ours.
Symbol ownAttentionAttr();

// Schema of the op that remove_mutation puts behind the pure variant of an in-place op:
//   llga::as_target(result, target)
// is `result`, cast to the data type of `target`; raises what the in-place op raises where it can't
// be cast or has other sizes. Inside a group it costs nothing: the group is compiled only for
// inputs with which it changes nothing.
Symbol asTargetKind();

// Schema of the op that widen_bfloat16 puts behind a product: llga::as_float(x) is `x`, in float32
// if it is of bfloat16. Inside a group it costs nothing, as as_target does.
Symbol asFloatKind();

// Schema of the op that merge_branches puts behind a convolution:
//   llga::of_batch(result, x)
// is `result`; where `x` has other than rankAttr() dimensions, what otherwiseAttr() computes of it.
// Inside a group it costs nothing, as as_target does.
Symbol ofBatchKind();
// int on it.
Symbol rankAttr();
// graph on it; not a Subgraph, which torch would merge with the one of the group.
Symbol otherwiseAttr();

// Schema of the op that prepare_binary puts in the place of an operand's expansion:
//   llga::operand(x, other, sizes)
// is `x`, for a binary op with `other`, if it has the sizes that `x` is expanded to (None: its
// own); else `x`, expanded. Inside a group it costs nothing, as as_target does.
Symbol operandKind();

// True for these four.
bool isIdentity(const Node* node);

// The casts that TorchScript's autocast puts in. They change nothing but floating-point tensors,
// whether autocast is on or off.
Symbol reducedPrecisionKind();
Symbol fullPrecisionKind();

// Schema of the op that normalize_ops puts in the place of an aten::einsum that is a product of
// matrices, of as many as the dimensions before the last two make:
//   llga::einsum(a, b, transpose_b, equation)
// computes what aten::einsum does; where neither operand has one number in the place of several,
// it is matmul(a, b) with the last two dimensions of b swapped, or not.
Symbol einsumKind();

// llga::scaled_dot_product_attention: as aten's, without dropout, but where a mask leaves out all
// keys, the result is NaN, as it is in the kernels of torch.nn.
Symbol unsafeAttentionKind();

// True for both.
bool isAttention(const Node* node);

// The value that `value` is equal to where a group computes it: looks through identities.
const Value* behind(const Value* value);

inline bool isFusionGroup(const Node* node) { return node->kind() == fusionGroupKind(); }

// True if something reads `value`, and only groups in its own block do.
bool onlyGroupsRead(const Value* value);

// What alone reads the numbers of the value, in its block; null if there is no such node, or
// another one reads its sizes.
const Node* readerOf(const Value* value);

// Records why `node` is not in a fusion group. The last reason wins: it is the final one.
void refuse(Node* node, const std::string& reason);

// True for a node that only computes shapes or other host values from tensors' metadata and
// constants: aten::size, integer arithmetic, list construction of integers. Such a node costs
// nothing inside a group, where its result is known once per signature.
bool isShapeArithmetic(const Node* node);

// The padding that `node` alone reads, by zeros of a convolution or -inf of a max pooling: oneDNN's
// pad themselves, so that it costs nothing inside a group. Null if there is none. Its numbers may
// be known only when the group is compiled.
const Node* paddingOf(const Node* node);

// The nodes of a group's graph but for constants, lists, arithmetic on sizes, identities and the
// paddings that ops of it do themselves, in its order.
std::vector<const Node*> computations(const Graph& subgraph);
// The only one of them; null if there are several, or none.
const Node* soleComputation(const Graph& subgraph);

// True for convolutions that are not transposed, as far as is known.
bool isConvolution(const Node* node);

// True for convolutions and matrix products.
bool isProduct(const Node* node);

// True for aten::gelu in the form that has a tanh in the place of the erf.
bool isTanhGelu(const Node* node);

// True for an op of one tensor that gives some of its elements, each as it is; views and
// aten::contiguous, not aten::roll.
bool movesNumbers(const Node* node);

// True for those that may drop some.
bool takesPart(const Node* node);

// Whether an aten::slice of a tensor begins with the first item, and whether it takes all of them,
// for sure.
bool beginsAtFirst(const Node* slice);
bool takesAll(const Node* slice);

// Whether it makes parts of a tensor that have its rank, as many as it has outputs.
bool makesParts(const Node* node);

// True for aten::size and aten::dim, which do not look at the numbers of a tensor.
bool readsShape(const Node* node);

// True for arithmetic on tensors that promotes the data types of its two operands; the second may
// be a number.
bool isBinary(const Node* node);

// The integer that `value` is, if it is a constant.
std::optional<int64_t> intOf(const Value* value);

// The list of integers that `value` is, if it is a constant.
std::optional<std::vector<int64_t>> intsOf(const Value* value);

// The tensor that `value` is, if it is a constant; undefined otherwise.
at::Tensor constantTensor(const Value* value);

// The number that `value` is, if it is a constant: a trace writes some as tensors of no dimensions.
std::optional<double> numberOf(const Value* value);

// True if `value` is the constant True.
bool isTrue(const Value* value);

// True if `value` is a tensor (of any refinement).
inline bool isTensor(const Value* value) {
  return value->type()->isSubtypeOf(*c10::TensorType::get());
}

// True if `value` is a List[Tensor].
inline bool isTensorList(const Value* value) {
  return value->type()->isSubtypeOf(*c10::ListType::ofTensors());
}

// Changes the data type in the type of a tensor.
void setDtype(Value* value, at::ScalarType dtype);

// Calls `visit` for each node of `block` and of its nested blocks, not of Subgraph attributes;
// `visit` may destroy the node.
template <typename AnyBlock, typename Visit>  // Block or const Block
void walk(AnyBlock* block, const Visit& visit) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    auto* node = *it++;
    for (auto* nested : node->blocks()) {
      walk(nested, visit);
    }
    visit(node);
  }
}

// "aten::add.Tensor": the name the op table and the reports use for a node.
std::string qualifiedName(const Node* node);

}  // namespace llga

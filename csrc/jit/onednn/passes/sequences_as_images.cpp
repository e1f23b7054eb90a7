// Convolutions of sequences become such of images of one row, which all that is there for images
// takes: kernels, memory with channels last, joined concatenations and excitations, 8 bit.
//
//   %2 : Tensor = aten::conv1d(%x, %weight, %bias, [1], [1], [1], 1)
//   %3 : Tensor = aten::relu(%2)
// ->
//   %image : Tensor = aten::unsqueeze(%x, -2)
//   %4 : Tensor = aten::conv2d(%image, %weights_of_one_row, %bias, [1, 1], [0, 1], [1, 1], 1)
//   %5 : Tensor = aten::relu(%4)
//   %3 : Tensor = aten::squeeze(%5, -2)
//
// What follows a convolution, up to where an op does not take an image of one row for a sequence,
// is computed of the image, so that no view parts the two. Where a dimension is counted from the
// front, or stands for channels, the rank has to be known (known_shapes.h), since sequences may
// come without a batch. Operands that may have no dimension at all get the row by llga::with_row,
// which leaves such as they are. Nothing that is written to is touched.
//
// The end of a padded sequence that is cut off behind the convolution (a causal one) is not padded:
// the slice is gone, and what follows it joins the convolution, past a copy to contiguous memory.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

using torch::jit::toIValue;
namespace aten = torch::jit::aten;
namespace attr = torch::jit::attr;
namespace prim = torch::jit::prim;

constexpr int64_t kRow = -2;  // the dimension that an image of one row has more
constexpr size_t kRank = 3;   // of a batch of sequences

// What computes of an image what the op computes of a sequence; nullopt for other ops. All have
// the same inputs, with lists of two in the place of lists of one.
std::optional<Symbol> windowsOfImages(const Node* node) {
  static const std::unordered_map<Symbol, Symbol> kinds{
      {aten::conv1d, aten::conv2d},
      {aten::conv_transpose1d, aten::conv_transpose2d},
      {aten::_convolution, aten::_convolution},
      {aten::convolution, aten::convolution},
      {aten::_convolution_mode, aten::_convolution_mode},
      {aten::max_pool1d, aten::max_pool2d},
      {aten::avg_pool1d, aten::avg_pool2d},
      {aten::adaptive_avg_pool1d, aten::adaptive_avg_pool2d}};
  const auto found = kinds.find(node->kind());
  return found == kinds.end() ? std::nullopt : std::optional(found->second);
}

// The constant that a weight is, or is made of by casts; undefined for another one.
at::Tensor constantOf(const Value* weight) {
  while (isPlainCast(weight->node()) || isDequantize(weight->node())) {
    weight = weight->node()->input(0);
  }
  return constantTensor(weight);
}

// Convolutions, transposed ones too, with a constant weight of three dimensions.
bool isOfSequences(const Node* node) {
  if (!windowsOfImages(node) || !node->hasNamedInput("weight")) {
    return false;
  }
  const auto weight = constantOf(node->namedInput("weight"));
  return weight.defined() && weight.dim() == static_cast<int64_t>(kRank);
}

// The type of an image over a sequence's memory.
c10::TypePtr imageType(const Value* sequence) {
  const auto type = sequence->type()->cast<c10::TensorType>();
  if (!type) {
    return sequence->type();
  }
  auto sizes = type->sizes().concrete_sizes();
  auto strides = type->strides().concrete_sizes();
  if (!sizes || !strides || sizes->empty()) {
    return type->dimensionedOnly()->withDim(std::nullopt);
  }
  const auto row = sizes->back() * strides->back();
  sizes->insert(sizes->end() - 1, 1);
  strides->insert(strides->end() - 1, row);
  return type->withSizesStrides(*sizes, *strides);
}

// A window of a sequence has one number more of each kind: the first one, of the row.
std::optional<std::vector<int64_t>> withRow(const std::string& name, std::vector<int64_t> numbers) {
  if (numbers.empty()) {
    return numbers;  // a stride that is the window's size
  }
  if (numbers.size() != 1) {
    return std::nullopt;
  }
  const bool adds = name == "padding" || name == "output_padding";
  numbers.insert(numbers.begin(), adds ? 0 : 1);
  return numbers;
}

// What aten::unsqueeze gives, of a tensor without dimensions the tensor itself.
Symbol withRowKind() {
  static const Symbol kind = Symbol::fromQualString("llga::with_row");
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::with_row(Tensor(a) self) -> Tensor(a)",
      [](torch::jit::Stack& stack) {
        auto self = torch::jit::pop(stack).toTensor();
        torch::jit::push(stack, self.dim() > 0 ? self.unsqueeze(kRow) : self);
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
  return kind;
}

// Of a batch of sequences: the channels are another dimension without one.
bool needsChannels(const Node* node) {
  return node->kind() == aten::batch_norm || node->kind() == aten::group_norm ||
         node->kind() == aten::instance_norm || node->kind() == aten::prelu;
}

// Computes each number apart, of as many inputs as this, which come first; 0 for other ops.
size_t operandsOfEach(const Node* node) {
  switch (node->kind()) {
    case aten::abs:
    case aten::exp:
    case aten::neg:
    case aten::rsqrt:
    case aten::sqrt:
      return 1;
    case aten::pow:
    case aten::clamp:
    case aten::clamp_min:
    case aten::clamp_max:
      return std::none_of(node->inputs().begin() + 1, node->inputs().end(), isTensor) ? 1 : 0;
    default:
      break;
  }
  if (isBinary(node)) {
    return isTensor(node->input(1)) ? 2 : 1;
  }
  if (node->kind() == asTargetKind()) {
    return 2;
  }
  const bool quantizes =
      isQuantize(node) && quantizeParams(node) && quantizeParams(node)->perTensor();
  return isActivation(node) || isPlainCast(node) || isDequantize(node) || quantizes ||
                 needsChannels(node) || node->kind() == asFloatKind()
             ? 1
             : 0;
}

// A weight with a row; undefined if its scales are those of taps.
at::Tensor ofOneRow(const at::Tensor& weight) {
  if (!weight.is_quantized()) {
    return weight.unsqueeze(kRow);
  }
  // PyTorch makes no views of what is quantized by channels.
  const auto params = paramsOf(weight);
  if (!params || params->axis + 1 == weight.dim()) {
    return {};
  }
  auto integers = integersOf(weight).unsqueeze(kRow);
  auto result = at::new_qtensor(integers.sizes(), weight.options(), makeQuantizer(*params));
  integersOf(result).copy_(integers);
  return result;
}

bool isNumber(const Value* value) {
  const auto tensor = constantTensor(value);
  return !isTensor(value) || (tensor.defined() && tensor.dim() == 0);
}

class Lifting {
 public:
  explicit Lifting(const GraphPtr& graph) : graph_(graph) {
    const torch::jit::AliasDb aliases(graph);
    KnownShapes shapes;
    walk(graph->block(), [&](Node* node) {
      for (const auto* output : node->outputs()) {
        ranks_[output] = isTensor(output) ? shapes.rank(output) : std::nullopt;
      }
      if (!aliases.hasWriters(node)) {
        nodes_.push_back(node);
      }
    });
  }

  void run() {
    for (auto* node : nodes_) {
      lift(node);
    }
    torch::jit::EliminateDeadCode(graph_);
  }

 private:
  struct Image {
    Value* value;
    bool follows;  // a convolution, and is no mere view of a sequence
  };

  void lift(Node* node) {
    if (windowsOfImages(node)) {
      liftWindows(node);
    } else if (node->kind() == aten::slice || node->kind() == aten::glu ||
               node->kind() == prim::ConstantChunk) {
      liftParts(node);
    } else if (node->kind() == aten::contiguous) {
      dropCopy(node);
    } else if (node->kind() == prim::ListUnpack) {
      liftUnpacked(node);
    } else if (node->kind() == aten::cat) {
      liftConcatenation(node);
    } else if (node->kind() == aten::mean) {
      liftMean(node);
    } else if (node->kind() == aten::pad || node->kind() == aten::constant_pad_nd) {
      liftPadding(node);
    } else if (const auto count = operandsOfEach(node)) {
      liftEach(node, count);
    }
  }

  // ------------------------------------------------------------------ images

  std::optional<size_t> rank(const Value* value) const {
    const auto found = ranks_.find(value);
    return found == ranks_.end() ? std::nullopt : found->second;
  }

  // The image that is there already, where `reader` sees it, or null.
  const Image* imageOf(const Value* sequence, const Node* reader) const {
    const auto found = images_.find(sequence);
    if (found == images_.end()) {
      return nullptr;
    }
    const auto* home = found->second.value->node()->owningBlock();
    for (const auto* block = reader->owningBlock(); block != home;
         block = block->owningNode()->owningBlock()) {
      if (block->owningNode() == nullptr) {
        return nullptr;
      }
    }
    return &found->second;
  }

  bool follows(const Value* sequence, const Node* reader) const {
    const auto* image = imageOf(sequence, reader);
    return image != nullptr && image->follows;
  }

  // In front of its reader.
  Value* asImage(Value* sequence, Node* reader, bool has_dimensions = true) {
    if (const auto* image = imageOf(sequence, reader)) {
      return image->value;
    }
    auto* source = sequence->node();
    auto* image = has_dimensions
                      ? create(aten::unsqueeze, {sequence, constant(kRow, reader)}, reader)
                  : isRounded(source)  // so that its reader may take it in 8 bit
                      ? clone(source, reader, {{0, asImage(source->input(0), reader, false)}})
                      : create(withRowKind(), {sequence}, reader);
    image->output()->setType(imageType(sequence));
    images_.insert_or_assign(sequence, Image{image->output(), false});
    return image->output();
  }

  // Whether it quantizes with one scale, or dequantizes such, and nobody writes to either.
  bool isRounded(const Node* node) const {
    const auto* quantize = isDequantize(node) ? node->input(0)->node() : node;
    const auto params = isQuantize(quantize) ? quantizeParams(quantize) : std::nullopt;
    return params && params->perTensor() &&
           std::find(nodes_.begin(), nodes_.end(), node) != nodes_.end();
  }

  Value* constant(const c10::IValue& value, Node* before) {
    const torch::jit::WithInsertPoint guard(before);
    return graph_->insertConstant(value);
  }

  // In front of `node`, in whose place it is.
  Node* create(Symbol kind, at::ArrayRef<Value*> inputs, Node* node) {
    auto* created = graph_->create(kind, inputs, 1);
    created->insertBefore(node);
    created->copyMetadata(node);
    return created;
  }

  // A copy in front of `before`, with some inputs that are there already in the place of others.
  Node* clone(Node* node, Node* before, const std::vector<std::pair<size_t, Value*>>& inputs) {
    auto* copy = graph_->createClone(node, [](Value* value) { return value; });
    for (const auto& [i, value] : inputs) {
      copy->replaceInput(i, value);
    }
    copy->insertBefore(before);
    return copy;
  }

  // Views of the images that `image` computes take the place of the sequences.
  void replace(Node* node, Node* image) {
    for (size_t i = 0; i < node->outputs().size(); ++i) {
      auto* sequence = node->output(i);
      image->output(i)->setType(imageType(sequence));
      auto* view = create(aten::squeeze, {image->output(i), constant(kRow, node)}, node)->output();
      view->setType(sequence->type());
      ranks_[view] = rank(sequence);
      images_.insert_or_assign(view, Image{image->output(i), true});
      sequence->replaceAllUsesWith(view);
    }
  }

  // The dimension of an image that is this one of a sequence.
  std::optional<int64_t> dimOf(std::optional<int64_t> dim, const Value* sequence) const {
    if (!dim || *dim < 0) {
      return dim && *dim != -1 ? std::optional(*dim - 1) : dim;
    }
    const auto dims = rank(sequence);
    if (!dims) {
      return std::nullopt;
    }
    return *dim + 1 == static_cast<int64_t>(*dims) ? *dim + 1 : *dim;
  }

  // ------------------------------------------------------------------ convolutions and pooling

  // The lists of a window's numbers, by input; nullopt if one is not known.
  static std::optional<std::vector<std::pair<size_t, std::vector<int64_t>>>> windowOf(
      const Node* node) {
    std::vector<std::pair<size_t, std::vector<int64_t>>> lists;
    for (size_t i = 1; i < node->inputs().size(); ++i) {
      if (!node->input(i)->type()->isSubtypeOf(*c10::ListType::ofInts())) {
        continue;
      }
      const auto numbers = intsOf(node->input(i));
      auto list = numbers ? withRow(node->schema().arguments()[i].name(), *numbers) : std::nullopt;
      if (!list) {
        return std::nullopt;
      }
      lists.emplace_back(i, std::move(*list));
    }
    return lists;
  }

  // Of a constant, maybe cast or dequantized, in front of `node`; null if there is none.
  Value* weightOfImages(Value* weight, Node* node) {
    if (const auto tensor = constantTensor(weight); tensor.defined()) {
      const auto lifted = ofOneRow(tensor);
      return lifted.defined() ? constant(lifted, node) : nullptr;
    }
    auto* data = weightOfImages(weight->node()->input(0), node);
    if (data == nullptr) {
      return nullptr;
    }
    auto* copy = clone(weight->node(), node, {{0, data}});
    copy->output()->setType(imageType(weight));
    return copy->output();
  }

  void liftWindows(Node* node) {
    const bool multiplies = isOfSequences(node);
    const bool pools = !node->hasNamedInput("weight") && follows(node->input(0), node);
    const auto window = multiplies || pools ? windowOf(node) : std::nullopt;
    if (!window) {
      return;
    }
    auto* weight = multiplies ? weightOfImages(node->input(1), node) : nullptr;
    if (multiplies && weight == nullptr) {
      return;
    }
    std::vector<Value*> inputs(node->inputs().begin(), node->inputs().end());
    inputs[0] = asImage(inputs[0], node);  // which a convolution takes none without dimensions for
    if (multiplies) {
      inputs[1] = weight;
    }
    for (const auto& [i, numbers] : *window) {
      inputs[i] = constant(numbers, node);
    }
    if (node->kind() == aten::avg_pool1d) {
      inputs.push_back(constant(c10::IValue(), node));  // no divisor of its own
    }
    replace(node, create(*windowsOfImages(node), inputs, node));
  }

  // ------------------------------------------------------------------ what follows

  void liftEach(Node* node, size_t count) {
    const auto operands = node->inputs().slice(0, count);
    const bool any = std::any_of(operands.begin(), operands.end(),
                                 [&](const Value* value) { return follows(value, node); });
    if (!any || (needsChannels(node) && rank(node->input(0)) != kRank)) {
      return;
    }
    std::vector<std::pair<size_t, Value*>> images;
    for (size_t i = 0; i < count; ++i) {
      if (!isNumber(operands[i])) {
        const bool has_dimensions =
            rank(operands[i]).value_or(0) > 0 || constantTensor(operands[i]).defined();
        images.emplace_back(i, asImage(operands[i], node, has_dimensions));
      }
    }
    replace(node, clone(node, node, images));
  }

  // A copy to contiguous memory that is read by what makes numbers of its own, whatever the order:
  // nobody could tell.
  void dropCopy(Node* copy) {
    auto* sequence = copy->input(0);
    const auto& uses = copy->output()->uses();
    const bool any_order = std::all_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
      const bool computes = !isPlainCast(use.user) && !isIdentity(use.user);
      return (computes && operandsOfEach(use.user) > use.offset) ||
             (use.offset == 0 && isOfSequences(use.user));
    });
    if (any_order && follows(sequence, copy)) {
      copy->output()->replaceAllUsesWith(sequence);
    }
  }

  void liftParts(Node* node) {
    auto* sequence = node->input(0);
    if (!follows(sequence, node) || liftCausal(node)) {
      return;
    }
    const bool chunks = node->kind() == prim::ConstantChunk;
    const auto dim =
        dimOf(chunks ? std::optional(node->i(attr::dim)) : intOf(node->input(1)), sequence);
    if (!dim) {
      return;
    }
    std::vector<std::pair<size_t, Value*>> inputs{{0, asImage(sequence, node)}};
    if (!chunks) {
      inputs.emplace_back(1, constant(*dim, node));
    }
    auto* image = clone(node, node, inputs);
    if (chunks) {
      image->i_(attr::dim, *dim);
    }
    replace(node, image);
  }

  // The parts that a list has been made of.
  void liftUnpacked(Node* node) {
    auto* list = node->input()->node();
    if (!splits(list) || list->inputs().size() != 3 || list->output()->uses().size() != 1 ||
        !follows(list->input(0), node)) {
      return;
    }
    const auto dim = dimOf(intOf(list->input(2)), list->input(0));
    if (!dim) {
      return;
    }
    auto* parts =
        clone(list, node, {{0, asImage(list->input(0), node)}, {2, constant(*dim, node)}});
    replace(node, clone(node, node, {{0, parts->output()}}));
  }

  bool isLast(std::optional<int64_t> dim, const Value* sequence) const {
    return dim == -1 || (dim && rank(sequence) == static_cast<size_t>(*dim) + 1);
  }

  // A slice that drops what the end of a convolution's padding led to: none is put there.
  bool liftCausal(Node* slice) {
    auto* sequence = slice->input(0);
    auto* conv = imageOf(sequence, slice)->value->node();
    if (slice->kind() != aten::slice || !isConvolution(conv) || sequence->uses().size() != 1 ||
        conv->output()->uses().size() != 1 || !isLast(intOf(slice->input(1)), sequence) ||
        !beginsAtFirst(slice) || intOf(slice->input(4)) != 1) {
      return false;
    }
    constexpr size_t kPadding = 4;  // among a convolution's inputs
    const auto end = intOf(slice->input(3));
    const auto padding = intsOf(conv->namedInput("padding"));
    const auto dilation = intsOf(conv->namedInput("dilation"));
    if (!end || !padding || !dilation ||
        intsOf(conv->namedInput("stride")) != std::vector<int64_t>{1, 1}) {
      return false;
    }
    const auto pad = padding->back();
    const auto window = dilation->back() * (constantOf(conv->namedInput("weight")).size(-1) - 1);
    // What is left is not shorter than the sequence, so that there is no end of nothing.
    if (*end >= 0 || -*end > pad || 2 * pad - window + *end < 0) {
      return false;
    }
    auto* padded = create(aten::pad,
                          {conv->input(0), constant(std::vector<int64_t>{pad, pad + *end}, slice),
                           constant("constant", slice), constant(c10::IValue(), slice)},
                          slice);
    padded->output()->setType(paddedType(conv->input(0), 2 * pad + *end));
    auto* none = constant(std::vector<int64_t>{0, 0}, slice);
    auto* image = clone(conv, slice, {{0, padded->output()}, {kPadding, none}});
    slice->output()->setType(paddedType(slice->output(), 0));  // without gaps
    replace(slice, image);
    return true;
  }

  // Of a tensor like `value`, without gaps, whose last dimension is longer by `more`.
  static c10::TypePtr paddedType(const Value* value, int64_t more) {
    const auto type = value->type()->cast<c10::TensorType>();
    auto sizes = type ? type->sizes().concrete_sizes() : std::nullopt;
    if (!sizes || sizes->empty()) {
      return type ? type->dimensionedOnly() : value->type();
    }
    sizes->back() += more;
    return type->withSizes(*sizes);
  }

  void liftConcatenation(Node* node) {
    auto* list = node->input(0)->node();
    if (list->kind() != prim::ListConstruct) {
      return;
    }
    const auto sequences = list->inputs();
    const auto* first = std::find_if(sequences.begin(), sequences.end(),
                                     [&](const Value* value) { return follows(value, node); });
    const bool all = std::all_of(sequences.begin(), sequences.end(), [&](const Value* value) {
      return imageOf(value, node) != nullptr || rank(value) == kRank;
    });
    const auto dim = first != sequences.end() ? dimOf(intOf(node->input(1)), *first) : std::nullopt;
    if (!all || !dim) {
      return;
    }
    std::vector<Value*> images;
    for (auto* sequence : sequences) {
      images.push_back(asImage(sequence, node));
    }
    auto* list_of_images = create(prim::ListConstruct, images, node);
    list_of_images->output()->setType(list->output()->type());
    replace(node, clone(node, node, {{0, list_of_images->output()}, {1, constant(*dim, node)}}));
  }

  // Over the sequence: over row and column.
  void liftMean(Node* node) {
    const auto dims = node->inputs().size() == 4 ? intsOf(node->input(1)) : std::nullopt;
    const auto keeps = dims ? toIValue(node->input(2)) : std::nullopt;
    auto* sequence = node->input(0);
    if (!keeps || dims->size() != 1 || !isLast(dims->front(), sequence) ||
        !follows(sequence, node)) {
      return;
    }
    const std::vector<int64_t> both =
        rank(sequence) == kRank ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{-2, -1};
    auto* image = clone(node, node, {{0, asImage(sequence, node)}, {1, constant(both, node)}});
    if (keeps->toBool()) {
      replace(node, image);
    } else {
      node->output()->replaceAllUsesWith(image->output());
    }
  }

  // By a constant, behind a convolution or of one that reads nothing else.
  void liftPadding(Node* node) {
    auto* sequence = node->input(0);
    const bool fixed = node->kind() == aten::constant_pad_nd ||
                       toIValue(node->input(2)) == c10::IValue("constant");
    auto numbers = intsOf(node->input(1));
    const auto& uses = node->output()->uses();
    const bool before = uses.size() == 1 && uses[0].offset == 0 && isOfSequences(uses[0].user);
    if (!fixed || !numbers || numbers->size() < 2 || numbers->size() % 2 != 0 ||
        (!before && !follows(sequence, node))) {
      return;
    }
    const auto end = numbers->begin() + 2;
    if (end != numbers->end()) {
      numbers->insert(end, {0, 0});
    }
    replace(node, clone(node, node, {{0, asImage(sequence, node)}, {1, constant(*numbers, node)}}));
  }

  const GraphPtr& graph_;
  std::vector<Node*> nodes_;  // whose inputs and outputs nobody writes to
  std::unordered_map<const Value*, std::optional<size_t>> ranks_;
  std::unordered_map<const Value*, Image> images_;
};

}  // namespace

void sequencesAsImages(const GraphPtr& graph) {
  bool any = false;
  walk(graph->block(), [&](const Node* node) { any = any || isOfSequences(node); });
  if (any) {
    Lifting(graph).run();
  }
}

}  // namespace llga

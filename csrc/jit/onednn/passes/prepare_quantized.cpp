// Brings quantized graphs into the shape that has 8-bit values between compute ops:
//
//   %q : Tensor = aten::quantize_per_tensor(%x, %scale, %zero_point, %quint8)
//   %d : Tensor = aten::dequantize(%q)
//   %y : Tensor = aten::conv2d(%d, ...)
//
// is what oneDNN fuses, if the dequantize has no other reader, knows its parameters, and nothing
// stands between it and its reader.
//
// 1. What an aten::dequantize is given is found in the graph and written onto the node.
// 2. Quantizing what has just been dequantized with the same parameters is nothing:
//      quantize(dequantize(%q))  ->  %q
// 3. An op that only moves numbers, or repeats them (nearest upsampling), works on 8-bit ones as
//    well:
//      conv2d(view(dequantize(%q)))   ->  conv2d(dequantize(reshape(%q)))
//      quantize(transpose(conv2d()))  ->  transpose(quantize(conv2d()))
//    (reshape: other strides than those of the float value may forbid a view). So do those that
//    make several results. For aten::pixel_shuffle there is llga::shuffled. So does one that pads
//    with zeros, which copies a float value even where there is nothing to pad:
//      quantize(pad(%x))              ->  llga::padded(quantize(%x))
//    and in front of a convolution, which pads by itself, the float value is padded in the end.
// 4. Max pooling and concatenation give 8-bit values of 8-bit values, and oneDNN fuses them if they
// are
//    quantized on both sides; the parameters are those of the side that has some:
//      conv2d(cat(dequantize(%a), dequantize(%b)))
//                                     ->  conv2d(dequantize(quantize(cat(dequantize(%a), ...))))
//      quantize(max_pool2d(%x))       ->  quantize(max_pool2d(dequantize(quantize(%x))))
//    A mean over the pixels of images, quantized on both sides, becomes a pooling, which it fuses
//    too.
// 5. Sizes are those of the 8-bit value, so that the float one has no other reader:
//      size(%x)              ->  size(quantize(%x))
//      size(dequantize(%q))  ->  size(%q)
// 6. Each reader gets a dequantize of its own: oneDNN takes none that is read twice. The graph
//    fuser joins those again that went into no group.
//
// All rewrites give equal numbers.
#include <c10/util/irange.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <unordered_set>

#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/padded.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace aten = torch::jit::aten;

// An op that only moves numbers, or repeats them, as PyTorch does with 8-bit ones too.
bool movesOrRepeats(const Node* node) {
  return movesNumbers(node) || node->kind() == aten::upsample_nearest2d ||
         node->kind() == aten::pixel_shuffle || node->kind() == shuffledKind();
}

// Whether a prim::ListUnpack alone reads the list that a node makes of a tensor's parts.
bool isUnpackedList(const Node* node) {
  return splits(node) && node->output()->uses().size() == 1 &&
         node->output()->uses()[0].user->kind() == torch::jit::prim::ListUnpack;
}

// Several results, each a slice: of a prim::ConstantChunk, the executor's aten::chunk, or of the
// prim::ListUnpack of a list.
bool givesParts(const Node* node) {
  return node->kind() == torch::jit::prim::ConstantChunk ||
         (node->kind() == torch::jit::prim::ListUnpack && isUnpackedList(node->input(0)->node()) &&
          node->input(0)->node()->owningBlock() == node->owningBlock());
}

// What an op that moves numbers, or splits, is done to.
Node* takerOf(Node* move) {
  return move->kind() == torch::jit::prim::ListUnpack ? move->input(0)->node() : move;
}

// Max pooling and cat: each element of the result is one of those that come in, and which one does
// not change if all are rounded alike.
bool picksNumbers(const Node* node) {
  return node->outputs().size() == 1 && isTensor(node->output()) &&
         (node->kind() == aten::max_pool1d || node->kind() == aten::max_pool2d ||
          node->kind() == aten::max_pool3d ||
          (node->kind() == aten::cat &&
           node->input(0)->node()->kind() == torch::jit::prim::ListConstruct));
}

// The node that has the tensors such an op picks from as inputs, and how many there are.
std::pair<Node*, size_t> sourcesOf(Node* picking) {
  if (picking->kind() == aten::cat) {
    auto* list = picking->input(0)->node();
    return {list, list->inputs().size()};
  }
  return {picking, 1};
}

// Whether a product is a convolution of images.
bool convolvesImages(const Node* product) {
  constexpr size_t kDims = 2;
  const auto stride = isProduct(product) && product->hasNamedInput("stride")
                          ? torch::jit::toIValue(product->namedInput("stride"))
                          : std::nullopt;
  return stride && stride->isIntList() && stride->toIntList().size() == kDims;
}

// The values whose number of dimensions the result of `node` has, the largest of them; none where
// that is not known.
std::vector<const Value*> haveItsDimensions(const Node* node) {
  std::vector<const Value*> found;
  const auto kind = node->kind();
  if (kind == aten::add || kind == aten::sub || kind == aten::mul) {
    std::copy_if(node->inputs().begin(), node->inputs().end(), std::back_inserter(found), isTensor);
  } else if (kind == aten::cat) {
    const auto parts = node->input(0)->node()->inputs();
    if (picksNumbers(node) && !parts.empty()) {
      found.push_back(parts[0]);
    }
  } else if (isDequantize(node) || isQuantize(node) || isActivation(node) || isIdentity(node) ||
             givesParts(node) || splits(node) || picksNumbers(node) || kind == aten::batch_norm) {
    found.push_back(node->input(0));
  }
  return found;
}

// Whether `value` has four dimensions, or three, whatever the inputs are: it comes from
// convolutions of images by ops that keep these.
bool isImage(const Value* value) {
  std::vector<const Value*> open{value};
  std::unordered_set<const Value*> seen;
  while (!open.empty()) {
    const auto* next = open.back();
    open.pop_back();
    if (!seen.insert(next).second || convolvesImages(next->node())) {
      continue;
    }
    const auto sources = haveItsDimensions(next->node());
    if (sources.empty()) {
      return false;
    }
    open.insert(open.end(), sources.begin(), sources.end());
  }
  return true;
}

// mean(x, [2, 3], keepdim=True) of images.
bool isMeanOverPixels(const Node* node) {
  constexpr int64_t kRank = 4;
  if (node->kind() != aten::mean || node->inputs().size() != 4 || !isTensor(node->output())) {
    return false;
  }
  const auto dims = torch::jit::toIValue(node->input(1));
  const auto dtype = torch::jit::toIValue(node->input(3));
  if (!dims || !dims->isIntList() || torch::jit::toIValue(node->input(2)) != c10::IValue(true) ||
      !dtype || !dtype->isNone() || !isImage(node->input(0))) {
    return false;
  }
  auto axes = dims->toIntVector();
  const bool from_end = std::all_of(axes.begin(), axes.end(), [](auto axis) { return axis < 0; });
  for (auto& axis : axes) {
    axis += from_end ? kRank : 0;
  }
  std::sort(axes.begin(), axes.end());
  return axes == std::vector<int64_t>{2, 3};  // so that there are four, or it raises
}

bool isQuantized(Block* block) {
  return std::any_of(block->nodes().begin(), block->nodes().end(), [](Node* node) {
    return isQuantize(node) || isDequantize(node) ||
           std::any_of(node->blocks().begin(), node->blocks().end(), isQuantized);
  });
}

// aten::pad with zeros.
bool padsWithZeros(const Node* node) {
  if (node->kind() != aten::pad || node->inputs().size() != 4) {
    return false;
  }
  const auto value = torch::jit::toIValue(node->input(3));
  return torch::jit::toIValue(node->input(2)) == c10::IValue("constant") && value &&
         (value->isNone() || *value == c10::IValue(0.0));
}

class Preparer {
 public:
  explicit Preparer(const GraphPtr& graph) : graph_(graph) {}

  void run() {
    {
      const AliasDb aliases(graph_);
      collect(graph_->block(), aliases);
    }
    annotate(graph_->block());
    while (rewrite(graph_->block())) {
    }
    readSizes(graph_->block());
    separate(graph_->block());
    padFloats(graph_->block());
    torch::jit::EliminateDeadCode(graph_);
  }

 private:
  // Nodes whose inputs and results nobody writes to: only they are touched.
  void collect(Block* block, const AliasDb& aliases) {
    for (auto* node : block->nodes()) {
      for (auto* nested : node->blocks()) {
        collect(nested, aliases);
      }
      if ((isDequantize(node) || isQuantize(node) || movesOrRepeats(node) || givesParts(node) ||
           picksNumbers(node) || isMeanOverPixels(node) || padsWithZeros(node)) &&
          !aliases.hasWriters(node) &&
          ((node->kind() != aten::cat && takerOf(node) == node) ||
           !aliases.hasWriters(node->input(0)->node()))) {
        pure_.insert(node);
      }
    }
  }

  bool isPure(const Node* node) const { return pure_.count(node) != 0; }

  void destroy(Node* node) {
    pure_.erase(node);  // another one may come to lie there
    node->destroy();
  }

  // The parameters of an 8-bit value.
  std::optional<QuantParams> paramsOfValue(const Value* value) const {
    const auto* node = value->node();
    if (isQuantize(node)) {
      return quantizeParams(node);
    }
    // Channels might become another dimension.
    if (movesOrRepeats(node) || givesParts(node) || isUnpackedList(node)) {
      auto params = paramsOfValue(node->input(0));
      return params && params->perTensor() ? params : std::nullopt;
    }
    return std::nullopt;
  }

  void annotate(Block* block) {
    for (auto* node : block->nodes()) {
      for (auto* nested : node->blocks()) {
        annotate(nested);
      }
      if (const auto made = quantizeParams(node)) {
        copyType(node->input(0), node->output(), made->dtype);
      } else if (isDequantize(node)) {
        const auto params = paramsOfValue(node->input(0));
        if (params && isPure(node)) {
          setDequantizeParams(node, *params);
        }
        describe(node);
      }
    }
  }

  // The type of a dequantized value; for a constant, all of it.
  static void describe(Node* node) {
    if (const auto weight = quantizedConstant(node->output())) {
      node->output()->setType(
          c10::TensorType::createContiguous(at::kFloat, at::kCPU, weight->tensor.sizes()));
    } else {
      setDtype(node->output(), at::kFloat);
    }
  }

  bool rewrite(Block* block) {
    bool changed = false;
    for (auto it = block->nodes().begin(); it != block->nodes().end();) {
      auto* node = *it++;
      for (auto* nested : node->blocks()) {
        changed = rewrite(nested) || changed;
      }
      if (!isPure(node)) {
        continue;
      }
      if (cancel(node) || lift(node) || sink(node) || pool(node)) {
        changed = true;
        removeUnread(node);
      } else if (picksNumbers(node) && (quantizeBehind(node) || quantizeBefore(node))) {
        changed = true;
      }
    }
    return changed;
  }

  // What a rewrite has left behind: as a reader it would stand in the way of others.
  void removeUnread(Node* node) {
    while (!node->inputs().empty() &&
           std::none_of(node->outputs().begin(), node->outputs().end(),
                        [](const Value* output) { return output->hasUses(); }) &&
           (isQuantize(node) || isDequantize(node) || movesOrRepeats(node) || givesParts(node) ||
            splits(node) || padsWithZeros(node))) {
      auto* source = node->input(0)->node();
      destroy(node);
      node = source;
    }
  }

  // quantize(dequantize(%q)) -> %q
  static bool cancel(Node* quantize) {
    if (!isQuantize(quantize) || !quantize->output()->hasUses()) {
      return false;
    }
    const auto* dequantize = quantize->input(0)->node();
    const auto params = dequantizeParams(dequantize);
    if (!params || params != quantizeParams(quantize)) {
      return false;
    }
    quantize->output()->replaceAllUsesWith(dequantize->input(0));
    return true;
  }

  // quantize(move(%x)) -> move(quantize(%x))
  bool lift(Node* quantize) {
    auto* move = quantize->input(0)->node();
    const auto params = quantizeParams(quantize);
    // What copies a part ends there: a group may write it in one piece.
    const bool part =
        takesPart(move) || (move->kind() == aten::contiguous && takesPart(move->input(0)->node()));
    const bool pads = padsWithZeros(move);
    if (!params || !params->perTensor() || !(movesOrRepeats(move) || pads) || part ||
        !isPure(move) || !quantize->output()->hasUses() ||
        move->owningBlock() != quantize->owningBlock() || move->output()->uses().size() != 1) {
      return false;
    }
    auto* lifted = graph_->createClone(quantize, [](Value* v) { return v; });
    lifted->insertBefore(quantize);
    lifted->replaceInput(0, move->input(0));
    copyType(move->input(0), lifted->output(), params->dtype);
    auto* moved = pads ? paddedOn(move, lifted->output(), quantize, params->dtype)
                       : cloneOn(move, lifted->output(), quantize, params->dtype);
    pure_.insert(lifted);
    quantize->output()->replaceAllUsesWith(moved->output());
    return true;
  }

  // move(dequantize(%q)) -> dequantize(move(%q)), on the way to an op that multiplies or quantizes
  bool sink(Node* move) {
    if (!movesOrRepeats(move) && !givesParts(move)) {
      return false;
    }
    auto* dequantize = takerOf(move)->input(0)->node();
    const auto params = dequantizeParams(dequantize);
    if (!params || !params->perTensor() || !isPure(dequantize) || !leadsToCompute(move)) {
      return false;
    }
    auto* moved = cloneOn(move, dequantize->input(0), move, params->dtype);
    for (const auto i : c10::irange(move->outputs().size())) {
      auto* output = move->outputs()[i];
      auto* sunk = graph_->createClone(dequantize, [](Value* v) { return v; });
      sunk->insertBefore(move);
      sunk->replaceInput(0, moved->outputs()[i]);
      sunk->output()->setType(output->type());
      setDtype(sunk->output(), at::kFloat);
      pure_.insert(sunk);
      output->replaceAllUsesWith(sunk->output());
    }
    return true;
  }

  // quantize(mean(dequantize(%q), [2, 3])) -> quantize(adaptive_avg_pool2d(dequantize(%q), [1, 1]))
  bool pool(Node* quantize) {
    auto* mean = quantize->input(0)->node();
    if (!quantizeParams(quantize) || !isMeanOverPixels(mean) || !isPure(mean) ||
        !dequantizeParams(mean->input(0)->node())) {
      return false;
    }
    const torch::jit::WithInsertPoint guard(mean);
    auto* pooled = graph_->insertNode(
        graph_->create(aten::adaptive_avg_pool2d,
                       {mean->input(0), graph_->insertConstant(std::vector<int64_t>{1, 1})}));
    pooled->copyMetadata(mean);
    pooled->output()->setType(mean->output()->type());
    mean->output()->replaceAllUsesWith(pooled->output());
    destroy(mean);
    return true;
  }

  // pick(dequantize(%q)) -> dequantize(quantize(pick(dequantize(%q)))), on the way to such an op
  bool quantizeBehind(Node* pick) {
    const auto [sources, count] = sourcesOf(pick);
    const auto* first = sources->input(0)->node();
    const auto params = dequantizeParams(first);
    const bool alike =
        params && params->perTensor() &&
        std::all_of(sources->inputs().begin(), sources->inputs().begin() + count,
                    [&](const Value* value) {
                      return isPure(value->node()) && dequantizeParams(value->node()) == params;
                    });
    if (!alike || !leadsToProduct(pick)) {
      return false;
    }
    auto* rounded = roundTrip(pick->output(), *params, pick->next());
    pick->output()->replaceAllUsesAfterNodeWith(rounded->node(), rounded);
    return true;
  }

  // quantize(pick(%x)) -> quantize(pick(dequantize(quantize(%x))))
  bool quantizeBefore(Node* pick) {
    const auto& uses = pick->output()->uses();
    if (uses.size() != 1 || uses[0].user->owningBlock() != pick->owningBlock()) {
      return false;
    }
    const auto params = quantizeParams(uses[0].user);
    if (!params || !params->perTensor() || !isPure(uses[0].user)) {
      return false;
    }
    const auto [sources, count] = sourcesOf(pick);
    if (sources != pick && sources->output()->uses().size() != 1) {
      return false;  // somebody else reads the list
    }
    bool changed = false;
    for (const auto i : c10::irange(count)) {
      auto* value = sources->input(i);
      if (!isDequantize(value->node())) {  // other parameters are for oneDNN to convert
        sources->replaceInput(i, roundTrip(value, *params, sources));
        changed = true;
      }
    }
    return changed;
  }

  // dequantize(quantize(value))
  Value* roundTrip(Value* value, const QuantParams& params, Node* before) {
    const torch::jit::WithInsertPoint guard(before);
    auto* quantize = graph_->insertNode(
        graph_->create(Symbol::fromQualString("aten::quantize_per_tensor"),
                       {value, graph_->insertConstant(params.scales.front()),
                        graph_->insertConstant(params.zero_points.front()),
                        graph_->insertConstant(static_cast<int64_t>(params.dtype))}));
    copyType(value, quantize->output(), params.dtype);
    auto* dequantize = graph_->insertNode(
        graph_->create(Symbol::fromQualString("aten::dequantize"), {quantize->output()}));
    dequantize->output()->setType(value->type());
    setDtype(dequantize->output(), at::kFloat);
    setDequantizeParams(dequantize, params);
    for (auto* node : {quantize, dequantize}) {
      node->copyMetadata(value->node());
      pure_.insert(node);
    }
    return dequantize->output();
  }

  // Through moves and picks, to an op that multiplies.
  static bool leadsToProduct(const Node* node) {
    return std::any_of(node->outputs().begin(), node->outputs().end(), [](const Value* output) {
      const auto& uses = output->uses();
      return std::any_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
        return isProduct(use.user) || ((movesOrRepeats(use.user) || picksNumbers(use.user) ||
                                        use.user->kind() == torch::jit::prim::ListConstruct) &&
                                       use.offset == 0 && leadsToProduct(use.user));
      });
    });
  }

  static bool leadsToCompute(const Node* move) {
    return std::any_of(move->outputs().begin(), move->outputs().end(), [](const Value* output) {
      const auto& uses = output->uses();
      return std::any_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
        return isProduct(use.user) || use.user->kind() == aten::scaled_dot_product_attention ||
               (isQuantize(use.user) && use.offset == 0) ||
               ((movesOrRepeats(use.user) || givesParts(use.user) || isUnpackedList(use.user)) &&
                use.offset == 0 && leadsToCompute(use.user));
      });
    });
  }

  // `move`, done to 8-bit numbers.
  Node* cloneOn(Node* move, Value* source, Node* before, at::ScalarType dtype) {
    auto* copy = graph_->createClone(move, [](Value* v) { return v; });
    copy->insertBefore(before);
    if (auto* taker = takerOf(move); taker != move) {
      auto* list = graph_->createClone(taker, [](Value* v) { return v; });
      list->insertBefore(copy);
      list->replaceInput(0, source);
      source = list->output();
    }
    copy->replaceInput(0, source);
    if (copy->kind() == aten::view || copy->kind() == aten::pixel_shuffle) {
      const auto kind = copy->kind() == aten::view ? Symbol(aten::reshape) : shuffledKind();
      auto* other = graph_->create(kind, copy->inputs(), 1);
      other->copyMetadata(copy)->insertBefore(copy);
      copy->destroy();
      copy = other;
    }
    for (const auto i : c10::irange(move->outputs().size())) {
      copyType(move->outputs()[i], copy->outputs()[i], dtype);
    }
    pure_.insert(copy);
    return copy;
  }

  // What pads 8-bit numbers as `pad` does floats.
  Node* paddedOn(Node* pad, Value* source, Node* before, at::ScalarType dtype) {
    auto* padded = graph_->create(paddedKind(), pad->inputs());
    padded->copyMetadata(pad)->insertBefore(before);
    padded->replaceInput(0, source);
    copyType(pad->output(), padded->output(), dtype);
    return padded;
  }

  // Sizes stay, strides are others.
  static void copyType(const Value* from, Value* to, at::ScalarType dtype) {
    const auto type = from->type()->cast<c10::TensorType>();
    to->setType((type ? type : c10::TensorType::get())
                    ->withStrides(c10::VaryingShape<c10::Stride>())
                    ->withScalarType(dtype));
  }

  void readSizes(Block* block) {
    for (auto* node : block->nodes()) {
      for (auto* nested : node->blocks()) {
        readSizes(nested);
      }
      if ((!isQuantize(node) && !dequantizeParams(node)) || !isPure(node)) {
        continue;
      }
      auto* from = isQuantize(node) ? node->input(0) : node->output();
      auto* to = isQuantize(node) ? node->output() : node->input(0);
      const auto uses = from->uses();
      for (const auto& use : uses) {
        if (use.user->kind() == aten::size && use.user->owningBlock() == block &&
            use.user->isAfter(node)) {
          use.user->replaceInput(use.offset, to);
        }
      }
    }
  }

  void separate(Block* block) {
    for (auto it = block->nodes().begin(); it != block->nodes().end();) {
      auto* node = *it++;
      for (auto* nested : node->blocks()) {
        separate(nested);
      }
      if (!dequantizeParams(node)) {
        continue;
      }
      const auto uses = node->output()->uses();
      for (const auto i :
           c10::irange(size_t{1}, uses.size())) {  // the first one keeps the original
        const auto& use = uses[i];
        if (use.user->owningBlock() == block && use.user != block->return_node()) {
          auto* copy = graph_->createClone(node, [](Value* v) { return v; });
          copy->insertBefore(use.user);
          use.user->replaceInput(use.offset, copy->output());
        }
      }
    }
  }

  // conv2d(dequantize(llga::padded(%q))) -> conv2d(pad(dequantize(%q)))
  void padFloats(Block* block) {
    for (auto* node : block->nodes()) {
      for (auto* nested : node->blocks()) {
        padFloats(nested);
      }
      if (!isConvolution(node) || !padsPixels(node->input(0)->node(), node)) {
        continue;
      }
      auto* read = node->input(0)->node();
      auto* padded = read->input(0)->node();
      auto* dequantize = graph_->createClone(read, [](Value* v) { return v; });
      dequantize->insertBefore(node)->replaceInput(0, padded->input(0));
      copyType(padded->input(0), dequantize->output(), at::kFloat);
      auto* pad = graph_->create(aten::pad, padded->inputs());
      pad->copyMetadata(padded)->insertBefore(node);
      pad->replaceInput(0, dequantize->output());
      pad->output()->setType(node->input(0)->type());
      node->replaceInput(0, pad->output());
    }
  }

  // Whether the node dequantizes what is padded, for this convolution alone, in dimensions that
  // this has a window in.
  static bool padsPixels(const Node* dequantize, const Node* convolution) {
    if (!dequantizeParams(dequantize) || dequantize->output()->uses().size() != 1 ||
        dequantize->input(0)->node()->kind() != paddedKind() ||
        !convolution->hasNamedInput("stride")) {
      return false;
    }
    const auto pads = intsOf(dequantize->input(0)->node()->input(1));
    const auto stride = intsOf(convolution->namedInput("stride"));
    return pads && stride && pads->size() <= 2 * stride->size() &&
           std::all_of(pads->begin(), pads->end(), [](int64_t pad) { return pad >= 0; });
  }

  GraphPtr graph_;
  std::unordered_set<const Node*> pure_;
};

}  // namespace

void prepareQuantized(const GraphPtr& graph) {
  if (isQuantized(graph->block())) {
    Preparer(graph).run();
  }
}

}  // namespace llga

// Brings what cuts an image into windows next to the attention, which has it inside its group then
// (attention_moves.h): a linear layer computes each row alone, whatever the order of rows.
//
//   %2 : Tensor = aten::roll(%x, ...)                    # rows: the numbers of the last dimension
//   %3 : Tensor = aten::view(%2, [%n, 8, 7, 8, 7, 96])
//   %4 : Tensor = aten::permute(%3, [0, 1, 3, 2, 4, 5])
//   %5 : Tensor = aten::reshape(%4, [%m, 49, 96])
//   %6 : Tensor = aten::linear(%5, %weight, %bias)       # and from it query, key and value
// ->
//   %7 : Tensor = aten::linear(%x, %weight, %bias)
//   %8 : Tensor = aten::roll(%7, ...)
//   %9 : Tensor = aten::reshape(%8, [%n, 8, 7, 8, 7, 288])
//   ...
//
// and behind it the other way round: the moves come before the linear layer that reads the result.
// Only where a kernel of our own computes the attention. That the last dimension is the same all
// the way, and not rolled, has to follow from what is computed (known_shapes.h).
//
// What pads an image to whole windows copies it where there is nothing to pad, too. Where nobody
// could tell a copy from the image itself, it becomes
//
//   %2 : Tensor = llga::padded(%x, ...)
//
// which is the image then.
#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "jit/onednn/attention_moves.h"
#include "jit/onednn/graph_helper.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/padded.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;
using torch::jit::AliasDb;
using torch::jit::toIValue;
using torch::jit::WithInsertPoint;

bool isConstantOrNone(const Value* value) { return toIValue(value).has_value(); }

// Whether a node reads of its first input nothing but what it has in common with those that it is
// made of by moves: data type and device.
bool readsOptions(const Node* node) {
  switch (node->kind()) {
    case prim::device:
    case prim::dtype:
    case aten::new_empty:
    case aten::new_full:
    case aten::new_ones:
    case aten::new_zeros:
      return true;
    default:
      return false;
  }
}

bool readsNoNumber(const Node* node) { return readsShape(node) || readsOptions(node); }

// Sizes of a linear layer's data and results, if its weight is a constant.
struct Widths {
  int64_t in;
  int64_t out;
};

std::optional<Widths> widthsOf(const Node* node) {
  if (node->kind() != aten::linear) {
    return std::nullopt;
  }
  const auto weight = toIValue(node->input(1));
  const bool matrix = weight && weight->isTensor() && weight->toTensor().dim() == 2;
  if (!matrix || !isConstantOrNone(node->input(2))) {
    return std::nullopt;
  }
  return Widths{weight->toTensor().size(1), weight->toTensor().size(0)};
}

class Sinker {
 public:
  explicit Sinker(const GraphPtr& graph) : graph_(graph), aliases_(graph) {}

  void run(Block* block) {
    std::vector<AttentionCore> cores;
    for (auto* node : block->nodes()) {
      for (auto* nested : node->blocks()) {
        run(nested);
      }
      if (auto core = ownAttentionAt(node)) {
        cores.push_back(std::move(*core));
      }
    }
    for (const auto& core : cores) {
      before(core);
      behind(core);
    }
  }

 private:
  // ------------------------------------------------------------------------- before the attention

  void before(const AttentionCore& core) {
    std::vector<Node*> layers;
    for (const auto* operand : {core.query, core.key, core.value}) {
      const auto split = movesBefore(operand);
      auto* layer = (split.empty() ? operand : split.back()->input(0))->node();
      if (widthsOf(layer) && layer->owningBlock() == core.result->node()->owningBlock() &&
          std::find(layers.begin(), layers.end(), layer) == layers.end()) {
        layers.push_back(const_cast<Node*>(layer));
      }
    }
    const bool alike = std::all_of(layers.begin(), layers.end(), [&](const Node* layer) {
      return layer->input(0) == layers[0]->input(0);
    });
    if (!layers.empty() && alike && readsAlone(core, layers)) {
      lift(layers);
    }
  }

  // Whether what the layers give is read for the attention, and nothing else.
  static bool readsAlone(const AttentionCore& core, const std::vector<Node*>& layers) {
    std::unordered_set<const Node*> readers(core.nodes.begin(), core.nodes.end());
    std::vector<const Value*> values;
    for (const auto* operand : {core.query, core.key, core.value}) {
      for (const auto* move : movesBefore(operand)) {
        readers.insert(move);
        values.push_back(move->output());
      }
    }
    const auto isOurs = [&](const torch::jit::Use& use) { return readers.count(use.user) != 0; };
    return std::all_of(values.begin(), values.end(),
                       [&](const Value* value) {
                         return std::all_of(value->uses().begin(), value->uses().end(), isOurs);
                       }) &&
           std::all_of(layers.begin(), layers.end(), [&](const Node* layer) {
             const auto& uses = layer->output()->uses();
             return std::all_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
               return readsShape(use.user) || isOurs(use);
             });
           });
  }

  // Layers that read the same rows.
  void lift(const std::vector<Node*>& layers) {
    const auto* rows = layers[0]->input(0);
    const auto width = widthsOf(layers[0])->in;
    assumeLast(rows, width);
    auto moves = movesBefore(rows);
    const auto end = std::find_if(moves.begin(), moves.end(),
                                  [&](const Node* move) { return !keepsRows(move, width); });
    moves.erase(end, moves.end());
    if (std::none_of(moves.begin(), moves.end(), regroupsRows)) {
      return;
    }
    for (const auto* move : moves) {
      const auto& readers = move->output()->uses();
      const bool ours = std::all_of(readers.begin(), readers.end(), [&](const auto& use) {
        return readsNoNumber(use.user) ||
               std::find(moves.begin(), moves.end(), use.user) != moves.end() ||
               std::find(layers.begin(), layers.end(), use.user) != layers.end();
      });
      if (!ours || isWritten(move)) {
        return;
      }
    }
    if (std::any_of(layers.begin(), layers.end(),
                    [&](const Node* layer) { return isWritten(layer); })) {
      return;
    }
    std::reverse(moves.begin(), moves.end());
    auto* source = moves.front()->input(0);
    if (!askElsewhere(moves, source, width)) {
      return;
    }
    if (mayBeInput(source->node(), moves)) {
      source = withoutCopy(source->node());
    }
    for (auto* layer : layers) {
      const auto out = widthsOf(layer)->out;
      if (!askElsewhere({layer}, layer->input(0), out)) {
        return;
      }
      auto* lifted = graph_->createClone(layer, [](Value* value) { return value; });
      lifted->insertBefore(moves.front());
      lifted->replaceInput(0, source);
      for (auto* constant : {lifted->input(1)->node(), lifted->input(2)->node()}) {
        if (!constant->isBefore(lifted)) {
          constant->moveBefore(lifted);
        }
      }
      giveType(lifted->output(), source, layer->output(), out);
      layer->output()->replaceAllUsesWith(cloned(moves, lifted->output(), layer->output(), out));
    }
  }

  // Whether nobody can tell what a padding gives from its input, where it pads nothing: it is read
  // by the first of these moves, which linear layers will stand in for, and no one writes to
  // either.
  bool mayBeInput(const Node* pad, const std::vector<Node*>& moves) const {
    if (pad->kind() != aten::pad || isWritten(pad)) {
      return false;
    }
    const auto& uses = pad->output()->uses();
    return std::all_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
      return readsNoNumber(use.user) || use.user == moves.front();
    });
  }

  Value* withoutCopy(Node* pad) {
    auto* padded = graph_->create(paddedKind(), pad->inputs());
    padded->copyMetadata(pad);
    padded->insertBefore(pad);
    padded->output()->setType(pad->output()->type());
    pad->output()->replaceAllUsesWith(padded->output());
    return padded->output();
  }

  // ------------------------------------------------------------------------- behind the attention

  void behind(const AttentionCore& core) {
    const auto joined = movesBehind(core.result);
    auto* rows = joined.empty() ? const_cast<Value*>(core.result) : joined.back()->output();
    if (rows->uses().size() != 1 || rows->uses()[0].offset != 0) {
      return;
    }
    auto* layer = rows->uses()[0].user;
    const auto widths = widthsOf(layer);
    if (!widths || layer->owningBlock() != core.result->node()->owningBlock()) {
      return;
    }
    std::vector<Node*> moves;
    for (auto* value = layer->output();;) {
      auto* reader = soleMove(value);
      if (reader == nullptr || !keepsRows(reader, widths->out)) {
        break;
      }
      moves.push_back(reader);
      value = reader->output();
    }
    while (!moves.empty() && !regroupsRows(moves.back()) &&
           moves.back()->kind() != aten::contiguous) {
      moves.pop_back();
    }
    const bool written =
        std::any_of(moves.begin(), moves.end(), [&](const Node* move) { return isWritten(move); });
    if (std::none_of(moves.begin(), moves.end(), regroupsRows) || written || isWritten(layer)) {
      return;
    }
    auto* last = moves.back();
    const std::vector<Node*> inner(moves.begin(), moves.end() - 1);
    if (!askElsewhere({layer}, rows, widths->out) ||
        !askElsewhere(inner, layer->output(), widths->out)) {
      return;
    }
    auto* regrouped = cloned(moves, rows, rows, widths->in);
    auto* sunk = graph_->createClone(layer, [](Value* value) { return value; });
    sunk->insertBefore(last);
    sunk->replaceInput(0, regrouped);
    giveType(sunk->output(), last->output(), layer->output(), widths->out);
    last->output()->replaceAllUsesWith(sunk->output());
  }

  // The node that moves `value`, if nobody else reads its numbers.
  static Node* soleMove(const Value* value) {
    Node* found = nullptr;
    for (const auto& use : value->uses()) {
      if (readsShape(use.user)) {
        continue;
      }
      if (found != nullptr || use.offset != 0 || !movesRows(use.user) ||
          use.user->owningBlock() != value->node()->owningBlock()) {
        return nullptr;
      }
      found = use.user;
    }
    return found;
  }

  // --------------------------------------------------------------------------------- what is known

  bool isWritten(const Node* node) const {
    return aliases_.hasWriters(node->input(0)) || aliases_.hasWriters(node->output());
  }

  // If `value` is a view, its last size is `width`.
  void assumeLast(const Value* value, int64_t width) {
    const auto* node = value->node();
    if ((node->kind() == aten::view || node->kind() == aten::reshape) &&
        node->input(1)->node()->kind() == prim::ListConstruct) {
      shapes_.assume(node->input(1)->node()->inputs().back(), width);
    }
  }

  // Whether each row of what it gives is a row of what it gets, both of `width` numbers, if one of
  // them is.
  bool keepsRows(const Node* move, int64_t width) {
    const auto rank = shapes_.rank(move->input(0));
    const auto isLast = [&](int64_t dim) {
      return dim == -1 || !rank || dim + 1 == static_cast<int64_t>(*rank);
    };
    switch (move->kind()) {
      case aten::view:
      case aten::reshape:
        return shapes_.last(move->output()) == width && shapes_.last(move->input(0)) == width;
      case aten::contiguous:
        return toIValue(move->input(1)) ==
               c10::IValue(static_cast<int64_t>(c10::MemoryFormat::Contiguous));
      case aten::permute: {
        const auto dims = intsOf(move->input(1));
        return dims && !dims->empty() &&
               (dims->back() == -1 || dims->back() + 1 == static_cast<int64_t>(dims->size()));
      }
      case aten::transpose: {
        const auto from = intOf(move->input(1));
        const auto to = intOf(move->input(2));
        return from && to && !isLast(*from) && !isLast(*to);
      }
      case aten::roll: {
        const auto dims = intsOf(move->input(2));
        return dims && !dims->empty() && std::none_of(dims->begin(), dims->end(), isLast);
      }
      case aten::slice: {
        const auto dim = intOf(move->input(1));
        return dim && (!isLast(*dim) || takesAll(move));
      }
      default:
        return false;
    }
  }

  // --------------------------------------------------------------------------------------- sizes

  // Lets those that ask for sizes of what these nodes give, in the order of execution, know them
  // without it; `source` is what the first one gets. False if that can't be done for all.
  bool askElsewhere(const std::vector<Node*>& nodes, Value* source, int64_t last) {
    for (auto* node : nodes) {
      const auto uses = node->output()->uses();
      for (const auto& use : uses) {
        if (readsOptions(use.user) && movesRows(node)) {
          use.user->replaceInput(0, source);
          continue;
        }
        if (!readsShape(use.user)) {
          continue;
        }
        const auto rank = shapes_.rank(node->output());
        const auto dim = use.user->inputs().size() == 2 ? intOf(use.user->input(1)) : std::nullopt;
        if (!rank || !dim || use.user->kind() != aten::size) {
          return false;
        }
        const auto index = *dim < 0 ? *dim + static_cast<int64_t>(*rank) : *dim;
        const WithInsertPoint guard(use.user);
        auto* size = index + 1 == static_cast<int64_t>(*rank)
                         ? graph_->insertConstant(last)
                         : sizeOf(node->output(), index, source);
        if (size == nullptr) {
          return false;
        }
        use.user->output()->replaceAllUsesWith(size);
      }
    }
    return true;
  }

  // A size other than the last, from what is above; null if it is unknown.
  Value* sizeOf(Value* value, int64_t dim, const Value* source) {
    auto* node = value->node();
    if (value == source) {
      return graph_->insert(aten::size, {value, dim});
    }
    switch (node->kind()) {
      case aten::linear:
      case aten::contiguous:
      case aten::roll:
        return sizeOf(node->input(0), dim, source);
      case aten::transpose: {
        const auto from = *intOf(node->input(1));
        const auto to = *intOf(node->input(2));
        if (from < 0 || to < 0) {
          return nullptr;
        }
        return sizeOf(node->input(0), dim == from ? to : dim == to ? from : dim, source);
      }
      case aten::permute: {
        const auto dims = intsOf(node->input(1));
        const auto from = dims->at(static_cast<size_t>(dim));
        return from < 0 ? nullptr : sizeOf(node->input(0), from, source);
      }
      case aten::view:
      case aten::reshape: {
        auto* list = node->input(1)->node();
        if (list->kind() != prim::ListConstruct) {
          const auto sizes = intsOf(node->input(1));
          const auto size = sizes ? sizes->at(static_cast<size_t>(dim)) : -1;
          return size < 0 ? nullptr : graph_->insertConstant(size);
        }
        auto* size = list->inputs()[static_cast<size_t>(dim)];
        return intOf(size) == -1 ? inferredSize(node, dim, source) : size;
      }
      default:
        return nullptr;
    }
  }

  // What a view makes of -1.
  Value* inferredSize(Node* view, int64_t dim, const Value* source) {
    const auto rank = shapes_.rank(view->input(0));
    if (!rank) {
      return nullptr;
    }
    auto* product = graph_->insertConstant(int64_t{1});
    for (const auto i : c10::irange(*rank - 1)) {
      auto* size = sizeOf(view->input(0), static_cast<int64_t>(i), source);
      if (size == nullptr) {
        return nullptr;
      }
      product = graph_->insert(aten::mul, {product, size});
    }
    const auto sizes = view->input(1)->node()->inputs();
    for (const auto i : c10::irange(sizes.size() - 1)) {
      if (static_cast<int64_t>(i) != dim) {
        product = graph_->insert(aten::floordiv, {product, sizes[i]});
      }
    }
    return product;
  }

  // -------------------------------------------------------------------------------------- clones

  // The moves, of rows of another width, each next to its original. `like`: of the data type.
  Value* cloned(const std::vector<Node*>& moves, Value* rows, const Value* like, int64_t width) {
    for (auto* move : moves) {
      const WithInsertPoint guard(move);
      auto* clone = graph_->createClone(move, [](Value* value) { return value; });
      if (move->kind() == aten::view || move->kind() == aten::reshape) {
        auto* view = graph_->create(aten::reshape, {rows, sizesFor(move, width)});
        view->copyMetadata(move);
        clone->destroy();
        clone = view;
      }
      graph_->insertNode(clone);
      clone->replaceInput(0, rows);
      giveType(clone->output(), move->output(), like, width);
      rows = clone->output();
    }
    return rows;
  }

  Value* sizesFor(Node* view, int64_t width) {
    if (auto sizes = intsOf(view->input(1))) {
      sizes->back() = width;
      return graph_->insertConstant(*sizes);
    }
    auto sizes = view->input(1)->node()->inputs().vec();
    sizes.back() = graph_->insertConstant(width);
    return graph_->insertNode(graph_->createList(c10::IntType::get(), sizes))->output();
  }

  // The type of rows like those of `rows`, but of `width` numbers of another data type.
  static void giveType(Value* value, const Value* rows, const Value* like, int64_t width) {
    const auto dtype = like->type()->expect<c10::TensorType>()->scalarType();
    const auto sizes = rows->type()->expect<c10::TensorType>()->sizes().concrete_sizes();
    if (!dtype || !sizes || sizes->empty()) {
      value->setType(c10::TensorType::get()->withScalarType(dtype));
      return;
    }
    auto widened = *sizes;
    widened.back() = width;
    value->setType(c10::TensorType::createContiguous(*dtype, at::kCPU, widened));
  }

  const GraphPtr& graph_;
  const AliasDb aliases_;
  KnownShapes shapes_;
};

}  // namespace

void sinkWindows(const GraphPtr& graph) {
  Sinker(graph).run(graph->block());
  torch::jit::EliminateDeadCode(graph);
}

}  // namespace llga

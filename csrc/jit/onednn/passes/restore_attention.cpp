// Attention of torch.nn.MultiheadAttention, which puts sequences first, and heads beside the batch,
// becomes what other networks write: batch first, where its data is.
//
//   %1 : Tensor = aten::transpose(%x, 1, 0)
//   %2 : Tensor = aten::linear(%1, %weight, %bias)                        # l x b x e
//   %3 : Tensor = aten::transpose(aten::view(%2, [l, b * h, d]), 0, 1)
//   %q : Tensor = aten::view(%3, [b, h, l, d])
//   %4 : Tensor = aten::scaled_dot_product_attention(%q, %k, %v, ...)
//   %5 : Tensor = aten::reshape(aten::permute(%4, [2, 0, 1, 3]), [b * l, e])
//   %6 : Tensor = aten::linear(%5, %weight_of_result, %bias_of_result)
//   %7 : Tensor = aten::transpose(aten::view(%6, [l, b, e]), 1, 0)
// ->
//   %2 : Tensor = aten::linear(%x, %weight, %bias)                        # b x l x e
//   %q : Tensor = aten::transpose(aten::view(%2, [b, l, h, d]), 1, 2)
//   %4 : Tensor = aten::scaled_dot_product_attention(%q, %k, %v, ...)
//   %5 : Tensor = aten::reshape(aten::transpose(%4, 1, 2), [b, l, e])
//   %7 : Tensor = aten::linear(%5, %weight_of_result, %bias_of_result)
//
// Queries, keys and values that one layer gives, and that are copied to lie one behind the other,
// are slices of what it gives:
//
//   select(contiguous(squeeze(transpose(unsqueeze(unflatten(%2, -1, [3, e]), 0), 0, -2), -2)), 0,
//   1)
// ->
//   slice(%2, -1, e, 2 * e, 1)
//
// So the layers read memory as it lies, the residual sum behind is in the group of the last one,
// and nothing is copied. Numbers are the same ones. Sizes have to be what they look like for any
// input: h and e are constants, l and b are asked of what the layers read, and d is e / h then, as
// views keep the number of elements. Nothing that is written to is touched. The heads' weights of
// the whole (need_weights) are left alone.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

// The sizes that `node` views its first input with; empty if it is no view of as many dimensions.
std::vector<Value*> sizesOfView(Node* node, size_t rank) {
  if (node->kind() != aten::view && node->kind() != aten::reshape) {
    return {};
  }
  auto* list = node->input(1)->node();
  if (list->kind() != prim::ListConstruct || list->inputs().size() != rank) {
    return {};
  }
  return list->inputs().vec();
}

// Whether it exchanges the first two dimensions.
bool swapsFirst(const Node* node) {
  if (node->kind() != aten::transpose) {
    return false;
  }
  const auto a = intOf(node->input(1));
  const auto b = intOf(node->input(2));
  return (a == 0 && b == 1) || (a == 1 && b == 0);
}

// One of the parts, each of `width` numbers, of what a layer gives.
struct Part {
  Value* whole;
  int64_t index;
  int64_t width;
  std::vector<Node*> nodes;  // that take it out
};

// The part that an aten::select takes out of a copy that has parts one behind the other.
std::optional<Part> partOf(Node* select) {
  if (select->kind() != aten::select || intOf(select->input(1)) != 0) {
    return std::nullopt;
  }
  struct Step {
    Symbol kind;
    std::vector<int64_t> numbers;
  };
  static const std::vector<Step> steps{{aten::contiguous, {0}},
                                       {aten::squeeze, {-2}},
                                       {aten::transpose, {0, -2}},
                                       {aten::unsqueeze, {0}},
                                       {aten::unflatten, {-1}}};
  Part part{nullptr, intOf(select->input(2)).value_or(-1), 0, {select}};
  for (const auto& step : steps) {
    auto* node = part.nodes.back()->input(0)->node();
    if (node->kind() != step.kind || node->inputs().size() <= step.numbers.size()) {
      return std::nullopt;
    }
    for (size_t i = 0; i < step.numbers.size(); ++i) {
      if (intOf(node->input(i + 1)) != step.numbers[i]) {
        return std::nullopt;
      }
    }
    part.nodes.push_back(node);
  }
  auto* sizes = part.nodes.back()->input(2)->node();
  if (sizes->kind() != prim::ListConstruct || sizes->inputs().size() != 2) {
    return std::nullopt;
  }
  part.whole = part.nodes.back()->input(0);
  part.width = intOf(sizes->input(1)).value_or(0);
  const bool fits = part.index >= 0 && part.index < intOf(sizes->input(0)).value_or(0);
  return fits && part.width > 0 ? std::optional(std::move(part)) : std::nullopt;
}

// A size of a tensor, or another integer, with no dimension.
using Source = std::pair<const Value*, int64_t>;

Source sourceOf(const Value* integer);

// Where a size comes from: the first tensor that has it, among those that these ops read, of which
// linear layers and parts are known to keep the first two.
Source sourceOf(const Value* tensor, int64_t dim) {
  for (;;) {
    auto* node = const_cast<Node*>(tensor->node());
    if (swapsFirst(node)) {
      dim = dim < 2 ? 1 - dim : dim;
      tensor = node->input(0);
    } else if (node->kind() == aten::linear && dim < 2) {
      tensor = node->input(0);
    } else if (const auto part = dim < 2 ? partOf(node) : std::nullopt) {
      tensor = part->whole;
    } else if (const auto sizes = sizesOfView(node, 3); !sizes.empty() && dim < 3) {
      return sourceOf(sizes[static_cast<size_t>(dim)]);
    } else {
      return {tensor, dim};
    }
  }
}

Source sourceOf(const Value* integer) {
  const auto* node = integer->node();
  const auto dim = node->kind() == aten::size && node->inputs().size() == 2 ? intOf(node->input(1))
                                                                            : std::nullopt;
  return dim && *dim >= 0 ? sourceOf(node->input(0), *dim) : Source{integer, -1};
}

class Restorer {
 public:
  explicit Restorer(const GraphPtr& graph) : graph_(graph), aliases_(graph) {}

  void run() {
    std::vector<Node*> found;
    walk(graph_->block(), [&](Node* node) {
      if (node->kind() == aten::scaled_dot_product_attention) {
        found.push_back(node);
      }
    });
    std::for_each(found.begin(), found.end(), [this](Node* node) { restore(node); });
  }

 private:
  // Queries, keys or values: what a linear layer gives, or a part of that, by heads.
  struct Heads {
    Node* layer;
    std::optional<Part> part;
    Value* data;  // of the layer, batch first; null where that is not exchanged in front of it
    int64_t heads;
    int64_t size;            // of each
    const Value* same_size;  // as the network has it
    Source length;           // of the sequence
    Source batch;
    // With which it is viewed: the batch of queries, and with its heads; the length of keys.
    const Value* viewed_batch;
    const Value* viewed_rows;
    const Value* viewed_length;
  };

  // The linear layer behind the attention, and what puts the batch first again.
  struct Result {
    Node* layer;
    Node* last;
  };

  void restore(Node* attention) {
    std::vector<Heads> operands;
    for (size_t i = 0; i < 3; ++i) {
      auto heads = headsOf(attention->input(i));
      if (!heads) {
        return;
      }
      operands.push_back(*std::move(heads));
      const auto& query = operands[0];
      const auto& other = operands[i];
      if ((other.data == nullptr) != (query.data == nullptr) || other.heads != query.heads ||
          other.size != query.size || !isSame(other.same_size, query.same_size) ||
          !isSame(other.viewed_batch, query.viewed_batch) ||
          !isSame(other.viewed_rows, query.viewed_rows)) {
        return;
      }
    }
    // Keys and values have the same batch then, and the length that they are viewed with, as a view
    // keeps the number of elements.
    const auto& query = operands[0];
    if (sourceOf(query.viewed_batch) != query.batch ||
        sourceOf(query.viewed_length) != query.length) {
      return;
    }
    for (size_t i = 0; i < operands.size(); ++i) {
      attention->replaceInput(i, byHeads(operands[i], attention));
    }
    const auto result = query.data != nullptr ? resultOf(attention, query) : std::nullopt;
    if (result) {
      putBatchFirst(attention, query, *result);
    }
  }

  // Whether two integers are the same one.
  static bool isSame(const Value* a, const Value* b) {
    const auto isProduct = [](const Value* value) {
      return value->node()->kind() == aten::mul && value->node()->inputs().size() == 2;
    };
    return a == b || (intOf(a) && intOf(a) == intOf(b)) || sourceOf(a) == sourceOf(b) ||
           (isProduct(a) && isProduct(b) && isSame(a->node()->input(0), b->node()->input(0)) &&
            isSame(a->node()->input(1), b->node()->input(1)));
  }

  bool isWritten(const std::vector<Node*>& nodes) const {
    return std::any_of(nodes.begin(), nodes.end(), [this](const Node* node) {
      return aliases_.hasWriters(node->output()) || aliases_.hasWriters(node->input(0));
    });
  }

  // Whether others read what one of them gives, so that it would be computed twice; what is copied
  // to have its parts apart has several readers.
  static bool isReadBeside(const std::vector<Node*>& nodes) {
    return std::any_of(nodes.begin(), nodes.end(), [](const Node* node) {
      const auto& uses = node->output()->uses();
      const auto readers = std::count_if(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
        return !readsShape(use.user);
      });
      return readers != 1 && node->kind() != aten::contiguous;
    });
  }

  std::optional<Heads> headsOf(Value* operand) {
    auto* outer = operand->node();
    const auto by_heads = sizesOfView(outer, 4);
    auto* swap = outer->inputs().empty() ? nullptr : outer->input(0)->node();
    if (by_heads.empty() || !swapsFirst(swap)) {
      return std::nullopt;
    }
    auto* inner = swap->input(0)->node();
    const auto by_rows = sizesOfView(inner, 3);
    if (by_rows.empty()) {
      return std::nullopt;
    }
    auto* given = inner->input(0);
    auto part = partOf(given->node());
    auto* layer = (part ? part->whole : given)->node();
    if (layer->kind() != aten::linear) {
      return std::nullopt;
    }
    std::vector<Node*> nodes{outer, swap, inner, layer};
    if (part) {
      nodes.insert(nodes.end(), part->nodes.begin(), part->nodes.end());
    }
    const auto heads = intOf(by_heads[1]).value_or(0);
    const auto width = part ? part->width : shapes_.last(given).value_or(0);
    const auto length = sourceOf(given, 0);
    auto* data = layer->input(0);
    // A matrix would have its last size for the batch.
    const bool fits = heads > 0 && width > 0 && width % heads == 0 &&
                      isSame(by_rows[2], by_heads[3]) && sourceOf(by_rows[0]) == length &&
                      shapes_.last(data).value_or(1) > 1 &&
                      shapes_.rank(layer->input(1)) == size_t{2};
    const bool swapped = swapsFirst(data->node());
    if (!fits || isWritten(nodes) || aliases_.hasWriters(data) || isReadBeside(nodes)) {
      return std::nullopt;
    }
    return Heads{layer,      std::move(part),    swapped ? data->node()->input(0) : nullptr,
                 heads,      width / heads,      by_heads[3],
                 length,     sourceOf(given, 1), by_heads[0],
                 by_rows[1], by_heads[2]};
  }

  Node* create(Symbol kind, at::ArrayRef<Value*> inputs, Node* like, Node* before) {
    auto* node = graph_->create(kind, inputs, 1)->insertBefore(before);
    node->copyMetadata(like);
    return node;
  }

  Value* constant(const c10::IValue& value, Node* before) {
    const torch::jit::WithInsertPoint guard(before);
    return graph_->insertConstant(value);
  }

  Value* listOf(at::ArrayRef<Value*> sizes, Node* before) {
    return graph_->createList(c10::IntType::get(), sizes)->insertBefore(before)->output();
  }

  // The size that is this, in front of `before`.
  Value* sizeOf(const Source& source, Node* before) {
    auto* value = const_cast<Value*>(source.first);
    if (source.second < 0) {
      return value;
    }
    auto* size = create(aten::size, {value, constant(source.second, before)}, before, before);
    size->output()->setType(c10::IntType::get());
    return size->output();
  }

  // Of a tensor of these sizes and strides, where those of `like` are known.
  static void setSizes(Value* value, const Value* like, const std::vector<int64_t>& sizes,
                       const std::vector<int64_t>& strides) {
    value->setType(like->type()->expect<c10::TensorType>()->withSizesStrides(sizes, strides));
  }

  static std::optional<std::pair<std::vector<int64_t>, std::vector<int64_t>>> shapeOf(
      const Value* value, size_t rank) {
    const auto type = value->type()->cast<c10::TensorType>();
    auto sizes = type ? type->sizes().concrete_sizes() : std::nullopt;
    auto strides = type ? type->strides().concrete_sizes() : std::nullopt;
    return sizes && strides && sizes->size() == rank
               ? std::optional(std::pair(*std::move(sizes), *std::move(strides)))
               : std::nullopt;
  }

  // What the layer gives, batch first; of each one once.
  Value* batchFirst(const Heads& operand) {
    auto*& layer = layers_[operand.layer];
    if (layer == nullptr) {
      layer = create(aten::linear, operand.layer->inputs(), operand.layer, operand.layer);
      layer->replaceInput(0, operand.data);
      if (const auto shape = shapeOf(operand.layer->output(), 3)) {
        const auto& sizes = shape->first;
        setSizes(layer->output(), operand.layer->output(), {sizes[1], sizes[0], sizes[2]},
                 {sizes[0] * sizes[2], sizes[2], 1});
      }
    }
    return layer->output();
  }

  // The operand of the attention, as heads of what the layer gives.
  Value* byHeads(const Heads& operand, Node* attention) {
    const bool first = operand.data != nullptr;
    auto* given = first ? batchFirst(operand) : operand.layer->output();
    auto* like = operand.layer;
    const auto number = [&](int64_t n) { return constant(n, attention); };
    if (operand.part) {
      const auto& [whole, index, width, nodes] = *operand.part;
      auto* slice =
          create(aten::slice,
                 {given, number(-1), number(index * width), number((index + 1) * width), number(1)},
                 like, attention);
      if (const auto shape = shapeOf(given, 3)) {
        const auto& [sizes, strides] = *shape;
        setSizes(slice->output(), given, {sizes[0], sizes[1], width}, strides);
      }
      given = slice->output();
    }
    auto* batch = sizeOf(operand.batch, attention);
    auto* length = sizeOf(operand.length, attention);
    auto* list =
        graph_->createList(c10::IntType::get(), {first ? batch : length, first ? length : batch,
                                                 number(operand.heads), number(operand.size)});
    list->insertBefore(attention);
    auto* view = create(aten::view, {given, list->output()}, like, attention);
    const std::vector<int64_t> order =
        first ? std::vector<int64_t>{0, 2, 1, 3} : std::vector<int64_t>{1, 2, 0, 3};
    auto* moved =
        first
            ? create(aten::transpose, {view->output(), number(1), number(2)}, like, attention)
            : create(aten::permute, {view->output(), constant(order, attention)}, like, attention);
    if (const auto shape = shapeOf(given, 3)) {
      const auto& [sizes, strides] = *shape;
      const std::vector<int64_t> by_heads{sizes[0], sizes[1], operand.heads, operand.size};
      const std::vector<int64_t> steps{strides[0], strides[1], operand.size, 1};
      setSizes(view->output(), given, by_heads, steps);
      std::vector<int64_t> moved_sizes;
      std::vector<int64_t> moved_steps;
      for (const auto dim : order) {
        moved_sizes.push_back(by_heads[static_cast<size_t>(dim)]);
        moved_steps.push_back(steps[static_cast<size_t>(dim)]);
      }
      setSizes(moved->output(), given, moved_sizes, moved_steps);
    }
    return moved->output();
  }

  // Its only reader but those that ask sizes.
  static Node* readerOf(const Value* value) {
    Node* reader = nullptr;
    for (const auto& use : value->uses()) {
      if (readsShape(use.user)) {
        continue;
      }
      if (reader != nullptr || use.offset != 0) {
        return nullptr;
      }
      reader = use.user;
    }
    return reader;
  }

  std::optional<Result> resultOf(Node* attention, const Heads& query) {
    auto* permute = readerOf(attention->output());
    if (permute == nullptr || permute->kind() != aten::permute ||
        intsOf(permute->input(1)) != std::vector<int64_t>{2, 0, 1, 3}) {
      return std::nullopt;
    }
    std::vector<Node*> nodes{attention, permute};
    auto* rows = readerOf(permute->output());
    if (rows != nullptr && rows->kind() == aten::contiguous) {
      nodes.push_back(rows);
      rows = readerOf(rows->output());
    }
    const auto matrix = rows != nullptr ? sizesOfView(rows, 2) : std::vector<Value*>();
    auto* layer = matrix.empty() ? nullptr : readerOf(rows->output());
    if (layer == nullptr || layer->kind() != aten::linear ||
        shapes_.rank(layer->input(1)) != size_t{2} ||
        shapes_.last(layer->input(1)) != query.heads * query.size) {
      return std::nullopt;
    }
    auto* view = readerOf(layer->output());
    const auto sizes = view != nullptr ? sizesOfView(view, 3) : std::vector<Value*>();
    auto* last = sizes.empty() ? nullptr : readerOf(view->output());
    if (last == nullptr || !swapsFirst(last) || sourceOf(sizes[0]) != query.length ||
        sourceOf(sizes[1]) != query.batch) {
      return std::nullopt;
    }
    nodes.insert(nodes.end(), {rows, layer, view, last});
    // What is returned keeps its strides.
    const auto& uses = last->output()->uses();
    const bool returned = std::any_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
      return use.user->kind() == prim::Return || use.user->kind() == prim::TupleConstruct;
    });
    return returned || isWritten(nodes) ? std::nullopt : std::optional(Result{layer, last});
  }

  void putBatchFirst(Node* attention, const Heads& query, const Result& result) {
    auto* layer = result.layer;
    const auto number = [&](int64_t n) { return constant(n, layer); };
    auto* swap = create(aten::transpose, {attention->output(), number(1), number(2)}, layer, layer);
    auto* list = listOf(
        {sizeOf(query.batch, layer), sizeOf(query.length, layer), number(query.heads * query.size)},
        layer);
    auto* rows = create(aten::reshape, {swap->output(), list}, layer, layer);
    auto* given = create(aten::linear, layer->inputs(), layer, layer);
    given->replaceInput(0, rows->output());
    auto* last = result.last->output();
    if (const auto shape = shapeOf(attention->output(), 4)) {
      const auto& [sizes, strides] = *shape;
      setSizes(swap->output(), attention->output(), {sizes[0], sizes[2], sizes[1], sizes[3]},
               {strides[0], strides[2], strides[1], strides[3]});
      const auto width = sizes[1] * sizes[3];
      setSizes(rows->output(), attention->output(), {sizes[0], sizes[2], width},
               {sizes[2] * width, width, 1});
    }
    if (const auto shape = shapeOf(last, 3)) {
      const auto& sizes = shape->first;
      setSizes(given->output(), last, sizes, {sizes[1] * sizes[2], sizes[2], 1});
    }
    last->replaceAllUsesWith(given->output());
  }

  const GraphPtr& graph_;
  const torch::jit::AliasDb aliases_;  // of the graph as it was
  KnownShapes shapes_;
  std::unordered_map<const Node*, Node*> layers_;  // batch first
};

}  // namespace

void restoreAttention(const GraphPtr& graph) {
  bool any = false;
  walk(graph->block(),
       [&](const Node* node) { any = any || node->kind() == aten::scaled_dot_product_attention; });
  if (any) {
    Restorer(graph).run();
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga

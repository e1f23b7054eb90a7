// Lets oneDNN choose the memory layout of values that only fusion groups read.
//
//   %2 = llga::FusionGroup[llga_any_layout=[1]](%x)
//   %3 = llga::FusionGroup[llga_any_layout=[0], llga_group_owned=[1]](%2)
//
// Such a value never meets an aten op that looks at more than its sizes, but for views, of all or
// of a part (aten::reshape in the place of aten::view), casts and padding, that only groups read in
// their turn, so its strides are nobody's business: image-like values are channels last. Everything
// else leaves a group with exactly the strides eager gives it. llga_group_owned tells the reader
// what it would have got in eager: 1 contiguous, 2 channels last; llga_viewed_order the same of a
// view: in which order its dimensions would lie. So it does where a group reads what is channels
// last in the place of its contiguous copy.
//
// llga_call_local marks the outputs that die with the call, whoever reads them. Should an op return
// its input against its schema, that output lives on where it should not: memory is held for it, no
// number is wrong.
#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/jit/ir/alias_analysis.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/padded.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;
using torch::jit::AliasDb;

// Whether a tensor that is `value`, or a view of it, may be there after the call.
bool escapes(const Value* value) {
  const auto& uses = value->uses();
  return std::any_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
    const auto* user = use.user;
    const auto anyEscapes = [user] {
      return std::any_of(user->outputs().begin(), user->outputs().end(), escapes);
    };
    switch (user->kind()) {
      case prim::ListConstruct:
      case prim::ListUnpack:
      case prim::TupleConstruct:
      case prim::TupleUnpack:
      case prim::ConstantChunk:
      case aten::chunk:
      case aten::split:
      case aten::split_with_sizes:
      case aten::tensor_split:
      case aten::unbind:
        return anyEscapes();
      default:
        break;
    }
    if (isFusionGroup(user)) {
      return false;
    }
    const auto* schema = user->maybeSchema();
    if (schema == nullptr || use.offset >= schema->arguments().size()) {
      return true;
    }
    const auto* alias = schema->arguments()[use.offset].alias_info();
    return alias != nullptr && (alias->isWildcardAfter() || anyEscapes());
  });
}

std::optional<std::vector<int64_t>> sizesOf(const Value* value) {
  const auto type = value->type()->cast<c10::TensorType>();
  return type ? type->sizes().concrete_sizes() : std::nullopt;
}

bool keepsOrder(const Node* node);

// The executor notes no sizes of what only ops that it does not know read.
std::optional<size_t> rankOf(const Value* value) {
  const auto sizes = sizesOf(value);
  return sizes ? sizes->size() : KnownShapes().rank(value);
}

bool isImage(const Value* value) {
  const auto rank = rankOf(value);
  return rank ? *rank > 3 : keepsOrder(value->node());
}

// Whether it pads, repeats or shuffles pixels of images, and keeps their memory format, as PyTorch
// does but for one mode of padding.
bool padsImage(const Node* node) {
  switch (node->kind()) {
    case aten::constant_pad_nd:
    case aten::reflection_pad2d:
    case aten::replication_pad2d:
    case aten::upsample_nearest2d:
    case aten::pixel_shuffle:
      break;
    default:
      if (node->kind() == aten::pad || node->kind() == paddedKind()) {
        const auto mode = torch::jit::toIValue(node->namedInput("mode"));
        if (!mode || *mode == c10::IValue("circular")) {
          return false;
        }
      } else if (node->kind() != shuffledKind()) {
        return false;
      }
  }
  return isImage(node->input(0));
}

// Whether it casts images, whose numbers lie in the same order then.
bool castsImage(const Node* node) {
  if (node->kind() == aten::to) {
    const auto* schema = node->maybeSchema();
    return schema != nullptr && schema->overload_name() == "dtype" &&
           torch::jit::toIValue(node->namedInput("dtype")) &&
           node->namedInput("memory_format")->type()->kind() == c10::TypeKind::NoneType &&
           isImage(node->input(0));
  }
  return (node->kind() == fullPrecisionKind() || node->kind() == reducedPrecisionKind()) &&
         isImage(node->input(0));
}

// Whether it makes parts of images, which lie with gaps between, casts or pads them: their
// dimensions keep their places.
bool keepsOrder(const Node* node) {
  if (node->kind() == prim::ListUnpack) {
    return keepsOrder(node->input()->node());
  }
  return makesParts(node) ? isImage(node->input(0)) : castsImage(node) || padsImage(node);
}

// How many dimensions the first one of images and their channels become.
struct Divided {
  size_t images;
  size_t channels;
};

// Whether a view joins all dimensions of images, or of volumes, but the first two, and may divide
// those, as channels into heads.
std::optional<Divided> joinsPixels(const Node* node) {
  const auto from = sizesOf(node->input(0));
  const auto to = sizesOf(node->output());
  if (!from || !to || from->size() < 4 || to->size() < 3) {
    return std::nullopt;
  }
  if (c10::multiply_integers(from->begin() + 2, from->end()) != to->back()) {
    return std::nullopt;
  }
  const auto all = to->size() - 1;
  for (size_t images = 1; images < all; ++images) {
    const auto channels = to->begin() + static_cast<std::ptrdiff_t>(images);
    if (c10::multiply_integers(to->begin(), channels) == (*from)[0] &&
        c10::multiply_integers(channels, to->end() - 1) == (*from)[1]) {
      return Divided{images, all - images};
    }
  }
  return std::nullopt;
}

// Whether a view divides the last dimension into all but the first two, and may join those in front
// of it, but the first: pixels of images, and heads with their numbers.
bool dividesPixels(const Node* node) {
  const auto from = sizesOf(node->input(0));
  const auto to = sizesOf(node->output());
  if (!from || !to || from->size() < 3 || to->size() < 4 || (*from)[0] != (*to)[0]) {
    return false;
  }
  return c10::multiply_integers(to->begin() + 2, to->end()) == from->back() &&
         c10::multiply_integers(from->begin() + 1, from->end() - 1) == (*to)[1];
}

bool keepsSizes(const Node* node) {
  const bool views = node->kind() == aten::view || node->kind() == aten::reshape;
  const auto from = views ? sizesOf(node->input(0)) : std::nullopt;
  return from && from == sizesOf(node->output());
}

// Whether it makes a view of images in either order, or images.
bool viewsPixels(const Node* node) {
  return joinsPixels(node).has_value() || dividesPixels(node) || keepsSizes(node);
}

// The dimension along which it takes all items, or one of them, without the dimension itself, of
// `rank`; nothing if it does not.
std::optional<size_t> dropsDim(const Node* node, size_t rank) {
  const bool drops = node->kind() == aten::unbind || node->kind() == aten::select ||
                     (node->kind() == aten::squeeze && node->inputs().size() == 2);
  if (!drops) {
    return std::nullopt;
  }
  const auto dim = intOf(node->input(1));
  return dim ? std::optional(
                   static_cast<size_t>(c10::maybe_wrap_dim(*dim, static_cast<int64_t>(rank))))
             : std::nullopt;
}

// Whether it makes a view, of images in either order: of parts, of their pixels as one dimension,
// with one dimension of one item more or less, or of dimensions that change places; or pads them.
bool makesView(const Node* node) {
  if (keepsOrder(node)) {
    return true;
  }
  switch (node->kind()) {
    case prim::ListUnpack:
      return node->input()->node()->kind() == aten::unbind;
    case aten::unbind:
    case aten::select:
    case aten::squeeze: {
      const auto sizes = sizesOf(node->input(0));
      const auto dim = sizes ? dropsDim(node, sizes->size()) : std::nullopt;
      return dim && (node->kind() != aten::squeeze || (*sizes)[*dim] == 1);
    }
    case aten::unsqueeze:
      return sizesOf(node->input(0)) && intOf(node->input(1));
    case aten::transpose:
      return sizesOf(node->input(0)) && intOf(node->input(1)) && intOf(node->input(2));
    case aten::permute:
      return sizesOf(node->input(0)) && torch::jit::toIValue(node->input(1));
    case aten::flatten:
      return joinsPixels(node).has_value();
    case aten::reshape:
      return viewsPixels(node);
    default:
      return false;
  }
}

// Of the group that computes the value; null if none does.
std::shared_ptr<Graph> subgraphOf(const Value* value) {
  const auto* group = value->node();
  return isFusionGroup(group) && group->hasAttribute(torch::jit::attr::Subgraph)
             ? group->g(torch::jit::attr::Subgraph)
             : nullptr;
}

// What a group makes this of that quantizes and does nothing else: in the same order. Null for any
// other value.
const Value* quantizedFrom(const Value* value) {
  const auto subgraph = subgraphOf(value);
  if (subgraph == nullptr || subgraph->inputs().size() != 1) {
    return nullptr;
  }
  const auto* op = soleComputation(*subgraph);
  return op != nullptr && isQuantize(op) ? value->node()->input(0) : nullptr;
}

bool mayLieAnyhow(const Value* value);

// Whether it is in whatever layout a group chose.
bool isFree(const Value* value) { return isFusionGroup(value->node()) && mayLieAnyhow(value); }

bool allMayLieAnyhow(at::ArrayRef<const Value*> views) {
  return std::all_of(views.begin(), views.end(),
                     [](const Value* view) { return view->uses().empty() || mayLieAnyhow(view); });
}

// Whether it is what a group looks up in a table. Nobody has asked whether those numbers are
// finite, which groups ask of what is not another one's.
bool isLookedUp(const Value* value) {
  const auto subgraph = subgraphOf(value);
  const auto* node = subgraph != nullptr ? soleComputation(*subgraph) : nullptr;
  return node != nullptr && node->kind() == aten::embedding;
}

// Whether a group puts a constant in the place of some numbers that may be none: likewise.
bool mayBeReplaced(const Value* value) {
  const auto subgraph = subgraphOf(value);
  if (subgraph == nullptr) {
    return false;
  }
  const auto isFinite = [](const Value* from) {
    const auto known = torch::jit::toIValue(from);
    return known &&
           (known->isTensor() ? at::isfinite(known->toTensor()).all().item<bool>()
                              : known->isScalar() && std::isfinite(known->toScalar().toDouble()));
  };
  const auto nodes = subgraph->nodes();
  return std::any_of(nodes.begin(), nodes.end(), [&](const Node* node) {
    const bool chooses = node->kind() == aten::where && node->inputs().size() == 3;
    if (!chooses && node->kind() != aten::masked_fill) {
      return false;
    }
    const auto inputs = node->inputs().slice(chooses ? 1 : 2);
    return std::any_of(inputs.begin(), inputs.end(), [&](const Value* from) {
      const bool constant = from->node()->kind() == prim::Constant || !isTensor(from);
      return constant && !isFinite(from);
    });
  });
}

bool isChannelsLast(const Value* value) {
  if (const auto* from = quantizedFrom(value)) {
    return isChannelsLast(from);
  }
  const auto type = value->type()->cast<c10::TensorType>();
  if (!type) {
    return false;
  }
  const auto sizes = type->sizes().concrete_sizes();
  const auto strides = type->strides().concrete_sizes();
  if (!sizes || !strides || sizes->size() < 4 || sizes->size() > 5) {
    return false;
  }
  const auto format =
      sizes->size() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  return *strides == c10::TensorType::contiguousStridesOf(*sizes, format) &&
         *strides != c10::TensorType::contiguousStridesOf(*sizes);
}

// Whether it is what a group gives, or a view of it.
bool comesFromGroup(const Value* value) {
  const auto* node = value->node();
  return isFusionGroup(node) ||
         (!node->inputs().empty() && makesView(node) && comesFromGroup(node->input(0)));
}

// Whether nothing but softmax and products of two matrices reads it, or views of it: attention that
// was written out, whose rows may lie in either order. Not attention as such, nor linear layers,
// which read numbers of a pixel that lie side by side.
bool meetsMatrices(const Value* value) {
  const auto& uses = value->uses();
  return std::all_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
    const auto* user = use.user;
    if (isFusionGroup(user)) {
      return meetsMatrices(user->g(torch::jit::attr::Subgraph)->inputs()[use.offset]);
    }
    if (movesNumbers(user)) {
      return meetsMatrices(user->output());
    }
    const auto other = use.offset == 0 ? 1 : 0;
    return readsShape(user) || user->kind() == aten::softmax ||
           (isProduct(user) && !isConvolution(user) &&
            !constantTensor(user->input(other)).defined());
  });
}

// Whether a convolution of single pixels makes it of images in planes that no group made, and views
// join its pixels for what reads planes: to bring it into another order would take two copies.
bool staysInPlanes(const Value* value) {
  const auto subgraph = subgraphOf(value);
  if (subgraph == nullptr || !meetsMatrices(value)) {
    return false;
  }
  const auto nodes = computations(*subgraph);
  const auto* convolution = nodes.empty() ? nullptr : nodes.front();
  if (convolution == nullptr || !isConvolution(convolution) ||
      std::any_of(nodes.begin() + 1, nodes.end(), isProduct)) {
    return false;
  }
  const auto weight = constantTensor(convolution->input(1));
  const auto inputs = subgraph->inputs();
  const auto at = std::find(inputs.begin(), inputs.end(), convolution->input(0));
  if (!weight.defined() || weight.scalar_type() != at::kFloat || weight.dim() != 4 ||
      weight.size(2) != 1 || weight.size(3) != 1 || at == inputs.end()) {
    return false;
  }
  const auto* images = value->node()->input(static_cast<size_t>(at - inputs.begin()));
  return !comesFromGroup(images) && !isChannelsLast(images) && rankOf(images) == 4 &&
         std::all_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
           return readsShape(use.user) || (makesView(use.user) && joinsPixels(use.user));
         });
}

// Whether groups alone read its numbers, or those of views of it; sizes are the same in any layout.
// Not what is quantized in the order that a caller, or an op outside, gave it: TorchScript notes no
// types there, and what lies anyhow is told from a type, or contiguous in eager.
bool mayLieAnyhow(const Value* value) {
  if (const auto* from = quantizedFrom(value); from != nullptr && !isFree(from)) {
    return false;
  }
  bool read = false;
  for (const auto& use : value->uses()) {
    const auto* user = use.user;
    if (readsShape(user) || (user->kind() == operandKind() && use.offset == 1)) {
      continue;
    }
    const bool here = user->owningBlock() == value->node()->owningBlock();
    const bool by_groups =
        isFusionGroup(user) || (makesView(user) && allMayLieAnyhow(user->outputs()));
    if (!here || !by_groups) {
      return false;
    }
    read = true;
  }
  return read && !isLookedUp(value) && !mayBeReplaced(value) && !staysInPlanes(value);
}

// Likewise, but that there may be memory between pixels, and that images may lie anywhere.
bool holdsPixels(const Value* value) {
  const auto type = value->type()->cast<c10::TensorType>();
  const auto sizes = type ? type->sizes().concrete_sizes() : std::nullopt;
  const auto strides = type ? type->strides().concrete_sizes() : std::nullopt;
  if (!sizes || !strides || sizes->size() < 4 || sizes->size() > 5 || (*sizes)[1] == 1 ||
      (*strides)[1] != 1) {
    return false;
  }
  auto expected = strides->back();
  for (size_t i = sizes->size() - 1; i > 1; --i) {
    if ((*strides)[i] != expected) {
      return false;
    }
    expected *= (*sizes)[i];
  }
  return strides->back() >= (*sizes)[1];
}

// Dimensions of what a group gives, or of a view of it, as they would lie in eager's memory, the
// outermost first; empty if this is neither, or eager's own.
std::vector<int64_t> orderInEager(const Value* value) {
  const auto* node = value->node();
  std::vector<int64_t> order;
  if (isFusionGroup(node)) {
    const auto rank = rankOf(value);
    if (rank && mayLieAnyhow(value)) {
      order.resize(*rank);
      std::iota(order.begin(), order.end(), 0);
      if (isChannelsLast(value)) {
        std::rotate(order.begin() + 1, order.begin() + 2, order.end());
      }
    }
    return order;
  }
  if (makesView(node)) {
    const bool listed = node->kind() == prim::ListUnpack;
    node = listed ? node->input()->node() : node;
    order = orderInEager(node->input(0));
  }
  if (order.empty() || keepsSizes(node)) {
    return order;
  }
  if (keepsOrder(node)) {
    // Padding knows channels last; what lies in any other order becomes contiguous.
    const bool last = order.size() > 3 && order[0] == 0 && order.back() == 1 &&
                      std::is_sorted(order.begin(), order.end() - 1);
    if (padsImage(node) && !last) {
      std::iota(order.begin(), order.end(), 0);
    }
    return order;
  }
  if (const auto dropped = dropsDim(node, order.size())) {
    const auto dim = static_cast<int64_t>(*dropped);
    std::erase(order, dim);
    for (auto& other : order) {
      other -= other > dim ? 1 : 0;
    }
    return order;
  }
  const auto rank = static_cast<int64_t>(order.size());
  if (node->kind() == aten::unsqueeze) {  // around the dimension behind it
    const auto dim = c10::maybe_wrap_dim(*intOf(node->input(1)), rank + 1);
    for (auto& other : order) {
      other += other >= dim ? 1 : 0;
    }
    order.insert(std::find(order.begin(), order.end(), dim + 1), dim);
    return order;
  }
  std::vector<int64_t> places(order.size());  // of the source's dimensions in the view
  std::iota(places.begin(), places.end(), 0);
  if (node->kind() == aten::transpose) {
    const auto swapped = [&](size_t i) {
      return c10::maybe_wrap_dim(*intOf(node->input(i)), rank);
    };
    std::swap(places[swapped(1)], places[swapped(2)]);
  } else if (node->kind() == aten::permute) {
    const auto dims = torch::jit::toIValue(node->input(1))->toIntVector();
    for (size_t i = 0; i < dims.size(); ++i) {
      places[c10::maybe_wrap_dim(dims[i], rank)] = static_cast<int64_t>(i);
    }
  } else if (!joinsPixels(node)) {  // the last one is divided; those that become one likewise
    const auto last = rank - 1;
    std::vector<int64_t> channels(order.size() - 2);
    std::iota(channels.begin(), channels.end(), 1);
    const auto all = static_cast<int64_t>(sizesOf(node->output())->size());
    std::vector<int64_t> divided(static_cast<size_t>(all));
    std::iota(divided.begin(), divided.end(), 0);
    if (std::search(order.begin(), order.end(), channels.begin(), channels.end()) != order.end()) {
      divided.clear();
      for (const auto dim : order) {
        if (dim == last) {
          for (int64_t pixels = 2; pixels < all; ++pixels) {
            divided.push_back(pixels);
          }
        } else if (dim < 2) {  // the images, and the first one of those
          divided.push_back(dim);
        }
      }
    }
    return divided;
  } else {  // the last ones become one: where they do not lie side by side, in a copy
    constexpr size_t kJoined = 2;
    std::vector<int64_t> last(order.size() - kJoined);
    std::iota(last.begin(), last.end(), kJoined);
    const bool copied =
        std::search(order.begin(), order.end(), last.begin(), last.end()) == order.end();
    std::erase_if(order, [&](int64_t dim) { return dim > last.front(); });
    if (copied) {
      std::iota(order.begin(), order.end(), 0);
    }
    const auto divided = joinsPixels(node).value();
    const auto pixels = static_cast<int64_t>(divided.images + divided.channels);
    const int64_t begins[] = {0, static_cast<int64_t>(divided.images), pixels, pixels + 1};
    std::vector<int64_t> joined;
    for (const auto dim : order) {
      for (auto i = begins[dim]; i < begins[dim + 1]; ++i) {
        joined.push_back(i);
      }
    }
    return joined;
  }
  for (auto& dim : order) {
    dim = places[dim];
  }
  return order;
}

// What is copied to the input `i` of a group to be contiguous, if it is channels last, which groups
// take as well; null if that is not so.
Value* beforeCopy(const Node* group, size_t i) {
  auto* copy = group->input(i)->node();
  if (copy->kind() != aten::contiguous || copy->owningBlock() != group->owningBlock()) {
    return nullptr;
  }
  const auto format = torch::jit::toIValue(copy->input(1));
  const bool rows =
      format && format->isInt() && format->toMemoryFormat() == at::MemoryFormat::Contiguous;
  auto* source = copy->input(0);
  return rows && (isChannelsLast(source) || holdsPixels(source)) ? source : nullptr;
}

// A view of what may lie in another order than in eager may be a copy, in the place of an error.
void allowCopies(const GraphPtr& graph) {
  walk(graph->block(), [](Node* view) {
    if (view->kind() != aten::view || !isTensor(view->input(0)) ||
        view->input(1)->type()->kind() != c10::TypeKind::ListType || !viewsPixels(view) ||
        !comesFromGroup(view->input(0))) {
      return;
    }
    auto* reshape = view->owningGraph()->create(aten::reshape, view->inputs());
    reshape->copyAttributes(*view);  // why it is in no group
    reshape->insertBefore(view)->copyMetadata(view);
    reshape->output()->setType(view->output()->type());
    view->output()->replaceAllUsesWith(reshape->output());
    view->destroy();
  });
}

template <typename Function>
void forEachGroup(Block* block, const Function& function) {
  for (auto* node : block->nodes()) {
    for (auto* nested : node->blocks()) {
      forEachGroup(nested, function);
    }
    if (isFusionGroup(node)) {
      function(node);
    }
  }
}

// Groups read what is copied in the place of the copy, if nothing writes to it.
class CopyDropper {
 public:
  explicit CopyDropper(const GraphPtr& graph) : graph_(graph) {}

  void run(Node* group) {
    std::vector<int64_t> viewed(group->inputs().size());
    for (size_t i = 0; i < viewed.size(); ++i) {
      auto* source = beforeCopy(group, i);
      if (source == nullptr || isWritten(source)) {
        continue;
      }
      std::vector<int64_t> rows(sizesOf(source)->size());
      std::iota(rows.begin(), rows.end(), 0);
      viewed[i] = encodedOrder(rows);
      auto* copy = group->input(i)->node();
      group->replaceInput(i, source);
      if (!copy->hasUses()) {
        copy->destroy();
      }
    }
    group->is_(viewedOrderAttr(), viewed);
  }

 private:
  bool isWritten(const Value* value) {
    if (aliases_ == nullptr) {  // most graphs need none
      aliases_ = std::make_unique<AliasDb>(graph_);
    }
    return aliases_->hasWriters(value);
  }

  const GraphPtr& graph_;
  std::unique_ptr<AliasDb> aliases_;
};

void mark(Node* group) {
  std::vector<int64_t> any;
  std::vector<int64_t> local;
  for (const auto* output : group->outputs()) {
    any.push_back(mayLieAnyhow(output) ? 1 : 0);
    local.push_back(escapes(output) ? 0 : 1);
  }
  group->is_(anyLayoutAttr(), any);
  group->is_(callLocalAttr(), local);
  std::vector<int64_t> owned;
  auto viewed = group->is(viewedOrderAttr());
  for (size_t i = 0; i < viewed.size(); ++i) {
    const auto* input = group->input(i);
    owned.push_back(!isFree(input) ? 0 : isChannelsLast(input) ? 2 : 1);
    if (viewed[i] == 0 && makesView(input->node())) {
      viewed[i] = encodedOrder(orderInEager(input));
    }
  }
  group->is_(groupOwnedAttr(), owned);
  group->is_(viewedOrderAttr(), viewed);
}

}  // namespace

void propagateLayout(const GraphPtr& graph) {
  allowCopies(graph);
  CopyDropper dropper(graph);
  forEachGroup(graph->block(), [&](Node* group) { dropper.run(group); });
  forEachGroup(graph->block(), mark);
}

}  // namespace llga

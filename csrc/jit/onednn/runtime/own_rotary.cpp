#include "jit/onednn/runtime/own_rotary.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

bool isCast(const Node* node) {
  return node->kind() == aten::to || node->kind() == fullPrecisionKind() ||
         node->kind() == reducedPrecisionKind();
}

// The nodes that a rotation is made of.
struct Rotation {
  const Value* data;
  const Value* cos;
  const Value* sin;
  const Value* result;
  std::unordered_set<const Node*> nodes;
};

class Matcher {
 public:
  Matcher(const Node* sum, const Facts& facts) : facts_(facts), sum_(sum) {}

  std::optional<Rotation> match() {
    if (sum_->kind() != aten::add || sum_->inputs().size() != 3 || !isTensor(sum_->input(1)) ||
        facts_.constant(sum_->input(2)) != c10::IValue(1)) {
      return std::nullopt;
    }
    for (const size_t i : {0, 1}) {
      for (const size_t j : {0, 1}) {
        for (const size_t k : {0, 1}) {
          if (auto found = matchIn(sum_->input(i), j, sum_->input(1 - i), k)) {
            return found;
          }
        }
      }
    }
    return std::nullopt;
  }

 private:
  // With the data as the j-th factor of `straight`, and its halves as the k-th one of `turned`.
  std::optional<Rotation> matchIn(const Value* straight, size_t j, const Value* turned, size_t k) {
    Rotation found{nullptr, nullptr, nullptr, sum_->output(), {sum_}};
    const auto* first = productOf(straight, found);
    const auto* second = productOf(turned, found);
    if (first == nullptr || second == nullptr) {
      return std::nullopt;
    }
    found.cos = first->input(1 - j);
    found.sin = second->input(1 - k);
    found.data = turnedBy(own(second->input(k), found), found);
    if (found.data == nullptr) {
      return std::nullopt;
    }
    const auto* data = first->input(j);
    if (data != found.data && own(data, found) != found.data) {
      return std::nullopt;
    }
    takeCast(found);
    return found;
  }

  // A product of two tensors that `value` is.
  const Node* productOf(const Value* value, Rotation& found) {
    const auto* node = own(value, found)->node();
    if (node->kind() != aten::mul || !isTensor(node->input(1)) || !isPrivate(node->output())) {
      return nullptr;
    }
    found.nodes.insert(node);
    return node;
  }

  // What a cast to float32 that nothing else reads is of; or the value.
  const Value* own(const Value* value, Rotation& found) {
    while (isCast(value->node()) && isPrivate(value) &&
           facts_.tensor(value).dtype.value_or(at::kFloat) == at::kFloat) {
      found.nodes.insert(value->node());
      value = value->node()->input(0);
    }
    return value;
  }

  // The data of which `value` is the second half, negated, and the first one; null for others.
  const Value* turnedBy(const Value* value, Rotation& found) {
    const auto* cat = value->node();
    if (cat->kind() != aten::cat || !isPrivate(value) ||
        cat->input(0)->node()->kind() != prim::ListConstruct) {
      return nullptr;
    }
    const auto halves = cat->input(0)->node()->inputs();
    const auto dim = facts_.constant(cat->input(1));
    if (halves.size() != 2 || !dim || halves[0]->node()->kind() != aten::neg) {
      return nullptr;
    }
    const auto* negated = halves[0]->node();
    if (const auto* data = dividedInto(halves[1], negated->input(0), *dim, found)) {
      found.nodes.insert({cat, negated});
      return isPrivate(negated->output()) ? data : nullptr;
    }
    const auto* later = negated->input(0)->node();
    const auto* earlier = halves[1]->node();
    for (const auto* part : {later, earlier}) {
      if (part->kind() != aten::slice || !isPrivate(part->output()) ||
          facts_.constant(part->input(4)) != c10::IValue(1) || part->input(0) != later->input(0) ||
          !isSameDim(part->input(1), *dim)) {
        return nullptr;
      }
    }
    const auto end = facts_.constant(later->input(3));
    const bool to_end =
        end && (end->isNone() || *end == c10::IValue(std::numeric_limits<int64_t>::max()));
    const auto begin = facts_.constant(earlier->input(2));
    if (!to_end || !begin || !(begin->isNone() || *begin == c10::IValue(0)) ||
        !isPrivate(negated->output())) {
      return nullptr;
    }
    found.nodes.insert({cat, negated, later, earlier});
    return later->input(0);
  }

  // What torch.chunk or torch.split makes these two of, along this dimension; null for others.
  const Value* dividedInto(const Value* earlier, const Value* later, const c10::IValue& dim,
                           Rotation& found) {
    const auto* parts = later->node();
    if (!makesParts(parts) || parts->outputs().size() != 2 || parts->output(0) != earlier ||
        parts->output(1) != later || !isPrivate(earlier) || !isPrivate(later)) {
      return nullptr;
    }
    found.nodes.insert(parts);
    if (parts->kind() == prim::ConstantChunk) {
      return dim == c10::IValue(parts->i(torch::jit::attr::dim)) ? parts->input() : nullptr;
    }
    const auto* list = parts->input();
    found.nodes.insert(list->node());
    return isPrivate(list) && isSameDim(list->node()->namedInput("dim"), dim)
               ? list->node()->input(0)
               : nullptr;
  }

  bool isSameDim(const Value* value, const c10::IValue& dim) const {
    const auto known = facts_.constant(value);  // that it is the last one is known when compiling
    return known && known->isInt() && (*known == dim || dim == c10::IValue(-1));
  }

  // Read once.
  bool isPrivate(const Value* value) const {
    return value->uses().size() == 1 && value->node()->owningBlock() == sum_->owningBlock();
  }

  // A cast to bfloat16 that alone reads the sum.
  void takeCast(Rotation& found) {
    if (!isPrivate(found.result)) {
      return;
    }
    const auto* reader = found.result->uses()[0].user;
    if (isCast(reader) && reader->owningBlock() == sum_->owningBlock() &&
        facts_.tensor(reader->output()).dtype == at::kBFloat16) {
      found.nodes.insert(reader);
      found.result = reader->output();
    }
  }

  const Facts& facts_;
  const Node* sum_;
};

std::optional<Rotation> rotationOf(const Node* node, const Facts& facts) {
  return Matcher(node, facts).match();
}

// Of rows that lie one number behind the other.
bool hasRows(const TensorFacts& tensor) {
  return tensor.dtype && (*tensor.dtype == at::kFloat || isNarrow(tensor)) && tensor.sizes &&
         tensor.strides && !tensor.sizes->empty() && tensor.strides->back() == 1;
}

// Of so many numbers a row, or one for each of some rows.
bool broadcasts(const Shape& own, const Shape& sizes) {
  const auto missing = sizes.size() - own.size();
  for (size_t i = 0; i + 1 < own.size(); ++i) {
    if (own[i] != sizes[missing + i] && own[i] != 1) {
      return false;
    }
  }
  return own.back() == sizes.back();
}

}  // namespace

std::vector<const Node*> ownRotary(const Node* node, const Facts& facts) {
  const auto found = ownKernelsAnywhere() ? rotationOf(node, facts) : std::nullopt;
  if (!found) {
    return {};
  }
  std::vector<const Node*> nodes(found->nodes.begin(), found->nodes.end());
  std::sort(nodes.begin(), nodes.end(),
            [](const Node* a, const Node* b) { return a->isBefore(b); });
  return nodes;
}

std::optional<FoundRotary> findRotary(const Graph& subgraph, const Facts& facts) {
  if (!ownKernelsAnywhere() || subgraph.outputs().size() != 1) {
    return std::nullopt;
  }
  const auto nodes = computations(subgraph);
  for (const auto* node : nodes) {
    const auto found = rotationOf(node, facts);
    if (!found || found->nodes.size() != nodes.size() ||
        behind(subgraph.outputs()[0]) != found->result) {
      continue;
    }
    const auto data = facts.tensor(found->data);
    const auto cos = facts.tensor(found->cos);
    const auto sin = facts.tensor(found->sin);
    const auto result = facts.tensor(found->result);
    const bool rows = hasRows(data) && hasRows(cos) && hasRows(sin) && hasRows(result);
    if (!rows || data.sizes->size() < 2 || data.sizes != result.sizes) {
      throw CompileError{"a rotary embedding whose rows do not lie in one piece"};
    }
    const auto columns = data.sizes->back();
    const bool halves = std::all_of(nodes.begin(), nodes.end(), [&](const Node* part) {
      const bool divides = makesParts(part) && isTensor(part->output(0));
      return !divides ||
             facts.tensor(part->output(0)).sizes.value_or(Shape{0}).back() * 2 == columns;
    });
    const auto fits = [&](const TensorFacts& angles) {
      return angles.sizes->size() <= data.sizes->size() && broadcasts(*angles.sizes, *data.sizes);
    };
    if (!halves || columns > Rotary::kMostColumns || !fits(cos) || !fits(sin) ||
        cos.dtype != sin.dtype || (isNarrow(cos) && !isNarrow(data))) {
      throw CompileError{"a rotary embedding of other parts than halves, or of other data types"};
    }
    Rotary kernel;
    kernel.narrow = isNarrow(data);
    kernel.narrow_angles = isNarrow(cos);
    kernel.narrow_result = isNarrow(result);
    kernel.columns = columns;
    kernel.sizes.assign(data.sizes->begin(), data.sizes->end() - 1);
    return FoundRotary{std::move(kernel), found->data, found->cos, found->sin, found->result};
  }
  return std::nullopt;
}

}  // namespace llga

#include "jit/onednn/written_attention.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>

namespace llga {
namespace {

namespace aten = torch::jit::aten;

bool isCast(const Node* node) {
  return node->kind() == aten::to || node->kind() == aten::type_as ||
         node->kind() == reducedPrecisionKind() || node->kind() == fullPrecisionKind();
}

bool isView(const Node* node) {
  return node->kind() == aten::view || node->kind() == aten::reshape;
}

// Of rows by columns; `by_rows`: or by rows.
bool isMatrixProduct(const Node* node, bool by_rows = false) {
  if (node->kind() == einsumKind()) {
    return by_rows || !isTrue(node->namedInput("transpose_b"));
  }
  return node->kind() == aten::matmul || node->kind() == aten::bmm;
}

bool isConstantInt(const Value* value, int64_t number) {
  return torch::jit::toIValue(value) == c10::IValue(number);
}

// The node that alone reads the numbers of `value`; the target of an in-place op and of type_as is
// read for its data type.
const Node* soleReader(const Value* value) {
  const Node* found = nullptr;
  for (const auto& use : value->uses()) {
    if (use.offset == 1 &&
        (use.user->kind() == asTargetKind() || use.user->kind() == aten::type_as)) {
      continue;
    }
    if (found != nullptr || use.user->owningBlock() != value->node()->owningBlock() ||
        use.user->kind() == torch::jit::prim::Return) {
      return nullptr;
    }
    found = use.user;
  }
  return found;
}

class Matcher {
 public:
  Matcher(const Node* softmax, const Facts& facts) : facts_(facts) { found_.softmax = softmax; }

  std::optional<WrittenAttention> run() {
    found_.nodes.push_back(found_.softmax);
    if (found_.softmax->kind() != aten::softmax || !down() || !up(found_.softmax->input(0))) {
      return std::nullopt;
    }
    std::reverse(found_.masks.begin(), found_.masks.end());
    if (found_.key_by_rows) {
      takeFactors(found_.key, facts_.tensor(found_.value).dtype);
    }
    takeFactors(found_.query, facts_.tensor(found_.key).dtype);
    takeFactorsOfColumns();
    takeNorms();
    if (!found_.value_by_columns) {
      takeTail();
    }
    return keepsToItself() && !isQuantized() ? std::optional(std::move(found_)) : std::nullopt;
  }

 private:
  bool isOurs(const Value* value) const {
    return value->node()->owningBlock() == found_.softmax->owningBlock() &&
           soleReader(value) != nullptr;
  }

  // A number, or a tensor of no dimensions.
  bool isOneNumber(const Value* value) const {
    const auto sizes = facts_.tensor(value).sizes;
    return isTensor(value) ? sizes && sizes->empty()
                           : value->type()->isSubtypeOf(*c10::NumberType::get());
  }

  // One for each head, for scores of (.., head, query, key).
  bool isOnePerHead(const Value* value) const {
    const auto sizes = isTensor(value) ? facts_.tensor(value).sizes : std::nullopt;
    constexpr size_t kLast = 3;
    return sizes && sizes->size() >= kLast && sizes->end()[-1] == 1 && sizes->end()[-2] == 1 &&
           std::all_of(sizes->begin(), sizes->end() - kLast, [](int64_t n) { return n == 1; });
  }

  // From the softmax to the product with the values.
  bool down() {
    const auto* value = found_.softmax->output();
    for (;;) {
      const auto* reader = soleReader(value);
      if (reader == nullptr || reader->input(0) != value) {
        return false;
      }
      found_.nodes.push_back(reader);
      if (isMatrixProduct(reader)) {
        found_.value = reader->input(1);
        found_.product = found_.result = reader->output();
        return reader->input(1) != value;
      }
      if (swapsLastTwo(reader)) {
        return byColumns(reader->output());
      }
      if (!isCast(reader)) {
        return false;
      }
      value = reader->output();
    }
  }

  // From the transposed softmax to the product.
  bool byColumns(const Value* value) {
    for (;;) {
      const auto* reader = soleReader(value);
      if (reader == nullptr) {
        return false;
      }
      found_.nodes.push_back(reader);
      if (isCast(reader) && reader->input(0) == value) {
        value = reader->output();
        continue;
      }
      found_.value = reader->input(0);
      found_.value_by_columns = true;
      found_.product = found_.result = reader->output();
      return isMatrixProduct(reader) && reader->kind() != einsumKind() &&
             reader->input(1) == value && reader->input(0) != value;
    }
  }

  // From the softmax to the product of query and key, whichever operands lead there.
  bool up(const Value* value) {
    if (!isOurs(value)) {
      return false;
    }
    const auto* node = value->node();
    found_.nodes.push_back(node);
    if (climb(node)) {
      return true;
    }
    found_.nodes.pop_back();
    return false;
  }

  bool climb(const Node* node) {
    if (isMatrixProduct(node, /*by_rows=*/true)) {
      found_.query = node->input(0);
      found_.key = node->input(1);
      found_.key_by_rows = !isMatrixProduct(node);
      found_.scores = node->output();
      return true;
    }
    if (isCast(node) || isView(node) || isIdentity(node)) {
      return up(node->input(0));
    }
    switch (node->kind()) {
      case aten::add:
        return isConstantInt(node->input(2), 1) &&
               (climbMasked(node, 0, Kind::added, 1) || climbMasked(node, 1, Kind::added, 0));
      case aten::masked_fill:
        return isOneNumber(node->input(2)) &&
               climbMasked(node, 0, Kind::replaced_where_true, 1, node->input(2));
      case aten::where:
        return node->inputs().size() == 3 && isOneNumber(node->input(2)) &&
               climbMasked(node, 1, Kind::replaced_where_false, 0, node->input(2));
      case aten::mul:
        return climbScaled(node, 0, 1) || climbScaled(node, 1, 0);
      case aten::div:
        return node->inputs().size() == 2 && climbScaled(node, 0, 1);
      default:
        return false;
    }
  }

  using Kind = WrittenAttention::Mask::Kind;

  bool climbMasked(const Node* node, size_t scores, Kind kind, size_t mask,
                   const Value* replacement = nullptr) {
    if (!isTensor(node->input(scores)) || !isTensor(node->input(mask)) ||
        !found_.factors.empty()) {  // a factor behind a mask
      return false;
    }
    found_.masks.push_back(
        {kind, node->input(mask), replacement, node->input(scores), node->output()});
    if (up(node->input(scores))) {
      return true;
    }
    found_.masks.pop_back();
    return false;
  }

  bool climbScaled(const Node* node, size_t scores, size_t factor) {
    const auto* number = node->input(factor);
    const bool per_head = isOnePerHead(number);
    if (!isTensor(node->input(scores)) || (!per_head && !isOneNumber(number))) {
      return false;
    }
    found_.factors.push_back(
        {number, node->kind() == aten::div, per_head ? node->input(scores) : nullptr});
    if (up(node->input(scores))) {
      return true;
    }
    found_.factors.pop_back();
    return false;
  }

  // Takes what multiplies query or key, and casts around it, up to a value of this data type.
  void takeFactors(const Value*& operand, std::optional<at::ScalarType> dtype) {
    std::vector<const Node*> nodes;
    std::vector<WrittenAttention::Factor> factors;
    for (const auto* value = operand; isOurs(value);) {
      const auto* node = value->node();
      if (node->kind() == aten::mul || node->kind() == aten::div) {
        if (node->inputs().size() != 2 || !isOneNumber(node->input(1))) {
          return;
        }
        factors.push_back({node->input(1), node->kind() == aten::div, nullptr});
      } else if (!isCast(node)) {
        return;
      }
      nodes.push_back(node);
      value = node->input(0);
      if (facts_.tensor(value).dtype == dtype) {
        operand = value;
        found_.nodes.insert(found_.nodes.end(), nodes.begin(), nodes.end());
        found_.factors.insert(found_.factors.end(), factors.begin(), factors.end());
        nodes.clear();
        factors.clear();
      }
    }
  }

  // Likewise of a query that is transposed behind them.
  void takeFactorsOfColumns() {
    const auto* swap = found_.query->node();
    if (!isOurs(found_.query) || !swapsLastTwo(swap)) {
      return;
    }
    const auto* columns = swap->input(0);
    takeFactors(columns, facts_.tensor(found_.key).dtype);
    if (columns != swap->input(0)) {
      found_.nodes.push_back(swap);
      found_.query = columns;
      found_.query_by_columns = true;
    }
  }

  // Takes what makes rows of a length of 1 of query and key, if their data type is the same before
  // it.
  void takeNorms() {
    auto query = normalized(found_.query);
    if (query && facts_.tensor(query->rows).dtype == facts_.tensor(found_.value).dtype) {
      take(*query, found_.query, found_.least_query_norm);
    }
    std::vector<const Node*> swapping;
    const auto* rows = found_.key;
    if (!found_.key_by_rows) {
      const auto* columns = belowCasts(rows, swapping);
      if (!isOurs(columns) || !swapsLastTwo(columns->node())) {
        return;
      }
      swapping.push_back(columns->node());
      rows = columns->node()->input(0);
    }
    auto key = normalized(rows);
    if (key && facts_.tensor(key->rows).dtype == facts_.tensor(found_.query).dtype) {
      key->nodes.insert(key->nodes.end(), swapping.begin(), swapping.end());
      found_.key_by_rows = true;
      take(*key, found_.key, found_.least_key_norm);
    }
  }

  struct Normalized {
    const Value* rows;
    const Value* least;
    std::vector<const Node*> nodes;
  };

  void take(const Normalized& found, const Value*& rows, const Value*& least) {
    rows = found.rows;
    least = found.least;
    found_.nodes.insert(found_.nodes.end(), found.nodes.begin(), found.nodes.end());
  }

  // rows / clamp_min(norm(rows, 2, [-1], keepdim), least).expand_as(rows), with casts or without,
  // and with what prepare_binary puts in the place of the expansion, or nothing.
  std::optional<Normalized> normalized(const Value* value) const {
    static const auto kNorm = Symbol::fromQualString("aten::linalg_vector_norm");
    std::vector<const Node*> nodes;
    const auto* division = above(value, aten::div, nodes);
    if (division == nullptr || division->inputs().size() != 2) {
      return std::nullopt;
    }
    const auto* divisor = belowCasts(division->input(1), nodes);
    const bool left_out = divisor->node()->kind() == operandKind();
    const auto* expansion = above(divisor, left_out ? operandKind() : aten::expand_as, nodes);
    const auto* clamp =
        above(expansion != nullptr ? expansion->input(0) : divisor, aten::clamp_min, nodes);
    const auto* norm = clamp != nullptr ? above(clamp->input(0), kNorm, nodes) : nullptr;
    if (norm == nullptr || !isLengthOfRows(norm)) {
      return std::nullopt;
    }
    const auto* rows = belowCasts(division->input(0), nodes);
    const bool same = belowCasts(norm->input(0), nodes) == rows &&
                      (expansion == nullptr || expansion->input(1) == rows ||
                       expansion->input(1) == division->input(0));
    return same ? std::optional(Normalized{rows, clamp->input(1), std::move(nodes)}) : std::nullopt;
  }

  // What is cast to `value`, for nobody else. Adds the casts to `nodes`.
  const Value* belowCasts(const Value* value, std::vector<const Node*>& nodes) const {
    for (; isOurs(value) && isCast(value->node()); value = value->node()->input(0)) {
      nodes.push_back(value->node());
    }
    return value;
  }

  // The node of this kind that makes `value`, or what is cast to it, for nobody else.
  const Node* above(const Value* value, torch::jit::NodeKind kind,
                    std::vector<const Node*>& nodes) const {
    value = belowCasts(value, nodes);
    if (!isOurs(value) || value->node()->kind() != kind) {
      return nullptr;
    }
    nodes.push_back(value->node());
    return value->node();
  }

  static bool isLengthOfRows(const Node* norm) {
    const auto order = torch::jit::toIValue(norm->input(1));
    const auto dims = torch::jit::toIValue(norm->input(2));
    return order && order->isScalar() && order->toScalar().toDouble() == 2 && dims &&
           dims->isIntList() && dims->toIntVector() == std::vector<int64_t>{-1} &&
           isTrue(norm->input(3));
  }

  bool swapsLastTwo(const Node* node) const {
    static const auto kMatrixTranspose = Symbol::fromQualString("aten::mT");
    if (node->kind() == kMatrixTranspose) {
      return true;
    }
    if (node->kind() == aten::permute) {
      auto dims = intsOf(node->input(1)).value_or(std::vector<int64_t>());
      const auto rank = static_cast<int64_t>(dims.size());
      std::vector<int64_t> swapped(dims.size());
      std::iota(swapped.begin(), swapped.end(), 0);
      if (rank < 2) {
        return false;
      }
      std::swap(swapped.end()[-1], swapped.end()[-2]);
      std::for_each(dims.begin(), dims.end(), [rank](int64_t& dim) { dim += dim < 0 ? rank : 0; });
      return dims == swapped;
    }
    if (node->kind() != aten::transpose) {
      return false;
    }
    const auto sizes = facts_.tensor(node->input(0)).sizes;
    const auto isDim = [&](size_t input, int64_t dim) {
      return isConstantInt(node->input(input), dim) ||
             (sizes &&
              isConstantInt(node->input(input), static_cast<int64_t>(sizes->size()) + dim));
    };
    return (isDim(1, -2) && isDim(2, -1)) || (isDim(1, -1) && isDim(2, -2));
  }

  // (batch, head, query, number) -> (batch, query, head and number), where that is what follows.
  void takeTail() {
    const auto* swap = soleReader(found_.product);
    if (swap == nullptr || swap->kind() != aten::transpose || !isConstantInt(swap->input(1), 1) ||
        !isConstantInt(swap->input(2), 2)) {
      return;
    }
    std::vector<const Node*> tail{swap};
    const auto* next = soleReader(swap->output());
    if (next != nullptr && next->kind() == aten::contiguous) {
      tail.push_back(next);
      next = soleReader(next->output());
    }
    if (next != nullptr && (isView(next) || next->kind() == aten::flatten) &&
        next->input(0) == tail.back()->output()) {
      tail.push_back(next);
      found_.nodes.insert(found_.nodes.end(), tail.begin(), tail.end());
      found_.result = next->output();
    }
  }

  // oneDNN multiplies the 8-bit values.
  bool isQuantized() const {
    const auto* product = found_.scores->node();
    return product->input(0)->node()->kind() == aten::dequantize ||
           found_.key->node()->kind() == aten::dequantize ||
           found_.value->node()->kind() == aten::dequantize;
  }

  bool keepsToItself() const {
    const std::unordered_set<const Node*> members(found_.nodes.begin(), found_.nodes.end());
    return std::all_of(members.begin(), members.end(), [&](const Node* node) {
      const auto& uses = node->output()->uses();
      return node->output() == found_.result ||
             std::all_of(uses.begin(), uses.end(),
                         [&](const torch::jit::Use& use) { return members.count(use.user) != 0; });
    });
  }

  const Facts& facts_;
  WrittenAttention found_{};
};

}  // namespace

std::optional<WrittenAttention> attentionAround(const Node* softmax, const Facts& facts) {
  return Matcher(softmax, facts).run();
}

}  // namespace llga

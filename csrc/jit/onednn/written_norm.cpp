#include "jit/onednn/written_norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_set>

namespace llga {
namespace {

namespace aten = torch::jit::aten;

using Nodes = std::unordered_set<const Node*>;

bool isCast(const Node* node) {
  return node->kind() == aten::to || node->kind() == reducedPrecisionKind() ||
         node->kind() == fullPrecisionKind();
}

// What is behind casts; these are added to `casts`.
const Value* belowCasts(const Value* value, Nodes& casts) {
  for (; isCast(value->node()); value = value->node()->input(0)) {
    casts.insert(value->node());
  }
  return value;
}

// The part of a norm whose statistics are of the data: up to the division.
class Core {
 public:
  using Kind = WrittenNorm::Kind;

  explicit Core(const Facts& facts) : facts_(facts) {}

  // Whether it is one.
  bool take(const Node* root) {
    nodes_.insert(root);
    return root->kind() == aten::div ? isDividedBy(root->input(1), root->input(0))
                                     : isTimes(root->input(1), root->input(0));
  }

  // Likewise, of a product whose operands stand the other way round.
  bool takeTurned(const Node* root) {
    nodes_.insert(root);
    return isTimes(root->input(0), root->input(1));
  }

  // Decides where the norm begins: at casts of what it is of, if nobody else reads these. False if
  // it has no beginning, or others read what is in between.
  bool close(const Node* root) {
    auto all = nodes_;
    all.insert(casts_.begin(), casts_.end());
    if (isClosed(all, root)) {
      nodes_ = std::move(all);
      return true;
    }
    data_ = reads_[0];
    return isClosed(nodes_, root) && std::all_of(reads_.begin(), reads_.end(),
                                                 [&](const Value* read) { return read == data_; });
  }

  Kind kind() const { return kind_; }
  const Value* data() const { return data_; }
  int64_t dim() const { return *dim_; }
  double epsilon() const { return epsilon_; }
  const Nodes& nodes() const { return nodes_; }

 private:
  static bool isClosed(const Nodes& nodes, const Node* root) {
    return std::all_of(nodes.begin(), nodes.end(), [&](const Node* node) {
      const auto& uses = node->output()->uses();
      return node->owningBlock() == root->owningBlock() &&
             (node == root ||
              std::all_of(uses.begin(), uses.end(),
                          [&](const torch::jit::Use& use) { return nodes.count(use.user) != 0; }));
    });
  }

  bool isNumber(const Value* value, double number) const {
    const auto known = facts_.constant(value);
    return known && known->isScalar() && known->toScalar().toDouble() == number;
  }

  // The node of a statistic, behind casts and expansions, which belong to the norm.
  const Node* inner(const Value* value) {
    const auto* node = value->node();
    while (isCast(node) || node->kind() == aten::expand_as || node->kind() == operandKind()) {
      nodes_.insert(node);
      node = node->input(0)->node();
    }
    return node;
  }

  // Whether this is what all statistics are of.
  bool reads(const Value* value) {
    reads_.push_back(value);
    const auto* base = belowCasts(value, casts_);
    data_ = data_ == nullptr ? base : data_;
    return data_ == base;
  }

  // Whether a statistic is over one dimension, which is kept, and the same for all.
  bool isAlong(const Node* node, const char* dims, const char* keeps) {
    const auto known = facts_.constant(node->namedInput(dims));
    if (!known || !known->isIntList() || known->toIntVector().size() != 1 ||
        facts_.constant(node->namedInput(keeps)) != c10::IValue(true)) {
      return false;
    }
    dim_ = dim_.value_or(known->toIntVector()[0]);
    return dim_ == known->toIntVector()[0];
  }

  // What it is the mean of; null if it is none.
  const Value* averaged(const Node* node) {
    if (node->kind() != aten::mean || node->inputs().size() != 4 ||
        !node->namedInput("dtype")->mustBeNone() || !isAlong(node, "dim", "keepdim")) {
      return nullptr;
    }
    nodes_.insert(node);
    return node->input(0);
  }

  // What is squared; null if nothing is.
  const Value* squared(const Node* node) {
    static const auto kSquare = Symbol::aten("square");
    const bool is = (node->kind() == aten::pow && isNumber(node->input(1), 2)) ||
                    (node->kind() == aten::mul && node->input(0) == node->input(1)) ||
                    node->kind() == kSquare;
    if (!is) {
      return nullptr;
    }
    nodes_.insert(node);
    return node->input(0);
  }

  // What the root is of; null if it is none.
  const Value* rooted(const Node* node) {
    if (node->kind() != aten::sqrt &&
        !(node->kind() == aten::pow && isNumber(node->input(1), 0.5))) {
      return nullptr;
    }
    nodes_.insert(node);
    return node->input(0);
  }

  bool isDividedBy(const Value* divisor, const Value* data) {
    const auto* node = inner(divisor);
    if (const auto* sum = rooted(node)) {
      return isSpread(sum, data);
    }
    return isLength(node, data);
  }

  bool isTimes(const Value* factor, const Value* data) {
    const auto* node = inner(factor);
    nodes_.insert(node);
    if (node->kind() == aten::rsqrt ||
        (node->kind() == aten::pow && isNumber(node->input(1), -0.5))) {
      return isSpread(node->input(0), data);
    }
    const auto* sum = node->kind() == aten::reciprocal ? rooted(inner(node->input(0))) : nullptr;
    return sum != nullptr && isSpread(sum, data);
  }

  // The length of the data, which is no less than a number, or whatever it is.
  bool isLength(const Node* node, const Value* data) {
    static const auto kNorm = Symbol::aten("linalg_vector_norm");
    if (node->kind() == aten::clamp_min) {
      const auto least = facts_.constant(node->input(1));
      if (!least || !least->isScalar()) {
        return false;
      }
      nodes_.insert(node);
      epsilon_ = least->toScalar().toDouble();
      node = inner(node->input(0));
    }
    if (node->kind() != kNorm || !isNumber(node->namedInput("ord"), 2) ||
        !isAlong(node, "dim", "keepdim")) {
      return false;
    }
    nodes_.insert(node);
    kind_ = Kind::length;
    return reads(node->input(0)) && reads(data);
  }

  // What is below the root: the data's mean square, or its variance, and a number.
  bool isSpread(const Value* value, const Value* data) {
    const auto* sum = inner(value);
    if (sum->kind() != aten::add || isTensor(sum->input(1)) || !isNumber(sum->input(2), 1)) {
      return false;
    }
    const auto epsilon = facts_.constant(sum->input(1));
    if (!epsilon || !epsilon->isScalar()) {
      return false;
    }
    nodes_.insert(sum);
    epsilon_ = epsilon->toScalar().toDouble();
    const auto* spread = inner(sum->input(0));
    if (isVariance(spread)) {
      kind_ = Kind::centred;
      return reads(spread->input(0)) && isCentred(data);
    }
    const auto* squares = averaged(spread);
    const auto* numbers = squares != nullptr ? squared(inner(squares)) : nullptr;
    if (numbers == nullptr) {
      return false;
    }
    auto apart = *this;
    if (apart.isCentred(data) && apart.isCentred(numbers)) {
      apart.kind_ = Kind::centred;
      adopt(std::move(apart));
      return true;
    }
    kind_ = Kind::root_mean_square;
    return reads(numbers) && reads(data);
  }

  // Of all numbers that there are, not of a sample.
  bool isVariance(const Node* node) {
    if (node->kind() != aten::var || !node->hasNamedInput("keepdim") ||
        !isAlong(node, "dim", "keepdim")) {
      return false;
    }
    nodes_.insert(node);
    return node->hasNamedInput("unbiased")
               ? facts_.constant(node->namedInput("unbiased")) == c10::IValue(false)
               : isNumber(node->namedInput("correction"), 0);
  }

  // The data without its mean.
  bool isCentred(const Value* value) {
    const auto* node = inner(value);
    if (node->kind() != aten::sub || !isTensor(node->input(1)) || !isNumber(node->input(2), 1)) {
      return false;
    }
    nodes_.insert(node);
    const auto* numbers = averaged(inner(node->input(1)));
    return numbers != nullptr && reads(numbers) && reads(node->input(0));
  }

  void adopt(Core&& other) {
    kind_ = other.kind_;
    data_ = other.data_;
    dim_ = other.dim_;
    nodes_ = std::move(other.nodes_);
    casts_ = std::move(other.casts_);
    reads_ = std::move(other.reads_);
  }

  const Facts& facts_;
  Kind kind_{};
  const Value* data_ = nullptr;
  std::optional<int64_t> dim_;
  double epsilon_ = 0;
  Nodes nodes_;
  Nodes casts_;                      // of the data
  std::vector<const Value*> reads_;  // the data, or casts of it
};

// The constant beside `value`, which `node` adds or multiplies it with; undefined if there is none.
at::Tensor constantBeside(const Node* node, const Value* value, const Facts& facts) {
  const bool first = node->input(0) == value;
  const auto known = facts.constant(node->input(first ? 1 : 0));
  if (!known || (!first && node->input(1) != value)) {
    return {};
  }
  if (known->isScalar()) {
    return at::scalar_tensor(known->toScalar(), at::kDouble);
  }
  return known->isTensor() ? known->toTensor() : at::Tensor();
}

bool isSmallNumber(const at::Tensor& constant) { return constant.defined() && constant.dim() == 0; }

// One number for each of a dimension, of float32 or bfloat16.
bool isLine(const at::Tensor& constant, int64_t dim, const std::optional<Shape>& sizes) {
  if (!constant.defined() || constant.numel() < 2 ||
      constant.numel() != *std::max_element(constant.sizes().begin(), constant.sizes().end()) ||
      !(constant.scalar_type() == at::kFloat || constant.scalar_type() == at::kBFloat16)) {
    return false;
  }
  return !sizes || liesAlong(constant, dim, static_cast<int64_t>(sizes->size()));
}

bool isActivation(const Node* node) {
  return node->kind() == aten::relu || node->kind() == aten::silu ||
         node->kind() == aten::sigmoid || node->kind() == aten::tanh || node->kind() == aten::gelu;
}

// Takes what follows the core, as far as it belongs to a norm.
void takeTail(WrittenNorm& found, Nodes& nodes, const Facts& facts) {
  const auto sizes = facts.tensor(found.data).sizes;
  for (;;) {
    const auto* next = readerOf(found.result);
    if (next == nullptr || next->outputs().size() != 1) {
      return;
    }
    const auto type = facts.tensor(next->output()).dtype.value_or(at::kFloat);
    if (type != at::kFloat && type != at::kBFloat16) {
      return;
    }
    const bool scales = next->kind() == aten::mul && !found.addend.defined();
    const bool adds = next->kind() == aten::add && !found.addend.defined() &&
                      facts.constant(next->input(2)) == c10::IValue(1);
    const auto constant = (scales || adds) && found.activation == nullptr
                              ? constantBeside(next, found.result, facts)
                              : at::Tensor();
    if (isLine(constant, found.dim, sizes) || (scales && isSmallNumber(constant))) {
      (scales ? found.factors.emplace_back() : found.addend) = constant;
    } else if (found.activation == nullptr && isActivation(next)) {
      found.activation = next;
    } else if (!isCast(next)) {
      return;
    }
    nodes.insert(next);
    found.result = next->output();
  }
}

}  // namespace

bool liesAlong(const at::Tensor& constant, int64_t dim, int64_t rank) {
  const auto axis = (dim < 0 ? dim + rank : dim) - (rank - constant.dim());
  return axis >= 0 && axis < constant.dim() && constant.dim() <= rank &&
         constant.numel() == constant.size(axis);
}

std::optional<WrittenNorm> normAround(const Node* root, const Facts& facts) {
  const bool divides = root->kind() == aten::div && root->inputs().size() == 2;
  if (!(divides || root->kind() == aten::mul) || !isTensor(root->input(0)) ||
      !isTensor(root->input(1))) {
    return std::nullopt;
  }
  std::optional<Core> core(facts);
  if (!core->take(root)) {
    core.emplace(facts);
    if (divides || !core->takeTurned(root)) {
      return std::nullopt;
    }
  }
  if (!core->close(root)) {
    return std::nullopt;
  }
  WrittenNorm found{core->kind(), core->data(),   core->dim(), core->epsilon(), {}, {},
                    nullptr,      root->output(), {}};
  auto nodes = core->nodes();
  takeTail(found, nodes, facts);
  found.nodes.assign(nodes.begin(), nodes.end());
  std::sort(found.nodes.begin(), found.nodes.end(),
            [](const Node* a, const Node* b) { return a->isBefore(b); });
  return found;
}

}  // namespace llga

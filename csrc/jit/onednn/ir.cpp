#include "jit/onednn/ir.h"

#include <torch/csrc/jit/jit_log.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace llga {

Symbol fusionGroupKind() {
  static const Symbol kind = Symbol::fromQualString("llga::FusionGroup");
  return kind;
}

Symbol oncePerSizesKind() {
  static const Symbol kind = Symbol::fromQualString("llga::OncePerSizes");
  return kind;
}

Symbol anyLayoutAttr() {
  static const Symbol attr = Symbol::attr("llga_any_layout");
  return attr;
}

Symbol callLocalAttr() {
  static const Symbol attr = Symbol::attr("llga_call_local");
  return attr;
}

Symbol groupOwnedAttr() {
  static const Symbol attr = Symbol::attr("llga_group_owned");
  return attr;
}

Symbol viewedOrderAttr() {
  static const Symbol attr = Symbol::attr("llga_viewed_order");
  return attr;
}

namespace {

constexpr int64_t kOrderBase = 8;

}  // namespace

int64_t encodedOrder(const std::vector<int64_t>& order) {
  int64_t code = order.empty() ? 0 : 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    code = code * kOrderBase + *dim;
  }
  return code;
}

std::vector<int64_t> decodedOrder(int64_t code) {
  std::vector<int64_t> order;
  for (; code > 1; code /= kOrderBase) {
    order.push_back(code % kOrderBase);
  }
  return order;
}

Symbol mustBeFiniteAttr() {
  static const Symbol attr = Symbol::attr("llga_must_be_finite");
  return attr;
}

Symbol refusedAttr() {
  static const Symbol attr = Symbol::attr("llga_refused");
  return attr;
}

Symbol insertedAttr() {
  static const Symbol attr = Symbol::attr("llga_inserted");
  return attr;
}

Symbol asTargetKind() {
  static const Symbol kind = Symbol::fromQualString("llga::as_target");
  return kind;
}

Symbol asFloatKind() {
  static const Symbol kind = Symbol::fromQualString("llga::as_float");
  return kind;
}

Symbol ofBatchKind() {
  static const Symbol kind = Symbol::fromQualString("llga::of_batch");
  return kind;
}

Symbol rankAttr() {
  static const Symbol attr = Symbol::attr("llga_rank");
  return attr;
}

Symbol otherwiseAttr() {
  static const Symbol attr = Symbol::attr("llga_otherwise");
  return attr;
}

Symbol operandKind() {
  static const Symbol kind = Symbol::fromQualString("llga::operand");
  return kind;
}

bool isIdentity(const Node* node) {
  return node->kind() == asTargetKind() || node->kind() == asFloatKind() ||
         node->kind() == ofBatchKind() || node->kind() == operandKind();
}

Symbol unsafeAttentionKind() {
  static const Symbol kind = Symbol::fromQualString("llga::scaled_dot_product_attention");
  return kind;
}

bool isAttention(const Node* node) {
  return node->kind() == torch::jit::aten::scaled_dot_product_attention ||
         node->kind() == unsafeAttentionKind();
}

Symbol einsumKind() {
  static const Symbol kind = Symbol::fromQualString("llga::einsum");
  return kind;
}

Symbol reducedPrecisionKind() {
  static const Symbol kind = Symbol::fromQualString("aten::_autocast_to_reduced_precision");
  return kind;
}

Symbol fullPrecisionKind() {
  static const Symbol kind = Symbol::fromQualString("aten::_autocast_to_full_precision");
  return kind;
}

Symbol ownAttentionAttr() {
  static const Symbol attr = Symbol::attr("llga_own_attention");
  return attr;
}

const Value* behind(const Value* value) {
  while (isIdentity(value->node())) {
    value = value->node()->input(0);
  }
  return value;
}

const Node* readerOf(const Value* value) {
  const Node* found = nullptr;
  for (const auto& use : value->uses()) {
    if (use.user->kind() == asTargetKind() && use.offset == 1) {
      continue;  // reads no numbers, and comes along
    }
    if (found != nullptr || use.user->owningBlock() != value->node()->owningBlock()) {
      return nullptr;
    }
    found = use.user;
  }
  return found;
}

bool onlyGroupsRead(const Value* value) {
  const auto& uses = value->uses();
  return !uses.empty() && std::all_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
    return isFusionGroup(use.user) && use.user->owningBlock() == value->node()->owningBlock();
  });
}

void refuse(Node* node, const std::string& reason) { node->s_(refusedAttr(), reason); }

bool isShapeArithmetic(const Node* node) {
  using namespace torch::jit;
  if (node->kind() == prim::NumToTensor || node->kind() == aten::Int) {
    return true;
  }
  const bool scalars_only =
      std::all_of(node->inputs().begin(), node->inputs().end(), [](const Value* v) {
        const auto& t = v->type();
        return t->isSubtypeOf(*c10::IntType::get()) || t->isSubtypeOf(*c10::ListType::ofInts()) ||
               t->isSubtypeOf(*c10::NoneType::get()) ||
               // A traced size travels as a 0-dim tensor between NumToTensor and aten::Int.
               v->node()->kind() == prim::NumToTensor;
      });
  switch (node->kind()) {
    case aten::size:
      return true;
    case prim::ListConstruct:
      return scalars_only && node->output()->type()->isSubtypeOf(*c10::ListType::ofInts());
    case aten::add:
    case aten::sub:
    case aten::mul:
    case aten::floordiv:
    case aten::remainder:
    case aten::__getitem__:
      return scalars_only && node->output()->type()->isSubtypeOf(*c10::IntType::get());
    default:
      return false;
  }
}

bool isConvolution(const Node* node) {
  using namespace torch::jit;
  static const auto kConvolutionMode = Symbol::fromQualString("aten::_convolution_mode");
  switch (node->kind()) {
    case aten::conv1d:
    case aten::conv2d:
    case aten::conv3d:
      return true;
    case aten::_convolution:
    case aten::convolution:
      return toIValue(node->namedInput("transposed")) == c10::IValue(false);
    default:
      return node->kind() == kConvolutionMode;
  }
}

namespace {

bool isMaxPool(const Node* node) {
  using namespace torch::jit;
  switch (node->kind()) {
    case aten::max_pool1d:
    case aten::max_pool2d:
    case aten::max_pool3d:
      return true;
    default:
      return false;
  }
}

bool isPaddingWith(double number, const Node* node) {
  using torch::jit::toIValue;
  static const auto kConstantPad = Symbol::fromQualString("aten::constant_pad_nd");
  const bool constant = node->kind() == kConstantPad;
  if (!constant && (node->kind() != torch::jit::aten::pad ||
                    toIValue(node->input(2)) != c10::IValue("constant"))) {
    return false;
  }
  const auto filled = toIValue(node->input(constant ? 2 : 3));
  return filled &&
         (filled->isNone() ? number == 0 : filled->isScalar() && filled->toScalar().equal(number));
}

}  // namespace

const Node* paddingOf(const Node* node) {
  const bool pools = isMaxPool(node);
  if (!pools && !isConvolution(node)) {
    return nullptr;
  }
  const auto* padding = node->input(0)->node();
  const bool its_own =
      isPaddingWith(pools ? -std::numeric_limits<double>::infinity() : 0, padding) &&
      padding->owningBlock() == node->owningBlock() && padding->output()->uses().size() == 1;
  return its_own ? padding : nullptr;
}

std::vector<const Node*> computations(const Graph& subgraph) {
  std::vector<const Node*> found;
  for (const auto* node : subgraph.nodes()) {
    if (node->kind() != torch::jit::prim::Constant &&
        node->kind() != torch::jit::prim::ListConstruct && !isIdentity(node) &&
        !isShapeArithmetic(node)) {
      found.push_back(node);
    }
  }
  std::unordered_set<const Node*> paddings;
  for (const auto* node : found) {
    paddings.insert(paddingOf(node));
  }
  std::erase_if(found, [&](const Node* node) { return paddings.count(node) != 0; });
  return found;
}

at::Tensor constantTensor(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return known && known->isTensor() ? known->toTensor() : at::Tensor();
}

std::optional<double> numberOf(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  if (known && (known->isInt() || known->isDouble())) {
    return known->toScalar().toDouble();
  }
  const auto tensor = constantTensor(value);
  return tensor.defined() && tensor.dim() == 0 && !tensor.is_complex() && tensor.is_cpu()
             ? std::optional(tensor.item().toDouble())
             : std::nullopt;
}

std::optional<int64_t> intOf(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return known && known->isInt() ? std::optional(known->toInt()) : std::nullopt;
}

std::optional<std::vector<int64_t>> intsOf(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return known && known->isIntList() ? std::optional(known->toIntVector()) : std::nullopt;
}

bool isTrue(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return known && known->isBool() && known->toBool();
}

const Node* soleComputation(const Graph& subgraph) {
  const auto found = computations(subgraph);
  return found.size() == 1 ? found[0] : nullptr;
}

bool movesNumbers(const Node* node) {
  namespace aten = torch::jit::aten;
  switch (node->kind()) {
    case aten::view:
    case aten::reshape:
    case aten::flatten:
    case aten::squeeze:
    case aten::unsqueeze:
    case aten::transpose:
    case aten::permute:
    case aten::t:
    case aten::slice:
    case aten::select:
    case aten::contiguous:
      break;
    default:
      return false;
  }
  return node->outputs().size() == 1 && isTensor(node->output()) && isTensor(node->input(0)) &&
         std::none_of(node->inputs().begin() + 1, node->inputs().end(), isTensor);
}

bool takesPart(const Node* node) {
  return node->kind() == torch::jit::aten::slice || node->kind() == torch::jit::aten::select;
}

bool beginsAtFirst(const Node* slice) {
  return slice->input(2)->mustBeNone() || intOf(slice->input(2)) == 0;
}

bool takesAll(const Node* slice) {
  const auto* end = slice->input(3);
  return beginsAtFirst(slice) &&
         (end->mustBeNone() || intOf(end) == std::numeric_limits<int64_t>::max()) &&
         intOf(slice->input(4)) == 1;
}

bool makesParts(const Node* node) {
  namespace aten = torch::jit::aten;
  namespace prim = torch::jit::prim;
  switch (node->kind()) {
    case prim::ConstantChunk:
    case aten::chunk:
    case aten::narrow:
    case aten::slice:
    case aten::split:
    case aten::split_with_sizes:
      return true;
    case prim::ListUnpack:
      return makesParts(node->input()->node());
    default:
      return false;
  }
}

bool readsShape(const Node* node) {
  return node->kind() == torch::jit::aten::size || node->kind() == torch::jit::aten::dim;
}

bool isTanhGelu(const Node* node) {
  return node->kind() == torch::jit::aten::gelu &&
         torch::jit::toIValue(node->namedInput("approximate")) == c10::IValue("tanh");
}

bool isProduct(const Node* node) {
  using namespace torch::jit;
  switch (node->kind()) {
    case aten::_convolution:
    case aten::convolution:
    case aten::conv_transpose1d:
    case aten::conv_transpose2d:
    case aten::conv_transpose3d:
    case aten::linear:
    case aten::matmul:
    case aten::mm:
    case aten::bmm:
    case aten::addmm:
    case aten::baddbmm:
      return true;
    default:
      return isConvolution(node) || node->kind() == einsumKind();
  }
}

bool isBinary(const Node* node) {
  using namespace torch::jit;
  switch (node->kind()) {
    case aten::add:
    case aten::sub:
    case aten::rsub:
    case aten::mul:
    case aten::div:
    case aten::maximum:
    case aten::minimum:
      break;
    default:
      return false;
  }
  return node->inputs().size() >= 2 && node->outputs().size() == 1 && isTensor(node->input(0)) &&
         isTensor(node->output()) &&
         // div with a rounding mode is another function
         !(node->kind() == aten::div && node->inputs().size() > 2);
}

void setDtype(Value* value, at::ScalarType dtype) {
  auto type = value->type()->cast<c10::TensorType>();
  value->setType((type ? type : c10::TensorType::get())->withScalarType(dtype));
}

std::string qualifiedName(const Node* node) {
  const auto* schema = node->maybeSchema();
  return schema != nullptr ? c10::toString(schema->operator_name())
                           : std::string(node->kind().toQualString());
}

}  // namespace llga

#include "jit/onednn/kernel.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/util/irange.h>
#include <fmt/format.h>
#include <torch/csrc/jit/jit_log.h>
#include <torch/csrc/jit/passes/canonicalize.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <x86intrin.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <span>

#include "jit/onednn/inspect.h"
#include "jit/onednn/module_watch.h"
#include "jit/onednn/observed_run.h"
#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/autotune.h"
#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/finite.h"
#include "jit/onednn/runtime/own_attention.h"
#include "jit/onednn/runtime/own_lookup.h"
#include "jit/onednn/runtime/speed_check.h"
#include "jit/onednn/runtime/stopwatch.h"
#include "jit/onednn/shared_kernel.h"

namespace llga {
namespace {

using c10::ArrayRef;
using c10::IValue;
using torch::jit::Stack;

std::atomic<int> fpmath_mode{dnnl_fpmath_mode_strict};

// A plan is measured again after this many times the time that measuring it took; then after this
// many times that; and so on.
constexpr int64_t kPatience = 10;

// Keys that a plain CPU tensor may or may not have without being another kind of tensor.
constexpr c10::DispatchKeySet kIgnoredKeys =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

inline bool isPlainCpu(const c10::TensorImpl& impl) {
  constexpr c10::DispatchKeySet plain(c10::DispatchKey::CPU);
  constexpr c10::DispatchKeySet quantized(c10::DispatchKey::QuantizedCPU);
  const auto keys = impl.key_set() - kIgnoredKeys;
  return keys == plain || keys == quantized;
}

// Leaves eager's autocast out of what this thread computes, if `wanted`.
class WithoutAutocast {
 public:
  explicit WithoutAutocast(bool wanted) {
    if (wanted) {
      guard_.emplace(c10::autocast_dispatch_keyset);
    }
  }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

inline uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15ULL;
}

// Sizes are what changes between calls; the rest is compared, not hashed.
uint64_t hashOf(const Environment& environment, ArrayRef<IValue> inputs) {
  uint64_t hash = static_cast<uint64_t>(environment.threads);
  for (const auto& input : inputs) {
    if (input.isTensor() && input.toTensor().defined()) {
      for (const auto size : input.toTensor().sizes()) {
        hash = mix(hash, static_cast<uint64_t>(size));
      }
    } else if (input.isInt()) {
      hash = mix(hash, static_cast<uint64_t>(input.toInt()));
    }
  }
  return hash;
}

inline bool wantsGradient(ArrayRef<IValue> inputs) {
  return std::any_of(inputs.begin(), inputs.end(), [](const IValue& input) {
    return input.isTensor() && input.toTensor().requires_grad();
  });
}

// Marks a value that passes between groups only: it may hold NaN or infinities.
struct Tainted final : c10::BackendMeta {};

inline bool isTainted(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->get_backend_meta() != nullptr;
}

void markTainted(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Tainted>());
}

// "" if a plan can be compiled for `tensor`; `indexed`: integers are indices.
std::string unsupported(const at::Tensor& tensor, bool indexed) {
  if (!tensor.defined()) {
    return "undefined tensor";
  }
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!isPlainCpu(*impl)) {
    return fmt::format("input is not a plain CPU tensor ({})", c10::toString(impl->key_set()));
  }
  const bool index = indexed && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
  if (!index && !toDataType(tensor.scalar_type())) {
    return fmt::format("input of type {}", c10::toString(tensor.scalar_type()));
  }
  if (tensor.numel() == 0) {
    return "input without elements";
  }
  return "";
}

InputSignature signatureOf(const IValue& value) {
  InputSignature signature;
  if (!value.isTensor()) {
    signature.host = value;
    return signature;
  }
  const auto& tensor = value.toTensor();
  signature.is_tensor = true;
  signature.dtype = tensor.scalar_type();
  signature.sizes = tensor.sizes().vec();
  signature.strides = tensor.strides().vec();
  return signature;
}

at::Tensor inOrder(const at::Tensor& tensor, const Shape& dims) {
  if (static_cast<int64_t>(dims.size()) != tensor.dim()) {
    return tensor.contiguous();
  }
  Shape back(dims.size());
  for (const auto i : c10::irange(dims.size())) {
    back[static_cast<size_t>(dims[i])] = static_cast<int64_t>(i);
  }
  return tensor.permute(dims).contiguous().permute(back);
}

// Eager's own tensor for a value that lies in a layout of oneDNN's choice, or a view of one.
at::Tensor asInEager(const at::Tensor& tensor, int64_t owned, int64_t viewed_order) {
  if (viewed_order != 0) {
    return inOrder(tensor, decodedOrder(viewed_order));
  }
  if (owned == 0) {
    return tensor;
  }
  if (owned == 2) {
    return tensor.contiguous(tensor.dim() == 5 ? at::MemoryFormat::ChannelsLast3d
                                               : at::MemoryFormat::ChannelsLast);
  }
  return tensor.contiguous();
}

// Runs the subgraph once with concrete inputs and notes what every value is.
void recordRun(Graph& subgraph, Stack inputs, RecordedFacts& facts) {
  ObservedGraph(subgraph, [&facts](const Value* value, const IValue& now) {
    facts.record(value, now);
  }).run(std::move(inputs));
}

}  // namespace

int fpmathMode() { return fpmath_mode.load(std::memory_order_relaxed); }

void setFpmathMode(int mode) { fpmath_mode.store(mode, std::memory_order_relaxed); }

Environment Environment::current() {
  return {at::get_num_threads(), at::autocast::is_autocast_enabled(at::kCPU),
          at::autocast::get_autocast_dtype(at::kCPU), fpmathMode()};
}

Symbol fpmathModeAttr() {
  static const Symbol attr = Symbol::attr("llga_fpmath_mode");
  return attr;
}

bool InputSignature::matches(const IValue& value) const {
  if (!is_tensor) {
    if (host.isDouble()) {  // by bits: NaN is the same signature again, minus zero is another one
      return value.isDouble() &&
             std::bit_cast<uint64_t>(value.toDouble()) == std::bit_cast<uint64_t>(host.toDouble());
    }
    return value.tagKind() == host.tagKind() && value == host;
  }
  if (!value.isTensor()) {
    return false;
  }
  const auto* impl = value.toTensor().unsafeGetTensorImpl();
  if (impl->dtype() != c10::scalarTypeToTypeMeta(dtype) || !(impl->sizes() == sizes)) {
    return false;
  }
  return isPlainCpu(*impl) && impl->strides() == strides;
}

FusionKernel::FusionKernel(const Node* group)
    : subgraph_(group->g(torch::jit::attr::Subgraph)),
      id_([] {
        static std::atomic<uint64_t> last{0};
        return ++last;
      }()),
      name_(groupName(*subgraph_)),
      input_count_(group->inputs().size()),
      takes_indices_(isLookupGroup(*subgraph_)),
      kept_(takes_indices_ || isOwnAttentionGroup(*subgraph_) ? Sparse::all : Sparse::with_gaps) {
  // A graph on which layout propagation did not run has none of its attributes.
  owned_.resize(input_count_, 0);
  viewed_order_.resize(input_count_, 0);
  any_layout_.resize(group->outputs().size(), false);
  call_local_.resize(group->outputs().size(), false);
  if (group->hasAttribute(groupOwnedAttr())) {
    owned_ = group->is(groupOwnedAttr());
  }
  if (group->hasAttribute(viewedOrderAttr())) {
    viewed_order_ = group->is(viewedOrderAttr());
  }
  if (group->hasAttribute(anyLayoutAttr())) {
    const auto& any = group->is(anyLayoutAttr());
    any_layout_.assign(any.begin(), any.end());
  }
  if (group->hasAttribute(callLocalAttr())) {
    const auto& local = group->is(callLocalAttr());
    call_local_.assign(local.begin(), local.end());
  }
  if (group->hasAttribute(fpmathModeAttr())) {
    fpmath_mode_ = static_cast<int>(group->i(fpmathModeAttr()));
  }
  for (size_t i = 0; i < input_count_; ++i) {
    if (owned_[i] != 0) {
      owned_inputs_.push_back(i);
    }
    if (group->hasAttribute(mustBeFiniteAttr()) && group->is(mustBeFiniteAttr())[i] != 0) {
      watched_.push_back(i);
    }
  }
  for (auto* node : subgraph_->nodes()) {
    in_float_ = in_float_ || node->kind() == asFloatKind();
    if (node->kind() == torch::jit::prim::Constant && isTensor(node->output())) {
      if (auto weight = findReleasable(node->t(torch::jit::attr::value))) {
        weights_.push_back(std::move(weight));
      }
    }
  }
  PlanCache::instance().add(this);
}

FusionKernel::~FusionKernel() { PlanCache::instance().remove(this); }

// ------------------------------------------------------------------------------------- hot path

Environment FusionKernel::environment() const {
  auto current = Environment::current();
  current.fpmath_mode = fpmath_mode_.value_or(current.fpmath_mode);
  return current;
}

bool FusionKernel::matches(const Entry& entry, const Environment& environment,
                           ArrayRef<IValue> inputs) const {
  if (!(entry.environment == environment)) {
    return false;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!entry.inputs[i].matches(inputs[i])) {
      return false;
    }
  }
  return true;
}

std::shared_ptr<const Plan> FusionKernel::find(const Environment& environment,
                                               ArrayRef<IValue> inputs) {
  const std::shared_lock lock(mutex_);
  auto use = [](Entry& entry) -> std::shared_ptr<const Plan> {
    entry.last_used.store(__rdtsc(), std::memory_order_relaxed);
    // Null while it compiles for the first time, and where that failed.
    return entry.isDue() ? nullptr : entry.plan;
  };
  const auto recent = recent_.load(std::memory_order_relaxed);
  if (recent < entries_.size() && matches(*entries_[recent].entry, environment, inputs)) {
    return use(*entries_[recent].entry);
  }
  const auto hash = hashOf(environment, inputs);
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].hash == hash && matches(*entries_[i].entry, environment, inputs)) {
      recent_.store(i, std::memory_order_relaxed);
      return use(*entries_[i].entry);
    }
  }
  return nullptr;
}

bool FusionKernel::holdsNonFinite(ArrayRef<IValue> inputs) const {
  for (const auto i : owned_inputs_) {
    if (isTainted(inputs[i].toTensor())) {
      return true;
    }
  }
  for (const auto i : watched_) {
    if (!allFinite(inputs[i].toTensor())) {
      return true;
    }
  }
  return false;
}

void FusionKernel::run(Stack& stack) {
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) [[unlikely]] {
    return runObserved(stack, std::move(*callbacks));
  }
  runUnobserved(stack);
}

void FusionKernel::runUnobserved(Stack& stack) {
  const auto inputs = torch::jit::last(stack, input_count_);
  if (!c10::GradMode::is_enabled() || !wantsGradient(inputs)) {
    const auto plan = find(environment(), inputs);
    if (plan && (plan->takes_non_finite || !holdsNonFinite(inputs))) {
      try {
        plan->execute(stack, input_count_);
        hits_.fetch_add(1, std::memory_order_relaxed);
        return;
      } catch (const dnnl::error& error) {
        return fallBack(stack, fmt::format("oneDNN: {}", error.what()));
      } catch (const StepError& error) {
        return fallBack(stack, error.what());
      }
    }
  }
  runSlow(stack);
}

// ------------------------------------------------------------------------------------ slow path

void FusionKernel::runObserved(Stack& stack, at::StepCallbacks&& callbacks) {
  Execution execution(this);
  at::RecordFunction guard(std::move(callbacks));
  if (guard.needsInputs()) {
    const auto inputs = torch::jit::last(stack, input_count_);
    guard.before(name_, ArrayRef<const IValue>(inputs.data(), inputs.size()));
  } else {
    guard.before(name_);
  }
  runUnobserved(stack);
  if (guard.needsOutputs()) {
    guard.setOutputs(torch::jit::last(stack, any_layout_.size()).vec());
  }
}

void FusionKernel::runSlow(Stack& stack) {
  const auto inputs = torch::jit::last(stack, input_count_);
  if (c10::GradMode::is_enabled() && wantsGradient(inputs)) {
    return fallBack(stack, "a gradient is wanted");
  }
  const std::span<IValue> values(stack.data() + stack.size() - input_count_, input_count_);
  if (const auto reason = makeDense(values, kept_); !reason.empty()) {
    return fallBack(stack, reason);
  }
  if (holdsNonFinite(inputs)) {
    return fallBack(stack, "an input holds NaN or an infinity", /*taint=*/true);
  }
  const auto environment = this->environment();
  bool ours = false;
  const auto entry = claim(environment, inputs, ours);
  if (ours) {
    compile(*entry, inputs);
  }
  std::unique_lock lock(mutex_);
  const auto state = entry->state;
  const auto reason = entry->reason;
  const auto plan = entry->plan;
  lock.unlock();
  if (state == Entry::State::ready) {
    entry->last_used.store(__rdtsc(), std::memory_order_relaxed);
    if (!ours) {
      hits_.fetch_add(1, std::memory_order_relaxed);
    }
    try {
      plan->execute(stack, input_count_);
      return;
    } catch (const dnnl::error& error) {
      return fallBack(stack, fmt::format("oneDNN: {}", error.what()));
    } catch (const StepError& error) {
      return fallBack(stack, error.what());
    }
  }
  fallBack(stack, state == Entry::State::failed ? reason : "another thread is compiling");
}

std::string FusionKernel::makeDense(std::span<IValue> inputs, Sparse kept) const {
  for (auto& value : inputs) {
    if (!value.isTensor()) {
      continue;
    }
    if (auto reason = unsupported(value.toTensor(), takes_indices_); !reason.empty()) {
      return reason;
    }
    const auto& tensor = value.toTensor();
    if (kept == Sparse::all || tensor.is_non_overlapping_and_dense() ||
        (kept == Sparse::with_gaps && hasGaps(tensor.sizes().vec(), tensor.strides().vec()))) {
      continue;
    }
    value = tensor.clone(at::MemoryFormat::Preserve);
  }
  return "";
}

FusionKernel::EntryPtr FusionKernel::claim(const Environment& environment, ArrayRef<IValue> inputs,
                                           bool& ours) {
  const auto hash = hashOf(environment, inputs);
  const std::unique_lock lock(mutex_);
  for (const auto& [known, entry] : entries_) {
    if (known == hash && matches(*entry, environment, inputs)) {
      if (entry->state != Entry::State::compiling && entry->isDue()) {
        entry->state = Entry::State::compiling;
        entry->retry = Entry::kNever;
        ours = true;
      }
      return entry;
    }
  }
  auto entry = std::make_shared<Entry>();
  entry->environment = environment;
  for (const auto& input : inputs) {
    entry->inputs.push_back(signatureOf(input));
  }
  entry->last_used = __rdtsc();
  entries_.push_back({hash, entry});
  ours = true;
  return entry;
}

Stack FusionKernel::allAsInEager(ArrayRef<IValue> inputs) const {
  Stack stack;
  for (const auto i : c10::irange(inputs.size())) {
    const auto& input = inputs[i];
    stack.push_back(input.isTensor()
                        ? IValue(asInEager(input.toTensor(), owned_[i], viewed_order_[i]))
                        : input);
  }
  return stack;
}

CompileRequest FusionKernel::requestFor(ArrayRef<IValue> inputs, const Facts& facts,
                                        const Environment& environment) const {
  CompileRequest request{subgraph_.get(),
                         &facts,
                         {},
                         {},
                         any_layout_,
                         call_local_,
                         static_cast<dnnl::fpmath_mode>(environment.fpmath_mode),
                         environment.threads};
  for (const auto i : c10::irange(inputs.size())) {
    request.input_strides.push_back(inputs[i].isTensor() ? inputs[i].toTensor().strides().vec()
                                                         : Shape{});
    request.owned_inputs.push_back(owned_[i] != 0);
  }
  return request;
}

void FusionKernel::compile(Entry& entry, ArrayRef<IValue> inputs) {
  const auto start = std::chrono::steady_clock::now();
  PlanCache::instance().missed();
  std::shared_ptr<const Plan> plan;
  std::string reason;
  std::optional<TooSlow> too_slow;
  bool doubtful = false;
  // For these inputs; the fallback will raise the same.
  const char* raised_by = "the subgraph raises";
  try {
    if (auto* execution = Execution::current()) {
      execution->compiled = true;
    }
    RECORD_FUNCTION("llga::compile " + name_, ArrayRef<const IValue>{});
    const WeightsInUse present(weights_);
    const WithoutAutocast none(in_float_);
    RecordedFacts facts;
    FirstRun first;
    first.seconds = secondsOf([&] { recordRun(*subgraph_, allAsInEager(inputs), facts); });
    raised_by = "compiling it raises";
    const auto interpret = [&] {
      auto stack = allAsInEager(inputs);
      torch::jit::InterpreterState(fallbackCode()).run(stack);
    };
    auto request = requestFor(inputs, facts, entry.environment);
    if (autotunes()) {
      request.way_of = chosenWay;
    }
    auto checked = compileChecked(request, inputs.vec(), interpret, first);
    plan = std::move(checked.plan);
    doubtful = checked.doubtful;
    if (request.way_of) {
      const auto text = torch::jit::Canonicalize(subgraph_, false)->toString(false);
      plan = fastestPlan(request, text, std::move(plan), inputs.vec(), interpret);
    }
  } catch (const TooSlow& error) {
    reason = error.reason;
    too_slow = error;
  } catch (const CompileError& error) {
    reason = error.reason;
  } catch (const std::exception& error) {
    reason = fmt::format("{}: {}", raised_by, error.what());
  }
  GRAPH_DEBUG("llga: compiled ", qualifiedName(subgraph_->return_node()), " reason: ", reason);
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::duration<double> elapsed = now - start;
  {
    const std::unique_lock lock(mutex_);
    entry.state = plan ? Entry::State::ready : Entry::State::failed;
    entry.plan = std::move(plan);
    entry.reason = std::move(reason);
    if (too_slow && too_slow->until) {
      entry.patience = too_slow->patience;
      entry.retry = *too_slow->until;
    } else if (too_slow || doubtful) {
      entry.patience *= kPatience;
      entry.retry = now + (now - start) * entry.patience;
      if (too_slow) {
        believe(std::move(*too_slow), entry.retry, entry.patience);
      }
    } else {
      entry.retry = Entry::kNever;
    }
  }
  PlanCache::instance().compiled(elapsed.count());
}

std::shared_ptr<const Plan> FusionKernel::planFor(ArrayRef<IValue> inputs) {
  auto dense = inputs.vec();
  return makeDense(dense, kept_).empty() ? find(environment(), dense) : nullptr;
}

std::shared_ptr<const Description> FusionKernel::describe(
    ArrayRef<IValue> inputs, const std::vector<Shape>& output_strides) {
  const WeightsInUse present(weights_);
  auto dense = inputs.vec();
  const auto kept = kept_ == Sparse::all ? kept_ : Sparse::none;  // oneDNN gets what a plan copies
  if (auto reason = makeDense(dense, kept); !reason.empty()) {
    throw CompileError{std::move(reason)};
  }
  RecordedFacts facts;
  {
    const WithoutAutocast none(in_float_);
    recordRun(*subgraph_, allAsInEager(dense), facts);
  }
  auto request = requestFor(dense, facts, environment());
  if (const auto plan = planFor(inputs)) {
    request.division = plan->division;
  }
  auto description = describePlan(request, output_strides);
  if (!weights_.empty()) {
    // The memory of a weight may be gone when the constant is asked for.
    for (auto& [id, make] : description.constants) {
      make = [make = std::move(make), weights = weights_] {
        const WeightsInUse needed(weights);
        return make().clone();
      };
    }
  }
  return std::make_shared<const Description>(std::move(description));
}

const torch::jit::Code& FusionKernel::fallbackCode() {
  std::call_once(fallback_once_, [&] {
    fallback_code_ = std::make_unique<torch::jit::Code>(subgraph_, "llga_fallback");
  });
  return *fallback_code_;
}

void FusionKernel::runSubgraph(Stack& stack) {
  if (c10::GradMode::is_enabled() && wantsGradient(stack)) {
    for (const auto& weight : weights_) {
      weight->pin();  // autograd saves it for the backward pass
    }
  }
  const WeightsInUse present(weights_);
  const WithoutAutocast none(in_float_);
  torch::jit::InterpreterState(fallbackCode()).run(stack);
  for (auto& result : stack) {
    if (!weights_.empty() && result.isTensor() && findReleasable(result.toTensor())) {
      result = result.toTensor().clone();  // a view of a weight
    }
  }
}

void FusionKernel::fallBack(Stack& stack, const std::string& reason, bool taint) {
  PlanCache::instance().fellBack(reason);
  if (auto* execution = Execution::current()) {
    execution->fell_back = true;
    execution->fallback_reason = reason;
  }
  for (const auto i : c10::irange(input_count_)) {
    auto& value = stack[stack.size() - input_count_ + i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = asInEager(value.toTensor(), owned_[i], viewed_order_[i]);
    }
  }
  Stack own(std::make_move_iterator(stack.end() - static_cast<std::ptrdiff_t>(input_count_)),
            std::make_move_iterator(stack.end()));
  torch::jit::drop(stack, input_count_);
  runSubgraph(own);
  for (size_t i = 0; taint && i < own.size(); ++i) {
    if (any_layout_[i] && !allFinite(own[i].toTensor())) {
      markTainted(own[i].toTensor());
    }
  }
  stack.insert(stack.end(), std::make_move_iterator(own.begin()),
               std::make_move_iterator(own.end()));
}

// ------------------------------------------------------------------------------ the cache's view

void FusionKernel::dropPlansWith(const std::shared_ptr<const ModuleWatch>& watch) {
  const std::unique_lock lock(mutex_);
  watches_.add(watch);
}

bool FusionKernel::abandoned() const {
  const std::shared_lock lock(mutex_);
  return watches_.allGone();
}

bool FusionKernel::oldest(uint64_t& tick) const {
  const std::shared_lock lock(mutex_);
  bool found = false;
  for (const auto& [hash, entry] : entries_) {
    const auto used = entry->last_used.load(std::memory_order_relaxed);
    if (entry->state != Entry::State::compiling && (!found || used < tick)) {
      tick = used;
      found = true;
    }
  }
  return found;
}

void FusionKernel::evictOldest() {
  const std::unique_lock lock(mutex_);
  auto oldest = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->entry->state != Entry::State::compiling &&
        (oldest == entries_.end() || it->entry->last_used < oldest->entry->last_used)) {
      oldest = it;
    }
  }
  if (oldest != entries_.end()) {
    entries_.erase(oldest);
  }
}

void FusionKernel::evictAll() {
  const std::unique_lock lock(mutex_);
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(),
                                [](const Known& known) {
                                  return known.entry->state != Entry::State::compiling;
                                }),
                 entries_.end());
}

uint64_t FusionKernel::planCount() const {
  const std::shared_lock lock(mutex_);
  return entries_.size();
}

// ---------------------------------------------------------------------------------- registration

std::shared_ptr<FusionKernel> kernelOf(const Node* group) {
  return sharedKernel<FusionKernel>(group);
}

void registerFusionGroup() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      fusionGroupKind(),
      [](const Node* node) -> torch::jit::Operation {
        auto kernel = kernelOf(node);
        return [kernel](Stack& stack) { kernel->run(stack); };
      },
      c10::AliasAnalysisKind::PURE_FUNCTION)});
}

}  // namespace llga

#include "jit/onednn/inspect.h"

#include <ATen/record_function.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <oneapi/dnnl/dnnl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "dnnl_graph_enums.inc"
#include "jit/onednn/kernel.h"
#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

using c10::IValue;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// ---------------------------------------------------------------------------------------- names

namespace {

std::optional<size_t> rankOf(const torch::jit::Value* value) {
  // A constant's type may have been erased.
  if (const auto known = torch::jit::toIValue(value); known && known->isTensor()) {
    return static_cast<size_t>(known->toTensor().dim());
  }
  const auto type = value->type()->cast<c10::TensorType>();
  return type ? type->dim() : std::nullopt;
}

// "aten::_convolution" -> "conv2d"
std::string shortName(const Node* node) {
  std::string name = node->kind().toUnqualString();
  if (name == "_convolution" || name == "convolution" || name == "_convolution_mode") {
    const auto rank = rankOf(node->input(1));
    bool transposed = false;
    if (const auto at = node->schema().argumentIndexWithName("transposed")) {
      transposed = isTrue(node->input(static_cast<size_t>(*at)));
    }
    return std::string(transposed ? "conv_transpose" : "conv") +
           (rank ? std::to_string(*rank - 2) + "d" : "");
  }
  name.erase(0, name.find_first_not_of('_'));
  while (name.size() > 1 && name.back() == '_') {
    name.pop_back();
  }
  return name == "scaled_dot_product_attention" ? "attention" : name;
}

}  // namespace

std::string groupName(const Graph& subgraph) {
  std::vector<std::string> computing;
  std::vector<std::string> views;
  for (const auto* node : subgraph.nodes()) {
    if (const auto* entry = findOp(node)) {
      auto& names = entry->op_class == OpClass::view ? views : computing;
      names.push_back(shortName(node));
    }
  }
  auto& names = computing.empty() ? views : computing;
  if (names.empty()) {  // what only a kernel of our own computes
    for (const auto* node : computations(subgraph)) {
      names.push_back(shortName(node));
    }
  }
  constexpr size_t kShown = 6;
  if (names.size() > kShown + 1) {
    const auto left_out = names.size() - kShown;
    names.erase(names.begin() + kShown - 1, names.end() - 1);
    names.insert(names.end() - 1, fmt::format("({} more)", left_out));
  }
  return fmt::format("{}", fmt::join(names, "+"));
}

#define LLGA_NAME(name, value) \
  case value:                  \
    return #name;

std::string nameOf(OpKind kind) {
  switch (kind) {
    DNNL_GRAPH_PY_OP_KINDS(LLGA_NAME)
    default:
      return "undef";
  }
}

std::string nameOf(Attr attr) {
  switch (attr) {
    DNNL_GRAPH_PY_OP_ATTRS(LLGA_NAME)
    default:
      return "undef";
  }
}

std::string nameOf(DataType type) {
  switch (type) {
    DNNL_GRAPH_PY_DATA_TYPES(LLGA_NAME)
    default:
      return "undef";
  }
}

std::string nameOf(Layout::layout_type type) {
  switch (type) {
    DNNL_GRAPH_PY_LAYOUT_TYPES(LLGA_NAME)
    default:
      return "undef";
  }
}

std::string nameOf(Layout::property_type type) {
  switch (type) {
    DNNL_GRAPH_PY_PROPERTY_TYPES(LLGA_NAME)
    default:
      return "undef";
  }
}

#undef LLGA_NAME

std::vector<std::pair<std::string, size_t>> sourceLines(const Node* node) {
  std::vector<std::pair<std::string, size_t>> lines;
  auto add = [&](const torch::jit::SourceRange& range) {
    if (const auto where = range.file_line_col()) {
      lines.emplace_back(std::get<0>(*where), std::get<1>(*where));
    }
  };
  add(node->sourceRange());
  if (const auto& stack = node->callstack()) {
    auto calls = (*stack)->vec();  // outermost first
    for (auto it = calls.rbegin(); it != calls.rend(); ++it) {
      add(std::get<1>(*it));
    }
  }
  return lines;
}

// ---------------------------------------------------------------------------------- observation

namespace {

thread_local Execution* executing = nullptr;
thread_local int depth = 0;

struct Observer {
  std::mutex mutex;
  bool on = false;
  ObserveMode mode = ObserveMode::time;
  uint64_t kernel = 0;
  size_t call = 0;
  size_t calls_seen = 0;
  at::CallbackHandle handle = 0;
  std::vector<Event> events;
};

Observer& observer() {
  static auto* instance = new Observer;
  return *instance;
}

struct Context final : at::ObserverContext {
  Event event;
  bool top = false;  // not inside another op
  bool wanted = false;
  // Mode::describe
  std::vector<IValue> inputs;
  // Mode::announce, which must not hold the inputs: plans overwrite those that nobody else has.
  std::shared_ptr<const Plan> plan;
};

ValueInfo infoOf(const IValue& value) {
  ValueInfo info;
  if (value.isTensor() && value.toTensor().defined()) {
    const auto& tensor = value.toTensor();
    info.is_tensor = true;
    info.dtype = tensor.scalar_type();
    info.sizes = tensor.sizes().vec();
    if (tensor.layout() == at::kStrided) {
      info.strides = tensor.strides().vec();
    }
  } else {
    std::ostringstream text;
    text << value;
    info.text = text.str();
  }
  return info;
}

std::unique_ptr<at::ObserverContext> onStart(const at::RecordFunction& fn) {
  auto context = std::make_unique<Context>();
  context->top = depth++ == 0;
  if (!context->top) {
    return context;
  }
  auto& state = observer();
  if (executing != nullptr) {
    context->event.kernel = executing->kernel->id();
    switch (state.mode) {
      case ObserveMode::announce:
        std::printf("llga_fuser,begin,%llu\n",
                    static_cast<unsigned long long>(context->event.kernel));
        std::fflush(stdout);
        context->plan =
            executing->kernel->planFor(std::vector<IValue>(fn.inputs().begin(), fn.inputs().end()));
        break;
      case ObserveMode::describe:
        context->inputs.assign(fn.inputs().begin(), fn.inputs().end());
        break;
      case ObserveMode::record: {
        const std::lock_guard lock(state.mutex);
        context->wanted = context->event.kernel == state.kernel && state.calls_seen++ == state.call;
        break;
      }
      case ObserveMode::time:
        break;
    }
    if (context->wanted) {
      for (const auto& input : fn.inputs()) {
        context->event.input_tensors.push_back(input.isTensor() ? input.toTensor().clone()
                                                                : at::Tensor());
      }
    }
  }
  context->event.name = fn.name();
  context->event.start = now();
  return context;
}

void describe(Context& context, const at::RecordFunction& fn) {
  auto& event = context.event;
  for (const auto& input : context.inputs) {
    event.inputs.push_back(infoOf(input));
  }
  std::vector<Shape> strides;
  for (const auto& output : fn.outputs()) {
    event.outputs.push_back(infoOf(output));
    strides.push_back(event.outputs.back().strides);
  }
  try {
    event.description = executing->kernel->describe(context.inputs, strides);
  } catch (const CompileError& error) {
    event.not_described = error.reason;
  } catch (const std::exception& error) {
    event.not_described = error.what();
  }
}

// The order of dimensions in memory as oneDNN writes it: "acdb" for channels last.
std::string orderOf(const Layout& layout) {
  if (layout.get_layout_type() != Layout::layout_type::strided) {
    return "";
  }
  const auto strides = layout.get_strides();
  std::string order(strides.size(), 'a');
  std::iota(order.begin(), order.end(), 'a');
  std::stable_sort(order.begin(), order.end(),
                   [&](char one, char other) { return strides[one - 'a'] > strides[other - 'a']; });
  return order;
}

// oneDNN has told of its kernels.
void announceEnd(const Context& context) {
  if (context.plan) {
    for (const auto& step : context.plan->steps) {
      if (step.kernel.run) {
        const auto& from = step.inputs.front().second;
        const auto& to = step.outputs.front().second;
        fmt::print("llga_fuser,exec,{},{},{} {},{} {},{}\n", step.kernel.kind,
                   step.kernel.implementation, nameOf(from.get_data_type()), orderOf(from),
                   nameOf(to.get_data_type()), orderOf(to), fmt::join(from.get_dims(), "x"));
      }
    }
  }
  std::printf("llga_fuser,end\n");
  std::fflush(stdout);
}

void onEnd(const at::RecordFunction& fn, at::ObserverContext* base) {
  auto& context = *static_cast<Context*>(base);
  auto& event = context.event;
  event.end = now();
  auto& state = observer();
  if (event.kernel != 0 && executing != nullptr) {
    event.compiled = executing->compiled;
    event.fell_back = executing->fell_back;
    event.fallback_reason = executing->fallback_reason;
    if (state.mode == ObserveMode::announce) {
      announceEnd(context);
    } else if (state.mode == ObserveMode::describe) {
      const at::DisableRecordFunctionGuard unseen;
      describe(context, fn);
    }
    for (const auto& output : fn.outputs()) {
      if (context.wanted && output.isTensor()) {
        event.output_tensors.push_back(output.toTensor().clone());
      }
    }
  }
  --depth;
  if (context.top) {
    const std::lock_guard lock(state.mutex);
    state.events.push_back(std::move(event));
  }
}

}  // namespace

Execution::Execution(FusionKernel* kernel) : kernel(kernel), outer_(executing) { executing = this; }

Execution::~Execution() { executing = outer_; }

Execution* Execution::current() { return executing; }

void startObserving(ObserveMode mode, uint64_t kernel, size_t call) {
  auto& state = observer();
  const std::lock_guard lock(state.mutex);
  if (state.on) {
    throw std::logic_error("another report is being made in this process");
  }
  state.on = true;
  state.mode = mode;
  state.kernel = kernel;
  state.call = call;
  state.calls_seen = 0;
  state.events.clear();
  depth = 0;
  const bool values = mode != ObserveMode::time;
  state.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&onStart, &onEnd)
                                                .needsInputs(values)
                                                .needsOutputs(values)
                                                .scopes({at::RecordScope::FUNCTION}));
}

std::vector<Event> stopObserving() {
  auto& state = observer();
  const std::lock_guard lock(state.mutex);
  if (!state.on) {
    throw std::logic_error("nothing is observed");
  }
  at::removeCallback(state.handle);
  state.on = false;
  return std::move(state.events);
}

// --------------------------------------------------------------------------------- oneDNN's voice

namespace {

struct Capture {
  int saved = -1;  // the real standard output
  std::FILE* file = nullptr;
};

Capture& capture() {
  static Capture instance;
  return instance;
}

}  // namespace

void startVerbose() {
  auto& state = capture();
  if (state.file != nullptr) {
    throw std::logic_error("standard output is being captured already");
  }
  std::fflush(stdout);
  state.file = std::tmpfile();
  state.saved = state.file != nullptr ? dup(STDOUT_FILENO) : -1;
  if (state.saved < 0 || dup2(fileno(state.file), STDOUT_FILENO) < 0) {
    if (state.file != nullptr) {
      std::fclose(state.file);
    }
    if (state.saved >= 0) {
      close(state.saved);
    }
    state = {};
    throw std::runtime_error("standard output cannot be captured");
  }
  dnnl_set_verbose(1);
}

std::string stopVerbose(int verbosity) {
  auto& state = capture();
  if (state.file == nullptr) {
    throw std::logic_error("standard output is not being captured");
  }
  dnnl_set_verbose(verbosity);
  std::fflush(stdout);
  dup2(state.saved, STDOUT_FILENO);
  close(state.saved);
  std::string text;
  char buffer[4096];
  const bool at_start = std::fseek(state.file, 0, SEEK_SET) == 0;
  for (size_t n = 0; at_start && (n = std::fread(buffer, 1, sizeof(buffer), state.file)) > 0;) {
    text.append(buffer, n);
  }
  std::fclose(state.file);
  state = {};
  return text;
}

}  // namespace llga

#include "jit/onednn/runtime/plan.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/quantized/QTensorImpl.h>
#include <c10/util/SmallVector.h>
#include <x86intrin.h>

#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/stopwatch.h"
#include "jit/onednn/runtime/thread_watch.h"

namespace llga {

// oneDNN tensors of one execution. Their constant handles are set once; the others are set before
// every call.
struct Plan::Arguments {
  struct Binding {
    dnnl_graph_tensor_t tensor;
    Slot slot;
  };
  struct Call {
    // Not const themselves only because the C API of 3.2 asks for that.
    mutable std::vector<const_dnnl_graph_tensor_t> inputs;
    mutable std::vector<const_dnnl_graph_tensor_t> outputs;
  };
  std::vector<dnnl::graph::tensor> tensors;
  std::vector<Binding> bindings;
  std::vector<Call> calls;
};

Plan::~Plan() {
  delete idle_.load(std::memory_order_acquire);
  for (auto& step : steps) {
    drop(std::move(step.compiled));
  }
  size_t bytes = 0;
  for (const auto& tensor : constant_tensors) {
    bytes += tensor.nbytes();
  }
  try {
    forgetConstants(bytes);
  } catch (const dnnl::error&) {  // NOLINT(bugprone-empty-catch): then they stay, that is all
  }
}

std::unique_ptr<Plan::Arguments> Plan::makeArguments() const {
  auto arguments = std::make_unique<Arguments>();
  auto add = [&](const std::vector<std::pair<Slot, Layout>>& from,
                 std::vector<const_dnnl_graph_tensor_t>& to) {
    for (const auto& [slot, layout] : from) {
      const bool fixed = slot.kind == Slot::Kind::constant;
      arguments->tensors.emplace_back(layout, engine(), fixed ? constants[slot.index] : nullptr);
      auto* tensor = arguments->tensors.back().get();
      to.push_back(tensor);
      if (!fixed) {
        arguments->bindings.push_back({tensor, slot});
      }
    }
  };
  for (const auto& step : steps) {
    auto& call = arguments->calls.emplace_back();
    if (!step.kernel.run) {
      add(step.inputs, call.inputs);
      add(step.outputs, call.outputs);
    }
  }
  return arguments;
}

void Plan::prepare() { idle_.store(makeArguments().release(), std::memory_order_release); }

size_t Plan::constantBytes() const {
  size_t bytes = 0;
  for (const auto& weight : packed) {
    bytes += weight->bytes();
  }
  return bytes;
}

namespace {

c10::Allocator* allocatorOf(const OutputSpec& spec) {
  return spec.call_local ? arena() : at::getCPUAllocator();
}

at::Tensor quantizedOver(const c10::Storage& storage, int64_t offset, const OutputSpec& spec) {
  auto tensor = at::detail::make_tensor<at::QTensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU),
      c10::scalarTypeToTypeMeta(spec.dtype), spec.quantizer);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides, offset);
  return tensor;
}

// The tensor an output is written to: the input's own if that is allowed and nobody would notice.
at::Tensor makeOutput(const OutputSpec& spec, c10::ArrayRef<c10::IValue> inputs) {
  if (spec.inplace_input >= 0) {
    const auto& tensor = inputs[static_cast<size_t>(spec.inplace_input)].toTensor();
    // use_count is exact here: a value that only this stack holds can gain no other owner.
    if (tensor.use_count() == 1 && tensor.storage().use_count() == 1) {
      return spec.quantizer ? quantizedOver(tensor.storage(), tensor.storage_offset(), spec)
                            : tensor;
    }
  }
  if (spec.quantizer) {
    const auto bytes = at::detail::computeStorageNbytes(spec.sizes, spec.strides, /*itemsize=*/1);
    return quantizedOver(
        c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocatorOf(spec), true), 0, spec);
  }
  constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  return at::Tensor(at::detail::empty_strided_generic(spec.sizes, spec.strides, allocatorOf(spec),
                                                      cpu, spec.dtype));
}

template <typename DataAt>
void runKernel(const Plan::Step& step, const DataAt& dataAt) {
  c10::SmallVector<const void*, 32> from;
  c10::SmallVector<void*, 2> to;
  for (const auto& [slot, layout] : step.inputs) {
    from.push_back(dataAt(slot));
  }
  for (const auto& [slot, layout] : step.outputs) {
    to.push_back(dataAt(slot));
  }
  step.kernel.run(from, to);
}

// Inputs are only read (an in-place output has its own slot), so a copy-on-write storage stays
// lazy.
inline void* dataOf(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto* base =
      static_cast<const char*>(impl->unsafe_storage().unsafeGetStorageImpl()->data());
  return const_cast<char*>(base) + impl->storage_offset() * static_cast<int64_t>(impl->itemsize());
}

}  // namespace

template <typename Around>
void Plan::executeWith(torch::jit::Stack& stack, size_t inputs_count, const Around& around) const {
  const auto inputs = torch::jit::last(stack, inputs_count);
  c10::SmallVector<at::Tensor, 2> results;
  for (const auto& spec : outputs) {
    results.push_back(makeOutput(spec, inputs));
  }
  c10::SmallVector<c10::DataPtr, 2> temporaries;
  for (const auto bytes : temporary_bytes) {
    temporaries.push_back(arena()->allocate(bytes));
  }

  auto* taken = idle_.exchange(nullptr, std::memory_order_acquire);
  std::unique_ptr<Arguments> arguments(taken != nullptr ? taken : makeArguments().release());

  auto dataAt = [&](const Slot& slot) {
    switch (slot.kind) {
      case Slot::Kind::input:
        return dataOf(inputs[slot.index].toTensor());
      case Slot::Kind::output:
        return dataOf(results[slot.index]);
      case Slot::Kind::constant:
        return constants[slot.index];
      default:
        return temporaries[slot.index].get();
    }
  };
  for (const auto& [tensor, slot] : arguments->bindings) {
    dnnl_graph_tensor_set_data_handle(tensor, dataAt(slot));
  }
  const ExecutingThread thread(kept);
  const ArenaForScratch scratch(has_run_.load(std::memory_order_relaxed));
  for (size_t i = 0; i < steps.size(); ++i) {
    around([&] {
      if (steps[i].kernel.run) {
        return runKernel(steps[i], dataAt);
      }
      const auto& call = arguments->calls[i];
      dnnl::error::wrap_c_api(dnnl_graph_compiled_partition_execute(
                                  steps[i].compiled.get(), stream().get(), call.inputs.size(),
                                  call.inputs.data(), call.outputs.size(), call.outputs.data()),
                              "could not execute the compiled partition");
    });
  }
  has_run_.store(true, std::memory_order_relaxed);
  delete idle_.exchange(arguments.release(), std::memory_order_acq_rel);

  torch::jit::drop(stack, inputs_count);
  for (auto& result : results) {
    stack.emplace_back(std::move(result));
  }
}

void Plan::execute(torch::jit::Stack& stack, size_t inputs) const {
  const auto start = shares_work ? __rdtsc() : 0;
  executeWith(stack, inputs, [](const auto& run) { run(); });
  if (shares_work) {
    const auto ticks = __rdtsc() - start;
    auto fastest = fastest_.load(std::memory_order_relaxed);
    if (ticks < fastest) {
      fastest = ticks;
      fastest_.store(ticks, std::memory_order_relaxed);
    }
    noteRun(ticks, fastest);
  }
}

std::vector<double> Plan::timeSteps(torch::jit::Stack inputs) const {
  for (const auto& spec : outputs) {
    if (spec.inplace_input >= 0) {  // of calls, nobody else holds it
      auto& input = inputs[static_cast<size_t>(spec.inplace_input)];
      input = input.toTensor().clone();
    }
  }
  std::vector<double> seconds;
  executeWith(inputs, inputs.size(), [&](const auto& run) { seconds.push_back(secondsOf(run)); });
  return seconds;
}

}  // namespace llga

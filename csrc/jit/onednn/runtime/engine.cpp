#include "jit/onednn/runtime/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/environment.h"
#include "jit/onednn/runtime/gemm_blocks.h"
#include "jit/onednn/runtime/thread_exit.h"

namespace llga {
namespace {

// Aligned to 64 bytes, the most oneDNN asks of host memory.
void* allocate(size_t size, size_t /*alignment*/) { return allocateScratch(size); }

// The constant tensor cache holds what oneDNN makes of constants that are not packed here. It is on
// in 3.2, where what it holds dies with the compiled partition; later it is off unless asked for,
// and holds things until it is emptied: forgetConstants().
#if DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 5
constexpr size_t kAbandonedLimit = size_t{16} << 20;

std::atomic<size_t> abandoned_bytes{0};
std::atomic<bool> exiting{false};

void keepConstants() {
  const auto cpu = dnnl::engine::kind::cpu;
  if (dnnl::graph::get_constant_tensor_cache_capacity(cpu) == 0) {
    dnnl::graph::set_constant_tensor_cache_capacity(cpu, size_t{1} << 20);  // MiB: no limit
  }
  // Runs before oneDNN's cache is destroyed, which has been made by now.
  std::atexit([] { exiting = true; });
}
#else
void keepConstants() {}
#endif

}  // namespace

void forgetConstants([[maybe_unused]] size_t bytes) {
#if DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 5
  if (abandoned_bytes.fetch_add(bytes) + bytes > kAbandonedLimit && !exiting) {
    abandoned_bytes = 0;
    const auto cpu = dnnl::engine::kind::cpu;
    dnnl::graph::set_constant_tensor_cache_capacity(
        cpu, dnnl::graph::get_constant_tensor_cache_capacity(cpu));  // which empties it
  }
#endif
}

const dnnl::engine& engine() {
  static const auto* instance = [] {
    // A compiled partition belongs to one plan; oneDNN's own cache would keep it, and the weights
    // it has packed, after the plan is gone.
    const NoThreadEnds none;
    dnnl::graph::set_compiled_partition_cache_capacity(0);
    keepConstants();
    const dnnl::graph::allocator allocator(allocate, releaseScratch);
    return new dnnl::engine(
        dnnl::graph::make_engine_with_allocator(dnnl::engine::kind::cpu, 0, allocator));
  }();
  return *instance;
}

dnnl::stream& stream() {
  static auto* instance = new dnnl::stream(engine());
  return *instance;
}

std::string onednnVersion() {
  const auto* version = dnnl_version();
  return fmt::format("{}.{}.{}", version->major, version->minor, version->patch);
}

std::string onednnHash() { return dnnl_version()->hash; }

namespace {

// Whether AMX's instructions are those of amx_emulated.h, which needs what else its kernels use.
bool emulatesAmx() {
#ifdef LLGA_FUSER_EMULATE_AMX
  return usesAvx512Bf16() && usesAvx512Vnni();
#else
  return false;
#endif
}

}  // namespace

std::string effectiveIsa() {
  if (emulatesAmx()) {
    return "avx512_core_amx";
  }
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
      return "sse41";
    case dnnl::cpu_isa::avx:
      return "avx";
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx2_vnni:
      return "avx2_vnni";
    case dnnl::cpu_isa::avx2_vnni_2:
      return "avx2_vnni_2";
    case dnnl::cpu_isa::avx512_core:
      return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_fp16:
      return "avx512_core_fp16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "avx512_core_amx";
    case dnnl::cpu_isa::avx512_core_amx_fp16:
      return "avx512_core_amx_fp16";
    default:
      return "default";
  }
}

namespace {

std::atomic<bool>& saturationAllowed() {
  static std::atomic<bool> allowed = holds("LLGA_FUSER_INT8_SATURATION", "allow");
  return allowed;
}

}  // namespace

bool allowInt8Saturation(bool allow) { return saturationAllowed().exchange(allow); }

namespace {

// Of operands that the first level of cache holds.
template <typename T>
std::chrono::nanoseconds timeOfProduct(void (*run)(const gemm::ProblemOf<T, float>&,
                                                   const gemm::Task&)) {
  constexpr int64_t kInputs = 128;
  constexpr int64_t kOutputs = 32;  // one panel
  constexpr int kCalls = 16;        // of which the first ones wake the processor's units
  const auto rows = gemm::avx512.rows;
  const std::vector<T> source(rows * kInputs);
  const std::vector<T> weight(kInputs * kOutputs);
  std::vector<float> result(rows * kOutputs);
  const gemm::ProblemOf<T, float> problem{rows,          kInputs, kOutputs,      Rectifier::none,
                                          source.data(), kInputs, weight.data(), kInputs * kOutputs,
                                          nullptr,       nullptr, result.data()};
  auto least = std::chrono::nanoseconds::max();
  for (int call = 0; call < kCalls; ++call) {
    const auto start = std::chrono::steady_clock::now();
    run(problem, {0, rows, 0, kOutputs});
    least = std::min<std::chrono::nanoseconds>(least, std::chrono::steady_clock::now() - start);
  }
  return least;
}

bool multipliesBf16Fast() {
  return 4 * timeOfProduct(gemm::avx512_bf16.toWide) <= 5 * timeOfProduct(gemm::avx512.run);
}

}  // namespace

bool usesAvxGemm() {
  static const bool uses = [] {
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::avx:
      case dnnl::cpu_isa::avx2:
      case dnnl::cpu_isa::avx2_vnni:
        return true;
      default:
        return false;
    }
  }();
  return uses;
}

bool saturatesInt8() {
  static const bool saturates = [] {
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::avx2_vnni:
      case dnnl::cpu_isa::avx2_vnni_2:
      case dnnl::cpu_isa::avx512_core_vnni:
      case dnnl::cpu_isa::avx512_core_bf16:
      case dnnl::cpu_isa::avx512_core_fp16:
      case dnnl::cpu_isa::avx512_core_amx:
      case dnnl::cpu_isa::avx512_core_amx_fp16:
        return false;
      default:
        return true;
    }
  }();
  return saturates && !saturationAllowed();
}

bool usesAvx512() {
  static const bool uses = [] {
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::sse41:
      case dnnl::cpu_isa::avx:
      case dnnl::cpu_isa::avx2:
      case dnnl::cpu_isa::avx2_vnni:
      case dnnl::cpu_isa::avx2_vnni_2:
        return false;
      default:
        return true;
    }
  }();
  return uses;
}

bool usesAvx512Vnni() {
  static const bool uses = usesAvx512() &&
                           dnnl::get_effective_cpu_isa() != dnnl::cpu_isa::avx512_core &&
                           __builtin_cpu_supports("avx512vnni") != 0;
  return uses;
}

bool usesAvx2WithoutVnni() {
  static const bool uses = dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx2 &&
                           __builtin_cpu_supports("avx2") != 0 &&
                           __builtin_cpu_supports("fma") != 0;
  return uses;
}

bool usesAvx512Bf16() {
  static const bool uses = [] {
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::avx512_core:
      case dnnl::cpu_isa::avx512_core_vnni:
        return false;
      default:
        return usesAvx512() && __builtin_cpu_supports("avx512bf16") != 0;
    }
  }();
  return uses;
}

bool usesAmx() {
  static const bool uses = emulatesAmx() ||
                           dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_amx ||
                           dnnl::get_effective_cpu_isa() == dnnl::cpu_isa::avx512_core_amx_fp16;
  return uses;
}

bool supportsBf16() { return usesAvx512(); }  // avx2_vnni_2 has a few kernels only

bool prefersBf16() {
  static const bool prefers = usesAmx() || (usesAvx512Bf16() && multipliesBf16Fast());
  return prefers;
}

}  // namespace llga

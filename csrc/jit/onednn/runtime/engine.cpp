#include "jit/onednn/runtime/engine.h"

#include <c10/core/impl/alloc_cpu.h>
#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace llga {
namespace {

// alloc_cpu aligns to 64 bytes, the most oneDNN asks of host memory.
void* allocate(size_t size, size_t /*alignment*/) { return c10::alloc_cpu(size); }

void deallocate(void* pointer) { c10::free_cpu(pointer); }

}  // namespace

const dnnl::engine& engine() {
  static const auto* instance = [] {
    // A compiled partition belongs to one plan; oneDNN's own cache would keep it, and the weights
    // it has packed, after the plan is gone. (The constant tensor cache stays as it is: on in 3.2,
    // where it dies with the compiled partition, off in 3.7, where it does not.)
    dnnl::graph::set_compiled_partition_cache_capacity(0);
    const dnnl::graph::allocator allocator(allocate, deallocate);
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

std::string effectiveIsa() {
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
  static std::atomic<bool> allowed = [] {
    const char* text = std::getenv("LLGA_FUSER_INT8_SATURATION");
    return text != nullptr && std::string_view(text) == "allow";
  }();
  return allowed;
}

}  // namespace

bool allowInt8Saturation(bool allow) { return saturationAllowed().exchange(allow); }

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

bool supportsBf16() {
  static const bool supported = [] {
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::sse41:
      case dnnl::cpu_isa::avx:
      case dnnl::cpu_isa::avx2:
      case dnnl::cpu_isa::avx2_vnni:
      case dnnl::cpu_isa::avx2_vnni_2:  // a few kernels only
        return false;
      default:
        return true;
    }
  }();
  return supported;
}

}  // namespace llga

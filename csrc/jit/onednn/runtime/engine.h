// The process-wide oneDNN CPU engine and stream.
//
// Both are created on first use and never destroyed: compiled partitions of modules that outlive
// the interpreter's exit handlers may still refer to them. Any thread may use both; a CPU stream
// has no state of its own, execution is synchronous.
#pragma once

#include <oneapi/dnnl/dnnl_graph.hpp>

#include <string>

namespace llga {

// Scratch memory of compiled partitions comes from PyTorch's CPU allocator.
const dnnl::engine& engine();
dnnl::stream& stream();

// To be told when a plan with that many bytes of unpacked constants dies: oneDNN may hold copies of
// them. From time to time it drops all such copies, and makes them anew where they are still
// needed.
void forgetConstants(size_t bytes);

// "3.2.0" of the library that is loaded, not of the headers.
std::string onednnVersion();
// Full commit hash the library was built from.
std::string onednnHash();
// The instruction set oneDNN may use: "avx512_core_amx", ...
std::string effectiveIsa();

// Whether oneDNN uses AVX-512 on this processor (and with ONEDNN_MAX_CPU_ISA).
bool usesAvx512();

// Whether that includes AVX-512's instructions for 8-bit integers.
bool usesAvx512Vnni();

// Whether it uses AVX2, and FMA, and has no better instructions for 8-bit integers.
bool usesAvx2WithoutVnni();

// Whether that includes AVX-512's instructions for bfloat16.
bool usesAvx512Bf16();

// Whether it uses AMX.
bool usesAmx();

// Whether oneDNN has bfloat16 kernels there.
bool supportsBf16();

// Whether their products are as fast as those of float32, at least. Not where there are no
// instructions for them, nor on processors that are built to do them by AMX and are not let: there
// those of AVX-512 take twice as long as float32's. The first call measures, for some 50 us.
bool prefersBf16();

// Whether oneDNN computes float32 matrix products in its gemm for AVX and AVX2.
bool usesAvxGemm();

// Whether sums of two 8-bit products are kept in 16 bit, and cut off where they do not fit: on
// processors without VNNI.
bool saturatesInt8();
// For data that is known to fit: saturatesInt8() is false from then on. Returns what was before;
// LLGA_FUSER_INT8_SATURATION=allow in the environment says so from the start.
bool allowInt8Saturation(bool allow);

}  // namespace llga

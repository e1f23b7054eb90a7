// Compiled for AVX-512 (F, BW, VL, VNNI).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/quantized_kernel.h"

namespace llga::quantized {

const Kernels avx512_vnni{
    "avx512_vnni", kTogether, true,   multiplyAll<uint8_t>, multiplyAll<float>, find,
    toPieces,      nullptr,   nullptr};

}  // namespace llga::quantized

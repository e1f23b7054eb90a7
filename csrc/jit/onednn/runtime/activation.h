// Activations of float32 and bfloat16 data on processors with AVX2 or AVX-512.
//
// oneDNN's kernels for AVX2 spend about a nanosecond on each number of a sigmoid, SiLU or GELU,
// also behind a convolution or product whose results they are applied to, and four on a tanh. Where
// the results lie in cache, another pass over them that takes half of that is the faster one. For
// AVX-512 it has none of GELU's tanh form, only of its parts.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"

namespace llga {

enum class Activation { sigmoid, silu, tanh, gelu, tanh_gelu };

// Needs AVX2 and FMA. Stateless; any thread may call, works with as many threads as PyTorch does.
// `to` may be `from`; otherwise they do not overlap. Results are within 2e-7 of the exact ones,
// relative to the larger of them and 1, those of both GELUs within 8e-7; NaN and infinities give
// what they give in eager.
void activate(Activation activation, const float* from, float* to, int64_t count);
// Computed in float32.
void activate(Activation activation, const Bfloat16* from, Bfloat16* to, int64_t count);

}  // namespace llga

// bfloat16 as our own kernels see it. No PyTorch here, for those that are compiled once for each
// instruction set.
#pragma once

#include <cstdint>

namespace llga {

using Bfloat16 = uint16_t;  // its bits

}  // namespace llga

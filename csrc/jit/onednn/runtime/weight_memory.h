// Memory of packed weights.
//
// Weights are read from one end to the other in each call, and those of a language model lie on a
// hundred thousand pages of the usual size, more than a processor remembers addresses of. So they
// lie side by side in slabs that ask the system for huge pages. A tensor owns its part of a slab;
// its pages go back to the system when it dies, the slab with its last tensor. Slabs come from
// PyTorch's CPU allocator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace llga {

// An uninitialized contiguous tensor on 64 bytes. Any thread may call, and free.
at::Tensor allocateWeight(at::IntArrayRef sizes, const at::TensorOptions& options);

// Asks for huge pages behind the addresses that fill some whole, and for nothing if the environment
// holds LLGA_FUSER_HUGE_PAGES=off. Advice only: systems without them do nothing.
void preferHugePages(void* memory, size_t bytes);

}  // namespace llga

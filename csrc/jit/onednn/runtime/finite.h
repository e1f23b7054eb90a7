// Looks for NaN and infinities at memory speed. Any thread may call.
#pragma once

#include <ATen/core/Tensor.h>

namespace llga {

// True if all elements of a float32 or bfloat16 tensor are finite; true for other types.
bool allFinite(const at::Tensor& tensor);

}  // namespace llga

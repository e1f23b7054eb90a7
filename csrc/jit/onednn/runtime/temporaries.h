// Where the values of a plan lie that only its own steps read: as few buffers as possible, so that
// they stay in the caches. Set-up code, by one thread per plan.
#pragma once

#include <cstddef>
#include <unordered_map>

#include "jit/onednn/runtime/plan.h"

namespace llga {

// A result takes the place of the temporary that it may overwrite (`inplace`: input by output, both
// values) if no later step reads that one, and temporaries that are not needed at the same time
// take the same one. Changes slots of steps, and temporary_bytes.
void shareTemporaries(Plan& plan, const std::unordered_map<size_t, size_t>& inplace);

}  // namespace llga

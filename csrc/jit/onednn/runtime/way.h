// The ways to compute something between which autotuning chooses, and their names on disk.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace llga {

// One partition.
enum class Way {
  usual,          // a kernel of our own where own_kernels.h says so, else oneDNN's
  onednn,         // oneDNN's, constant weights in the layout of its choice
  onednn_plain,   // weights as they are
  onednn_copied,  // data in an unusual order of dimensions is copied to the usual one first
  winograd2,      // our own, tiles of 2 x 2
  winograd4,
  gemm,  // our own
};

// One group.
enum class Division {
  usual,
  onednn,             // a kernel of our own for all of it is left out
  binaries_apart,     // binary ops begin partitions of their own
  activations_fused,  // none is applied in a pass of its own
};

std::string_view nameOf(Way way);
std::string_view nameOf(Division division);

// By such a name; nothing for another text.
std::optional<Way> wayNamed(std::string_view name);
std::optional<Division> divisionNamed(std::string_view name);

}  // namespace llga

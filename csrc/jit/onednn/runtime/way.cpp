#include "jit/onednn/runtime/way.h"

#include <algorithm>
#include <array>
#include <utility>

namespace llga {
namespace {

template <typename T, size_t size>
using Names = std::array<std::pair<T, std::string_view>, size>;

constexpr Names<Way, 7> kWays{{{Way::usual, "usual"},
                               {Way::onednn, "onednn"},
                               {Way::onednn_plain, "onednn_plain"},
                               {Way::onednn_copied, "onednn_copied"},
                               {Way::winograd2, "winograd2"},
                               {Way::winograd4, "winograd4"},
                               {Way::gemm, "gemm"}}};

constexpr Names<Division, 4> kDivisions{{{Division::usual, "usual"},
                                         {Division::onednn, "onednn"},
                                         {Division::binaries_apart, "binaries_apart"},
                                         {Division::activations_fused, "activations_fused"}}};

template <typename T, size_t size>
std::string_view nameIn(const Names<T, size>& names, T value) {
  return std::find_if(names.begin(), names.end(),
                      [&](const auto& known) { return known.first == value; })
      ->second;
}

template <typename T, size_t size>
std::optional<T> namedIn(const Names<T, size>& names, std::string_view name) {
  const auto* found = std::find_if(names.begin(), names.end(),
                                   [&](const auto& known) { return known.second == name; });
  return found == names.end() ? std::nullopt : std::optional(found->first);
}

}  // namespace

std::string_view nameOf(Way way) { return nameIn(kWays, way); }
std::string_view nameOf(Division division) { return nameIn(kDivisions, division); }

std::optional<Way> wayNamed(std::string_view name) { return namedIn(kWays, name); }
std::optional<Division> divisionNamed(std::string_view name) { return namedIn(kDivisions, name); }

}  // namespace llga

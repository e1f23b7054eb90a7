#include "jit/onednn/runtime/own_padding.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <string>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;

std::optional<Padding::Mode> modeNamed(const std::string& name) {
  if (name == "constant") {
    return Padding::Mode::constant;
  }
  if (name == "reflect") {
    return Padding::Mode::reflect;
  }
  if (name == "replicate") {
    return Padding::Mode::replicate;
  }
  return name == "circular" ? std::optional(Padding::Mode::circular) : std::nullopt;
}

// How a node pads; nothing if it does not, or that is not known.
std::optional<Padding::Mode> modeOf(const Node* node, const Facts& facts) {
  if (node->kind() == aten::constant_pad_nd) {
    return Padding::Mode::constant;
  }
  if (node->kind() == aten::pad) {
    const auto mode = facts.constant(node->namedInput("mode"));
    return mode && mode->isString() ? modeNamed(mode->toStringRef()) : std::nullopt;
  }
  const std::string name = node->kind().toUnqualString();
  if (!node->kind().is_aten()) {
    return std::nullopt;
  }
  return name.rfind("reflection_pad", 0) == 0    ? std::optional(Padding::Mode::reflect)
         : name.rfind("replication_pad", 0) == 0 ? std::optional(Padding::Mode::replicate)
                                                 : std::nullopt;
}

// What is padded with; nothing if it is not known.
std::optional<double> numberOf(const Node* node, const Facts& facts) {
  if (!node->hasNamedInput("value")) {
    return 0;
  }
  const auto value = facts.constant(node->namedInput("value"));
  if (!value || !(value->isNone() || value->isScalar())) {
    return std::nullopt;
  }
  return value->isNone() ? 0 : value->toScalar().toDouble();
}

// As a node gives them, the last dimension's first; nothing if they are not known.
std::optional<Shape> padsOf(const Node* node, const Facts& facts) {
  const auto pads =
      facts.constant(node->namedInput(node->hasNamedInput("pad") ? "pad" : "padding"));
  return pads && pads->isIntList() ? std::optional(pads->toIntVector()) : std::nullopt;
}

// As few as PyTorch allows.
bool isAllowed(Padding::Mode mode, const Padding::Dimension& d) {
  const auto most = std::max(d.before, d.after);
  return !(mode == Padding::Mode::reflect && most >= d.size && most > 0) &&
         !(mode == Padding::Mode::circular && most > d.size);
}

}  // namespace

bool isOwnPadding(const Node* node, const Facts& facts) {
  if (!ownKernelsAnywhere() || !modeOf(node, facts) || !numberOf(node, facts)) {
    return false;
  }
  const auto pads = padsOf(node, facts);
  const bool pad = pads && std::any_of(pads->begin(), pads->end(), [](int64_t n) { return n > 0; });
  const bool cut = pads && std::any_of(pads->begin(), pads->end(), [](int64_t n) { return n < 0; });
  const auto type = facts.tensor(node->input(0)).dtype.value_or(at::kFloat);
  const auto& uses = node->output()->uses();
  return pad && !cut && (type == at::kFloat || type == at::kBFloat16) &&
         std::none_of(uses.begin(), uses.end(),
                      [&](const auto& use) { return paddingOf(use.user) == node; });
}

std::optional<FoundPadding> findPadding(const Graph& subgraph, const Facts& facts) {
  const auto* node = soleComputation(subgraph);
  const auto mode = node != nullptr ? modeOf(node, facts) : std::nullopt;
  if (!mode || !isOwnPadding(node, facts)) {
    return std::nullopt;
  }
  const auto data = facts.tensor(node->input(0));
  FoundPadding found{*mode, {}, *numberOf(node, facts), node->input(0), node->output()};
  for (const auto size : *data.sizes) {
    found.dimensions.push_back({size, 0, 0});
  }
  const auto list = *padsOf(node, facts);
  for (size_t i = 0; i + 1 < list.size() && i / 2 < found.dimensions.size(); i += 2) {
    auto& dimension = found.dimensions[found.dimensions.size() - 1 - i / 2];
    dimension = {dimension.size, list[i], list[i + 1]};
  }
  const bool allowed =
      std::all_of(found.dimensions.begin(), found.dimensions.end(),
                  [&](const Padding::Dimension& d) { return isAllowed(*mode, d); });
  if (!allowed || c10::multiply_integers(*data.sizes) == 0 ||
      facts.tensor(found.result).dtype != data.dtype) {
    throw CompileError{"padding of an empty tensor, or by more than it has"};
  }
  return found;
}

}  // namespace llga

#include "jit/onednn/runtime/partition_key.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "jit/onednn/inspect.h"

namespace llga {
namespace {

using LayoutType = Layout::layout_type;

std::string text(const AttrValue& value) {
  struct Text {
    std::string operator()(bool flag) const { return flag ? "true" : "false"; }
    std::string operator()(int64_t number) const { return fmt::format("{}", number); }
    std::string operator()(float number) const { return fmt::format("{}", number); }
    std::string operator()(const std::string& word) const { return word; }
    std::string operator()(const std::vector<int64_t>& numbers) const {
      return fmt::format("{}", fmt::join(numbers, "x"));
    }
    // Scales: as many as channels, and no kernel is faster for some of them.
    std::string operator()(const std::vector<float>& numbers) const {
      return fmt::format("{} numbers", numbers.size());
    }
  };
  return std::visit(Text{}, value);
}

std::string text(const Layout& layout) {
  const bool strided = layout.get_layout_type() == LayoutType::strided;
  return fmt::format("{}[{}]{}", nameOf(layout.get_data_type()), fmt::join(layout.get_dims(), "x"),
                     strided ? fmt::format("/{}", fmt::join(layout.get_strides(), "x")) : "");
}

}  // namespace

std::string circumstances(const CompileRequest& request) {
  return fmt::format("{} threads, fpmath {}", request.threads,
                     static_cast<int>(request.fpmath_mode));
}

std::string partitionKey(const PlanDraft& draft, const Ops& ops) {
  std::unordered_map<size_t, size_t> seen;  // number by id, in the order of appearance
  auto named = [&](const Operand& operand, const auto& describe) {
    const auto [it, is_new] = seen.emplace(operand.id, seen.size());
    return fmt::format("%{}{}", it->second, is_new ? ":" + describe() : "");
  };
  auto input = [&](const Operand& operand) {
    return named(operand, [&] {
      if (draft.lowered.operands.at(operand.id).constant) {
        return fmt::format("constant {}[{}]", c10::toString(operand.dtype),
                           fmt::join(operand.sizes.value_or(Shape{}), "x"));
      }
      const bool known = operand.sizes || draft.layouts.count(operand.id) != 0;
      return known ? text(draft.inputLayout(operand.id)) : std::string("?");
    });
  };
  auto output = [&](const Operand& operand) {
    return named(operand, [&] {
      const bool leaves = draft.group_outputs.count(operand.id) != 0 && operand.sizes;
      return leaves ? text(draft.outputLayout(operand.id)) : std::string();
    });
  };
  auto list = [](const std::vector<Operand>& operands, const auto& describe) {
    std::vector<std::string> texts;
    texts.reserve(operands.size());
    for (const auto& operand : operands) {
      texts.push_back(describe(operand));
    }
    return fmt::format("{}", fmt::join(texts, ", "));
  };
  std::vector<std::string> lines;
  for (const auto* op : ops) {
    std::vector<std::string> attributes;
    for (const auto& [name, value] : op->attributes()) {
      attributes.push_back(fmt::format("{}={}", nameOf(name), text(value)));
    }
    const auto read = list(op->inputs(), input);
    lines.push_back(fmt::format("{} = {}[{}]({})", list(op->outputs(), output), nameOf(op->kind()),
                                fmt::join(attributes, ", "), read));
  }
  return fmt::format("{}: {}", circumstances(draft.request), fmt::join(lines, "; "));
}

}  // namespace llga

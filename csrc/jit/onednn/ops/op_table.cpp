#include "jit/onednn/ops/op_table.h"

#include <string_view>

namespace llga {

const std::vector<OpEntry>& opTable() {
  static const std::vector<OpEntry> table = [] {
    std::vector<OpEntry> all;
    for (const auto& family : {convolutionOps(), matmulOps(), attentionOps(), eltwiseOps(),
                               binaryOps(), normalizationOps(), poolingOps(), reductionOps(),
                               shapeOps(), interpolateOps(), quantizeOps()}) {
      all.insert(all.end(), family.begin(), family.end());
    }
    return all;
  }();
  return table;
}

const OpEntry* findOp(const Node* node) {
  static const std::unordered_map<std::string_view, const OpEntry*> index = [] {
    std::unordered_map<std::string_view, const OpEntry*> map;
    for (const auto& entry : opTable()) {
      const bool added = map.emplace(entry.name, &entry).second;
      TORCH_INTERNAL_ASSERT(added, "two entries for ", entry.name);
    }
    return map;
  }();
  if (node->maybeSchema() == nullptr) {
    return nullptr;
  }
  const auto it = index.find(qualifiedName(node));
  return it == index.end() ? nullptr : it->second;
}

}  // namespace llga

// What is known of the shapes of a graph's values by construction, whatever its inputs are: the
// number of dimensions and the last size, also by what reads a value and would raise an error for
// another one. Observed types don't count, as they say it of one set of inputs.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "jit/onednn/ir.h"

namespace llga {

// Of a graph that does not change meanwhile. Answers are kept. Owned by one thread.
class KnownShapes {
 public:
  std::optional<size_t> rank(const Value* value);

  // The last size, where the graph raises no error.
  std::optional<int64_t> last(const Value* value);

  // What aten::size of one dimension gives, likewise; nullopt for other nodes.
  std::optional<int64_t> askedSize(const Node* size);

  // An integer of the graph that is `number` where the graph raises no error.
  void assume(const Value* integer, int64_t number);

 private:
  std::optional<size_t> findRank(const Value* value);
  std::optional<int64_t> findLast(const Value* value);
  std::optional<size_t> broadcastRank(const Node* node);
  std::optional<size_t> commonRank(const Node* list);
  std::optional<int64_t> lastOfSizes(const Value* list);
  std::optional<int64_t> lastForReaders(const Value* value);
  bool isLast(const Value* value, const Value* dim);
  bool isOther(const Value* value, const Value* dim);  // than the last one, for sure

  std::unordered_map<const Value*, std::optional<size_t>> ranks_;
  std::unordered_map<const Value*, std::optional<int64_t>> lasts_;
  std::unordered_map<const Value*, int64_t> assumed_;
  std::unordered_map<const Value*, const Value*> outside_;  // of what groups call their inputs
};

}  // namespace llga

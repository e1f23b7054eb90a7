// Attention that a model writes out: what its nodes are, and how they follow each other.
//
//   scores = matmul(query * factor, key)           key: transposed already, or by einsum
//   scores = scores * factor + mask                and other masks, on views of them
//
// where query and key may be rows that are brought to a length of 1 first (F.normalize), and
//
//   result = matmul(softmax(scores, -1), value)    and the views that put heads side by side
//   result = matmul(value, softmax(scores, -1)^T)  likewise by columns: (.., number, key)
//
// Whether the sizes fit, and what is computed with it, is for others to say. Stateless.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"

namespace llga {

struct WrittenAttention {
  // Of query or scores: a number, a tensor of one, or of scores a tensor of one for each head.
  struct Factor {
    const Value* number;
    bool divides;
    const Value* scores;  // null but for one for each head
  };

  struct Mask {
    enum class Kind { added, replaced_where_true, replaced_where_false };
    Kind kind;
    const Value* value;        // what is added, or booleans
    const Value* replacement;  // a number, or a tensor of one; null where something is added
    const Value* before;       // the scores, in the sizes that meet those of `value`
    const Value* after;
  };

  const Value* query;
  bool query_by_columns;  // (.., number, query)
  const Value* key;       // (.., number, key)
  bool key_by_rows;       // (.., key, number)
  const Value* value;
  bool value_by_columns;  // (.., number, key), and the product (.., number, query)
  // Of the norm by which rows are divided; null where they are as they are.
  const Value* least_query_norm;
  const Value* least_key_norm;
  std::vector<Factor> factors;
  const Value* scores;      // the first product
  std::vector<Mask> masks;  // in the order of execution, behind all factors
  const Node* softmax;
  const Value* product;  // the second one
  const Value* result;   // it, or (batch, query, head and number) made of (batch, head, query, ..)
  std::vector<const Node*> nodes;
};

// Nothing if `softmax` is not the middle of an attention whose intermediate values nobody else
// reads.
std::optional<WrittenAttention> attentionAround(const Node* softmax, const Facts& facts);

}  // namespace llga

// Which attention our own kernel computes, in the place of PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "jit/onednn/runtime/attention.h"
#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/written_attention.h"

namespace llga {

// Whether the bridge makes a group of this node alone. What the kernel can't do with the inputs of
// a call is left to PyTorch then.
bool isOwnAttention(const Node* node, const Facts& facts);

// What our kernel reads and writes for scaled_dot_product_attention: of 8-bit values, it has inside
//
//   quantize(scaled_dot_product_attention(dequantize(query), dequantize(key), dequantize(value)))
struct AttentionOperands {
  const Value* query;
  const Value* key;
  const Value* value;
  const Value* result;
  bool quantized;                  // query, key and value
  std::vector<const Node*> nodes;  // the attention and those around it that are inside
};

AttentionOperands attentionOperands(const Node* attention);

// Whether it makes a group of attention that is written out: as far as is known, its sizes fit.
bool isOwnAttention(const WrittenAttention& written, const Facts& facts);

// Whether this is such a group. It reads inputs with gaps, or with strides of 0, where they lie.
bool isOwnAttentionGroup(const Graph& subgraph);

struct FoundAttention {
  // Of the scale, beside the kernel's: the number of a 0-dim tensor.
  struct Factor {
    const Value* number;
    bool divides;
  };

  Attention kernel;
  const Value* query;
  const Value* key;
  const Value* value;
  std::vector<const Value*> masks;
  // Of all these, by their places, to memory of such strides first.
  std::map<size_t, std::vector<int64_t>> copied;
  std::vector<Factor> factors;
  const Value* result;
  std::vector<int64_t> result_strides = {};  // that the kernel writes
};

// Nothing for other groups. Throws CompileError for one that the kernel can't compute.
std::optional<FoundAttention> findAttention(const CompileRequest& request);

}  // namespace llga

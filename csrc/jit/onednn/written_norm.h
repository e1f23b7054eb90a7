// Norms that a model writes out: what their nodes are, and how they follow each other.
//
//   x * rsqrt(mean(pow(x, 2), dim) + eps)                     of their root mean square
//   (x - mean(x, dim)) / sqrt(var(x, dim) + eps)              of mean and variance, however spelled
//   x / clamp_min(linalg_vector_norm(x, 2, dim), eps)         of their length (F.normalize)
//
// and constants that the result is multiplied with and that are added to it, one for each number of
// the dimension, and an activation, all with casts in between or without.
//
// Whether the sizes fit, and what is computed with it, is for others to say. Stateless.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"

namespace llga {

struct WrittenNorm {
  enum class Kind { root_mean_square, centred, length };

  Kind kind;
  const Value* data;
  int64_t dim;  // as it is given
  double epsilon;
  // Numbers, as tensors without dimensions, and tensors that have one size other than 1.
  std::vector<at::Tensor> factors;
  at::Tensor addend;       // behind all factors; or undefined
  const Node* activation;  // behind that; or null
  const Value* result;
  std::vector<const Node*> nodes;  // in the order of execution
};

// Nothing if `root` is not the division, or the product, of a norm whose intermediate values nobody
// else reads.
std::optional<WrittenNorm> normAround(const Node* root, const Facts& facts);

// Whether all of a constant's sizes are 1, but that of this dimension of a tensor with so many.
bool liesAlong(const at::Tensor& constant, int64_t dim, int64_t rank);

}  // namespace llga

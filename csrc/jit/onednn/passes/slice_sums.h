// Sums with a part of a tensor, as they are written in place: MViT's relative positions, which are
// added to all scores of attention but those of the class token, and its query, which is added to
// all rows of the result but that one.
//
//   %x : Tensor = aten::matmul(%q, %k)
//   %s : Tensor = aten::slice(%x, %dim, %from, %to, %one)         # maybe several
//   %y : Tensor = aten::add_(%s, %z, %one)
//   ... %x ...
// ->
//   %x : Tensor = aten::matmul(%q, %k)
//   %w : Tensor = llga::within(%z, [%q, %k], [dim], [from], [to], None)
//   %a : Tensor = aten::add(%x, %w, %one)
//   %t : Tensor = llga::as_target(%a, %x)
//   ... %t ...
//
// Likewise where such a sum is copied to the slice that it was made of. llga::within is 0 but for
// the slice, and has the sizes of a product, which it does not read: attention can be one group.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

// The operator is there from the first call on. Any thread may call.
Symbol withinKind();

struct SliceSum {
  Node* write;                  // aten::add_, or aten::copy_
  Value* whole;                 // what its target is a slice of
  std::vector<Value*> factors;  // of which that is the product, as far as sizes go
  std::vector<Node*> terms;     // the sums, in order; of aten::add_ there are none
  Node* view = nullptr;         // of the slice, that the sums are of
  Node* copy = nullptr;         // of the result to itself, which Python's augmented assignments add
};

// The sum that `write` adds to a slice of the scores of attention, or of its result: of a product,
// made in the same block, that a softmax reads behind, or of what a softmax gave. Nothing for
// anything else. Whether others see what is written, by another name than that of the product,
// remains to be seen.
std::optional<SliceSum> sliceSum(Node* write);

// Puts what is at the head of this file in the place of it.
void writeWhole(const SliceSum& sum);

}  // namespace llga

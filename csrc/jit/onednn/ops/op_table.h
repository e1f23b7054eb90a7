// The op table: which aten operator becomes which oneDNN Graph ops. One entry per operator
// overload, in the file of its family; docs/adding-an-op.md shows how to add one.
#pragma once

#include <vector>

#include "jit/onednn/ops/lowering.h"

namespace llga {

// What an op is worth to a partition.
enum class OpClass {
  compute,      // reason enough for a group of its own
  elementwise,  // worth fusing to others, alone no faster than aten
  view,         // free in aten, only worth anything inside a group
  cast,         // data type conversion, quantization
};

// Into how many partitions the ops may go that a node is lowered to.
enum class Parts {
  one,
  several,  // worth it even then, if no other node is in them
};

struct OpEntry {
  const char* name;  // "aten::add.Tensor"
  OpClass op_class;
  void (*lower)(Lowering&);
  Parts parts = Parts::one;
};

using OpFamily = std::vector<OpEntry>;

// The entry of the node's operator overload, or nullptr.
const OpEntry* findOp(const Node* node);
// All entries, family by family.
const std::vector<OpEntry>& opTable();

OpFamily convolutionOps();
OpFamily matmulOps();
OpFamily attentionOps();
OpFamily eltwiseOps();
OpFamily binaryOps();
OpFamily normalizationOps();
OpFamily poolingOps();
OpFamily reductionOps();
OpFamily shapeOps();
OpFamily interpolateOps();
OpFamily quantizeOps();

}  // namespace llga

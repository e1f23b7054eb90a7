// llga::padded: what aten::pad gives, but the tensor itself where it is contiguous and nothing is
// to be padded, where aten::pad copies it. For places where nobody could tell. Of an 8-bit tensor
// with one scale it pads the numbers that it stands for; zeros have a number of their own.
//
// llga::shuffled: what aten::pixel_shuffle gives, also of such an 8-bit tensor, for which PyTorch
// has no kernel that keeps channels last.
#pragma once

#include "jit/onednn/ir.h"

namespace llga {

// Of aten::pad's inputs; the operator is there from the first call on. Any thread may call.
Symbol paddedKind();
// Of aten::pixel_shuffle's, likewise.
Symbol shuffledKind();

}  // namespace llga

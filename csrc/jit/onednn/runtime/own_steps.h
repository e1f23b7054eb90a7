// Steps of a plan that run a kernel of our own in the place of a compiled partition.
//
// own_kernels.h decides by what is computed; here by the layouts of the data too, and the kernel's
// arguments are bound. Nothing is added to the draft where the answer is no. Set-up code: slow, may
// throw CompileError or PackError; by one thread per draft.
#pragma once

#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/runtime/plan_draft.h"

namespace llga {

// One step for a whole group that is not lowered to ops of oneDNN: a channel shuffle, attention, a
// norm, a recurrent layer, an embedding; and whether a group is such a one.
bool addUnlowered(PlanDraft& draft);
bool isUnlowered(const CompileRequest& request);

// Steps that copy inputs of the group to dense memory, to be read in their place, where there is
// memory between their numbers and any kernel would not take that. To be called before all others.
void addCopiesWithoutGaps(PlanDraft& draft);

// Likewise images in planes to channels last, where oneDNN would take them beside such: for some of
// these it has reference kernels only.
void addCopiesOfPlanes(PlanDraft& draft);

// One step for a whole group: a concatenation and a batch norm, the block of a MobileNet, a squeeze
// and excitation, a mean over pixels, an activation alone, or a chain of pointwise functions.
bool addOwnGroup(PlanDraft& draft);

// A step for the ops of one partition: a convolution in small groups, a small one or one by
// Winograd's algorithm, a linear layer, an activation apart, a softmax, or a chain of pointwise
// functions; where it is the usual way or the one asked for.
bool addOwnStep(PlanDraft& draft, const Ops& partition, Way way);

// A step that copies contiguous images of 2 to 4 channels to channels last; where the copy will be,
// and its layout, with the id of `images`.
std::pair<Slot, Layout> addInterleaved(PlanDraft& draft, const Layout& images);

}  // namespace llga

// What a partition computes, as a line of text: equal lines take equally long.
#pragma once

#include <string>

#include "jit/onednn/runtime/plan_draft.h"

namespace llga {

// Threads and math mode of a plan.
std::string circumstances(const CompileRequest& request);

// These, kinds and attributes of the ops, data types, sizes, strides and which operands are
// constant; not the numbers. For a partition whose inputs have been computed. Stateless.
std::string partitionKey(const PlanDraft& draft, const Ops& ops);

}  // namespace llga

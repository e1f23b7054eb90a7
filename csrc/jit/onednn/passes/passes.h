// The passes of the pipeline, one file each; interface.cpp orders them.
//
// Every pass takes a graph and leaves a graph that computes the same, whether the others ran or
// not. No pass knows oneDNN: graph_helper.h answers what it would fuse.
#pragma once

#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/ir.h>

#include <memory>
#include <vector>

namespace llga {

using GraphPtr = std::shared_ptr<torch::jit::Graph>;

void specializeTypes(const GraphPtr& graph);
void restoreCells(const GraphPtr& graph);
void removeMutation(const GraphPtr& graph);
void foldConstants(const GraphPtr& graph);
void normalizeOps(const GraphPtr& graph);
void restoreLinear(const GraphPtr& graph);
void restoreAttention(const GraphPtr& graph);
void unstack(const GraphPtr& graph);
void foldBatchNorm(const GraphPtr& graph);
void foldScale(const GraphPtr& graph);
void sinkPermute(const GraphPtr& graph);
void widenBfloat16(const GraphPtr& graph);
void widenQuantized(const GraphPtr& graph);
void dropCasts(const GraphPtr& graph);
void dropCopies(const GraphPtr& graph);
void sequencesAsImages(const GraphPtr& graph);
void mergeParts(const GraphPtr& graph);
void mergeBranches(const GraphPtr& graph);
void prepareQuantized(const GraphPtr& graph);
void prepareBinary(const GraphPtr& graph);
void sinkWindows(const GraphPtr& graph);
void deferSizeCheck(const GraphPtr& graph);
void oncePerSizes(const GraphPtr& graph);
void joinSums(const GraphPtr& graph);
void joinGates(const GraphPtr& graph);
void fuseGraph(const GraphPtr& graph);
void joinConcat(const GraphPtr& graph);
void joinDepthwise(const GraphPtr& graph);
void joinExcitation(const GraphPtr& graph);
void joinShuffle(const GraphPtr& graph);
void propagateLayout(const GraphPtr& graph);
void guardValues(const GraphPtr& graph);
void guardShape(const GraphPtr& graph);

// torch's merging takes the outputs of a node that are read for its first ones. Where they are not,
// lets all be read, by a node that is dead code afterwards: for nodes with several outputs, before
// what merges them is asked about aliases.
void readFirstOutputs(torch::jit::Node* node);

// For passes that make groups: brings the nodes, each of which may follow the one before, together
// in front of the last one and merges them into a fusion group. False, with no group made, where a
// side effect or a host value lies between them.
bool mergeIntoGroup(const std::vector<torch::jit::Node*>& nodes, torch::jit::AliasDb& aliases);
// Likewise into a node of another kind that has a subgraph. Returns it, or null.
torch::jit::Node* mergeIntoNode(const std::vector<torch::jit::Node*>& nodes,
                                torch::jit::Symbol kind, torch::jit::AliasDb& aliases);

// aten::to of `value` to float32, in front of `node`.
torch::jit::Node* castToFloat(torch::jit::Value* value, torch::jit::Node* node);

// Makes llga::as_float known to TorchScript, for passes that put one behind a product.
void registerAsFloat();

// Not in the pipeline: throws c10::Error, with the reasons, where a torch.jit.strict_fusion block
// holds an operator that is in no group.
void checkStrictFusion(const GraphPtr& graph);

}  // namespace llga

#include "jit/onednn/runtime/own_steps.h"

#include <algorithm>

#include "jit/onednn/runtime/steps/concat_steps.h"
#include "jit/onednn/runtime/steps/convolution_steps.h"
#include "jit/onednn/runtime/steps/pointwise_steps.h"
#include "jit/onednn/runtime/steps/product_steps.h"
#include "jit/onednn/runtime/steps/quantized_steps.h"
#include "jit/onednn/runtime/steps/reduction_steps.h"
#include "jit/onednn/runtime/steps/resampling_steps.h"
#include "jit/onednn/runtime/steps/unlowered_steps.h"

namespace llga {
namespace {

// A group that is a linear layer with GELU's tanh form behind it, or one of bfloat16 whose sums
// become float32, which oneDNN has no partition of. False for any other group.
bool addProductAndMore(PlanDraft& draft) {
  const auto ops = opsOf(draft.lowered);
  const bool has = std::any_of(ops.begin(), ops.end(), [&](const OpSpec* op) {
    return op->kind() == OpKind::TypeCast || !tanhGelu(*op, ops).empty();
  });
  ProductSteps products(draft);
  return has && (QuantizedSteps(draft).linear(ops) || products.narrowLinear(ops) ||
                 products.linear(ops, Way::usual));
}

// Whether what reads an input of the group takes it with memory between its numbers.
bool takesGaps(PlanDraft& draft, const Operand& input) {
  const auto ops = opsOf(draft.lowered);
  return ownKernelsAnywhere() &&
         (PointwiseSteps(draft).takesGaps(ops) || ProductSteps(draft).takesGaps(ops) ||
          ConcatSteps(draft).takesGaps(ops, input) ||
          ConvolutionSteps(draft).takesGaps(ops, input));
}

}  // namespace

bool addUnlowered(PlanDraft& draft) {
  const auto& subgraph = *draft.request.subgraph;
  const auto& facts = *draft.request.facts;
  UnloweredSteps steps(draft);
  if (const auto shuffle = findShuffle(subgraph, facts)) {
    ConcatSteps(draft).channelShuffle(*shuffle);
  } else if (const auto attention = findAttention(draft.request)) {
    steps.attention(*attention);
  } else if (const auto group_norm = findGroupNorm(subgraph, facts)) {
    steps.groupNorm(*group_norm);
  } else if (const auto row_norm = findRowNorm(subgraph, facts)) {
    steps.rowNorm(*row_norm);
  } else if (const auto rotary = findRotary(subgraph, facts)) {
    steps.rotary(*rotary);
  } else if (const auto layers = findRecurrent(subgraph, facts)) {
    steps.recurrent(*layers);
  } else if (const auto lookup = findLookup(subgraph, facts)) {
    steps.lookup(*lookup);
  } else if (const auto variance = findVariance(subgraph, facts)) {
    ReductionSteps(draft).variance(*variance);
  } else if (auto resampling = findResampling(subgraph, facts)) {
    ResamplingSteps(draft).resampling(std::move(*resampling));
  } else if (const auto padding = findPadding(subgraph, facts)) {
    ResamplingSteps(draft).padding(*padding);
  } else {
    return false;
  }
  return true;
}

bool isUnlowered(const CompileRequest& request) {
  const auto& subgraph = *request.subgraph;
  const auto& facts = *request.facts;
  return findShuffle(subgraph, facts) || isOwnAttentionGroup(subgraph) ||
         findGroupNorm(subgraph, facts) || findRowNorm(subgraph, facts) ||
         findRotary(subgraph, facts) || findRecurrent(subgraph, facts) ||
         findLookup(subgraph, facts) || findVariance(subgraph, facts) ||
         findResampling(subgraph, facts) || findPadding(subgraph, facts);
}

bool addOwnGroup(PlanDraft& draft) {
  QuantizedSteps quantized(draft);
  ConvolutionSteps convolutions(draft);
  PointwiseSteps pointwise(draft);
  return addProductAndMore(draft) || quantized.roundedLayerNorm() ||
         ConcatSteps(draft).concatAffine() || convolutions.expansion() || quantized.block() ||
         convolutions.squeezeExcitation() || quantized.excitation() || quantized.affineSum() ||
         pointwise.gate() || quantized.quantization() || pointwise.wholeActivation() ||
         pointwise.wholePointwise();
}

void addCopiesWithoutGaps(PlanDraft& draft) {
  for (const auto& op : draft.lowered.ops) {
    for (const auto& input : op.inputs()) {
      const auto found = draft.group_inputs.find(input.id);
      if (found != draft.group_inputs.end() && draft.slots.count(input.id) == 0 && input.sizes &&
          hasGaps(*input.sizes, draft.request.input_strides[found->second]) &&
          !takesGaps(draft, input)) {
        StepMaker(draft).replaceByCopy(input);
      }
    }
  }
}

void addCopiesOfPlanes(PlanDraft& draft) {
  if (ownKernelsAnywhere()) {
    StepMaker(draft).replacePlanes();
  }
}

std::pair<Slot, Layout> addInterleaved(PlanDraft& draft, const Layout& images) {
  return StepMaker(draft).interleaved(images);
}

bool addOwnStep(PlanDraft& draft, const Ops& partition, Way way) {
  ConvolutionSteps convolutions(draft);
  ProductSteps products(draft);
  PointwiseSteps pointwise(draft);
  ConcatSteps concats(draft);
  QuantizedSteps quantized(draft);
  const bool usual = way == Way::usual;
  return (usual && (convolutions.grouped(partition) || convolutions.depthwise(partition) ||
                    convolutions.volume(partition) || convolutions.direct(partition) ||
                    convolutions.transposed(partition) || pointwise.batchNorm(partition) ||
                    concats.concat(partition) || concats.concatOfRows(partition) ||
                    ReductionSteps(draft).reduction(partition) || pointwise.softmax(partition) ||
                    ResamplingSteps(draft).resampling(partition) || quantized.linear(partition) ||
                    quantized.convolution(partition) || quantized.mean(partition) ||
                    quantized.maxPool(partition) || products.narrowLinear(partition) ||
                    convolutions.narrow(partition))) ||
         convolutions.winograd(partition, way) ||
         (usual && products.convolutionOfPlanes(partition)) || products.linear(partition, way) ||
         (usual && products.product(partition)) || pointwise.activation(partition) ||
         (usual && pointwise.pointwise(partition));
}

}  // namespace llga

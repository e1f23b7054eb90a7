// Makes a group of two parts of a tensor that are multiplied, behind an activation of one or both:
// gated convolutions (WaveNet, GLU) and linear layers (GEGLU).
//
//   %1 : Tensor, %2 : Tensor = prim::ConstantChunk[chunks=2, dim=1](%x)
//   %5 = aten::mul(aten::tanh(%1), aten::sigmoid(%2))
// ->
//   %5 = llga::FusionGroup[Subgraph=<tanh, sigmoid, mul>](%1, %2)
//
// oneDNN has partitions with one of the activations, which read no parts; a plan for the group may
// be one step (runtime/gate.h). aten::glu becomes such a product where its tensor has an even
// number of channels for sure, which a convolution's weight says.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

// The node that computes an input of `product`, if it is an activation of that alone; or null.
Node* activationOf(const Node* product, size_t input) {
  auto* value = product->input(input);
  const bool is = isSmoothActivation(value->node()) && value->uses().size() == 1 &&
                  value->node()->owningBlock() == product->owningBlock();
  return is ? value->node() : nullptr;
}

bool isPart(const Value* value) { return makesParts(value->node()); }

// The nodes of a product of two parts, in their order; none if this is another one.
std::vector<Node*> gateOf(Node* product) {
  if (product->kind() != aten::mul || !isTensor(product->input(1))) {
    return {};
  }
  std::vector<Node*> nodes;
  const Value* sources[] = {product->input(0), product->input(1)};
  for (const size_t i : {0, 1}) {
    if (auto* activation = activationOf(product, i)) {
      nodes.push_back(activation);
      sources[i] = activation->input(0);
    }
  }
  if (nodes.empty() || sources[0] == sources[1] || !isPart(sources[0]) || !isPart(sources[1])) {
    return {};
  }
  if (nodes.size() == 2 && nodes[1]->isBefore(nodes[0])) {
    std::swap(nodes[0], nodes[1]);
  }
  nodes.push_back(product);
  return nodes;
}

// aten::glu over the channels of a convolution, of which there is an even number.
bool halvesChannels(const Node* glu) {
  if (glu->kind() != aten::glu || !isConvolution(glu->input(0)->node())) {
    return false;
  }
  const auto weight = constantTensor(glu->input(0)->node()->namedInput("weight"));
  const auto dim = intOf(glu->input(1));
  if (!weight.defined() || !dim || weight.size(0) % 2 != 0) {
    return false;
  }
  // Counted from the end, channels are where they are with or without a batch.
  return *dim == 1 - weight.dim() ||
         (*dim == 1 && KnownShapes().rank(glu->input(0)) == static_cast<size_t>(weight.dim()));
}

void divide(Node* glu) {
  auto* graph = glu->owningGraph();
  const auto insert = [&](Symbol kind, at::ArrayRef<Value*> inputs, size_t outputs) {
    auto* node = graph->create(kind, inputs, outputs)->insertBefore(glu);
    node->copyMetadata(glu);
    for (auto* output : node->outputs()) {
      output->setType(glu->output()->type());
    }
    return node;
  };
  auto* parts = insert(prim::ConstantChunk, {glu->input(0)}, 2);
  parts->i_(torch::jit::attr::chunks, 2)->i_(torch::jit::attr::dim, *intOf(glu->input(1)));
  auto* gate = insert(aten::sigmoid, {parts->output(1)}, 1);
  auto* product = insert(aten::mul, {parts->output(0), gate->output()}, 1);
  glu->output()->replaceAllUsesWith(product->output());
  glu->destroy();
}

}  // namespace

void joinGates(const GraphPtr& graph) {
  walk(graph->block(), [](Node* node) {
    if (halvesChannels(node)) {
      divide(node);
    }
  });
  std::vector<std::vector<Node*>> gates;
  walk(graph->block(), [&](Node* node) {
    if (auto nodes = gateOf(node); !nodes.empty()) {
      gates.push_back(std::move(nodes));
    }
  });
  if (gates.empty()) {
    return;
  }
  torch::jit::AliasDb aliases(graph);
  for (const auto& nodes : gates) {
    mergeIntoGroup(nodes, aliases);
  }
}

}  // namespace llga

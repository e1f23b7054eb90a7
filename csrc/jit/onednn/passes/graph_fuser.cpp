// Rewrites what oneDNN proposes into fusion groups.
//
//   %2 : Tensor = aten::_convolution(%x, %w, ...)
//   %3 : Tensor = aten::relu(%2)
// ->
//   %3 : Tensor = llga::FusionGroup[Subgraph=<the two nodes>](%x)
//
// A proposal is kept if it computes something; it is dropped, with the reason on its nodes, where
// it only costs: lone views, a lone elementwise op that touches no other group; and where oneDNN
// would see constants alone. Shape arithmetic that only the group needs moves into it.
#include <c10/util/irange.h>
#include <torch/csrc/jit/jit_log.h>
#include <torch/csrc/jit/passes/common_subexpression_elimination.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/utils/subgraph_utils.h>

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "jit/onednn/graph_helper.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace prim = torch::jit::prim;

// ---------------------------------------------------------------------------- what is worth it

bool isArrayOfRank4(const Value* value) {
  const auto type = value->type()->cast<c10::TensorType>();
  return type && type->dim() && *type->dim() >= 4;
}

using Nodes = std::unordered_set<const Node*>;

// Whether a node that is in no group may stand between groups without bringing numbers into another
// order: those that layout_propagation knows.
bool isBetween(const Node* node) {
  switch (node->kind()) {
    case torch::jit::aten::constant_pad_nd:
    case torch::jit::aten::flatten:
    case torch::jit::aten::pad:
    case torch::jit::aten::permute:
    case torch::jit::aten::reshape:
    case torch::jit::aten::to:
    case torch::jit::aten::transpose:
    case torch::jit::aten::view:
      return true;
    default:
      return makesParts(node);
  }
}

// Whether `kept` computes it, or what it is a part of.
bool isMadeBy(const Nodes& kept, const Value* value) {
  while (kept.count(value->node()) == 0) {
    if (!isBetween(value->node())) {
      return false;
    }
    value = value->node()->input(0);
  }
  return isArrayOfRank4(value);
}

// Whether `kept` reads it, parts of it, or a list that holds it.
bool isReadBy(const Nodes& kept, const Value* value) {
  return std::any_of(value->uses().begin(), value->uses().end(), [&](const torch::jit::Use& use) {
    const auto* user = use.user;
    if (kept.count(user) != 0) {
      return true;
    }
    const auto outputs = user->outputs();
    return (isBetween(user) || user->kind() == prim::ListConstruct) &&
           std::any_of(outputs.begin(), outputs.end(),
                       [&](const Value* output) { return isReadBy(kept, output); });
  });
}

// Image-like values between two groups are in oneDNN's layout; leaving a lone op between them to
// aten would cost two conversions. Elsewhere a lone elementwise op gains nothing.
bool joinsGroups(const Proposal& proposal, const Nodes& kept) {
  bool reads = false;
  bool read = false;
  for (const auto* node : proposal.nodes) {
    for (const auto* input : node->inputs()) {
      reads = reads || isMadeBy(kept, input);
    }
    for (const auto* output : node->outputs()) {
      read = read || (isArrayOfRank4(output) && isReadBy(kept, output));
    }
  }
  return reads && read;
}

// A lone quantization that groups read, as that of a network's input, or of what they compute: in
// whatever layout that has.
bool quantizesForGroups(const Proposal& proposal, const Nodes& kept) {
  const auto& nodes = proposal.nodes;
  return nodes.size() == 1 && isQuantize(nodes[0]) && isReadBy(kept, nodes[0]->output());
}

// oneDNN would compute such a partition in its first call and never again.
std::vector<Proposal> dropConstant(std::vector<Proposal> proposals) {
  std::erase_if(proposals, [](const Proposal& proposal) {
    const std::unordered_set<const Node*> members(proposal.nodes.begin(), proposal.nodes.end());
    std::function<bool(const Value*)> isConstant = [&](const Value* value) {
      const auto* source = value->node();
      if (source->kind() == prim::ListConstruct) {
        return std::all_of(source->inputs().begin(), source->inputs().end(), isConstant);
      }
      return source->kind() == prim::Constant || isQuantizedConstant(source) ||
             members.count(source) != 0 || !(isTensor(value) || isTensorList(value));
    };
    for (const auto* node : proposal.nodes) {
      if (!std::all_of(node->inputs().begin(), node->inputs().end(), isConstant)) {
        return false;
      }
    }
    for (auto* node : proposal.nodes) {
      refuse(node, qualifiedName(node) + ": partition dropped: all that it reads are constants");
    }
    return true;
  });
  return proposals;
}

// A concatenation of parts of tensors, which oneDNN would copy first as they have gaps.
bool isCatOfParts(const Proposal& proposal) {
  if (proposal.nodes.size() != 1 || proposal.nodes[0]->kind() != torch::jit::aten::cat) {
    return false;
  }
  const auto parts = proposal.nodes[0]->input(0)->node()->inputs();
  return std::all_of(parts.begin(), parts.end(),
                     [](const Value* part) { return takesPart(part->node()); });
}

// Several lone ops in a row between two groups join them too: all are kept at first, and those that
// then touch nothing on one side are dropped until none is left.
std::vector<Proposal> dropUnprofitable(std::vector<Proposal> proposals) {
  Nodes kept;
  for (const auto& proposal : proposals) {
    if (proposal.compute + proposal.elementwise + proposal.casts > 0) {
      kept.insert(proposal.nodes.begin(), proposal.nodes.end());
    }
  }
  auto drop = [&](const Proposal& proposal) {
    if (isCatOfParts(proposal)) {
      kept.erase(proposal.nodes[0]);
      refuse(proposal.nodes[0], "aten::cat: partition dropped: oneDNN would copy slices first");
      return true;
    }
    if (proposal.compute > 0 || proposal.elementwise + proposal.casts > 1) {
      return false;
    }
    const bool views_only = proposal.elementwise + proposal.casts == 0;
    if (!views_only && (joinsGroups(proposal, kept) || quantizesForGroups(proposal, kept))) {
      return false;
    }
    for (auto* node : proposal.nodes) {
      kept.erase(node);
      refuse(node, qualifiedName(node) + (views_only ? ": partition dropped: a lone view"
                                                     : ": partition dropped: a lone elementwise "
                                                       "op that joins no groups"));
    }
    return true;
  };
  while (std::erase_if(proposals, drop) > 0) {
  }
  return proposals;
}

// ------------------------------------------------------------------------------ shape arithmetic

// Clones of nodes that a group needs beside its proposal's: lists of tensors for cat, dequantized
// constants, and shape arithmetic whose tensors the group reads or computes anyway.
class Absorber {
 public:
  explicit Absorber(std::vector<Node*>& nodes) : nodes_(nodes) {
    for (auto* node : nodes) {
      known_.insert(node->outputs().begin(), node->outputs().end());
      for (auto* input : node->inputs()) {
        if (isTensor(input)) {
          known_.insert(input);
        }
      }
    }
  }

  void run() {
    const auto members = nodes_;
    for (auto* node : members) {
      for (const auto i : c10::irange(node->inputs().size())) {
        auto* input = node->input(i);
        auto* source = input->node();
        if (source->kind() == prim::ListConstruct && isTensorList(input)) {
          node->replaceInput(i, clone(source, node)->output());
          if (!source->hasUses()) {  // else it would read what the group computes
            source->destroy();
          }
        } else if (isQuantizedConstant(source)) {
          node->replaceInput(i, dequantized(input, node));
        } else if (!isTensor(input) && canAbsorb(input)) {
          node->replaceInput(i, absorb(input, node));
        }
      }
    }
  }

 private:
  bool canAbsorb(const Value* value) const {
    const auto* source = value->node();
    if (source->kind() == prim::Constant) {
      return true;
    }
    if (!isShapeArithmetic(source)) {
      return false;
    }
    return std::all_of(source->inputs().begin(), source->inputs().end(), [&](const Value* input) {
      return (isTensor(input) && known_.count(input) != 0) || canAbsorb(input);
    });
  }

  Value* absorb(Value* value, Node* reader) {
    auto* source = value->node();
    if (source->kind() == prim::Constant || known_.count(value) != 0) {
      return value;
    }
    auto* copy = clone(source, reader);
    for (const auto i : c10::irange(copy->inputs().size())) {
      copy->replaceInput(i, absorb(copy->input(i), copy));
    }
    return copy->output();
  }

  Value* dequantized(Value* value, Node* reader) {
    auto* copy = clone(value->node(), reader);
    if (isQuantizedConstant(copy->input(0)->node())) {  // a cast of it
      copy->replaceInput(0, dequantized(copy->input(0), copy));
    }
    return copy->output();
  }

  Node* clone(Node* source, Node* reader) {
    auto* copy = reader->owningGraph()->createClone(source, [](Value* v) { return v; });
    copy->insertBefore(reader);
    nodes_.push_back(copy);
    return copy;
  }

  std::vector<Node*>& nodes_;
  std::unordered_set<const Value*> known_;
};

// -------------------------------------------------------------------------------------- rewriting

class BlockFuser {
 public:
  explicit BlockFuser(const GraphPtr& graph) : graph_(graph) {}

  void run(Block* block) {
    for (auto* node : block->nodes()) {
      if (isFusionGroup(node)) {
        continue;
      }
      for (auto* nested : node->blocks()) {
        run(nested);
      }
    }
    std::vector<Proposal> proposals;
    {
      const AliasDb aliases(graph_);
      proposals = dropUnprofitable(dropConstant(proposeGroups(block, aliases)));
    }
    for (auto& proposal : proposals) {
      Absorber(proposal.nodes).run();
      std::for_each(proposal.nodes.begin(), proposal.nodes.end(), readFirstOutputs);
    }
    aliases_ = std::make_unique<AliasDb>(graph_);
    for (auto& proposal : proposals) {
      merge(proposal.nodes);
    }
  }

 private:
  void merge(std::vector<Node*>& nodes) {
    std::sort(nodes.begin(), nodes.end(),
              [](const Node* a, const Node* b) { return a->isBefore(b); });
    if (!mergeIntoGroup(nodes, *aliases_)) {
      for (auto* node : nodes) {
        if (findReasonable(node)) {
          refuse(node, qualifiedName(node) +
                           ": partition dropped: a side effect or a host value lies between its "
                           "nodes");
        }
      }
    }
  }

  static bool findReasonable(const Node* node) { return node->maybeSchema() != nullptr; }

  const GraphPtr& graph_;
  std::unique_ptr<AliasDb> aliases_;
};

// Takes casts that prepare_binary put in and nothing fused out again: aten's binary ops convert on
// the fly.
void removeUnfusedCasts(Block* block) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    auto* node = *it++;
    for (auto* nested : node->blocks()) {
      removeUnfusedCasts(nested);
    }
    if (!node->hasAttribute(insertedAttr())) {
      continue;
    }
    const auto& uses = node->output()->uses();
    const bool read_by_group = std::any_of(
        uses.begin(), uses.end(), [](const torch::jit::Use& u) { return isFusionGroup(u.user); });
    if (!read_by_group) {
      node->output()->replaceAllUsesWith(node->input(0));
      node->destroy();
    }
  }
}

// Makes an op that went into no group in-place again, as it was before remove_mutation, where its
// target has no other reader.
void restoreMutation(Block* block) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    auto* as_target = *it++;
    for (auto* nested : as_target->blocks()) {
      restoreMutation(nested);
    }
    if (as_target->kind() != asTargetKind()) {
      continue;
    }
    auto* node = as_target->input(0)->node();
    auto* target = as_target->input(1);
    const bool unread = target->uses().size() == 2 && as_target->input(0)->uses().size() == 1;
    if (isFusionGroup(node) || isFusionGroup(target->node()) || !unread ||
        node->owningBlock() != block || node->inputs().empty() || node->input(0) != target ||
        target->node()->owningBlock() != block || target->node()->inputs().empty() ||
        !node->kind().is_aten()) {
      continue;
    }
    const auto kind = Symbol::fromQualString(std::string(node->kind().toQualString()) + "_");
    auto* in_place = block->owningGraph()->create(kind, node->inputs(), 1);
    in_place->copyMetadata(node)->copyAttributes(*node);
    in_place->insertBefore(node);
    if (in_place->maybeSchema() == nullptr) {
      in_place->destroy();
      continue;
    }
    in_place->output()->setType(as_target->output()->type());
    as_target->output()->replaceAllUsesWith(in_place->output());
    as_target->destroy();
    node->destroy();
  }
}

bool holdsDequantize(Block* block) {
  return std::any_of(block->nodes().begin(), block->nodes().end(), [](Node* node) {
    return dequantizeParams(node).has_value() ||
           std::any_of(node->blocks().begin(), node->blocks().end(), holdsDequantize);
  });
}

}  // namespace

void readFirstOutputs(Node* node) {
  const auto outputs = node->outputs();
  const auto is_read = [](const Value* output) { return output->hasUses(); };
  if (!std::is_partitioned(outputs.begin(), outputs.end(), is_read)) {
    node->owningGraph()->create(prim::TupleConstruct, outputs, 1)->insertAfter(node);
  }
}

bool mergeIntoGroup(const std::vector<Node*>& nodes, AliasDb& aliases) {
  return mergeIntoNode(nodes, fusionGroupKind(), aliases) != nullptr;
}

Node* mergeIntoNode(const std::vector<Node*>& nodes, Symbol kind, AliasDb& aliases) {
  auto* point = nodes.back();
  for (size_t i = nodes.size() - 1; i-- > 0;) {
    if (!aliases.moveBeforeTopologicallyValid(nodes[i], point)) {
      return nullptr;
    }
    point = nodes[i];
  }
  // A reader of what one node computes may have come to stand in front of the last one.
  std::vector<Node*> readers;
  const std::unordered_set<const Node*> members(nodes.begin(), nodes.end());
  for (auto* node = nodes.front(); node != nodes.back(); node = node->next()) {
    if (members.count(node) == 0) {
      readers.push_back(node);
    }
  }
  for (auto reader = readers.rbegin(); reader != readers.rend(); ++reader) {
    if (!aliases.moveAfterTopologicallyValid(*reader, nodes.back())) {
      return nullptr;
    }
  }
  // Where what a reader computes is read by another of the nodes, that one has gone with it.
  const bool together = std::all_of(nodes.begin(), nodes.end() - 1,
                                    [&](const Node* node) { return node->isBefore(nodes.back()); });
  if (!together) {
    return nullptr;
  }
  auto* group = nodes.back()->kind() == kind
                    ? nodes.back()
                    : torch::jit::SubgraphUtils::createSingletonSubgraphAndUpdateAliasing(
                          nodes.back(), kind, aliases);
  for (size_t i = nodes.size() - 1; i-- > 0;) {
    torch::jit::SubgraphUtils::mergeNodeIntoSubgraphAndUpdateAliasing(nodes[i], group, aliases);
  }
  torch::jit::EliminateDeadCode(group->g(torch::jit::attr::Subgraph));
  for (auto* inner : group->g(torch::jit::attr::Subgraph)->nodes()) {
    if (inner->hasAttribute(refusedAttr())) {
      inner->removeAttribute(refusedAttr());
    }
  }
  return group;
}

void fuseGraph(const GraphPtr& graph) {
  BlockFuser(graph).run(graph->block());
  if (holdsDequantize(graph->block())) {  // outside of groups: one for all readers is enough
    torch::jit::EliminateCommonSubexpression(graph);
  }
  removeUnfusedCasts(graph->block());
  restoreMutation(graph->block());
  torch::jit::EliminateDeadCode(graph);
}

}  // namespace llga

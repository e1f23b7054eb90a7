// Makes one node of what computes tensors from sizes alone: masks, positions, index tables.
//
//   %2 : Tensor = aten::arange(%n, ...)              # %n : int = aten::size(%x, 1)
//   %3 : Tensor = aten::unsqueeze(%2, 0)
//   %4 : Tensor = aten::le(%3, %m)
// ->
//   %4 : Tensor = llga::OncePerSizes[Subgraph=<the three>](%n, %m)
//
// The node computes its results once for each set of integers and returns them again
// (once_per_sizes.h). So nothing may write to a result, nor return it to the caller. Ops in there
// may write to what the others compute: a mask is often filled piece by piece.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace prim = torch::jit::prim;

using Nodes = std::vector<Node*>;

// A tensor, or a list of tensors; aten::index takes one of tensors that may be missing.
bool holdsTensors(const Value* value) {
  static const auto kOptional = c10::ListType::create(c10::OptionalType::ofTensor());
  return isTensor(value) || isTensorList(value) || value->type()->isSubtypeOf(*kOptional);
}

bool isHost(const Value* value) {
  const auto& type = value->type();
  return type->isSubtypeOf(*c10::IntType::get()) || type->isSubtypeOf(*c10::BoolType::get()) ||
         type->isSubtypeOf(*c10::NoneType::get()) || type->isSubtypeOf(*c10::DeviceObjType::get());
}

// A number that a trace takes from a tensor: the end of an aten::arange.
bool isNumber(const Value* value) { return value->type()->kind() == c10::NumberType::Kind; }

// A list of host values that is made where it is read.
bool isHostList(const Value* value) {
  const auto* node = value->node();
  return node->kind() == prim::ListConstruct &&
         std::all_of(node->inputs().begin(), node->inputs().end(), isHost);
}

// What stands for an op that reads nothing of its first input but data type, layout and device.
const char* factoryFor(const Node* node) {
  static const auto kNewZeros = Symbol::fromQualString("aten::new_zeros");
  static const auto kNewOnes = Symbol::fromQualString("aten::new_ones");
  if (node->inputs().size() != 6) {
    return nullptr;
  }
  if (node->kind() == kNewZeros) {
    return "aten::zeros";
  }
  return node->kind() == kNewOnes ? "aten::ones" : nullptr;
}

// Spells them without that input where it comes from elsewhere: what it tells is asked in front of
// them.
void replaceFactories(Nodes& nodes) {
  const std::unordered_set<const Node*> members(nodes.begin(), nodes.end());
  for (auto*& node : nodes) {
    const auto* factory = factoryFor(node);
    if (factory == nullptr || members.count(node->input(0)->node()) != 0) {
      continue;
    }
    auto* graph = node->owningGraph();
    const torch::jit::WithInsertPoint guard(node);
    auto given = [&](size_t i, const char* otherwise, const c10::TypePtr& type) {
      if (node->input(i)->type()->kind() != c10::NoneType::Kind) {
        return node->input(i);
      }
      auto* asked =
          graph->insertNode(graph->create(Symbol::fromQualString(otherwise), {node->input(0)}, 1));
      asked->output()->setType(type);
      return asked->output();
    };
    auto* dtype = given(2, "prim::dtype", c10::IntType::get());
    auto* layout = given(3, "prim::layout", c10::IntType::get());
    auto* device = given(4, "prim::device", c10::DeviceObjType::get());
    auto* made = graph->insertNode(
        graph->create(Symbol::fromQualString(factory),
                      {node->input(1), dtype, layout, device, node->input(5)}, 1));
    made->copyMetadata(node);
    made->output()->setType(node->output()->type());
    node->output()->replaceAllUsesWith(made->output());
    node->destroy();
    node = made;
  }
}

class Finder {
 public:
  Finder(Block* block, const AliasDb& aliases) : block_(block), aliases_(aliases) {
    walk(block, [this](const Node* node) {
      if (node->kind() == asTargetKind()) {
        targets_.push_back(node);
      }
    });
  }

  // Groups of nodes, each in order.
  std::vector<Nodes> find() {
    do {
      collect();
    } while (banOutputs());
    return components();
  }

 private:
  bool isMember(const Value* value) const { return members_.count(value->node()) != 0; }

  void collect() {
    members_.clear();
    for (auto* node : block_->nodes()) {
      if (banned_.count(node) == 0 && computesFromSizes(node)) {
        members_.insert(node);
      }
    }
  }

  bool computesFromSizes(const Node* node) const {
    if (node->kind() == prim::Constant || isFusionGroup(node) || !node->blocks().empty() ||
        node->outputs().empty() || node->isNondeterministic()) {
      return false;
    }
    const bool known = node->kind() == prim::NumToTensor || node->kind() == prim::ListUnpack ||
                       node->kind() == prim::ListConstruct || node->kind() == prim::dtype ||
                       node->kind() == prim::device || node->kind() == asTargetKind() ||
                       (node->kind().is_aten() && node->maybeSchema() != nullptr);
    if (!known) {
      return false;
    }
    const bool writes = node->maybeSchema() != nullptr && node->maybeSchema()->is_mutable();
    if (writes && !isFresh(node->input(0))) {
      return false;
    }
    bool tensors = false;
    for (size_t i = factoryFor(node) != nullptr ? 1 : 0; i < node->inputs().size(); ++i) {
      const auto* input = node->input(i);
      const bool tensor = holdsTensors(input);
      tensors = tensors || tensor;
      const bool constant = input->node()->kind() == prim::Constant;
      const bool inside = tensor || isNumber(input);
      if (!constant && !(inside ? isMember(input) : isHost(input) || isHostList(input))) {
        return false;
      }
    }
    for (const auto* output : node->outputs()) {
      const bool tensor = holdsTensors(output);
      tensors = tensors || tensor;
      if (!tensor && !isHost(output) && !isNumber(output)) {
        return false;
      }
    }
    return tensors;
  }

  // False for a constant, and for a view of one.
  static bool isFresh(const Value* value) {
    for (;;) {
      const auto* node = value->node();
      const auto* schema = node->maybeSchema();
      if (schema == nullptr || schema->returns().size() != 1) {
        return false;
      }
      if (schema->returns()[0].alias_info() == nullptr) {
        return true;
      }
      value = node->input(0);
    }
  }

  bool isTarget(const Value* value) const {
    return std::any_of(targets_.begin(), targets_.end(), [&](const Node* target) {
      return members_.count(target) == 0 && aliases_.mayAlias(target->input(1), value);
    });
  }

  bool isReadOutside(const Value* value) const {
    return std::any_of(value->uses().begin(), value->uses().end(),
                       [&](const torch::jit::Use& use) { return members_.count(use.user) == 0; });
  }

  // Of what a result may not be. True if there was any.
  bool banOutputs() {
    const auto before = banned_.size();
    for (auto* node : block_->nodes()) {
      if (members_.count(node) == 0) {
        continue;
      }
      for (auto* output : node->outputs()) {
        if (!isReadOutside(output) || isHost(output)) {
          continue;
        }
        if (!isTensor(output) || aliases_.hasWriters(output) || aliases_.escapesScope({output}) ||
            isTarget(output)) {
          banned_.insert(node);
        }
      }
    }
    return banned_.size() > before;
  }

  // Nodes that read each other's tensors, or numbers from them, belong together.
  std::vector<Nodes> components() const {
    std::unordered_map<const Node*, size_t> where;
    std::vector<Nodes> found;
    for (auto* node : block_->nodes()) {
      if (members_.count(node) == 0) {
        continue;
      }
      size_t own = found.size();
      found.push_back({node});
      where[node] = own;
      for (const auto* input : node->inputs()) {
        if (!(holdsTensors(input) || isNumber(input)) || !isMember(input)) {
          continue;
        }
        const auto other = where.at(input->node());
        if (other == own) {
          continue;
        }
        for (auto* moved : found[own]) {
          where[moved] = other;
        }
        auto& into = found[other];
        into.insert(into.end(), found[own].begin(), found[own].end());
        found[own].clear();
        own = other;
      }
    }
    constexpr size_t kFewest = 2;  // one is as fast alone
    std::erase_if(found, [](const Nodes& nodes) { return nodes.size() < kFewest; });
    return found;
  }

  Block* block_;
  const AliasDb& aliases_;
  std::unordered_set<const Node*> members_;
  std::unordered_set<const Node*> banned_;
  // Of in-place ops that remove_mutation took out and the graph fuser may put back.
  std::vector<const Node*> targets_;
};

// What is computed once need not be computed in place.
void dropTargets(Nodes& nodes) {
  std::erase_if(nodes, [](Node* node) {
    if (node->kind() != asTargetKind()) {
      return false;
    }
    node->output()->replaceAllUsesWith(node->input(0));
    node->destroy();
    return true;
  });
}

// Copies of the lists that only tell a node sizes, in front of it.
void takeLists(Nodes& nodes) {
  const auto members = nodes;
  for (auto* node : members) {
    for (size_t i = 0; i < node->inputs().size(); ++i) {
      auto* list = node->input(i)->node();
      if (!holdsTensors(node->input(i)) && list->kind() == prim::ListConstruct) {
        auto* copy = node->owningGraph()->createClone(list, [](Value* v) { return v; });
        copy->insertBefore(node);
        node->replaceInput(i, copy->output());
        nodes.push_back(copy);
      }
    }
  }
}

}  // namespace

void oncePerSizes(const GraphPtr& graph) {
  std::vector<Nodes> found;
  {
    const AliasDb aliases(graph);
    found = Finder(graph->block(), aliases).find();
  }
  for (auto& nodes : found) {
    dropTargets(nodes);
    replaceFactories(nodes);
    takeLists(nodes);
    std::for_each(nodes.begin(), nodes.end(), readFirstOutputs);
  }
  AliasDb aliases(graph);
  for (auto& nodes : found) {
    std::sort(nodes.begin(), nodes.end(),
              [](const Node* a, const Node* b) { return a->isBefore(b); });
    mergeIntoNode(nodes, oncePerSizesKind(), aliases);
  }
  if (!found.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga

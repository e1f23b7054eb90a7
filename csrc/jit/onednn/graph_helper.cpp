#include "jit/onednn/graph_helper.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <fmt/format.h>
#include <torch/csrc/jit/jit_log.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "jit/onednn/ops/op_table.h"
#include "jit/onednn/quantization.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/own_attention.h"
#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/runtime/own_lookup.h"
#include "jit/onednn/runtime/own_norm.h"
#include "jit/onednn/runtime/own_padding.h"
#include "jit/onednn/runtime/own_pointwise.h"
#include "jit/onednn/runtime/own_recurrent.h"
#include "jit/onednn/runtime/own_resampling.h"
#include "jit/onednn/runtime/own_rotary.h"
#include "jit/onednn/runtime/own_variance.h"
#include "jit/onednn/written_attention.h"

namespace llga {
namespace {

using dnnl::graph::logical_tensor;
using dnnl::graph::partition;
using torch::jit::AliasDb;
namespace prim = torch::jit::prim;

struct Candidate {
  const OpEntry* entry;
  size_t first_op = 0;  // its ops in LoweredGraph::ops
  size_t ops = 0;
};

// Elementwise results that become integers may flip by one where rounding differs (the position
// buckets of T5): what leads there through elementwise ops stays with aten.
std::unordered_set<const Node*> feedsIntegerCast(Block* block, const Facts& facts) {
  std::unordered_set<const Node*> marked;
  std::vector<Node*> todo;
  for (auto* node : block->nodes()) {
    for (const auto* output : node->outputs()) {
      const auto dtype = facts.tensor(output).dtype;
      const bool integral = dtype && c10::isIntegralType(*dtype, /*includeBool=*/true);
      if (!integral || findOp(node) == nullptr) {
        // A cast or comparison of floats: look at where its inputs come from.
        if (integral) {
          for (const auto* input : node->inputs()) {
            const auto from = facts.tensor(input).dtype;
            if (from && c10::isFloatingType(*from)) {
              todo.push_back(const_cast<Node*>(input->node()));
            }
          }
        }
        continue;
      }
      todo.push_back(node);
    }
  }
  while (!todo.empty()) {
    auto* node = todo.back();
    todo.pop_back();
    const auto* entry = findOp(node);
    if (node->owningBlock() != block || entry == nullptr || entry->op_class == OpClass::compute ||
        !marked.insert(node).second) {
      continue;
    }
    for (auto* input : node->inputs()) {
      todo.push_back(input->node());
    }
  }
  return marked;
}

// Values of `block` that `node` reads: its inputs and what its nested blocks capture, lists of
// tensors taken apart into their elements.
void readsOf(const Node* node, const Block* block, std::vector<const Value*>& reads) {
  auto read = [&](const Value* value) {
    if (value->node()->kind() == prim::ListConstruct) {
      for (const auto* item : value->node()->inputs()) {
        reads.push_back(behind(item));
      }
    } else if (value->node()->kind() != prim::Constant) {
      reads.push_back(behind(value));
    }
  };
  for (const auto* input : node->inputs()) {
    read(input);
  }
  for (const auto* nested : node->blocks()) {
    for (const auto* inner : nested->nodes()) {
      readsOf(inner, block, reads);
    }
    for (const auto* output : nested->outputs()) {
      read(output);
    }
  }
}

std::optional<AttentionCore> ownAttentionOf(const Node* node, const Facts& facts) {
  if (isOwnAttention(node, facts)) {
    auto own = attentionOperands(node);
    return AttentionCore{own.query, own.key, own.value, own.result, std::move(own.nodes)};
  }
  auto written = attentionAround(node, facts);
  if (!written || !isOwnAttention(*written, facts)) {
    return std::nullopt;
  }
  return AttentionCore{written->query, written->key, written->value, written->result,
                       std::move(written->nodes)};
}

class BlockPartitioner {
 public:
  BlockPartitioner(Block* block, const AliasDb& aliases) : block_(block) { lowerAll(aliases); }

  std::vector<Proposal> propose() {
    auto found = proposeByPartitions();
    std::move(own_.begin(), own_.end(), std::back_inserter(found));
    joinReaders(found);
    joinDequantized(found);
    joinLinks(found);
    addPaddings(found);
    addIdentities(found);
    std::sort(found.begin(), found.end(), [](const Proposal& a, const Proposal& b) {
      return a.nodes.back()->isBefore(b.nodes.back());
    });
    return found;
  }

 private:
  struct Part {
    bool supported;
    std::vector<const Node*> nodes;  // one entry per op
  };

  std::vector<Proposal> proposeByPartitions() {
    // A node whose ops are torn apart goes back to aten, which may change what the others get. So
    // may the end of a partition where oneDNN did not see one.
    for (;;) {
      if (candidates_.empty()) {
        return {};
      }
      auto partitions = partition();
      if (!redoSplitNodes(partitions) && !takeApart(partitions)) {
        return proposals(partitions);
      }
    }
  }

  static bool holds(const Proposal& proposal, torch::jit::Symbol kind) {
    return std::any_of(proposal.nodes.begin(), proposal.nodes.end(),
                       [kind](const Node* node) { return node->kind() == kind; });
  }

  // Who reads what `node` gives, but for identities that only ask for its data type.
  static torch::jit::use_list readersOf(const Node* node) {
    auto uses = node->output()->uses();
    std::erase_if(
        uses, [](const torch::jit::Use& use) { return isIdentity(use.user) && use.offset == 1; });
    return uses;
  }

  // The one node that does, if it is one, also through identities.
  static const Node* soleReader(const Node* node) {
    for (;;) {
      const auto uses = readersOf(node);
      if (uses.size() != 1) {
        return nullptr;
      }
      node = uses.front().user;
      if (!isIdentity(node)) {
        return node;
      }
    }
  }

  // What oneDNN has no patterns for, but our kernels take: GELU's tanh form goes with the linear
  // layer, and maybe sum, that it alone reads, as the erf form does; what alone rounds this or
  // a layer norm to 8 bit goes with it; and so does what alone makes float32 of a linear layer's
  // bfloat16 under autocast, as in front of a residual sum, with that sum. So does a sum behind a
  // pointwise convolution with such a cast.
  void joinReaders(std::vector<Proposal>& proposals) const {
    std::unordered_map<const Node*, Proposal*> of;  // by the last node
    for (auto& proposal : proposals) {
      of.emplace(proposal.nodes.back(), &proposal);
    }
    // The proposal of the one node that reads what `from` gives, if it is nothing else.
    const auto readerOf = [&](const Proposal& from) -> Proposal* {
      const auto uses = readersOf(from.nodes.back());
      const auto reader = uses.size() == 1 ? of.find(uses.front().user) : of.end();
      const bool alone = reader != of.end() && reader->second->nodes.size() == 1;
      return alone ? reader->second : nullptr;
    };
    const auto take = [&](Proposal& joined, Proposal& reader) {
      joined.nodes.push_back(reader.nodes.front());
      joined.compute += reader.compute;
      joined.elementwise += reader.elementwise;
      joined.casts += reader.casts;
      of[reader.nodes.front()] = &joined;
      reader.nodes.clear();
    };
    for (auto& proposal : proposals) {
      if (proposal.nodes.empty() || proposal.nodes.back()->outputs().size() != 1) {
        continue;
      }
      bool rounds = proposal.nodes.size() == 1 && holds(proposal, torch::jit::aten::layer_norm);
      auto* reader = readerOf(proposal);
      if (reader != nullptr && isTanhGelu(reader->nodes.front()) &&
          holds(proposal, torch::jit::aten::linear)) {
        take(proposal, *reader);
        reader = readerOf(proposal);
        rounds = true;
      }
      if (rounds && reader != nullptr && isQuantize(reader->nodes.front())) {
        take(proposal, *reader);
      } else if (reader != nullptr && isWidenedConvolution(proposal) &&
                 reader->nodes.front()->kind() == torch::jit::aten::add) {
        take(proposal, *reader);
      } else if (reader != nullptr && isWidenedForAutocast(proposal, *reader)) {
        take(proposal, *reader);
        reader = readerOf(proposal);
        if (reader != nullptr && reader->nodes.front()->kind() == torch::jit::aten::add) {
          take(proposal, *reader);
        }
      }
    }
    std::erase_if(proposals, [](const Proposal& p) { return p.nodes.empty(); });
  }

  // A lone dequantize goes with the binary op that alone reads it, as the other operand of a sum
  // behind an activation: what groups alone read may lie in any order. A lone sum of two such
  // operands, and maybe ReLU, goes with what alone rounds it, for a kernel of our own.
  static void joinDequantized(std::vector<Proposal>& proposals) {
    std::unordered_map<const Node*, Proposal*> of;
    for (auto& proposal : proposals) {
      for (const auto* node : proposal.nodes) {
        of.emplace(node, &proposal);
      }
    }
    // The proposal that is this node and nothing else.
    const auto lone = [&](const Node* node) -> Proposal* {
      const auto found = of.find(node);
      return found != of.end() && found->second->nodes.size() == 1 ? found->second : nullptr;
    };
    const auto take = [&](Proposal& by, Proposal& from) {
      of[from.nodes.front()] = &by;
      by.nodes.push_back(from.nodes.front());
      by.elementwise += from.elementwise;
      by.casts += from.casts;
      from.nodes.clear();
    };
    for (auto& sum : proposals) {
      if (!ownKernelsAnywhere() || !isSumAlone(sum)) {
        continue;
      }
      const auto* reader = soleReader(sum.nodes.back());
      auto* rounding = reader != nullptr && isQuantize(reader) ? lone(reader) : nullptr;
      const auto isNarrow = [&](const Value* operand) {
        const auto* node = behind(operand)->node();
        return isDequantize(node) && soleReader(node) == sum.nodes.front() && lone(node) != nullptr;
      };
      const auto operands = sum.nodes.front()->inputs();
      if (rounding != nullptr && isNarrow(operands[0]) && isNarrow(operands[1])) {
        take(sum, *rounding);
        sum.compute = 1;
      }
    }
    for (auto& proposal : proposals) {
      if (proposal.nodes.size() != 1 || !isDequantize(proposal.nodes.front())) {
        continue;
      }
      const auto* user = soleReader(proposal.nodes.front());
      const auto reader = user != nullptr && isBinary(user) ? of.find(user) : of.end();
      if (reader != of.end() && reader->second->compute > 0) {
        take(*reader->second, proposal);
      }
    }
    std::erase_if(proposals, [](const Proposal& p) { return p.nodes.empty(); });
  }

  // Pointwise functions, casts and softmaxes that oneDNN leaves apart, one behind the other, go
  // together: our own kernel computes them in one pass.
  void joinLinks(std::vector<Proposal>& proposals) const {
    if (!ownKernelsAnywhere()) {
      return;
    }
    std::vector<Proposal*> chains;
    std::unordered_map<const Node*, Proposal*> of;
    for (auto& proposal : proposals) {
      for (const auto* node : proposal.nodes) {
        of.emplace(node, &proposal);
      }
      if (std::all_of(proposal.nodes.begin(), proposal.nodes.end(),
                      [&](const Node* node) { return isLinked(node); })) {
        chains.push_back(&proposal);
      }
    }
    std::sort(chains.begin(), chains.end(), [](const Proposal* a, const Proposal* b) {
      return a->nodes.back()->isBefore(b->nodes.back());
    });
    const std::unordered_set<const Proposal*> known(chains.begin(), chains.end());
    // What gives one of the values that the chain reads, and may go with it.
    const auto sourceOf = [&](const Proposal& chain) -> Proposal* {
      for (const auto* node : chain.nodes) {
        for (const auto* input : node->inputs()) {
          const auto found = of.find(behind(input)->node());
          if (found != of.end() && found->second != &chain && known.count(found->second) != 0 &&
              mayLink(*found->second, chain, behind(input), of)) {
            return found->second;
          }
        }
      }
      return nullptr;
    };
    for (auto* chain : chains) {
      while (auto* source = sourceOf(*chain)) {
        for (auto* node : source->nodes) {
          of[node] = chain;
          chain->nodes.push_back(node);
        }
        chain->compute += source->compute;
        chain->elementwise += source->elementwise;
        chain->casts += source->casts;
        source->nodes.clear();
      }
    }
    std::erase_if(proposals, [](const Proposal& p) { return p.nodes.empty(); });
  }

  // Whether a chain may have all that the node computes.
  bool isLinked(const Node* node) const {
    const auto it = candidates_.find(const_cast<Node*>(node));
    if (it == candidates_.end() || it->second.entry->op_class == OpClass::view) {
      return false;
    }
    const auto first = lowered_.ops.begin() + static_cast<std::ptrdiff_t>(it->second.first_op);
    return std::all_of(first, first + static_cast<std::ptrdiff_t>(it->second.ops), isLink);
  }

  // Whether it computes something that our own kernel has, and oneDNN has not.
  bool isOurs(const Node* node) const {
    const auto& candidate = candidates_.at(const_cast<Node*>(node));
    return ownKernelsAnywhere() && candidate.ops == 1 && isLinked(node) &&
           isOnlyOurs(lowered_.ops[candidate.first_op]);
  }

  // Whether a chain that reads `value` of another one goes together with that: one of them oneDNN
  // has no kernel for, or no more than one node of, or is a softmax.
  bool mayLink(const Proposal& source, const Proposal& chain, const Value* value,
               const std::unordered_map<const Node*, Proposal*>& of) const {
    constexpr size_t kMost = 12;  // nodes
    const bool apart =
        source.nodes.size() == 1 || chain.nodes.size() == 1 || source.compute + chain.compute > 0;
    return apart && source.nodes.size() + chain.nodes.size() <= kMost &&
           !isBroadcast(value, chain) && readsDirectly(source, chain, of);
  }

  // Whether something that the chain reads, or gives, is known to have more numbers.
  bool isBroadcast(const Value* value, const Proposal& chain) const {
    const auto sizes = facts_.tensor(value).sizes;
    if (!sizes) {
      return false;
    }
    const auto isLarger = [&](const Value* other) {
      const auto others = isTensor(other) ? facts_.tensor(other).sizes : std::nullopt;
      return others && c10::multiply_integers(*others) > c10::multiply_integers(*sizes);
    };
    return std::any_of(chain.nodes.begin(), chain.nodes.end(), [&](const Node* node) {
      return isLarger(node->output()) ||
             std::any_of(node->inputs().begin(), node->inputs().end(), isLarger);
    });
  }

  // Whether nothing else that the chain reads is made of what the source gives, also by way of
  // other proposals as a whole.
  bool readsDirectly(const Proposal& source, const Proposal& chain,
                     const std::unordered_map<const Node*, Proposal*>& of) const {
    std::unordered_set<const Node*> seen(chain.nodes.begin(), chain.nodes.end());
    std::vector<const Node*> todo;
    const auto addReads = [&](const Node* node, const Proposal* but) {
      std::vector<const Value*> reads;
      readsOf(node, block_, reads);
      for (const auto* value : reads) {
        const auto* from = value->node();
        const auto found = of.find(from);
        if ((found == of.end() || but == nullptr || found->second != but) &&
            from->owningBlock() == block_ && seen.insert(from).second) {
          todo.push_back(from);
        }
      }
    };
    for (const auto* node : chain.nodes) {
      addReads(node, &source);
    }
    while (!todo.empty()) {
      const auto* node = todo.back();
      todo.pop_back();
      const auto found = of.find(node);
      if (found == of.end()) {
        addReads(node, nullptr);
      } else if (found->second == &source) {
        return false;
      } else {
        for (const auto* member : found->second->nodes) {
          addReads(member, nullptr);
        }
      }
    }
    return true;
  }

  // An addition of two tensors, and maybe ReLU.
  static bool isSumAlone(const Proposal& proposal) {
    const auto& nodes = proposal.nodes;
    return (nodes.size() == 1 ||
            (nodes.size() == 2 && nodes.back()->kind() == torch::jit::aten::relu)) &&
           nodes.front()->kind() == torch::jit::aten::add && isTensor(nodes.front()->input(1));
  }

  // Whether the reader makes float32 of what a linear layer gives in bfloat16, as under autocast,
  // where our kernel does that without rounding before.
  bool isWidenedForAutocast(const Proposal& proposal, const Proposal& reader) const {
    const auto* last = proposal.nodes.back();
    return usesAvx512Bf16() && ownKernels() && last->kind() == torch::jit::aten::linear &&
           facts_.tensor(last->output()).dtype == at::kBFloat16 && reader.casts == 1 &&
           facts_.tensor(reader.nodes.front()->output()).dtype == at::kFloat;
  }

  // Whether it is a pointwise convolution of bfloat16 whose result is made float32, by our kernel
  // without rounding before.
  bool isWidenedConvolution(const Proposal& proposal) const {
    const auto& nodes = proposal.nodes;
    if (!usesAvx512Bf16() || !ownKernels() || nodes.size() != 2 || proposal.casts != 1 ||
        !isConvolution(nodes[0]) || facts_.tensor(nodes[0]->output()).dtype != at::kBFloat16) {
      return false;
    }
    const auto weight = constantTensor(nodes[0]->input(1));
    constexpr int64_t kRank = 4;
    return weight.defined() && weight.dim() == kRank && weight.size(2) == 1 &&
           weight.size(3) == 1 && facts_.tensor(nodes[1]->output()).dtype == at::kFloat;
  }

  // A padding goes with the convolution that reads it.
  static void addPaddings(std::vector<Proposal>& proposals) {
    for (auto& proposal : proposals) {
      for (size_t i = 0, count = proposal.nodes.size(); i < count; ++i) {
        if (const auto* padding = paddingOf(proposal.nodes[i])) {
          proposal.nodes.push_back(const_cast<Node*>(padding));
        }
      }
    }
  }

  // An identity goes with the node whose result it is, an operand's with the op that alone reads
  // it. Sorts the nodes.
  void addIdentities(std::vector<Proposal>& proposals) const {
    std::unordered_map<const Node*, std::vector<Node*>> identities;
    for (auto* node : block_->nodes()) {
      if (isIdentity(node)) {
        const auto& uses = node->output()->uses();
        const bool read = node->kind() == operandKind() && uses.size() == 1;
        identities[read ? uses[0].user : behind(node->output())->node()].push_back(node);
      }
    }
    for (auto& [nodes, compute, elementwise, views, casts] : proposals) {
      for (size_t i = 0, count = nodes.size(); i < count; ++i) {
        if (const auto it = identities.find(nodes[i]); it != identities.end()) {
          nodes.insert(nodes.end(), it->second.begin(), it->second.end());
        }
      }
      std::sort(nodes.begin(), nodes.end(),
                [](const Node* a, const Node* b) { return a->isBefore(b); });
      nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    }
  }

  void lowerAll(const AliasDb& aliases) {
    const auto integer_feeders = feedsIntegerCast(block_, facts_);
    auto taken = findAttention(aliases, integer_feeders);
    findOwn(aliases, integer_feeders, taken);
    for (auto* node : block_->nodes()) {
      const auto* entry = findOp(node);
      if (entry == nullptr || isQuantizedConstant(node)) {
        continue;
      }
      if (taken.count(node) != 0) {
        if (const auto dtype = dtypeOf(node, *entry)) {  // for what reads it
          facts_.assume(node->output(0), *dtype);
        }
        continue;
      }
      const auto* padding = paddingOf(node);
      if (aliases.hasWriters(node) || (padding != nullptr && aliases.hasWriters(padding))) {
        refuse(node, qualifiedName(node) + ": an in-place op writes to an input or to the result");
        continue;
      }
      if (integer_feeders.count(node) != 0) {
        refuse(node, qualifiedName(node) + ": its result decides an integer or a comparison");
        continue;
      }
      assumeDtypes(node, *entry);
      if (isOwnAttention(node, facts_)) {
        own_.push_back({{node}, /*compute=*/1});
      } else {
        lower(node, *entry);
      }
    }
  }

  // Proposes norms, rotations, recurrent layers, embeddings, variances, resizing and padding for
  // our own kernels, and adds their nodes to `taken`.
  void findOwn(const AliasDb& aliases, const std::unordered_set<const Node*>& integer_feeders,
               std::unordered_set<const Node*>& taken) {
    const auto propose = [&](const std::vector<const Node*>& members) {
      const bool free = std::none_of(members.begin(), members.end(), [&](const Node* member) {
        return aliases.hasWriters(member) || integer_feeders.count(member) != 0 ||
               taken.count(member) != 0;
      });
      if (members.empty() || !free) {
        return;
      }
      taken.insert(members.begin(), members.end());
      auto& proposal = own_.emplace_back();
      proposal.compute = 1;
      for (const auto* member : members) {
        proposal.nodes.push_back(const_cast<Node*>(member));
      }
    };
    for (const auto* node : block_->nodes()) {
      const auto members = ownNorm(node, facts_);
      propose(members.empty() ? ownRotary(node, facts_) : members);
    }
    // Behind these, which may have one of them inside.
    for (const auto* node : block_->nodes()) {
      if (isOwnRecurrent(node, facts_) || isOwnLookup(node) || isOwnVariance(node, facts_) ||
          isOwnResampling(node, facts_) || isOwnPadding(node, facts_)) {
        propose({node});
      }
    }
  }

  // Proposes attention for our own kernel, where it is written out or has moves around it that its
  // group may have inside. Returns their nodes.
  std::unordered_set<const Node*> findAttention(
      const AliasDb& aliases, const std::unordered_set<const Node*>& integer_feeders) {
    std::unordered_set<const Node*> taken;
    const auto isWritten = [&](const Node* member) { return aliases.hasWriters(member); };
    for (auto* node : block_->nodes()) {
      const auto core = ownAttentionOf(node, facts_);
      if (!core || std::any_of(core->nodes.begin(), core->nodes.end(), isWritten)) {
        continue;
      }
      const bool alone = core->nodes.size() == 1;
      if (alone && integer_feeders.count(node) != 0) {
        continue;
      }
      auto moves = movesAround(*core);
      if (std::any_of(moves.begin(), moves.end(), isWritten)) {
        moves.clear();
      }
      if (alone && moves.empty()) {
        continue;
      }
      node->i_(ownAttentionAttr(), 1);
      Proposal proposal;
      proposal.compute = alone ? 1 : 2;
      moves.insert(core->nodes.begin(), core->nodes.end());
      for (auto* member : block_->nodes()) {
        if (moves.count(member) != 0) {
          proposal.nodes.push_back(member);
        }
      }
      taken.insert(moves.begin(), moves.end());
      own_.push_back(std::move(proposal));
    }
    return taken;
  }

  // That of the value itself, or of the one that it is a view of.
  std::optional<at::ScalarType> knownDtype(const Value* value) const {
    for (;;) {
      const auto* node = value->node();
      if (const auto dtype = facts_.tensor(value).dtype) {
        return dtype;
      }
      const auto* schema = node->maybeSchema();
      const bool view = node->kind() == prim::ListUnpack || node->kind() == prim::ConstantChunk ||
                        (schema != nullptr && schema->returns().size() == 1 &&
                         schema->returns()[0].alias_info() != nullptr &&
                         !schema->returns()[0].alias_info()->isWrite() &&
                         (isTensor(node->output()) || isTensorList(node->output())));
      if (!view || node->inputs().empty() ||
          !(isTensor(node->input(0)) || isTensorList(node->input(0)))) {
        return std::nullopt;
      }
      value = node->input(0);
    }
  }

  // What a node works in, as far as operands are known, or a compute op's result.
  std::optional<at::ScalarType> dtypeOf(const Node* node, const OpEntry& entry) const {
    std::optional<at::ScalarType> dtype;
    const auto consider = [&](const Value* value) {
      const auto known = isTensor(value) ? knownDtype(value) : std::nullopt;
      if (!dtype && known && c10::isFloatingType(*known)) {
        dtype = known;
      }
    };
    if (entry.op_class != OpClass::cast) {
      std::for_each(node->inputs().begin(), node->inputs().end(), consider);
    }
    if (entry.op_class == OpClass::compute) {
      consider(node->output(0));
    }
    return dtype;
  }

  // Data types the executor has not profiled: those of operands and result are what the node works
  // in; a compute op of unknown ones works in float32.
  void assumeDtypes(const Node* node, const OpEntry& entry) {
    if (isQuantize(node)) {
      facts_.assume(node->input(0), at::kFloat);  // it takes nothing else
    }
    auto dtype = dtypeOf(node, entry);
    if (!dtype && entry.op_class == OpClass::compute) {
      dtype = at::kFloat;
    }
    if (!dtype) {
      return;
    }
    for (const auto i : c10::irange(node->inputs().size())) {
      const auto& name = node->schema().arguments()[i].name();
      if (!isTensor(node->input(i))) {
        continue;
      }
      if (name == "condition" || name == "mask") {
        facts_.assume(node->input(i), at::kBool);
      } else if (name != "attn_mask") {  // boolean as a rule
        facts_.assume(node->input(i), *dtype);
      }
    }
    if (const auto* padding = paddingOf(node)) {
      facts_.assume(padding->input(0), *dtype);
    }
    facts_.assume(node->output(0), *dtype);
  }

  void lower(Node* node, const OpEntry& entry) {
    try {
      Lowering lowering(node, facts_, next_id_);
      entry.lower(lowering);
      LoweredGraph trial;
      std::move(lowering).commit(trial);
      requireKernels(node, trial);
      verify(node, trial);
      Candidate candidate{&entry, lowered_.ops.size(), trial.ops.size()};
      for (auto& op : trial.ops) {
        lowered_.ops.push_back(std::move(op));
      }
      lowered_.operands.merge(trial.operands);
      candidates_.emplace(node, candidate);
    } catch (const Refused& refused) {
      refuse(node, refused.reason);
    } catch (const dnnl::error& error) {
      refuse(node,
             fmt::format("{}: oneDNN refuses the op ({})", qualifiedName(node), error.what()));
    }
  }

  static void requireKernels(const Node* node, const LoweredGraph& trial) {
    for (const auto& [id, operand] : trial.operands) {
      if (operand.dtype == at::kBFloat16 && !supportsBf16()) {
        throw Refused{fmt::format("{}: oneDNN has no bfloat16 kernels for {}", qualifiedName(node),
                                  effectiveIsa())};
      }
    }
    if (saturatesInt8()) {
      requireRoom(node, trial);
    }
  }

  // The kernels add the products of two neighbouring input channels in 16 bit.
  static void requireRoom(const Node* node, const LoweredGraph& trial) {
    const auto product = std::find_if(trial.ops.begin(), trial.ops.end(), [](const OpSpec& op) {
      return op.kind() == OpKind::MatMul || op.kind() == OpKind::Convolution ||
             op.kind() == OpKind::ConvTranspose;
    });
    if (product == trial.ops.end()) {
      return;
    }
    const size_t first = node->schema().arguments()[0].name() == "self" &&
                                 node->inputs().size() > 2 && isTensor(node->input(2))
                             ? 1  // addmm and its like
                             : 0;
    const auto* padding = paddingOf(node);
    const auto* taken = padding != nullptr ? padding->input(0) : node->input(first);
    const auto data = dequantizeParams(behind(taken)->node());
    const auto* factor = node->input(first + 1);
    const auto weight = quantizedConstant(factor);
    if (!data || (!weight && !dequantizeParams(behind(factor)->node()))) {
      return;  // floats
    }
    const bool by_rows = node->kind() == torch::jit::aten::linear;
    const int64_t channels = product->kind() == OpKind::ConvTranspose        ? 0
                             : product->kind() == OpKind::MatMul && !by_rows ? -2
                                                                             : 1;
    const bool fits = weight && data->dtype == at::kQUInt8 &&
                      largestPair(integersOf(weight->tensor), channels) * 255 < (1 << 15);
    if (!fits) {
      throw Refused{fmt::format(
          "{}: sums of its 8-bit products could exceed 16 bit, which is all that {} has: quantize "
          "data unsigned, and weights so that two neighbours are at most 128 together, as "
          "llga_fuser.quantize does here",
          qualifiedName(node), effectiveIsa())};
    }
  }

  // The largest sum of two neighbours of one sign, without its sign.
  static int64_t largestPair(const at::Tensor& weight, int64_t axis) {
    auto rows = weight.to(at::kInt).movedim(axis, -1);
    rows = at::constant_pad_nd(rows, {0, rows.size(-1) % 2}).reshape({-1, 2});
    return at::maximum(rows.sum(-1).abs(), std::get<0>(rows.abs().max(-1))).max().item<int64_t>();
  }

  // oneDNN checks an op's schema when it is added to a graph: here one at a time, so that the
  // refusal can be laid at the node's door.
  static void verify(const Node* node, const LoweredGraph& trial) {
    dnnl::graph::graph scratch(dnnl::engine::kind::cpu);
    for (const auto& emitted : trial.ops) {
      if (scratch.add_op(emitted.build(), /*allow_exception=*/false) !=
          dnnl::graph::status::success) {
        throw Refused{qualifiedName(node) + ": oneDNN refuses its attributes or data types"};
      }
    }
  }

  logical_tensor tensorOf(const Value* value) const {
    const auto it = lowered_.operands.find(value->unique());
    return it != lowered_.operands.end() ? it->second.logicalTensor()
                                         : logical_tensor(value->unique(), DataType::undef);
  }

  // Whether it is part of another one's ops. As a reader of its own it would keep a dequantize from
  // those.
  bool isPaddingOfCandidate(const Node* node) const {
    const auto uses = node->outputs().size() == 1 ? node->output()->uses() : torch::jit::use_list();
    return uses.size() == 1 && paddingOf(uses[0].user) == node &&
           candidates_.count(uses[0].user) != 0;
  }

  std::vector<Part> partition() {
    dnnl::graph::graph graph(dnnl::engine::kind::cpu);
    std::unordered_map<size_t, const Node*> owner;
    size_t wildcard_id = next_id_;
    std::unordered_set<const Value*> produced;

    for (auto* node : block_->nodes()) {
      const auto it = candidates_.find(node);
      if (it != candidates_.end()) {
        for (size_t i = 0; i < it->second.ops; ++i) {
          const auto& emitted = lowered_.ops[it->second.first_op + i];
          graph.add_op(emitted.build());
          owner[emitted.id()] = node;
        }
        produced.insert(node->outputs().begin(), node->outputs().end());
        continue;
      }
      if (node->kind() == prim::Constant || node->kind() == prim::ListConstruct ||
          isIdentity(node) || isQuantizedConstant(node) || isPaddingOfCandidate(node)) {
        continue;
      }
      std::vector<const Value*> reads;
      readsOf(node, block_, reads);
      dnnl::graph::op wildcard(wildcard_id++, OpKind::Wildcard, node->kind().toQualString());
      std::unordered_set<const Value*> seen;
      for (const auto* value : reads) {
        if (produced.count(value) != 0 && seen.insert(value).second) {
          wildcard.add_input(tensorOf(value));
        }
      }
      for (const auto* output : node->outputs()) {
        wildcard.add_output(tensorOf(output));
        produced.insert(output);
      }
      graph.add_op(wildcard);
    }
    std::unordered_set<const Value*> returned;
    for (const auto* returned_value : block_->outputs()) {
      const auto* output = behind(returned_value);
      if (produced.count(output) != 0 && returned.insert(output).second) {
        dnnl::graph::op end(wildcard_id++, OpKind::End, "return");
        end.add_input(tensorOf(output));
        graph.add_op(end);
      }
    }
    for (const auto* value : ends_) {
      dnnl::graph::op end(wildcard_id++, OpKind::End, "end of a partition");
      end.add_input(tensorOf(value));
      graph.add_op(end);
    }
    graph.finalize();

    std::vector<Part> parts;
    for (const auto& found : graph.get_partitions(partition::policy::fusion)) {
      Part part{found.is_supported(), {}};
      for (const auto id : found.get_ops()) {
        if (const auto it = owner.find(id); it != owner.end()) {
          part.nodes.push_back(it->second);
        }
      }
      if (!part.nodes.empty()) {
        parts.push_back(std::move(part));
      }
    }
    return parts;
  }

  // True if partitions have to be asked for again.
  bool redoSplitNodes(const std::vector<Part>& parts) {
    std::unordered_map<const Node*, std::unordered_set<size_t>> where;
    for (size_t i = 0; i < parts.size(); ++i) {
      for (const auto* node : parts[i].nodes) {
        where[node].insert(i);
      }
    }
    bool again = false;
    for (auto* node : block_->nodes()) {
      const auto it = where.find(node);
      if (it == where.end() || it->second.size() == 1) {
        continue;
      }
      const bool several = candidates_.at(node).entry->parts == Parts::several;
      if (several && isAloneIn(node, it->second, parts)) {
        continue;
      }
      again = true;
      if (several && addEnd(node->output())) {
        continue;  // maybe alone then
      }
      refuse(node, fmt::format("{}: its oneDNN ops end up in {} partitions", qualifiedName(node),
                               it->second.size()));
      candidates_.erase(node);
    }
    return again;
  }

  // False if partitions end there already.
  bool addEnd(const Value* value) {
    if (std::find(ends_.begin(), ends_.end(), value) != ends_.end()) {
      return false;
    }
    ends_.push_back(value);
    return true;
  }

  // And oneDNN supports them all.
  static bool isAloneIn(const Node* node, const std::unordered_set<size_t>& where,
                        const std::vector<Part>& parts) {
    return std::all_of(where.begin(), where.end(), [&](size_t i) {
      const auto& nodes = parts[i].nodes;
      return parts[i].supported &&
             std::all_of(nodes.begin(), nodes.end(), [&](const Node* n) { return n == node; });
    });
  }

  // oneDNN has patterns for whole stages of a ResNet. It computes their float32 convolutions one by
  // one all the same, and in one partition no kernel of our own can stand in for one of them.
  bool takeApart(const std::vector<Part>& parts) {
    const auto before = ends_.size();
    for (const auto& part : parts) {
      std::vector<const Node*> convolutions;
      bool floats = winogradIsOn();
      for (const auto* node : part.nodes) {
        const auto& candidate = candidates_.at(const_cast<Node*>(node));
        for (size_t i = 0; i < candidate.ops; ++i) {
          const auto& op = lowered_.ops[candidate.first_op + i];
          floats = floats && op.inputs()[0].dtype == at::kFloat && op.kind() != OpKind::Quantize &&
                   op.kind() != OpKind::Dequantize;
          if (op.kind() == OpKind::Convolution &&
              std::find(convolutions.begin(), convolutions.end(), node) == convolutions.end()) {
            convolutions.push_back(node);
          }
        }
      }
      if (const auto* moved = movedByViews(part)) {
        addEnd(moved);
      }
      addBroadcastProducts(part);
      if (!floats || convolutions.size() < 2) {
        continue;
      }
      const std::unordered_set<const Node*> members(part.nodes.begin(), part.nodes.end());
      for (const auto* node : convolutions) {
        const auto* data = behind(node->input(0));
        if (members.count(data->node()) != 0) {
          addEnd(data);
        }
      }
    }
    return ends_.size() > before;
  }

  // A product that a binary op repeats for each number of the other operand (the scores of graph
  // attention, of one number a row): what follows is of many more numbers, and may join others.
  void addBroadcastProducts(const Part& part) {
    for (const auto* node : part.nodes) {
      if (!ownKernelsAnywhere() || !isBinary(node)) {
        continue;
      }
      for (const auto* input : node->inputs()) {
        const auto* value = behind(input);
        const bool product =
            isProduct(value->node()) &&
            std::find(part.nodes.begin(), part.nodes.end(), value->node()) != part.nodes.end();
        const auto from = product ? facts_.tensor(value).sizes : std::nullopt;
        const auto to = facts_.tensor(node->output()).sizes;
        if (from && to && c10::multiply_integers(*from) < c10::multiply_integers(*to)) {
          addEnd(value);
        }
      }
    }
  }

  // What a partition with a linear layer of float gives before views that it ends with: our own
  // kernels compute it without those, and elsewhere they cost nothing. Null for other partitions.
  const Value* movedByViews(const Part& part) const {
    const auto classOf = [&](const Node* node) {
      return candidates_.at(const_cast<Node*>(node)).entry->op_class;
    };
    const bool linear = std::any_of(part.nodes.begin(), part.nodes.end(), [](const Node* node) {
      return node->kind() == torch::jit::aten::linear && constantTensor(node->input(1)).defined();
    });
    const auto isByte = [](const Node* node) { return isQuantize(node) || isDequantize(node); };
    if (!ownKernels() || !linear || classOf(part.nodes.back()) != OpClass::view ||
        std::any_of(part.nodes.begin(), part.nodes.end(), isByte)) {
      return nullptr;
    }
    const auto* value = part.nodes.back()->output();
    while (std::find(part.nodes.begin(), part.nodes.end(), value->node()) != part.nodes.end() &&
           classOf(value->node()) == OpClass::view) {
      value = behind(value->node()->input(0));
    }
    return value;
  }

  std::vector<Proposal> proposals(const std::vector<Part>& parts) {
    std::vector<Proposal> result;
    std::unordered_set<const Node*> begun;
    for (const auto& part : parts) {
      if (!begun.insert(part.nodes.front()).second) {
        continue;  // another one of a node alone
      }
      Proposal proposal;
      std::unordered_set<const Node*> seen;
      for (const auto* node : part.nodes) {
        if (!seen.insert(node).second) {
          continue;
        }
        auto* member = const_cast<Node*>(node);
        if (isOurs(member) && (!part.supported || part.nodes.size() == 1)) {
          proposal.nodes.push_back(member);
          ++proposal.compute;
          continue;
        }
        if (!part.supported) {
          refuse(member, qualifiedName(node) + ": this oneDNN has no CPU kernel for it alone");
          continue;
        }
        proposal.nodes.push_back(member);
        switch (candidates_.at(member).entry->op_class) {
          case OpClass::compute:
            ++proposal.compute;
            break;
          case OpClass::elementwise:
            ++proposal.elementwise;
            break;
          case OpClass::view:
            ++proposal.views;
            break;
          case OpClass::cast:
            ++proposal.casts;
            break;
        }
      }
      if (proposal.nodes.empty()) {
        continue;
      }
      GRAPH_DEBUG("partition of ", proposal.nodes.size(), " nodes");
      result.push_back(std::move(proposal));
    }
    return result;
  }

  Block* block_;
  StaticFacts facts_;
  // Ids below are IR values' unique ids; ops and operands of our own come after.
  size_t next_id_ = size_t{1} << 32;
  LoweredGraph lowered_;
  std::unordered_map<Node*, Candidate> candidates_;
  std::vector<const Value*> ends_;  // of partitions, also where oneDNN would go on
  std::vector<Proposal> own_;       // groups without ops of oneDNN
};

}  // namespace

std::optional<AttentionCore> ownAttentionAt(const Node* node) {
  return ownAttentionOf(node, StaticFacts());
}

std::vector<Proposal> proposeGroups(Block* block, const AliasDb& aliases) {
  engine();  // initialised here, so that its cost is not the first call's
  return BlockPartitioner(block, aliases).propose();
}

}  // namespace llga

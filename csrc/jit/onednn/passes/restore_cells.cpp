// Steps of recurrent layers, which a trace has taken apart into what PyTorch makes of
// torch.nn.LSTMCell and GRUCell, become one op each.
//
//   %1 = aten::linear(%h, %w_hh, %b_hh)
//   %2 = aten::add_(%1, aten::linear(%x, %w_ih, %b_ih), 1)
//   %i, %f, %g, %o = prim::ListUnpack(aten::unsafe_chunk(%2, 4, 1))
//   %3 = aten::mul(aten::sigmoid_(%f), %c)
//   %4 = aten::add_(%3, aten::mul(aten::sigmoid_(%i), aten::tanh_(%g)), 1)
//   %5 = aten::mul(aten::sigmoid_(%o), aten::tanh(%4))
// ->
//   %5, %4 = llga::lstm_cell(%x, [%h, %c], %w_ih, %w_hh, %b_ih, %b_hh)
//
// A plain cell is two linear layers, a sum and an activation, which groups hold as it is.
//
// The ops are called as above, also by eager's autocast, where aten::lstm_cell would have results
// of another data type. Traced under autocast, parameters are bfloat16 and states float32: %x and
// %h are then what is cast to bfloat16 above, and the op makes the casts.
//
// Only for constant parameters. The nodes lie together, so that nothing writes to what they read
// between them; what they write to is their own.
#include <ATen/ATen.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/irparser.h>
#include <torch/csrc/jit/ir/subgraph_matcher.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
using torch::jit::Stack;

// ------------------------------------------------------------------------------------- operators

struct Operands {
  std::vector<at::Tensor> states;
  at::Tensor of_data;  // linear layers
  at::Tensor of_units;
};

Operands popOperands(Stack& stack, bool lstm) {
  const bool casts = torch::jit::pop(stack).toBool();
  const auto tensor = [&] { return torch::jit::pop(stack).toOptional<at::Tensor>(); };
  const auto hidden_bias = tensor();
  const auto bias = tensor();
  const auto hidden_weight = *tensor();
  const auto weight = *tensor();
  const auto states = torch::jit::pop(stack);
  const auto data = *tensor();
  Operands operands;
  operands.states = lstm ? states.toTensorVector() : std::vector<at::Tensor>{states.toTensor()};
  const auto cast = [&](const at::Tensor& from) {
    return casts ? from.to(weight.scalar_type()) : from;
  };
  operands.of_units = at::linear(cast(operands.states[0]), hidden_weight, hidden_bias);
  operands.of_data = at::linear(cast(data), weight, bias);
  return operands;
}

void lstmCell(Stack& stack) {
  const auto operands = popOperands(stack, /*lstm=*/true);
  auto gates = at::unsafe_chunk(operands.of_units.add_(operands.of_data), 4, 1);
  const auto cells =
      (gates[1].sigmoid_() * operands.states[1]).add_(gates[0].sigmoid_() * gates[2].tanh_());
  torch::jit::push(stack, gates[3].sigmoid_() * cells.tanh(), cells);
}

void gruCell(Stack& stack) {
  const auto operands = popOperands(stack, /*lstm=*/false);
  const auto of_data = at::unsafe_chunk(operands.of_data, 3, 1);
  auto gates = at::unsafe_chunk(operands.of_units, 3, 1);
  const auto reset = gates[0].add_(of_data[0]).sigmoid_();
  const auto kept = gates[1].add_(of_data[1]).sigmoid_();
  const auto fresh = (of_data[2] + gates[2].mul_(reset)).tanh_();
  torch::jit::push(stack, (operands.states[0] - fresh).mul_(kept).add_(fresh));
}

void registerCells() {
  const auto of = [](const char* name, const char* state, const char* result, auto function) {
    return torch::jit::Operator(
        std::string("llga::") + name + "(Tensor input, " + state +
            " hx, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, bool casts) -> " + result,
        function, c10::AliasAnalysisKind::FROM_SCHEMA);
  };
  static const torch::jit::RegisterOperators registration(
      {of("lstm_cell", "Tensor[]", "(Tensor, Tensor)", lstmCell),
       of("gru_cell", "Tensor", "Tensor", gruCell)});
}

// -------------------------------------------------------------------------------------- patterns

// What PyTorch makes of a step, also under TorchScript's autocast, which widens operands of what
// promotes data types. Values whose names begin with "of_" are what linear layers give.
struct Form {
  const char* op;
  const char* text;
};

const std::vector<Form>& forms() {
  static const std::vector<Form> all{
      {"llga::lstm_cell", R"(graph(%of_h, %of_x, %c, %one, %chunks):
  %sum : Tensor = aten::add_(%of_h, %of_x, %one)
  %gates : Tensor[] = aten::unsafe_chunk(%sum, %chunks, %one)
  %i, %f, %g, %o = prim::ListUnpack(%gates)
  %si : Tensor = aten::sigmoid_(%i)
  %sf : Tensor = aten::sigmoid_(%f)
  %tg : Tensor = aten::tanh_(%g)
  %so : Tensor = aten::sigmoid_(%o)
  %kept : Tensor = aten::mul(%sf, %c)
  %new : Tensor = aten::mul(%si, %tg)
  %cells : Tensor = aten::add_(%kept, %new, %one)
  %tc : Tensor = aten::tanh(%cells)
  %units : Tensor = aten::mul(%so, %tc)
  return (%units, %cells))"},
      {"llga::lstm_cell", R"(graph(%of_h, %of_x, %c, %one, %chunks, %cuda, %cpu):
  %sum : Tensor = aten::add_(%of_h, %of_x, %one)
  %gates : Tensor[] = aten::unsafe_chunk(%sum, %chunks, %one)
  %i, %f, %g, %o = prim::ListUnpack(%gates)
  %si : Tensor = aten::sigmoid_(%i)
  %sf : Tensor = aten::sigmoid_(%f)
  %tg : Tensor = aten::tanh_(%g)
  %so : Tensor = aten::sigmoid_(%o)
  %wf : Tensor = aten::_autocast_to_full_precision(%sf, %cuda, %cpu)
  %kept : Tensor = aten::mul(%wf, %c)
  %wi : Tensor = aten::_autocast_to_full_precision(%si, %cuda, %cpu)
  %wg : Tensor = aten::_autocast_to_full_precision(%tg, %cuda, %cpu)
  %new : Tensor = aten::mul(%wi, %wg)
  %cells : Tensor = aten::add_(%kept, %new, %one)
  %tc : Tensor = aten::tanh(%cells)
  %wo : Tensor = aten::_autocast_to_full_precision(%so, %cuda, %cpu)
  %wc : Tensor = aten::_autocast_to_full_precision(%tc, %cuda, %cpu)
  %units : Tensor = aten::mul(%wo, %wc)
  return (%units, %cells))"},
      {"llga::gru_cell", R"(graph(%of_h, %of_x, %h, %one, %chunks):
  %data : Tensor[] = aten::unsafe_chunk(%of_x, %chunks, %one)
  %xr, %xz, %xn = prim::ListUnpack(%data)
  %gates : Tensor[] = aten::unsafe_chunk(%of_h, %chunks, %one)
  %hr, %hz, %hn = prim::ListUnpack(%gates)
  %sr : Tensor = aten::add_(%hr, %xr, %one)
  %r : Tensor = aten::sigmoid_(%sr)
  %sz : Tensor = aten::add_(%hz, %xz, %one)
  %z : Tensor = aten::sigmoid_(%sz)
  %reset : Tensor = aten::mul_(%hn, %r)
  %sn : Tensor = aten::add(%xn, %reset, %one)
  %n : Tensor = aten::tanh_(%sn)
  %apart : Tensor = aten::sub(%h, %n, %one)
  %kept : Tensor = aten::mul_(%apart, %z)
  %units : Tensor = aten::add_(%kept, %n, %one)
  return (%units))"},
      {"llga::gru_cell", R"(graph(%of_h, %of_x, %h, %one, %chunks, %cuda, %cpu):
  %data : Tensor[] = aten::unsafe_chunk(%of_x, %chunks, %one)
  %xr, %xz, %xn = prim::ListUnpack(%data)
  %gates : Tensor[] = aten::unsafe_chunk(%of_h, %chunks, %one)
  %hr, %hz, %hn = prim::ListUnpack(%gates)
  %sr : Tensor = aten::add_(%hr, %xr, %one)
  %r : Tensor = aten::sigmoid_(%sr)
  %sz : Tensor = aten::add_(%hz, %xz, %one)
  %z : Tensor = aten::sigmoid_(%sz)
  %reset : Tensor = aten::mul_(%hn, %r)
  %wx : Tensor = aten::_autocast_to_full_precision(%xn, %cuda, %cpu)
  %wr : Tensor = aten::_autocast_to_full_precision(%reset, %cuda, %cpu)
  %sn : Tensor = aten::add(%wx, %wr, %one)
  %n : Tensor = aten::tanh_(%sn)
  %wn : Tensor = aten::_autocast_to_full_precision(%n, %cuda, %cpu)
  %apart : Tensor = aten::sub(%h, %wn, %one)
  %kept : Tensor = aten::mul_(%apart, %z)
  %units : Tensor = aten::add_(%kept, %n, %one)
  return (%units))"}};
  return all;
}

struct Pattern {
  const Form* form;
  Graph graph;
  std::unordered_map<std::string, Value*> values;
};

const std::vector<std::unique_ptr<Pattern>>& patterns() {
  static const auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Pattern>>;
    for (const auto& form : forms()) {
      auto& pattern = *made->emplace_back(std::make_unique<Pattern>());
      pattern.form = &form;
      torch::jit::parseIR(form.text, &pattern.graph, pattern.values);
    }
    return made;
  }();
  return *all;
}

// ------------------------------------------------------------------------------------------ steps

struct Linear {
  Node* node;
  at::Tensor weight;
};

// One with constant parameters that gives `value` to one reader, in its block; else without a node.
Linear linearOf(const Value* value) {
  auto* node = const_cast<Node*>(value->node());
  if (node->kind() != aten::linear || value->uses().size() != 1 ||
      value->uses()[0].user->owningBlock() != node->owningBlock()) {
    return {};
  }
  Linear linear{node, constantTensor(node->input(1))};
  const bool known = linear.weight.defined() && linear.weight.dim() == 2 &&
                     (constantTensor(node->input(2)).defined() || node->input(2)->mustBeNone());
  return known ? linear : Linear{};
}

bool changesNothing(const Node* node) {
  const auto* schema = node->maybeSchema();
  return node->blocks().empty() && !node->hasSideEffects() &&
         (schema == nullptr || !schema->is_mutable());
}

class Restorer {
 public:
  explicit Restorer(const GraphPtr& graph) : graph_(graph) {}

  void run() {
    bool restored = false;
    for (const auto& pattern : patterns()) {
      // Matches hold values, which stay until all of them have been looked at.
      for (const auto& match : torch::jit::findPatternMatches(pattern->graph, *graph_)) {
        restore(*pattern, match);
      }
      restored = restored || !done_.empty();
      for (const auto& members : done_) {
        destroy(members);
      }
      done_.clear();
      replaced_.clear();
    }
    if (restored) {
      torch::jit::EliminateDeadCode(graph_);  // casts
    }
  }

 private:
  using Members = std::unordered_set<Node*>;

  struct Step {
    const Pattern& pattern;
    Node* last;
    Linear data;
    Linear units;
    Value* state;
    Value* cells;  // null but for an LSTM
    Value* result;
    Value* last_cells;  // likewise
  };

  void restore(const Pattern& pattern, const torch::jit::Match& match) {
    const auto matched = [&](const char* name) -> Value* {
      const auto it = pattern.values.find(name);
      return it == pattern.values.end() ? nullptr : match.values_map.at(it->second);
    };
    const auto operand = [&](const char* name) -> Value* {
      auto* value = matched(name);
      const auto it = replaced_.find(value);
      return it == replaced_.end() ? value : it->second;
    };
    const auto units = linearOf(matched("of_h"));
    const auto data = linearOf(matched("of_x"));
    const auto* chunks = matched("chunks");
    const bool lstm = matched("cells") != nullptr;
    if (units.node == nullptr || data.node == nullptr || intOf(matched("one")) != 1 ||
        (chunks != nullptr && intOf(chunks) != (lstm ? 4 : 3)) ||
        units.weight.scalar_type() != data.weight.scalar_type()) {
      return;
    }
    auto* state = uncast(units.node->input(0), units.weight.scalar_type());
    auto* kept = operand("h");  // what a GRU keeps of it is read apart
    if (kept != nullptr && widened(kept) != widened(state)) {
      return;
    }
    Members members{units.node, data.node};
    for (const auto& [from, to] : match.nodes_map) {
      members.insert(to);
    }
    const Step step{pattern,          match.anchor,    data, units, state, operand("c"),
                    matched("units"), matched("cells")};
    if (liesTogether(members, step.last) && isReadBehind(step.last_cells, members, step.last)) {
      replace(step);
      done_.push_back(std::move(members));
    }
  }

  // Whether the nodes from the first to the last one that are none of these write nothing.
  static bool liesTogether(const Members& members, const Node* last) {
    const Node* first = *std::min_element(members.begin(), members.end(), isBefore);
    for (const auto* node = first; node != last; node = node->next()) {
      if (members.count(const_cast<Node*>(node)) == 0 && !changesNothing(node)) {
        return false;
      }
    }
    return true;
  }

  // Whether all others read the value, if there is one, behind the last node.
  static bool isReadBehind(const Value* value, const Members& members, const Node* last) {
    return value == nullptr ||
           std::all_of(value->uses().begin(), value->uses().end(), [&](const auto& use) {
             return members.count(use.user) != 0 || last->isBefore(use.user);
           });
  }

  static bool isBefore(const Node* a, const Node* b) { return a->isBefore(b); }

  void replace(const Step& step) {
    registerCells();
    const torch::jit::WithInsertPoint guard(step.last);
    const auto of_data = step.data.node->inputs();
    const auto of_units = step.units.node->inputs();
    auto* input = uncast(of_data[0], step.data.weight.scalar_type());
    auto* states = widened(step.state);
    if (step.cells != nullptr) {
      auto* list = graph_->createList(c10::TensorType::get(), {states, widened(step.cells)});
      states = graph_->insertNode(list)->output();
    }
    const bool casts = input != of_data[0] || step.state != of_units[0];
    auto* cell =
        graph_->insertNode(graph_->create(Symbol::fromQualString(step.pattern.form->op),
                                          {input, states, of_data[1], of_units[1], of_data[2],
                                           of_units[2], graph_->insertConstant(casts)},
                                          step.last_cells != nullptr ? 2 : 1));
    cell->copyMetadata(step.last);
    replaceBy(step.result, cell->output(0));
    if (step.last_cells != nullptr) {
      replaceBy(step.last_cells, cell->output(1));
    }
  }

  void replaceBy(Value* value, Value* by) {
    by->setType(value->type());
    value->replaceAllUsesWith(by);
    replaced_.emplace(value, by);
  }

  static void destroy(const Members& members) {
    std::vector<Node*> nodes(members.begin(), members.end());
    std::sort(nodes.begin(), nodes.end(),
              [](const Node* a, const Node* b) { return b->isBefore(a); });
    for (auto* node : nodes) {
      node->destroy();
    }
  }

  // What is cast to this data type to get `value`, if it is.
  static Value* uncast(Value* value, at::ScalarType dtype) {
    const auto* node = value->node();
    while (isPlainCast(node) && (castsTo(node) == dtype || reducesTo(node) == dtype)) {
      value = const_cast<Value*>(node->input(0));
      node = value->node();
    }
    return value;
  }

  // What is widened to get `value`, if it is: the op's arithmetic does that.
  static Value* widened(Value* value) {
    while (widens(value->node())) {
      value = value->node()->input(0);
    }
    return value;
  }

  const GraphPtr& graph_;
  // Of the matches of one pattern.
  std::unordered_map<const Value*, Value*> replaced_;
  std::vector<Members> done_;
};

}  // namespace

void restoreCells(const GraphPtr& graph) { Restorer(graph).run(); }

}  // namespace llga

#include "jit/onednn/runtime/own_recurrent.h"

#include <algorithm>
#include <unordered_map>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

using Cell = Recurrent::Cell;
namespace prim = torch::jit::prim;

struct Form {
  Cell cell;
  bool sequences;  // else one step of them, of one layer in one direction
};

std::optional<Form> formOf(const Node* node) {
  static const std::unordered_map<Symbol, Form> forms{
      {Symbol::fromQualString("aten::lstm"), {Cell::lstm, true}},
      {Symbol::fromQualString("aten::gru"), {Cell::gru, true}},
      {Symbol::fromQualString("aten::rnn_tanh"), {Cell::tanh, true}},
      {Symbol::fromQualString("aten::rnn_relu"), {Cell::relu, true}},
      {Symbol::fromQualString("aten::lstm_cell"), {Cell::lstm, false}},
      {Symbol::fromQualString("aten::gru_cell"), {Cell::gru, false}},
      {Symbol::fromQualString("aten::rnn_tanh_cell"), {Cell::tanh, false}},
      {Symbol::fromQualString("aten::rnn_relu_cell"), {Cell::relu, false}},
      {Symbol::fromQualString("llga::lstm_cell"), {Cell::lstm, false}},
      {Symbol::fromQualString("llga::gru_cell"), {Cell::gru, false}}};
  const auto it = forms.find(node->kind());
  // The other overload is for packed sequences.
  const bool padded =
      it != forms.end() && (!it->second.sequences || node->schema().overload_name() == "input");
  return padded ? std::optional(it->second) : std::nullopt;
}

// Empty if one of them is none.
std::vector<at::Tensor> ifAllDefined(std::vector<at::Tensor> tensors) {
  const bool all = std::all_of(tensors.begin(), tensors.end(),
                               [](const at::Tensor& tensor) { return tensor.defined(); });
  return all ? tensors : std::vector<at::Tensor>();
}

// Tensors of a list; empty if one of them is no constant.
std::vector<at::Tensor> constantTensors(const Value* list) {
  if (const auto known = torch::jit::toIValue(list)) {
    return known->isTensorList() ? known->toTensorVector() : std::vector<at::Tensor>();
  }
  std::vector<at::Tensor> tensors;
  if (list->node()->kind() == prim::ListConstruct) {
    for (const auto* item : list->node()->inputs()) {
      tensors.push_back(constantTensor(item));
    }
  }
  return ifAllDefined(std::move(tensors));
}

// Weights of inputs and units, and maybe both biases, of each layer and direction; empty if one of
// them is no constant.
std::vector<at::Tensor> parametersOf(const Node* node, const Form& form) {
  if (form.sequences) {
    return constantTensors(node->namedInput("params"));
  }
  std::vector<at::Tensor> tensors;
  for (const auto* name : {"w_ih", "w_hh", "b_ih", "b_hh"}) {
    const auto* value = node->namedInput(name);
    if (!value->mustBeNone()) {
      tensors.push_back(constantTensor(value));
    }
  }
  return ifAllDefined(std::move(tensors));
}

// Empty if they are a list of something else.
std::vector<FoundRecurrent::State> statesOf(const Node* node, Cell cell) {
  const auto* states = node->namedInput("hx");
  if (cell != Cell::lstm) {
    return {{states, constantTensor(states)}};
  }
  std::vector<FoundRecurrent::State> found;
  const auto* list = states->node();
  if (list->kind() == prim::ListConstruct) {
    for (const auto* state : list->inputs()) {
      found.push_back({state, constantTensor(state)});
    }
  } else {
    for (auto& constant : constantTensors(states)) {
      found.push_back({nullptr, std::move(constant)});
    }
  }
  return found.size() == 2 ? found : std::vector<FoundRecurrent::State>();
}

bool isFlag(const Node* node, const char* name, bool wanted, const Facts& facts) {
  return facts.constant(node->namedInput(name)) == c10::IValue(wanted);
}

// Whether it casts float32 to the bfloat16 of its weights: our kernel computes in float32.
bool castsData(const Node* node, const Facts& facts) {
  return !node->kind().is_aten() && isFlag(node, "casts", true, facts);
}

struct Counts {
  int64_t layers;
  int64_t directions;
  size_t of_each;  // parameters of a layer and direction
};

// Nothing if they are not constant, or the parameters are not as many.
std::optional<Counts> countsOf(const Node* node, const Form& form, size_t parameters,
                               const Facts& facts) {
  if (!form.sequences) {
    return parameters == 2 || parameters == 4 ? std::optional(Counts{1, 1, parameters})
                                              : std::nullopt;
  }
  const auto layers = facts.constant(node->namedInput("num_layers"));
  const auto both = facts.constant(node->namedInput("bidirectional"));
  const auto biases = facts.constant(node->namedInput("has_biases"));
  if (!layers || !layers->isInt() || !both || !both->isBool() || !biases || !biases->isBool()) {
    return std::nullopt;
  }
  const Counts counts{layers->toInt(), both->toBool() ? 2 : 1,
                      biases->toBool() ? size_t{4} : size_t{2}};
  const auto all = static_cast<size_t>(counts.layers * counts.directions) * counts.of_each;
  return all == parameters && all > 0 ? std::optional(counts) : std::nullopt;
}

}  // namespace

bool isOwnRecurrent(const Node* node, const Facts& facts) {
  const auto form = formOf(node);
  if (!form || !ownKernelsAnywhere() || statesOf(node, form->cell).empty() ||
      (form->sequences && !isFlag(node, "train", false, facts))) {
    return false;
  }
  const bool ordered =
      !form->sequences || facts.constant(node->namedInput("batch_first")).has_value();
  const auto parameters = parametersOf(node, *form);
  if (!ordered || !countsOf(node, *form, parameters.size(), facts)) {
    return false;
  }
  const auto type = parameters[0].scalar_type();
  const bool alike =
      std::all_of(parameters.begin(), parameters.end(),
                  [type](const at::Tensor& parameter) { return parameter.scalar_type() == type; });
  // AMX multiplies many sequences of bfloat16 faster, which oneDNN's kernels do in eager.
  const bool narrow = type == at::kBFloat16 && (!usesAmx() || !form->sequences);
  return alike && (type == at::kFloat || narrow);
}

std::optional<FoundRecurrent> findRecurrent(const Graph& subgraph, const Facts& facts) {
  const auto nodes = subgraph.nodes();
  const auto it = std::find_if(nodes.begin(), nodes.end(),
                               [&](const Node* node) { return isOwnRecurrent(node, facts); });
  if (it == nodes.end()) {
    return std::nullopt;
  }
  const Node* node = *it;
  const auto form = *formOf(node);
  auto states = statesOf(node, form.cell);
  auto parameters = parametersOf(node, form);
  const auto counts = *countsOf(node, form, parameters.size(), facts);
  const auto type = parameters[0].scalar_type();
  const bool lstm = form.cell == Cell::lstm;
  const bool batch_first = form.sequences && isFlag(node, "batch_first", true, facts);
  FoundRecurrent found{{},
                       batch_first,
                       node->namedInput("input"),
                       std::move(states),
                       node->output(0),
                       form.sequences ? node->output(1) : nullptr,
                       lstm ? node->outputs().back() : nullptr,
                       std::move(parameters)};
  const auto of_data = castsData(node, facts) ? at::kFloat : type;
  const bool alike = facts.tensor(found.data).dtype == of_data &&
                     facts.tensor(found.result).dtype == of_data &&
                     std::all_of(found.states.begin(), found.states.end(), [&](const auto& state) {
                       return state.constant.defined() ? state.constant.scalar_type() == of_data
                                                       : facts.tensor(state.value).dtype == of_data;
                     });
  if (!alike) {
    throw CompileError{"a recurrent layer whose data is of another type than its weights"};
  }
  const auto sizes = *facts.tensor(found.data).sizes;
  if (sizes.size() != (form.sequences ? 3 : 2)) {  // what eager takes
    throw CompileError{"a recurrent layer whose data has another number of dimensions"};
  }
  const auto& weights = found.parameters;
  auto& kernel = found.kernel;
  kernel.cell = form.cell;
  kernel.steps = form.sequences ? sizes[batch_first ? 1 : 0] : 1;
  kernel.sequences = sizes[form.sequences && !batch_first ? 1 : 0];
  kernel.inputs = sizes.back();
  kernel.units = weights[1].size(1);
  kernel.layers = counts.layers;
  kernel.directions = counts.directions;
  for (size_t i = 0; i < weights.size(); i += counts.of_each) {
    const auto layer = static_cast<int64_t>(i / counts.of_each) / counts.directions;
    const auto rows = kernel.gates() * kernel.units;
    if (weights[i].sizes() != at::IntArrayRef{rows, kernel.inputsOf(layer)} ||
        weights[i + 1].sizes() != at::IntArrayRef{rows, kernel.units}) {
      throw CompileError{"a recurrent layer with projections"};
    }
  }
  Shape of_states{kernel.sequences, kernel.units};
  if (form.sequences) {
    of_states.insert(of_states.begin(), counts.layers * counts.directions);
  }
  for (const auto& state : found.states) {
    if (state.constant.defined() ? state.constant.sizes() != at::IntArrayRef(of_states)
                                 : facts.tensor(state.value).sizes != of_states) {
      throw CompileError{"a recurrent layer whose states have other sizes"};
    }
  }
  return found;
}

}  // namespace llga

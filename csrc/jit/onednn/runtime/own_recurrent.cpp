#include "jit/onednn/runtime/own_recurrent.h"

#include <algorithm>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

using Cell = Recurrent::Cell;
namespace prim = torch::jit::prim;

std::optional<Cell> cellOf(const Node* node) {
  static const std::vector<std::pair<Symbol, Cell>> cells{
      {Symbol::fromQualString("aten::lstm"), Cell::lstm},
      {Symbol::fromQualString("aten::gru"), Cell::gru},
      {Symbol::fromQualString("aten::rnn_tanh"), Cell::tanh},
      {Symbol::fromQualString("aten::rnn_relu"), Cell::relu}};
  const auto it = std::find_if(cells.begin(), cells.end(),
                               [node](const auto& cell) { return cell.first == node->kind(); });
  // The other overload is for packed sequences.
  const bool padded = it != cells.end() && node->schema().overload_name() == "input";
  return padded ? std::optional(it->second) : std::nullopt;
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
  const bool all = std::all_of(tensors.begin(), tensors.end(),
                               [](const at::Tensor& tensor) { return tensor.defined(); });
  return all ? tensors : std::vector<at::Tensor>();
}

// Before the first step: units, and an LSTM's cells; empty if they are a list of something else.
std::vector<const Value*> statesOf(const Node* node, Cell cell) {
  const auto* states = node->namedInput("hx");
  if (cell != Cell::lstm) {
    return {states};
  }
  const auto* list = states->node();
  if (list->kind() != prim::ListConstruct || list->inputs().size() != 2) {
    return {};
  }
  return {list->input(0), list->input(1)};
}

bool isFlag(const Node* node, const char* name, bool wanted, const Facts& facts) {
  return facts.constant(node->namedInput(name)) == c10::IValue(wanted);
}

struct Counts {
  int64_t layers;
  int64_t directions;
  size_t of_each;  // parameters of a layer and direction
};

// Nothing if they are not constant, or the parameters are not as many.
std::optional<Counts> countsOf(const Node* node, size_t parameters, const Facts& facts) {
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
  const auto cell = cellOf(node);
  if (!cell || !ownKernelsAnywhere() || statesOf(node, *cell).empty() ||
      !isFlag(node, "train", false, facts)) {
    return false;
  }
  const auto batch_first = facts.constant(node->namedInput("batch_first"));
  const auto parameters = constantTensors(node->namedInput("params"));
  if (!batch_first || !batch_first->isBool() || !countsOf(node, parameters.size(), facts)) {
    return false;
  }
  const auto type = parameters[0].scalar_type();
  const bool alike =
      std::all_of(parameters.begin(), parameters.end(),
                  [type](const at::Tensor& parameter) { return parameter.scalar_type() == type; });
  // AMX multiplies many sequences of bfloat16 faster, which oneDNN's kernels do in eager.
  return alike && (type == at::kFloat || (type == at::kBFloat16 && !usesAmx()));
}

std::optional<FoundRecurrent> findRecurrent(const Graph& subgraph, const Facts& facts) {
  const auto nodes = subgraph.nodes();
  const auto it = std::find_if(nodes.begin(), nodes.end(),
                               [&](const Node* node) { return isOwnRecurrent(node, facts); });
  if (it == nodes.end()) {
    return std::nullopt;
  }
  const Node* node = *it;
  const auto cell = *cellOf(node);
  const auto states = statesOf(node, cell);
  auto parameters = constantTensors(node->namedInput("params"));
  const auto counts = *countsOf(node, parameters.size(), facts);
  const auto type = parameters[0].scalar_type();
  const bool batch_first = isFlag(node, "batch_first", true, facts);
  const bool lstm = cell == Cell::lstm;
  FoundRecurrent found{{},
                       batch_first,
                       node->namedInput("input"),
                       states[0],
                       lstm ? states[1] : nullptr,
                       node->output(0),
                       node->output(1),
                       lstm ? node->output(2) : nullptr,
                       std::move(parameters)};
  for (const auto* value : {found.data, found.units, found.cells, found.result}) {
    if (value != nullptr && facts.tensor(value).dtype != type) {
      throw CompileError{"a recurrent layer whose data is of another type than its weights"};
    }
  }
  const auto sizes = *facts.tensor(found.data).sizes;
  constexpr size_t kRank = 3;  // what eager takes
  if (sizes.size() != kRank) {
    throw CompileError{"a recurrent layer whose data has not three dimensions"};
  }
  const auto& weights = found.parameters;
  found.kernel.cell = cell;
  found.kernel.steps = sizes[batch_first ? 1 : 0];
  found.kernel.sequences = sizes[batch_first ? 0 : 1];
  found.kernel.inputs = sizes[2];
  found.kernel.units = weights[1].size(1);
  found.kernel.layers = counts.layers;
  found.kernel.directions = counts.directions;
  for (size_t i = 0; i < weights.size(); i += counts.of_each) {
    const auto layer = static_cast<int64_t>(i / counts.of_each) / counts.directions;
    const auto rows = found.kernel.gates() * found.kernel.units;
    if (weights[i].sizes() != at::IntArrayRef{rows, found.kernel.inputsOf(layer)} ||
        weights[i + 1].sizes() != at::IntArrayRef{rows, found.kernel.units}) {
      throw CompileError{"a recurrent layer with projections"};
    }
  }
  return found;
}

}  // namespace llga

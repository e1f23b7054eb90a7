// compile_module and compile_function: Python examples to stacks, and back.
#include "jit/onednn/ahead_of_time.h"

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings.h"

namespace {

using torch::jit::Stack;

// (args, kwargs) for each example, as TorchScript would take them in a call.
using Examples = std::vector<std::pair<py::tuple, py::dict>>;

std::vector<Stack> stacksOf(const c10::FunctionSchema& schema, const Examples& examples,
                            const std::optional<c10::IValue>& self) {
  std::vector<Stack> stacks;
  for (const auto& [args, kwargs] : examples) {
    stacks.push_back(torch::jit::createStackForSchema(
        schema, torch::jit::tuple_slice(args), py::reinterpret_borrow<py::kwargs>(kwargs), self));
  }
  return stacks;
}

torch::jit::Module compileModule(const torch::jit::Module& frozen, const Examples& examples,
                                 bool consume, bool releasable, std::optional<int> fpmath_mode) {
  auto& forward = torch::jit::toGraphFunction(frozen.get_method("forward").function());
  const auto stacks = stacksOf(forward.getSchema(), examples, frozen._ivalue());
  const py::gil_scoped_release released;
  const auto fused = llga::fuseAhead(*forward.graph(), stacks);
  return llga::compiledModule(frozen, *fused, {consume, releasable, fpmath_mode});
}

torch::jit::StrongFunctionPtr compileFunction(const torch::jit::StrongFunctionPtr& plain,
                                              const Examples& examples, bool consume,
                                              bool releasable, std::optional<int> fpmath_mode) {
  plain.function_->ensure_defined();
  auto& function = torch::jit::toGraphFunction(*plain.function_);
  const auto stacks = stacksOf(function.getSchema(), examples, std::nullopt);
  const py::gil_scoped_release released;
  const auto fused = llga::fuseAhead(*function.graph(), stacks);
  return llga::compiledFunction(function, *fused, {consume, releasable, fpmath_mode});
}

size_t releaseModule(const torch::jit::Module& compiled) {
  return llga::releaseWeights(
      torch::jit::toGraphFunction(compiled.get_method("forward").function()));
}

size_t releaseFunction(const torch::jit::StrongFunctionPtr& compiled) {
  return llga::releaseWeights(torch::jit::toGraphFunction(*compiled.function_));
}

}  // namespace

void bindAheadOfTime(py::module_& m) {
  llga::registerAheadOfTime();
  m.def("compile_module", &compileModule, py::arg("frozen"), py::arg("examples"),
        py::arg("consume"), py::arg("releasable"), py::arg("fpmath_mode"));
  m.def("compile_function", &compileFunction, py::arg("function"), py::arg("examples"),
        py::arg("consume"), py::arg("releasable"), py::arg("fpmath_mode"));
  m.def("release_weights", &releaseModule, py::arg("script"));
  m.def("release_weights", &releaseFunction, py::arg("script"));
}

#include "jit/onednn/ahead_of_time.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/passes/canonicalize_graph_fuser_ops.h>
#include <torch/csrc/jit/passes/common_subexpression_elimination.h>
#include <torch/csrc/jit/passes/constant_pooling.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/loop_unrolling.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/passes/peephole.h>
#include <torch/csrc/jit/passes/remove_expands.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <unordered_set>

#include "jit/onednn/interface.h"
#include "jit/onednn/kernel.h"
#include "jit/onednn/observed_run.h"
#include "jit/onednn/runtime/releasable_weights.h"

namespace llga {
namespace {

using torch::jit::GraphFunction;
using torch::jit::Stack;

// ----------------------------------------------------------------------------- types from a run

// Gives every tensor in `graph` the type that it had when it was first computed.
void observeTypes(Graph& graph, const std::vector<Stack>& examples) {
  std::unordered_set<Value*> seen;
  const ObservedGraph observed(graph, [&seen](Value* value, const c10::IValue& now) {
    if (isTensor(value) && now.isTensor() && now.toTensor().defined() &&
        seen.insert(value).second) {
      value->setType(c10::TensorType::create(now.toTensor()));
    }
  });
  for (const auto& inputs : examples) {
    observed.run(inputs);
  }
}

// ----------------------------------------------------------------------------------- optimising

// What the profiling executor does to a graph before it calls the pipeline, minus gradients.
void optimize(std::shared_ptr<Graph>& graph) {
  torch::jit::Inline(*graph);
  torch::jit::RemoveExpands(graph);
  torch::jit::CanonicalizeOps(graph);
  torch::jit::ConstantPropagation(graph, /*ignore_custom_classes=*/true);
  if (torch::jit::UnrollConstantLoops(graph)) {
    torch::jit::ConstantPropagation(graph, /*ignore_custom_classes=*/true);
  }
  torch::jit::EliminateDeadCode(graph);
  torch::jit::EliminateCommonSubexpression(graph);
  torch::jit::ConstantPooling(graph);
  torch::jit::PeepholeOptimize(graph);
  torch::jit::LowerSimpleTuples(graph);
  torch::jit::EliminateDeadCode(graph);
}

// ------------------------------------------------------------------------------ releasable weights

Symbol weightKind() {
  static const Symbol kind = Symbol::fromQualString("llga::weight");
  return kind;
}

// Freeing less than this is not worth an unpacking.
constexpr int64_t kSmallestReleased = 1024;

bool isConstantTensor(const Node* node) {
  return node->kind() == torch::jit::prim::Constant && isTensor(node->output()) &&
         node->hasAttribute(torch::jit::attr::value);
}

bool canBeReleased(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         tensor.numel() >= kSmallestReleased && tensor.is_non_overlapping_and_dense();
}

// Gives the constants that only the groups of `fused` read a storage that can be emptied, and takes
// them out of `plain`:
//
//   %w : Tensor = prim::Constant[value=<Tensor>]()   ->   %w : Tensor = llga::weight[value=...]()
void makeReleasable(Graph& plain, Graph& fused) {
  std::unordered_set<const c10::StorageImpl*> read_outside;
  auto storageOf = [](const at::Tensor& tensor) {
    return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  };
  walk(fused.block(), [&](Node* node) {
    if (isConstantTensor(node)) {
      read_outside.insert(storageOf(node->t(torch::jit::attr::value)));
    }
  });
  std::vector<std::pair<at::Tensor, at::Tensor>> weights;
  auto find = [&](const at::Tensor& tensor) -> at::Tensor {
    for (const auto& [known, weight] : weights) {
      if (known.is_alias_of(tensor) && known.storage_offset() == tensor.storage_offset() &&
          known.sizes() == tensor.sizes() && known.strides() == tensor.strides() &&
          known.scalar_type() == tensor.scalar_type()) {
        return weight;
      }
    }
    return {};
  };
  walk(fused.block(), [&](Node* group) {
    if (!isFusionGroup(group)) {
      return;
    }
    for (auto* node : group->g(torch::jit::attr::Subgraph)->nodes()) {
      if (!isConstantTensor(node)) {
        continue;
      }
      const auto tensor = node->t(torch::jit::attr::value);
      if (!canBeReleased(tensor) || read_outside.count(storageOf(tensor)) != 0) {
        continue;
      }
      auto weight = find(tensor);
      if (!weight.defined()) {
        weight = ReleasableWeight::make(tensor);
        weights.emplace_back(tensor, weight);
      }
      node->t_(torch::jit::attr::value, weight);
    }
  });
  walk(plain.block(), [&](Node* node) {
    const auto constant = isConstantTensor(node) ? node->t(torch::jit::attr::value) : at::Tensor();
    const bool may = constant.defined() && canBeReleased(constant);
    auto weight = may ? find(constant) : at::Tensor();
    if (may && !weight.defined() && constant.dim() == 2) {
      weight = find(constant.t());  // as restore_linear has it
      weight = weight.defined() ? weight.t() : weight;
    }
    if (weight.defined()) {
      auto* op = plain.create(weightKind(), {}, /*num_outputs=*/1)->insertBefore(node);
      op->t_(torch::jit::attr::value, weight);
      op->output()->copyMetadata(node->output());
      node->output()->replaceAllUsesWith(op->output());
      node->destroy();
    }
  });
}

ReleasableWeightPtr weightOf(const Node* node) {
  return findReleasable(node->t(torch::jit::attr::value));
}

torch::jit::Operation weightOperation(const Node* node) {
  TORCH_CHECK(node->hasAttribute(torch::jit::attr::value),
              "llga::weight: this file was saved from a module compiled with "
              "llga_fuser.compile(..., release_weights=True), whose weights can't be saved");
  return [tensor = node->t(torch::jit::attr::value), weight = weightOf(node)](Stack& stack) {
    torch::jit::push(stack, weight->copy().as_strided(tensor.sizes(), tensor.strides()));
  };
}

// ------------------------------------------------------------------------------------ executors

void become(Graph& graph, Graph& source) {
  graph.block()->clear();
  graph.block()->cloneFrom(source.block(), [](Value* value) { return value; });
}

struct AutocastOff {
  AutocastOff() : before(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  ~AutocastOff() { at::autocast::set_autocast_enabled(at::kCPU, before); }
  AutocastOff(const AutocastOff&) = delete;
  AutocastOff& operator=(const AutocastOff&) = delete;
  bool before;
};

// Gives `function` an executor that runs `fused` as it is, and leaves it its own graph. Nobody else
// may know `function` yet. Inside autocast TorchScript uses another executor, which it makes from
// the function's graph when it is first needed.
void installExecutor(GraphFunction& function, Graph& fused) {
  auto& graph = *function.graph();
  const auto plain = graph.copy();
  become(graph, fused);
  {
    const torch::jit::GraphOptimizerEnabledGuard as_it_is(false);
    const AutocastOff guard;
    function._set_initial_executor_execution_mode(torch::jit::ExecutorExecutionMode::SIMPLE);
    function.get_executor();
  }
  function.clear_optimized_graphs();
  become(graph, *plain);
}

// A function can't leave its compilation unit, and that of traced and scripted code lives as long
// as the process: what it is not needed for any more is taken out.
void giveUpConstants(GraphFunction& function) {
  auto& graph = *function.graph();
  graph.block()->clear();
  const torch::jit::WithInsertPoint guard(graph.block());
  graph.registerOutput(graph.insertConstant(c10::IValue()));
  function.clear_optimized_graphs();
}

void install(GraphFunction& function, Graph& fused, const CompileOptions& options) {
  if (options.fpmath_mode) {
    walk(fused.block(), [&](Node* node) {
      if (isFusionGroup(node)) {
        node->i_(fpmathModeAttr(), *options.fpmath_mode);
      }
    });
  }
  if (options.releasable) {
    makeReleasable(*function.graph(), fused);
  }
  installExecutor(function, fused);
}

}  // namespace

std::shared_ptr<Graph> fuseAhead(Graph& graph, const std::vector<Stack>& examples) {
  auto fused = graph.copy();
  optimize(fused);
  observeTypes(*fused, examples);
  runPipeline(fused);
  return fused;
}

torch::jit::Module compiledModule(const torch::jit::Module& frozen, Graph& fused,
                                  const CompileOptions& options) {
  const auto old_type = frozen.type();
  auto& original = torch::jit::toGraphFunction(frozen.get_method("forward").function());
  const bool alone = old_type->numAttributes() == 0 && old_type->methods().size() == 1 &&
                     original.graph()->inputs()[0]->uses().empty() &&
                     fused.inputs()[0]->uses().empty();
  if (!alone) {
    auto module = frozen.clone(/*inplace=*/true);
    fused.inputs()[0]->setType(module.type());
    install(torch::jit::toGraphFunction(module.get_method("forward").function()), fused, options);
    return module;
  }
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  torch::jit::Module module(*old_type->name(), unit, /*shouldMangle=*/false);
  const auto new_type = module.type();
  const auto plain = original.graph()->copy();
  plain->inputs()[0]->setType(new_type);
  fused.inputs()[0]->setType(new_type);
  auto* function =
      unit->create_function(c10::QualifiedName(*new_type->name(), original.name()), plain);
  const std::function<c10::TypePtr(c10::TypePtr)> renew = [&](const c10::TypePtr& type) {
    return type == old_type ? c10::TypePtr(new_type) : type;
  };
  function->setSchema(original.getSchema().cloneWithRemappedTypes(renew));
  new_type->addMethod(function);
  install(torch::jit::toGraphFunction(*function), fused, options);
  if (options.consume) {
    giveUpConstants(original);
  }
  return module;
}

torch::jit::StrongFunctionPtr compiledFunction(GraphFunction& plain, Graph& fused,
                                               const CompileOptions& options) {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  auto graph = plain.graph()->copy();
  torch::jit::Inline(*graph);
  auto* function = unit->create_function(plain.qualname(), graph);
  function->setSchema(plain.getSchema());
  install(torch::jit::toGraphFunction(*function), fused, options);
  if (options.consume) {
    giveUpConstants(plain);
  }
  return {unit, function};
}

size_t releaseWeights(GraphFunction& compiled) {
  size_t bytes = 0;
  walk(compiled.graph()->block(), [&](const Node* node) {
    if (node->kind() == weightKind()) {
      bytes += weightOf(node)->release();
    }
  });
  return bytes;
}

void registerAheadOfTime() {
  static const torch::jit::RegisterOperators registration({
      // Conservative, as passes must not compare the tensors of two such nodes.
      torch::jit::Operator(weightKind(), weightOperation, c10::AliasAnalysisKind::CONSERVATIVE),
  });
}

}  // namespace llga

#include "jit/onednn/interface.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/jit/jit_log.h>
#include <torch/csrc/jit/passes/pass_manager.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>

#include "jit/onednn/kernel.h"
#include "jit/onednn/module_watch.h"
#include "jit/onednn/once_per_sizes.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/runtime/engine.h"

namespace llga {

const std::vector<PassEntry>& passes() {
  static const std::vector<PassEntry> list = {
      {"specialize_types", specializeTypes,
       "first: profile nodes hide every pattern, and the passes below read the types"},
      {"restore_cells", restoreCells,
       "before remove_mutation, which would leave alone what a step writes to parts of a tensor"},
      {"remove_mutation", removeMutation,
       "before all rewriting: oneDNN Graph is pure, and rewriting needs pure nodes"},
      {"fold_constants", foldConstants,
       "after remove_mutation, which makes more nodes pure; before the rest, which need not look at "
       "what is folded"},
      {"normalize_ops", normalizeOps,
       "before the op-specific passes, which know one spelling of each op"},
      {"restore_linear", restoreLinear,
       "after normalize_ops, which makes plain integers of sizes that were traced; before prepare_*, "
       "which look at linear layers"},
      {"restore_attention", restoreAttention,
       "after fold_constants and normalize_ops, which leave plain integers of sizes, and "
       "restore_linear; before sink_permute, which would stop at its views"},
      {"unstack", unstack,
       "before drop_casts, as it moves casts, and all that looks at images; after remove_mutation"},
      {"fold_batch_norm", foldBatchNorm,
       "after restore_linear, whose layers may have one; before all that looks at linear layers"},
      {"fold_scale", foldScale, "likewise; before sink_permute, which would stop at a factor"},
      {"sink_permute", sinkPermute,
       "after fold_scale; before drop_casts, as it moves casts, too, and before graph_fuser, which "
       "has the sum in the layer's group then"},
      {"widen_bfloat16", widenBfloat16,
       "after restore_linear, as fold_constants and normalize_ops leave more types known; before "
       "drop_casts, which would round where this does without",
       [] { return !prefersBf16(); }},
      {"widen_quantized", widenQuantized,
       "likewise; before prepare_quantized, which expects dequantized values as they are"},
      {"drop_casts", dropCasts,
       "after fold_constants and normalize_ops, which leave more types known; before fusing, which "
       "stops at casts"},
      {"drop_copies", dropCopies,
       "after drop_casts and restore_attention, which knows attention with its copies; before all "
       "that looks at images"},
      {"sequences_as_images", sequencesAsImages,
       "after drop_casts, as it moves casts; before all that looks at images"},
      {"merge_parts", mergeParts,
       "after drop_casts, likewise; before merge_branches, for which one may be a branch"},
      {"merge_branches", mergeBranches,
       "after drop_casts, as casts part the branches under autocast; before fusing"},
      {"prepare_quantized", prepareQuantized,
       "before prepare_binary, which would take scales for operands; after normalize_ops, whose ops "
       "may read 8-bit values"},
      {"prepare_binary", prepareBinary,
       "after normalize_ops, whose rewrites create binary ops; removes operands' expands, which "
       "frees sizes for defer_size_check"},
      {"sink_windows", sinkWindows,
       "after prepare_*, whose casts would part what it brings together; before defer_size_check, as "
       "it moves sizes"},
      {"defer_size_check", deferSizeCheck,
       "right before fusing: any later rewrite could read a size from inside a group again"},
      {"once_per_sizes", oncePerSizes,
       "after defer_size_check, which reads sizes as far up as they are the same; before graph_fuser, "
       "whose groups would tear apart what depends on sizes alone"},
      {"join_sums", joinSums,
       "right before graph_fuser, which would join a product with a part of the sum"},
      {"join_gates", joinGates, "likewise, with one of the activations"},
      {"graph_fuser", fuseGraph, "the point of it all"},
      {"join_concat", joinConcat,
       "between graph_fuser, whose groups it joins, and layout_propagation, which marks their "
       "outputs"},
      {"join_depthwise", joinDepthwise, "beside join_concat, for the same reasons"},
      {"join_excitation", joinExcitation, "beside join_concat, for the same reasons"},
      {"join_shuffle", joinShuffle,
       "after join_concat, which takes the concatenations that a batch norm reads; else likewise"},
      {"layout_propagation", propagateLayout, "needs the groups"},
      {"guard_values", guardValues, "needs to know which values stay between groups"},
      {"guard_shape", guardShape, "last: erases the types the passes above read"},
  };
  return list;
}

namespace {

const PassEntry& passOf(const std::string& name) {
  std::string known;
  for (const auto& pass : passes()) {
    if (name == pass.name) {
      return pass;
    }
    known += (known.empty() ? "" : ", ") + std::string(pass.name);
  }
  throw std::invalid_argument(fmt::format("unknown pass '{}': expected one of {}", name, known));
}

struct DisabledPasses {
  std::mutex mutex;
  std::set<std::string> names;

  DisabledPasses() {
    const char* list = std::getenv("LLGA_FUSER_DISABLE_PASSES");
    std::stringstream stream(list != nullptr ? list : "");
    for (std::string name; std::getline(stream, name, ',');) {
      if (!name.empty()) {
        names.insert(passOf(name).name);
      }
    }
  }
};

DisabledPasses& disabledPasses() {
  static auto* disabled = new DisabledPasses;
  return *disabled;
}

void runTraced(const PassEntry& pass, const std::shared_ptr<Graph>& graph) {
  GRAPH_DUMP(fmt::format("Before {}: ", pass.name), graph);
  pass.run(graph);
  GRAPH_DUMP(fmt::format("After {}: ", pass.name), graph);
}

void registerOperators() {
  registerFusionGroup();
  registerOncePerSizes();
}

}  // namespace

void setPassEnabled(const std::string& name, bool enabled) {
  const auto& pass = passOf(name);
  auto& disabled = disabledPasses();
  const std::lock_guard lock(disabled.mutex);
  if (enabled) {
    disabled.names.erase(pass.name);
  } else {
    disabled.names.insert(pass.name);
  }
}

bool isPassEnabled(const std::string& name) {
  const auto& pass = passOf(name);
  auto& disabled = disabledPasses();
  const std::lock_guard lock(disabled.mutex);
  return disabled.names.count(pass.name) == 0;
}

void runPass(const std::string& name, const std::shared_ptr<Graph>& graph) {
  registerOperators();
  runTraced(passOf(name), graph);
}

void runPipeline(std::shared_ptr<Graph>& graph) {
  registerOperators();
  // Compiling must not fail because of us: the passes work on a copy, which replaces the graph
  // only if all of them came through.
  auto working = graph->copy();
  try {
    for (const auto& pass : passes()) {
      if (isPassEnabled(pass.name) && (pass.isNeeded == nullptr || pass.isNeeded())) {
        runTraced(pass, working);
      }
    }
    working->lint();
  } catch (const std::exception& error) {
    TORCH_WARN("llga_fuser: a pass failed, the graph stays unfused: ", error.what());
    return;
  }
  graph = working;
  checkStrictFusion(graph);
}

namespace {

struct Registration {
  std::mutex mutex;
  std::optional<torch::jit::GraphPassNameType> id;
};

Registration& registration() {
  static auto* instance = new Registration;
  return *instance;
}

}  // namespace

bool setEnabled(bool enabled) {
  auto& reg = registration();
  const std::lock_guard lock(reg.mutex);
  const bool before = reg.id.has_value();
  if (enabled && !before) {
    disabledPasses();  // a wrong LLGA_FUSER_DISABLE_PASSES is reported here, not while compiling
    reg.id = torch::jit::registerPrePass([](std::shared_ptr<Graph>& graph) {
      runPipeline(graph);
      watchModule(*graph);
    });
  } else if (!enabled && before) {
    torch::jit::clearPrePass(*reg.id);
    reg.id.reset();
  }
  return before;
}

bool isEnabled() {
  auto& reg = registration();
  const std::lock_guard lock(reg.mutex);
  return reg.id.has_value();
}

}  // namespace llga

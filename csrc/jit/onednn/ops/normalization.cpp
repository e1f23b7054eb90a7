// Normalizations. Their parameters are float32 in oneDNN whatever the data type of the data.
#include <fmt/format.h>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

void requireFloatInput(const Lowering& l) {
  const auto dtype = l.dtype(l.arg("input"));
  if (dtype != at::kFloat && dtype != at::kBFloat16) {
    l.refuse(
        fmt::format("data type {} (float32 and bfloat16 are supported)", c10::toString(dtype)));
  }
}

// A float32 parameter, or a constant where PyTorch allows none.
Operand parameter(Lowering& l, const char* name, int64_t channels, float otherwise) {
  if (!l.isNone(name)) {
    return l.inAs(name, at::kFloat);
  }
  return l.constant(at::kFloat, {channels}, [=] { return at::full({channels}, otherwise); });
}

void normByRunningStatistics(Lowering& l) {
  requireFloatInput(l);
  if (l.isNone("running_mean") || l.isNone("running_var")) {
    l.refuse("no running statistics");
  }
  l.requireRank(l.arg("input"), 2, 5);
  const auto channels = l.sizes(l.arg("input"))[1];
  l.emit(OpKind::BatchNormInference,
         {l.in("input"), parameter(l, "weight", channels, 1), parameter(l, "bias", channels, 0),
          l.inAs("running_mean", at::kFloat), l.inAs("running_var", at::kFloat)},
         {l.out()})
      .set_attr<float>(Attr::epsilon, static_cast<float>(l.number("eps")))
      .set_attr<std::string>(Attr::data_format, "NCX");
}

void batchNorm(Lowering& l) {
  if (l.flag("training")) {
    l.refuse("training mode");
  }
  normByRunningStatistics(l);
}

void layerNorm(Lowering& l) {
  requireFloatInput(l);
  l.requireRank(l.arg("input"), 2, 5);
  const auto normalized = l.ints("normalized_shape");
  if (normalized.size() != 1) {
    l.refuse(fmt::format("{} normalized dimensions (the last one is mapped)", normalized.size()));
  }
  const bool affine = !l.isNone("weight") || !l.isNone("bias");
  std::vector<Operand> inputs{l.in("input")};
  if (affine) {
    inputs.push_back(parameter(l, "weight", normalized[0], 1));
    inputs.push_back(parameter(l, "bias", normalized[0], 0));
  }
  l.emit(OpKind::LayerNorm, inputs, {l.out()})
      .set_attr<bool>(Attr::keep_stats, false)
      .set_attr<bool>(Attr::use_affine, affine)
      .set_attr<int64_t>(Attr::begin_norm_axis, -1)
      .set_attr<float>(Attr::epsilon, static_cast<float>(l.number("eps")));
}

void normGroups(Lowering& l, int64_t groups) {
#if DNNL_VERSION_MAJOR > 3 || (DNNL_VERSION_MAJOR == 3 && DNNL_VERSION_MINOR >= 6)
  requireFloatInput(l);
  l.requireRank(l.arg("input"), 3, 5);
  const bool affine = !l.isNone("weight") || !l.isNone("bias");
  std::vector<Operand> inputs{l.in("input")};
  if (affine) {
    const auto channels = l.sizes(l.arg(l.isNone("weight") ? "bias" : "weight"))[0];
    inputs.push_back(parameter(l, "weight", channels, 1));
    inputs.push_back(parameter(l, "bias", channels, 0));
  }
  l.emit(OpKind::GroupNorm, inputs, {l.out()})
      .set_attr<bool>(Attr::keep_stats, false)
      .set_attr<bool>(Attr::use_affine, affine)
      .set_attr<int64_t>(Attr::groups, groups)
      .set_attr<float>(Attr::epsilon, static_cast<float>(l.number("eps")))
      .set_attr<std::string>(Attr::data_format, "NCX");
#else
  (void)groups;
  l.refuse("oneDNN has GroupNorm from 3.6 on");
#endif
}

void groupNorm(Lowering& l) { normGroups(l, l.integer("num_groups")); }

void instanceNorm(Lowering& l) {
  if (!l.flag("use_input_stats")) {
    return normByRunningStatistics(l);
  }
  if (!l.isNone("running_mean") || !l.isNone("running_var")) {
    l.refuse("training mode: it updates its running statistics");
  }
  normGroups(l, l.sizes(l.arg("input"))[1]);
}

}  // namespace

OpFamily normalizationOps() {
  return {
      {"aten::batch_norm", OpClass::compute, batchNorm},
      {"aten::layer_norm", OpClass::compute, layerNorm},
      {"aten::group_norm", OpClass::compute, groupNorm},
      {"aten::instance_norm", OpClass::compute, instanceNorm},
  };
}

}  // namespace llga

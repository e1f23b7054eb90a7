// Up- and downsampling. oneDNN Graph: Interpolate with half-pixel coordinates.
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl_version.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

// The factors, if they are a constant.
std::optional<std::vector<double>> constantFactors(const Lowering& l) {
  const auto known = torch::jit::toIValue(l.arg("scale_factors"));
  return known && known->isDoubleList() ? std::optional(known->toDoubleVector()) : std::nullopt;
}

// The scale PyTorch computes coordinates with must be the ratio of the sizes: a given scale factor
// wins over the ratio in PyTorch and is unknown to oneDNN.
void requireScalesMatch(const Lowering& l, const Shape& in, const Shape& out) {
  const auto n = in.size() - 2;
  std::vector<double> scales;
  if (l.has("scale_factors")) {
    if (l.isNone("scale_factors")) {
      return;
    }
    // Known as a list only through the recorded sizes: every factor times its size must be whole.
    if (auto known = constantFactors(l)) {
      scales = std::move(*known);
    } else {
      l.refuse("'scale_factors' is not a constant");
    }
  } else {
    static constexpr const char* kNames[][3] = {
        {"scales", nullptr, nullptr},
        {"scales_h", "scales_w", nullptr},
        {"scales_d", "scales_h", "scales_w"},
    };
    for (size_t i = 0; i < n; ++i) {
      const auto* name = kNames[n - 1][i];
      scales.push_back(l.isNone(name) ? static_cast<double>(out[i + 2]) / in[i + 2]
                                      : l.number(name));
    }
  }
  for (size_t i = 0; i < n && i < scales.size(); ++i) {
    if (scales[i] > 0 && std::abs(scales[i] * in[i + 2] - out[i + 2]) > 1e-6) {
      l.refuse(fmt::format("scale factor {} is not the ratio of sizes {} -> {}", scales[i],
                           in[i + 2], out[i + 2]));
    }
  }
}

// Of the result, where a constant scale factor tells them before a call has.
Shape resultSizes(const Lowering& l, const Shape& in) {
  const auto* result = l.node()->output();
  if (!l.maybeSizes(result) && l.has("scale_factors")) {
    if (const auto scales = constantFactors(l); scales && scales->size() + 2 == in.size()) {
      auto sizes = in;
      for (size_t i = 0; i < scales->size(); ++i) {
        const auto size = static_cast<double>(in[i + 2]) * (*scales)[i];
        sizes[i + 2] = static_cast<int64_t>(std::floor(size));
      }
      return sizes;
    }
  }
  return l.sizes(result);
}

void interpolate(Lowering& l, const char* self, const char* mode, bool nearest) {
  l.requireOneDtype();
  const auto& in = l.sizes(l.arg(self));
  const auto out = resultSizes(l, in);
  requireScalesMatch(l, in, out);
  const Shape sizes(out.begin() + 2, out.end());
  // oneDNN 3.2 knows in which order their channels lie, 3.7 does not.
  constexpr bool kMisreadsPixels = DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR > 2;
  if (kMisreadsPixels && isOnePixel(in)) {
    l.refuse("images of one pixel, which this oneDNN resizes wrongly");
  }
  if (nearest) {
    for (size_t i = 2; i < in.size(); ++i) {
      if (out[i] % in[i] != 0) {  // PyTorch floors, oneDNN rounds: equal for whole factors only
        l.refuse(fmt::format("nearest {} -> {} is not a whole factor", in[i], out[i]));
      }
    }
  } else if (l.flag("align_corners")) {
    l.refuse("align_corners=True");
  }
  l.emit(OpKind::Interpolate, {l.in(self)}, {l.out()})
      .set_attr<std::string>(Attr::mode, mode)
      .set_attr<Shape>(Attr::sizes, sizes)
      .set_attr<std::string>(Attr::coordinate_transformation_mode, "half_pixel")
      .set_attr<std::string>(Attr::data_format, "NCX");
}

template <int dims, bool nearest>
void upsample(Lowering& l) {
  static constexpr const char* kLinear[] = {"linear", "bilinear", "trilinear"};
  interpolate(l, l.has("input") ? "input" : "self", nearest ? "nearest" : kLinear[dims - 1],
              nearest);
}

}  // namespace

OpFamily interpolateOps() {
  constexpr auto kClass = OpClass::compute;
  return {
      {"aten::upsample_nearest1d", kClass, upsample<1, true>},
      {"aten::upsample_nearest1d.vec", kClass, upsample<1, true>},
      {"aten::upsample_nearest2d", kClass, upsample<2, true>},
      {"aten::upsample_nearest2d.vec", kClass, upsample<2, true>},
      {"aten::upsample_nearest3d", kClass, upsample<3, true>},
      {"aten::upsample_nearest3d.vec", kClass, upsample<3, true>},
      {"aten::upsample_linear1d", kClass, upsample<1, false>},
      {"aten::upsample_linear1d.vec", kClass, upsample<1, false>},
      {"aten::upsample_bilinear2d", kClass, upsample<2, false>},
      {"aten::upsample_bilinear2d.vec", kClass, upsample<2, false>},
      {"aten::upsample_trilinear3d", kClass, upsample<3, false>},
      {"aten::upsample_trilinear3d.vec", kClass, upsample<3, false>},
  };
}

}  // namespace llga

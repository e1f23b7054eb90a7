// Activations and other elementwise functions of one tensor.
#include <fmt/format.h>

#include <limits>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <OpKind kind>
void unary(Lowering& l) {
  l.requireOneDtype();
  l.emit(kind, {l.in("self")}, {l.out()});
}

// `self` in the data type of the node and the shape shared by all intermediate results.
struct Elementwise {
  explicit Elementwise(Lowering& lowering)
      : l(lowering),
        self((lowering.requireOneDtype(), lowering.in("self"))),
        dtype(self.dtype),
        shape(self.sizes) {}
  Operand temp() { return l.temp(dtype, shape); }
  Operand scalar(double value) { return l.scalar(value, dtype); }

  Lowering& l;
  Operand self;
  at::ScalarType dtype;
  std::optional<Shape> shape;
};

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3): one op behind
// the other, of which oneDNN computes four in one pass. Its GELU is the erf form; the tanh form has
// no op of its own before 3.12.
void tanhGelu(Lowering& l) {
  constexpr double kLinear = 2 * 0.7978845608028654;
  constexpr double kCubic = kLinear * 0.044715;
  Elementwise e(l);
  auto next = [&, last = e.self](OpKind kind, std::vector<Operand> more) mutable {
    more.insert(more.begin(), last);
    last = e.temp();
    l.emit(kind, more, {last});
    return last;
  };
  next(OpKind::Multiply, {e.self});
  next(OpKind::Multiply, {e.scalar(kCubic)});
  next(OpKind::Add, {e.scalar(kLinear)});
  next(OpKind::Multiply, {e.self});
  const auto gate = next(OpKind::Sigmoid, {});
  l.emit(OpKind::Multiply, {gate, e.self}, {l.out()});
}

void gelu(Lowering& l) {
  if (l.text("approximate") == "tanh") {
    tanhGelu(l);
  } else {
    unary<OpKind::GELU>(l);
  }
}

void elu(Lowering& l) {
  if (l.number("scale") != 1 || l.number("input_scale") != 1) {
    l.refuse("scale and input_scale other than 1 (SELU, CELU) are not in oneDNN's Elu");
  }
  const auto alpha = l.number("alpha");
  if (alpha < 0) {
    l.refuse("negative alpha");
  }
  l.requireOneDtype();
  l.emit(OpKind::Elu, {l.in("self")}, {l.out()})
      .set_attr<float>(Attr::alpha, static_cast<float>(alpha));
}

void leakyRelu(Lowering& l) {
  l.requireOneDtype();
  l.emit(OpKind::LeakyReLU, {l.in("self")}, {l.out()})
      .set_attr<float>(Attr::alpha, static_cast<float>(l.number("negative_slope")));
}

void hardsigmoid(Lowering& l) {
  l.requireOneDtype();
  l.emit(OpKind::HardSigmoid, {l.in("self")}, {l.out()})
      .set_attr<float>(Attr::alpha, 1.0F / 6.0F)
      .set_attr<float>(Attr::beta, 0.5F);
}

void emitClamp(Lowering& l, double low, double high) {
  l.requireOneDtype();
  // PyTorch returns `max` everywhere where min > max; oneDNN refuses such a Clamp.
  if (low > high) {
    l.refuse(fmt::format("min {} is larger than max {}", low, high));
  }
  l.emit(OpKind::Clamp, {l.in("self")}, {l.out()})
      .set_attr<float>(Attr::min, static_cast<float>(low))
      .set_attr<float>(Attr::max, static_cast<float>(high));
}

void clamp(Lowering& l) {
  emitClamp(l, l.isNone("min") ? -kInfinity : l.number("min"),
            l.isNone("max") ? kInfinity : l.number("max"));
}
void clampMin(Lowering& l) { emitClamp(l, l.number("min"), kInfinity); }
void clampMax(Lowering& l) { emitClamp(l, -kInfinity, l.number("max")); }
void hardtanh(Lowering& l) { emitClamp(l, l.number("min_val"), l.number("max_val")); }
void relu6(Lowering& l) { emitClamp(l, 0, 6); }

// silu(x) = x * sigmoid(x), the form of oneDNN's swish patterns.
void silu(Lowering& l) {
  Elementwise e(l);
  auto gate = e.temp();
  l.emit(OpKind::Sigmoid, {e.self}, {gate});
  l.emit(OpKind::Multiply, {e.self, gate}, {l.out()});
}

void softplus(Lowering& l) {
  // Above the threshold PyTorch returns x; the function itself is x + exp(-beta x) / beta there.
  if (l.number("threshold") < 10) {
    l.refuse("threshold below 10 changes the function");
  }
  l.requireOneDtype();
  l.emit(OpKind::SoftPlus, {l.in("self")}, {l.out()})
      .set_attr<float>(Attr::beta, static_cast<float>(l.number("beta")));
}

void prelu(Lowering& l) {
  l.requireOneDtype();
  const auto& slopes = l.sizes(l.arg("weight"));
  if (slopes.size() != 1) {
    l.refuse("'weight' is not one-dimensional");
  }
  l.emit(OpKind::PReLU, {l.in("self"), l.in("weight")}, {l.out()})
      .set_attr<std::string>(Attr::data_format, "NCX")
      .set_attr<bool>(Attr::per_channel_broadcast, slopes[0] != 1);
}

// PyTorch and oneDNN both round halves to even; in bf16 oneDNN has no Round.
void round(Lowering& l) {
  if (l.dtype(l.arg("self")) != at::kFloat) {
    l.refuse("Round is float32 only");
  }
  unary<OpKind::Round>(l);
}

void pow(Lowering& l) {
  Elementwise e(l);
  const auto exponent = l.number("exponent");
  if (exponent == 2) {
    l.emit(OpKind::Square, {e.self}, {l.out()});
  } else if (exponent == 3) {
    auto square = e.temp();
    l.emit(OpKind::Square, {e.self}, {square});
    l.emit(OpKind::Multiply, {square, e.self}, {l.out()});
  } else if (exponent == 0.5) {
    l.emit(OpKind::Sqrt, {e.self}, {l.out()});
  } else {
    l.refuse(fmt::format("exponent {} (2, 3 and 0.5 are mapped)", exponent));
  }
}

void rsqrt(Lowering& l) {
  Elementwise e(l);
  auto root = e.temp();
  l.emit(OpKind::Sqrt, {e.self}, {root});
  l.emit(OpKind::Divide, {e.scalar(1), root}, {l.out()});
}

void reciprocal(Lowering& l) {
  Elementwise e(l);
  l.emit(OpKind::Divide, {e.scalar(1), e.self}, {l.out()});
}

void neg(Lowering& l) {
  Elementwise e(l);
  l.emit(OpKind::Multiply, {e.self, e.scalar(-1)}, {l.out()});
}

}  // namespace

OpFamily eltwiseOps() {
  constexpr auto kClass = OpClass::elementwise;
  return {
      {"aten::relu", kClass, unary<OpKind::ReLU>},
      {"aten::sigmoid", kClass, unary<OpKind::Sigmoid>},
      {"aten::tanh", kClass, unary<OpKind::Tanh>},
      {"aten::hardswish", kClass, unary<OpKind::HardSwish>},
      {"aten::mish", kClass, unary<OpKind::Mish>},
      {"aten::sqrt", kClass, unary<OpKind::Sqrt>},
      {"aten::square", kClass, unary<OpKind::Square>},
      {"aten::abs", kClass, unary<OpKind::Abs>},
      {"aten::exp", kClass, unary<OpKind::Exp>},
      {"aten::log", kClass, unary<OpKind::Log>},
      {"aten::round", kClass, round},
      {"aten::gelu", OpClass::compute, gelu, Parts::several},
      {"aten::elu", kClass, elu},
      {"aten::leaky_relu", kClass, leakyRelu},
      {"aten::hardsigmoid", kClass, hardsigmoid},
      {"aten::hardtanh", kClass, hardtanh},
      {"aten::relu6", kClass, relu6},
      {"aten::clamp", kClass, clamp},
      {"aten::clamp_min", kClass, clampMin},
      {"aten::clamp_max", kClass, clampMax},
      {"aten::silu", OpClass::compute, silu, Parts::several},
      {"aten::softplus", kClass, softplus},
      {"aten::prelu", kClass, prelu},
      {"aten::pow.Tensor_Scalar", kClass, pow},
      {"aten::rsqrt", kClass, rsqrt},
      {"aten::reciprocal", kClass, reciprocal},
      {"aten::neg", kClass, neg},
  };
}

}  // namespace llga

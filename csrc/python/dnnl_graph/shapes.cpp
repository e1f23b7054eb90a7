// What an op asks of the sizes of its tensors, and the sizes it gives them.
//
// The library infers sizes too, but checks little: it takes a batch norm whose statistics are too
// short and reads behind them, a list of strides that is too short for the image, a scale too few.
#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>

#include "arguments.h"
#include "checks.h"

namespace dnnl_graph_py {

namespace {

using known_dims = std::optional<dims_t>;  // nothing: not known

// Most numbers in an attribute become an int in some kernel.
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

// One op with the sizes it is compiled for; what all rules below are written in terms of.
class sized_op {
 public:
  // The logical tensors are those of the caller, or of the graph for what stays inside.
  sized_op(const char* function, const op_record& op, std::vector<dims_t> in,
           std::vector<logical_tensor> inputs, std::vector<logical_tensor> outputs)
      : function_(function),
        op_(op),
        in_(std::move(in)),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)) {}

  size_t inputs() const { return in_.size(); }
  const dims_t& in(size_t index) const { return in_.at(index); }
  // What the graph or the caller wants the output to be, which for gradients is all there is.
  known_dims wanted(size_t index) const {
    const logical_tensor& lt = outputs_.at(index);
    return has_unknown_dim(lt) ? known_dims() : lt.get_dims();
  }

  [[noreturn]] void fail(const std::string& problem) const {
    throw_value({function_, "inputs"}, "does not fit " + op_text(op_) + ": " + problem);
  }
  [[noreturn]] void fail_output(const std::string& problem) const {
    throw_value({function_, "outputs"}, "does not fit " + op_text(op_) + ": " + problem);
  }

  // Attributes. graph.add_op has seen to it that the required ones are there.
  template <typename T>
  const T* attribute(std::string_view name) const {
    return find_attribute<T>(op_, name);
  }
  template <typename T>
  T attribute(std::string_view name, const T& fallback) const {
    const T* value = attribute<T>(name);
    return value == nullptr ? fallback : *value;
  }
  std::string text(std::string_view name, const char* fallback) const {
    return attribute<std::string>(name, fallback);
  }

  // A list with one number >= `least` for each of `length` dimensions. The library's way to say
  // "not given" is a list of DNNL_MAX_NDIMS equal numbers, which its dumps contain.
  dims_t list(const char* name, size_t length, int64_t least, int64_t fallback) const {
    const dims_t* given = given_list(name, length);
    if (given == nullptr) return dims_t(length, fallback);
    if (given->size() != length) {
      fail(std::string("attribute ") + name + " must have " + std::to_string(length) +
           " numbers, got " + dims_text(*given));
    }
    for (const int64_t v : *given) {
      if (v < least || v > kLargest) {
        fail(std::string("attribute ") + name + " must have numbers from " + std::to_string(least) +
             " to " + std::to_string(kLargest) + ", got " + dims_text(*given));
      }
    }
    return *given;
  }
  const dims_t* given_list(const char* name, size_t length) const {
    const auto* given = attribute<dims_t>(name);
    if (given == nullptr || given->size() == length || given->size() != DNNL_MAX_NDIMS) {
      return given;
    }
    const bool equal =
        std::all_of(given->begin(), given->end(), [&](int64_t v) { return v == given->front(); });
    return equal ? nullptr : given;
  }

  // A dimension of `rank`, counted from the end if negative.
  size_t axis(const char* name, int64_t value, size_t rank) const {
    const auto limit = static_cast<int64_t>(rank);
    if (value < -limit || value >= limit) {
      fail(std::string("attribute ") + name + " must be between " + std::to_string(-limit) +
           " and " + std::to_string(limit - 1) + ", got " + std::to_string(value));
    }
    return static_cast<size_t>(value < 0 ? value + limit : value);
  }

  // Sizes.
  void expect(size_t index, const char* role, const dims_t& shape) const {
    if (index < in_.size()) expect_equal(role, in_[index], shape);
  }
  // Statistics and the like, which the library reads and writes as dense whatever it is told.
  void expect_dense(size_t index, const char* role, const dims_t& shape) const {
    expect(index, role, shape);
    if (index < inputs_.size()) expect_dense(inputs_[index], role);
  }
  // What a layer norm reads: before 3.7 (seen in 3.2) it takes many layouts for row-major.
  void expect_rows(size_t index, const char* role) const {
    if (library_before(3, 7)) expect_dense(inputs_.at(index), role);
  }
  void expect_dense_outputs(size_t first) const {
    for (size_t i = first; i < outputs_.size(); ++i) expect_dense(outputs_[i], "each statistic");
  }
  // From 6 dimensions on, elementwise ops treat a layout with gaps as one without.
  void check_gaps() const {
    for (const auto* side : {&inputs_, &outputs_}) {
      for (const auto& lt : *side) {
        if (ndims_of(lt) > 5 && !packed(lt)) {
          fail("from 6 dimensions on, there must be no gaps, got " + logical_tensor_text(lt));
        }
      }
    }
  }
  void expect_equal(const char* role, const dims_t& got, const dims_t& shape) const {
    if (got != shape) {
      fail(std::string(role) + " must have shape " + dims_text(shape) + ", got " + dims_text(got));
    }
  }
  void expect_rank(size_t index, const char* role, size_t least) const {
    if (in_.at(index).size() < least) {
      fail(std::string(role) + " must have at least " + std::to_string(least) +
           " dimensions, got " + dims_text(in_[index]));
    }
  }

 private:
  const char* function_;
  const op_record& op_;
  std::vector<dims_t> in_;
  std::vector<logical_tensor> inputs_;
  std::vector<logical_tensor> outputs_;

  void expect_dense(const logical_tensor& lt, const char* role) const {
    if (!dense(lt)) fail(std::string(role) + " must be dense, got " + logical_tensor_text(lt));
  }
};

using sizes = std::vector<known_dims>;  // of the outputs, in order

int64_t volume_of(const dims_t& dims) {
  int64_t n = 1;  // fits: see volume_fits
  for (const int64_t d : dims) n *= d;
  return n;
}

// The numpy way. `into`: only `b` may be stretched, to the shape of `a`.
dims_t broadcast(const sized_op& op, const char* role, const dims_t& a, const dims_t& b,
                 bool into = false) {
  dims_t result(std::max(a.size(), b.size()), 1);
  bool good = !into || b.size() <= a.size();
  for (size_t i = 0; i < result.size(); ++i) {
    const int64_t x = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t y = i < b.size() ? b[b.size() - 1 - i] : 1;
    good = good && (x == y || y == 1 || (x == 1 && !into));
    result[result.size() - 1 - i] = x == 1 ? y : x;
  }
  if (!good) {
    op.fail(std::string(role) + " must have a shape that broadcasts " + (into ? "to " : "with ") +
            dims_text(a) + ", got " + dims_text(b));
  }
  return result;
}

// Elementwise ops ---------------------------------------------------------------------------------

sizes same(const sized_op& op) { return {op.in(0)}; }

// Any number of inputs of one shape.
sizes all_same(const sized_op& op) {
  for (size_t i = 1; i < op.inputs(); ++i) op.expect(i, "each input", op.in(0));
  return {op.in(0)};
}

sizes binary(const sized_op& op) {
  if (op.text("auto_broadcast", "numpy") == "none") return all_same(op);
  return {broadcast(op, "src_1", op.in(0), op.in(1))};
}

sizes select(const sized_op& op) {
  if (op.text("auto_broadcast", "numpy") == "none") return all_same(op);
  const dims_t result = broadcast(op, "src_1", op.in(1), op.in(2));
  broadcast(op, "cond", result, op.in(0), true);
  return {result};
}

// Images and filters ------------------------------------------------------------------------------

struct image {
  int64_t batch;
  int64_t channels;
  dims_t spatial;
};

struct filter {
  int64_t out;
  int64_t in;
  dims_t spatial;
};

bool channels_last(const sized_op& op) { return op.text("data_format", "NXC") == "NXC"; }

image to_image(const sized_op& op, const char* role, const dims_t& dims, size_t least_rank = 3) {
  if (dims.size() < least_rank) {
    op.fail(std::string(role) + " must have at least " + std::to_string(least_rank) +
            " dimensions, got " + dims_text(dims));
  }
  if (*std::max_element(dims.begin(), dims.end()) > kLargest) {
    op.fail(std::string(role) + " must have sizes up to " + std::to_string(kLargest) + ", got " +
            dims_text(dims));
  }
  if (channels_last(op)) return {dims.front(), dims.back(), {dims.begin() + 1, dims.end() - 1}};
  return {dims[0], dims[1], {dims.begin() + 2, dims.end()}};
}

dims_t to_dims(const sized_op& op, const image& i) {
  dims_t dims = {i.batch};
  if (!channels_last(op)) dims.push_back(i.channels);
  dims.insert(dims.end(), i.spatial.begin(), i.spatial.end());
  if (channels_last(op)) dims.push_back(i.channels);
  return dims;
}

filter to_filter(const sized_op& op, const dims_t& dims, size_t rank, const char* standard) {
  if (dims.size() != rank) {
    op.fail("weights must have " + std::to_string(rank) + " dimensions, got " + dims_text(dims));
  }
  const std::string format = op.text("weights_format", standard);
  const dims_t tail(dims.begin() + 2, dims.end()), head(dims.begin(), dims.end() - 2);
  if (format == "OIX") return {dims[0], dims[1], tail};
  if (format == "IOX") return {dims[1], dims[0], tail};
  if (format == "XOI") return {dims[rank - 2], dims[rank - 1], head};
  return {dims[rank - 1], dims[rank - 2], head};  // XIO
}

int64_t channels_of(const sized_op& op) { return to_image(op, "src", op.in(0), 2).channels; }

// How a window walks over an image.
struct steps {
  dims_t strides;
  dims_t reach;    // of the window, dilation included
  dims_t padding;  // at both ends together
};

steps read_steps(const sized_op& op, const dims_t& big, const dims_t& window) {
  const size_t n = window.size();
  steps s;
  s.strides = op.list("strides", n, 1, 1);
  const dims_t dilations = op.list("dilations", n, 1, 1);
  const dims_t begin = op.list("pads_begin", n, 0, 0), end = op.list("pads_end", n, 0, 0);
  const std::string automatic = op.text("auto_pad", "None");
  for (size_t i = 0; i < n; ++i) {
    if (window[i] < 1) op.fail("the window must not be empty, got " + dims_text(window));
    if (__builtin_mul_overflow(dilations[i], window[i] - 1, &s.reach.emplace_back()) ||
        ++s.reach[i] > kLargest) {
      op.fail("attribute dilations makes the window too large: " + dims_text(dilations));
    }
    int64_t padding = begin[i] + end[i];
    if (automatic == "VALID") padding = 0;
    if (automatic == "SAME_UPPER" || automatic == "SAME_LOWER") {
      const int64_t rest = i < big.size() ? big[i] % s.strides[i] : 0;
      padding = std::max<int64_t>(s.reach[i] - (rest == 0 ? s.strides[i] : rest), 0);
    }
    s.padding.push_back(padding);
  }
  return s;
}

// Number of windows in each dimension.
dims_t count_windows(const sized_op& op, const dims_t& big, const dims_t& window, bool ceil) {
  const steps s = read_steps(op, big, window);
  dims_t result;
  for (size_t i = 0; i < big.size(); ++i) {
    const int64_t room = big[i] + s.padding[i] - s.reach[i];
    if (room < 0) {
      op.fail("the window " + dims_text(s.reach) + " (with dilations) is larger than the image " +
              dims_text(big) + " with its padding " + dims_text(s.padding));
    }
    result.push_back((room + (ceil ? s.strides[i] - 1 : 0)) / s.strides[i] + 1);
  }
  return result;
}

// The small image that a filter makes of a big one; a transposed convolution goes the other way,
// its O and I as well.
dims_t convolved(const sized_op& op, const dims_t& big_dims, const dims_t& weights,
                 bool transposed) {
  const image big = to_image(op, transposed ? "diff_dst" : "src", big_dims);
  const filter w = to_filter(op, weights, big_dims.size(), transposed ? "XOI" : "XIO");
  const int64_t from = transposed ? w.out : w.in, to = transposed ? w.in : w.out;
  const auto groups = op.attribute<int64_t>("groups", 1);
  if (big.channels % groups != 0 || big.channels / groups != from || to % groups != 0) {
    op.fail("weights " + dims_text(weights) + " with " + std::to_string(groups) +
            " groups do not fit " + std::to_string(big.channels) + " channels");
  }
  return to_dims(op, {big.batch, to, count_windows(op, big.spatial, w.spatial, false)});
}

sizes convolution(const sized_op& op) {
  const dims_t result = convolved(op, op.in(0), op.in(1), false);
  op.expect(2, "bias", {to_image(op, "dst", result).channels});
  return {result};
}

sizes conv_transpose(const sized_op& op) {
  const image src = to_image(op, "src", op.in(0));
  const filter w = to_filter(op, op.in(1), op.in(0).size(), "XOI");
  const auto groups = op.attribute<int64_t>("groups", 1);
  if (w.in != src.channels || w.in % groups != 0 || groups > std::max<int64_t>(w.in, 1)) {
    op.fail("weights " + dims_text(op.in(1)) + " with " + std::to_string(groups) +
            " groups do not fit " + std::to_string(src.channels) + " channels");
  }
  const steps s = read_steps(op, {}, w.spatial);
  const dims_t extra = op.list("output_padding", w.spatial.size(), 0, 0);
  image dst = {src.batch, w.out * groups, {}};
  for (size_t i = 0; i < src.spatial.size(); ++i) {
    const int64_t size = src.spatial[i];
    if (size < 1 || size > kLargest)
      op.fail("src has no or too many pixels: " + dims_text(op.in(0)));
    dst.spatial.push_back(s.strides[i] * (size - 1) + s.reach[i] - s.padding[i] + extra[i]);
    if (dst.spatial[i] < 1) op.fail("attributes pads_begin and pads_end leave nothing of dst");
  }
  op.expect(2, "bias", {dst.channels});
  return {to_dims(op, dst)};
}

// The shape that a gradient has to be told: by the output, or by an attribute.
known_dims told_shape(const sized_op& op, const char* attribute, size_t rank) {
  if (op.wanted(0)) return op.wanted(0);
  const dims_t* given = op.given_list(attribute, rank);
  if (given == nullptr) return std::nullopt;
  return op.list(attribute, rank, 0, 0);
}

sizes convolution_backward_data(const sized_op& op) {
  const known_dims src = told_shape(op, "dst_shape", op.in(0).size());
  if (src) op.expect(0, "diff_dst", convolved(op, *src, op.in(1), false));
  return {src};
}

sizes convolution_backward_weights(const sized_op& op) {
  const known_dims weights = told_shape(op, "weights_shape", op.in(0).size());
  if (weights) op.expect(1, "diff_dst", convolved(op, op.in(0), *weights, false));
  return {weights};
}

sizes conv_transpose_backward_data(const sized_op& op) {
  return {convolved(op, op.in(0), op.in(1), true)};
}

sizes conv_transpose_backward_weights(const sized_op& op) {
  const known_dims weights = told_shape(op, "weights_shape", op.in(0).size());
  if (weights) op.expect(0, "src", convolved(op, op.in(1), *weights, true));
  return {weights};
}

dims_t pooled(const sized_op& op, const dims_t& src, bool ceil) {
  const image i = to_image(op, "src", src);
  const dims_t kernel = op.list("kernel", i.spatial.size(), 1, 1);
  return to_dims(op, {i.batch, i.channels, count_windows(op, i.spatial, kernel, ceil)});
}

sizes pool(const sized_op& op) {
  return {pooled(op, op.in(0), op.text("rounding_type", "floor") == "ceil")};
}

void expect_pooled(const sized_op& op, const dims_t& src, size_t index) {
  // The forward op may have rounded up; its gradient has no attribute that says so.
  if (op.in(index) != pooled(op, src, true)) {
    op.expect(index, "diff_dst", pooled(op, src, false));
  }
}

sizes max_pool_backward(const sized_op& op) {
  expect_pooled(op, op.in(0), 1);
  return {op.in(0)};
}

sizes avg_pool_backward(const sized_op& op) {
  const known_dims src = told_shape(op, "src_shape", op.in(0).size());
  if (src) expect_pooled(op, *src, 0);
  return {src};
}

known_dims interpolated(const sized_op& op) {
  image i = to_image(op, "src", op.in(0));
  const size_t n = i.spatial.size();
  if (const auto* factors = op.attribute<std::vector<float>>("scales")) {
    if (factors->size() != n) {
      op.fail("attribute scales must have " + std::to_string(n) + " numbers, got " +
              std::to_string(factors->size()));
    }
    for (size_t k = 0; k < n; ++k) {
      const float size = static_cast<float>(i.spatial[k]) * (*factors)[k];
      if (!(size >= 1 && size <= static_cast<float>(kLargest))) {
        op.fail("attribute scales makes no image of " + dims_text(op.in(0)));
      }
      i.spatial[k] = static_cast<int64_t>(size);
    }
  } else if (op.attribute<dims_t>("sizes") != nullptr) {
    i.spatial = op.list("sizes", n, 1, 1);
  } else {
    return std::nullopt;  // the sizes are an input
  }
  return to_dims(op, i);
}

sizes interpolate(const sized_op& op) { return {interpolated(op)}; }

sizes interpolate_backward(const sized_op& op) {
  if (const known_dims dst = interpolated(op)) op.expect(1, "diff_dst", *dst);
  return {op.in(0)};
}

sizes bias_add(const sized_op& op) {
  op.expect(1, "bias", {channels_of(op)});
  return {op.in(0)};
}

sizes bias_add_backward(const sized_op& op) { return {dims_t{channels_of(op)}}; }

void check_slope(const sized_op& op) {
  const dims_t& slope = op.in(1);
  const bool vector = slope.size() == 1;
  if (vector && op.attribute<bool>("per_channel_broadcast", true)) {
    const int64_t c = channels_of(op);  // there has to be such a dimension, for a single slope too
    if (slope[0] != 1) op.expect(1, "slope", {c});
  } else {
    broadcast(op, "slope", op.in(0), slope, true);
  }
}

sizes prelu(const sized_op& op) {
  check_slope(op);
  return {op.in(0)};
}

sizes prelu_backward(const sized_op& op) {
  check_slope(op);
  op.expect(2, "diff_dst", op.in(0));
  return {op.in(0), op.in(1)};
}

// Normalisation -----------------------------------------------------------------------------------

sizes batch_norm_inference(const sized_op& op) {
  const dims_t c = {channels_of(op)};
  op.expect_dense(1, "gamma", c);
  op.expect_dense(2, "beta", c);
  op.expect_dense(3, "mean", c);
  op.expect_dense(4, "variance", c);
  return {op.in(0)};
}

sizes batch_norm_training(const sized_op& op) {
  const dims_t c = {channels_of(op)};
  op.expect_dense(1, "mean", c);
  op.expect_dense(2, "variance", c);
  op.expect_dense(3, "gamma", c);
  op.expect_dense(4, "beta", c);
  op.expect_dense_outputs(1);
  return {op.in(0), c, c, c, c};
}

sizes batch_norm_backward(const sized_op& op) {
  const dims_t c = {channels_of(op)};
  op.expect(1, "diff_dst", op.in(0));
  op.expect_dense(2, "mean", c);
  op.expect_dense(3, "variance", c);
  op.expect_dense(4, "gamma", c);
  op.expect_dense_outputs(1);
  return {op.in(0), c, c};
}

// Sizes of what a layer norm averages over, as the one dimension that gamma and beta have, and of
// what is left for its statistics.
struct norm_parts {
  dims_t inner;
  dims_t outer;
};

norm_parts layer_norm_parts(const sized_op& op) {
  const dims_t& src = op.in(0);
  const size_t begin =
      op.axis("begin_norm_axis", op.attribute<int64_t>("begin_norm_axis", -1), src.size());
  const auto middle = src.begin() + static_cast<std::ptrdiff_t>(begin);
  return {{volume_of({middle, src.end()})}, {src.begin(), middle}};
}

sizes layer_norm(const sized_op& op) {
  const norm_parts parts = layer_norm_parts(op);
  op.expect_rows(0, "src");
  op.expect_dense(1, "gamma", parts.inner);
  op.expect_dense(2, "beta", parts.inner);
  op.expect_dense_outputs(1);
  return {op.in(0), parts.outer, parts.outer};
}

sizes layer_norm_backward(const sized_op& op) {
  const norm_parts parts = layer_norm_parts(op);
  op.expect(1, "diff_dst", op.in(0));
  op.expect_rows(0, "src");
  op.expect_rows(1, "diff_dst");
  op.expect_dense(2, "mean", parts.outer);
  op.expect_dense(3, "variance", parts.outer);
  op.expect_dense(4, "gamma", parts.inner);
  op.expect_dense(5, "beta", parts.inner);
  op.expect_dense_outputs(1);
  return {op.in(0), parts.inner, parts.inner};
}

sizes group_norm(const sized_op& op) {
  const int64_t c = channels_of(op);
  const auto groups = op.attribute<int64_t>("groups", 1);
  if (c % groups != 0) {
    op.fail("attribute groups must divide the " + std::to_string(c) + " channels, got " +
            std::to_string(groups));
  }
  op.expect_dense(1, "gamma", {c});
  op.expect_dense(2, "beta", {c});
  const dims_t statistics = {op.in(0)[0], groups};
  op.expect_dense_outputs(1);
  return {op.in(0), statistics, statistics};
}

sizes softmax(const sized_op& op) {
  op.axis("axis", op.attribute<int64_t>("axis", -1), op.in(0).size());
  return all_same(op);
}

// The default axis of SoftMax is 1, unlike that of LogSoftmax.
sizes softmax_1(const sized_op& op) {
  op.axis("axis", op.attribute<int64_t>("axis", 1), op.in(0).size());
  return all_same(op);
}

// Shapes and products -----------------------------------------------------------------------------

sizes matmul(const sized_op& op) {
  op.expect_rank(0, "src", 1);
  op.expect_rank(1, "weights", 1);
  dims_t a = op.in(0), b = op.in(1);
  const bool vector_a = a.size() == 1, vector_b = b.size() == 1;
  if (op.attribute<bool>("transpose_a", false) && !vector_a) std::swap(a.end()[-1], a.end()[-2]);
  if (op.attribute<bool>("transpose_b", false) && !vector_b) std::swap(b.end()[-1], b.end()[-2]);
  if (vector_a) a.insert(a.begin(), 1);
  if (vector_b) b.push_back(1);
  if (a.end()[-1] != b.end()[-2]) {
    op.fail("weights must have " + std::to_string(a.end()[-1]) + " rows to be multiplied with " +
            dims_text(op.in(0)) + ", got " + dims_text(op.in(1)));
  }
  dims_t result =
      broadcast(op, "the batch of weights", {a.begin(), a.end() - 2}, {b.begin(), b.end() - 2});
  if (!vector_a) result.push_back(a.end()[-2]);
  if (!vector_b) result.push_back(b.end()[-1]);
  if (op.inputs() > 2) broadcast(op, "bias", result, op.in(2), true);
  return {result};
}

sizes concat(const sized_op& op) {
  dims_t result = op.in(0);
  const size_t axis = op.axis("axis", op.attribute<int64_t>("axis", 0), result.size());
  result[axis] = 0;
  for (size_t i = 0; i < op.inputs(); ++i) {
    dims_t others = op.in(i);
    if (others.size() == result.size()) others[axis] = op.in(0)[axis];
    op.expect_equal("each input, but for the axis,", others, op.in(0));
    result[axis] += op.in(i)[axis];
  }
  return {result};
}

sizes reduce(const sized_op& op) {
  const auto* axes = op.attribute<dims_t>("axes");
  if (axes == nullptr) return {std::nullopt};  // they are an input
  const dims_t& src = op.in(0);
  std::vector<bool> reduced(src.size(), false);
  for (const int64_t value : *axes) {
    const size_t axis = op.axis("axes", value, src.size());
    if (reduced[axis]) op.fail("attribute axes has a dimension twice: " + dims_text(*axes));
    reduced[axis] = true;
  }
  dims_t result;
  const bool keep = op.attribute<bool>("keep_dims", false);
  for (size_t i = 0; i < src.size(); ++i) {
    if (!reduced[i]) {
      result.push_back(src[i]);
    } else if (keep) {
      result.push_back(1);
    }
  }
  return {result};
}

sizes reshape(const sized_op& op) {
  const dims_t& src = op.in(0);
  const dims_t& shape = *op.attribute<dims_t>("shape");
  const bool copies = op.attribute<bool>("special_zero", false);
  const int64_t volume = volume_of(src);
  if (volume > kLargest)
    op.fail("src has more elements than the library counts: " + dims_text(src));
  dims_t result = shape;
  int64_t known = 1;
  int64_t* open = nullptr;
  bool good = true;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == -1) {
      good = good && open == nullptr;
      open = &result[i];
      continue;
    }
    if (shape[i] == 0 && copies) {
      good = good && i < src.size();
      if (good) result[i] = src[i];
    }
    good = good && result[i] >= 0 && !__builtin_mul_overflow(known, result[i], &known);
  }
  good = good && (open == nullptr ? known == volume : known > 0 && volume % known == 0);
  if (!good) {
    op.fail("attribute shape " + dims_text(shape) + " is no other shape of " + dims_text(src));
  }
  if (open != nullptr) *open = volume / known;
  return {result};
}

sizes transpose(const sized_op& op) {
  const dims_t& src = op.in(0);
  const dims_t& order = *op.attribute<dims_t>("order");
  std::vector<bool> seen(src.size(), false);
  dims_t result;
  for (const int64_t value : order) {
    const size_t axis = op.axis("order", value, src.size());
    if (!seen[axis]) result.push_back(src[axis]);
    seen[axis] = true;
  }
  if (order.size() != src.size() || result.size() != src.size()) {
    op.fail("attribute order must have each dimension of " + dims_text(src) + " once, got " +
            dims_text(order));
  }
  return {result};
}

sizes gen_index(const sized_op& op) {
  op.axis("axis", op.attribute<int64_t>("axis", 0), op.in(0).size());
  return same(op);
}

// Quantisation ------------------------------------------------------------------------------------

// Number of scales that the op needs.
int64_t count_scales(const sized_op& op) {
  const std::string type = op.text("qtype", "per_tensor");
  if (type == "per_tensor") return 1;
  if (type == "per_channel") {
    const dims_t& src = op.in(0);
    return src[op.axis("axis", op.attribute<int64_t>("axis", 1), src.size())];
  }
  op.fail("attribute qtype must be per_tensor or per_channel, got '" + type + "'");
}

sizes quantize(const sized_op& op) {
  const auto count = static_cast<size_t>(count_scales(op));
  const auto check = [&](const char* name, size_t got) {
    if (got != count) {
      op.fail(std::string("attribute ") + name + " must have " + std::to_string(count) +
              " numbers, got " + std::to_string(got));
    }
  };
  check("scales", op.attribute<std::vector<float>>("scales")->size());
  if (const auto* zps = op.attribute<dims_t>("zps")) check("zps", zps->size());
  return {op.in(0)};
}

sizes dynamic_quantize(const sized_op& op) {
  const dims_t& src = op.in(0);
  if (op.text("qtype", "per_tensor") == "per_group") {
    const dims_t group = op.list("group_shape", src.size(), 1, 1);
    dims_t scales = src;
    for (size_t i = 0; i < src.size(); ++i) {
      if (src[i] % group[i] != 0) {
        op.fail("attribute group_shape must divide " + dims_text(src) + ", got " +
                dims_text(group));
      }
      scales[i] /= group[i];
    }
    op.expect(1, "scales", scales);
    op.expect(2, "zps", scales);
    return {src};
  }
  const int64_t count = count_scales(op);
  for (size_t i = 1; i < op.inputs(); ++i) {
    // A scalar may have no dimension at all.
    if (count != 1 || !op.in(i).empty()) op.expect(i, i == 1 ? "scales" : "zps", {count});
  }
  return {src};
}

// The table ---------------------------------------------------------------------------------------

struct rule {
  std::string_view kind;
  sizes (*apply)(const sized_op&);
};

// By name, as a header may not have all of them. A kind that is not here (of a newer oneDNN, or one
// that computes nothing) is left to the library.
constexpr rule kRules[] = {
    {"Abs", same},
    {"AbsBackward", all_same},
    {"Add", binary},
    {"AvgPool", pool},
    {"AvgPoolBackward", avg_pool_backward},
    {"BatchNormForwardTraining", batch_norm_training},
    {"BatchNormInference", batch_norm_inference},
    {"BatchNormTrainingBackward", batch_norm_backward},
    {"BiasAdd", bias_add},
    {"BiasAddBackward", bias_add_backward},
    {"Clamp", same},
    {"ClampBackward", all_same},
    {"Concat", concat},
    {"ConvTranspose", conv_transpose},
    {"ConvTransposeBackwardData", conv_transpose_backward_data},
    {"ConvTransposeBackwardWeights", conv_transpose_backward_weights},
    {"Convolution", convolution},
    {"ConvolutionBackwardData", convolution_backward_data},
    {"ConvolutionBackwardWeights", convolution_backward_weights},
    {"Dequantize", quantize},
    {"Divide", binary},
    {"DynamicDequantize", dynamic_quantize},
    {"DynamicQuantize", dynamic_quantize},
    {"Elu", same},
    {"EluBackward", all_same},
    {"Exp", same},
    {"GELU", same},
    {"GELUBackward", all_same},
    {"GenIndex", gen_index},
    {"GreaterEqual", binary},
    {"GroupNorm", group_norm},
    {"HardSigmoid", same},
    {"HardSigmoidBackward", all_same},
    {"HardSwish", same},
    {"HardSwishBackward", all_same},
    {"Interpolate", interpolate},
    {"InterpolateBackward", interpolate_backward},
    {"LayerNorm", layer_norm},
    {"LayerNormBackward", layer_norm_backward},
    {"LeakyReLU", same},
    {"Log", same},
    {"LogSoftmax", softmax},
    {"LogSoftmaxBackward", softmax},
    {"MatMul", matmul},
    {"MaxPool", pool},
    {"MaxPoolBackward", max_pool_backward},
    {"Maximum", binary},
    {"Minimum", binary},
    {"Mish", same},
    {"MishBackward", all_same},
    {"Multiply", binary},
    {"PReLU", prelu},
    {"PReLUBackward", prelu_backward},
    {"Pow", same},
    {"Quantize", quantize},
    {"ReLU", same},
    {"ReLUBackward", all_same},
    {"Reciprocal", same},
    {"ReduceL1", reduce},
    {"ReduceL2", reduce},
    {"ReduceMax", reduce},
    {"ReduceMean", reduce},
    {"ReduceMin", reduce},
    {"ReduceProd", reduce},
    {"ReduceSum", reduce},
    {"Reorder", same},
    {"Round", same},
    {"Select", select},
    {"Sigmoid", same},
    {"SigmoidBackward", all_same},
    {"SoftMax", softmax_1},
    {"SoftMaxBackward", softmax_1},
    {"SoftPlus", same},
    {"SoftPlusBackward", all_same},
    {"Sqrt", same},
    {"SqrtBackward", all_same},
    {"Square", same},
    {"SquaredDifference", binary},
    {"StaticReshape", reshape},
    {"StaticTranspose", transpose},
    {"Subtract", binary},
    {"Tanh", same},
    {"TanhBackward", all_same},
    {"TypeCast", same},
};

// Known sizes of the logical tensors of a partition, by id.
using size_table = std::unordered_map<size_t, dims_t>;

// `wanted` may have unknown sizes, or be of unknown rank.
bool agree(const dims_t& got, const logical_tensor& wanted) {
  dims_t dims;
  try {
    dims = wanted.get_dims();
  } catch (const dnnl::error&) {
    return true;
  }
  return got.size() == dims.size() &&
         std::equal(got.begin(), got.end(), dims.begin(),
                    [](int64_t g, int64_t w) { return w == DNNL_GRAPH_UNKNOWN_DIM || g == w; });
}

// Applies the rule of one op whose inputs are all in `table`, and adds its outputs.
void check_op(const char* function, const op_record& op,
              const std::unordered_map<size_t, const logical_tensor*>& ports, size_table* table) {
  const auto rule = std::find_if(std::begin(kRules), std::end(kRules),
                                 [&](const auto& row) { return row.kind == name_of(op.kind); });
  if (rule == std::end(kRules)) return;
  const auto said = [&](const logical_tensor& lt) {
    const auto port = ports.find(lt.get_id());
    return port == ports.end() ? lt : *port->second;
  };
  std::vector<dims_t> dims;
  std::vector<logical_tensor> inputs, outputs;
  for (const auto& lt : op.inputs) {
    dims.push_back(table->at(lt.get_id()));
    inputs.push_back(said(lt));
  }
  for (const auto& lt : op.outputs) outputs.push_back(said(lt));
  const sized_op sized(function, op, std::move(dims), std::move(inputs), outputs);
  sized.check_gaps();
  const sizes result = rule->apply(sized);
  for (size_t i = 0; i < std::min(result.size(), outputs.size()); ++i) {
    if (!result[i]) continue;
    if (!volume_fits(*result[i])) {
      sized.fail_output("output " + std::to_string(i) +
                        " has more elements than fit in memory: " + dims_text(*result[i]));
    }
    if (!agree(*result[i], outputs[i])) {
      sized.fail_output("output " + std::to_string(i) + " has shape " + dims_text(*result[i]) +
                        ", got " + logical_tensor_text(outputs[i]));
    }
    table->emplace(outputs[i].get_id(), *result[i]);
  }
}

}  // namespace

bool library_before(int major, int minor) {
  const dnnl_version_t* v = dnnl_version();
  return std::pair(v->major, v->minor) < std::pair(major, minor);
}

std::vector<const op_record*> ops_of(const compile_request& request) {
  std::vector<const op_record*> result;
  for (const auto& op : request.ops) {
    if (std::find(request.ids.begin(), request.ids.end(), op.id) != request.ids.end()) {
      result.push_back(&op);
    }
  }
  return result;
}

void check_shapes(const compile_request& request) {
  size_table table;
  for (const auto& lt : request.inputs) table.emplace(lt.get_id(), lt.get_dims());
  std::unordered_map<size_t, const logical_tensor*> ports;
  for (const auto* side : {&request.inputs, &request.outputs}) {
    for (const auto& lt : *side) ports.emplace(lt.get_id(), &lt);
  }
  // Producers first; ops that nothing is known about are left over in the end.
  std::vector<const op_record*> todo = ops_of(request);
  const auto ready = [&](const op_record* op) {
    return std::all_of(op->inputs.begin(), op->inputs.end(),
                       [&](const auto& lt) { return table.count(lt.get_id()) != 0; });
  };
  for (;;) {
    const auto next = std::find_if(todo.begin(), todo.end(), ready);
    if (next == todo.end()) return;
    check_op(request.function, **next, ports, &table);
    todo.erase(next);
  }
}

}  // namespace dnnl_graph_py

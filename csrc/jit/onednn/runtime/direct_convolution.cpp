#include "jit/onednn/runtime/direct_convolution.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

#include "jit/onednn/runtime/image_rows.h"
#include "jit/onednn/runtime/shares.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kCopied = 8192;   // numbers of images at once, on the stack
constexpr int64_t kResults = 4096;  // likewise, before each channel's are brought together

int64_t copiedWidth(const DirectConvolution& c) {
  return (c.result_size[1] - 1) * c.stride[1] + c.window[1];
}

int64_t rowsUnder(const DirectConvolution& c, int64_t rows) {
  return (rows - 1) * c.stride[0] + c.window[0];
}

bool readsInPlace(const DirectConvolution& c) {
  const bool padded = c.padding != DirectConvolution::Pair{0, 0} ||
                      rowsUnder(c, c.result_size[0]) > c.size[0] || copiedWidth(c) > c.size[1];
  return !padded && (c.inputs == 1 || c.source_strides[1] == 1) && c.source_strides[3] == c.inputs;
}

// Rows of the result of one image, computed at once.
int64_t rowsAtOnce(const DirectConvolution& c) {
  auto most = c.result_size[0];
  if (!readsInPlace(c)) {
    const auto under = kCopied / (copiedWidth(c) * c.inputs);
    most = std::min(most, (under - c.window[0]) / c.stride[0] + 1);
  }
  if (!c.isChannelsLast()) {
    most = std::min(most, kResults / (c.result_size[1] * c.outputs));
  }
  return most;
}

// Numbers of the weight, as they lie in panels but for vectors of zeros alone.
int64_t weightsOf(const DirectConvolution& c) {
  const auto width = Linear::kernels().panel / 2;  // of a vector
  return c.matrix().inputs * at::round_up(c.outputs, width);
}

// Beyond, oneDNN's kernels are as fast or faster, but for few planes.
bool isSmall(const DirectConvolution& c) {
  constexpr int64_t kMostProducts = 1 << 20;
  return c.images * c.result_size[0] * c.result_size[1] * weightsOf(c) <= kMostProducts;
}

// Computes rows of the result of one image.
class Block {
 public:
  Block(const DirectConvolution& c, const DirectConvolution::Data& data)
      : c_(c), data_(data), matrix_(c.matrix()) {}

  void run(int64_t image, int64_t first, int64_t rows) {
    alignas(64) float copied[kCopied];
    alignas(64) float results[kResults];
    const auto* source =
        data_.source + image * c_.source_strides[0] + first * c_.stride[0] * c_.source_strides[2];
    auto row_stride = c_.source_strides[2];
    if (!readsInPlace(c_)) {
      row_stride = copiedWidth(c_) * c_.inputs;
      const ImageRows image_rows{c_.size, c_.inputs, c_.source_strides, c_.padding[1],
                                 copiedWidth(c_)};
      image_rows.copy(data_.source + image * c_.source_strides[0],
                      first * c_.stride[0] - c_.padding[0], rowsUnder(c_, rows), copied);
      source = copied;
    }
    const bool in_place = c_.isChannelsLast();
    const auto pixel = (image * c_.result_size[0] + first) * c_.result_size[1];
    auto* result = in_place ? data_.result + pixel * c_.outputs : results;
    multiply(source, row_stride, rows,
             data_.addend != nullptr ? data_.addend + pixel * c_.outputs : nullptr, result);
    if (c_.silu) {
      const auto numbers = rows * c_.result_size[1] * c_.outputs;
      vector_loops::functions<float>().activate(Activation::silu, result, result, numbers);
    }
    if (!in_place) {
      transpose(results, rows * c_.result_size[1], c_.outputs, c_.outputs,
                data_.result + image * c_.result_strides[0] + first * c_.result_strides[2],
                c_.result_strides[1]);
    }
  }

 private:
  void multiply(const float* source, int64_t row_stride, int64_t rows, const float* addend,
                float* result) const {
    const auto width = c_.result_size[1];
    const auto pixel_stride = c_.stride[1] * c_.inputs;
    gemm::Problem problem{
        width,      matrix_.inputs, matrix_.outputs, c_.rectifier,
        source,     pixel_stride,   data_.weight,    matrix_.inputs * Linear::kernels().panel,
        data_.bias, addend,         result,          c_.window[0],
        row_stride};
    if (c_.stride[0] * row_stride == width * pixel_stride) {  // as if it were one row
      problem.rows *= rows;
      rows = 1;
    }
    for (int64_t y = 0; y < rows; ++y) {
      Linear::kernels().run(problem, {0, problem.rows, 0, problem.outputs});
      problem.source += c_.stride[0] * row_stride;
      problem.result += width * c_.outputs;
      if (addend != nullptr) {
        problem.addend += width * c_.outputs;
      }
    }
  }

  const DirectConvolution& c_;
  const DirectConvolution::Data& data_;
  const Linear matrix_;
};

}  // namespace

bool DirectConvolution::isSupported() const {
  // oneDNN's kernels are as fast or faster with weights that do not stay in the first levels of
  // cache while each row of the result reads them, with short sums, or few outputs.
  constexpr int64_t kMostWeights = 1 << 14;
  constexpr int64_t kMostOfPlanes = 1 << 11;  // weights
  constexpr int64_t kShortest = 8;
  const auto weights = weightsOf(*this);
  // One thread of oneDNN takes no longer to bring planes into its order, but for SiLU behind.
  const bool slow = silu || at::get_num_threads() > 1;
  const bool planes =
      inputs > 1 && inputs <= ImageRows::kFewPlanes && weights <= kMostOfPlanes && slow;
  return images * result_size[0] * result_size[1] > 0 && (planes || isSmall(*this)) &&
         weights <= kMostWeights && weights <= 2 * matrix().inputs * outputs &&
         window[1] * inputs >= kShortest && window[0] * copiedWidth(*this) * inputs <= kCopied;
}

bool DirectConvolution::fits() const {
  return isChannelsLast() || (isSmall(*this) && result_size[1] * outputs <= kResults);
}

Linear DirectConvolution::matrix() const {
  return {result_size[1], window[0] * window[1] * inputs, outputs, rectifier};
}

bool DirectConvolution::isChannelsLast() const {
  const auto row = result_size[1] * outputs;
  return result_strides == Strides{result_size[0] * row, 1, row, outputs};
}

void DirectConvolution::run(const Data& data) const {
  constexpr int64_t kForOne = 1 << 18;  // products that are not worth a second thread
  const auto rows = images * result_size[0];
  const auto products = rows * result_size[1] * matrix().inputs * outputs;
  const auto parts =
      std::clamp<int64_t>(std::min<int64_t>(at::get_num_threads(), products / kForOne), 1, rows);
  const auto at_once = rowsAtOnce(*this);
  forShares(rows, 1, parts, [&](int64_t row, int64_t last) {
    Block block(*this, data);
    while (row < last) {
      const auto y = row % result_size[0];
      const auto count = std::min({at_once, result_size[0] - y, last - row});
      block.run(row / result_size[0], y, count);
      row += count;
    }
  });
}

}  // namespace llga

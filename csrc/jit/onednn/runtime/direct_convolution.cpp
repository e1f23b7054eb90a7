#include "jit/onednn/runtime/direct_convolution.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

#include "jit/onednn/runtime/image_rows.h"
#include "jit/onednn/runtime/shares.h"
#include "jit/onednn/runtime/transposition.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kCopied = 8192;      // numbers of images at once, on the stack
constexpr int64_t kResults = 4096;     // likewise, before each channel's are brought together
constexpr int64_t kFewestColumns = 8;  // of a row of the result, that are worth a product

// Under so many columns of the result.
int64_t copiedWidth(const DirectConvolution& c, int64_t columns) {
  return (columns - 1) * c.stride[1] + c.window[1];
}

int64_t rowsUnder(const DirectConvolution& c, int64_t rows) {
  return (rows - 1) * c.stride[0] + c.window[0];
}

bool readsInPlace(const DirectConvolution& c) {
  const bool padded = c.padding != DirectConvolution::Pair{0, 0} ||
                      rowsUnder(c, c.result_size[0]) > c.size[0] ||
                      copiedWidth(c, c.result_size[1]) > c.size[1];
  return !padded && (c.inputs == 1 || c.source_strides[1] == 1) && c.source_strides[3] == c.inputs;
}

// Numbers that are copied for so many columns of a row of the result.
int64_t copiedFor(const DirectConvolution& c, int64_t columns) {
  return c.window[0] * copiedWidth(c, columns) * c.inputs;
}

// Columns of a row of the result, computed at once.
int64_t columnsAtOnce(const DirectConvolution& c) {
  auto most = c.result_size[1];
  if (!readsInPlace(c)) {
    most = std::min(most, (kCopied / (c.window[0] * c.inputs) - c.window[1]) / c.stride[1] + 1);
  }
  return c.isChannelsLast() ? most : std::min(most, kResults / c.outputs);
}

// Rows of the result of one image, computed at once, of all columns.
int64_t rowsAtOnce(const DirectConvolution& c) {
  auto most = c.result_size[0];
  if (!readsInPlace(c)) {
    const auto under = kCopied / (copiedWidth(c, c.result_size[1]) * c.inputs);
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

// Computes rows of the result of one image, or some columns of one row.
class Block {
 public:
  Block(const DirectConvolution& c, const DirectConvolution::Data& data)
      : c_(c), data_(data), matrix_(c.matrix()) {}

  void run(int64_t image, int64_t first, int64_t rows, int64_t column, int64_t columns) {
    alignas(64) float copied[kCopied];
    alignas(64) float results[kResults];
    const auto* source = data_.source + image * c_.source_strides[0] +
                         first * c_.stride[0] * c_.source_strides[2] +
                         column * c_.stride[1] * c_.source_strides[3];
    auto row_stride = c_.source_strides[2];
    if (!readsInPlace(c_)) {
      const auto width = copiedWidth(c_, columns);
      row_stride = width * c_.inputs;
      const ImageRows image_rows{c_.size, c_.inputs, c_.source_strides,
                                 c_.padding[1] - column * c_.stride[1], width};
      image_rows.copy(data_.source + image * c_.source_strides[0],
                      first * c_.stride[0] - c_.padding[0], rowsUnder(c_, rows), copied);
      source = copied;
    }
    const bool in_place = c_.isChannelsLast();
    const auto pixel = (image * c_.result_size[0] + first) * c_.result_size[1] + column;
    auto* result = in_place ? data_.result + pixel * c_.outputs : results;
    multiply(source, row_stride, rows, columns,
             data_.addend != nullptr ? data_.addend + pixel * c_.outputs : nullptr, result);
    if (c_.silu) {
      const auto numbers = rows * columns * c_.outputs;
      vector_loops::functions<float>().activate(Activation::silu, result, result, numbers);
    }
    if (!in_place) {
      transpose(results, rows * columns, c_.outputs, c_.outputs,
                data_.result + image * c_.result_strides[0] + first * c_.result_strides[2] + column,
                c_.result_strides[1]);
    }
  }

 private:
  void multiply(const float* source, int64_t row_stride, int64_t rows, int64_t columns,
                const float* addend, float* result) const {
    const auto pixel_stride = c_.stride[1] * c_.inputs;
    gemm::Problem problem{
        columns,    matrix_.inputs, matrix_.outputs, c_.rectifier,
        source,     pixel_stride,   data_.weight,    matrix_.inputs * Linear::kernels().panel,
        data_.bias, addend,         result,          c_.window[0],
        row_stride};
    if (c_.stride[0] * row_stride == columns * pixel_stride) {  // as if it were one row
      problem.rows *= rows;
      rows = 1;
    }
    for (int64_t y = 0; y < rows; ++y) {
      Linear::kernels().run(problem, {0, problem.rows, 0, problem.outputs});
      problem.source += c_.stride[0] * row_stride;
      problem.result += columns * c_.outputs;
      if (addend != nullptr) {
        problem.addend += columns * c_.outputs;
      }
    }
  }

  const DirectConvolution& c_;
  const DirectConvolution::Data& data_;
  const Linear matrix_;
};

}  // namespace

bool DirectConvolution::isSupported() const {
  constexpr int64_t kMostWeights = 1 << 16;
  constexpr int64_t kShortest = 8;
  const auto weights = weightsOf(*this);
  const auto columns = std::min(result_size[1], kFewestColumns);
  return images * result_size[0] * result_size[1] > 0 && weights <= kMostWeights &&
         weights <= 2 * matrix().inputs * outputs && window[1] * inputs >= kShortest &&
         copiedFor(*this, columns) <= kCopied;
}

bool DirectConvolution::pays() const {
  // oneDNN's kernels are as fast or faster with weights that do not stay in the first levels of
  // cache while each row of the result reads them, with short sums, or few outputs.
  constexpr int64_t kMostWeights = 1 << 14;
  constexpr int64_t kMostOfPlanes = 1 << 11;  // weights
  const auto weights = weightsOf(*this);
  // One thread of oneDNN takes no longer to bring planes into its order, but for SiLU behind.
  const bool slow = silu || at::get_num_threads() > 1;
  const bool planes =
      inputs > 1 && inputs <= ImageRows::kFewPlanes && weights <= kMostOfPlanes && slow;
  return (planes || isSmall()) && weights <= kMostWeights &&
         copiedFor(*this, result_size[1]) <= kCopied;
}

bool DirectConvolution::isSmall() const {
  constexpr int64_t kMostProducts = 1 << 20;
  return images * result_size[0] * result_size[1] * weightsOf(*this) <= kMostProducts;
}

bool DirectConvolution::isWide() const {
  constexpr int64_t kWide = 8;
  return inputs <= ImageRows::kFewPlanes && window[1] >= kWide;
}

bool DirectConvolution::fits() const {
  const auto columns = isWide() ? std::min(result_size[1], kFewestColumns) : result_size[1];
  return isChannelsLast() || ((isWide() || isSmall()) && columns * outputs <= kResults);
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
  const auto width = result_size[1];
  const auto rows = images * result_size[0];
  const auto products = rows * width * matrix().inputs * outputs;
  const auto threads = std::clamp<int64_t>(products / kForOne, 1, at::get_num_threads());
  // Fewer rows than threads: those share the columns.
  const auto columns =
      std::min(columnsAtOnce(*this), at::ceil_div(width, at::ceil_div(threads, rows)));
  const auto tiles = at::ceil_div(width, columns);
  const auto at_once = tiles == 1 ? rowsAtOnce(*this) : 1;
  const auto units = rows * tiles;
  forShares(units, 1, std::min(threads, units), [&](int64_t unit, int64_t last) {
    Block block(*this, data);
    while (unit < last) {
      const auto row = unit / tiles;
      const auto y = row % result_size[0];
      const auto column = unit % tiles * columns;
      const auto count = tiles == 1 ? std::min({at_once, result_size[0] - y, last - unit}) : 1;
      block.run(row / result_size[0], y, count, column, std::min(columns, width - column));
      unit += count;
    }
  });
}

}  // namespace llga

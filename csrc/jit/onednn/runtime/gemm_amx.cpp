// Compiled for AVX-512 (F, BW, VL, BF16) and AMX (bfloat16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/band_kernel.h"
#include "jit/onednn/runtime/gemm_kernel.h"
// Behind it.
#include "jit/onednn/runtime/gemm_finish.h"

namespace llga::gemm {
namespace {

struct Products {
  template <int sums>
  [[gnu::always_inline]] static void multiply() {
    if constexpr (sums == 0) {
      _tile_dpbf16ps(0, 4, 6);
    } else if constexpr (sums == 1) {
      _tile_dpbf16ps(1, 4, 7);
    } else if constexpr (sums == 2) {
      _tile_dpbf16ps(2, 5, 6);
    } else {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

static_assert(kPanel == amx::kMostOutputs);
constexpr int64_t kPair = 2 * sizeof(Bfloat16);  // bytes

// Whether sums are the result as they are.
bool isPlain(const ProblemOf<Bfloat16, Bfloat16>& /*problem*/) { return false; }
bool isPlain(const ProblemOf<Bfloat16, float>& problem) {
  return problem.bias == nullptr && problem.addend == nullptr &&
         problem.rectifier == Rectifier::none;
}

// Rows that meet a panel's weights one block after the other stay in the second level of cache
// until they meet the next panel's.
constexpr int64_t kSource = 3 << 18;  // bytes

template <typename R>
class Multiplication {
 public:
  Multiplication(const ProblemOf<Bfloat16, R>& problem, const Task& task, Finish<R> finish)
      : p_(problem),
        end_(task.first_output + task.outputs),
        steps_(amx::stepsOf(p_.inputs * int64_t{sizeof(Bfloat16)})),
        finish_(finish),
        rows_at_once_(amx::rowsBetween(steps_.count)) {}

  // Rows by a panel of outputs.
  void run(int64_t row, int64_t rows, int64_t o) {
    const auto* weight = p_.weight + o / kPanel * p_.weight_stride;
    const auto left = end_ - o;
    amx::Shape shape{0, left < kPanel ? left : kPanel, steps_.bytes};
    const auto stride = p_.source_stride * int64_t{sizeof(Bfloat16)};
    amx::Operands operands{nullptr, stride,         amx::kRows * stride,
                           weight,  kPanel * kPair, kWidth * kPair};
    if (steps_.rest != 0) {
      rest_.copyWeight(operands, steps_, shape.outputs);
    }
    const auto between = [this] {
      if (open_.rows.any()) {
        finishSome();
      }
    };
    const auto blocks = (rows + amx::kMostRows - 1) / amx::kMostRows;
    amx::Fetched fetched{reinterpret_cast<const char*>(weight + p_.weight_stride), 0};
    if (p_.outputs - o > kPanel) {  // if not of this task, then mostly of the thread's next
      const auto lines = p_.inputs * kPanel * int64_t{sizeof(Bfloat16)} / amx::kRowBytes;
      const auto each = blocks * steps_.count;
      fetched.lines = (lines + each - 1) / each;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const auto first = row + b * amx::kMostRows;
      shape.rows = row + rows - first < amx::kMostRows ? row + rows - first : amx::kMostRows;
      configuration_.load(shape);
      amx::startWithZero(shape);
      const auto* source = p_.source + first * p_.source_stride;
      operands.source = source;
      operands.weight = weight;
      amx::accumulate<Products>(operands, steps_.count, shape, fetched, between);
      fetched.from += fetched.lines * steps_.count * amx::kRowBytes;
      if (steps_.rest != 0) {
        operands.source = source;
        amx::accumulateRest<Products>(operands, steps_, shape, rest_);
      }
      if (isPlain(p_)) {
        amx::store(p_.result + first * p_.outputs + o, p_.outputs * int64_t{sizeof(R)}, shape);
        continue;
      }
      finish();
      amx::store(sums_, kRowSums, shape);
      open_ = {amx::OpenRows(shape.rows), first, o, shape.outputs};
    }
  }

  // What follows the sums of the last block.
  void finish() {
    while (open_.rows.any()) {
      finishSome();
    }
  }

 private:
  // A block whose sums are stored: what follows them is computed while those of the next one are
  // added up.
  struct Open {
    amx::OpenRows rows;
    int64_t row;
    int64_t output;
    int64_t outputs;
  };

  void finishSome() {
    const auto some = open_.rows.take(rows_at_once_);
    finish_(p_, {open_.row + some.first, some.count, open_.output, open_.outputs},
            sums_ + some.first * kPanel);
  }

  static constexpr int64_t kRowSums = kPanel * sizeof(float);  // bytes

  const ProblemOf<Bfloat16, R>& p_;
  int64_t end_;  // of the outputs
  amx::Steps steps_;
  Finish<R> finish_;
  int64_t rows_at_once_;  // that are finished
  Open open_{};
  amx::Configuration configuration_;
  amx::Rest rest_;
  alignas(amx::kRowBytes) float sums_[amx::kMostRows * kPanel];
};

template <typename R>
void runByTiles(const ProblemOf<Bfloat16, R>& p, const Task& task, Finish<R> finish) {
  Multiplication<R> multiplication(p, task, finish);
  const auto blocks = (task.rows + amx::kMostRows - 1) / amx::kMostRows;
  const auto parts = task.rows * p.source_stride * int64_t{sizeof(Bfloat16)} / kSource + 1;
  const auto most = (blocks + parts - 1) / parts * amx::kMostRows;
  for (int64_t row = 0; row < task.rows; row += most) {
    const auto rows = task.rows - row < most ? task.rows - row : most;
    for (int64_t o = 0; o < task.outputs; o += kPanel) {
      multiplication.run(task.first_row + row, rows, task.first_output + o);
    }
  }
  multiplication.finish();
}

template <typename R>
void run(const ProblemOf<Bfloat16, R>& p, const Task& task) {
  if (p.pieces == 1) {
    runByTiles<R>(p, task, finishRows<Identity, R>);
  } else {
    runTask(p, task);
  }
}

void runActivated(const ProblemOf<Bfloat16, Bfloat16>& p, const Task& task, Activation activation) {
  runByTiles<Bfloat16>(p, task, finishWith(activation));
}

void multiplyBand(const ProblemOf<Bfloat16, Bfloat16>& p, const amx::Band& band,
                  int64_t first_output, int64_t outputs, const Activation* activation) {
  const auto finish =
      activation != nullptr ? finishWith(*activation) : finishRows<Identity, Bfloat16>;
  const auto row = p.inputs * int64_t{sizeof(Bfloat16)};  // of the weight
  const amx::Panels panels{reinterpret_cast<const char*>(p.weight) + first_output * row,
                           amx::kMostOutputs * row,
                           amx::kRowBytes,
                           amx::kOutputs * row,
                           outputs,
                           p.outputs - first_output - outputs};
  amx::multiplyBand<Products, float>(
      band, panels, [&](int64_t row, int64_t rows, int64_t o, int64_t count, const float* sums) {
        finish(p, {row, rows, first_output + o, count}, sums);
      });
}

}  // namespace

const NarrowKernels amx{"amx_bf16",    kPanel,       amx::kMostRows, run<float>,
                        run<Bfloat16>, runActivated, multiplyBand};

}  // namespace llga::gemm

// Compiled for AVX-512 (F, BW, VL, BF16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/gemm_kernel.h"
// Behind it.
#include "jit/onednn/runtime/gemm_finish.h"

namespace llga::gemm {
namespace {

// Sums that are finished while the first level of cache holds them: those of some rows by a panel.
constexpr auto kFinished = int64_t{4} * kRows;  // rows

// `finish` follows the sums of each block of rows, whose source is in one piece.
void runAndFinish(const ProblemOf<Bfloat16, Bfloat16>& p, const Task& task,
                  Finish<Bfloat16> finish) {
  alignas(64) float sums[kFinished * kPanel];
  const auto end = task.first_output + task.outputs;
  const auto panel_bytes = p.inputs * kPanel * int64_t{sizeof(Bfloat16)};
  constexpr auto kStep = kPanel * kTogether<Bfloat16> * int64_t{sizeof(Bfloat16)};
  const auto blocks = (task.rows + kBlock - 1) / kBlock;
  for (int64_t block = 0; block < blocks; ++block) {
    const auto first = task.first_row + task.rows * block / blocks;
    const auto count = task.first_row + task.rows * (block + 1) / blocks - first;
    const auto parts = (count + kFinished - 1) / kFinished;
    for (auto o = task.first_output; o < end; o += kPanel) {
      const auto outputs = end - o < kPanel ? end - o : kPanel;
      const auto* weight = p.weight + o / kPanel * p.weight_stride;
      // The panel behind the task's last one is mostly the first one of the thread's next.
      const bool another = o + kPanel < p.outputs && p.inputs * p.outputs > kNear;
      FetchAhead ahead(another ? weight + p.weight_stride : nullptr, panel_bytes, kStep,
                       tilesOf(count));
      ProblemOf<Bfloat16, float> part{count,   p.inputs,        kPanel, Rectifier::none,
                                      nullptr, p.source_stride, weight, p.weight_stride,
                                      nullptr, nullptr,         sums};
      for (int64_t i = 0; i < parts; ++i) {
        const auto row = first + count * i / parts;
        const auto rows = first + count * (i + 1) / parts - row;
        part.source = p.source + row * p.source_stride;
        runTiles(part, 0, rows, 0, outputs, ahead);
        finish(p, {row, rows, o, outputs}, sums);
      }
    }
  }
}

void run(const ProblemOf<Bfloat16, Bfloat16>& p, const Task& task) {
  if (p.factor != nullptr) {
    runAndFinish(p, task, finishRows<Identity, Bfloat16>);
  } else {
    runTask(p, task);
  }
}

void runActivated(const ProblemOf<Bfloat16, Bfloat16>& p, const Task& task, Activation activation) {
  runAndFinish(p, task, finishWith(activation));
}

}  // namespace

const NarrowKernels avx512_bf16{"avx512_bf16", kPanel,       kRows,  runTask<Bfloat16, float>,
                                run,           runActivated, nullptr};

}  // namespace llga::gemm

#include "jit/onednn/runtime/linear.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga {

using gemm::avx2;

std::vector<int64_t> Linear::weightSizes() const {
  return {(outputs + avx2.panel - 1) / avx2.panel, inputs, avx2.panel};
}

void Linear::toPanels(const at::Tensor& weight, const at::Tensor& panels) const {
  const auto sizes = weightSizes();
  const auto missing = sizes[0] * avx2.panel - outputs;
  const auto whole = missing == 0 ? weight : at::constant_pad_nd(weight, {0, missing});
  panels.copy_(whole.reshape({inputs, sizes[0], avx2.panel}).transpose(0, 1));
}

void Linear::run(const Data& data) const {
  constexpr int64_t kForOne = 1 << 18;  // products that are not worth a second thread
  constexpr int64_t kFewRows = 256;     // then each thread takes some outputs of all of them
  const gemm::Problem problem{rows,        inputs,      outputs,     relu,
                              data.source, inputs,      data.weight, inputs * avx2.panel,
                              data.bias,   data.addend, data.result};
  const auto panels = weightSizes()[0];
  const bool by_outputs = rows <= kFewRows;
  const auto units = by_outputs ? panels : rows;
  const auto wanted = std::min<int64_t>(at::get_num_threads(), rows * inputs * outputs / kForOne);
  const auto parts = std::clamp<int64_t>(wanted, 1, units);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    const auto from = units * first / parts;
    const auto to = units * last / parts;
    const gemm::Task task = by_outputs
                                ? gemm::Task{0, rows, from * avx2.panel,
                                             std::min(to * avx2.panel, outputs) - from * avx2.panel}
                                : gemm::Task{from, to - from, 0, outputs};
    avx2.run(problem, task);
  });
}

}  // namespace llga

#include "jit/onednn/runtime/layout.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/thread_exit.h"

namespace llga {

using dnnl::graph::logical_tensor;

Layout layoutOf(const at::Tensor& tensor, size_t id) {
  auto sizes = tensor.sizes().vec();
  auto strides = tensor.strides().vec();
  if (sizes.empty()) {
    sizes = strides = {1};
  }
  return logical_tensor(id, *toDataType(tensor.scalar_type()), sizes, strides);
}

std::vector<int64_t> channelsLastStrides(const std::vector<int64_t>& sizes) {
  switch (sizes.size()) {
    case 4:
      return c10::get_channels_last_strides_2d(sizes);
    case 5:
      return c10::get_channels_last_strides_3d(sizes);
    default:
      return {};
  }
}

bool areSameStrides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                    const std::vector<int64_t>& others) {
  for (const auto i : c10::irange(sizes.size())) {
    if (sizes[i] != 1 && strides[i] != others[i]) {
      return false;
    }
  }
  return true;
}

std::vector<int64_t> canonicalStrides(const std::vector<int64_t>& sizes,
                                      const std::vector<int64_t>& strides) {
  auto contiguous = c10::TensorType::contiguousStridesOf(sizes);
  if (areSameStrides(sizes, strides, contiguous)) {
    return contiguous;
  }
  auto channels_last = channelsLastStrides(sizes);
  return !channels_last.empty() && areSameStrides(sizes, strides, channels_last) ? channels_last
                                                                                 : strides;
}

bool hasGaps(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (const auto i : c10::irange(sizes.size())) {
    if (sizes[i] != 1) {
      dims.emplace_back(strides[i], sizes[i]);
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t end = 1;
  bool gaps = false;
  for (const auto& [stride, size] : dims) {
    if (stride < end) {
      return false;
    }
    gaps = gaps || stride > end;
    end = stride * size;
  }
  return gaps;
}

bool isOpaque(const Layout& layout) {
  return layout.get_layout_type() == logical_tensor::layout_type::opaque;
}

Layout withId(const Layout& from, size_t id) {
  if (isOpaque(from)) {
    return logical_tensor(id, from.get_data_type(), from.get_dims(), from.get_layout_id(),
                          from.get_property_type());
  }
  return logical_tensor(id, from.get_data_type(), from.get_dims(), from.get_strides(),
                        from.get_property_type());
}

void copyToPlain(const Layout& layout, const void* source, const at::Tensor& plain) {
  if (plain.scalar_type() == at::kChar) {  // no Reorder takes 8 bit; Dequantize does
    const auto floats = at::empty_like(plain, at::TensorOptions().dtype(at::kFloat));
    copyToPlain(layout, source, floats);
    plain.copy_(floats);
    return;
  }
  const auto input = withId(layout, 0);
  const auto output = layoutOf(plain, 1);
  const bool widens = layout.get_data_type() == DataType::s8;
  dnnl::graph::op op(0, widens ? OpKind::Dequantize : OpKind::Reorder, {input}, {output}, "unpack");
  if (widens) {
    op.set_attr<std::vector<float>>(Attr::scales, {1.F});
    op.set_attr<std::vector<int64_t>>(Attr::zps, {0});
  }
  const dnnl::graph::partition partition(op, dnnl::engine::kind::cpu);
  const auto compiled = partition.compile({input}, {output}, engine());
  const ExecutingThread thread(KeptArguments::usual());
  compiled.execute(stream(), {dnnl::graph::tensor(input, engine(), const_cast<void*>(source))},
                   {dnnl::graph::tensor(output, engine(), plain.data_ptr())});
}

}  // namespace llga

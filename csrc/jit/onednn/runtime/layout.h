// Memory layouts as oneDNN Graph's logical tensors. Slow path only; any thread may call.
#pragma once

#include <ATen/core/Tensor.h>
#include <oneapi/dnnl/dnnl_graph.hpp>

namespace llga {

using Layout = dnnl::graph::logical_tensor;

// The layout of a plain tensor; a 0-dim tensor is its one element.
Layout layoutOf(const at::Tensor& tensor, size_t id = 0);

// The strides of dense channels-last memory; none (empty) unless there are 4 or 5 dimensions.
std::vector<int64_t> channelsLastStrides(const std::vector<int64_t>& sizes);

// Whether numbers of a tensor of these sizes lie in the same places: the strides of dimensions of
// size 1 are arbitrary.
bool areSameStrides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                    const std::vector<int64_t>& others);

// Strides of dimensions of size 1 as contiguous or channels-last memory has them, where the others
// fit. They are arbitrary in PyTorch, and oneDNN chooses some itself that its binary kernels read
// wrongly: it recognises a format by all.
std::vector<int64_t> canonicalStrides(const std::vector<int64_t>& sizes,
                                      const std::vector<int64_t>& strides);

// Whether there is memory between a tensor's numbers, each of which has a place of its own, as in a
// slice. False for a dense tensor, an expanded one, and one whose numbers overlap.
bool hasGaps(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

// `from` under another id.
Layout withId(const Layout& from, size_t id);

bool isOpaque(const Layout& layout);

// Copies `source`, which lies in `layout` (maybe an opaque one), into a plain tensor, by a Reorder
// partition. The other direction does not exist on CPU: oneDNN (3.2 to 3.7) makes every output of
// a partition plain, whatever layout was asked for. Throws dnnl::error.
void copyToPlain(const Layout& layout, const void* source, const at::Tensor& plain);

}  // namespace llga

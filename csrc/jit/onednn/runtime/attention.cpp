#include "jit/onednn/runtime/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/attention_blocks.h"

namespace llga {
namespace {

using attention::kKeys;
using attention::kQueries;

template <typename T>
const T* at(const void* data, const Attention::Strides& strides, int64_t batch, int64_t head) {
  return static_cast<const T*>(data) + batch * strides.batch + head * strides.head;
}

attention::Mask maskOf(const Attention::Mask& mask, const void* data, int64_t batch, int64_t head) {
  attention::Mask one{};
  one.stride = mask.strides.row;
  one.chosen_is = mask.chosen_is;
  one.replacement = mask.replacement;
  const auto element = mask.period != 0 ? batch % mask.period : batch;
  switch (mask.kind) {
    case Attention::Mask::Kind::none:
      break;
    case Attention::Mask::Kind::allowed:
      one.allowed = at<bool>(data, mask.strides, element, head);
      break;
    case Attention::Mask::Kind::chosen:
      one.chosen = at<bool>(data, mask.strides, element, head);
      break;
    case Attention::Mask::Kind::added_float32:
      one.added = at<float>(data, mask.strides, element, head);
      break;
    case Attention::Mask::Kind::added_bfloat16:
      one.added_narrow = at<Bfloat16>(data, mask.strides, element, head);
      break;
  }
  return one;
}

// Of one head; T may be const.
template <typename T, typename Memory>
attention::Rows<T> rowsOf(Memory* data, const Attention::Place& place, int64_t rows, int64_t batch,
                          int64_t head) {
  auto* first = static_cast<T*>(data) + place.first + head * place.strides.head;
  if (place.rows.empty()) {
    return {first + batch * place.strides.batch, place.strides.row, nullptr};
  }
  return {first, 0, place.rows.data() + batch * rows};
}

float headScale(const Attention& all, int64_t head) {
  return all.head_scales.empty() ? 1 : all.head_scales[static_cast<size_t>(head)];
}

template <typename T>
attention::Head<T> headOf(const Attention& all, const Attention::Data& data, int64_t index) {
  const auto batch = index / all.heads;
  const auto head = index % all.heads;
  const auto key_head = head / (all.heads / all.key_heads);
  attention::Head<T> one{all.queries,
                         all.keys,
                         all.size,
                         all.value_size,
                         all.scale * data.factor * headScale(all, head),
                         all.least_query_norm,
                         all.least_key_norm,
                         all.causal,
                         all.key_across,
                         all.safe,
                         rowsOf<const T>(data.query, all.query, all.queries, batch, head),
                         rowsOf<const T>(data.key, all.key, all.keys, batch, key_head),
                         rowsOf<const T>(data.value, all.value, all.keys, batch, key_head),
                         {},
                         rowsOf<T>(data.result, all.result, all.queries, batch, head)};
  for (size_t i = 0; i < all.masks.size(); ++i) {
    one.masks[i] = maskOf(all.masks[i], data.masks[i], batch, head);
  }
  return one;
}

// A query alone reads keys where they lie, as they are.
bool readsInPlace(const Attention& all) {
  return all.queries == 1 && !all.key_across && all.least_query_norm < 0 && all.least_key_norm < 0;
}

// Numbers in each piece of a workspace; all begin a line of cache.
struct Pieces {
  explicit Pieces(const Attention& all) {
    const auto panels = [&](int64_t count) {
      return attention::wholePanels(count, all.kernels->panel);
    };
    const auto whole = panels(all.keys);
    if (readsInPlace(all)) {
      scores = whole;
      return;
    }
    keys = whole * all.size;
    values = all.keys * panels(all.value_size);
    query = panels(kQueries * all.size);
    scores = kQueries * std::min(whole, kKeys);
    sums = panels(kQueries * all.value_size);
  }

  int64_t all() const { return keys + values + query + scores + sums; }
  attention::Workspace over(float* memory) const {
    auto take = [&](int64_t numbers) {
      auto* taken = memory;
      memory += numbers;
      return taken;
    };
    return {take(keys), take(values), take(query), take(scores), take(sums)};
  }

  int64_t keys = 0;
  int64_t values = 0;
  int64_t query = 0;
  int64_t scores = 0;
  int64_t sums = 0;
};

static_assert(Attention::kMasks == attention::kMasks);

template <typename T>
void runAs(const Attention& all, const attention::Functions<T>& functions,
           const Attention::Data& data) {
  constexpr int64_t kForOne = 1 << 18;  // products that are not worth a second thread
  const auto blocks = (all.queries + kQueries - 1) / kQueries;
  const auto units = all.batch * all.heads * blocks;
  const auto products =
      all.batch * all.heads * all.queries * all.keys * (all.size + all.value_size);
  const auto worth = std::clamp<int64_t>(products / kForOne, 1, at::get_num_threads());
  const auto parts = std::min(worth, units);
  const Pieces pieces(all);
  const auto memory = arena()->allocate(static_cast<size_t>(parts * pieces.all()) * sizeof(float));
  at::parallel_for(0, parts, 1, [&](int64_t first_part, int64_t last_part) {
    for (auto part = first_part; part < last_part; ++part) {
      const auto workspace = pieces.over(static_cast<float*>(memory.get()) + part * pieces.all());
      int64_t packed = -1;
      bool finite = false;
      for (auto unit = units * part / parts; unit < units * (part + 1) / parts; ++unit) {
        const auto head = headOf<T>(all, data, unit / blocks);
        if (readsInPlace(all)) {
          functions.attendAlone(head, workspace.scores);
          continue;
        }
        const auto key_head = unit / blocks / (all.heads / all.key_heads);
        if (key_head != packed) {
          finite = functions.pack(head, workspace);
          packed = key_head;
        }
        const auto block = unit % blocks;
        const auto first = all.queries * block / blocks;
        functions.attend(head, workspace, finite, first,
                         all.queries * (block + 1) / blocks - first);
      }
    }
  });
}

}  // namespace

void Attention::run(const Data& data) const {
  if (type == Type::float32) {
    runAs(*this, kernels->wide, data);
  } else {
    runAs(*this, kernels->narrow, data);
  }
}

}  // namespace llga

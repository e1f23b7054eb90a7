#include "jit/onednn/runtime/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/attention_blocks.h"
#include "jit/onednn/runtime/quantized_linear.h"
#include "jit/onednn/runtime/shares.h"

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

// What 8-bit numbers are.
attention::Bytes bytesOf(const Attention& all) {
  constexpr uint8_t kFlip = 0x80;
  const auto flipTo = [](bool wanted_signed, const Attention::Numbers& numbers) {
    return numbers.is_signed == wanted_signed ? uint8_t{0} : kFlip;
  };
  const auto asUnsigned = [](const Attention::Numbers& numbers) {
    return numbers.zero_point + (numbers.is_signed ? int32_t{kFlip} : 0);
  };
  attention::Bytes bytes{};
  bytes.products = &QuantizedLinear::kernels();
  bytes.query_flip = flipTo(false, all.query_numbers);
  bytes.key_flip = flipTo(true, all.key_numbers);
  bytes.value_flip = flipTo(true, all.value_numbers);
  bytes.query_zero_point = asUnsigned(all.query_numbers);
  bytes.value_zero_point = static_cast<float>(asUnsigned(all.value_numbers) - int32_t{kFlip});
  bytes.value_scale = all.value_numbers.scale;
  if (all.result_numbers) {
    bytes.inverse = 1 / all.result_numbers->scale;
    bytes.zero_point = static_cast<float>(asUnsigned(*all.result_numbers));
    bytes.result_flip = flipTo(false, *all.result_numbers);
  }
  return bytes;
}

template <typename T, typename R>
attention::Head<T, R> headOf(const Attention& all, const Attention::Data& data, int64_t index,
                             const attention::Bytes& bytes) {
  const auto batch = index / all.heads;
  const auto head = index % all.heads;
  const auto key_head = head / (all.heads / all.key_heads);
  attention::Head<T, R> one{all.queries,
                            all.keys,
                            all.size,
                            all.value_size,
                            all.scale * data.factor * headScale(all, head) *
                                all.query_numbers.scale * all.key_numbers.scale,
                            all.least_query_norm,
                            all.least_key_norm,
                            all.causal,
                            all.key_across,
                            all.safe,
                            rowsOf<const T>(data.query, all.query, all.queries, batch, head),
                            rowsOf<const T>(data.key, all.key, all.keys, batch, key_head),
                            rowsOf<const T>(data.value, all.value, all.keys, batch, key_head),
                            {},
                            rowsOf<R>(data.result, all.result, all.queries, batch, head),
                            &bytes};
  for (size_t i = 0; i < all.masks.size(); ++i) {
    one.masks[i] = maskOf(all.masks[i], data.masks[i], batch, head);
  }
  return one;
}

// A query alone reads keys where they lie, as they are.
bool readsInPlace(const Attention& all) {
  return all.queries == 1 && !all.key_across && all.least_query_norm < 0 &&
         all.least_key_norm < 0 && all.type != Attention::Type::quantized;
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
    if (all.type == Attention::Type::quantized) {
      constexpr int64_t kDigits = 2;  // bytes, for each score
      starts = whole;
      digits = scores * kDigits / static_cast<int64_t>(sizeof(float));
    }
  }

  int64_t all() const { return keys + values + query + scores + sums + starts + digits; }
  attention::Workspace over(float* memory) const {
    auto take = [&](int64_t numbers) {
      auto* taken = memory;
      memory += numbers;
      return taken;
    };
    return {take(keys),
            take(values),
            take(query),
            take(scores),
            take(sums),
            reinterpret_cast<int32_t*>(take(starts)),
            reinterpret_cast<uint8_t*>(take(digits))};
  }

  int64_t keys = 0;
  int64_t values = 0;
  int64_t query = 0;
  int64_t scores = 0;
  int64_t sums = 0;
  int64_t starts = 0;
  int64_t digits = 0;
};

static_assert(Attention::kMasks == attention::kMasks);

template <typename T, typename R>
void runAs(const Attention& all, const attention::Functions<T, R>& functions,
           const Attention::Data& data) {
  constexpr int64_t kForOne = 1 << 18;  // products that are not worth a second thread
  const auto blocks = (all.queries + kQueries - 1) / kQueries;
  const auto units = all.batch * all.heads * blocks;
  const auto products =
      all.batch * all.heads * all.queries * all.keys * (all.size + all.value_size);
  const auto worth = std::clamp<int64_t>(products / kForOne, 1, at::get_num_threads());
  const auto parts = std::min(worth, units);
  const Pieces pieces(all);
  const auto bytes = all.type == Attention::Type::quantized ? bytesOf(all) : attention::Bytes{};
  const auto memory = arena()->allocate(static_cast<size_t>(parts * pieces.all()) * sizeof(float));
  // Blocks of one head share what is packed: they are parted only where heads are too few.
  const auto together = all.batch * all.heads >= 2 * parts ? blocks : 1;
  const auto attend = [&](int64_t part, int64_t from, int64_t to) {
    const auto workspace = pieces.over(static_cast<float*>(memory.get()) + part * pieces.all());
    int64_t packed = -1;
    bool finite = false;
    for (auto unit = from; unit < to; ++unit) {
      const auto head = headOf<T, R>(all, data, unit / blocks, bytes);
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
      functions.attend(head, workspace, finite, first, all.queries * (block + 1) / blocks - first);
    }
  };
  forSharesOf(units, together, parts, [&](int64_t part) {
    return [&attend, part](int64_t from, int64_t to) { attend(part, from, to); };
  });
}

}  // namespace

void Attention::run(const Data& data) const {
  if (type == Type::float32) {
    runAs(*this, kernels->wide, data);
  } else if (type == Type::bfloat16) {
    runAs(*this, kernels->narrow, data);
  } else if (result_numbers) {
    runAs(*this, kernels->quantized, data);
  } else {
    runAs(*this, kernels->quantized_to_float, data);
  }
}

}  // namespace llga

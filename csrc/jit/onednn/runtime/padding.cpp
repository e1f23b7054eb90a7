#include "jit/onednn/runtime/padding.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

namespace llga {
namespace {

// Which number of a dimension is at place `i`, of which 0 is its first one; -1: none.
int64_t placeOf(Padding::Mode mode, int64_t i, int64_t size) {
  if (i >= 0 && i < size) {
    return i;
  }
  switch (mode) {
    case Padding::Mode::constant:
      return -1;
    case Padding::Mode::reflect:
      return i < 0 ? -i : 2 * (size - 1) - i;
    case Padding::Mode::replicate:
      return i < 0 ? 0 : size - 1;
    default:
      return i < 0 ? i + size : i - size;
  }
}

std::vector<int64_t> placesOf(Padding::Mode mode, int64_t begin, int64_t end, int64_t size) {
  std::vector<int64_t> places;
  for (auto i = begin; i < end; ++i) {
    places.push_back(placeOf(mode, i, size));
  }
  return places;
}

}  // namespace

Padding::Padding(Mode mode, const std::vector<Dimension>& dimensions, int64_t bytes,
                 const void* number)
    : pixel_(bytes) {
  const auto isPadded = [](const Dimension& d) { return d.before + d.after != 0; };
  const auto first = std::find_if(dimensions.begin(), dimensions.end(), isPadded);
  const auto last = std::find_if(dimensions.rbegin(), dimensions.rend(), isPadded).base() - 1;
  for (auto d = dimensions.begin(); d != first; ++d) {
    images_ *= d->size;
  }
  for (auto d = first; d != last; ++d) {
    const auto places = placesOf(mode, -d->before, d->size + d->after, d->size);
    std::vector<int64_t> rows;
    for (const auto row : rows_) {
      for (const auto place : places) {
        rows.push_back(row < 0 || place < 0 ? -1 : row * d->size + place);
      }
    }
    rows_ = std::move(rows);
    image_rows_ *= d->size;
  }
  width_ = last->size;
  before_ = placesOf(mode, -last->before, 0, width_);
  after_ = placesOf(mode, width_, width_ + last->after, width_);
  for (auto d = last + 1; d != dimensions.end(); ++d) {
    pixel_ *= d->size;
  }
  blank_.resize(static_cast<size_t>(pixel_));
  for (int64_t i = 0; i < pixel_; i += bytes) {
    std::memcpy(blank_.data() + i, number, static_cast<size_t>(bytes));
  }
}

void Padding::run(const void* from, void* to) const {
  constexpr int64_t kForOne = 1 << 16;  // bytes that are not worth a second thread
  const auto rows = static_cast<int64_t>(rows_.size());
  const auto width = width_ + static_cast<int64_t>(before_.size() + after_.size());
  const auto bytes = width * pixel_;
  const auto grain = std::max<int64_t>(1, kForOne / bytes);
  at::parallel_for(0, images_ * rows, grain, [&](int64_t begin, int64_t end) {
    for (auto i = begin; i < end; ++i) {
      auto* result = static_cast<char*>(to) + i * bytes;
      const auto row = rows_[static_cast<size_t>(i % rows)];
      if (row < 0) {
        for (int64_t pixel = 0; pixel < width; ++pixel) {
          std::copy(blank_.begin(), blank_.end(), result + pixel * pixel_);
        }
        continue;
      }
      const auto source = i / rows * image_rows_ + row;
      runRow(static_cast<const char*>(from) + source * width_ * pixel_, result);
    }
  });
}

void Padding::runRow(const char* from, char* to) const {
  to = runPixels(before_, from, to);
  to = std::copy_n(from, width_ * pixel_, to);
  runPixels(after_, from, to);
}

char* Padding::runPixels(const std::vector<int64_t>& pixels, const char* from, char* to) const {
  for (const auto pixel : pixels) {
    to = std::copy_n(pixel < 0 ? blank_.data() : from + pixel * pixel_, pixel_, to);
  }
  return to;
}

}  // namespace llga

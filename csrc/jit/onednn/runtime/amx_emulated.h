// AMX's instructions in software, under the names of their intrinsics, for builds with
// LLGA_FUSER_EMULATE_AMX: they run the kernels of AMX, not their speed, on any processor with
// AVX-512's instructions for bfloat16 and 8 bit. Included by amx_tiles.h alone.
//
// Results are the processor's, bit by bit, and so are its demands: what would be an illegal
// instruction or a general protection fault there ends the process here, with a message.
// Source: Intel's Software Developer's Manual, volume 2, LDTILECFG to TILEZERO and TDPBF16PS.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace llga::amx::emulated {
namespace {

constexpr int kTiles = 8;
constexpr int kMostTileRows = 16;
constexpr int kMostTileBytes = 64;
constexpr int kMostWords = kMostTileBytes / 4;

struct Tile {
  int rows;
  int bytes;  // of a row
  alignas(kMostTileBytes) uint8_t data[kMostTileRows][kMostTileBytes];
};

// Of the thread. Nothing is configured at first.
struct Registers {
  bool configured = false;
  Tile tiles[kTiles] = {};
};

inline Registers& registers() {
  static thread_local Registers all;
  return all;
}

inline void demand(bool holds, const char* instruction, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "llga_fuser: emulated AMX: %s: %s\n", instruction, what);
    std::abort();
  }
}

inline Tile& tile(int number, const char* instruction) {
  auto& all = registers();
  demand(all.configured, instruction, "no configuration is loaded");
  auto& one = all.tiles[number];
  demand(one.rows > 0, instruction, "the tile is not configured");
  return one;
}

inline void release() { registers() = {}; }

inline void loadConfiguration(const void* memory) {
  constexpr const char* kName = "ldtilecfg";
  constexpr int kReserved = 14;
  constexpr int kNumbered = 16;  // tiles that the memory has room for
  struct Numbers {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[kReserved];
    uint16_t bytes[kNumbered];
    uint8_t rows[kNumbered];
  } numbers;
  static_assert(sizeof(numbers) == kMostTileBytes);
  std::memcpy(&numbers, memory, sizeof(numbers));
  demand(numbers.palette == 1, kName, "the palette is not 1");
  demand(numbers.start_row == 0, kName, "a start row");
  for (const auto byte : numbers.reserved) {
    demand(byte == 0, kName, "a reserved byte is not zero");
  }
  auto& all = registers();
  all = {};
  all.configured = true;
  for (int i = 0; i < kNumbered; ++i) {
    const int rows = numbers.rows[i];
    const int bytes = numbers.bytes[i];
    demand(rows <= kMostTileRows && bytes <= kMostTileBytes, kName, "a tile is too large");
    demand((rows == 0) == (bytes == 0), kName, "a tile has rows or bytes alone");
    demand(i < kTiles || rows == 0, kName, "there is no such tile");
    if (i < kTiles) {
      all.tiles[i].rows = rows;
      all.tiles[i].bytes = bytes;
    }
  }
}

inline void zero(int number) {
  auto& to = tile(number, "tilezero");
  std::memset(to.data, 0, sizeof(to.data));
}

inline void load(int number, const void* base, int64_t stride) {
  auto& to = tile(number, "tileloadd");
  std::memset(to.data, 0, sizeof(to.data));
  for (int row = 0; row < to.rows; ++row) {
    std::memcpy(to.data[row], static_cast<const char*>(base) + row * stride, to.bytes);
  }
}

inline void store(int number, void* base, int64_t stride) {
  const auto& from = tile(number, "tilestored");
  for (int row = 0; row < from.rows; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, from.data[row], from.bytes);
  }
}

struct Product {
  Tile& sums;
  const Tile& left;
  const Tile& right;

  int words() const { return left.bytes / 4; }
  int outputs() const { return sums.bytes / 4; }
};

inline Product product(int sums, int left, int right, const char* name) {
  demand(sums != left && sums != right && left != right, name, "a tile twice");
  const Product p{tile(sums, name), tile(left, name), tile(right, name)};
  demand(p.sums.bytes % 4 == 0 && p.left.bytes % 4 == 0, name, "rows are no multiple of 4 bytes");
  demand(p.sums.rows == p.left.rows, name, "sums and left operand have unlike rows");
  demand(p.sums.bytes == p.right.bytes, name, "sums and right operand have unlike columns");
  demand(p.left.bytes / 4 == p.right.rows, name, "the operands do not meet");
  return p;
}

// Unsigned by signed bytes, four at a time.
inline void multiplyBytes(int sums, int left, int right) {
  const auto p = product(sums, left, right, "tdpbusd");
  for (int row = 0; row < p.sums.rows; ++row) {
    int32_t all[kMostWords];
    std::memcpy(all, p.sums.data[row], sizeof(all));
    for (int word = 0; word < p.words(); ++word) {
      const auto* unsigned_ = p.left.data[row] + word * 4;
      const auto* signed_ = reinterpret_cast<const int8_t*>(p.right.data[word]);
      for (int output = 0; output < p.outputs(); ++output) {
        for (int i = 0; i < 4; ++i) {
          all[output] += int32_t{unsigned_[i]} * int32_t{signed_[output * 4 + i]};
        }
      }
    }
    std::memcpy(p.sums.data[row], all, sizeof(all));
  }
}

// A bfloat16 as float32; a subnormal one is zero.
inline float widened(const uint8_t* from) {
  constexpr uint32_t kExponent = 0x7F800000;
  constexpr uint32_t kSign = 0x80000000;
  uint16_t half = 0;
  std::memcpy(&half, from, sizeof(half));
  auto bits = uint32_t{half} << 16U;
  if ((bits & kExponent) == 0) {
    bits &= kSign;
  }
  float result = 0;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Pairs of bfloat16: the first ones and the second ones are added up apart, each product fused with
// its sum, then to one another and to what there was.
inline void multiplyBfloat16(int sums, int left, int right) {
  constexpr unsigned kFlushes = 0x8040;  // subnormal numbers are zeros, read or written
  const auto p = product(sums, left, right, "tdpbf16ps");
  const auto control = _mm_getcsr();
  _mm_setcsr(control | kFlushes);
  for (int row = 0; row < p.sums.rows; ++row) {
    __m512 first = _mm512_setzero_ps();
    __m512 second = _mm512_setzero_ps();
    for (int word = 0; word < p.words(); ++word) {
      float ones[kMostWords];
      float others[kMostWords];
      for (int output = 0; output < kMostWords; ++output) {
        ones[output] = widened(p.right.data[word] + output * 4);
        others[output] = widened(p.right.data[word] + output * 4 + 2);
      }
      const auto* pair = p.left.data[row] + word * 4;
      first = _mm512_fmadd_ps(_mm512_set1_ps(widened(pair)), _mm512_loadu_ps(ones), first);
      second = _mm512_fmadd_ps(_mm512_set1_ps(widened(pair + 2)), _mm512_loadu_ps(others), second);
    }
    const auto there = _mm512_loadu_ps(p.sums.data[row]);
    _mm512_storeu_ps(p.sums.data[row], _mm512_add_ps(there, _mm512_add_ps(first, second)));
  }
  _mm_setcsr(control);
}

}  // namespace
}  // namespace llga::amx::emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define _tile_loadconfig(memory) llga::amx::emulated::loadConfiguration(memory)
#define _tile_release() llga::amx::emulated::release()
#define _tile_loadd(tile, base, stride) llga::amx::emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) llga::amx::emulated::store(tile, base, stride)
#define _tile_zero(tile) llga::amx::emulated::zero(tile)
#define _tile_dpbusd(sums, left, right) llga::amx::emulated::multiplyBytes(sums, left, right)
#define _tile_dpbf16ps(sums, left, right) llga::amx::emulated::multiplyBfloat16(sums, left, right)

// Packed weights: a matrix [out, in] cut into tiles of 32 output columns, each one stream of bytes that a product reads
// once from front to back. Within a step of k, 16 columns fill a register.
//   float32:  of each k, 32 columns.           bfloat16: of each pair of k, 32 columns of two.
//   integers: of each group of 32 k: scales in half precision (of each half where they differ), minimums where the
//             format has them, then 4 or 8 steps of 32 columns x 4 bytes. Of 4 bits, a byte holds element i of the
//             group below and element i + 16 above.
// Strictly one stream: with the two registers of a step 512 bytes apart, cold int8 weights came at 16 GB/s instead of
// 37.
#pragma once

#include <cstdint>
#include <cstring>

#include "blocks.h"

namespace di {

enum class Compute : int { f32 = 0, bf16 = 1, i8 = 2 };  // the form in which activations enter a product

constexpr int64_t kTile = 32;  // output columns of a task; the last tile of a matrix may be short
constexpr int64_t kPanels = kTile / kLanes;

enum Kind : int {
  kDenseF32 = 0,
  kDenseBF16 = 1,
  kNibbles = 2,         // 4 bits, q - 8
  kNibblesMin = 3,      // 4 bits with a minimum
  kBytes = 4,           // 8 bits, signed
  kBytesMin = 5,        // 5 bits in 8 with a minimum
  kBytesBy16 = 6,       // 8 bits, signed, a scale for each 16
};

struct Matrix {
  int kind;
  Compute compute;
  int64_t out, in;
  const void* data;
  const float* bias;  // or null
};

inline int64_t tiles(const Matrix& m) { return (m.out + kTile - 1) / kTile; }

// How a group of 32 k of a tile lies in memory. `kShift` brings the bias of a row (-128 x sum) to the format's offset.
template <bool Nibble, bool Min, int Halves, int Shift>
struct Layout {
  static constexpr bool kNibble = Nibble, kMin = Min;
  static constexpr int kHalves = Halves, kShift = Shift;
  static constexpr bool kSigned = !Nibble && !Min;
  static constexpr int64_t kScaleBytes = Halves * kTile * 2, kMinBytes = Min ? kTile * 2 : 0;
  static constexpr int64_t kBytes = kScaleBytes + kMinBytes + kTile * kGroup / (Nibble ? 2 : 1);
};
using Nibbles = Layout<true, false, 1, 4>;
using NibblesMin = Layout<true, true, 1, 0>;
using Bytes = Layout<false, false, 1, 0>;
using BytesMin = Layout<false, true, 1, 0>;
using BytesBy16 = Layout<false, false, 2, 0>;

// Calls f with the layout of a quantised kind as a type; false of a dense kind.
template <class F>
inline bool with_layout(int kind, F f) {
  switch (kind) {
    case kNibbles: f.template operator()<Nibbles>(); return true;
    case kNibblesMin: f.template operator()<NibblesMin>(); return true;
    case kBytes: f.template operator()<Bytes>(); return true;
    case kBytesMin: f.template operator()<BytesMin>(); return true;
    case kBytesBy16: f.template operator()<BytesBy16>(); return true;
    default: return false;
  }
}

// The kind that a source is packed as for a form of activations; -1 where there is none.
inline int packed_kind(int source, int compute) {
  if (block_size(source).elements == 0) return -1;
  if (compute == static_cast<int>(Compute::f32)) return kDenseF32;
  if (compute == static_cast<int>(Compute::bf16)) return kDenseBF16;
  if (compute != static_cast<int>(Compute::i8)) return -1;
  switch (source) {
    case kQ4_0: return kNibbles;
    case kQ4_1:
    case kQ4_K: return kNibblesMin;
    case kQ5_0:
    case kQ8_0: return kBytes;
    case kQ5_1:
    case kQ5_K: return kBytesMin;
    case kQ6_K: return kBytesBy16;
    default: return -1;
  }
}

inline int64_t tile_nbytes(int kind, int64_t in) {
  if (kind == kDenseF32) return in * kTile * 4;
  if (kind == kDenseBF16) return (in + 1) / 2 * kTile * 4;
  int64_t n = -1;
  with_layout(kind, [&]<class L>() { n = in % kGroup == 0 ? in / kGroup * L::kBytes : -1; });
  return n;
}

inline int64_t packed_nbytes(int source, int compute, int64_t out, int64_t in) {
  const int kind = packed_kind(source, compute);
  if (kind < 0 || out < 1 || in < 1 || row_nbytes(source, in) < 0) return -1;
  const int64_t tile = tile_nbytes(kind, in);
  return tile < 0 ? -1 : (out + kTile - 1) / kTile * tile;
}

// Dense columns are read as float32 and turned by 256 of k, as words of one float32 or two bfloat16; the padding of a
// buffer's rows keeps its columns from sharing lines of the first-level cache.
constexpr int64_t kTurned = 256;
struct Turned {
  uint32_t words[kTile][kTurned + 16];
};

template <int S>
inline void pack_dense_tile(int kind, int64_t columns, int64_t in, const uint8_t* rows, uint8_t* to, Turned& buffer) {
  constexpr BlockSize size = block_size(S);
  const int64_t stride = row_nbytes(S, in);
  std::memset(&buffer, 0, sizeof buffer);
  alignas(64) float column[kTurned];
  for (int64_t k = 0; k < in; k += kTurned) {
    const int64_t n = in - k < kTurned ? in - k : kTurned, words = kind == kDenseF32 ? n : (n + 1) / 2;
    for (int64_t c = 0; c < columns; ++c) {
      read_row_as<S>(rows + c * stride + k / size.elements * size.nbytes, n, column);
      if (kind == kDenseF32) {
        std::memcpy(buffer.words[c], column, static_cast<size_t>(n) * sizeof(float));
      } else {
        round_row(column, n, reinterpret_cast<uint16_t*>(buffer.words[c]));
      }
    }
    uint32_t* y = reinterpret_cast<uint32_t*>(to);
    for (int64_t i = 0; i < words; ++i)
      for (int64_t c = 0; c < kTile; ++c) y[i * kTile + c] = buffer.words[c][i];
    to += words * kTile * 4;
  }
}

template <int S, class L>
inline void pack_group(const Group& g, int64_t c, uint8_t* to) {
  for (int half = 0; half < L::kHalves; ++half) {
    const uint16_t scale = float_to_half(g.scale[half]);
    std::memcpy(to + (half * kTile + c) * 2, &scale, 2);
  }
  if constexpr (L::kMin) {
    const uint16_t minimum = float_to_half(-g.minimum);
    std::memcpy(to + L::kScaleBytes + c * 2, &minimum, 2);
  }
  uint8_t* column = to + L::kScaleBytes + L::kMinBytes + c * 4;
  constexpr int shift = L::kSigned ? 128 - offset_of(S) : 0;
  uint8_t q[kGroup];
  for (int i = 0; i < kGroup; ++i) q[i] = static_cast<uint8_t>(g.q[i] + shift);
  if constexpr (L::kNibble)
    for (int i = 0; i < kGroup / 2; ++i) q[i] = static_cast<uint8_t>(q[i] | q[i + kGroup / 2] << 4);
  for (int i = 0; i < kGroup / (L::kNibble ? 8 : 4); ++i) std::memcpy(column + i * kTile * 4, q + i * 4, 4);
}

template <int S, class L>
inline void pack_groups_tile(int64_t columns, int64_t in, const uint8_t* rows, uint8_t* to) {
  const int64_t stride = row_nbytes(S, in);
  for (int64_t index = 0; index < in / kGroup; ++index, to += L::kBytes) {
    if (columns < kTile) std::memset(to, 0, L::kBytes);
    for (int64_t c = 0; c < columns; ++c) {
      Group g;
      read_group<S>(rows + c * stride, index, g);
      pack_group<S, L>(g, c, to);
    }
  }
}

// Packs `out` rows as a file holds them. False where packed_nbytes is -1.
inline bool pack(int source, int compute, int64_t out, int64_t in, const void* rows, void* packed) {
  if (packed_nbytes(source, compute, out, in) < 0) return false;
  const int kind = packed_kind(source, compute);
  const int64_t tile = tile_nbytes(kind, in), stride = row_nbytes(source, in);
  const bool dense = kind == kDenseF32 || kind == kDenseBF16;
  Turned buffer;
  with_source(source, [&]<int S>() {
    for (int64_t first = 0; first < out; first += kTile) {
      const int64_t columns = out - first < kTile ? out - first : kTile;
      const uint8_t* from = static_cast<const uint8_t*>(rows) + first * stride;
      uint8_t* to = static_cast<uint8_t*>(packed) + first / kTile * tile;
      if (dense) {
        pack_dense_tile<S>(kind, columns, in, from, to, buffer);
      } else if constexpr (block_size(S).elements > 1) {
        with_layout(kind, [&]<class L>() { pack_groups_tile<S, L>(columns, in, from, to); });
      }
    }
  });
  return true;
}

}  // namespace di

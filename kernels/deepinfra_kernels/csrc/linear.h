// Products of prepared rows with packed matrices. Every output element is summed over k from 0 upward in one chain
// (integers: within a group exactly, groups in order), by the same instructions for every number of rows and in every
// tile, so that a row's result never depends on what else is computed.
#pragma once

#include <cstdint>
#include <utility>

#include "rows.h"

namespace di {

constexpr int64_t kRows = 96;  // most rows of a call: their inputs stay in the second-level cache

constexpr int kDenseRows = kWide ? 12 : 3;   // rows computed together: as many sums as fit into the registers
constexpr int kGroupRows = kWide ? 6 : 2;

// How far ahead a product asks for its weights, into the second-level cache: by itself the processor begins anew at each
// tile and at each page of 4 KiB. Measured on Zen 4, two threads, all of SmolLM2, cold: with the shares of pool.h a step
// of one stream takes 0.85 of the time, of eight 0.93 (4 bits) and 0.85 (bfloat16); each of the two alone does less than
// half. One row of bfloat16 gains nothing at 8 KiB, eight gain half at 4 KiB and lose at 2.
template <bool Nibble, int R>
constexpr int64_t kAhead = Nibble ? 6144 : R < 4 ? 4096 : 8192;

struct Output {
  float* y;
  int64_t stride;
  const float* bias;  // of the tile's first column, or null
  int64_t columns;
};

DI_INLINE F16 bias_of(const Output& out, int panel) {
  const int64_t left = out.columns - panel * kLanes;
  if (out.bias == nullptr || left <= 0) return zero();
  return left < kLanes ? load_part(out.bias + panel * kLanes, left) : load(out.bias + panel * kLanes);
}

// Sums stay in registers only if every index into them is known when compiling: a short tile goes through a buffer.
template <int R>
DI_INLINE void write(const F16 (&acc)[R][kPanels], const Output& out) {
  alignas(64) float part[R * kTile];
  const bool whole = out.columns == kTile;
  float* to = whole ? out.y : part;
  const int64_t stride = whole ? out.stride : kTile;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) store(to + r * stride + p * kLanes, acc[r][p]);
  if (!whole)
    for (int r = 0; r < R; ++r)
      std::memcpy(out.y + r * out.stride, part + r * kTile, static_cast<size_t>(out.columns) * sizeof(float));
}

DI_INLINE void fetch(const void* weights) { _mm_prefetch(static_cast<const char*>(weights), _MM_HINT_T1); }

// One step of k of a tile is 128 bytes: 32 columns of float32, or of two bfloat16.
template <bool Half, int R>
inline void dense_rows(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t in, Output out) {
  F16 acc[R][kPanels];
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
    const F16 bias = bias_of(out, p);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r][p] = bias;
  }
  const int64_t steps = Half ? (in + 1) / 2 : in;
  for (int64_t k = 0; k < steps; ++k, w += 128, x += 4) {
    fetch(w + kAhead<false, R>);
    fetch(w + kAhead<false, R> + 64);
    const I16 w0 = load_int(w), w1 = load_int(w + 64);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const I16 a = set_int(x + r * stride);
      if constexpr (Half) {
        acc[r][0] = dot_bf16(acc[r][0], w0, a);
        acc[r][1] = dot_bf16(acc[r][1], w1, a);
      } else {
        acc[r][0] = fma(from_bits(w0), from_bits(a), acc[r][0]);
        acc[r][1] = fma(from_bits(w1), from_bits(a), acc[r][1]);
      }
    }
  }
  write<R>(acc, out);
}

template <class L>
DI_INLINE I16 accumulate(I16 sum, I16 w, I16 a) {
  if constexpr (L::kSigned) return dot_signed(sum, w, a);
  return dot_unsigned(sum, w, a);
}

// Exact sums of half `H` of a group (of all of it where the format has one scale) for R rows and both panels.
template <class L, int R, int H>
DI_INLINE void group_sums(const uint8_t* w, const uint8_t* x, int64_t stride, I16 (&sum)[R][kPanels]) {
  constexpr int steps = 8 / L::kHalves, first = H * steps;
  I16 bias[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const InputGroup& g = *reinterpret_cast<const InputGroup*>(x + r * stride);
    const I16 whole = set_int(L::kHalves == 2 ? &g.bias[H] : &g.bias_both);
    bias[r] = L::kNibble ? shift_right_signed<L::kShift>(whole) : whole;
    if constexpr (L::kMin) bias[r] = set_int(0);
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) sum[r][p] = L::kSigned ? open_signed(bias[r]) : open(bias[r]);
  }
  if constexpr (L::kNibble) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const I16 w0 = load_int(w + c * 128), w1 = load_int(w + c * 128 + 64);
      const I16 low0 = low_nibbles(w0), low1 = low_nibbles(w1), high0 = high_nibbles(w0), high1 = high_nibbles(w1);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const I16 a = set_int(x + r * stride + c * 4), b = set_int(x + r * stride + 16 + c * 4);
        sum[r][0] = dot_small(dot_small(sum[r][0], low0, a), high0, b);
        sum[r][1] = dot_small(dot_small(sum[r][1], low1, a), high1, b);
      }
    }
  } else {
#pragma GCC unroll 8
    for (int c = first; c < first + steps; ++c) {
      const I16 w0 = load_int(w + c * 128), w1 = load_int(w + c * 128 + 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const I16 a = set_int(x + r * stride + c * 4);
        sum[r][0] = accumulate<L>(sum[r][0], w0, a);
        sum[r][1] = accumulate<L>(sum[r][1], w1, a);
      }
    }
  }
  if constexpr (L::kNibble) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) sum[r][p] = close(sum[r][p], bias[r]);
  }
}

template <class L, int R, int H>
DI_INLINE void add_half(const uint8_t* w, const uint8_t* x, int64_t stride, F16 (&acc)[R][kPanels]) {
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(w) + H * kTile;
  const F16 s0 = load_half(scales), s1 = load_half(scales + kLanes);
  I16 sum[R][kPanels];
  group_sums<L, R, H>(w + L::kScaleBytes + L::kMinBytes, x, stride, sum);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const F16 scale = set(reinterpret_cast<const InputGroup*>(x + r * stride)->scale);
    acc[r][0] = fma(to_float(sum[r][0]), mul(s0, scale), acc[r][0]);
    acc[r][1] = fma(to_float(sum[r][1]), mul(s1, scale), acc[r][1]);
  }
}

template <class L, int R>
inline void group_rows(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t in, Output out) {
  F16 acc[R][kPanels];
#pragma GCC unroll 2
  for (int p = 0; p < kPanels; ++p) {
    const F16 bias = bias_of(out, p);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r][p] = bias;
  }
  for (int64_t k = 0; k < in; k += kGroup, w += L::kBytes, x += sizeof(InputGroup)) {
#pragma GCC unroll 20
    for (int64_t at = 0; at < L::kBytes; at += 64) fetch(w + kAhead<L::kNibble, R> + at);
    add_half<L, R, 0>(w, x, stride, acc);
    if constexpr (L::kHalves == 2) {
      asm volatile("" ::: "memory");  // or a compiler mixes the loads of both halves, and cold weights come at a third
      add_half<L, R, 1>(w, x, stride, acc);
    }
    if constexpr (L::kMin) {
      const uint16_t* minimums = reinterpret_cast<const uint16_t*>(w + L::kScaleBytes);
      const F16 m0 = load_half(minimums), m1 = load_half(minimums + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F16 sum = set(reinterpret_cast<const InputGroup*>(x + r * stride)->sum);
        acc[r][0] = fma(m0, sum, acc[r][0]);
        acc[r][1] = fma(m1, sum, acc[r][1]);
      }
    }
  }
  write<R>(acc, out);
}

using Kernel = void (*)(const uint8_t* w, const uint8_t* x, int64_t stride, int64_t in, Output out);

template <bool Half, int... R>
constexpr Kernel dense_kernel(int64_t rows, std::integer_sequence<int, R...>) {
  constexpr Kernel table[] = {dense_rows<Half, R + 1>...};
  return table[rows - 1];
}
template <class L, int... R>
constexpr Kernel group_kernel(int64_t rows, std::integer_sequence<int, R...>) {
  constexpr Kernel table[] = {group_rows<L, R + 1>...};
  return table[rows - 1];
}

inline Kernel kernel_of(int kind, int64_t rows) {
  constexpr auto dense = std::make_integer_sequence<int, kDenseRows>();
  if (kind == kDenseF32) return dense_kernel<false>(rows, dense);
  if (kind == kDenseBF16) return dense_kernel<true>(rows, dense);
  Kernel kernel = nullptr;
  with_layout(kind, [&]<class L>() {
    kernel = group_kernel<L>(rows, std::make_integer_sequence<int, kGroupRows>());
  });
  return kernel;
}

// Computes a tile's columns of rows row0 to row0 + rows of the step; `inputs` and `y` are those of its row 0:
// y[(row0 + r) * ldy + c], bias included. Any number of rows up to kRows.
inline void matmul_tile(const Matrix& m, const void* inputs, int64_t row0, int64_t rows, int64_t tile, float* y,
                        int64_t ldy) {
  const int64_t first = tile * kTile, stride = input_nbytes(m.compute, m.in);
  const uint8_t* w = static_cast<const uint8_t*>(m.data) + tile * tile_nbytes(m.kind, m.in);
  const bool groups = m.compute == Compute::i8;
  const int64_t most = groups ? kGroupRows : kDenseRows;
  const int64_t columns = m.out - first < kTile ? m.out - first : kTile;
  for (int64_t r = 0, n; r < rows; r += n) {
    // Few dense rows cost as much as four, so that parts are of equal size; of integers each row costs the same.
    const int64_t left = rows - r, parts = (left + most - 1) / most;
    n = groups ? (left < most ? left : most) : (left + parts - 1) / parts;
    const Output out{y + (row0 + r) * ldy + first, ldy, m.bias == nullptr ? nullptr : m.bias + first, columns};
    const uint8_t* x = static_cast<const uint8_t*>(inputs) + (row0 + r) * stride;
    kernel_of(m.kind, n)(w, x, stride, m.in, out);
  }
}

}  // namespace di

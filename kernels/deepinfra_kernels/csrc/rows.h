// What is done to one row at a time: rounding and quantising the inputs of a product, norm, gate, embedding.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pack.h"

namespace di {

// One group of 32 quantised inputs, a cache line of its own.
struct alignas(64) InputGroup {
  int8_t q[kGroup];
  float scale;          // max |x| / 127
  float sum;            // scale times the sum of q
  int32_t bias[2];      // -128 times the sum of each half of q
  int32_t bias_both;    // of both
};

// Bytes of one row; row r lies at inputs + r * input_nbytes. An odd number of cache lines: rows that lie a multiple of
// 4 KiB apart would share the same few lines of the first-level cache.
inline int64_t input_nbytes(Compute compute, int64_t in) {
  int64_t lines = 0;
  if (compute == Compute::f32) lines = (in * 4 + 63) / 64;
  if (compute == Compute::bf16) lines = ((in + 1) / 2 * 4 + 63) / 64;
  if (compute == Compute::i8) lines = (in + kGroup - 1) / kGroup;
  return (lines | 1) * 64;
}

inline void quantise_group(F16 x0, F16 x1, InputGroup& to) {
  // The largest magnitude as integers: the bits of magnitudes are ordered as they are, and a NaN is above all.
  const int32_t magnitude = di::largest(max(bits(abs(x0)), bits(abs(x1))));
  float largest;
  std::memcpy(&largest, &magnitude, sizeof largest);
  to.scale = largest / 127.0f;
  const F16 inverse = set(largest > 1e-30f ? 127.0f / largest : 0.0f);  // below, the quotient would be infinite
  store_bytes(to.q, to_int(mul(x0, inverse)));
  store_bytes(to.q + kLanes, to_int(mul(x1, inverse)));
  const int32_t sums[2] = {sum_of_16(to.q), sum_of_16(to.q + kLanes)};
  to.bias[0] = -128 * sums[0];
  to.bias[1] = -128 * sums[1];
  to.bias_both = -128 * (sums[0] + sums[1]);
  to.sum = to.scale * static_cast<float>(sums[0] + sums[1]);
}

// Rounds or quantises one row. int8 takes whole groups of 32.
inline void prepare_row(Compute compute, const float* x, int64_t in, void* row) {
  if (compute == Compute::f32) {
    std::memcpy(row, x, static_cast<size_t>(in) * sizeof(float));
  } else if (compute == Compute::bf16) {
    round_row(x, in, static_cast<uint16_t*>(row));
  } else {
    InputGroup* to = static_cast<InputGroup*>(row);
    for (int64_t i = 0; i + kGroup <= in; i += kGroup) quantise_group(load(x + i), load(x + i + kLanes), *to++);
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight; the sum in four chains of 16 lanes, whatever n.
inline void norm_row(const float* x, const float* weight, float eps, int64_t n, float* y) {
  F16 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int64_t j = 0; j < 4; ++j) {
      const F16 v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  for (int64_t j = 0; i < n; i += kLanes, ++j) {
    const F16 v = n - i < kLanes ? load_part(x + i, n - i) : load(x + i);
    sums[j] = fma(v, v, sums[j]);
  }
  const float square = total(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const F16 factor = set(1.0f / std::sqrt(square / static_cast<float>(n) + eps));
  for (i = 0; i + kLanes <= n; i += kLanes) store(y + i, mul(mul(load(x + i), factor), load(weight + i)));
  if (i < n) store_part(y + i, mul(mul(load_part(x + i, n - i), factor), load_part(weight + i, n - i)), n - i);
}

// e^x to about one unit in the last place; 0 below -87.3 and inf above 88.7. A NaN stays one.
DI_INLINE F16 exp(F16 x) {
  // max and min give their second operand where one is a NaN.
  const F16 clamped = min(set(88.8f), max(set(-104.0f), x));
  const F16 n = round(mul(clamped, set(1.44269504f)));
  F16 r = fma(n, set(-0.693145752f), clamped);
  r = fma(n, set(-1.42860677e-6f), r);
  F16 p = set(1.38888889e-3f);
  p = fma(p, r, set(8.33333333e-3f));
  p = fma(p, r, set(4.16666667e-2f));
  p = fma(p, r, set(1.66666667e-1f));
  p = fma(p, r, set(0.5f));
  p = fma(p, r, set(1.0f));
  p = fma(p, r, set(1.0f));
  // 2^n in two factors, so that neither leaves the range of normal numbers.
  const I16 whole = to_int(n), half = shift_right_signed<1>(whole);
  const I16 rest = sub(whole, half);
  const F16 first = from_bits(shift_left<23>(add(half, set_int(127))));
  const F16 second = from_bits(shift_left<23>(add(rest, set_int(127))));
  return mul(mul(p, first), second);
}

DI_INLINE F16 silu(F16 x) { return div(x, add(set(1.0f), exp(sub(zero(), x)))); }

DI_INLINE F16 gelu_tanh(F16 x) {  // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
  const F16 u = mul(mul(x, set(-1.5957691216f)), fma(mul(x, x), set(0.044715f), set(1.0f)));
  return div(x, add(set(1.0f), exp(u)));
}

// y = act(gate) * up; activation 0 is SiLU, 1 is GELU by tanh.
inline void gate_row(int activation, const float* gate, const float* up, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    const F16 g = left < kLanes ? load_part(gate + i, left) : load(gate + i);
    const F16 u = left < kLanes ? load_part(up + i, left) : load(up + i);
    const F16 v = mul(activation == 0 ? silu(g) : gelu_tanh(g), u);
    if (left < kLanes) {
      store_part(y + i, v, left);
    } else {
      store(y + i, v);
    }
  }
}

// One row of a table as stored, as float32.
inline void embed_row(int source, const void* table, int64_t token, int64_t n, float* y) {
  read_row(source, static_cast<const uint8_t*>(table) + token * row_nbytes(source, n), n, y);
}

}  // namespace di

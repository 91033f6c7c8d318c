// Rotation of the halves `(i, i + dim / 2)` of queries and keys.
#pragma once

#include <cstdint>
#include <cstring>

namespace di {

// Sine and cosine of a float32 angle, rounded from float64; of nothing that is not finite there is a number. Not those of
// the C library: it has several for one processor, and keys would have the bits of whichever was taken.
inline void sine_cosine(float angle, float& sine, float& cosine) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds to an integer, whose lowest bits are then those of the number
  const double x = angle, shifted = __builtin_fma(x, 0x1.45f306dc9c883p-1, kRound), quarters = shifted - kRound;
  double r = __builtin_fma(quarters, -0x1.921fb54442d18p+0, x);  // pi / 2, and what it lacks
  r = __builtin_fma(quarters, -0x1.1a62633145c07p-54, r);
  const double s = r * r;  // Taylor's series; |r| <= pi / 4 leaves 2e-14
  double odd = 1.0 / 6227020800, even = 1.0 / 479001600;
  constexpr double kOdd[] = {-1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6};
  constexpr double kEven[] = {-1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -1.0 / 2};
  for (int term = 0; term < 5; ++term) {
    odd = __builtin_fma(odd, s, kOdd[term]);
    even = __builtin_fma(even, s, kEven[term]);
  }
  odd = __builtin_fma(odd * s, r, r);
  even = __builtin_fma(even, s, 1.0);
  uint64_t quarter;
  std::memcpy(&quarter, &shifted, sizeof quarter);
  const double a = quarter & 1 ? even : odd, b = quarter & 1 ? odd : even;
  sine = float(quarter & 2 ? -a : a);
  cosine = float((quarter + 1) & 2 ? -b : b);
}

// Cosines and sines of one position, `dim / 2` each; the angle is rounded to float32, as models were trained with.
inline void rope_angles(int64_t position, const float* frequencies, float factor, int64_t half, float* turns) {
  for (int64_t i = 0; i < half; ++i) {
    const float angle = float(position) * frequencies[i];
    float sine, cosine;
    sine_cosine(angle, sine, cosine);
    turns[i] = cosine * factor;
    turns[half + i] = sine * factor;
  }
}

// y = x rotated, times `scale`; `y` is not `x`.
inline void rope_rotate(const float* x, const float* turns, int64_t half, float scale, float* __restrict y) {
  const float *cosines = turns, *sines = turns + half, *upper = x + half;
  for (int64_t i = 0; i < half; ++i) {
    y[i] = (x[i] * cosines[i] - upper[i] * sines[i]) * scale;
    y[half + i] = (upper[i] * cosines[i] + x[i] * sines[i]) * scale;
  }
}

}  // namespace di

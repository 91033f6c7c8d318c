// Rotation of the halves `(i, i + dim / 2)` of queries and keys.
#pragma once

#include <cmath>
#include <cstdint>

namespace di {

// Cosines and sines of one position, `dim / 2` each; the angle is rounded to float32, as models were trained with.
inline void rope_angles(int64_t position, const float* frequencies, float factor, int64_t half, float* turns) {
  for (int64_t i = 0; i < half; ++i) {
    const float angle = float(position) * frequencies[i];
    turns[i] = std::cos(angle) * factor;
    turns[half + i] = std::sin(angle) * factor;
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

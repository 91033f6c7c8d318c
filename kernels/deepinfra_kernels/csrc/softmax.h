// Softmax by powers of two, a block of scores at a time.
#pragma once

#include <cmath>

#include "isa.h"

namespace di {

constexpr float kLog2E = 1.44269504088896341f;  // queries are multiplied by it, so that softmax is of powers of two
constexpr float kLowest = -1e30f;               // stands for minus infinity where differences must stay numbers

// 2^x for x <= 0; zero from -200 down, and what is not a number stays so. The polynomial was fitted on [-1/2, 1/2]: its
// relative error is under 1.6e-8 before rounding, and 2^0 is 1 exactly.
DI_INLINE F16 exp2(F16 x) {
  x = max(set(-200.0f), x);
  const F16 whole = round(x), part = sub(x, whole);
  F16 y = set(0x1.41fbbcp-13f);
  y = fma(y, part, set(0x1.5f3e54p-10f));
  y = fma(y, part, set(0x1.3b2d4cp-7f));
  y = fma(y, part, set(0x1.c6aee8p-5f));
  y = fma(y, part, set(0x1.ebfbdcp-3f));
  y = fma(y, part, set(0x1.62e430p-1f));
  y = fma(y, part, set(1.0f));
#if defined(__AVX512F__)
  // Under 2^-126 zero as on AVX2.
  const __mmask16 kept = _mm512_cmp_ps_mask(whole.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(kept, y.v, whole.v)};
#else
  const auto power = [](__m256 y, __m256 whole) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), shift));
    const __m256 kept = _mm256_cmp_ps(whole, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm256_and_ps(kept, _mm256_blendv_ps(scaled, y, _mm256_cmp_ps(y, y, _CMP_UNORD_Q)));
  };
  return {power(y.a, whole.a), power(y.b, whole.b)};
#endif
}

// `x` in the lanes `low .. high`, minus infinity in the others.
DI_INLINE F16 within(F16 x, int64_t low, int64_t high) {
#if defined(__AVX512F__)
  const auto below = [](int64_t n) { return n <= 0 ? 0u : n >= 16 ? 0xffffu : (1u << n) - 1; };
  const __mmask16 seen = static_cast<__mmask16>(below(high) & ~below(low));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x.v)};
#else
  const auto part = [&](__m256 x, int first) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    const __m256i under = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(high)), lane);
    const __m256i over = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(low)), lane);
    const __m256 seen = _mm256_castsi256_ps(_mm256_andnot_si256(over, under));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, seen);
  };
  return {part(x.a, 0), part(x.b, 8)};
#endif
}

DI_INLINE float highest(F16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x.v);
#else
  const __m256 both = _mm256_max_ps(x.a, x.b);
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
#endif
}

// Weights as the words of a product: float32, or two bfloat16 each.
template <bool kBf16>
DI_INLINE void store_weights(int32_t* words, int64_t lane, F16 x) {
  if constexpr (kBf16) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh(x.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + lane / 2), (__m256i)rounded);
#else
    float lanes[kLanes];
    store(lanes, x);
    uint16_t* to = reinterpret_cast<uint16_t*>(words + lane / 2);
    for (int64_t i = 0; i < kLanes; ++i) to[i] = float_to_bf16(lanes[i]);
#endif
  } else {
    store(reinterpret_cast<float*>(words + lane), x);
  }
}

}  // namespace di

// The vectors all kernels are written in: 16 float32, or 64 bytes that are 16 int32, 32 bfloat16 or 64 small integers.
// One AVX-512 register or two of AVX2. Each function does the same arithmetic in the same order on both, lane for
// lane, so that the two paths give the same bits; only dot_bf16 differs (one instruction against two fused steps).
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 warns of its own "undefined" registers
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

#define DI_INLINE inline __attribute__((always_inline))

namespace di {

constexpr int64_t kLanes = 16;

#if defined(__AVX512F__)

constexpr bool kWide = true;
constexpr const char* kPath = "avx512";

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};

DI_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
DI_INLINE F16 set(float x) { return {_mm512_set1_ps(x)}; }
DI_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
DI_INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
DI_INLINE F16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
DI_INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
DI_INLINE F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
DI_INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
DI_INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
DI_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
DI_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
DI_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
DI_INLINE F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
DI_INLINE I16 to_int(F16 a) { return {_mm512_cvtps_epi32(a.v)}; }
DI_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
DI_INLINE I16 bits(F16 a) { return {_mm512_castps_si512(a.v)}; }
DI_INLINE F16 from_bits(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
DI_INLINE I16 unless_nan(F16 x, I16 then, I16 otherwise) {
  return {_mm512_mask_mov_epi32(then.v, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), otherwise.v)};
}

DI_INLINE I16 set_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
DI_INLINE I16 load_int(const void* p) { return {_mm512_loadu_si512(p)}; }
DI_INLINE void store_int(void* p, I16 x) { _mm512_storeu_si512(p, x.v); }
DI_INLINE I16 add(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
DI_INLINE I16 sub(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
DI_INLINE I16 max(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
DI_INLINE I16 both(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int N>
DI_INLINE I16 shift_left(I16 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N>
DI_INLINE I16 shift_right(I16 a) { return {_mm512_srli_epi32(a.v, N)}; }  // zeros come in
template <int N>
DI_INLINE I16 shift_right_signed(I16 a) { return {_mm512_srai_epi32(a.v, N)}; }

// The lowest byte of each lane.
DI_INLINE void store_bytes(int8_t* p, I16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
// The lowest 16 bits of each lane.
DI_INLINE void store_words(uint16_t* p, I16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}

// Sums of four products: unsigned bytes below 16 with signed bytes. `open` ... `dot_small` up to 8 times ... `close`.
DI_INLINE I16 open(I16 bias) { return bias; }
DI_INLINE I16 dot_small(I16 sum, I16 u, I16 s) { return {_mm512_dpbusd_epi32(sum.v, u.v, s.v)}; }
DI_INLINE I16 close(I16 sum, I16) { return sum; }

// The same of unsigned bytes up to 128, any number of times, without `close`.
DI_INLINE I16 dot_unsigned(I16 sum, I16 u, I16 s) { return dot_small(sum, u, s); }

// The same of bytes stored as q + 128. `bias` is -128 times the sum of the signed bytes.
DI_INLINE I16 open_signed(I16 bias) { return bias; }
DI_INLINE I16 dot_signed(I16 sum, I16 w, I16 s) { return {_mm512_dpbusd_epi32(sum.v, w.v, s.v)}; }

// Two products of bfloat16 a lane.
DI_INLINE F16 dot_bf16(F16 sum, I16 w, I16 a) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)a.v)};
}

#else

constexpr bool kWide = false;
constexpr const char* kPath = "avx2";

struct F16 {
  __m256 a, b;
};
struct I16 {
  __m256i a, b;
};

DI_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
DI_INLINE F16 set(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
DI_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
DI_INLINE void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
DI_INLINE F16 load_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
DI_INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
DI_INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
DI_INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
DI_INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
DI_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
DI_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
DI_INLINE F16 fma(F16 x, F16 y, F16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
DI_INLINE F16 round(F16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
DI_INLINE I16 to_int(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
DI_INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
DI_INLINE I16 bits(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
DI_INLINE F16 from_bits(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
DI_INLINE I16 unless_nan(F16 x, I16 then, I16 otherwise) {
  return {_mm256_blendv_epi8(then.a, otherwise.a, _mm256_castps_si256(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q))),
          _mm256_blendv_epi8(then.b, otherwise.b, _mm256_castps_si256(_mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)))};
}

DI_INLINE I16 set_int(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
DI_INLINE I16 load_int(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
DI_INLINE void store_int(void* p, I16 x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
DI_INLINE I16 add(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
DI_INLINE I16 sub(I16 x, I16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
DI_INLINE I16 max(I16 x, I16 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
DI_INLINE I16 both(I16 x, I16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
template <int N>
DI_INLINE I16 shift_left(I16 x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N>
DI_INLINE I16 shift_right(I16 x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N>
DI_INLINE I16 shift_right_signed(I16 x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }

DI_INLINE void store_bytes(int8_t* p, I16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
DI_INLINE void store_words(uint16_t* p, I16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

// Eight sums of two products of at most 15 * 127 each stay within int16; wider ones are summed in int32 at once.
DI_INLINE I16 open(I16) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
DI_INLINE I16 dot_small(I16 sum, I16 u, I16 s) {
  return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(u.a, s.a)),
          _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(u.b, s.b))};
}
DI_INLINE I16 close(I16 sum, I16 bias) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(_mm256_madd_epi16(sum.a, ones), bias.a),
          _mm256_add_epi32(_mm256_madd_epi16(sum.b, ones), bias.b)};
}

DI_INLINE __m256i dot_unsigned_half(__m256i sum, __m256i u, __m256i s) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
DI_INLINE I16 dot_unsigned(I16 sum, I16 u, I16 s) {
  return {dot_unsigned_half(sum.a, u.a, s.a), dot_unsigned_half(sum.b, u.b, s.b)};
}

// |w| * sign(s, w): the unsigned operand is at most 128, so that maddubs never saturates.
DI_INLINE I16 open_signed(I16) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
DI_INLINE __m256i dot_signed_half(__m256i sum, __m256i w, __m256i s) {
  const __m256i q = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
  return dot_unsigned_half(sum, _mm256_abs_epi8(q), _mm256_sign_epi8(s, q));
}
DI_INLINE I16 dot_signed(I16 sum, I16 w, I16 s) {
  return {dot_signed_half(sum.a, w.a, s.a), dot_signed_half(sum.b, w.b, s.b)};
}

DI_INLINE F16 dot_bf16(F16 sum, I16 w, I16 a) {
  const I16 high = set_int(static_cast<int32_t>(0xffff0000));
  const F16 first = fma(from_bits(shift_left<16>(w)), from_bits(shift_left<16>(a)), sum);
  return fma(from_bits(both(w, high)), from_bits(both(a, high)), first);
}

#endif

DI_INLINE int32_t largest(__m256i x) {  // of the lanes
  __m128i v = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
#if defined(__AVX512F__)
DI_INLINE int32_t largest(I16 x) {
  return largest(_mm256_max_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1)));
}
#else
DI_INLINE int32_t largest(I16 x) { return largest(_mm256_max_epi32(x.a, x.b)); }
#endif
DI_INLINE int32_t sum_of_16(const int8_t* p) {
  const __m128i unsigned_q = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
  const __m128i halves = _mm_sad_epu8(unsigned_q, _mm_setzero_si128());
  return _mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 2) - 16 * 128;
}

DI_INLINE I16 set_int(const void* p) {  // four bytes, whatever they are, in every lane
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return set_int(x);
}
DI_INLINE I16 low_nibbles(I16 x) { return both(x, set_int(0x0f0f0f0f)); }
DI_INLINE I16 high_nibbles(I16 x) { return both(shift_right<4>(x), set_int(0x0f0f0f0f)); }
DI_INLINE F16 abs(F16 x) { return from_bits(both(bits(x), set_int(0x7fffffff))); }

DI_INLINE void store_part(float* p, F16 x, int64_t n) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}
DI_INLINE F16 load_part(const float* p, int64_t n) {  // zeros after the first n
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return load(lanes);
}

// The sum of all lanes, in one fixed tree.
inline float total(F16 x) {
  alignas(64) float lanes[kLanes];
  store(lanes, x);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  return lanes[0];
}

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float bf16_to_float(uint16_t h) {
  const uint32_t b = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &b, sizeof x);
  return x;
}
constexpr uint16_t kNaN = 0x7fc0;  // whichever it was: its low bits would round to infinity, or over the sign to zero

inline uint16_t float_to_bf16(float x) {  // to nearest, ties to even; a NaN stays one
  if (x != x) return kNaN;
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

// n values as bfloat16, and a zero after an odd number.
inline void round_row(const float* x, int64_t n, uint16_t* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F16 v = load(x + i);
    const I16 b = bits(v), odd = both(shift_right<16>(b), set_int(1));
    const I16 rounded = shift_right<16>(add(add(b, set_int(0x7fff)), odd));
    store_words(to + i, unless_nan(v, rounded, set_int(int32_t{kNaN})));
  }
  for (; i < n; ++i) to[i] = float_to_bf16(x[i]);
  if (n % 2) to[n] = 0;
}

}  // namespace di

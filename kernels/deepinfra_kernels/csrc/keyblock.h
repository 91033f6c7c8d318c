// 64 keys and values of one head, packed for products: each key's numbers down a column, each value's along a row.
// With bfloat16 a word holds two of them: two numbers of a key, one number of two values at neighbouring positions.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "cache.h"

namespace di {

constexpr int64_t kKeys = 64;  // positions in a block, which begins at a multiple of it

struct KeyBlock {
  int32_t* keys;    // [words of a key][kKeys]
  int32_t* values;  // [kKeys or half of it][dim]
};

namespace keyblock {

// Where sixteen cells lie one after the other, those of positions `from .. from + 16`: in their block, or copied to
// `room` if they are in several, or if some from `end` on are nobody's yet, which count as zeros.
inline const char* sixteen(const Cells& cells, const char* base, int64_t from, int64_t end, char* room) {
  const auto cell = [&](int64_t position) {
    return base + (cells.table[position / cells.block_size] * cells.block_size + position % cells.block_size) * cells.nbytes;
  };
  if (from % cells.block_size + kLanes <= cells.block_size && from + kLanes <= end) return cell(from);
  const int64_t known = std::min(kLanes, end - from);
  for (int64_t i = 0; i < known; ++i) std::memcpy(room + i * cells.nbytes, cell(from + i), size_t(cells.nbytes));
  std::memset(room + known * cells.nbytes, 0, size_t((kLanes - known) * cells.nbytes));
  return room;
}

// Four words of sixteen rows `stride` bytes apart, turned: word w of row r becomes lane r of to[w].
DI_INLINE void turn(const char* rows, int64_t stride, I16 (&to)[4]) {
  const char* const fourth[4] = {rows, rows + 4 * stride, rows + 8 * stride, rows + 12 * stride};
  const int64_t within[4] = {0, stride, 2 * stride, 3 * stride};
  const auto part = [&](int quarter, int k) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(fourth[quarter] + within[k]));
  };
#if defined(__AVX512F__)
  // Parts are put together by masked loads: inserting them would take turns with the unpacking below.
  const auto quad = [&](int k) {
    __m512i x = _mm512_castsi128_si512(part(0, k));
    x = _mm512_mask_broadcast_i32x4(x, 0x00f0, part(1, k));
    x = _mm512_mask_broadcast_i32x4(x, 0x0f00, part(2, k));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, part(3, k));
  };
  const __m512i a = quad(0), b = quad(1), c = quad(2), d = quad(3);
  const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
  const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
  to[0] = {_mm512_unpacklo_epi64(ab0, cd0)};
  to[1] = {_mm512_unpackhi_epi64(ab0, cd0)};
  to[2] = {_mm512_unpacklo_epi64(ab1, cd1)};
  to[3] = {_mm512_unpackhi_epi64(ab1, cd1)};
#else
  __m256i half[2][4];
  for (int i = 0; i < 2; ++i) {
    const auto pair = [&](int k) {
      return _mm256_inserti128_si256(_mm256_castsi128_si256(part(2 * i, k)), part(2 * i + 1, k), 1);
    };
    const __m256i a = pair(0), b = pair(1), c = pair(2), d = pair(3);
    const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    half[i][0] = _mm256_unpacklo_epi64(ab0, cd0);
    half[i][1] = _mm256_unpackhi_epi64(ab0, cd0);
    half[i][2] = _mm256_unpacklo_epi64(ab1, cd1);
    half[i][3] = _mm256_unpackhi_epi64(ab1, cd1);
  }
  for (int w = 0; w < 4; ++w) to[w] = {half[0][w], half[1][w]};
#endif
}

// Sixteen bfloat16 of two rows, in turns.
DI_INLINE I16 interleave(const char* even, const char* odd) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd));
#if defined(__AVX512F__)
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
  return {_mm512_or_si512(_mm512_cvtepu16_epi32(a), high)};
#else
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
#endif
}

// One step of a chain of products: of two bfloat16 a lane, or of one float32.
template <bool kBf16>
DI_INLINE F16 chain(F16 sum, I16 right, I16 left) {
  if constexpr (kBf16) return dot_bf16(sum, right, left);
  return fma(from_bits(left), from_bits(right), sum);
}

// Words of 16 N columns of values: numbers of one position, or of two neighbours.
template <bool kBf16, int N>
DI_INLINE void value_words(const char* row, int64_t stride, I16 (&to)[N]) {
  int n = 0;
#if defined(__AVX512F__)
  if constexpr (kBf16) {
    alignas(64) static constexpr auto index = [] {
      std::array<uint16_t, 64> at{};
      for (int i = 0; i < 64; ++i) at[i] = uint16_t(i % 2 * 32 + i / 2);
      return at;
    }();
    const __m512i low = _mm512_load_si512(index.data()), high = _mm512_load_si512(index.data() + 32);
#pragma GCC unroll 2
    for (; n + 2 <= N; n += 2) {
      const __m512i even = _mm512_loadu_si512(row + 32 * n), odd = _mm512_loadu_si512(row + stride + 32 * n);
      to[n] = {_mm512_permutex2var_epi16(even, low, odd)};
      to[n + 1] = {_mm512_permutex2var_epi16(even, high, odd)};
    }
  }
#endif
#pragma GCC unroll 4
  for (; n < N; ++n) {
    if constexpr (kBf16) {
      to[n] = interleave(row + 32 * n, row + stride + 32 * n);
    } else {
      to[n] = load_int(row + 64 * n);
    }
  }
}

}  // namespace keyblock

// The cells of one block of a sequence, sixteen by sixteen.
struct BlockRows {
  const char *keys[kKeys / kLanes], *values[kKeys / kLanes];
  int64_t used, stride;  // how many positions take part: up to the sequence's end, rounded up to 16

  // `room` holds two blocks of cells.
  BlockRows(const Cells& cells, int64_t from, int64_t end, char* room)
      : used(std::min(kKeys, (end - from + kLanes - 1) / kLanes * kLanes)), stride(cells.nbytes) {
    for (int64_t i = 0; i < used / kLanes; ++i, room += 2 * kLanes * stride) {
      keys[i] = keyblock::sixteen(cells, cells.keys, from + i * kLanes, end, room);
      values[i] = keyblock::sixteen(cells, cells.values, from + i * kLanes, end, room + kLanes * stride);
    }
  }
};

// Whether all values of a block are finite.
template <bool kBf16>
inline bool finite(const BlockRows& rows, int64_t dim) {
  using Word = std::conditional_t<kBf16, uint16_t, uint32_t>;
  constexpr Word exponent = static_cast<Word>(kBf16 ? 0x7f80 : 0x7f800000);
  Word found = 0;
  for (int64_t group = 0; group < rows.used / kLanes; ++group) {
    const Word* words = reinterpret_cast<const Word*>(rows.values[group]);
    for (int64_t i = 0; i < kLanes * dim; ++i) found |= (words[i] & exponent) == exponent;
  }
  return !found;
}

// Packs a block; what lies behind its used positions is not written.
template <bool kBf16>
inline void pack(const BlockRows& rows, int64_t dim, const KeyBlock& to) {
  const int64_t words = kBf16 ? dim / 2 : dim, apart = kBf16 ? 2 : 1;
  for (int64_t key = 0; key < rows.used; key += kLanes) {
    for (int64_t word = 0; word < words; word += 4) {
      I16 turned[4];
      keyblock::turn(rows.keys[key / kLanes] + word * 4, rows.stride, turned);
      for (int w = 0; w < 4; ++w) store_int(to.keys + (word + w) * kKeys + key, turned[w]);
    }
    for (int64_t at = 0; at < kLanes; at += apart) {
      const char* row = rows.values[key / kLanes] + at * rows.stride;
      int32_t* packed = to.values + (key + at) / apart * dim;
      int64_t i = 0;
      for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
        I16 two[2];
        keyblock::value_words<kBf16, 2>(row + i * (kBf16 ? 2 : 4), rows.stride, two);
        store_int(packed + i, two[0]);
        store_int(packed + i + kLanes, two[1]);
      }
      if (i < dim) {
        I16 one[1];
        keyblock::value_words<kBf16, 1>(row + i * (kBf16 ? 2 : 4), rows.stride, one);
        store_int(packed + i, one[0]);
      }
    }
  }
}

// Few rows take a block's keys and values as they lie: packing them would take as long again as their products. The
// chains of sums are those of `multiply` on a packed block, bit for bit.
constexpr int kFew = kWide ? 4 : 0;

template <bool kBf16, int R, int N>
DI_INLINE void multiply_keys(const int32_t* queries, int64_t words, const BlockRows& rows, int64_t key, float* scores) {
  F16 sum[N][R];
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum[n][r] = zero();
  for (int64_t word = 0; word < words; word += 4) {
    I16 turned[N][4];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) keyblock::turn(rows.keys[key / kLanes + n] + word * 4, rows.stride, turned[n]);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const I16 left = set_int(queries[r * words + word + w]);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sum[n][r] = keyblock::chain<kBf16>(sum[n][r], turned[n][w], left);
      }
  }
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(scores + r * kKeys + key + n * kLanes, sum[n][r]);
}

template <bool kBf16, int R, int N>
DI_INLINE void multiply_values(const int32_t* weights, const BlockRows& rows, int64_t column, float* mixed, int64_t dim,
                               const float* scale) {
  F16 sum[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = mul(load(mixed + r * dim + column + n * kLanes), set(scale[r]));
  constexpr int64_t apart = kBf16 ? 2 : 1, steps = kLanes / apart;
  for (int64_t group = 0; group < rows.used / kLanes; ++group) {
    const char* row = rows.values[group] + column * (kBf16 ? 2 : 4);
    for (int64_t step = group * steps; step < (group + 1) * steps; ++step, row += apart * rows.stride) {
      I16 words[N];
      keyblock::value_words<kBf16, N>(row, rows.stride, words);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const I16 left = set_int(weights[r * kKeys + step]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = keyblock::chain<kBf16>(sum[r][n], words[n], left);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(mixed + r * dim + column + n * kLanes, sum[r][n]);
}

template <bool kBf16, int R>
inline void few_scores(const int32_t* queries, int64_t words, const BlockRows& rows, float* scores) {
  int64_t key = 0;
  for (; key + 2 * kLanes <= rows.used; key += 2 * kLanes) {
    multiply_keys<kBf16, R, 2>(queries, words, rows, key, scores);
  }
  if (key < rows.used) multiply_keys<kBf16, R, 1>(queries, words, rows, key, scores);
}

template <bool kBf16, int R>
inline void few_mixed(const int32_t* weights, const BlockRows& rows, float* mixed, int64_t dim, const float* scale) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= dim; column += 4 * kLanes) {
    multiply_values<kBf16, R, 4>(weights, rows, column, mixed, dim, scale);
  }
  for (; column < dim; column += kLanes) multiply_values<kBf16, R, 1>(weights, rows, column, mixed, dim, scale);
}

// Calls f with a number from 1 to kFew as a constant.
template <class F>
DI_INLINE void with_few(int64_t rows, F f) {
  switch (rows) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    default: return f.template operator()<4>();
  }
}

// c[R][16 N] = scale * c + a[R][n words] * b[n][16 N words], summed over words in their order. Without `scale`, c begins
// at zero.
template <bool kBf16, int R, int N>
DI_INLINE void multiply(const int32_t* a, int64_t lda, const int32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                        const float* scale) {
  F16 sum[R][N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sum[r][j] = scale ? mul(load(c + r * ldc + j * kLanes), set(scale[r])) : zero();
  for (int64_t k = 0; k < n; ++k) {
    I16 right[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) right[j] = load_int(b + k * ldb + j * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const I16 left = set_int(a[r * lda + k]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sum[r][j] = keyblock::chain<kBf16>(sum[r][j], right[j], left);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(c + r * ldc + j * kLanes, sum[r][j]);
}

// Rows of a product computed together. Registers: 6 x 4 sums and 4 + 1 operands with AVX-512; AVX2 has half as many
// registers of half the width.
constexpr int kRowsAtOnce = kWide ? 6 : 3;
constexpr int kVectorsAtOnce = kWide ? 4 : 1;

template <bool kBf16, int R>
inline void multiply_rows(const int32_t* a, int64_t lda, const int32_t* b, int64_t ldb, int64_t n, float* c,
                          int64_t ldc, int64_t columns, const float* scale) {
  int64_t at = 0;
  for (; at + kVectorsAtOnce * kLanes <= columns; at += kVectorsAtOnce * kLanes) {
    multiply<kBf16, R, kVectorsAtOnce>(a, lda, b + at, ldb, n, c + at, ldc, scale);
  }
  if constexpr (kVectorsAtOnce == 4) {
    if (columns - at >= 2 * kLanes) {
      multiply<kBf16, R, 2>(a, lda, b + at, ldb, n, c + at, ldc, scale);
      at += 2 * kLanes;
    }
    if (columns > at) multiply<kBf16, R, 1>(a, lda, b + at, ldb, n, c + at, ldc, scale);
  }
}

// As `multiply`, of up to kRowsAtOnce rows and any multiple of 16 columns.
template <bool kBf16>
inline void multiply(int64_t rows, const int32_t* a, int64_t lda, const int32_t* b, int64_t ldb, int64_t n, float* c,
                     int64_t ldc, int64_t columns, const float* scale) {
  switch (rows) {
    case 1: return multiply_rows<kBf16, 1>(a, lda, b, ldb, n, c, ldc, columns, scale);
    case 2: return multiply_rows<kBf16, 2>(a, lda, b, ldb, n, c, ldc, columns, scale);
    case 3: return multiply_rows<kBf16, 3>(a, lda, b, ldb, n, c, ldc, columns, scale);
    default: break;
  }
  if constexpr (kRowsAtOnce > 3) {
    switch (rows) {
      case 4: return multiply_rows<kBf16, 4>(a, lda, b, ldb, n, c, ldc, columns, scale);
      case 5: return multiply_rows<kBf16, 5>(a, lda, b, ldb, n, c, ldc, columns, scale);
      case 6: return multiply_rows<kBf16, 6>(a, lda, b, ldb, n, c, ldc, columns, scale);
      default: break;
    }
  }
}

}  // namespace di

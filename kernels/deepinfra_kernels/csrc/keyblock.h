// 64 keys and values of one head, packed for products: each key's numbers down a column, each value's along a row.
// With bfloat16 a word holds two of them: two numbers of a key, one number of two values at neighbouring positions.
#pragma once

#include <algorithm>

#include "cache.h"

namespace di {

constexpr int64_t kKeys = 64;  // positions in a block, which begins at a multiple of it
constexpr int64_t kMaxDim = 256;

struct KeyBlock {
  int32_t* keys;    // [words of a key][kKeys]
  int32_t* values;  // [kKeys or half of it][dim]
};

namespace keyblock {

inline const char* zeros() {
  alignas(64) static const char cell[kMaxDim * 4] = {};
  return cell;
}

// Where the cells of positions `from .. from + kKeys` lie; those from `end` on are nobody's yet and count as zeros.
inline void rows(const Cells& cells, const char* base, int64_t from, int64_t end, const char** at) {
  const int64_t known = std::min(kKeys, end - from);
  int64_t block = from / cells.block_size, inside = from % cells.block_size;
  for (int64_t i = 0; i < known; inside = 0, ++block) {
    const char* row = base + (cells.table[block] * cells.block_size + inside) * cells.nbytes;
    for (const int64_t last = std::min(known, i + cells.block_size - inside); i < last; ++i, row += cells.nbytes) {
      at[i] = row;
    }
  }
  for (int64_t i = known; i < kKeys; ++i) at[i] = zeros();
}

// Four words of sixteen rows, turned: word w of row r becomes [w][r].
DI_INLINE void turn(const char* const* at, int64_t offset, int32_t* to) {
#if defined(__AVX512F__)
  const auto quad = [&](int k) {
    const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at[row] + offset)); };
    __m512i x = _mm512_castsi128_si512(part(k));
    x = _mm512_inserti32x4(x, part(4 + k), 1);
    x = _mm512_inserti32x4(x, part(8 + k), 2);
    return _mm512_inserti32x4(x, part(12 + k), 3);
  };
  const __m512i a = quad(0), b = quad(1), c = quad(2), d = quad(3);
  const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
  const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
  _mm512_storeu_si512(to, _mm512_unpacklo_epi64(ab0, cd0));
  _mm512_storeu_si512(to + kKeys, _mm512_unpackhi_epi64(ab0, cd0));
  _mm512_storeu_si512(to + 2 * kKeys, _mm512_unpacklo_epi64(ab1, cd1));
  _mm512_storeu_si512(to + 3 * kKeys, _mm512_unpackhi_epi64(ab1, cd1));
#else
  for (int half = 0; half < 2; ++half, at += 8, to += 8) {
    const auto pair = [&](int k) {
      const auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at[row] + offset)); };
      return _mm256_inserti128_si256(_mm256_castsi128_si256(part(k)), part(4 + k), 1);
    };
    const __m256i a = pair(0), b = pair(1), c = pair(2), d = pair(3);
    const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    const auto keep = [&](int row, __m256i x) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row * kKeys), x);
    };
    keep(0, _mm256_unpacklo_epi64(ab0, cd0));
    keep(1, _mm256_unpackhi_epi64(ab0, cd0));
    keep(2, _mm256_unpacklo_epi64(ab1, cd1));
    keep(3, _mm256_unpackhi_epi64(ab1, cd1));
  }
#endif
}

// Sixteen bfloat16 of two rows, in turns.
DI_INLINE void interleave(const char* even, const char* odd, int32_t* to) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd));
#if defined(__AVX512F__)
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(a), high));
#else
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm256_permute2x128_si256(low, high, 0x31));
#endif
}

}  // namespace keyblock

// Packs the block that begins at position `from`; `end` is where the sequence ends. Returns how many keys were packed, a
// multiple of 16: what lies behind them is not zeroed.
inline int64_t pack(const Cells& cells, int64_t from, int64_t end, const KeyBlock& to) {
  const char* at[kKeys];
  const int64_t used = std::min(kKeys, (end - from + kLanes - 1) / kLanes * kLanes);
  keyblock::rows(cells, cells.keys, from, end, at);
  for (int64_t key = 0; key < used; key += kLanes) {
    for (int64_t word = 0; word * 4 < cells.nbytes; word += 4) {
      keyblock::turn(at + key, word * 4, to.keys + word * kKeys + key);
    }
  }
  keyblock::rows(cells, cells.values, from, end, at);
  if (!cells.bf16) {
    for (int64_t key = 0; key < used; ++key) std::memcpy(to.values + key * cells.dim, at[key], size_t(cells.nbytes));
    return used;
  }
  for (int64_t key = 0; key < used; key += 2) {
    int32_t* row = to.values + key / 2 * cells.dim;
    for (int64_t i = 0; i < cells.dim; i += 16) keyblock::interleave(at[key] + 2 * i, at[key + 1] + 2 * i, row + i);
  }
  return used;
}

// c[R][16 N] = scale * c + a[R][n words] * b[n][16 N words], summed over words in their order. Without `scale`, c begins
// at zero.
template <bool kBf16, int R, int N>
DI_INLINE void multiply(const int32_t* a, int64_t lda, const int32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                        const float* scale) {
  F16 sum[R][N];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < N; ++j) sum[r][j] = scale ? mul(load(c + r * ldc + j * kLanes), set(scale[r])) : zero();
  }
  for (int64_t k = 0; k < n; ++k) {
    I16 right[N];
    for (int j = 0; j < N; ++j) right[j] = load_int(b + k * ldb + j * kLanes);
    for (int r = 0; r < R; ++r) {
      const I16 left = set_int(a[r * lda + k]);
      for (int j = 0; j < N; ++j) {
        if constexpr (kBf16) {
          sum[r][j] = dot_bf16(sum[r][j], right[j], left);
        } else {
          sum[r][j] = fma(from_bits(left), from_bits(right[j]), sum[r][j]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < N; ++j) store(c + r * ldc + j * kLanes, sum[r][j]);
  }
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

// 64 keys and values of one head, sixteen by sixteen where they lie, and the products of rows with them.
#pragma once

#include "cache.h"

namespace di {

constexpr int64_t kKeys = 64;  // positions in a block, which begins at a multiple of it
constexpr int64_t kGroups = kKeys / kLanes;

// The cells of one block of a sequence, in groups of sixteen as `Cache` has them.
struct BlockRows {
  const char *keys[kGroups], *values[kGroups];
  int64_t used;  // how many positions take part: up to the sequence's end, rounded up to 16

  // `room` holds two blocks of cells. A group is copied to it if it does not lie together, and its values if some from
  // `end` on are nobody's yet, which count as zeros. The scores of such keys are never looked at.
  template <bool kBf16>
  static BlockRows of(const Cells& cells, int64_t from, int64_t end, char* room) {
    BlockRows rows;
    rows.used = std::min(kKeys, (end - from + kLanes - 1) / kLanes * kLanes);
    const int64_t nbytes = kLanes * cells.nbytes;
    for (int64_t i = 0; i < rows.used / kLanes; ++i, from += kLanes, room += 2 * nbytes) {
      const int64_t offset = from % cells.block_size, known = std::min(kLanes, end - from);
      const Area<kBf16> keys = cells.keys<kBf16>(from), values = cells.values<kBf16>(from);
      const Area<kBf16> own_keys{room, kLanes, cells.dim}, own_values{room + nbytes, kLanes, cells.dim};
      const bool together = offset % kLanes == 0 && offset + kLanes <= cells.block_size;
      rows.keys[i] = together ? keys.data + offset * cells.nbytes : room;
      rows.values[i] = together && known == kLanes ? values.data + offset * cells.nbytes : room + nbytes;
      alignas(64) Number<kBf16> x[kMostDim];
      for (int64_t at = 0; at < known && !together; ++at) {
        const int64_t position = from + at;
        cells.keys<kBf16>(position).get_key(position % cells.block_size, x);
        own_keys.put_key(at, x);
        cells.values<kBf16>(position).get_value(position % cells.block_size, x);
        own_values.put_value(at, x);
      }
      if (known == kLanes) continue;
      if (together) std::memcpy(room + nbytes, values.data + offset * cells.nbytes, size_t(nbytes));
      std::memset(x, 0, sizeof x);
      for (int64_t at = known; at < kLanes; ++at) own_values.put_value(at, x);
    }
    return rows;
  }
};

// Where the cells lie that are needed next. A group that does not lie together has a place in one of its blocks.
struct Ahead {
  const char *keys[kGroups], *values[kGroups];

  Ahead(const Cells& cells, int64_t from, int64_t end) {
    for (int64_t i = 0; i < kGroups; ++i, from += kLanes) {
      const int64_t position = std::min(from, end - 1), offset = position % cells.block_size / kLanes * kLanes;
      keys[i] = cells.keys<false>(position).data + offset * cells.nbytes;
      values[i] = keys[i] + cells.area_nbytes;
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

// One step of a chain of products: of two bfloat16 a lane, or of one float32.
template <bool kBf16>
DI_INLINE F16 chain(F16 sum, I16 right, I16 left) {
  if constexpr (kBf16) return dot_bf16(sum, right, left);
  return fma(from_bits(left), from_bits(right), sum);
}

// Rows of a product computed together. Registers: 6 x 4 sums and 4 + 1 operands with AVX-512; AVX2 has half as many
// registers of half the width.
constexpr int kRowsAtOnce = kWide ? 6 : 3;
constexpr int kVectorsAtOnce = kWide ? 4 : 1;

// scores[R][16 N] of N groups, summed over words in their order. What is needed next is fetched into the second level
// meanwhile: into the first it took a tenth longer than without.
template <bool kBf16, int R, int N>
DI_INLINE void multiply_keys(const int32_t* queries, int64_t words, const BlockRows& rows, int64_t group, float* scores,
                             const Ahead* ahead) {
  F16 sum[R][N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = zero();
  for (int64_t word = 0; word < words; ++word) {
    const int64_t at = word * kLanes * 4;
    I16 right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) right[n] = load_int(rows.keys[group + n] + at);
    if (ahead) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) _mm_prefetch(ahead->keys[group + n] + at, _MM_HINT_T1);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const I16 left = set_int(queries[r * words + word]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = chain<kBf16>(sum[r][n], right[n], left);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(scores + r * kKeys + (group + n) * kLanes, sum[r][n]);
}

// mixed[R][16 N] = scale * mixed + weights * values of the first `used` positions, summed in their order.
template <bool kBf16, int R, int N>
DI_INLINE void multiply_values(const int32_t* weights, const BlockRows& rows, int64_t used, int64_t column, float* mixed,
                               int64_t dim, const float* scale, const Ahead* ahead) {
  F16 sum[R][N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = mul(load(mixed + r * dim + column + n * kLanes), set(scale[r]));
  constexpr int64_t steps = kBf16 ? kLanes / 2 : kLanes;
  for (int64_t group = 0; group < used / kLanes; ++group) {
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t at = (step * dim + column) * 4;
      I16 right[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) right[n] = load_int(rows.values[group] + at + n * 4 * kLanes);
      if (ahead) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) _mm_prefetch(ahead->values[group] + at + n * 4 * kLanes, _MM_HINT_T1);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const I16 left = set_int(weights[r * kKeys + group * steps + step]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = chain<kBf16>(sum[r][n], right[n], left);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(mixed + r * dim + column + n * kLanes, sum[r][n]);
}

// Scores of the first `used` positions, a multiple of 16.
template <bool kBf16, int R>
inline void multiply_keys(const int32_t* queries, int64_t words, const BlockRows& rows, int64_t used, float* scores,
                          const Ahead* ahead) {
  const int64_t groups = used / kLanes;
  int64_t group = 0;
  for (; group + kVectorsAtOnce <= groups; group += kVectorsAtOnce) {
    multiply_keys<kBf16, R, kVectorsAtOnce>(queries, words, rows, group, scores, ahead);
  }
  if constexpr (kVectorsAtOnce > 1) {
    if (group + 2 <= groups) {
      multiply_keys<kBf16, R, 2>(queries, words, rows, group, scores, ahead);
      group += 2;
    }
    if (group < groups) multiply_keys<kBf16, R, 1>(queries, words, rows, group, scores, ahead);
  }
}

// All columns.
template <bool kBf16, int R>
inline void multiply_values(const int32_t* weights, const BlockRows& rows, int64_t used, float* mixed, int64_t dim,
                            const float* scale, const Ahead* ahead) {
  int64_t column = 0;
  for (; column + kVectorsAtOnce * kLanes <= dim; column += kVectorsAtOnce * kLanes) {
    multiply_values<kBf16, R, kVectorsAtOnce>(weights, rows, used, column, mixed, dim, scale, ahead);
  }
  if constexpr (kVectorsAtOnce > 1) {
    for (; column < dim; column += kLanes) {
      multiply_values<kBf16, R, 1>(weights, rows, used, column, mixed, dim, scale, ahead);
    }
  }
}

// Calls f with `rows`, from 1 to kRowsAtOnce, as a constant.
template <class F>
DI_INLINE void with_rows(int64_t rows, F f) {
  switch (rows) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    default: break;
  }
  if constexpr (kRowsAtOnce > 3) {
    switch (rows) {
      case 4: return f.template operator()<4>();
      case 5: return f.template operator()<5>();
      default: return f.template operator()<6>();
    }
  }
}

}  // namespace di

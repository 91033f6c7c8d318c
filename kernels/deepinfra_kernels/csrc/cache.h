// Keys and values as kernels read them: `[blocks, layers, kv_heads, k|v]`, each an area of `block_size` cells.
//
// In an area sixteen positions lie as products take them, so that nothing is turned or interleaved when it is read. A
// word is a float32, or two bfloat16. Of sixteen keys each word lies in sixteen lanes: `[words of a key][16]`. Of values
// a word is one number of a position, or of two neighbours: `[16 or 8][dim]`. What is left of a block whose size is no
// multiple of sixteen is as many lanes wide as it has positions; of an odd number the last value lies alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa.h"

namespace di {

constexpr int64_t kMostDim = 256;  // of a head

template <bool kBf16>
using Number = std::conditional_t<kBf16, uint16_t, float>;  // as its bits are kept

// The keys or the values of a block in one head of a layer, cell by cell.
template <bool kBf16>
struct Area {
  char* data;
  int64_t block_size, dim;

  void put_key(int64_t offset, const Number<kBf16>* x) const {
    const int64_t apart = lanes(offset);
    char* to = word(offset);
    for (int64_t w = 0; w < words(); ++w) std::memcpy(to + w * apart * 4, x + w * kPerWord, 4);
  }

  void get_key(int64_t offset, Number<kBf16>* x) const {
    const int64_t apart = lanes(offset);
    const char* from = word(offset);
    for (int64_t w = 0; w < words(); ++w) std::memcpy(x + w * kPerWord, from + w * apart * 4, 4);
  }

  // Neighbours may be written by two threads at a time: only the position's own bytes are.
  void put_value(int64_t offset, const Number<kBf16>* x) const {
    Number<kBf16>* to = value(offset);
    if (apart(offset) == 1) {
      std::memcpy(to, x, size_t(dim) * sizeof *x);
      return;
    }
    if constexpr (kBf16) {
#if defined(__AVX512F__)
      for (int64_t i = 0; i < dim; i += kLanes) {
        const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        _mm512_mask_storeu_epi16(to + 2 * i, 0x55555555u, _mm512_cvtepu16_epi32(numbers));
      }
#else
      for (int64_t i = 0; i < dim; ++i) to[2 * i] = x[i];
#endif
    }
  }

  void get_value(int64_t offset, Number<kBf16>* x) const {
    const Number<kBf16>* from = value(offset);
    if (apart(offset) == 1) {
      std::memcpy(x, from, size_t(dim) * sizeof *x);
    } else {
      for (int64_t i = 0; i < dim; ++i) x[i] = from[2 * i];
    }
  }

 private:
  static constexpr int64_t kPerWord = kBf16 ? 2 : 1;

  int64_t words() const { return dim / kPerWord; }
  int64_t lanes(int64_t offset) const { return std::min(kLanes, block_size - offset / kLanes * kLanes); }
  char* word(int64_t offset) const { return data + (offset / kLanes * kLanes * words() + offset % kLanes) * 4; }
  int64_t apart(int64_t offset) const { return kBf16 && (offset | 1) < block_size ? 2 : 1; }
  Number<kBf16>* value(int64_t offset) const {
    const int64_t odd = kBf16 ? offset & 1 : 0;
    return reinterpret_cast<Number<kBf16>*>(data) + (offset - odd) * dim + odd;
  }
};

struct Cache {
  void* data;
  bool bf16;  // or float32
  int64_t layers, heads, blocks, block_size, dim;

  int64_t nbytes() const { return dim * (bf16 ? 2 : 4); }  // of one cell
  int64_t area_nbytes() const { return block_size * nbytes(); }
  int64_t block_nbytes() const { return layers * heads * 2 * area_nbytes(); }

  // The keys of one head of a layer in a block; the values lie behind them.
  char* keys(int64_t block, int64_t layer, int64_t head) const {
    return static_cast<char*>(data) + block * block_nbytes() + (layer * heads + head) * 2 * area_nbytes();
  }

  // Calls f(area, true for keys, offset, cell) of each cell of a block, where `cell` is its place in
  // `[layers, k|v, positions, kv_heads, dim]`.
  template <bool kBf16, class F>
  void each(int64_t block, F f) const {
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (int64_t head = 0; head < heads; ++head) {
        for (int64_t which = 0; which < 2; ++which) {
          const Area<kBf16> area{keys(block, layer, head) + which * area_nbytes(), block_size, dim};
          for (int64_t offset = 0; offset < block_size; ++offset) {
            f(area, which == 0, offset, ((layer * 2 + which) * block_size + offset) * heads + head);
          }
        }
      }
    }
  }

  // A block from and to `[layers, k|v, positions, kv_heads, dim]`, which need not be aligned.
  template <bool kBf16>
  void put(int64_t block, const char* payload) const {
    each<kBf16>(block, [&](const Area<kBf16>& area, bool key, int64_t offset, int64_t cell) {
      alignas(64) Number<kBf16> x[kMostDim];
      std::memcpy(x, payload + cell * nbytes(), size_t(nbytes()));
      key ? area.put_key(offset, x) : area.put_value(offset, x);
    });
  }
  template <bool kBf16>
  void get(int64_t block, char* payload) const {
    each<kBf16>(block, [&](const Area<kBf16>& area, bool key, int64_t offset, int64_t cell) {
      alignas(64) Number<kBf16> x[kMostDim];
      key ? area.get_key(offset, x) : area.get_value(offset, x);
      std::memcpy(payload + cell * nbytes(), x, size_t(nbytes()));
    });
  }
};

// One sequence's cells in one head of a layer. A position's cell depends on the table alone.
struct Cells {
  char* first;  // the keys in block 0
  const int64_t* table;
  int64_t block_size, dim, nbytes, area_nbytes, block_nbytes;
  bool bf16;

  Cells(const Cache& cache, int64_t layer, int64_t head, const int64_t* blocks)
      : first(cache.keys(0, layer, head)),
        table(blocks),
        block_size(cache.block_size),
        dim(cache.dim),
        nbytes(cache.nbytes()),
        area_nbytes(cache.area_nbytes()),
        block_nbytes(cache.block_nbytes()),
        bf16(cache.bf16) {}

  // Of the block that a position is in.
  template <bool kBf16>
  Area<kBf16> keys(int64_t position) const {
    return {first + table[position / block_size] * block_nbytes, block_size, dim};
  }
  template <bool kBf16>
  Area<kBf16> values(int64_t position) const {
    return {first + table[position / block_size] * block_nbytes + area_nbytes, block_size, dim};
  }

  void write(int64_t position, const float* key, const float* value) const {
    const int64_t offset = position % block_size;
    if (!bf16) {
      keys<false>(position).put_key(offset, key);
      values<false>(position).put_value(offset, value);
      return;
    }
    alignas(64) uint16_t rounded[kMostDim];
    for (int64_t i = 0; i < dim; ++i) rounded[i] = float_to_bf16(key[i]);
    keys<true>(position).put_key(offset, rounded);
    for (int64_t i = 0; i < dim; ++i) rounded[i] = float_to_bf16(value[i]);
    values<true>(position).put_value(offset, rounded);
  }
};

}  // namespace di

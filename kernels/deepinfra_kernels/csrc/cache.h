// Keys and values where they lie: `[layers, k|v, kv_heads, blocks, block_size, head_dim]`.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace di {

struct Cache {
  void* data;
  bool bf16;  // or float32
  int64_t layers, heads, blocks, block_size, dim;

  // The cells of one head of one layer; `which` is 0 for keys and 1 for values.
  char* head(int64_t layer, int which, int64_t head) const {
    return static_cast<char*>(data) + ((layer * 2 + which) * heads + head) * blocks * block_size * nbytes();
  }

  int64_t nbytes() const { return dim * (bf16 ? 2 : 4); }  // of one cell
};

// One sequence's cells in one head of a layer. A position's cell depends on the table alone.
struct Cells {
  char *keys, *values;
  const int64_t* table;
  int64_t block_size, dim, nbytes;
  bool bf16;

  Cells(const Cache& cache, int64_t layer, int64_t head, const int64_t* blocks)
      : keys(cache.head(layer, 0, head)),
        values(cache.head(layer, 1, head)),
        table(blocks),
        block_size(cache.block_size),
        dim(cache.dim),
        nbytes(cache.nbytes()),
        bf16(cache.bf16) {}

  void write(int64_t position, const float* key, const float* value) const {
    const int64_t at = (table[position / block_size] * block_size + position % block_size) * nbytes;
    put(keys + at, key);
    put(values + at, value);
  }

 private:
  void put(char* cell, const float* x) const {
    if (!bf16) {
      std::memcpy(cell, x, static_cast<size_t>(nbytes));
      return;
    }
    for (int64_t i = 0; i < dim; ++i) reinterpret_cast<uint16_t*>(cell)[i] = float_to_bf16(x[i]);
  }
};

}  // namespace di

// The block formats of GGUF files, read group by group: 32 small integers, a scale for each half, a minimum.
// value = scale * (q - offset) - minimum, in the order of operations of ggml's own dequantisation.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace di {

constexpr int64_t kGroup = 32;

enum Source : int {  // ggml's type numbers
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

struct Group {
  uint8_t q[kGroup];
  float scale[2];  // of elements 0-15 and 16-31
  float minimum;   // subtracted
};

inline float read_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return half_to_float(h);
}

// How many elements lie in a block and how many bytes it takes; {0, 0} of an unknown source.
struct BlockSize {
  int64_t elements, nbytes;
};
constexpr BlockSize block_size(int source) {
  switch (source) {
    case kF32: return {1, 4};
    case kF16: return {1, 2};
    case kBF16: return {1, 2};
    case kQ4_0: return {32, 18};
    case kQ4_1: return {32, 20};
    case kQ5_0: return {32, 22};
    case kQ5_1: return {32, 24};
    case kQ8_0: return {32, 34};
    case kQ4_K: return {256, 144};
    case kQ5_K: return {256, 176};
    case kQ6_K: return {256, 210};
    default: return {0, 0};
  }
}
inline int64_t row_nbytes(int source, int64_t in) {
  const BlockSize block = block_size(source);
  return block.elements == 0 || in % block.elements != 0 ? -1 : in / block.elements * block.nbytes;
}

constexpr int offset_of(int source) {
  switch (source) {
    case kQ4_0: return 8;
    case kQ5_0: return 16;
    case kQ6_K: return 32;
    case kQ8_0: return 128;
    default: return 0;
  }
}

inline void read_nibbles(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}
inline void add_fifth_bits(const uint8_t* packed, uint8_t* q) {
  uint32_t high;
  std::memcpy(&high, packed, sizeof high);
  for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(q[i] | ((high >> i) & 1u) << 4);
}

// Scale and minimum of group j of 8 in a Q4_K or Q5_K block: 6 bits each, the last four groups' split in two places.
inline void k_scales(const uint8_t* block, int j, Group& g) {
  const uint8_t* s = block + 4;
  int scale, minimum;
  if (j < 4) {
    scale = s[j] & 63;
    minimum = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    minimum = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
  }
  g.scale[0] = g.scale[1] = read_half(block) * static_cast<float>(scale);
  g.minimum = read_half(block + 2) * static_cast<float>(minimum);
}

template <int S>
inline void read_group(const uint8_t* row, int64_t index, Group& g) {
  constexpr BlockSize size = block_size(S);
  constexpr int64_t per_block = size.elements / kGroup;
  const uint8_t* block = row + index / per_block * size.nbytes;
  const int j = static_cast<int>(index % per_block);
  g.minimum = 0.0f;
  if constexpr (per_block == 1) g.scale[0] = g.scale[1] = read_half(block);
  if constexpr (S == kQ4_0) {
    read_nibbles(block + 2, g.q);
  } else if constexpr (S == kQ4_1) {
    g.minimum = -read_half(block + 2);
    read_nibbles(block + 4, g.q);
  } else if constexpr (S == kQ5_0) {
    read_nibbles(block + 6, g.q);
    add_fifth_bits(block + 2, g.q);
  } else if constexpr (S == kQ5_1) {
    g.minimum = -read_half(block + 2);
    read_nibbles(block + 8, g.q);
    add_fifth_bits(block + 4, g.q);
  } else if constexpr (S == kQ8_0) {
    for (int i = 0; i < 32; ++i) g.q[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);
  } else if constexpr (S == kQ4_K || S == kQ5_K) {
    k_scales(block, j, g);
    const uint8_t* low = block + (S == kQ4_K ? 16 : 48) + j / 2 * 32;
    for (int i = 0; i < 32; ++i) g.q[i] = j % 2 ? low[i] >> 4 : low[i] & 15;
    if constexpr (S == kQ5_K)
      for (int i = 0; i < 32; ++i) g.q[i] = static_cast<uint8_t>(g.q[i] | ((block[16 + i] >> j) & 1) << 4);
  } else if constexpr (S == kQ6_K) {
    const int half = j / 4, quarter = j % 4;  // 128 elements; 32 of them
    const uint8_t* low = block + half * 64 + quarter % 2 * 32;
    const uint8_t* high = block + 128 + half * 32;
    for (int i = 0; i < 32; ++i) {
      const int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
      g.q[i] = static_cast<uint8_t>(nibble | ((high[i] >> (2 * quarter)) & 3) << 4);
    }
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + half * 8 + quarter * 2;
    const float d = read_half(block + 208);
    g.scale[0] = d * static_cast<float>(scales[0]);
    g.scale[1] = d * static_cast<float>(scales[1]);
  }
}

template <int S>
inline void read_row_as(const uint8_t* row, int64_t n, float* y) {
  if constexpr (S == kF32) {
    std::memcpy(y, row, static_cast<size_t>(n) * sizeof(float));
  } else if constexpr (S == kF16 || S == kBF16) {
    int64_t i = 0;
    if constexpr (S == kF16)
      for (; i + kLanes <= n; i += kLanes) store(y + i, load_half(reinterpret_cast<const uint16_t*>(row + 2 * i)));
    for (; i < n; ++i) {
      uint16_t h;
      std::memcpy(&h, row + 2 * i, sizeof h);
      y[i] = S == kF16 ? half_to_float(h) : bf16_to_float(h);
    }
  } else {
    Group g;
    for (int64_t index = 0; index < n / kGroup; ++index, y += kGroup) {
      read_group<S>(row, index, g);
      for (int i = 0; i < kGroup; ++i)
        y[i] = g.scale[i / 16] * static_cast<float>(static_cast<int>(g.q[i]) - offset_of(S)) - g.minimum;
    }
  }
}

// Calls f with the source as a compile-time constant; false of one that is not known.
template <class F>
inline bool with_source(int source, F f) {
  switch (source) {
    case kF32: f.template operator()<kF32>(); return true;
    case kF16: f.template operator()<kF16>(); return true;
    case kBF16: f.template operator()<kBF16>(); return true;
    case kQ4_0: f.template operator()<kQ4_0>(); return true;
    case kQ4_1: f.template operator()<kQ4_1>(); return true;
    case kQ5_0: f.template operator()<kQ5_0>(); return true;
    case kQ5_1: f.template operator()<kQ5_1>(); return true;
    case kQ8_0: f.template operator()<kQ8_0>(); return true;
    case kQ4_K: f.template operator()<kQ4_K>(); return true;
    case kQ5_K: f.template operator()<kQ5_K>(); return true;
    case kQ6_K: f.template operator()<kQ6_K>(); return true;
    default: return false;
  }
}

// One row of n elements as float32.
inline void read_row(int source, const void* row, int64_t n, float* y) {
  with_source(source, [&]<int S>() { read_row_as<S>(static_cast<const uint8_t*>(row), n, y); });
}

}  // namespace di

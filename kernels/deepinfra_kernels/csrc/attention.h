// Attention over paged keys and values, for decoding rows and chunks alike.
//
// A row's arithmetic depends on its own position and on the keys it sees, and on nothing else: keys come in blocks of
// 64 from position 0, softmax is online over the blocks of a split of 256 positions, and splits are merged in the
// order of positions. A row that shares a tile with others sees more blocks, whose weights are exactly zero for it.
//
// Source: FlashAttention (Dao et al.) for the online softmax, Flash-Decoding for splits; here splits lie on a grid of
// positions and are merged in order, so that their number follows from the position alone.
#pragma once

#include <memory>
#include <new>

#include "keyblock.h"
#include "softmax.h"

namespace di {

constexpr int64_t kSplit = 256;    // positions whose softmax is computed apart from others'
constexpr int64_t kTileRows = 96;  // query rows that look at a block while it is near

template <class T>
class Buffer {  // aligned for vectors, not initialised: memory is mapped when it is written
 public:
  Buffer() = default;
  explicit Buffer(int64_t items)
      : data_(static_cast<T*>(::operator new[](size_t(items > 0 ? items : 1) * sizeof(T), std::align_val_t(64)))) {}
  T* operator+(int64_t at) const { return data_.get() + at; }
  T& operator[](int64_t at) const { return data_.get()[at]; }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { ::operator delete[](data, std::align_val_t(64)); }
  };
  std::unique_ptr<T[], Free> data_;
};

// Positions `first .. first + positions` of one sequence for one KV head, `group` query heads a position; row r is of
// position `first + r / group`. `end` is how many positions of the sequence have keys.
struct Tile {
  int64_t first, positions, group, window, end;

  int64_t rows() const { return positions * group; }
  int64_t oldest(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
  int64_t first_split() const { return oldest(first) / kSplit; }
  int64_t last_split() const { return (first + positions - 1) / kSplit; }
};

// Positions of a tile where `group` query heads share a KV head.
inline int64_t tile_positions(int64_t group) { return std::max<int64_t>(1, kTileRows / group); }

// What rows know of one split: highest score, sum of weights, weighted sum of values.
struct Partial {
  float *high, *sum, *mixed;  // [rows], [rows], [rows][dim]

  static int64_t floats(int64_t rows, int64_t dim) { return rows * (dim + 2); }
  static Partial at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
};

// One thread's memory for a tile.
class Attention {
 public:
  Attention(int64_t group, int64_t dim, bool bf16)
      : dim_(dim),
        words_(bf16 ? dim / 2 : dim),
        bf16_(bf16),
        rows_(tile_positions(group) * group),
        queries_(rows_ * words_),
        scores_(kRowsAtOnce * kKeys),
        weights_(kRowsAtOnce * kKeys),
        lanes_(rows_ * kLanes),
        own_(Partial::floats(rows_, dim)),
        all_(Partial::floats(rows_, dim)),
        cells_(2 * kKeys * dim * 4) {}

  // Row `row` of the tile's queries, already scaled by log2(e) too.
  void query(int64_t row, const float* x) {
    int32_t* to = queries_ + row * words_;
    for (int64_t i = 0; i < dim_; i += kLanes) {
      if (bf16_) {
        store_weights<true>(to, i, load(x + i));
      } else {
        store_weights<false>(to, i, load(x + i));
      }
    }
  }

  void open(int64_t rows) {
    const Partial all = Partial::at(all_.get(), rows_);
    for (int64_t row = 0; row < rows; ++row) all.high[row] = kLowest, all.sum[row] = 0;
    std::fill_n(all.mixed, rows * dim_, 0.0f);
  }

  Partial own() const { return Partial::at(own_.get(), rows_); }

  // Computes what the tile's rows see in one split. `next` are cells that the thread will need after the tile's.
  void split(const Cells& cells, const Cells& next, const Tile& tile, int64_t split, const Partial& to) {
    return bf16_ ? split_of<true>(cells, next, tile, split, to) : split_of<false>(cells, next, tile, split, to);
  }

  // Adds a split to those before it.
  void merge(int64_t rows, const Partial& part) {
    const Partial all = Partial::at(all_.get(), rows_);
    for (int64_t row = 0; row < rows; ++row) {
      const float high = std::max(all.high[row], part.high[row]);
      float changes[kLanes] = {all.high[row] - high, part.high[row] - high};
      store(changes, exp2(load(changes)));
      const F16 before = set(changes[0]), now = set(changes[1]);
      all.high[row] = high;
      all.sum[row] = __builtin_fmaf(part.sum[row], changes[1], all.sum[row] * changes[0]);
      float *mixed = all.mixed + row * dim_, *more = part.mixed + row * dim_;
      for (int64_t i = 0; i < dim_; i += kLanes) store(mixed + i, fma(load(more + i), now, mul(load(mixed + i), before)));
    }
  }

  // The attention of one row, when all its splits are merged.
  void close(int64_t row, float* y) const {
    const Partial all = Partial::at(all_.get(), rows_);
    const F16 share = set(1.0f / all.sum[row]);
    for (int64_t i = 0; i < dim_; i += kLanes) store(y + i, mul(load(all.mixed + row * dim_ + i), share));
  }

 private:
  template <bool kBf16>
  void split_of(const Cells& cells, const Cells& next, const Tile& tile, int64_t split, const Partial& to) {
    const int64_t rows = tile.rows(), last = tile.first + tile.positions - 1;
    for (int64_t row = 0; row < rows; ++row) to.high[row] = kLowest;
    std::fill_n(lanes_.get(), rows * kLanes, 0.0f);
    std::fill_n(to.mixed, rows * dim_, 0.0f);
    const int64_t stop = std::min(last + 1, (split + 1) * kSplit);
    const int64_t begin = tile.oldest(tile.first) / kKeys * kKeys, end = std::min(tile.end, last + 1);
    for (int64_t from = std::max(split * kSplit, begin); from < stop; from += kKeys) {
      const BlockRows block = BlockRows::of<kBf16>(cells, from, end, cells_.get());
      const Ahead ahead = from + kKeys < end ? Ahead(cells, from + kKeys, end) : Ahead(next, begin, end);
      if (from + kKeys <= tile.first + 1 || tile.positions == 1 || finite<kBf16>(block, dim_)) {
        look<kBf16>(tile, 0, rows, from, block, to, &ahead);
        continue;
      }
      // A weight of zero does not hide a value that is not finite: each position looks at what it may see alone.
      for (int64_t row = 0; row < rows; row += tile.group) {
        const int64_t position = tile.first + row / tile.group;
        if (position < from) continue;
        const BlockRows own = BlockRows::of<kBf16>(cells, from, std::min(end, position + 1), cells_.get());
        look<kBf16>(tile, row, row + tile.group, from, own, to, nullptr);
      }
    }
    for (int64_t row = 0; row < rows; ++row) to.sum[row] = total(load(lanes_ + row * kLanes));
  }

  // Rows `first .. last` look at a block; the first of them fetch what is ahead.
  template <bool kBf16>
  void look(const Tile& tile, int64_t first, int64_t last, int64_t from, const BlockRows& block, const Partial& to,
            const Ahead* ahead) {
    for (int64_t row = first; row < last; row += kRowsAtOnce, ahead = nullptr) {
      see<kBf16>(tile, row, std::min<int64_t>(kRowsAtOnce, last - row), from, block, to, ahead);
    }
  }

  // Rows `row .. row + count` look at a block.
  template <bool kBf16>
  void see(const Tile& tile, int64_t row, int64_t count, int64_t from, const BlockRows& block, const Partial& to,
           const Ahead* ahead) {
    const int64_t youngest = tile.first + (row + count - 1) / tile.group;
    const int64_t oldest = tile.oldest(tile.first + row / tile.group);
    if (youngest < from || oldest >= from + kKeys) return;
    const int64_t used = std::min(block.used, (youngest - from + kLanes) / kLanes * kLanes);
    with_rows(count, [&]<int R>() {
      multiply_keys<kBf16, R>(queries_ + row * words_, words_, block, used, scores_.get(), ahead);
    });
    alignas(64) float change[kLanes] = {};
    weigh<kBf16>(tile, row, count, from, used, to, change);
    with_rows(count, [&]<int R>() {
      multiply_values<kBf16, R>(weights_.get(), block, used, to.mixed + row * dim_, dim_, change, ahead);
    });
  }

  // From scores to weights, and by what the rows' sums so far change.
  template <bool kBf16>
  void weigh(const Tile& tile, int64_t row, int64_t count, int64_t from, int64_t used, const Partial& to,
             float* change) {
    float high[kRowsAtOnce];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t position = tile.first + (row + r) / tile.group, oldest = tile.oldest(position);
      float* scores = scores_ + r * kKeys;
      if (position - from < used - 1 || oldest > from) hide(scores, used, oldest - from, position - from + 1);
      F16 most = load(scores);
      for (int64_t i = kLanes; i < used; i += kLanes) most = max(most, load(scores + i));
      high[r] = std::max(to.high[row + r], highest(most));
      change[r] = to.high[row + r] - high[r];
      to.high[row + r] = high[r];
    }
    store(change, exp2(load(change)));
    for (int64_t r = 0; r < count; ++r) {
      const float* scores = scores_ + r * kKeys;
      const F16 top = set(high[r]);
      F16 sum = zero();
      for (int64_t i = 0; i < used; i += kLanes) {
        const F16 weight = exp2(sub(load(scores + i), top));
        sum = add(sum, weight);
        store_weights<kBf16>(weights_ + r * kKeys, i, weight);
      }
      float* lanes = lanes_ + (row + r) * kLanes;
      store(lanes, fma(load(lanes), set(change[r]), sum));
    }
  }

  static void hide(float* scores, int64_t used, int64_t low, int64_t high) {
    for (int64_t i = 0; i < used; i += kLanes) {
      const auto clip = [&](int64_t n) { return std::clamp<int64_t>(n - i, 0, kLanes); };
      store(scores + i, within(load(scores + i), clip(low), clip(high)));
    }
  }

  int64_t dim_, words_;
  bool bf16_;
  int64_t rows_;
  Buffer<int32_t> queries_;
  Buffer<float> scores_;
  Buffer<int32_t> weights_;
  Buffer<float> lanes_, own_, all_;
  Buffer<char> cells_;
};

}  // namespace di

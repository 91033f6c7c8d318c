// What Python calls of decoder.h and attention.h. Shapes are checked there, numbers of a step here.
#pragma once

#include "decoder.h"
#include "status.h"

namespace di {

// Why a step cannot be computed, or null.
inline const char* why_not(const Cache& cache, int64_t vocab, int64_t max_rows, const Step& step) {
  if (step.rows < 1 || step.rows > max_rows) return "rows are none, or more than max_rows";
  for (int64_t i = 0; i < step.rows; ++i) {
    if (step.tokens[i] < 0 || step.tokens[i] >= vocab) return "tokens has one outside the vocabulary";
  }
  int64_t rows = 0, begin = 0;
  for (int64_t i = 0; i < step.seqs; ++i) {
    if (step.counts[i] < 1 || step.counts[i] > step.rows) return "counts has a sequence without rows, or too many";
    rows += step.counts[i];
    if (step.starts[i] < 0 || step.starts[i] > int64_t{1} << 40) return "starts has a position below zero, or too large";
    const int64_t size = cache.block_size, needed = (step.starts[i] + step.counts[i] + size - 1) / size;
    if (step.ends[i] - begin < needed) return "blocks has too few for a sequence";
    for (int64_t at = begin; at < begin + needed; ++at) {
      if (step.blocks[at] < 0 || step.blocks[at] >= cache.blocks) return "blocks has one that does not exist";
    }
    begin = step.ends[i];
  }
  if (rows != step.rows) return "counts do not add up to the number of tokens";
  for (int64_t i = 0; i < step.wanted; ++i) {
    if (step.wanted_rows[i] < 0 || step.wanted_rows[i] >= step.rows) return "wanted has a row that does not exist";
  }
  return step.wanted > max_rows ? "wanted has more rows than max_rows" : nullptr;
}

// Attention of a step's queries [rows, heads, dim] alone.
inline void attend(const Cache& cache, int64_t layer, int64_t group, int64_t window, float scale, const Step& step,
                   const float* queries, float* y, int threads) {
  Plan plan;
  plan.make(step, group, cache.dim, cache.heads, window, threads);
  Pool pool(threads);
  std::vector<std::unique_ptr<Attention>> own;
  for (int i = 0; i < pool.threads(); ++i) own.push_back(std::make_unique<Attention>(group, cache.dim, cache.bf16));
  pool.run(int64_t(plan.attention.size()), [&](int64_t task, int thread) {
    const AttentionTask& todo = plan.attention[task];
    const Sequence& seq = plan.seqs[todo.seq];
    const Tile tile{seq.start + todo.at, todo.positions, group, window, seq.end()};
    if (todo.split > tile.first_split()) return;  // the first split's task computes all of them
    Attention& attention = *own[thread];
    std::vector<float> scaled(cache.dim);
    for (int64_t head = todo.head; head < todo.head + todo.heads; ++head) {
      const Cells cells(cache, layer, head, seq.table);
      const auto at = [&](int64_t row) {
        return ((seq.row + todo.at + row / group) * cache.heads * group + head * group + row % group) * cache.dim;
      };
      for (int64_t row = 0; row < tile.rows(); ++row) {
        for (int64_t i = 0; i < cache.dim; ++i) scaled[i] = queries[at(row) + i] * (scale * kLog2E);
        attention.query(row, scaled.data());
      }
      attention.open(tile.rows());
      for (int64_t split = tile.first_split(); split <= tile.last_split(); ++split) {
        attention.split(cells, cells, tile, split, attention.own());
        attention.merge(tile.rows(), attention.own());
      }
      for (int64_t row = 0; row < tile.rows(); ++row) attention.close(row, y + at(row));
    }
  });
}

}  // namespace di

extern "C" {

// Sizes of what crosses, in the order of decoder.py.
void di_decoder_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(di::Matrix), sizeof(di::Layer), sizeof(di::Model), sizeof(di::Cache), sizeof(di::Step)};
  std::copy(std::begin(all), std::end(all), sizes);
}

int di_decoder_new(const di::Model* model, const di::Cache* cache, int threads, int64_t max_rows, void** decoder) {
  return di::guarded([&] { *decoder = new di::Decoder(*model, *cache, threads, max_rows); });
}
void di_decoder_free(void* decoder) { delete static_cast<di::Decoder*>(decoder); }

// Computes a step, or refuses it before it is begun.
int di_decoder_step(void* decoder, const di::Step* step) {
  di::Decoder& self = *static_cast<di::Decoder*>(decoder);
  if (const char* why = di::why_not(self.cache(), self.model().vocab, self.max_rows(), *step)) {
    return di::ended(di::kRefused, why);
  }
  return di::guarded([&] { self.step(*step); });
}

// Seconds of each part of the last step, on the clock of the wall.
void di_decoder_seconds(void* decoder, double* seconds) {
  std::copy_n(static_cast<di::Decoder*>(decoder)->seconds(), int(di::Part::kParts), seconds);
}

// Attention alone: queries [rows, heads, dim] of a step's sequences, whose keys and values are in the cache.
int di_attend(const di::Cache* cache, int64_t layer, int64_t group, int64_t window, float scale, const di::Step* step,
              const float* queries, float* y, int threads) {
  if (const char* why = di::why_not(*cache, INT64_MAX, INT64_MAX, *step)) return di::ended(di::kRefused, why);
  return di::guarded([&] { di::attend(*cache, layer, group, window, scale, *step, queries, y, threads); });
}

// A block from and to [layers, k|v, positions, kv_heads, dim], of whom both are checked in Python.
void di_cache_put(const di::Cache* cache, int64_t block, const char* payload) {
  cache->bf16 ? cache->put<true>(block, payload) : cache->put<false>(block, payload);
}
void di_cache_get(const di::Cache* cache, int64_t block, char* payload) {
  cache->bf16 ? cache->get<true>(block, payload) : cache->get<false>(block, payload);
}

// Rotates heads [rows, heads, dim] at their positions.
int di_rope(const float* x, const int64_t* positions, int64_t rows, int64_t heads, int64_t dim,
            const float* frequencies, float factor, float scale, float* y) {
  return di::guarded([&] {
    std::vector<float> turns(dim);
    for (int64_t row = 0; row < rows; ++row) {
      di::rope_angles(positions[row], frequencies, factor, dim / 2, turns.data());
      for (int64_t at = row * heads; at < (row + 1) * heads; ++at) {
        di::rope_rotate(x + at * dim, turns.data(), dim / 2, scale, y + at * dim);
      }
    }
  });
}

}  // extern "C"

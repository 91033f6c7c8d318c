// What a step asks for, cut into the tasks of its phases. Cuts decide who computes what, never how.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace di {

// One call's work: `rows` rows of `seqs` sequences, which lie one after the other. A sequence's rows are at the positions
// from its start; those below its write_from are computed, but their keys and values are there already.
struct Step {
  int64_t rows, seqs, wanted;
  const int64_t *tokens;                        // [rows]
  const int64_t *counts, *starts, *write_froms; // [seqs]
  const int64_t *ends, *blocks;                 // block table i is blocks[ends[i - 1] .. ends[i]]
  const int64_t *wanted_rows;                   // [wanted]: rows whose logits are asked for
  float* logits;                                // [wanted, vocab]
  uint8_t* finite;                              // [rows]: whether a row's hidden numbers are finite
};

struct Sequence {
  int64_t row, rows, start, write_from;
  const int64_t* table;

  int64_t end() const { return start + rows; }
};

// A tile of attention for some KV heads, from `head` on: of all its splits (`split` < 0), or of one, with the place of its
// partial result.
struct AttentionTask {
  int64_t seq, at, positions, head, heads, split, partial, merge;
};

// The splits of a tile and a head that different tasks compute: whoever ends last merges them.
struct Merge {
  int64_t first, last, partial;  // splits first..last, the place of the first one's partial result
};

// Rows of a sequence whose keys and values are written before attention begins.
struct Span {
  int64_t seq, at, rows;
};

// Tiles of matrices over blocks of rows: a task is a chunk of neighbouring tiles for one block.
struct Grid {
  int64_t tiles = 0, chunk = 1, chunks = 0, block = 0, rows = 0;

  Grid() = default;
  Grid(int64_t tiles, int64_t rows, int64_t most, int threads) : tiles(tiles), rows(rows) {
    if (tiles == 0 || rows == 0) return;
    const int64_t blocks = (rows + most - 1) / most;
    block = (rows + blocks - 1) / blocks;
    // Some six tasks a thread: a thread that is taken off its core leaves little behind.
    chunk = std::max<int64_t>(1, tiles * blocks / (6 * threads));
    chunks = (tiles + chunk - 1) / chunk;
  }

  int64_t tasks() const { return rows == 0 ? 0 : chunks * ((rows + block - 1) / block); }
  int64_t row(int64_t task) const { return task / chunks * block; }
  int64_t count(int64_t task) const { return std::min(block, rows - row(task)); }
  int64_t first(int64_t task) const { return task % chunks * chunk; }
  int64_t last(int64_t task) const { return std::min(tiles, first(task) + chunk); }
};

struct Plan {
  static constexpr int64_t kPartialFloats = 1 << 20;  // of partial results, for each KV head
  static constexpr int64_t kSpanRows = 16;

  std::vector<Sequence> seqs;
  std::vector<int64_t> positions;  // [rows]
  std::vector<AttentionTask> attention;
  std::vector<Merge> merges;
  std::vector<Span> spans;

  // Vectors keep their memory from step to step.
  void make(const Step& step, int64_t group, int64_t dim, int64_t kv_heads, int64_t window, int threads) {
    seqs.clear(), positions.clear(), attention.clear(), merges.clear(), spans.clear();
    for (int64_t seq = 0, row = 0; seq < step.seqs; row += step.counts[seq++]) {
      const int64_t* table = step.blocks + (seq ? step.ends[seq - 1] : 0);
      seqs.push_back({row, step.counts[seq], step.starts[seq], step.write_froms[seq], table});
      for (int64_t i = 0; i < step.counts[seq]; ++i) positions.push_back(step.starts[seq] + i);
    }
    attend(group, dim, kv_heads, window, threads);
  }

 private:
  // Tasks are no larger than a fourth of a thread's work, where they can be cut.
  static constexpr int64_t kShares = 4;

  void attend(int64_t group, int64_t dim, int64_t kv_heads, int64_t window, int threads) {
    const int64_t most = tile_positions(group);
    int64_t work = 0, used = 0;
    for (const Sequence& seq : seqs) {
      if (seq.rows <= most) work += seen(seq, window) * kv_heads;
    }
    const int64_t share = work / (kShares * threads) + 1;
    for (int64_t i = 0; i < int64_t(seqs.size()); ++i) {
      const Sequence& seq = seqs[i];
      if (seq.rows > most) {
        for (int64_t at = 0; at < seq.rows; at += kSpanRows) {
          spans.push_back({i, at, std::min(kSpanRows, seq.rows - at)});
        }
        // The last tiles see most: they begin first.
        for (int64_t at = (seq.rows - 1) / most * most; at >= 0; at -= most) {
          for (int64_t head = 0; head < kv_heads; ++head) {
            attention.push_back({i, at, std::min(most, seq.rows - at), head, 1, -1, 0, -1});
          }
        }
        continue;
      }
      // A task of all heads reads each block's cells of a layer in one piece.
      if (seen(seq, window) * kv_heads <= share) {
        attention.push_back({i, 0, seq.rows, 0, kv_heads, -1, 0, -1});
        continue;
      }
      const Tile tile{seq.start, seq.rows, group, window, seq.end()};
      const int64_t floats = Partial::floats(tile.rows(), dim), first = tile.first_split(), last = tile.last_split();
      if (seen(seq, window) <= share || first == last || used + (last - first + 1) * floats > kPartialFloats) {
        for (int64_t head = 0; head < kv_heads; ++head) attention.push_back({i, 0, seq.rows, head, 1, -1, 0, -1});
        continue;
      }
      merges.push_back({first, last, used});
      for (int64_t split = first; split <= last; ++split, used += floats) {
        for (int64_t head = 0; head < kv_heads; ++head) {
          attention.push_back({i, 0, seq.rows, head, 1, split, used, int64_t(merges.size()) - 1});
        }
      }
    }
  }

  // Products of a row and a position, about, in one head.
  static int64_t seen(const Sequence& seq, int64_t window) {
    return (window ? std::min(window, seq.end()) : seq.end()) * seq.rows;
  }
};

}  // namespace di

// What Python calls of pack.h, rows.h and linear.h. Sizes are checked there; what gives no status throws nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "linear.h"
#include "status.h"

namespace di {

// Runs f(task) for every task on `threads` threads; for packing and tests, which need no pool.
template <class F>
inline void run_on_threads(int64_t tasks, int threads, F f) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t task; (task = next.fetch_add(1)) < tasks;) f(task);
  };
  std::vector<std::jthread> others;  // joined here, also if one of them cannot be started
  for (int i = 1; i < threads; ++i) others.emplace_back(work);
  work();
}

// One matrix to be packed: rows of a file, and where they go.
struct Packing {
  int source, compute;
  int64_t out, in;
  const void* rows;
  void* packed;
};

constexpr int64_t kPackedAtOnce = 32 * kTile;  // output columns of a task

}  // namespace di

extern "C" {

int di_packed_kind(int source, int compute) { return di::packed_kind(source, compute); }
int64_t di_packed_nbytes(int source, int compute, int64_t out, int64_t in) {
  return di::packed_nbytes(source, compute, out, in);
}
int64_t di_row_nbytes(int source, int64_t in) { return di::row_nbytes(source, in); }
int64_t di_input_nbytes(int compute, int64_t in) { return di::input_nbytes(static_cast<di::Compute>(compute), in); }
int di_pack(const di::Packing* matrices, int64_t count, int threads) {
  return di::guarded([&] {
    std::vector<di::Packing> parts;
    for (const di::Packing *m = matrices; m < matrices + count; ++m) {
      const int64_t nbytes = di::packed_nbytes(m->source, m->compute, m->out, m->in);
      if (nbytes < 0) throw std::invalid_argument("a matrix cannot be packed in that form");
      const int64_t row = di::row_nbytes(m->source, m->in), tile = nbytes / ((m->out + di::kTile - 1) / di::kTile);
      for (int64_t first = 0; first < m->out; first += di::kPackedAtOnce) {
        parts.push_back({m->source, m->compute, std::min(di::kPackedAtOnce, m->out - first), m->in,
                         static_cast<const char*>(m->rows) + first * row,
                         static_cast<char*>(m->packed) + first / di::kTile * tile});
      }
    }
    di::run_on_threads(int64_t(parts.size()), threads, [&](int64_t i) {
      di::pack(parts[i].source, parts[i].compute, parts[i].out, parts[i].in, parts[i].rows, parts[i].packed);
    });
  });
}
void di_prepare(int compute, const float* x, int64_t rows, int64_t in, void* inputs) {
  const auto form = static_cast<di::Compute>(compute);
  const int64_t stride = di::input_nbytes(form, in);
  for (int64_t r = 0; r < rows; ++r) di::prepare_row(form, x + r * in, in, static_cast<char*>(inputs) + r * stride);
}
// y [rows, out] of prepared inputs.
int di_linear(int kind, int compute, int64_t out, int64_t in, const void* data, const float* bias, const void* inputs,
              int64_t rows, float* y, int threads) {
  const di::Matrix m{kind, static_cast<di::Compute>(compute), out, in, data, bias};
  const int64_t tiles = di::tiles(m), blocks = (rows + di::kRows - 1) / di::kRows;
  return di::guarded([&] {
    di::run_on_threads(tiles * blocks, threads, [&](int64_t task) {
      const int64_t row0 = task / tiles * di::kRows, left = rows - row0;
      di::matmul_tile(m, inputs, row0, left < di::kRows ? left : di::kRows, task % tiles, y, out);
    });
  });
}
void di_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y) {
  for (int64_t r = 0; r < rows; ++r) di::norm_row(x + r * n, weight, eps, n, y + r * n);
}
void di_gate(int activation, const float* gate, const float* up, int64_t rows, int64_t n, float* y) {
  for (int64_t r = 0; r < rows; ++r) di::gate_row(activation, gate + r * n, up + r * n, n, y + r * n);
}
void di_embed(int source, const void* table, const int64_t* tokens, int64_t rows, int64_t n, float* y) {
  for (int64_t r = 0; r < rows; ++r) di::embed_row(source, table, tokens[r], n, y + r * n);
}

}  // extern "C"

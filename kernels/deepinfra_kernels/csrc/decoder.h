// A whole step of a decoder: from tokens to logits, all phases of all layers on one pool.
#pragma once

#include <array>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "linear.h"
#include "plan.h"
#include "pool.h"
#include "rope.h"

namespace di {

struct Layer {
  Matrix query, key, value, output, gate, up, down;
  const float *before, *between;       // weights of the norms before attention and before the gated layer
  const float *query_norm, *key_norm;  // [dim], or null
};

struct Model {
  int64_t layers, hidden, heads, kv_heads, dim, inner, vocab;
  int64_t window;  // positions that a row sees, its own included; 0: all
  const Layer* layer;
  Matrix head;
  const float* last;  // weight of the last norm
  const void* embedding;
  int embedding_source, activation;
  float embedding_scale, eps, query_scale, rope_factor;
  const float* frequencies;  // [dim / 2]
};

// What the time of a step is told by.
enum class Part : int { kEmbed, kNorm, kQKV, kWrite, kAttention, kOutput, kGated, kDown, kHead, kParts };

class Decoder {
 public:
  Decoder(const Model& model, const Cache& cache, int threads, int64_t max_rows)
      : model_(model),
        layers_(model.layer, model.layer + model.layers),
        frequencies_(model.frequencies, model.frequencies + model.dim / 2),
        cache_(cache),
        group_(model.heads / model.kv_heads),
        qkv_width_((model.heads + 2 * model.kv_heads) * model.dim),
        max_rows_(max_rows),
        x_(max_rows * model.hidden),
        y_(max_rows * model.hidden),
        qkv_(max_rows * qkv_width_),
        mixed_(max_rows * model.heads * model.dim),
        inner_(max_rows * model.inner),
        turns_(max_rows * model.dim),
        partials_(model.kv_heads * Plan::kPartialFloats),
        inputs_(*this, max_rows),
        remaining_(new std::atomic<int64_t>[max_rows * model.kv_heads]),
        pool_(threads, [this](int64_t phase, int thread) { idle(phase, thread); }) {
    for (int thread = 0; thread < pool_.threads(); ++thread) own_.push_back(std::make_unique<Own>(*this));
  }

  int64_t max_rows() const { return max_rows_; }
  const Model& model() const { return model_; }
  const Cache& cache() const { return cache_; }
  const double* seconds() const { return seconds_; }

  void step(const Step& step) {
    step_ = step;
    plan_.make(step, group_, model_.dim, model_.kv_heads, model_.window, pool_.threads());
    for (size_t i = 0; i < plan_.merges.size() * model_.kv_heads; ++i) {
      const Merge& merge = plan_.merges[i / model_.kv_heads];
      remaining_[i].store(merge.last - merge.first + 1, std::memory_order_relaxed);
    }
    kept_.assign(step.wanted_rows, step.wanted_rows + step.wanted);
    std::sort(kept_.begin(), kept_.end());
    kept_.erase(std::unique(kept_.begin(), kept_.end()), kept_.end());
    std::fill_n(seconds_, int(Part::kParts), 0.0);
    for (auto& own : own_) own->ready = -1;
    since_ = std::chrono::steady_clock::now();
    part_ = Part::kEmbed;
    pool_.run_phases(3 + kStages * model_.layers, *this);
    clock(Part::kEmbed);
  }

  // For the pool: how many tasks a phase has.
  int64_t begin(int64_t phase) {
    const int64_t rows = step_.rows, spans = (rows + Plan::kSpanRows - 1) / Plan::kSpanRows;
    const auto preparation = [&](int64_t rows_) {
      return phase_of(Part::kNorm, rows_ <= kAlone ? 0 : (rows_ + kEach - 1) / kEach);
    };
    const auto product = [&](Part part, int64_t tiles_, int64_t rows_) {
      grid_ = Grid(tiles_, rows_, kRows, pool_.threads());
      return phase_of(part, grid_.tasks());
    };
    if (phase == 0) return phase_of(Part::kEmbed, spans);
    const Stage stage = stage_of(phase);
    if (stage == kPrepareHead) return preparation(step_.wanted);
    if (stage == kHead) return product(Part::kHead, tiles(model_.head), step_.wanted) + spans;
    const Layer& layer = layers_[layer_of(phase)];
    const int64_t kept = kept_rows(layer_of(phase));
    switch (stage) {
      case kNormAttention: return preparation(rows);
      case kQKV: return product(Part::kQKV, tiles(layer.query) + tiles(layer.key) + tiles(layer.value), rows);
      case kWrite: return phase_of(Part::kWrite, int64_t(plan_.spans.size()));
      case kAttend: return phase_of(Part::kAttention, int64_t(plan_.attention.size()));
      case kPrepareOutput:
      case kNormGated:
      case kPrepareDown: return preparation(kept);
      case kOutput: return product(Part::kOutput, tiles(layer.output), kept);
      case kGated: return product(Part::kGated, tiles(layer.gate), kept);
      case kDown: return product(Part::kDown, tiles(layer.down), kept);
      default: return 0;
    }
  }

  // For the pool: one task of a phase.
  void task(int64_t phase, int64_t task, int thread) {
    Own& own = *own_[thread];
    if (phase == 0) return embed(task);
    const Stage stage = stage_of(phase);
    const auto each = [&](int64_t rows, auto prepare_one) {
      for (int64_t i = task * kEach; i < std::min(rows, (task + 1) * kEach); ++i) prepare_one(i);
    };
    if (stage == kPrepareHead) return each(step_.wanted, [&](int64_t i) { prepare_head(own, inputs_, i); });
    if (stage == kHead) return head(own, phase, task);
    const int64_t index = layer_of(phase);
    const Layer& layer = layers_[index];
    switch (stage) {
      case kNormAttention:
        return each(step_.rows, [&](int64_t i) { norm(own, inputs_, layer.before, forms_qkv(layer), i, i); });
      case kQKV: return multiply_qkv(own, layer, index, phase, task);
      case kWrite: return write_span(own, layer, index, plan_.spans[task]);
      case kAttend: return attend(own, layer, index, plan_.attention[task]);
      case kPrepareOutput:
        return each(kept_rows(index), [&](int64_t i) { prepare_output(inputs_, layer, index, i); });
      case kOutput:
        return add_product(own, layer.output, index, phase, task, [&](int64_t i) {
          prepare_output(own.inputs, layer, index, i);
        });
      case kNormGated:
        return each(kept_rows(index), [&](int64_t i) {
          norm(own, inputs_, layer.between, forms_gated(layer), kept_row(index, i), i);
        });
      case kGated: return multiply_gated(own, layer, index, phase, task);
      case kPrepareDown: return each(kept_rows(index), [&](int64_t i) { prepare_down(inputs_, layer, i); });
      case kDown:
        return add_product(own, layer.down, index, phase, task, [&](int64_t i) { prepare_down(own.inputs, layer, i); });
      default: return;
    }
  }

 private:
  // Up to so many rows every thread prepares a product's inputs for itself: another phase would take longer.
  static constexpr int64_t kAlone = 8;
  // With more, rows of a task: of single ones threads took longer over whose turn it is than over the row. A prompt's
  // 512 rows took 30 ms with one counter for all threads, 12 with shares, and 9 four by four.
  static constexpr int64_t kEach = 4;
  static constexpr int64_t kAsked = 64 << 10;  // bytes that a thread asks for while it waits, if it waits that long

  enum Stage : int {
    kNormAttention, kQKV, kWrite, kAttend, kPrepareOutput, kOutput,
    kNormGated, kGated, kPrepareDown, kDown, kStages, kPrepareHead, kHead
  };

  // Prepared rows, in each form that a matrix of the model takes.
  struct Inputs {
    Buffer<char> form[3];

    Inputs(const Decoder& of, int64_t rows) {
      const int64_t widest = std::max({of.model_.hidden, of.width(), of.model_.inner});
      for (int i = 0; i < 3; ++i) form[i] = Buffer<char>(rows * input_nbytes(Compute(i), widest));
    }
    char* of(Compute compute) const { return form[int(compute)].get(); }
  };

  // What one thread has for itself.
  struct Own {
    Attention attention;
    Inputs inputs;
    Buffer<float> normed, tile, heads;
    int64_t ready = -1;  // the phase that `inputs` are of
    int64_t idle = -1, asked = 0;  // the phase whose end it waits for; of how many bytes it has asked for meanwhile

    explicit Own(const Decoder& of)
        : attention(of.group_, of.model_.dim, of.cache_.bf16),
          inputs(of, kAlone),
          normed(of.model_.hidden),
          tile(2 * kRows * kTile),
          heads(2 * of.model_.dim) {}
  };

  int64_t width() const { return model_.heads * model_.dim; }
  Stage stage_of(int64_t phase) const {
    const int64_t behind = phase - 1 - kStages * model_.layers;
    return behind < 0 ? Stage((phase - 1) % kStages) : Stage(kPrepareHead + behind);
  }
  static int64_t layer_of(int64_t phase) { return (phase - 1) / kStages; }

  // Behind its keys and values the last layer has only those rows that logits are wanted of.
  bool is_last(int64_t layer) const { return layer + 1 == model_.layers; }
  int64_t kept_rows(int64_t layer) const { return is_last(layer) ? int64_t(kept_.size()) : step_.rows; }
  int64_t kept_row(int64_t layer, int64_t i) const { return is_last(layer) ? kept_[i] : i; }
  bool keeps_any(int64_t layer, int64_t row, int64_t rows) const {
    if (!is_last(layer)) return true;
    const auto found = std::lower_bound(kept_.begin(), kept_.end(), row);
    return found != kept_.end() && *found < row + rows;
  }

  void clock(Part next) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[int(part_)] += std::chrono::duration<double>(now - since_).count();
    since_ = now;
    part_ = next;
  }
  int64_t phase_of(Part part, int64_t tasks) {
    if (tasks > 0) clock(part);
    return tasks;
  }

  // The matrices that a phase multiplies with, side by side; the first is null where there are none.
  std::array<const Matrix*, 3> multiplied(int64_t phase) const {
    const Stage stage = stage_of(phase);
    if (stage >= kPrepareHead) return {stage == kHead ? &model_.head : nullptr};
    const Layer& layer = layers_[layer_of(phase)];
    switch (stage) {
      case kQKV: return {&layer.query, &layer.key, &layer.value};
      case kOutput: return {&layer.output};
      case kGated: return {&layer.gate};
      case kDown: return {&layer.down};
      default: return {};
    }
  }

  // While a thread waits it asks for the weights that it begins the next product with: memory has nothing else to do.
  void idle(int64_t phase, int thread) {
    Own& own = *own_[thread];
    if (own.idle != phase) own.idle = phase, own.asked = 0;
    if (own.asked >= kAsked) return;
    while (++phase <= 2 + kStages * model_.layers) {
      const auto matrices = multiplied(phase);
      if (matrices[0]) return ask(own, thread, matrices);
    }
  }

  void ask(Own& own, int thread, const std::array<const Matrix*, 3>& matrices) {
    int64_t all = 0;
    for (const Matrix* m : matrices) all += m ? tiles(*m) : 0;
    const Grid grid(all, 1, kRows, pool_.threads());
    int64_t tile = grid.first(pool_.share(grid.tasks(), thread));
    const Matrix* const* part = matrices.data();
    for (; tile >= tiles(**part); ++part) tile -= tiles(**part);
    const char* from = static_cast<const char*>((*part)->data) + tile * tile_nbytes((*part)->kind, (*part)->in);
    for (const int64_t until = own.asked + 512; own.asked < until; own.asked += 64) fetch(from + own.asked);
  }

  static int form(const Matrix& m) { return 1 << int(m.compute); }
  static int forms_qkv(const Layer& l) { return form(l.query) | form(l.key) | form(l.value); }
  static int forms_gated(const Layer& l) { return form(l.gate) | form(l.up); }

  static void prepare(const Inputs& to, int forms, const float* x, int64_t n, int64_t row) {
    for (int i = 0; i < 3; ++i) {
      if (forms >> i & 1) prepare_row(Compute(i), x, n, to.of(Compute(i)) + row * input_nbytes(Compute(i), n));
    }
  }

  // Row `row` becomes input `i`.
  void norm(Own& own, const Inputs& to, const float* weight, int forms, int64_t row, int64_t i) {
    norm_row(x_ + row * model_.hidden, weight, model_.eps, model_.hidden, own.normed.get());
    prepare(to, forms, own.normed.get(), model_.hidden, i);
  }
  void prepare_output(const Inputs& to, const Layer& layer, int64_t index, int64_t i) {
    prepare(to, form(layer.output), mixed_ + kept_row(index, i) * width(), width(), i);
  }
  void prepare_down(const Inputs& to, const Layer& layer, int64_t i) {
    prepare(to, form(layer.down), inner_ + i * model_.inner, model_.inner, i);
  }

  // The inputs of a product: everybody's, or with few rows the thread's own, made at its first task of the phase.
  template <class F>
  const Inputs& inputs(Own& own, int64_t rows, int64_t phase, F make) {
    if (rows > kAlone) return inputs_;
    if (own.ready != phase) {
      for (int64_t row = 0; row < rows; ++row) make(row);
      own.ready = phase;
    }
    return own.inputs;
  }

  void embed(int64_t span) {
    const int64_t last = std::min(step_.rows, (span + 1) * Plan::kSpanRows);
    for (int64_t row = span * Plan::kSpanRows; row < last; ++row) {
      float* x = x_ + row * model_.hidden;
      embed_row(model_.embedding_source, model_.embedding, step_.tokens[row], model_.hidden, x);
      if (model_.embedding_scale != 1) {
        for (int64_t i = 0; i < model_.hidden; ++i) x[i] *= model_.embedding_scale;
      }
      rope_angles(plan_.positions[row], frequencies_.data(), model_.rope_factor, model_.dim / 2,
                  turns_ + row * model_.dim);
    }
  }

  void multiply_qkv(Own& own, const Layer& layer, int64_t index, int64_t phase, int64_t task) {
    const Inputs& from = inputs(own, step_.rows, phase, [&](int64_t row) {
      norm(own, own.inputs, layer.before, forms_qkv(layer), row, row);
    });
    const Matrix* const parts[] = {&layer.query, &layer.key, &layer.value};
    const int64_t row = grid_.row(task), count = grid_.count(task);
    for (int64_t at = grid_.first(task); at < grid_.last(task); ++at) {
      int64_t tile = at, column = 0;
      const Matrix* const* part = parts;
      for (; tile >= tiles(**part); ++part) tile -= tiles(**part), column += (*part)->out;
      if (column == 0 && !keeps_any(index, row, count)) continue;  // queries that nobody looks with
      matmul_tile(**part, from.of((*part)->compute), row, count, tile, qkv_ + column, qkv_width_);
    }
  }

  void write_row(Own& own, const Layer& layer, const Sequence& seq, const Cells& cells, int64_t head, int64_t at) {
    if (seq.start + at < seq.write_from) return;
    const float* row = qkv_ + (seq.row + at) * qkv_width_;
    const int64_t dim = model_.dim;
    float* key = own.heads + dim;
    turn(own, row + (model_.heads + head) * dim, layer.key_norm, seq.row + at, 1.0f, key);
    cells.write(seq.start + at, key, row + (model_.heads + model_.kv_heads + head) * dim);
  }

  // A query's or key's norm and rotation.
  void turn(Own& own, const float* x, const float* weight, int64_t row, float scale, float* y) {
    if (weight) {
      norm_row(x, weight, model_.eps, model_.dim, own.heads.get());
      x = own.heads.get();
    }
    rope_rotate(x, turns_ + row * model_.dim, model_.dim / 2, scale, y);
  }

  void write_span(Own& own, const Layer& layer, int64_t index, const Span& span) {
    const Sequence& seq = plan_.seqs[span.seq];
    for (int64_t head = 0; head < model_.kv_heads; ++head) {
      const Cells cells(cache_, index, head, seq.table);
      for (int64_t at = span.at; at < span.at + span.rows; ++at) write_row(own, layer, seq, cells, head, at);
    }
  }

  void attend(Own& own, const Layer& layer, int64_t index, const AttentionTask& todo) {
    const Sequence& seq = plan_.seqs[todo.seq];
    for (int64_t head = todo.head; head < todo.head + todo.heads; ++head) {
      const Cells cells(cache_, index, head, seq.table);
      const Cells next(cache_, index, std::min(head + 1, todo.head + todo.heads - 1), seq.table);
      attend_head(own, layer, index, cells, next, todo, head);
    }
  }

  void attend_head(Own& own, const Layer& layer, int64_t index, const Cells& cells, const Cells& next,
                   const AttentionTask& todo, int64_t head) {
    const int64_t dim = model_.dim;
    const Sequence& seq = plan_.seqs[todo.seq];
    if (todo.positions < seq.rows && !keeps_any(index, seq.row + todo.at, todo.positions)) return;
    const Tile tile{seq.start + todo.at, todo.positions, group_, model_.window, seq.end()};
    if (todo.positions == seq.rows) {  // its only tile: keys and values are written here, each by the one who reads it
      int64_t from = seq.start, to = seq.end();
      if (todo.split >= 0) from = std::max(from, todo.split * kSplit), to = std::min(to, (todo.split + 1) * kSplit);
      for (int64_t position = from; position < to; ++position) {
        write_row(own, layer, seq, cells, head, position - seq.start);
      }
    }
    Attention& attention = own.attention;
    for (int64_t row = 0; row < tile.rows(); ++row) {
      const int64_t at = seq.row + todo.at + row / group_;
      const float* query = qkv_ + at * qkv_width_ + (head * group_ + row % group_) * dim;
      float* turned = own.heads + dim;
      turn(own, query, layer.query_norm, at, model_.query_scale * kLog2E, turned);
      attention.query(row, turned);
    }
    if (todo.split >= 0 && !attend_split(attention, cells, next, tile, todo, head)) return;
    if (todo.split < 0) {
      attention.open(tile.rows());
      for (int64_t split = tile.first_split(); split <= tile.last_split(); ++split) {
        attention.split(cells, next, tile, split, attention.own());
        attention.merge(tile.rows(), attention.own());
      }
    }
    for (int64_t row = 0; row < tile.rows(); ++row) {
      attention.close(row, mixed_ + (seq.row + todo.at + row / group_) * width() + (head * group_ + row % group_) * dim);
    }
  }

  // Computes one split; true if all others of the tile are done and merged here.
  bool attend_split(Attention& attention, const Cells& cells, const Cells& next, const Tile& tile,
                    const AttentionTask& todo, int64_t head) {
    float* memory = partials_ + head * Plan::kPartialFloats;
    const int64_t rows = tile.rows(), floats = Partial::floats(rows, model_.dim);
    attention.split(cells, next, tile, todo.split, Partial::at(memory + todo.partial, rows));
    const Merge& merge = plan_.merges[todo.merge];
    std::atomic<int64_t>& remaining = remaining_[todo.merge * model_.kv_heads + head];
    if (remaining.fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
    remaining.store(merge.last - merge.first + 1, std::memory_order_relaxed);  // for the next layer
    attention.open(rows);
    for (int64_t split = merge.first; split <= merge.last; ++split) {
      attention.merge(rows, Partial::at(memory + merge.partial + (split - merge.first) * floats, rows));
    }
    return true;
  }

  // x += product.
  template <class F>
  void add_product(Own& own, const Matrix& m, int64_t index, int64_t phase, int64_t task, F make) {
    const Inputs& in = inputs(own, kept_rows(index), phase, make);
    const int64_t row = grid_.row(task), count = grid_.count(task), hidden = model_.hidden;
    for (int64_t tile = grid_.first(task); tile < grid_.last(task); ++tile) {
      matmul_tile(m, in.of(m.compute), row, count, tile, y_.get(), hidden);
      const int64_t column = tile * kTile, columns = std::min(kTile, hidden - column);
      for (int64_t r = row; r < row + count; ++r) {
        float* x = x_ + kept_row(index, r) * hidden + column;
        const float* y = y_ + r * hidden + column;
        for (int64_t i = 0; i < columns; ++i) x[i] += y[i];
      }
    }
  }

  void multiply_gated(Own& own, const Layer& layer, int64_t index, int64_t phase, int64_t task) {
    const Inputs& in = inputs(own, kept_rows(index), phase, [&](int64_t i) {
      norm(own, own.inputs, layer.between, forms_gated(layer), kept_row(index, i), i);
    });
    const int64_t row = grid_.row(task), count = grid_.count(task);
    float *gate = own.tile.get(), *up = own.tile + kRows * kTile;
    for (int64_t tile = grid_.first(task); tile < grid_.last(task); ++tile) {
      const int64_t column = tile * kTile, columns = std::min(kTile, model_.inner - column);
      const auto multiply = [&](const Matrix& m, float* to) {
        const char* from = in.of(m.compute) + row * input_nbytes(m.compute, m.in);
        matmul_tile(m, from, 0, count, tile, to - column, kTile);
      };
      multiply(layer.gate, gate);
      multiply(layer.up, up);
      for (int64_t r = 0; r < count; ++r) {
        gate_row(model_.activation, gate + r * kTile, up + r * kTile, columns,
                 inner_ + (row + r) * model_.inner + column);
      }
    }
  }

  void prepare_head(Own& own, const Inputs& to, int64_t index) {
    norm_row(x_ + step_.wanted_rows[index] * model_.hidden, model_.last, model_.eps, model_.hidden, own.normed.get());
    prepare(to, form(model_.head), own.normed.get(), model_.hidden, index);
  }

  // The first tasks multiply, the others look whether rows are finite.
  void head(Own& own, int64_t phase, int64_t task) {
    if (task >= grid_.tasks()) return check(task - grid_.tasks());
    const Inputs& in = inputs(own, step_.wanted, phase, [&](int64_t index) { prepare_head(own, own.inputs, index); });
    for (int64_t tile = grid_.first(task); tile < grid_.last(task); ++tile) {
      matmul_tile(model_.head, in.of(model_.head.compute), grid_.row(task), grid_.count(task), tile, step_.logits,
                  model_.vocab);
    }
  }

  // Its keys and values in the last layer are looked at too: that layer may leave out what comes of them.
  void check(int64_t span) {
    const int64_t last = std::min(step_.rows, (span + 1) * Plan::kSpanRows);
    for (int64_t row = span * Plan::kSpanRows; row < last; ++row) {
      const float* x = x_ + row * model_.hidden;
      bool finite = true;
      for (int64_t i = 0; i < model_.hidden; ++i) finite &= x[i] - x[i] == 0.0f;
      const float* written = qkv_ + row * qkv_width_;
      for (int64_t i = width(); i < qkv_width_; ++i) finite &= written[i] - written[i] == 0.0f;
      step_.finite[row] = finite;
    }
  }

  const Model model_;
  const std::vector<Layer> layers_;
  const std::vector<float> frequencies_;
  const Cache cache_;
  const int64_t group_, qkv_width_, max_rows_;
  Buffer<float> x_, y_, qkv_, mixed_, inner_, turns_, partials_;
  Inputs inputs_;
  std::vector<std::unique_ptr<Own>> own_;
  std::unique_ptr<std::atomic<int64_t>[]> remaining_;
  Plan plan_;
  std::vector<int64_t> kept_;  // rows that logits are wanted of, in order
  Step step_{};
  Grid grid_;
  Part part_ = Part::kEmbed;
  std::chrono::steady_clock::time_point since_;
  double seconds_[int(Part::kParts)] = {};
  Pool pool_;  // the last: its threads look at the others
};

}  // namespace di

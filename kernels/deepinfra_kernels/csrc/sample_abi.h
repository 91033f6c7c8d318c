// What Python calls of sample.h.
#pragma once

#include <memory>
#include <vector>

#include "pool.h"
#include "sample.h"
#include "status.h"

namespace di::sampling {

// Rows are tasks: which thread draws one changes nothing.
class Sampler {
  public:
    explicit Sampler(int threads) : pool_(threads) {
        for (int i = 0; i < pool_.threads(); ++i) cutters_.push_back(std::make_unique<Cutter>());
    }

    void sample(const float* logits, int64_t rows, int64_t stride, int64_t vocab, Draw* draws, int64_t most,
                int64_t* ids, float* values) {
        const auto draw = [&](int64_t row, int thread) {
            sample_row(logits + row * stride, vocab, draws[row], ids + row * most, values + row * most,
                       *cutters_[size_t(thread)]);
        };
        if (rows == 1) {
            draw(0, 0);
        } else {
            pool_.run(rows, draw);
        }
    }

  private:
    Pool pool_;
    std::vector<std::unique_ptr<Cutter>> cutters_;
};

}  // namespace di::sampling

extern "C" {

int di_sampler_new(int threads, void** sampler) {
    return di::guarded([&] { *sampler = new di::sampling::Sampler(threads); });
}
void di_sampler_free(void* sampler) { delete static_cast<di::sampling::Sampler*>(sampler); }

// Draws a token for every row of `logits` [rows, vocab], which begin `stride` floats apart. Row r's likeliest tokens go
// to ids and values [rows, most].
int di_sample(void* sampler, const float* logits, int64_t rows, int64_t stride, int64_t vocab,
              di::sampling::Draw* draws, int64_t most, int64_t* ids, float* values) {
    return di::guarded([&] {
        static_cast<di::sampling::Sampler*>(sampler)->sample(logits, rows, stride, vocab, draws, most, ids, values);
    });
}

}  // extern "C"

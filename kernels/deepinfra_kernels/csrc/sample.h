// From float32 logits to a token. Every function sees one row, and what it computes depends on that row alone.
//
// Vectors are the compiler's own, always 16 floats or 8 doubles wide, so that the paths agree bit by bit.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // these vectors are never passed between translation units

namespace di {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef int32_t HalfInts __attribute__((vector_size(32)));
typedef float HalfFloats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64)));

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Sixteen logits from `at`; beyond the row's end there are tokens that cannot be drawn.
inline Floats logits_at(const float* row, int64_t at, int64_t vocab) {
    Floats x;
    if (at + 16 <= vocab) {
        std::memcpy(&x, row + at, sizeof x);
    } else {
        for (int lane = 0; lane < 16; ++lane) x[lane] = at + lane < vocab ? row[at + lane] : kNone;
    }
    return x;
}

inline uint32_t set_lanes(Ints mask) {
#ifdef __AVX512DQ__
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#else
    __m256 halves[2];
    std::memcpy(halves, &mask, sizeof mask);
    return uint32_t(_mm256_movemask_ps(halves[0])) | uint32_t(_mm256_movemask_ps(halves[1])) << 8;
#endif
}

inline float largest(Floats x) {
    float best = x[0];
    for (int lane = 1; lane < 16; ++lane) best = x[lane] > best ? x[lane] : best;
    return best;
}

struct Greedy {
    float value;  // NaN if the row holds one
    int64_t token;
};

// The largest logit, of equals the lowest id.
inline Greedy argmax(const float* row, int64_t vocab) {
    constexpr int64_t kBlock = 1024;
    Greedy best{kNone, 0};
    Ints odd{};
    int64_t where = -1;
    for (int64_t at = 0; at < vocab; at += kBlock) {
        const int64_t end = std::min(vocab, at + kBlock);
        Floats most[4];
        for (auto& m : most) m = Floats{} + kNone;
        int64_t i = at;
        for (; i + 64 <= end; i += 64) {
            for (int part = 0; part < 4; ++part) {
                const Floats x = logits_at(row, i + 16 * part, vocab);
                most[part] = x > most[part] ? x : most[part];
                odd |= x != x;
            }
        }
        for (; i < end; i += 16) {
            const Floats x = logits_at(row, i, vocab);
            most[0] = x > most[0] ? x : most[0];
            odd |= x != x;
        }
        most[0] = most[0] > most[1] ? most[0] : most[1];
        most[2] = most[2] > most[3] ? most[2] : most[3];
        const float value = largest(most[0] > most[2] ? most[0] : most[2]);
        if (value > best.value) {
            best.value = value;
            where = at;
        }
    }
    if (set_lanes(odd)) return {std::numeric_limits<float>::quiet_NaN(), 0};
    if (where >= 0) {
        best.token = where;
        while (row[best.token] != best.value) ++best.token;
    }
    return best;
}

// e^x for x <= 0, relative error below 1e-14; 0 below -700. Its operations are the same on every path.
inline Doubles exp_of(Doubles x) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    const Longs gone = x < -700.0;
    x = gone ? Doubles{} - 700.0 : x;
    const Doubles shifted = x * 1.4426950408889634 + kRound;
    const Doubles whole = shifted - kRound;
    const Doubles r = (x - whole * 0.6931471803691238) - whole * 1.9082149292705877e-10;
    // Taylor's series up to r^11 / 11!; |r| <= 0.3466 leaves 6e-15.
    constexpr double kTerms[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                 1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
    Doubles y = Doubles{} + kTerms[0];
    for (int term = 1; term < 12; ++term) y = y * r + kTerms[term];
    Longs bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;  // what kRound has above the integer is shifted out
    Doubles scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return gone ? Doubles{} : y * scale;
}

inline Doubles half(Floats x, int which) {
    HalfFloats part;
    std::memcpy(&part, reinterpret_cast<const char*>(&x) + 32 * which, sizeof part);
    return __builtin_convertvector(part, Doubles);
}

inline double total_of(Doubles x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// log of the sum of e^logit, in float64; `best` is the largest logit.
inline double logsumexp(const float* row, int64_t vocab, float best) {
    Doubles sums[2]{};
    for (int64_t at = 0; at < vocab; at += 16) {
        const Floats x = logits_at(row, at, vocab);
        for (int part = 0; part < 2; ++part) sums[part] += exp_of(half(x, part) - double(best));
    }
    return double(best) + std::log(total_of(sums[0] + sums[1]));
}

struct Token {
    float value;
    int64_t id;
    bool operator<(const Token& other) const {  // likelier first, equals by id
        return value != other.value ? value > other.value : id < other.id;
    }
};

// The `count` <= vocab largest logits, largest first, equals by id.
inline void likeliest(const float* row, int64_t vocab, int64_t count, int64_t* ids, float* values) {
    std::vector<Token> found;
    found.reserve(size_t(count) + 1);
    float least = kNone;
    for (int64_t at = 0; at < vocab; at += 16) {
        const Floats x = logits_at(row, at, vocab);
        const bool full = int64_t(found.size()) == count;
        uint32_t lanes = full ? set_lanes(x > least) : 0xffffu;
        for (; lanes; lanes &= lanes - 1) {
            const Token token{row[std::min(at + __builtin_ctz(lanes), vocab - 1)], at + __builtin_ctz(lanes)};
            if (token.id >= vocab) break;
            if (int64_t(found.size()) == count && !(token.value > found.back().value)) continue;
            found.insert(std::upper_bound(found.begin(), found.end(), token), token);
            if (int64_t(found.size()) > count) found.pop_back();
            least = found.back().value;
        }
    }
    for (int64_t i = 0; i < int64_t(found.size()); ++i) {
        ids[i] = found[size_t(i)].id;
        values[i] = found[size_t(i)].value;
    }
}

// Which tokens top_k, top_p and min_p leave. `value` is (logit - best) / heat in float32: a token is kept if it comes
// before or at the last one that is kept, likelier first and equals by id, and if its value is at least `least`.
struct Filter {
    float best, heat;
    Token last{kNone, std::numeric_limits<int64_t>::max()};
    double least = -std::numeric_limits<double>::infinity();
    float floor = kNone;  // no smaller logit is kept
    bool sure = true;     // false: rounding could have moved the cut

    float value(float logit) const { return (logit - best) / heat; }
    bool keeps(float logit, int64_t id) const {
        const Token token{value(logit), id};
        return !(last < token) && double(token.value) >= least;
    }
};

// Finds the cut of top_k and top_p without a sort: values fall into bins by their leading bits, only the bin with the
// cut is sorted.
class Cutter {
public:
    // top_k of 0 and top_p of 1 keep all.
    void cut(const float* row, int64_t vocab, int64_t top_k, double top_p, Filter& filter) {
        row_ = row, vocab_ = vocab, filter_ = &filter;
        if (top_k <= 0 || top_k >= vocab) top_k = vocab;
        if (top_k == vocab && top_p >= 1.0) return;
        weigh(top_p < 1.0);
        double whole = 0.0;
        for (int bin = 0; bin < kBins; ++bin) whole += mass_[bin];
        if (top_k < vocab) {
            int64_t before = 0;
            double mass = 0.0;
            int bin = 0;
            while (before + count_[bin] < top_k) {
                mass += mass_[bin];
                before += count_[bin++];
            }
            gather(bin);
            const auto kept = size_t(top_k - before);
            end(kept - 1);
            if (top_p < 1.0) {
                for (size_t i = 0; i < kept; ++i) mass += exponential(tokens_[i].value);
                whole = mass;
            }
        }
        if (top_p < 1.0) cut_mass(top_p * whole, whole);
    }

private:
    static constexpr int kBins = 1024;
    static constexpr int kShift = 17;                 // of a float's bits: 64 bins for each power of two
    static constexpr int32_t kFirst = (127 - 10) << 6;  // distances below 2^-10 share a bin, and those above 2^6
    // What sums in other orders may differ by, of the whole: 2^-53 for each of 10^5 additions, and as much again.
    static constexpr double kDoubt = 1e-10;

    static double exponential(float value) {
        return exp_of(Doubles{} + double(value))[0];
    }

    Ints bins(Floats value) const {
        Ints bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits = ((bits & 0x7fffffff) >> kShift) - kFirst;
        bits = bits < 0 ? Ints{} : bits;
        return bits > kBins - 1 ? Ints{} + (kBins - 1) : bits;
    }

    void weigh(bool masses) {
        // Four of each, taken in turn, so that additions to one bin do not wait for each other.
        std::memset(counts_, 0, sizeof counts_);
        std::memset(masses_, 0, sizeof masses_);
        alignas(64) int32_t bin[16];
        alignas(64) double weight[16];
        for (int64_t at = 0; at < vocab_; at += 16) {
            const Floats value = (logits_at(row_, at, vocab_) - filter_->best) / filter_->heat;
            const Ints where = bins(value);
            std::memcpy(bin, &where, sizeof bin);
            const int lanes = int(std::min<int64_t>(16, vocab_ - at));
            for (int lane = 0; lane < lanes; ++lane) ++counts_[lane & 3][bin[lane]];
            if (!masses) continue;
            for (int part = 0; part < 2; ++part) {
                const Doubles e = exp_of(half(value, part));
                std::memcpy(weight + 8 * part, &e, sizeof e);
            }
            for (int lane = 0; lane < lanes; ++lane) masses_[lane & 3][bin[lane]] += weight[lane];
        }
        for (int i = 0; i < kBins; ++i) {
            count_[i] = int64_t(counts_[0][i]) + counts_[1][i] + counts_[2][i] + counts_[3][i];
            mass_[i] = (masses_[0][i] + masses_[1][i]) + (masses_[2][i] + masses_[3][i]);
        }
    }

    void gather(int bin) {
        if (gathered_ == bin && gathered_row_ == row_) return;
        tokens_.clear();
        for (int64_t at = 0; at < vocab_; at += 16) {
            const Floats value = (logits_at(row_, at, vocab_) - filter_->best) / filter_->heat;
            for (uint32_t lanes = set_lanes(bins(value) == bin); lanes; lanes &= lanes - 1) {
                const int lane = __builtin_ctz(lanes);
                if (at + lane < vocab_) tokens_.push_back({value[lane], at + lane});
            }
        }
        std::sort(tokens_.begin(), tokens_.end());
    }

    void end(size_t last) {
        filter_->last = tokens_[last];
        filter_->floor = row_[tokens_[last].id];
        for (const Token& token : tokens_) {  // another logit with the same value may be the smaller one
            if (token.value == filter_->last.value) filter_->floor = std::min(filter_->floor, row_[token.id]);
        }
    }

    void cut_mass(double target, double whole) {
        double mass = 0.0;
        int bin = 0;
        while (bin < kBins - 1 && mass + mass_[bin] < target) mass += mass_[bin++];
        gather(bin);
        const double doubt = kDoubt * whole;
        double before = mass;
        for (size_t i = 0; i < tokens_.size(); ++i) {
            before = mass;
            mass += exponential(tokens_[i].value);
            if (mass >= target) {
                filter_->sure = mass - target > doubt && target - before > doubt;
                end(i);
                return;
            }
        }
        filter_->sure = false;
    }

    const float* row_ = nullptr;
    int64_t vocab_ = 0;
    Filter* filter_ = nullptr;
    int32_t counts_[4][kBins];
    double masses_[4][kBins];
    int64_t count_[kBins];
    double mass_[kBins];
    std::vector<Token> tokens_;
};

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// deepinfra.core.sampling.token_uniform, exactly.
inline double token_uniform(uint64_t key, int64_t token) {
    uint64_t z = key + kGolden + uint64_t(token) * kGolden;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    z = (z >> 12) | 0x3FF0000000000000u;  // a number in [1, 2)
    double u;
    std::memcpy(&u, &z, sizeof u);
    return u - (1 - 0x1p-53);
}

// The upper bits of 1 - token_uniform: floor(2^31 (1 - u)) of eight tokens. The generator's last step, which does not
// reach these bits, is left out.
inline HalfInts complements(Words z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return __builtin_convertvector(~z >> 33, HalfInts);
}

// The token with the largest score, logit / heat - log(-log(u)), of those that the filter keeps; -1 if another one's is
// so near that rounding decides, or if heat and logits are out of the ordinary.
//
// Only tokens that may beat the best one so far are evaluated. With w = -log(u) >= 1 - u, a token beats the score S only
// if 1 - u <= w <= e^x, where x = logit / heat - S. A float's bits, as an integer, are 2^23 (127 + log2) or, between
// powers of two, more: the chord lies above the logarithm's inverse. So 1 - u <= e^x implies
// bits(1 - u) <= 2^23 (127 + x / log(2)): one product decides. It is rounded; `slack` is more than all rounding
// (a few times 2^-24 of each term) and what else stands there, a thousandth, is how far behind a token is that is left
// out.
inline int64_t race(const float* row, int64_t vocab, uint64_t key, double heat, const Filter& filter, int64_t first) {
    const double reach = std::fabs(double(filter.best)) / heat * 1.4426950408889634;
    if (!(heat >= 1e-5) || !(reach < 1e7)) return -1;
    double best = -std::numeric_limits<double>::infinity(), second = best;
    int64_t winner = -1;
    float bound = std::numeric_limits<float>::infinity();
    const auto run = [&](int64_t token) {
        const double score = double(row[token]) / heat - std::log(-std::log(token_uniform(key, token)));
        if (!(score > best)) {
            second = std::max(second, score);
            return;
        }
        second = best, best = score, winner = token;
        const double at = best * 1.4426950408889634;
        const double slack = 1e-3 + 0x1p-20 * (reach + std::fabs(at) + 200.0);
        bound = float((127 + 31 - at + slack) * 0x1p23);
    };
    if (filter.keeps(row[first], first)) run(first);
    const auto rate = float(1.4426950408889634 / heat * 0x1p23);
    Words z;
    for (int lane = 0; lane < 8; ++lane) z[lane] = key + kGolden + uint64_t(lane) * kGolden;
    for (int64_t at = 0; at < vocab; at += 16, z += 16 * kGolden) {
        const Floats x = logits_at(row, at, vocab);
        const Ints distance =
            __builtin_shufflevector(complements(z), complements(z + 8 * kGolden), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                    11, 12, 13, 14, 15);
        const Floats tail = __builtin_convertvector(distance, Floats);
        Ints bits;
        std::memcpy(&bits, &tail, sizeof bits);
        const Ints may = (__builtin_convertvector(bits, Floats) <= x * rate + bound) & (x >= filter.floor);
        for (uint32_t lanes = set_lanes(may); lanes; lanes &= lanes - 1) {
            const int64_t token = at + __builtin_ctz(lanes);
            if (token < vocab && token != first && filter.keeps(row[token], token)) run(token);
        }
    }
    return best - second > 1e-12 + 4e-15 * std::fabs(best) ? winner : -1;
}

// One row: what is asked for, then what came of it.
struct Draw {
    uint64_t key;
    double heat;        // 0: the likeliest
    double top_p;
    double least;       // log(min_p)
    int64_t top_k;
    int64_t likeliest;  // how many, with the logarithm of the sum; -1: neither
    int64_t token;      // -1: only exact arithmetic in the caller's order can tell
    double total;
    float best;         // not finite: the row is of no use
    int32_t padding;
};

inline void sample_row(const float* row, int64_t vocab, Draw& draw, int64_t* ids, float* values, Cutter& cutter) {
    const Greedy greedy = argmax(row, vocab);
    draw.best = greedy.value;
    draw.token = greedy.token;
    if (!std::isfinite(greedy.value)) return;
    if (draw.heat > 0) {
        Filter filter{.best = greedy.value, .heat = float(draw.heat)};
        cutter.cut(row, vocab, draw.top_k, draw.top_p, filter);
        filter.least = draw.least;
        if (std::isfinite(draw.least)) {  // generous: `keeps` is exact
            const double floor = double(greedy.value) + draw.least * draw.heat;
            filter.floor = std::max(filter.floor, float(floor - 1e-5 * (std::fabs(floor) + std::fabs(greedy.value))));
        }
        draw.token = filter.sure ? race(row, vocab, draw.key, draw.heat, filter, greedy.token) : -1;
    }
    if (draw.likeliest >= 0) {
        draw.total = logsumexp(row, vocab, greedy.value);
        likeliest(row, vocab, std::min(draw.likeliest, vocab), ids, values);
    }
}

}  // namespace di

#pragma GCC diagnostic pop

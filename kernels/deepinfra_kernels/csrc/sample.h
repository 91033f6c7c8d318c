// From float32 logits to a token. Every function sees one row, and what it computes depends on that row alone.
//
// Vectors are the compiler's own, as wide as the path's registers; where the order of a sum matters it is that of
// sixteen lanes, so that the paths agree bit by bit.
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

namespace di::sampling {

#ifdef __AVX512DQ__
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
constexpr int kLanes = kBytes / 4;
constexpr int kHalf = kLanes / 2;

typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef int32_t HalfInts __attribute__((vector_size(kBytes / 2)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef int64_t Longs __attribute__((vector_size(kBytes)));
typedef uint64_t Words __attribute__((vector_size(kBytes)));

constexpr float kNone = -std::numeric_limits<float>::infinity();

// kLanes logits from `at`; beyond the row's end there are tokens that cannot be drawn.
inline Floats logits_at(const float* row, int64_t at, int64_t vocab) {
    Floats x;
    if (at + kLanes <= vocab) {
        std::memcpy(&x, row + at, sizeof x);
    } else {
        for (int lane = 0; lane < kLanes; ++lane) x[lane] = at + lane < vocab ? row[at + lane] : kNone;
    }
    return x;
}

inline uint32_t set_lanes(Ints mask) {
#ifdef __AVX512DQ__
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#else
    return uint32_t(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#endif
}

inline Doubles fused(Doubles a, Doubles b, Doubles c) {  // a * b + c, rounded once
#ifdef __AVX512DQ__
    return reinterpret_cast<Doubles>(_mm512_fmadd_pd(__m512d(a), __m512d(b), __m512d(c)));
#else
    return reinterpret_cast<Doubles>(_mm256_fmadd_pd(__m256d(a), __m256d(b), __m256d(c)));
#endif
}

inline Doubles where(Longs mask, Doubles x) {  // x, and 0 elsewhere
    Longs bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= mask;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float largest(Floats x) {
    float best = x[0];
    for (int lane = 1; lane < kLanes; ++lane) best = x[lane] > best ? x[lane] : best;
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
        for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
            for (int part = 0; part < 4; ++part) {
                const Floats x = logits_at(row, i + kLanes * part, vocab);
                most[part] = x > most[part] ? x : most[part];
                odd |= x != x;
            }
        }
        for (; i < end; i += kLanes) {
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
        best.value = row[best.token];  // of two zeros its own
    }
    return best;
}

// e^x for x <= 0, relative error below 1e-14; 0 below -700. Its operations are the same on every path.
inline Doubles exp_of(Doubles x) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    const Longs there = x >= -700.0;
    const Doubles shifted = fused(x, Doubles{} + 1.4426950408889634, Doubles{} + kRound);
    const Doubles whole = shifted - kRound;
    Doubles r = fused(whole, Doubles{} - 0.6931471803691238, x);
    r = fused(whole, Doubles{} - 1.9082149292705877e-10, r);
    // Taylor's series up to r^11 / 11!; |r| <= 0.3466 leaves 6e-15.
    constexpr double kTerms[] = {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                 1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
    Doubles y = Doubles{} + 1.0 / 39916800;
#pragma GCC unroll 11
    for (int term = 0; term < 11; ++term) y = fused(y, r, Doubles{} + kTerms[term]);
    Longs bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;  // what kRound has above the integer is shifted out
    Doubles scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return where(there, y * scale);
}

inline Doubles half(Floats x, int which) {
#ifdef __AVX512DQ__
    const __m512 all = __m512(x);
    return Doubles(_mm512_cvtps_pd(which ? _mm512_extractf32x8_ps(all, 1) : _mm512_castps512_ps256(all)));
#else
    const __m256 all = __m256(x);
    return Doubles(_mm256_cvtps_pd(which ? _mm256_extractf128_ps(all, 1) : _mm256_castps256_ps128(all)));
#endif
}

// log of the sum of e^logit, in float64; `best` is the largest logit.
inline double logsumexp(const float* row, int64_t vocab, float best) {
    Doubles sums[16 / kHalf]{};
    for (int64_t at = 0; at < vocab; at += 16) {
        for (int part = 0; part < 16 / kHalf; part += 2) {
            const Floats x = logits_at(row, at + part * kHalf, vocab);
            for (int side = 0; side < 2; ++side) sums[part + side] += exp_of(half(x, side) - double(best));
        }
    }
    double lanes[16];
    std::memcpy(lanes, sums, sizeof lanes);
    for (int width = 8; width; width /= 2) {
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return double(best) + std::log(lanes[0]);
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
    if (count <= 0) return;
    std::vector<Token> found;
    found.reserve(size_t(count) + 1);
    float least = kNone;
    for (int64_t at = 0; at < vocab; at += kLanes) {
        const Floats x = logits_at(row, at, vocab);
        const bool full = int64_t(found.size()) == count;
        uint32_t lanes = full ? set_lanes(x > least) : (1u << kLanes) - 1;
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

// Finds the cut of top_k and top_p without a sort of the row: by the distance of tokens to the best one, it narrows down
// where the cut is, by nine each time, and sorts the few tokens there.
class Cutter {
public:
    // top_k of 0 and top_p of 1 keep all.
    void cut(const float* row, int64_t vocab, int64_t top_k, double top_p, Filter& filter) {
        if (top_k <= 0 || top_k >= vocab) top_k = vocab;
        if (top_k == vocab && top_p >= 1.0) return;
        row_ = row, vocab_ = vocab, filter_ = &filter;
        double whole = fill(top_p < 1.0);
        if (top_k < vocab) {
            const Sum before = narrow([&](const Sum& sum) { return sum.count >= top_k; });
            const auto kept = size_t(top_k - before.count);
            end(kept - 1);
            if (top_p < 1.0) {
                whole = before.mass;
                for (size_t i = 0; i < kept; ++i) whole += weights_[size_t(tokens_[i].id)];
            }
        }
        if (top_p < 1.0) cut_mass(top_p * whole, whole);
    }

private:
    struct Sum {
        int64_t count;
        double mass;
    };
    static constexpr int kEdges = 8;
    static constexpr size_t kFew = 256;  // tokens that are sorted rather than narrowed down
    // What sums in other orders may differ by, of the whole: 2^-53 for each of 10^5 additions, and as much again.
    static constexpr double kDoubt = 1e-10;

    // Every token's value and, with `masses`, e^value; returns the sum of these.
    double fill(bool masses) {
        const auto padded = size_t(vocab_ + kLanes - 1) / kLanes * kLanes;
        values_.resize(padded);
        weights_.assign(masses ? 0 : padded, 0.0);
        weights_.resize(padded);
        Doubles sums[2]{};
        for (int64_t at = 0; at < vocab_; at += kLanes) {
            const Floats value = (logits_at(row_, at, vocab_) - filter_->best) / filter_->heat;
            std::memcpy(&values_[size_t(at)], &value, sizeof value);
            if (!masses) continue;
            for (int side = 0; side < 2; ++side) {
                const Doubles e = exp_of(half(value, side));
                std::memcpy(&weights_[size_t(at + side * kHalf)], &e, sizeof e);
                sums[side] += e;
            }
        }
        double whole = 0.0;
        for (int lane = 0; lane < kHalf; ++lane) whole += sums[0][lane] + sums[1][lane];
        return whole;
    }

    // Of the tokens nearer than each edge.
    void below(const float (&edges)[kEdges], Sum (&found)[kEdges]) const {
        Ints counts[kEdges]{};
        Doubles sums[kEdges]{};
        for (int64_t at = 0; at < vocab_; at += kLanes) {
            Floats value;
            std::memcpy(&value, &values_[size_t(at)], sizeof value);
            for (int i = 0; i < kEdges; ++i) counts[i] -= value > -edges[i];
            for (int side = 0; side < 2; ++side) {
                const Doubles v = half(value, side);
                Doubles e;
                std::memcpy(&e, &weights_[size_t(at + side * kHalf)], sizeof e);
                for (int i = 0; i < kEdges; ++i) sums[i] += where(v > double(-edges[i]), e);
            }
        }
        for (int i = 0; i < kEdges; ++i) {
            found[i] = {};
            for (int lane = 0; lane < kLanes; ++lane) found[i].count += counts[i][lane];
            for (int lane = 0; lane < kHalf; ++lane) found[i].mass += sums[i][lane];
        }
    }

    // Puts a few tokens into tokens_, likelier first, among them the one with which `reached` becomes true of the
    // tokens so far; returns what comes before them.
    template <class Reached>
    Sum narrow(Reached reached) {
        float low = 0.0f, high = -kNone;
        Sum before{}, found[kEdges];
        float edges[kEdges] = {0.25f, 0.5f, 1.0f, 2.0f, 4.0f, 8.0f, 16.0f, 32.0f};
        for (int turn = 0; turn < 3; ++turn) {
            below(edges, found);
            int i = 0;
            while (i < kEdges && !reached(found[i])) ++i;
            const int64_t inside = (i < kEdges ? found[i].count : vocab_) - (i ? found[i - 1].count : before.count);
            if (i) low = edges[i - 1], before = found[i - 1];
            if (i < kEdges) high = edges[i];
            if (high == -kNone || inside <= int64_t(kFew)) break;
            for (int edge = 0; edge < kEdges; ++edge) edges[edge] = low + (high - low) * float(edge + 1) / (kEdges + 1);
        }
        tokens_.clear();
        for (int64_t at = 0; at < vocab_; at += kLanes) {
            Floats value;
            std::memcpy(&value, &values_[size_t(at)], sizeof value);
            Ints inside = value <= -low;
            if (high != -kNone) inside &= value > -high;
            for (uint32_t lanes = set_lanes(inside); lanes; lanes &= lanes - 1) {
                const int lane = __builtin_ctz(lanes);
                if (at + lane < vocab_) tokens_.push_back({value[lane], at + lane});
            }
        }
        std::sort(tokens_.begin(), tokens_.end());
        return before;
    }

    void end(size_t last) {
        filter_->last = tokens_[last];
        filter_->floor = row_[tokens_[last].id];
        for (const Token& token : tokens_) {  // another logit with the same value may be the smaller one
            if (token.value == filter_->last.value) filter_->floor = std::min(filter_->floor, row_[token.id]);
        }
    }

    void cut_mass(double target, double whole) {
        const double doubt = kDoubt * whole;
        double mass = narrow([&](const Sum& sum) { return sum.mass >= target; }).mass;
        for (size_t i = 0; i < tokens_.size(); ++i) {
            const double before = mass;
            mass += weights_[size_t(tokens_[i].id)];
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
    std::vector<float> values_;
    std::vector<double> weights_;
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

// The upper bits of 1 - token_uniform: floor(2^31 (1 - u)) of kHalf tokens. The generator's last step, which does not
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
    for (int lane = 0; lane < kHalf; ++lane) z[lane] = key + kGolden + uint64_t(lane) * kGolden;
    for (int64_t at = 0; at < vocab; at += kLanes, z += kLanes * kGolden) {
        const Floats x = logits_at(row, at, vocab);
        const HalfInts parts[2] = {complements(z), complements(z + kHalf * kGolden)};
        Ints distance;
        std::memcpy(&distance, parts, sizeof distance);
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
        if (filter.heat > 0 && std::isfinite(filter.heat)) {
            cutter.cut(row, vocab, draw.top_k, draw.top_p, filter);
        } else {  // quotients would be no numbers, which cannot be sorted
            filter.sure = false;
        }
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

}  // namespace di::sampling

#pragma GCC diagnostic pop

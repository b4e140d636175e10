// Tokens drawn from rows of logits by inverse transform in vocabulary order, and log-probabilities; nothing is sorted.
//
// A row is read in blocks of a fixed size whose partial results are put together in order, so that its draw is the same
// bits whoever computed them and whatever else is drawn. Masses are float64: implementations that differ in the last bit
// of a mass still draw the same token.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "simd.h"

namespace chorus {

// Mirrors DRAW of ops/native_sampling.py.
struct Draw {
    const float* logits;
    double inverse_temperature;  // 0: the largest
    double u, top_p, min_p;
    int64_t top_k;      // 0: all
    int64_t likeliest;  // a token of the largest logit, which is finite; -1: not known
    int64_t token;  // out; -1: no logit is above -inf, or one is not finite
};

// Mirrors SCORE of ops/native_sampling.py.
struct Score {
    const float* logits;
    int64_t token, count;
    int64_t* ids;   // out, [count]: the most likely tokens, best first, of equal ones the first
    double* values; // out, [count]: their log-probabilities
    double own;     // out: the token's; NaN: a logit is not finite
};

constexpr int kBlock = 8192;       // logits of a unit of work
constexpr int kGroupVectors = 32;  // logits per group whose largest is known, see threshold_of

// e^((x - most) · inverse) of logits. 0 · inverse stays 0, and what lies below never becomes positive.
struct Masses {
    __m512d most, factor;
    Masses(float most, double inverse) : most(_mm512_set1_pd(most)), factor(_mm512_set1_pd(inverse * kLog2e)) {}
    __m512d of(__m256 x) const { return exp2_8(_mm512_mul_pd(_mm512_sub_pd(_mm512_cvtps_pd(x), most), factor)); }
    void of(__m512 x, __m512d out[2]) const {
        out[0] = of(_mm512_castps512_ps256(x));
        out[1] = of(_mm512_extractf32x8_ps(x, 1));
    }
};

inline __m512 load_or_none(const float* x, int count) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), head_mask(count), x);
}

// The largest of n logits, +inf if any is NaN. groups: null, or where the largest of every group goes, 16 for each
// kGroupVectors vectors begun; a group is one lane of them.
inline float block_most(const float* x, int n, float* groups) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __mmask16 nan = 0;
    for (int i = 0; i < n;) {
        __m512 group = _mm512_set1_ps(-INFINITY);
        for (const int end = std::min(n, i + kGroupVectors * kLanes); i < end; i += kLanes) {
            const __m512 v = load_or_none(x + i, n - i);
            nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            group = _mm512_max_ps(group, v);
        }
        if (groups) store16(groups, group), groups += kLanes;
        most = _mm512_max_ps(most, group);
    }
    return nan ? INFINITY : _mm512_reduce_max_ps(most);
}
inline int groups_of(int n) { return (n + kGroupVectors * kLanes - 1) / (kGroupVectors * kLanes) * kLanes; }

inline double block_mass(const float* x, int n, float most, double inverse) {
    const Masses masses(most, inverse);
    __m512d sum[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()}, m[2];
    for (int i = 0; i < n; i += kLanes) {
        masses.of(load_or_none(x + i, n - i), m);
        sum[0] = _mm512_add_pd(sum[0], m[0]);
        sum[1] = _mm512_add_pd(sum[1], m[1]);
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(sum[0], sum[1]));
}

struct Found {
    int at;
    double before;  // the mass of all before it
};

// The first of n whose mass with all before it exceeds `target`; the last that has any if rounding left none.
// masses(i, out): those of 16 from i on, 0 beyond the n.
template <class Of>
inline Found first_above(int n, double target, Of masses) {
    double before = 0;
    Found last{0, 0};
    for (int i = 0; i < n; i += kLanes) {
        alignas(64) double mass[kLanes];
        __m512d m[2];
        masses(i, m);
        const double sum = _mm512_reduce_add_pd(_mm512_add_pd(m[0], m[1]));
        if (sum == 0) continue;
        _mm512_store_pd(mass, m[0]);
        _mm512_store_pd(mass + 8, m[1]);
        if (before + sum <= target) {
            for (int c = kLanes - 1; c >= 0; c--)
                if (mass[c] > 0) { last = {i + c, before + sum - mass[c]}; break; }
            before += sum;
            continue;
        }
        double upto = before;
        for (int c = 0; c < kLanes; c++) {
            if (mass[c] == 0) continue;
            last = {i + c, upto};
            if ((upto += mass[c]) > target) return last;
        }
        before += sum;
    }
    return last;
}

inline int find_in_block(const float* x, int n, float most, double inverse, double target) {
    const Masses masses(most, inverse);
    return first_above(n, target, [&](int i, __m512d* out) { masses.of(load_or_none(x + i, n - i), out); }).at;
}

// Tokens that may be drawn, in vocabulary order.
struct Candidates {
    std::vector<int> ids, live;
    std::vector<float> values, ordered;
    std::vector<double> masses;
    struct Bucket { double mass[4]{}; bool any = false; };
    std::vector<Bucket> buckets;
    int count = 0;

    void clear(int vocab) {
        count = 0;
        if ((int)ids.size() < vocab + kLanes) {
            ids.resize(vocab + kLanes);
            values.resize(vocab + kLanes);
            masses.resize(vocab + kLanes);
        }
    }
    // All of n logits, of which the first has the id `first`, that are at least `least`.
    void gather(const float* x, int n, float least) {
        const __m512 floor = _mm512_set1_ps(least);
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int i = 0; i < n; i += kLanes) {
            const __mmask16 valid = head_mask(n - i);
            const __m512 v = load16(x + i, valid);
            const __mmask16 above = _mm512_mask_cmp_ps_mask(valid, v, floor, _CMP_GE_OQ);
            if (!above) continue;
            _mm512_storeu_ps(values.data() + count, _mm512_maskz_compress_ps(above, v));
            _mm512_storeu_si512(ids.data() + count, _mm512_maskz_compress_epi32(above, _mm512_add_epi32(lane, _mm512_set1_epi32(i))));
            count += __builtin_popcount(above);
        }
    }
    void weigh(float most, double inverse) {
        const Masses m(most, inverse);
        for (int i = 0; i < count; i += kLanes) {
            __m512d out[2];
            m.of(load_or_none(values.data() + i, count - i), out);
            _mm512_storeu_pd(masses.data() + i, out[0]);
            _mm512_storeu_pd(masses.data() + i + 8, out[1]);
        }
    }
    template <class Keep>
    void filter(Keep keep) {
        int kept = 0;
        for (int i = 0; i < count; i++) {
            const bool keeps = keep(i);
            ids[kept] = ids[i], values[kept] = values[i], masses[kept] = masses[i];
            kept += keeps;
        }
        count = kept;
    }
    double mass() const {
        double sum = 0;
        for (int i = 0; i < count; i++) sum += masses[i];
        return sum;
    }
    // Keep those above `value`, and of those equal to it the first `equal`.
    void cut(float value, int equal) {
        filter([&](int i) {
            const bool same = values[i] == value;
            equal -= same;
            return values[i] > value || (same && equal >= 0);
        });
    }
    void keep_largest(int k) {
        if (k >= count) return;
        ordered.assign(values.begin(), values.begin() + count);
        std::nth_element(ordered.begin(), ordered.begin() + k - 1, ordered.end(), std::greater<float>());
        const float least = ordered[k - 1];
        int above = 0;
        for (int i = 0; i < count; i++) above += values[i] > least;
        cut(least, k - above);
    }
    // Keep the largest whose masses, without their own, add up to less than `target`: a radix selection by the bits of the
    // logits, eleven at a time, so that only what falls into the border's bucket is looked at again.
    void keep_nucleus(double target) {
        static constexpr int shifts[] = {21, 10, 0}, bits[] = {11, 11, 10};
        live.resize(count);
        for (int i = 0; i < count; i++) live[i] = i;
        double before = 0;
        for (int level = 0; level < 3; level++) {
            const uint32_t mask = (1u << bits[level]) - 1;
            buckets.assign(mask + 1, Bucket{});
            for (size_t n = 0; n < live.size(); n++) {
                const int i = live[n];
                Bucket& b = buckets[key(values[i]) >> shifts[level] & mask];
                b.mass[n & 3] += masses[i];  // four sums: an addition need not wait for the one before it
                b.any = true;
            }
            int border = mask;
            for (; border >= 0; border--) {
                if (!buckets[border].any) continue;
                const double* m = buckets[border].mass;
                const double mass = (m[0] + m[1]) + (m[2] + m[3]);
                if (before + mass >= target) break;
                before += mass;
            }
            if (border < 0) return;  // by rounding: all of them are needed
            int kept = 0;
            for (size_t n = 0; n < live.size(); n++) {
                const int i = live[n];
                live[kept] = i;
                kept += (int)(key(values[i]) >> shifts[level] & mask) == border;
            }
            live.resize(kept);
        }
        int equal = 0;  // at least one: what is above has less than the target
        const double each = masses[live[0]];
        while (equal < (int)live.size() && before + equal * each < target) equal++;
        cut(values[live[0]], equal);
    }
    int draw(double u) const {
        const double target = u * mass();
        double upto = 0;
        int last = 0;
        for (int i = 0; i < count; i++) {
            if (masses[i] == 0) continue;
            last = i;
            if ((upto += masses[i]) > target) break;
        }
        return ids[last];
    }

   private:
    // Larger floats have larger keys; both zeros have one.
    static uint32_t key(float value) {
        value += 0.0f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
};

// At least k logits are not below this: as many groups have one.
inline float threshold_of(const float* groups, int count, int64_t k, std::vector<float>& scratch) {
    if (k > count) return -INFINITY;
    scratch.assign(groups, groups + count);
    std::nth_element(scratch.begin(), scratch.begin() + k - 1, scratch.end(), std::greater<float>());
    return scratch[k - 1];
}

// Draws and scores of a step, in three phases that threads share: each block's largest, each block's mass, each row.
class Sampling {
   public:
    struct Row {
        const float* logits;
        double inverse;
        int64_t most_of;  // how many of the largest logits are wanted, 0: none in particular
        bool whole;       // the mass of the whole row is
        float most;     // the largest logit, NaN: not known
    };

    void plan(const Draw* draws, int num_draws, const Score* scores, int num_scores, int vocab, int threads) {
        vocab_ = vocab;
        blocks_ = (vocab + kBlock - 1) / kBlock;
        groups_ = groups_of(vocab);
        rows_.clear();
        for (int i = 0; i < num_draws; i++) {
            const Draw& d = draws[i];
            const bool samples = d.inverse_temperature > 0, few = samples && d.top_k > 0 && d.top_k < vocab;
            const float most = samples && !few && d.likeliest >= 0 ? d.logits[d.likeliest] : NAN;
            rows_.push_back({d.logits, d.inverse_temperature, few ? d.top_k : 0, samples && !few && d.min_p <= 0, most});
        }
        for (int i = 0; i < num_scores; i++) rows_.push_back({scores[i].logits, 1.0, std::min<int64_t>(scores[i].count, vocab), true, NAN});
        most_.resize(rows_.size() * blocks_);
        mass_.resize(rows_.size() * blocks_);
        group_.resize(rows_.size() * groups_);
        candidates_.resize(threads);
    }
    int rows() const { return (int)rows_.size(); }
    int units() const { return rows() * blocks_; }

    void find_most(int unit) {
        const int r = unit / blocks_, b = unit % blocks_;
        if (!std::isnan(rows_[r].most)) return;
        float* groups = rows_[r].most_of ? group_.data() + (long)r * groups_ + groups_of(b * kBlock) : nullptr;
        most_[unit] = block_most(rows_[r].logits + (long)b * kBlock, width(b), groups);
    }
    void weigh(int unit) {
        const int r = unit / blocks_, b = unit % blocks_;
        const Row& row = rows_[r];
        if (!row.whole) return;
        const float most = most_of(r);
        if (std::isfinite(most)) mass_[unit] = block_mass(row.logits + (long)b * kBlock, width(b), most, row.inverse);
    }
    void draw(int r, Draw& d, int thread) {
        const Row& row = rows_[r];
        const float most = most_of(r);
        if (!std::isfinite(most)) {
            d.token = -1;
            return;
        }
        if (row.inverse <= 0) {
            d.token = first_of(r, most);
            return;
        }
        if (row.whole && d.top_p >= 1) {
            d.token = draw_of_all(r, most, d.u);
            return;
        }
        // Everything that may be kept lies above a threshold that is cheap to know; the rest of the vocabulary is only
        // compared with it.
        Candidates& c = candidates_[thread];
        double floor = -INFINITY;
        if (d.min_p > 0) floor = most + std::log(d.min_p) / row.inverse;
        if (row.most_of) floor = std::max(floor, (double)threshold_of(group_.data() + (long)r * groups_, groups_, row.most_of, c.ordered));
        double total = 0;
        if (row.whole) {  // what lies below holds less than 1 - top_p of the mass, however many there are
            for (int b = 0; b < blocks_; b++) total += mass_[(long)r * blocks_ + b];
            floor = most - (std::log(vocab_ / ((1 - d.top_p) * total)) + 0.01) / row.inverse;
        }
        float least = (float)floor;
        if (!row.most_of || least > floor) least = std::nextafterf(least, -INFINITY);
        c.clear(vocab_);
        c.gather(row.logits, vocab_, std::max(least, -3.4028234e38f));
        c.weigh(most, row.inverse);
        if (d.min_p > 0) {
            const double limit = std::log(d.min_p);
            c.filter([&](int i) { return ((double)c.values[i] - most) * row.inverse >= limit; });
        }
        if (row.most_of) c.keep_largest((int)row.most_of);
        if (d.top_p < 1) c.keep_nucleus(d.top_p * (row.whole ? total : c.mass()));
        d.token = c.draw(d.u);
    }
    void score(int r, Score& s, int thread) {
        const float most = most_of(r);
        const Row& row = rows_[r];
        s.own = NAN;
        if (!std::isfinite(most)) return;
        double total = 0;
        for (int b = 0; b < blocks_; b++) total += mass_[(long)r * blocks_ + b];
        const double norm = most + std::log(total);
        s.own = row.logits[s.token] - norm;
        if (!row.most_of) return;
        Candidates& c = candidates_[thread];
        const float least = threshold_of(group_.data() + (long)r * groups_, groups_, row.most_of, c.ordered);
        c.clear(vocab_);
        c.gather(row.logits, vocab_, least);
        c.live.resize(c.count);
        for (int i = 0; i < c.count; i++) c.live[i] = i;
        auto better = [&](int a, int b) { return c.values[a] > c.values[b] || (c.values[a] == c.values[b] && a < b); };
        std::partial_sort(c.live.begin(), c.live.begin() + row.most_of, c.live.end(), better);
        for (int i = 0; i < row.most_of; i++) s.ids[i] = c.ids[c.live[i]], s.values[i] = c.values[c.live[i]] - norm;
    }

   private:
    int width(int block) const { return std::min(kBlock, vocab_ - block * kBlock); }
    float most_of(int r) const {
        if (!std::isnan(rows_[r].most)) return rows_[r].most;
        return *std::max_element(most_.data() + (long)r * blocks_, most_.data() + (long)(r + 1) * blocks_);
    }
    int first_of(int r, float most) const {
        for (int b = 0;; b++) {
            if (most_[(long)r * blocks_ + b] != most) continue;
            const float* x = rows_[r].logits + (long)b * kBlock;
            return b * kBlock + (int)(std::find(x, x + width(b), most) - x);
        }
    }
    int draw_of_all(int r, float most, double u) const {
        const double* mass = mass_.data() + (long)r * blocks_;
        double total = 0, before = 0, upto = 0;
        for (int b = 0; b < blocks_; b++) total += mass[b];
        const double target = u * total;
        int block = 0;
        for (int b = 0; b < blocks_ && upto <= target; b++) {
            if (mass[b] == 0) continue;
            block = b;
            before = upto;
            upto += mass[b];
        }
        const int first = block * kBlock;
        return first + find_in_block(rows_[r].logits + first, width(block), most, rows_[r].inverse, target - before);
    }

    int vocab_ = 0, blocks_ = 0, groups_ = 0;
    std::vector<Row> rows_;
    std::vector<float> most_, group_;
    std::vector<double> mass_;
    std::vector<Candidates> candidates_;  // of each thread
};

}  // namespace chorus

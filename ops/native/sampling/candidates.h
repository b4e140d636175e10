// Logits that a token is sampled from, their masses, and what top_k and top_p leave of them.
#pragma once
#include <algorithm>
#include <vector>
#include "simd/simd.h"

namespace chorus {

// e^((x - most) · inverse) of logits x; most: the largest, inverse: the inverse temperature. 0 · inverse stays 0, and what lies
// below never becomes positive.
struct Masses {
    Doubles most, factor;
    Masses(float most, double inverse) : most(doubles(most)), factor(doubles(inverse * kLog2e)) {}
    void of(Floats x, Doubles out[2]) const {
        to_doubles(x, out);
        for (int i = 0; i < 2; i++) out[i] = exp2_8((out[i] - most) * factor);
    }
};

inline Floats load_or_none(const float* x, int count) {
    const Head here = head(std::max(0, count));
    return keep(load16(x, here), here, floats(-INFINITY));
}

struct Found {
    int at;
    double before;  // the mass of all before it
};

// The first index up to which the masses, its own included, exceed `target`; the last with any mass if rounding left none.
//
//   n       masses
//   target  a sum of them
//   masses  masses(i, out): 16 from i on, 0 beyond the n
template <class Of>
inline Found first_above(int n, double target, Of masses) {
    double before = 0;
    Found last{0, 0};
    for (int i = 0; i < n; i += kLanes) {
        alignas(64) double mass[kLanes];
        Doubles m[2];
        masses(i, m);
        const double all = sum(m[0] + m[1]);
        if (all == 0) continue;
        store(mass, m[0]);
        store(mass + 8, m[1]);
        if (before + all <= target) {
            for (int c = kLanes - 1; c >= 0; c--)
                if (mass[c] > 0) {
                    last = {i + c, before + all - mass[c]};
                    break;
                }
            before += all;
            continue;
        }
        double upto = before;
        for (int c = 0; c < kLanes; c++) {
            if (mass[c] == 0) continue;
            last = {i + c, upto};
            if ((upto += mass[c]) > target) return last;
        }
        before += all;
    }
    return last;
}

// Tokens that may be sampled, in vocabulary order.
struct Candidates {
    std::vector<int> ids, live;
    std::vector<float> values, ordered;
    std::vector<double> masses;
    struct Bucket {
        double mass[4]{};
        bool any = false;
    };
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
    // Append the tokens with logits of at least `least`.
    //
    //   x      [n] logits
    //   n      tokens
    //   first  token of the first
    //   least  a logit
    void gather(const float* x, int n, int first, float least) {
        static constexpr uint32_t lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int i = 0; i < n; i += kLanes) {
            const Head here = head(n - i);
            const Floats v = load16(x + i, here);
            const unsigned above = bits(here) & not_above(floats(least), v);
            if (!above) continue;
            pack_lanes(values.data() + count, v, above);
            pack_lanes((uint32_t*)ids.data() + count, load_words(lanes) + words((uint32_t)(first + i)), above);
            count += __builtin_popcount(above);
        }
    }
    // Compute the masses of all. most, inverse: see Masses.
    void weigh(float most, double inverse) {
        const Masses m(most, inverse);
        for (int i = 0; i < count; i += kLanes) {
            Doubles out[2];
            m.of(load_or_none(values.data() + i, count - i), out);
            store(masses.data() + i, out[0]);
            store(masses.data() + i + 8, out[1]);
        }
    }
    // Keep the tokens of which keep(i) is true.
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
        Doubles all = doubles(0);
        for (int i = 0; i < count; i += 8) all = all + masses_at(i);
        return sum(all);
    }
    // Keep the logits above `value`, and the first `equal` of the logits equal to it.
    void cut(float value, int equal) {
        filter([&](int i) {
            const bool same = values[i] == value;
            equal -= same;
            return values[i] > value || (same && equal >= 0);
        });
    }
    // Top-k: keep the k largest logits, of equal ones the first.
    void keep_largest(int k) {
        if (k >= count) return;
        ordered.assign(values.begin(), values.begin() + count);
        std::nth_element(ordered.begin(), ordered.begin() + k - 1, ordered.end(), std::greater<float>());
        const float least = ordered[k - 1];
        int above = 0;
        for (int i = 0; i < count; i++) above += values[i] > least;
        cut(least, k - above);
    }
    // Top-p: keep the largest logits, each while the masses before it add up to less than `target`. A radix selection
    // by the bits of the logits, eleven at a time, so that only what falls into the border's bucket is looked at again.
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
    // The token that is sampled. u: from 0 to 1.
    int sample(double u) const {
        return ids[first_above(count, u * mass(), [&](int i, Doubles* out) {
                       out[0] = masses_at(i), out[1] = masses_at(i + 8);
                   }).at];
    }

   private:
    Doubles masses_at(int i) const { return load8(masses.data() + i, head(std::max(0, count - i))); }
    // Larger floats have larger keys; both zeros have one.
    static uint32_t key(float value) {
        value += 0.0f;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
};

}  // namespace chorus

// The likeliest token of a row of logits, found panel by panel while they are in the cache.
#pragma once
#include <climits>
#include <cmath>
#include "simd/simd.h"

namespace chorus {

// The largest logit that a thread has seen in a row; of equal ones the first, in whatever order the panels come.
struct Best {
    float value = -INFINITY;
    int token = INT_MAX;
    bool nan = false;

    // Look at a panel.
    //
    //   y        [columns] logits
    //   columns  of the panel
    //   first    token of the first
    void see(const float* y, int columns, int first) {
        for (int c = 0; c < columns; c += kLanes) {
            const unsigned valid = bits(head(columns - c));
            const Floats v = load16(y + c, head(columns - c)), top = floats(value);
            if (!(valid & ~(first + c < token ? below(v, top) : not_above(v, top)))) continue;  // a NaN is neither
            nan |= (valid & ~equal(v, v)) != 0;
            const float most = largest(keep(v, head(columns - c), floats(-INFINITY)));
            const unsigned at = valid & equal(v, floats(most));
            if (at) join({most, first + c + __builtin_ctz(at), false});
        }
    }
    void join(const Best& other) {
        nan |= other.nan;
        if (other.value < value || (other.value == value && other.token > token)) return;
        value = other.value;
        token = other.token;
    }

    // The token, -1 where a logit is NaN or +inf, or all are -inf.
    int64_t chosen() const { return nan || !std::isfinite(value) ? -1 : token; }
};

}  // namespace chorus

// The likeliest token of a row of logits, found panel by panel while they are in the cache.
#pragma once
#include <climits>
#include <cmath>
#include "simd.h"

namespace chorus {

// The largest logit that a thread has seen in a row; of equal ones the first, in whatever order the panels come.
struct Best {
    float value = -INFINITY;
    int token = INT_MAX;
    bool nan = false;

    void see(const float* y, int columns, int first) {
        for (int c = 0; c < columns; c += kLanes) {
            const __mmask16 valid = head_mask(columns - c);
            const __m512 v = load16(y + c, valid), top = _mm512_set1_ps(value);
            const __mmask16 above = first + c < token ? _mm512_mask_cmp_ps_mask(valid, v, top, _CMP_NLT_UQ)
                                                      : _mm512_mask_cmp_ps_mask(valid, v, top, _CMP_NLE_UQ);
            if (!above) continue;
            nan |= _mm512_mask_cmp_ps_mask(valid, v, v, _CMP_UNORD_Q) != 0;
            const float most = _mm512_mask_reduce_max_ps(valid, v);
            const __mmask16 at = _mm512_mask_cmp_ps_mask(valid, v, _mm512_set1_ps(most), _CMP_EQ_OQ);
            if (at) join({most, first + c + __builtin_ctz(at), false});
        }
    }
    void join(const Best& other) {
        nan |= other.nan;
        if (other.value < value || (other.value == value && other.token > token)) return;
        value = other.value;
        token = other.token;
    }
};

}  // namespace chorus

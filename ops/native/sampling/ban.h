// Logits of tokens that may not come next.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace chorus {

// Set logits to -inf where a mask has a 0. Words without one are passed over.
//
//   logits  [vocab] float32
//   vocab   tokens
//   mask    [⌈vocab / 32⌉], the lowest token first
inline void ban(float* logits, int64_t vocab, const int32_t* mask) {
    for (int64_t first = 0; first < vocab; first += 32) {
        const uint32_t word = (uint32_t)mask[first / 32];
        if (word == ~0u) continue;
        float* values = logits + first;
        if (vocab - first >= 32) { // without a branch for each token: they are computed eight at a time
            for (int bit = 0; bit < 32; bit++) values[bit] = word >> bit & 1 ? values[bit] : -INFINITY;
        } else {
            for (int bit = 0; bit < (int)(vocab - first); bit++)
                if (!(word >> bit & 1)) values[bit] = -INFINITY;
        }
    }
}

}  // namespace chorus

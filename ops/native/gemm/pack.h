// Weights `[rows, inputs]` in the order of panels: see gemm.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include "gemm/gemm.h"
#include "team/pool.h"

namespace chorus {

constexpr int kLineWords = 16;  // of a cache line

// out[panel][word][row of the panel] = w[row][word]; rows beyond the last are zeros.
//
//   w      [rows, words]: a word is a pair of bf16 numbers, or a float32 one
//   rows   of the matrix
//   words  of a row
//   out    [⌈rows / kPanel⌉, words, kPanel]: written
inline void pack(Team& team, const uint32_t* w, int64_t rows, int64_t words, uint32_t* out) {
    const int panels = (int)((rows + kPanel - 1) / kPanel);
    team.run([&](Team::Member& me) {
        team.each(me, panels, [&](int panel) {  // not by parts: see Decoder::walk
            const uint32_t* from = w + panel * kPanel * words;
            uint32_t* to = out + panel * kPanel * words;
            const int count = (int)std::min<int64_t>(kPanel, rows - (int64_t)panel * kPanel);
            if (count < kPanel) std::fill(to, to + kPanel * words, 0u);
            for (int64_t first = 0; first < words; first += kLineWords) {
                const int64_t end = std::min(words, first + kLineWords);
                for (int r = 0; r < count; r++)
                    for (int64_t i = first; i < end; i++) to[i * kPanel + r] = from[r * words + i];
            }
        });
    });
}

}  // namespace chorus

// Blocks of GGUF files: what their numbers are, as the package gguf's `dequantize` and ggml compute it, in float32.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include "team/pool.h"

namespace chorus {

// A float16 of a file.
inline float half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const float size = exponent == 31
                           ? (fraction ? NAN : INFINITY)
                           : std::ldexp((float)(exponent ? fraction | 1024 : fraction), (exponent ? exponent : 1) - 25);
    return h >> 15 ? -size : size;
}

// q[0 … n-1] and q[n … 2n-1]: low and high halves of n bytes.
inline void nibbles(const uint8_t* bytes, int n, int8_t* q) {
    for (int i = 0; i < n; i++) q[i] = bytes[i] & 15, q[i + n] = bytes[i] >> 4;
}

// q |= 16 where a bit of 32 is set.
inline void fifth_bits(const uint8_t* bits, int8_t* q) {
    uint32_t word;
    memcpy(&word, bits, sizeof word);
    for (int i = 0; i < 32; i++) q[i] |= (word >> i & 1) << 4;
}

inline void shift(int8_t* q, int n, int by) {
    for (int i = 0; i < n; i++) q[i] = (int8_t)(q[i] - by);
}

// Pairs of bits, of two runs of 32 bytes: q[128·run + 32·pair + i] = bits << up.
inline void pairs_of_bits(const uint8_t* bytes, int8_t* q, int up) {
    for (int run = 0; run < 2; run++)
        for (int pair = 0; pair < 4; pair++)
            for (int i = 0; i < 32; i++) q[128 * run + 32 * pair + i] |= (bytes[32 * run + i] >> 2 * pair & 3) << up;
}

constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// q: places in the table of formats with uneven steps → its numbers.
inline void uneven(int8_t* q, int n) {
    for (int i = 0; i < n; i++) q[i] = kUneven[q[i]];
}

// Formats. A block has kValues numbers, in groups of kGroup: scale[group] · q + offset[group], where there are offsets.
//
//   b       a block
//   q       [kValues] zeros: written
//   scale   [kValues / kGroup]: written
//   offset  the same where there are offsets
struct Q4_0 {
    static constexpr int kType = 2, kBytes = 18, kValues = 32, kGroup = 32, kOffsets = 0;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        *scale = half_at(b);
        nibbles(b + 2, 16, q);
        shift(q, 32, 8);
    }
};
struct Q4_1 {
    static constexpr int kType = 3, kBytes = 20, kValues = 32, kGroup = 32, kOffsets = 1;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* offset) {
        *scale = half_at(b), *offset = half_at(b + 2);
        nibbles(b + 4, 16, q);
    }
};
struct Q5_0 {
    static constexpr int kType = 6, kBytes = 22, kValues = 32, kGroup = 32, kOffsets = 0;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        *scale = half_at(b);
        nibbles(b + 6, 16, q);
        fifth_bits(b + 2, q);
        shift(q, 32, 16);
    }
};
struct Q5_1 {
    static constexpr int kType = 7, kBytes = 24, kValues = 32, kGroup = 32, kOffsets = 1;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* offset) {
        *scale = half_at(b), *offset = half_at(b + 2);
        nibbles(b + 8, 16, q);
        fifth_bits(b + 4, q);
    }
};
struct Q8_0 {
    static constexpr int kType = 8, kBytes = 34, kValues = 32, kGroup = 32, kOffsets = 0;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        *scale = half_at(b);
        memcpy(q, b + 2, 32);
    }
};
struct Q2_K {
    static constexpr int kType = 10, kBytes = 84, kValues = 256, kGroup = 16, kOffsets = 1;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* offset) {
        const float d = half_at(b + 80), least = half_at(b + 82);
        pairs_of_bits(b + 16, q, 0);
        for (int g = 0; g < 16; g++) scale[g] = d * (float)(b[g] & 15), offset[g] = -(least * (float)(b[g] >> 4));
    }
};
struct Q3_K {
    static constexpr int kType = 11, kBytes = 110, kValues = 256, kGroup = 16, kOffsets = 0;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const uint8_t* s = b + 96;
        const float d = half_at(b + 108);
        pairs_of_bits(b + 32, q, 0);
        for (int i = 0; i < 256; i++) q[i] = (int8_t)(q[i] - (b[i % 32] >> i / 32 & 1 ? 0 : 4));
        for (int g = 0; g < 16; g++) {
            const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> 2 * (g / 4) & 3;
            scale[g] = d * (float)((low | high << 4) - 32);
        }
    }
};

// Scales and offsets of eight groups, six bits each, in 12 bytes behind two float16.
inline void six_bits(const uint8_t* b, float* scale, float* offset) {
    const float d = half_at(b), least = half_at(b + 2);
    const uint8_t* s = b + 4;
    for (int g = 0; g < 8; g++) {
        const int low = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 2 & 48);
        const int high = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 2 & 48);
        scale[g] = d * (float)low, offset[g] = -(least * (float)high);
    }
}

struct Q4_K {
    static constexpr int kType = 12, kBytes = 144, kValues = 256, kGroup = 32, kOffsets = 1;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* offset) {
        six_bits(b, scale, offset);
        for (int run = 0; run < 4; run++) nibbles(b + 16 + 32 * run, 32, q + 64 * run);
    }
};
struct Q5_K {
    static constexpr int kType = 13, kBytes = 176, kValues = 256, kGroup = 32, kOffsets = 1;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float* offset) {
        six_bits(b, scale, offset);
        for (int run = 0; run < 4; run++) nibbles(b + 48 + 32 * run, 32, q + 64 * run);
        for (int i = 0; i < 256; i++) q[i] |= (b[16 + i % 32] >> i / 32 & 1) << 4;
    }
};
struct Q6_K {
    static constexpr int kType = 14, kBytes = 210, kValues = 256, kGroup = 16, kOffsets = 0;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = half_at(b + 208);
        for (int run = 0; run < 2; run++) nibbles(b + 64 * run, 64, q + 128 * run);
        pairs_of_bits(b + 128, q, 4);
        shift(q, 256, 32);
        for (int g = 0; g < 16; g++) scale[g] = d * (float)(int8_t)b[192 + g];
    }
};
struct IQ4_NL {
    static constexpr int kType = 20, kBytes = 18, kValues = 32, kGroup = 32, kOffsets = 0;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        *scale = half_at(b);
        nibbles(b + 2, 16, q);
        uneven(q, 32);
    }
};
struct IQ4_XS {
    static constexpr int kType = 23, kBytes = 136, kValues = 256, kGroup = 32, kOffsets = 0;
    static void unpack(const uint8_t* b, int8_t* q, float* scale, float*) {
        const float d = half_at(b);
        for (int g = 0; g < 8; g++) {
            const int low = b[4 + g / 2] >> 4 * (g % 2) & 15, high = b[2 + g / 4] >> 2 * (g % 4) & 3;
            scale[g] = d * (float)((low | high << 4) - 32);
            nibbles(b + 8 + 16 * g, 16, q + 32 * g);
        }
        uneven(q, 256);
    }
};

// Numbers of a block; returns whether all are finite.
template <class Format>
bool dequantise(const uint8_t* block, float* out) {
    constexpr int groups = Format::kValues / Format::kGroup;
    int8_t q[Format::kValues] = {};
    float scale[groups], offset[groups] = {};
    Format::unpack(block, q, scale, offset);
    bool finite = true;
    for (int g = 0; g < groups; g++) {
        finite = finite && std::isfinite(scale[g]) && std::isfinite(offset[g]);
        for (int i = g * Format::kGroup; i < (g + 1) * Format::kGroup; i++) {
            const float value = scale[g] * (float)q[i];
            out[i] = Format::kOffsets ? value + offset[g] : value;
        }
    }
    return finite;
}

constexpr int kBlocksAtOnce = 256;

template <class Format>
bool dequantise(Team& team, const uint8_t* blocks, int64_t count, float* out) {
    std::atomic<bool> finite{true};
    const int parts = (int)((count + kBlocksAtOnce - 1) / kBlocksAtOnce);
    team.run([&](Team::Member& me) {
        team.each(me, parts, [&](int part) {  // not by parts: see Decoder::walk
            const int64_t end = std::min(count, (part + 1) * (int64_t)kBlocksAtOnce);
            for (int64_t i = part * (int64_t)kBlocksAtOnce; i < end; i++)
                if (!dequantise<Format>(blocks + i * Format::kBytes, out + i * Format::kValues)) finite = false;
        });
    });
    return finite;
}

// The format among these whose type it is; -1: none.
template <class... Formats>
int dequantise_any(Team& team, int type, const uint8_t* blocks, int64_t count, float* out) {
    int found = -1;
    ((type == Formats::kType ? void(found = dequantise<Formats>(team, blocks, count, out)) : void()), ...);
    return found;
}

}  // namespace chorus

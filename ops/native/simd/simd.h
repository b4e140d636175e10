// Element types and the few vector idioms that every kernel shares, over the vectors of the level that is compiled.
#pragma once
#include <type_traits>
#include <utility>
#include "simd/lanes.h"

namespace chorus {

CHORUS_INLINE Floats floats(float x) {
    Floats v;
    fill(x, v);
    return v;
}
CHORUS_INLINE Words words(uint32_t x) {
    Words v;
    fill(x, v);
    return v;
}
CHORUS_INLINE Doubles doubles(double x) {
    Doubles v;
    fill(x, v);
    return v;
}
CHORUS_INLINE Words load_words(const void* p) {
    Words v;
    load((const uint32_t*)p, v);
    return v;
}
CHORUS_INLINE Doubles load8(const double* p, Head h) {
    Doubles v;
    load(p, h, v);
    return v;
}

// Load 16 elements as float32; the forms with a head read only its elements and give 0 elsewhere.
CHORUS_INLINE Floats load16(const float* p) {
    Floats v;
    load(p, v);
    return v;
}
CHORUS_INLINE Floats load16(const bf16* p) {
    Words v;
    load(p, v);
    return as_floats(v << 16);
}
CHORUS_INLINE Floats load16(const float* p, Head h) {
    Floats v;
    load(p, h, v);
    return v;
}
CHORUS_INLINE Floats load16(const bf16* p, Head h) {
    Words v;
    load(p, h, v);
    return as_floats(v << 16);
}

// The bits of x, rounded to the upper half: to the nearest, ties to even, subnormal numbers kept. Not for NaN.
inline Words rounded(Words x) { return x + (((x >> 16) & words(1)) + words(0x7FFF)); }

CHORUS_INLINE void store16(float* p, Floats v) { store(p, v); }
CHORUS_INLINE void store16(float* p, Floats v, Head h) { store(p, v, h); }
#ifdef CHORUS_BF16
CHORUS_INLINE void store16(bf16* p, Floats v, Head h = 0xFFFF) {
    _mm256_mask_storeu_epi16(p, h, (__m256i)_mm512_cvtneps_pbh(v));
}
#else
CHORUS_INLINE void store16(bf16* p, Floats v, Head h = head(kLanes)) {
    const Words x = as_words(v);
    Words upper = rounded(x) >> 16;
    if (equal(v, v) != 0xFFFF) {  // a NaN's sum may have become a number
        uint32_t from[kLanes], to[kLanes];
        store(from, x), store(to, upper);
        for (int i = 0; i < kLanes; i++)
            if ((from[i] & 0x7FFFFFFF) > 0x7F800000) to[i] = from[i] >> 16 | 0x40;
        load(to, upper);
    }
    store(p, upper, h);
}
#endif

// Sixteen horizontal sums at once: lane i of the result is the sum of a[i]. Loops over accumulators are unrolled by word
// here and by its callers: else an array of them lives in memory.
inline Floats reduce16(const Floats* a) {
    Floats u[8], v[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) u[i] = zip_low(a[i], a[i + 8]) + zip_high(a[i], a[i + 8]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v[i] = zip_low2(u[i], u[i + 4]) + zip_high2(u[i], u[i + 4]);
    const Floats w0 = even_quads(v[0], v[1]) + odd_quads(v[0], v[1]);
    const Floats w1 = even_quads(v[2], v[3]) + odd_quads(v[2], v[3]);
    // quad j of the sum holds the sums of a[j], a[j + 8], a[j + 4], a[j + 12]
    return by_lane(even_quads(w0, w1) + odd_quads(w0, w1));
}

// In each of the four quads by itself, b[j][i] = a[i][j] for i, j < 4.
inline void transpose4(const Floats* a, Floats* b) {
    const Floats u0 = zip_low(a[0], a[1]), u1 = zip_low(a[2], a[3]), u2 = zip_high(a[0], a[1]),
                 u3 = zip_high(a[2], a[3]);
    b[0] = zip_low2(u0, u1), b[1] = zip_high2(u0, u1);
    b[2] = zip_low2(u2, u3), b[3] = zip_high2(u2, u3);
}

// b[j][i] = a[i][j]
inline void transpose16(const Floats* a, Floats* b) {
    Floats v[16];  // quad j of v[m + c]: column 4 · j + c of rows m …
#pragma GCC unroll 4
    for (int m = 0; m < 16; m += 4) transpose4(a + m, v + m);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const Floats p = even_quads(v[c], v[c + 4]), q = even_quads(v[c + 8], v[c + 12]);
        const Floats r = odd_quads(v[c], v[c + 4]), s = odd_quads(v[c + 8], v[c + 12]);
        b[c] = even_quads(p, q), b[c + 8] = odd_quads(p, q);
        b[c + 4] = even_quads(r, s), b[c + 12] = odd_quads(r, s);
    }
}

// b[j][i] = row i's element j, for sixteen rows of eight: for i < 4, a[i] holds rows i and i + 4, and a[4 + i] rows 8 + i and
// 12 + i.
inline void transpose16x8(const Floats* a, Floats* b) {
    Floats v[8];
    transpose4(a, v);
    transpose4(a + 4, v + 4);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        b[c] = even_quads(v[c], v[c + 4]);
        b[c + 4] = odd_quads(v[c], v[c + 4]);
    }
}

// e^x for x <= 88: 2^(x·log2 e), a degree-6 polynomial on [-0.5, 0.5], relative error below 2e-7.
inline Floats exp16(Floats x) {
    x = max(floats(-87.0f), x);  // this order lets NaN through
    const Floats n = round(x * floats(1.44269504088896341f));
    Floats r = fnma(n, floats(0.693359375f), x);
    r = fnma(n, floats(-2.12194440e-4f), r);
    Floats p = floats(1.0f / 720);
    p = fma(p, r, floats(1.0f / 120));
    p = fma(p, r, floats(1.0f / 24));
    p = fma(p, r, floats(1.0f / 6));
    p = fma(p, r, floats(0.5f));
    p = fma(p, r, floats(1.0f));
    p = fma(p, r, floats(1.0f));
    return scale2(p, n);
}

// e^x - 1, as 2^n · (e^r - 1) + 2^n - 1, so that a small x keeps its digits. x: from -87 to 88.
inline Floats expm1_16(Floats x) {
    const Floats n = round(x * floats(1.44269504088896341f));
    Floats r = fnma(n, floats(0.693359375f), x);
    r = fnma(n, floats(-2.12194440e-4f), r);
    Floats p = floats(1.0f / 5040);
    p = fma(p, r, floats(1.0f / 720));
    p = fma(p, r, floats(1.0f / 120));
    p = fma(p, r, floats(1.0f / 24));
    p = fma(p, r, floats(1.0f / 6));
    p = fma(p, r, floats(0.5f));
    p = fma(p * r, r, r);
    const Floats power = scale2(floats(1.0f), n);
    return fma(power, p, power - floats(1.0f));
}

// tanh(x) = m / (m + 2) with m = e^(2|x|) - 1, and the sign of x.
inline Floats tanh16(Floats x) {
    const Words sign = as_words(x) & words(0x80000000);
    const Floats size = as_floats(as_words(x) & words(0x7FFFFFFF));
    const Floats y = min(floats(20.0f), size + size);  // beyond, it is 1; this order lets NaN through
    const Floats m = expm1_16(y);
    return as_floats(as_words(m / (m + floats(2.0f))) | sign);
}

constexpr double kLog2e = 1.4426950408889634;
constexpr double kNoMass = -700;  // e^x below that is taken as 0 where probabilities are added

// 2^x in float64 for x <= 0, within 1 ulp or so; 0 below kNoMass and for NaN. 2^(i/16) comes from a table, what is left of
// x is at most 1/32 and takes few terms.
inline Doubles exp2_8(Doubles x) {
    alignas(64) static constexpr double powers[16] = {
        1.0000000000000000, 1.0442737824274138, 1.0905077326652577, 1.1387886347566916,
        1.1892071150027210, 1.241857812073484,  1.2968395546510096, 1.3542555469368927,
        1.4142135623730951, 1.4768261459394993, 1.5422108254079407, 1.6104903319492543,
        1.681792830507429,  1.7562521603732995, 1.8340080864093424, 1.9152065613971474};
    const Doubles round = doubles(6755399441055744.0 / 16);  // 1.5 · 2^52 / 16: its sum's last bits count sixteenths
    const Doubles sum = x + round, n = sum - round, r = x - n;
    const Doubles whole = sixteenth(powers, sum);
    constexpr double ln2 = 0.69314718055994530942, ln4 = ln2 * ln2, ln8 = ln4 * ln2;
    static constexpr double factors[] = {ln8 * ln8 / 720, ln8 * ln4 / 120, ln8 * ln2 / 24, ln8 / 6, ln4 / 2, ln2};
    Doubles p = doubles(ln8 * ln8 * ln2 / 5040);
#pragma GCC unroll 6
    for (double factor : factors) p = fma(p, r, doubles(factor));
    return where_not_below(x, doubles(kNoMass * kLog2e), scale2(fma(p * r, whole, whole), n, sum), doubles(0));
}

// How the elements of an operand come from memory and are multiplied.
//
//   X          type of what they are multiplied with: activations, and what is packed of an adapter or of the KV cache
//   pair       elements of the reduction dimension that a packed panel, or a word of the KV cache, has side by side
//   steps      multiply-accumulates that these take: as many as there are where they are widened one by one
//   width      elements that lie one after the other in a register
template <class T> struct Kind;

template <> struct Kind<float> {
    using X = float;
    using Reg = Floats;
    static constexpr int pair = 1, steps = 1, width = kLanes;
    static Reg load(const float* p) { return load16(p); }
    static Reg load(const float* p, int count) { return load16(p, head(count)); }  // the first `count`, 0 beyond
    static Reg step(Words word, int) { return as_floats(word); }
    static Reg broadcast(const float* p) { return floats(*p); }
    static Floats mac(Floats acc, Reg a, Reg b) { return fma(a, b, acc); }
    static Reg first(Reg one) { return one; }  // of the keys that a register holds a word of, the first alone
    static Reg last(Reg one) { return one; }  // the last alone
};

#ifdef CHORUS_BF16
template <> struct Kind<bf16> {  // an instruction multiplies and adds pairs
    using X = bf16;
    using Reg = __m512bh;
    static constexpr int pair = 2, steps = 1, width = 32;
    static Reg load(const bf16* p) { return (Reg)_mm512_loadu_si512(p); }
    static Reg load(const bf16* p, int count) {
        return (Reg)_mm512_maskz_loadu_epi16(count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1, p);
    }
    static Reg step(Words pairs, int) { return (Reg)pairs; }
    static Reg broadcast(const bf16* p) {
        int32_t both;
        memcpy(&both, p, 4);
        return (Reg)_mm512_set1_epi32(both);
    }
    static Floats mac(Floats acc, Reg a, Reg b) { return _mm512_dpbf16_ps(acc, a, b); }
    static Reg first(Reg pairs) {
        return (Reg)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32(0xFFFF));
    }  // the others are 0
    static Reg last(Reg pairs) { return (Reg)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32((int)0xFFFF0000)); }
};
#else
template <> struct Kind<bf16> {  // no instruction multiplies them: they are widened, and activations are float32
    using X = float;
    static constexpr int pair = 2, steps = 2, width = kLanes;
    static Floats load(const bf16* p) { return load16(p); }
    static Floats load(const bf16* p, int count) { return load16(p, head(count)); }
    static Floats step(Words pairs, int s) { return s ? widen_second(pairs) : widen_first(pairs); }
};
#endif

template <class T> using Act = typename Kind<T>::X;

// run(n) with a number from 1 to MOST that the compiler knows.
template <int MOST, class Run> inline void with_number(int n, Run&& run) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_number<MOST - 1>(n, run);
    }
    run(std::integral_constant<int, MOST>{});
}

// run(i) for each i below COUNT, which the compiler knows before it decides what of an array can be in registers. After a loop
// that is unrolled later, it would store the array around an inner loop.
template <int... I, class Run> CHORUS_INLINE void each_of(std::integer_sequence<int, I...>, Run&& run) {
    (run(std::integral_constant<int, I>{}), ...);
}
template <int COUNT, class Run> CHORUS_INLINE void each(Run&& run) {
    each_of(std::make_integer_sequence<int, COUNT>{}, run);
}

// run(n, at) for parts of `count` things in order, as large as possible: n, which the compiler knows, is MOST or a smaller
// power of two; at: the part's first thing.
template <int MOST, class Run> inline void in_parts(int count, Run&& run, int at = 0) {
    for (; at + MOST <= count; at += MOST) run(std::integral_constant<int, MOST>{}, at);
    if constexpr (MOST > 1) in_parts<MOST / 2>(count, run, at);
}

}  // namespace chorus

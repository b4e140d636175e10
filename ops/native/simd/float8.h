// FP8 (E4M3) of the KV cache: widened exactly, and float32 rounded to it as ops/elementwise/float8_kv.py rounds.
#pragma once
#include "simd/simd.h"

namespace chorus {

// A number that is multiplied as W, to which it is widened when it is loaded.
template <class W>
struct Float8 {
    uint8_t bits;
};

template <class W>
struct Kind<Float8<W>> : Kind<W> {};

// Sixteen numbers, a byte in each lane. Without subnormal numbers of float32, which processors may take as 0.
CHORUS_INLINE Floats widen_float8(Words bytes) {
    // As if all had an exponent of their own: those below 2^-6 are then (2^-6 + x) / 2.
    const Floats size = as_floats(((bytes << 20) & words(0x07F00000)) + words(120u << 23));
    const Floats x = min(size, fma(size, floats(2), floats(-0x1p-6f)));
    const Floats over = x * floats(0x1.2p119f);  // infinite for 480, as which NaN is read; finite for 448
    const Floats value = fma(over, floats(0), x);
    return as_floats(as_words(value) | ((bytes << 24) & words(0x80000000)));
}

// The nearest numbers, ties to even, a byte in each lane: ±448 beyond it, NaN where x is not finite.
inline Words round_float8(Floats x) {
    const Words bits = as_words(x);
    const Floats size = min(floats(448), as_floats(bits & words(0x7FFFFFFF))) + (x - x);
    // What is added moves three bits of size, or as many as are left below 2^-6, to the end of the sum, which rounds them.
    const Floats step = max(floats(0x1p-6f), as_floats(as_words(size) & words(0x7F800000))) * floats(0x1p20f);
    const Floats exact = (size + step) - step;
    const Floats own = max(fma(exact, floats(0.5f), floats(0x1p-7f)), exact);  // see widen_float8
    const Words code = (as_words(own) >> 20) - words(120u << 3), all = words(0xFFFFFFFF);
    const Words number = all - max(all - code, all - words(0x7F));  // NaN is above it
    const Words sign = (bits >> 24) & words(0x80) & (words(0xFE) - number);  // NaN has none
    return number | sign;
}

template <class W>
CHORUS_INLINE Floats load16(const Float8<W>* p) {
    Words v;
    load((const uint8_t*)p, v);
    return widen_float8(v);
}
template <class W>
CHORUS_INLINE Floats load16(const Float8<W>* p, Head h) {
    Words v;
    load((const uint8_t*)p, h, v);
    return widen_float8(v);
}

// Eight words of one row and eight of another, the first `count` of each: a word is a float32, or a pair of bf16.
template <class T>
CHORUS_INLINE void load_words_of_two(const T* one, const T* other, int count, Floats& v) {
    load_two((const float*)one, (const float*)other, count, v);
}
CHORUS_INLINE void load_words_of_two(const Float8<float>* one, const Float8<float>* other, int count, Floats& v) {
    Words bytes;
    load_two((const uint8_t*)one, (const uint8_t*)other, count, bytes);
    v = widen_float8(bytes);
}

#ifdef CHORUS_BF16
// 32 numbers as bf16. Those below 2^-6, and NaN, are of a table by their last five bits.
inline __m512i widen_float8(__m256i bytes) {
    alignas(64) static constexpr uint16_t table[32] = {
        0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0,      0,      0,      0,      0,      0,      0,      0, 0, 0, 0, 0, 0, 0, 0x7FC0};
    const __m512i x = _mm512_cvtepu8_epi16(bytes), size = _mm512_and_si512(x, _mm512_set1_epi16(0x7F));
    const __mmask32 special =
        _mm512_cmpge_epu16_mask(_mm512_sub_epi16(size, _mm512_set1_epi16(8)), _mm512_set1_epi16(0x7F - 8));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    const __m512i value = _mm512_mask_permutexvar_epi16(normal, special, x, _mm512_load_si512(table));
    constexpr int with_sign = 0xF8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000), with_sign);
}

// 32 elements as bf16, the first `count` of them.
inline Kind<bf16>::Reg load_pairs(const bf16* p, int count) {
    return count < 32 ? Kind<bf16>::load(p, count) : Kind<bf16>::load(p);
}
inline Kind<bf16>::Reg load_pairs(const Float8<bf16>* p, int count) {
    const __mmask32 mask = count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1;
    return (Kind<bf16>::Reg)widen_float8(_mm256_maskz_loadu_epi8(mask, p));
}

CHORUS_INLINE void load_words_of_two(const Float8<bf16>* one, const Float8<bf16>* other, int count, Floats& v) {
    const __mmask16 mask = (__mmask16)head(2 * count);
    v = (Floats)widen_float8(_mm256_set_m128i(_mm_maskz_loadu_epi8(mask, other), _mm_maskz_loadu_epi8(mask, one)));
}
#endif

// out = x / scale, rounded.
//
//   x      [n]
//   scale  of what is stored
//   out    [n]
template <class T, class W>
inline void convert_scaled(const T* x, int n, float scale, Float8<W>* out) {
    const Floats inverse = floats(1 / scale);
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store((uint8_t*)(out + i), round_float8(load16(x + i, here) * inverse), here);
    }
}

}  // namespace chorus

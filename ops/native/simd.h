// Element types and the few vector idioms that every kernel shares. AVX-512; bf16 needs AVX512-BF16.
#pragma once
#pragma GCC diagnostic push  // the compiler's own header uses registers whose contents don't matter
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <cstdint>
#include <cstring>

namespace chorus {

constexpr int kLanes = 16;  // float32 lanes of a 512-bit register

using bf16 = uint16_t;

inline __mmask16 head_mask(int count) { return count >= kLanes ? 0xFFFF : (__mmask16)((1u << count) - 1); }

inline float widen(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline float widen(float v) { return v; }

// Weights are streamed faster than out-of-order execution alone looks ahead: eight rows' products fill its window after
// some 2 KB. Reading beyond an allocation's end is harmless for a prefetch. An intrinsic will not do: GCC takes a function
// that does nothing but prefetch for one without effects, and where it is not inlined, leaves its calls out.
inline void prefetch(const void* p, long ahead_bytes = 0) {
    asm volatile("prefetcht0 %a0" : : "p"((const char*)p + ahead_bytes));
}

// Load 16 elements as float32; the masked forms read only `mask`'s elements and give 0 elsewhere.
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline __m512 load16(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline __m512 load16(const bf16* p, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

inline void store16(float* p, __m512 v, __mmask16 mask = 0xFFFF) { _mm512_mask_storeu_ps(p, mask, v); }
inline void store16(bf16* p, __m512 v, __mmask16 mask = 0xFFFF) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(v));
}

// Sixteen horizontal sums at once: lane i of the result is the sum of a[i]. Loops over accumulators are unrolled by word
// here and by its callers: else an array of them lives in memory.
inline __m512 reduce16(const __m512* a) {
    __m512 u[8], v[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        u[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[i], a[i + 8]), _mm512_unpackhi_ps(a[i], a[i + 8]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d lo = _mm512_castps_pd(u[i]), hi = _mm512_castps_pd(u[i + 4]);
        v[i] =
            _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi)), _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi)));
    }
    __m512 w0 = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
    __m512 w1 = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xDD));
    __m512 z = _mm512_add_ps(_mm512_shuffle_f32x4(w0, w1, 0x88), _mm512_shuffle_f32x4(w0, w1, 0xDD));
    // z's 128-bit lane j holds the sums of a[j], a[j + 8], a[j + 4], a[j + 12]
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, z);
}

// In each of the four 128-bit lanes by itself, b[j][i] = a[i][j] for i, j < 4.
inline void transpose4(const __m512* a, __m512* b) {
    const __m512d u0 = _mm512_castps_pd(_mm512_unpacklo_ps(a[0], a[1])),
                  u1 = _mm512_castps_pd(_mm512_unpacklo_ps(a[2], a[3])),
                  u2 = _mm512_castps_pd(_mm512_unpackhi_ps(a[0], a[1])),
                  u3 = _mm512_castps_pd(_mm512_unpackhi_ps(a[2], a[3]));
    b[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(u0, u1)), b[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(u0, u1));
    b[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(u2, u3)), b[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(u2, u3));
}

// b[j][i] = a[i][j]
inline void transpose16(const __m512* a, __m512* b) {
    __m512 v[16];  // 128-bit lane j of v[m + c]: column 4 · j + c of rows m …
#pragma GCC unroll 4
    for (int m = 0; m < 16; m += 4) transpose4(a + m, v + m);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512 p = _mm512_shuffle_f32x4(v[c], v[c + 4], 0x88),
                     q = _mm512_shuffle_f32x4(v[c + 8], v[c + 12], 0x88);
        const __m512 r = _mm512_shuffle_f32x4(v[c], v[c + 4], 0xDD),
                     s = _mm512_shuffle_f32x4(v[c + 8], v[c + 12], 0xDD);
        b[c] = _mm512_shuffle_f32x4(p, q, 0x88), b[c + 8] = _mm512_shuffle_f32x4(p, q, 0xDD);
        b[c + 4] = _mm512_shuffle_f32x4(r, s, 0x88), b[c + 12] = _mm512_shuffle_f32x4(r, s, 0xDD);
    }
}

// b[j][i] = row i's element j, for sixteen rows of eight: for i < 4, a[i] holds rows i and i + 4, and a[4 + i] rows 8 + i and
// 12 + i.
inline void transpose16x8(const __m512* a, __m512* b) {
    __m512 v[8];
    transpose4(a, v);
    transpose4(a + 4, v + 4);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        b[c] = _mm512_shuffle_f32x4(v[c], v[c + 4], 0x88);
        b[c + 4] = _mm512_shuffle_f32x4(v[c], v[c + 4], 0xDD);
    }
}

// e^x for x <= 88: 2^(x·log2 e), a degree-6 polynomial on [-0.5, 0.5], relative error below 2e-7.
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // this order lets NaN through
    __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
    __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

constexpr double kLog2e = 1.4426950408889634;
constexpr double kNoMass = -700;  // e^x below that is taken as 0 where probabilities are added

// 2^x in float64 for x <= 0, within 1 ulp or so; 0 below kNoMass and for NaN. 2^(i/16) comes from a table, what is left of
// x is at most 1/32 and takes few terms.
inline __m512d exp2_8(__m512d x) {
    alignas(64) static constexpr double sixteenths[16] = {1.0,
                                                          1.0442737824274138,
                                                          1.0905077326652577,
                                                          1.1387886347566916,
                                                          1.189207115002721,
                                                          1.241857812073484,
                                                          1.2968395546510096,
                                                          1.3542555469368927,
                                                          1.4142135623730951,
                                                          1.4768261459394993,
                                                          1.5422108254079407,
                                                          1.6104903319492543,
                                                          1.681792830507429,
                                                          1.7562521603732995,
                                                          1.8340080864093424,
                                                          1.9152065613971474};
    const __mmask8 some = _mm512_cmp_pd_mask(x, _mm512_set1_pd(kNoMass * kLog2e), _CMP_GE_OQ);
    const __m512d round =
        _mm512_set1_pd(6755399441055744.0 / 16);  // 1.5 · 2^52 / 16: its sum's last bits count sixteenths
    const __m512d sum = _mm512_add_pd(x, round), n = _mm512_sub_pd(sum, round), r = _mm512_sub_pd(x, n);
    const __m512d whole =
        _mm512_permutex2var_pd(_mm512_load_pd(sixteenths), _mm512_castpd_si512(sum), _mm512_load_pd(sixteenths + 8));
    constexpr double ln2 = 0.69314718055994530942, ln4 = ln2 * ln2, ln8 = ln4 * ln2;
    static constexpr double factors[] = {ln8 * ln8 / 720, ln8 * ln4 / 120, ln8 * ln2 / 24, ln8 / 6, ln4 / 2, ln2};
    __m512d p = _mm512_set1_pd(ln8 * ln8 * ln2 / 5040);
#pragma GCC unroll 6
    for (double factor : factors) p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(factor));
    return _mm512_maskz_scalef_pd(some, _mm512_fmadd_pd(_mm512_mul_pd(p, r), whole, whole), n);
}

// Elements of the reduction dimension that one multiply-accumulate takes: a bf16 pair, or one float32.
template <class T> struct Kind;

template <> struct Kind<bf16> {
    static constexpr int pair = 2, width = 32;  // width: elements in a register
    using Reg = __m512bh;
    static Reg load(const bf16* p) { return (Reg)_mm512_loadu_si512(p); }
    static Reg load(const bf16* p, int count) {  // the first `count` elements, 0 beyond
        return (Reg)_mm512_maskz_loadu_epi16(count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1, p);
    }
    static Reg broadcast(const bf16* p) {
        int32_t both;
        memcpy(&both, p, 4);
        return (Reg)_mm512_set1_epi32(both);
    }
    static __m512 mac(__m512 acc, Reg a, Reg b) { return _mm512_dpbf16_ps(acc, a, b); }
    static Reg first(Reg pairs) {
        return (Reg)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32(0xFFFF));
    }  // the others are 0
};

template <> struct Kind<float> {
    static constexpr int pair = 1, width = 16;
    using Reg = __m512;
    static Reg load(const float* p) { return _mm512_loadu_ps(p); }
    static Reg load(const float* p, int count) { return _mm512_maskz_loadu_ps(head_mask(count), p); }
    static Reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
    static __m512 mac(__m512 acc, Reg a, Reg b) { return _mm512_fmadd_ps(a, b, acc); }
    static Reg first(Reg one) { return one; }
};

}  // namespace chorus

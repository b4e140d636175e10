// Vectors of AVX-512: one register each. With CHORUS_BF16, the products of AVX512-BF16.
#pragma once
#include "simd/simd_x86.h"

namespace chorus {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));

constexpr int kTileVectors = 24;    // accumulators of a register tile, of 32 registers
constexpr int kRows = 12;           // of the largest register tile of a product
constexpr int kWideRows = 12;       // rows of a tile that is as wide as a panel; higher ones are half as wide
constexpr int kWords = 1;           // of the reduction dimension in a turn of a product's loop
constexpr int kDotVectors = 16;     // accumulators of dot products
constexpr int kStreamVectors = 16;  // accumulators where values come from memory

// The first lanes of a vector, as a mask.
using Head = __mmask16;
inline Head head(int count) { return count >= kLanes ? 0xFFFF : (Head)((1u << count) - 1); }
inline unsigned bits(Head h) { return h; }

inline void fill(float x, Floats& v) { v = _mm512_set1_ps(x); }
inline void fill(uint32_t x, Words& v) { v = (Words)_mm512_set1_epi32((int)x); }
inline void fill(double x, Doubles& v) { v = _mm512_set1_pd(x); }
inline void load(const float* p, Floats& v) { v = _mm512_loadu_ps(p); }
inline void load(const uint32_t* p, Words& v) { v = (Words)_mm512_loadu_si512(p); }
inline void load(const double* p, Doubles& v) { v = _mm512_loadu_pd(p); }
inline void load(const uint16_t* p, Words& v) {
    v = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
inline void load(const uint8_t* p, Words& v) { v = (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline void stream(float* p, Floats v) { _mm512_stream_ps(p, v); }  // past the caches; p: of a cache line
inline void store(uint32_t* p, Words v) { _mm512_storeu_si512(p, (__m512i)v); }
inline void store(double* p, Doubles v) { _mm512_storeu_pd(p, v); }
inline void store(uint16_t* p, Words v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v)); }

// Only the head's elements are read, 0 beyond, or written.
inline void load(const float* p, Head h, Floats& v) { v = _mm512_maskz_loadu_ps(h, p); }
inline void load(const uint32_t* p, Head h, Words& v) { v = (Words)_mm512_maskz_loadu_epi32(h, p); }
inline void load(const double* p, Head h, Doubles& v) { v = _mm512_maskz_loadu_pd((__mmask8)h, p); }
inline void load(const uint16_t* p, Head h, Words& v) {
    v = (Words)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(h, p));
}
inline void load(const uint16_t* p, Head h, Halves& v) { v = _mm256_maskz_loadu_epi16(h, p); }
inline void load(const uint8_t* p, Head h, Words& v) { v = (Words)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(h, p)); }
inline void store(float* p, Floats v, Head h) { _mm512_mask_storeu_ps(p, h, v); }
inline void store(uint32_t* p, Words v, Head h) { _mm512_mask_storeu_epi32(p, h, (__m512i)v); }
inline void store(double* p, Doubles v, Head h) { _mm512_mask_storeu_pd(p, (__mmask8)h, v); }
inline void store(uint16_t* p, Words v, Head h) { _mm256_mask_storeu_epi16(p, h, _mm512_cvtepi32_epi16((__m512i)v)); }
inline void store(uint8_t* p, Words v, Head h) { _mm_mask_storeu_epi8(p, h, _mm512_cvtepi32_epi8((__m512i)v)); }
inline void store(uint16_t* p, Halves v, Head h) { _mm256_mask_storeu_epi16(p, h, v); }
// v's head, and `other` beyond.
inline Floats keep(Floats v, Head h, Floats other) { return _mm512_mask_mov_ps(other, h, v); }
// Eight elements of one row and eight of another, the first `count` of each.
inline void load_two(const float* one, const float* other, int count, Floats& v) {
    const __mmask8 mask = (__mmask8)head(count);
    v = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_maskz_loadu_ps(mask, one)), _mm256_maskz_loadu_ps(mask, other),
                           1);
}
inline void load_two(const uint8_t* one, const uint8_t* other, int count, Words& v) {
    const Head mask = (Head)(head(count) & 0xFF);
    v = (Words)_mm512_cvtepu8_epi32(
        _mm_unpacklo_epi64(_mm_maskz_loadu_epi8(mask, one), _mm_maskz_loadu_epi8(mask, other)));
}

inline Floats as_floats(Words v) { return (Floats)v; }
inline Words as_words(Floats v) { return (Words)v; }
// Of pairs of bf16 the first ones, or the second ones, as float32.
inline Floats widen_first(Words pairs) { return (Floats)(pairs << 16); }
inline Floats widen_second(Words pairs) { return (Floats)(pairs & 0xFFFF0000); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a·b + c
inline Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }    // a·b - c
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a·b
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
// Whole numbers of 32 bits as float32, and float32 rounded to them, ties to even.
inline Floats from_ints(Words v) { return _mm512_cvtepi32_ps((__m512i)v); }
inline Words to_ints(Floats v) { return (Words)_mm512_cvtps_epi32(v); }
// Each half of a lane moved down by BITS.
template <int BITS> inline Words down16(Words v) { return (Words)_mm512_srli_epi16((__m512i)v, BITS); }
// v is in a register here: the compiler stores it neither before nor while it changes. By way of a copy: it would keep an array
// in memory that has a vector which is written here.
inline void in_register(Words& v) {
    Words w = v;
    asm("" : "+v"(w));
    v = w;
}
// acc + the products of both pairs of 16-bit whole numbers in each lane.
inline Words mac16(Words acc, Words a, Words b) {
#ifdef CHORUS_BF16
    return (Words)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#else
    return acc + (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}
#ifdef CHORUS_BF16
#define CHORUS_MAC8
// acc + the products of all four pairs of bytes in each lane: of a without signs, of b with signs.
inline Words mac8(Words acc, Words a, Words b) {
    return (Words)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
// Store lanes as bytes, in the order in which `mac8` multiplies words of weights of 8 or 4 bits: see integers.h.
inline void store_bytes(char* p, Words v, int weight_bits) {
    const __m128i of_8 = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i of_4 = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
    _mm_storeu_si128((__m128i*)p, _mm_shuffle_epi8(bytes, weight_bits == 8 ? of_8 : of_4));
}
#endif
// Of a pair with a NaN, the second.
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Doubles min(Doubles a, Doubles b) { return _mm512_min_pd(a, b); }
inline Words max(Words a, Words b) { return (Words)_mm512_max_epu32((__m512i)a, (__m512i)b); }
inline Words max16(Words a, Words b) { return (Words)_mm512_max_epu16((__m512i)a, (__m512i)b); }  // of 16 bits each
inline Floats round(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats scale2(Floats v, Floats n) { return _mm512_scalef_ps(v, n); }  // v · 2^n for whole n
// `yes` where a >= b.
inline Doubles where_not_below(Doubles a, Doubles b, Doubles yes, Doubles no) {
    return _mm512_mask_mov_pd(no, _mm512_cmp_pd_mask(a, b, _CMP_GE_OQ), yes);
}
// Lanes for which it is true, as bits; never for NaN.
inline unsigned below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline unsigned not_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline unsigned equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline double sum(Doubles v) { return _mm512_reduce_add_pd(v); }
inline float largest(Floats v) { return _mm512_reduce_max_ps(v); }
inline uint32_t largest(Words v) { return _mm512_reduce_max_epu32((__m512i)v); }

// Of each quad of both by turns: single lanes, or two together, of its lower half, or of its upper half.
inline Floats zip_low(Floats a, Floats b) { return _mm512_unpacklo_ps(a, b); }
inline Floats zip_high(Floats a, Floats b) { return _mm512_unpackhi_ps(a, b); }
inline Floats zip_low2(Floats a, Floats b) { return (Floats)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
inline Floats zip_high2(Floats a, Floats b) { return (Floats)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }
// Quads 0 and 2 of both, or 1 and 3.
inline Floats even_quads(Floats a, Floats b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
inline Floats odd_quads(Floats a, Floats b) { return _mm512_shuffle_f32x4(a, b, 0xDD); }
// Lanes 0 of the four quads, lanes 2, lanes 1, lanes 3.
inline Floats by_lane(Floats v) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15), v);
}

inline void to_doubles(Floats v, Doubles out[2]) {
    out[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    out[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
}
// A table's element by the last four bits of `count`.
inline Doubles sixteenth(const double* table, Doubles count) {
    return _mm512_permutex2var_pd(_mm512_load_pd(table), (__m512i)count, _mm512_load_pd(table + 8));
}
// v · 2^n with n rounded down; the last bits of `count` are 16·n.
inline Doubles scale2(Doubles v, Doubles n, Doubles) { return _mm512_scalef_pd(v, n); }
inline Floats from_half(Words v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)v)); }
inline Words to_half(Floats v) { return (Words)_mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
// The lanes of `which`, side by side; beyond them anything may be written, as far as a whole vector.
inline void pack_lanes(float* p, Floats v, unsigned which) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)which, v));
}
inline void pack_lanes(uint32_t* p, Words v, unsigned which) {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32((__mmask16)which, (__m512i)v));
}

}  // namespace chorus

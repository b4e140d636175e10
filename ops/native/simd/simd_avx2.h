// Vectors of AVX2, FMA and F16C: two registers each.
#pragma once
#include "simd/simd_x86.h"

namespace chorus {

// With attributes of their own, as the intrinsics' types lose theirs as a template's arguments.
typedef float Floats8 __attribute__((vector_size(32)));
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef double Doubles4 __attribute__((vector_size(32)));

constexpr int kTileVectors = 6;    // accumulators of a register tile, of two registers each: 12 of 16
constexpr int kRows = 6;  // of the largest register tile of a product: with widened weights it takes all registers
constexpr int kWideRows = 2;  // rows of a tile that is as wide as a panel; higher ones are half as wide
constexpr int kWords = 2;  // of the reduction dimension in a turn of a product's loop, which costs a cycle or two
constexpr int kDotVectors = 4;  // accumulators of dot products
constexpr int kStreamVectors = 6;  // accumulators where values come from memory

inline void fill(float x, Floats8& v) { v = _mm256_set1_ps(x); }
inline void fill(uint32_t x, Words8& v) { v = (Words8)_mm256_set1_epi32((int)x); }
inline void fill(double x, Doubles4& v) { v = _mm256_set1_pd(x); }
inline void load(const float* p, Floats8& v) { v = _mm256_loadu_ps(p); }
inline void load(const uint32_t* p, Words8& v) { v = (Words8)_mm256_loadu_si256((const __m256i*)p); }
inline void load(const double* p, Doubles4& v) { v = _mm256_loadu_pd(p); }
inline void load(const uint16_t* p, Words8& v) {
    v = (Words8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline void load(const uint8_t* p, Words8& v) { v = (Words8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline void load(const uint16_t* p, Halves& v) { v = _mm256_loadu_si256((const __m256i*)p); }
inline void store(float* p, Floats8 v) { _mm256_storeu_ps(p, v); }
inline void stream(float* p, Floats8 v) { _mm256_stream_ps(p, v); }  // past the caches; p: of a register's size
inline void store(uint32_t* p, Words8 v) { _mm256_storeu_si256((__m256i*)p, (__m256i)v); }
inline void store(double* p, Doubles4 v) { _mm256_storeu_pd(p, v); }
inline void store(uint16_t* p, Halves v) { _mm256_storeu_si256((__m256i*)p, v); }
// Lanes of at most 16 bits.
inline __m128i narrowed(Words8 v) {
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
}
inline void store(uint16_t* p, Words8 v) { _mm_storeu_si128((__m128i*)p, narrowed(v)); }
inline void store(uint8_t* p, Words8 v) {  // lanes of at most 8 bits
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(narrowed(v), _mm_setzero_si128()));
}

inline Floats8 as_floats(Words8 v) { return (Floats8)v; }
inline Words8 as_words(Floats8 v) { return (Words8)v; }
// Of pairs of bf16 the first ones, or the second ones, as float32: on the port that multiplies nothing, and with the order
// and the pairs from memory, as a tile of products leaves no register for them.
alignas(32) constexpr int8_t kFirstUp[32] = {-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13,
                                             -1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13};
inline Floats8 widen_first(Words8 pairs) {
    Floats8 v;
    asm("vpshufb %2, %1, %0" : "=x"(v) : "x"(pairs), "m"(kFirstUp));
    return v;
}
inline Floats8 widen_second(Words8 pairs) {
    return (Floats8)_mm256_blend_epi16(_mm256_setzero_si256(), (__m256i)pairs, 0xAA);
}
// a·b + c in c's register: of the forms that the compiler chooses from, others overwrite a factor, and a sum that moves from
// register to register needs one more of sixteen, and moves.
inline Floats8 fma(Floats8 a, Floats8 b, Floats8 c) {
    asm("vfmadd231ps %1, %2, %0" : "+x"(c) : "x"(a), "x"(b));
    return c;
}
inline Floats8 fms(Floats8 a, Floats8 b, Floats8 c) { return _mm256_fmsub_ps(a, b, c); }  // a·b - c
inline Floats8 fnma(Floats8 a, Floats8 b, Floats8 c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a·b
inline Doubles4 fma(Doubles4 a, Doubles4 b, Doubles4 c) { return _mm256_fmadd_pd(a, b, c); }
// Whole numbers of 32 bits as float32, and float32 rounded to them, ties to even.
inline Floats8 from_ints(Words8 v) { return _mm256_cvtepi32_ps((__m256i)v); }
inline Words8 to_ints(Floats8 v) { return (Words8)_mm256_cvtps_epi32(v); }
// Each half of a lane moved down by BITS.
template <int BITS> inline Words8 down16(Words8 v) { return (Words8)_mm256_srli_epi16((__m256i)v, BITS); }
// v is in a register here: the compiler stores it neither before nor while it changes. By way of a copy: it would keep an array
// in memory that has a vector which is written here.
inline void in_register(Words8& v) {
    Words8 w = v;
    asm("" : "+x"(w));
    v = w;
}
// acc + the products of both pairs of 16-bit whole numbers in each lane.
inline Words8 mac16(Words8 acc, Words8 a, Words8 b) { return acc + (Words8)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
// Of a pair with a NaN, the second.
inline Floats8 max(Floats8 a, Floats8 b) { return _mm256_max_ps(a, b); }
inline Floats8 min(Floats8 a, Floats8 b) { return _mm256_min_ps(a, b); }
inline Doubles4 min(Doubles4 a, Doubles4 b) { return _mm256_min_pd(a, b); }
inline Words8 max(Words8 a, Words8 b) { return (Words8)_mm256_max_epu32((__m256i)a, (__m256i)b); }
inline Words8 max16(Words8 a, Words8 b) { return (Words8)_mm256_max_epu16((__m256i)a, (__m256i)b); }
inline Floats8 round(Floats8 v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v · 2^n for whole n from -126 to 127.
inline Floats8 scale2(Floats8 v, Floats8 n) {
    return v * (Floats8)_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
}
inline Doubles4 where_not_below(Doubles4 a, Doubles4 b, Doubles4 yes, Doubles4 no) {
    return _mm256_blendv_pd(no, yes, _mm256_cmp_pd(a, b, _CMP_GE_OQ));
}
inline unsigned below(Floats8 a, Floats8 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline unsigned not_above(Floats8 a, Floats8 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ)); }
inline unsigned equal(Floats8 a, Floats8 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }

inline float sum(Floats8 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline double sum(Doubles4 v) {
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
inline float largest(Floats8 v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline uint32_t largest(Words8 v) {
    uint32_t most = v[0];
    for (int i = 1; i < 8; i++) most = v[i] > most ? v[i] : most;
    return most;
}

inline Floats8 zip_low(Floats8 a, Floats8 b) { return _mm256_unpacklo_ps(a, b); }
inline Floats8 zip_high(Floats8 a, Floats8 b) { return _mm256_unpackhi_ps(a, b); }
inline Floats8 zip_low2(Floats8 a, Floats8 b) { return (Floats8)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); }
inline Floats8 zip_high2(Floats8 a, Floats8 b) { return (Floats8)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); }

inline Doubles4 sixteenth(const double* table, Doubles4 count) {
    const __m256i index = _mm256_and_si256((__m256i)count, _mm256_set1_epi64x(15));
    return _mm256_i64gather_pd(table, index, 8);
}
// v · 2^n with n rounded down; the last bits of `count` are 16·n.
inline Doubles4 scale2(Doubles4 v, Doubles4, Doubles4 count) {
    const __m256i sixteenths = _mm256_andnot_si256(_mm256_set1_epi64x(15), (__m256i)count);
    return v * (Doubles4)_mm256_add_epi64(_mm256_slli_epi64(sixteenths, 48), _mm256_set1_epi64x(1023LL << 52));
}
inline Floats8 from_half(Words8 v) { return _mm256_cvtph_ps(narrowed(v)); }
inline Words8 to_half(Floats8 v) {
    return (Words8)_mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace chorus

#include "simd/simd_pair.h"

namespace chorus {

using Floats = Pair<Floats8>;
using Words = Pair<Words8>;
using Doubles = Pair<Doubles4>;

// Quads 0 and 2 of both, or 1 and 3.
inline Floats even_quads(Floats a, Floats b) {
    return {_mm256_permute2f128_ps(a.low, a.high, 0x20), _mm256_permute2f128_ps(b.low, b.high, 0x20)};
}
inline Floats odd_quads(Floats a, Floats b) {
    return {_mm256_permute2f128_ps(a.low, a.high, 0x31), _mm256_permute2f128_ps(b.low, b.high, 0x31)};
}
// Lanes 0 of the four quads, lanes 2, lanes 1, lanes 3.
inline Floats by_lane(Floats v) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256 even = _mm256_permutevar8x32_ps(_mm256_unpacklo_ps(v.low, v.high), order);
    const __m256 odd = _mm256_permutevar8x32_ps(_mm256_unpackhi_ps(v.low, v.high), order);
    return {_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31)};
}
inline void to_doubles(Floats v, Doubles out[2]) {
    auto half = [](Floats8 v) -> Doubles {
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
    };
    out[0] = half(v.low), out[1] = half(v.high);
}

}  // namespace chorus

// Vectors of NEON (aarch64): four registers each.
#pragma once
#include <arm_neon.h>
#include "simd/lanes.h"

namespace chorus {

constexpr int kRows = 6;           // of the largest register tile of a product
constexpr int kWideRows = 3;       // rows of a tile that is as wide as a panel; higher ones are half as wide
constexpr int kTileVectors = 6;    // accumulators of other register tiles, of four registers each: 24 of 32
constexpr int kWords = 1;          // of the reduction dimension in a turn of a product's loop
constexpr int kDotVectors = 4;     // accumulators of dot products
constexpr int kStreamVectors = 6;  // accumulators where values come from memory

using Floats4 = float32x4_t;
using Words4 = uint32x4_t;
using Doubles2 = float64x2_t;

inline void fill(float x, Floats4& v) { v = vdupq_n_f32(x); }
inline void fill(uint32_t x, Words4& v) { v = vdupq_n_u32(x); }
inline void fill(double x, Doubles2& v) { v = vdupq_n_f64(x); }
inline void load(const float* p, Floats4& v) { v = vld1q_f32(p); }
inline void load(const uint32_t* p, Words4& v) { v = vld1q_u32(p); }
inline void load(const double* p, Doubles2& v) { v = vld1q_f64(p); }
inline void load(const uint16_t* p, Words4& v) { v = vmovl_u16(vld1_u16(p)); }
inline void load(const uint8_t* p, Words4& v) {
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    v = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
}
inline void store(float* p, Floats4 v) { vst1q_f32(p, v); }
inline void stream(float* p, Floats4 v) { vst1q_f32(p, v); }  // NEON has no store that passes the caches by
inline void store(uint32_t* p, Words4 v) { vst1q_u32(p, v); }
inline void store(double* p, Doubles2 v) { vst1q_f64(p, v); }
inline void store(uint16_t* p, Words4 v) { vst1_u16(p, vmovn_u32(v)); }
inline void store(uint8_t* p, Words4 v) {
    const uint16x4_t halves = vmovn_u32(v);
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    memcpy(p, &bytes, sizeof bytes);
}

inline Floats4 as_floats(Words4 v) { return vreinterpretq_f32_u32(v); }
// Of pairs of bf16 the first ones, or the second ones, as float32.
inline Floats4 widen_first(Words4 pairs) { return as_floats(vshlq_n_u32(pairs, 16)); }
inline Floats4 widen_second(Words4 pairs) { return as_floats(vandq_u32(pairs, vdupq_n_u32(0xFFFF0000))); }
inline Words4 as_words(Floats4 v) { return vreinterpretq_u32_f32(v); }
inline Floats4 fma(Floats4 a, Floats4 b, Floats4 c) { return vfmaq_f32(c, a, b); }             // a·b + c
inline Floats4 fms(Floats4 a, Floats4 b, Floats4 c) { return vfmaq_f32(vnegq_f32(c), a, b); }  // a·b - c
inline Floats4 fnma(Floats4 a, Floats4 b, Floats4 c) { return vfmsq_f32(c, a, b); }            // c - a·b
inline Doubles2 fma(Doubles2 a, Doubles2 b, Doubles2 c) { return vfmaq_f64(c, a, b); }
// Whole numbers of 32 bits as float32, and float32 rounded to them, ties to even.
inline Floats4 from_ints(Words4 v) { return vcvtq_f32_s32(vreinterpretq_s32_u32(v)); }
inline Words4 to_ints(Floats4 v) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(v)); }
// Each half of a lane moved down by BITS.
template <int BITS> inline Words4 down16(Words4 v) {
    return vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(v), BITS));
}
// v is in a register here: the compiler stores it neither before nor while it changes. By way of a copy: it would keep an array
// in memory that has a vector which is written here.
inline void in_register(Words4& v) {
    Words4 w = v;
    asm("" : "+w"(w));
    v = w;
}
// acc + the products of both pairs of 16-bit whole numbers in each lane.
inline Words4 mac16(Words4 acc, Words4 a, Words4 b) {
    const int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return acc + vreinterpretq_u32_s32(vpaddq_s32(low, high));
}
// Of a pair with a NaN, the second.
inline Floats4 max(Floats4 a, Floats4 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Floats4 min(Floats4 a, Floats4 b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Doubles2 min(Doubles2 a, Doubles2 b) { return vbslq_f64(vcltq_f64(a, b), a, b); }
inline Words4 max(Words4 a, Words4 b) { return vmaxq_u32(a, b); }
inline Words4 max16(Words4 a, Words4 b) {
    return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
inline Floats4 round(Floats4 v) { return vrndnq_f32(v); }
// v · 2^n for whole n from -126 to 127.
inline Floats4 scale2(Floats4 v, Floats4 n) {
    return v * vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline Doubles2 where_not_below(Doubles2 a, Doubles2 b, Doubles2 yes, Doubles2 no) {
    return vbslq_f64(vcgeq_f64(a, b), yes, no);
}
inline unsigned bits_of(uint32x4_t mask) { return vaddvq_u32(vandq_u32(mask, uint32x4_t{1, 2, 4, 8})); }
inline unsigned below(Floats4 a, Floats4 b) { return bits_of(vcltq_f32(a, b)); }
inline unsigned not_above(Floats4 a, Floats4 b) { return bits_of(vcleq_f32(a, b)); }
inline unsigned equal(Floats4 a, Floats4 b) { return bits_of(vceqq_f32(a, b)); }

inline float sum(Floats4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline double sum(Doubles2 v) { return v[0] + v[1]; }
inline float largest(Floats4 v) { return vmaxvq_f32(v); }
inline uint32_t largest(Words4 v) { return vmaxvq_u32(v); }

inline Floats4 zip_low(Floats4 a, Floats4 b) { return vzip1q_f32(a, b); }
inline Floats4 zip_high(Floats4 a, Floats4 b) { return vzip2q_f32(a, b); }
inline Floats4 zip_low2(Floats4 a, Floats4 b) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
inline Floats4 zip_high2(Floats4 a, Floats4 b) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}

inline Doubles2 sixteenth(const double* table, Doubles2 count) {
    const uint64x2_t index = vreinterpretq_u64_f64(count);
    return Doubles2{table[index[0] & 15], table[index[1] & 15]};
}
// v · 2^n with n rounded down; the last bits of `count` are 16·n.
inline Doubles2 scale2(Doubles2 v, Doubles2, Doubles2 count) {
    const uint64x2_t sixteenths = vbicq_u64(vreinterpretq_u64_f64(count), vdupq_n_u64(15));
    return v * vreinterpretq_f64_u64(vaddq_u64(vshlq_n_u64(sixteenths, 48), vdupq_n_u64(1023ull << 52)));
}
inline Floats4 from_half(Words4 v) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(v))); }
inline Words4 to_half(Floats4 v) { return vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(v))); }

}  // namespace chorus

#include "simd/simd_pair.h"

namespace chorus {

using Floats = Pair<Pair<Floats4>>;
using Words = Pair<Pair<Words4>>;
using Doubles = Pair<Pair<Doubles2>>;

// Quads 0 and 2 of both, or 1 and 3.
inline Floats even_quads(Floats a, Floats b) { return {{a.low.low, a.high.low}, {b.low.low, b.high.low}}; }
inline Floats odd_quads(Floats a, Floats b) { return {{a.low.high, a.high.high}, {b.low.high, b.high.high}}; }
// Lanes 0 of the four quads, lanes 2, lanes 1, lanes 3.
inline Floats by_lane(Floats v) {
    const Floats4 a = zip_low(v.low.low, v.high.low), b = zip_low(v.low.high, v.high.high),
                  c = zip_high(v.low.low, v.high.low), d = zip_high(v.low.high, v.high.high);
    return {{zip_low(a, b), zip_low(c, d)}, {zip_high(a, b), zip_high(c, d)}};
}
inline void to_doubles(Floats v, Doubles out[2]) {
    auto half = [](Pair<Floats4> v) -> Doubles {
        return {{vcvt_f64_f32(vget_low_f32(v.low)), vcvt_high_f64_f32(v.low)},
                {vcvt_f64_f32(vget_low_f32(v.high)), vcvt_high_f64_f32(v.high)}};
    };
    out[0] = half(v.low), out[1] = half(v.high);
}

// Sixteen lanes of 16 bits.
using Halves = Pair<uint16x8_t>;
inline void load(const uint16_t* p, Halves& v) { v = {vld1q_u16(p), vld1q_u16(p + 8)}; }
inline void store(uint16_t* p, const Halves& v) { vst1q_u16(p, v.low), vst1q_u16(p + 8, v.high); }
#define CHORUS_ZIP(name, zip, to, from)                                              \
    inline Halves name(Halves a, Halves b) {                                         \
        return {from(zip(to(a.low), to(b.low))), from(zip(to(a.high), to(b.high)))}; \
    }
CHORUS_ZIP(zip_low16, vzip1q_u16, , )
CHORUS_ZIP(zip_high16, vzip2q_u16, , )
CHORUS_ZIP(zip_low32, vzip1q_u32, vreinterpretq_u32_u16, vreinterpretq_u16_u32)
CHORUS_ZIP(zip_high32, vzip2q_u32, vreinterpretq_u32_u16, vreinterpretq_u16_u32)
CHORUS_ZIP(zip_low64, vzip1q_u64, vreinterpretq_u64_u16, vreinterpretq_u16_u64)
CHORUS_ZIP(zip_high64, vzip2q_u64, vreinterpretq_u64_u16, vreinterpretq_u16_u64)
#undef CHORUS_ZIP
// The first 128 bits of both, or the second.
inline Halves join_first(Halves a, Halves b) { return {a.low, b.low}; }
inline Halves join_second(Halves a, Halves b) { return {a.high, b.high}; }

}  // namespace chorus

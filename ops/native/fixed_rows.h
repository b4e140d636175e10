// Activations in fixed point: 16-bit whole numbers with one factor for each block of inputs.
//
// Products with whole-number weights and their sums within a block are then exact, whatever the order, the tile and the level. A row's
// numbers depend on the row alone. The largest value of a block becomes 32767; the rounding error of each value is at
// most 1/65534 of it, which is less than that of rounding the largest to bf16. Rows of float32 models have a second
// part with 15 bits more.
#pragma once
#include <algorithm>
#include <cmath>
#include "buffer.h"
#include "simd.h"

namespace chorus {

// Inputs of a block at most: a sum of 128 · 32767 for each fits into 31 bits. What a sum is on its way there may be more: it is
// exact modulo 2^32.
constexpr int kFixedBlock = 256;

// 16-bit parts of a value. The first is worth 2^15 of the second.
template <class T> constexpr int kParts = sizeof(T) == 2 ? 1 : 2;
constexpr int kPartBits = 15;

// Rows in fixed point.
//
//   values   [rows, parts · plane]: of each row one part after the other
//   plane    elements from part to part
//   factors  [rows, blocks]: what one is worth in the last part
//   sums     [rows, parts · blocks]: of each block's values, by part
//   blocks   of a row
struct FixedRows {
    Rows<const int16_t> values;
    long plane;
    Rows<const float> factors;
    Rows<const int32_t> sums;
    int blocks;

    FixedRows from(long row) const { return {values.from(row), plane, factors.from(row), sums.from(row), blocks}; }
};

// One row's block in fixed point.
//
//   PARTS   of each value
//   x       [count]
//   to      of part 0; up to a whole vector more than `count` is written, with 0
//   plane   elements to part 1
//   factor  written; NaN where x has a value that is not finite
//   sums    [PARTS, stride]: written
template <int PARTS, class X>
inline void fix_block(const X* x, int count, int16_t* to, long plane, float* factor, int32_t* sums, int stride) {
    Words seen = words(0);
    for (int i = 0; i < count; i += kLanes)
        seen = max(seen, as_words(load16(x + i, head(count - i))) & words(0x7FFFFFFF));
    const uint32_t bits = largest(seen);
    float most;
    memcpy(&most, &bits, 4);
    constexpr float limit = PARTS == 1 ? 32767.0f : 32767.0f * (1 << kPartBits);
    const bool finite = bits < 0x7F800000, some = finite && most > 1e-28f;  // less has no effect on a sum
    *factor = some ? most / limit : finite ? 0 : NAN;
    const Floats inverse = floats(some ? limit / most : 0);
    Floats sum_of[PARTS];
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) sum_of[p] = floats(0);  // of at most 2^22: exact
    for (int i = 0; i < count; i += kLanes) {
        const Floats v = some ? load16(x + i, head(count - i)) : floats(0);
        const Words whole = to_ints(v * inverse);
        if constexpr (PARTS == 1) {
            sum_of[0] = sum_of[0] + from_ints(whole);
            store((uint16_t*)to + i, whole & words(0xFFFF));
        } else {
            // rounded to a multiple of 2^15, as an unsigned shift of a number that is moved above 0
            const Words high = ((whole + words(0x80000000u + (1 << (kPartBits - 1)))) >> kPartBits) - words(1 << 16);
            const Words low = whole - (high << kPartBits);
            sum_of[0] = sum_of[0] + from_ints(high);
            sum_of[1] = sum_of[1] + from_ints(low);
            store((uint16_t*)to + i, high & words(0xFFFF));
            store((uint16_t*)to + plane + i, low & words(0xFFFF));
        }
    }
    for (int p = 0; p < PARTS; p++) sums[p * stride] = (int32_t)sum(sum_of[p]);
}

// A thread's rows in fixed point: of one product at a time, and of one chunk of its rows.
template <class T>
class FixedScratch {
    using X = Act<T>;
    static constexpr int parts = kParts<T>;

   public:
    // A product with other activations begins.
    FixedScratch* begin() {
        count_ = 0;
        return this;
    }

    // Rows of x in fixed point, computed unless they were for the last call.
    //
    //   x             [·, k]
    //   first, count  the chunk's rows
    //   k             inputs
    //   block         inputs of a block, a multiple of 8
    FixedRows of(Rows<const X> x, int first, int count, int k, int block) {
        const int blocks = (k + block - 1) / block;
        const long plane = spread<int16_t>(k + kLanes), sums = spread<int32_t>(parts * blocks);
        if (count_ && first_ == first && count_ >= count && block_ == block) return view(plane, sums, blocks);
        grow(values_, (size_t)count * parts * plane);
        grow(factors_, (size_t)count * sums);
        grow(sums_, (size_t)count * sums);
        for (int r = 0; r < count; r++) {
            int16_t* to = values_.data() + r * parts * plane;
            for (int b = 0; b < blocks; b++) {
                const int at = b * block;
                fix_block<parts>(x[first + r] + at, std::min(block, k - at), to + at, plane,
                                 factors_.data() + r * sums + b, sums_.data() + r * sums + b, blocks);
            }
        }
        first_ = first, count_ = count, block_ = block;
        return view(plane, sums, blocks);
    }

   private:
    FixedRows view(long plane, long sums, int blocks) const {
        return {{values_.data(), parts * plane}, plane, {factors_.data(), sums}, {sums_.data(), sums}, blocks};
    }

    Buffer<int16_t> values_;
    Buffer<float> factors_;
    Buffer<int32_t> sums_;
    int first_ = 0, count_ = 0, block_ = 0;
};

}  // namespace chorus

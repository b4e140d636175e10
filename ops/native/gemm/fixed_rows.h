// Activations in fixed point: whole numbers of 16 or 8 bits with one factor for each block of inputs.
//
// Products with whole-number weights and their sums within a block are then exact, whatever the order, the tile and the level. A row's
// numbers depend on the row alone. The largest value of a block becomes 32767, or 127; the rounding error of each value is at
// most half of what one is worth. In 16 bits that is less than the error of rounding the largest value to bf16; then rows of float32
// models have a second part with 15 bits more.
#pragma once
#include <algorithm>
#include <cmath>
#include "team/buffer.h"
#include "simd/simd.h"

namespace chorus {

// Parts of a value. The first is worth 2^15 of the second.
constexpr int kPartBits = 15;

// How values are stored: the type of a part, and parts of a value.
struct Whole16 {
    using Part = int16_t;
    static constexpr int parts = 1;
};
struct Whole31 {
    using Part = int16_t;
    static constexpr int parts = 2;
};
// Of at most 8 bits. Where the level has no products of bytes they are stored in 16: products are the same.
#ifdef CHORUS_MAC8
struct Whole8 {
    using Part = int8_t;
    static constexpr int parts = 1;
};
#else
using Whole8 = Whole16;
#endif
// Where values are not in 8 bits.
template <class T> using Fine = std::conditional_t<sizeof(T) == 2, Whole16, Whole31>;

// The form of a product's activations.
//
//   bits         of a value, 8 or 16
//   block        inputs of a block, a multiple of 8. A sum of 128 · 32767 for each of 256 fits into 31 bits, as does one of
//                128 · 127 for each of 65536. What a sum is on its way there may be more: it is exact modulo 2^32
//   weight_bits  a panel's: bytes lie in the order of its words
struct FixedForm {
    int bits, block, weight_bits;

    bool operator==(const FixedForm& o) const {
        return bits == o.bits && block == o.block && weight_bits == o.weight_bits;
    }
};

// Rows in fixed point.
//
//   values   [rows, parts · plane]: of each row one part after the other
//   plane    bytes from part to part
//   factors  [rows, blocks]: what one is worth in the last part
//   sums     [rows, parts · blocks]: of each block's values, by part
//   starts   of its shape: what a sum with weights begins with, which are stored with the center added
//   blocks   of a row
struct FixedRows {
    Rows<const char> values;
    long plane;
    Rows<const float> factors;
    Rows<const int32_t> sums, starts;
    int blocks;

    FixedRows from(long row) const {
        return {values.from(row), plane, factors.from(row), sums.from(row), starts.from(row), blocks};
    }
};

// Store values of one part: as bytes in the order of a panel's words.
template <class Part>
CHORUS_INLINE void store_values(char* p, Words v, [[maybe_unused]] int weight_bits) {
#ifdef CHORUS_MAC8
    if constexpr (sizeof(Part) == 1) return store_bytes(p, v, weight_bits);
#endif
    store((uint16_t*)p, v & words(0xFFFF));
}

// One row's block in fixed point, stored as F.
//
//   x       [count]
//   form    of the product
//   to      of part 0; up to a whole vector more than `count` is written, with 0
//   plane   bytes to part 1
//   factor  written; NaN where x has a value that is not finite
//   sums    [parts, stride]: written
template <class F, class X>
inline void fix_block(const X* x, int count, const FixedForm& form, char* to, long plane, float* factor, int32_t* sums,
                      int stride) {
    constexpr int parts = F::parts;
    using Part = typename F::Part;
    Words seen = words(0);
    for (int i = 0; i < count; i += kLanes)
        seen = max(seen, as_words(load16(x + i, head(count - i))) & words(0x7FFFFFFF));
    const uint32_t bits = largest(seen);
    float most;
    memcpy(&most, &bits, 4);
    const float limit = parts == 2 ? 32767.0f * (1 << kPartBits) : form.bits == 8 ? 127.0f : 32767.0f;
    const bool finite = bits < 0x7F800000, some = finite && most > 1e-28f;  // less has no effect on a sum
    *factor = some ? most / limit : finite ? 0 : NAN;
    const Floats inverse = floats(some ? limit / most : 0);
    Floats sum_of[parts];
#pragma GCC unroll 2
    for (int p = 0; p < parts; p++) sum_of[p] = floats(0);  // of at most 2^22: exact
    for (int i = 0; i < count; i += kLanes) {
        const Floats v = some ? load16(x + i, head(count - i)) : floats(0);
        const Words whole = to_ints(v * inverse);
        char* at = to + i * sizeof(Part);
        if constexpr (parts == 1) {
            sum_of[0] = sum_of[0] + from_ints(whole);
            store_values<Part>(at, whole, form.weight_bits);
        } else {
            // rounded to a multiple of 2^15, as an unsigned shift of a number that is moved above 0
            const Words high = ((whole + words(0x80000000u + (1 << (kPartBits - 1)))) >> kPartBits) - words(1 << 16);
            const Words low = whole - (high << kPartBits);
            sum_of[0] = sum_of[0] + from_ints(high);
            sum_of[1] = sum_of[1] + from_ints(low);
            store((uint16_t*)at, high & words(0xFFFF));
            store((uint16_t*)(at + plane), low & words(0xFFFF));
        }
    }
    for (int p = 0; p < parts; p++) sums[p * stride] = (int32_t)sum(sum_of[p]);
}

// A thread's rows in fixed point: of one product at a time, and of one chunk of its rows.
template <class T>
class FixedScratch {
    using X = Act<T>;

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
    //   form          of the product
    template <class F>
    FixedRows of(Rows<const X> x, int first, int count, int k, const FixedForm& form) {
        const int blocks = (k + form.block - 1) / form.block;
        const long plane = spread<char>((k + kLanes) * (int)sizeof(typename F::Part));
        const long sums = spread<int32_t>(F::parts * blocks);
        const auto view = [&]() -> FixedRows {
            return {{values_.data(), F::parts * plane},
                    plane,
                    {factors_.data(), sums},
                    {sums_.data(), sums},
                    {starts_.data(), sums},
                    blocks};
        };
        if (count_ && first_ == first && count_ >= count && form_ == form) return view();
        grow(values_, (size_t)count * F::parts * plane);
        grow(factors_, (size_t)count * sums);
        grow(sums_, (size_t)count * sums);
        grow(starts_, (size_t)count * sums);
        for (int r = 0; r < count; r++) {
            char* to = values_.data() + r * F::parts * plane;
            for (int b = 0; b < blocks; b++) {
                const int at = b * form.block;
                fix_block<F>(x[first + r] + at, std::min(form.block, k - at), form, to + at * sizeof(typename F::Part),
                             plane, factors_.data() + r * sums + b, sums_.data() + r * sums + b, blocks);
            }
            for (long i = r * sums; i < r * sums + F::parts * blocks; i++)
                starts_[i] = sums_[i] * -(1 << (form.weight_bits - 1));
        }
        first_ = first, count_ = count, form_ = form;
        return view();
    }

   private:
    Buffer<char> values_;
    Buffer<float> factors_;
    Buffer<int32_t> sums_, starts_;
    int first_ = 0, count_ = 0;
    FixedForm form_{};
};

}  // namespace chorus

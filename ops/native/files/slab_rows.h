// Lays out an adapter's tensors, as a safetensors file has them, in slabs: A's rows as they lie, B transposed to rows,
// both in the model's element type.
#pragma once
#include <algorithm>
#include <vector>
#include "gemm/operands.h"
#include "simd/simd.h"

namespace chorus {

constexpr long kChunkBytes = 128 << 10;  // converted at once: that, and the same converted, stay in L2
constexpr long kLeastRows = 64;  // of B, at once: rows of Bᵀ lie far apart, so each is written by whole cache lines

enum Element : int64_t { kF32 = 0, kF16 = 1, kBF16 = 2 };
enum Fault : int64_t { kNone = 0, kEnds = 1, kUnreadable = 2, kNotFinite = 3, kBeyondRange = 4 };

// One module of one layer; mirrors ReadJob in ops/cpu/native_reader.py.
struct ReadJob {
    int64_t a_start, b_start;        // bytes from the file's beginning; addresses where they are in memory
    Element a_element, b_element;    // Element of the file's tensors
    int64_t rank, d_in, d_out;       // A: [rank, d_in], B: [d_out, rank]
    int64_t first, slab_elems;       // rank-row i's slab begins at element first + i·slab_elems of the output
    int64_t a_offset, b_offset;      // from the slab's beginning to row i of A, and of Bᵀ
};

struct ReadFault {
    Fault fault;
    int64_t job, side, error;  // side: 0 for A, 1 for B; error: errno
};

template <Element E> struct Stored {
    using type = uint16_t;
};
template <> struct Stored<kF32> {
    using type = float;
};

// A value's bits each, 0 beyond the head.
template <Element S> inline Words bits16(const typename Stored<S>::type* p, Head here) {
    Words v;
    if constexpr (S == kF32) load((const uint32_t*)p, here, v);
    else load(p, here, v);
    return v;
}

// From this magnitude's bits on, a value of S is NaN or infinite itself, or becomes infinite when rounded to D.
template <Element S, Element D> constexpr uint32_t limit() {
    if (S == kF32) return D == kBF16 ? 0x7F7F8000 : D == kF16 ? 0x477FF000 : 0x7F800000;
    if (S == kBF16) return D == kF16 ? 0x4780 : 0x7F80;
    return 0x7C00;
}

// To the nearest, ties to even, subnormal numbers kept: as torch does.
template <Element S, Element D>
inline void convert16(Words x, typename Stored<D>::type* out, Head here) {
    if constexpr (S != D) {
        if constexpr (S == kBF16) x = x << 16;
        if constexpr (S == kF16) x = as_words(from_half(x));
        if constexpr (D == kF16) x = to_half(as_floats(x));
        if constexpr (D == kBF16) x = rounded(x) >> 16;
    }
    if constexpr (D == kF32) store((uint32_t*)out, x, here);
    else store(out, x, here);
}

// Convert n values from S to D.
//
//   x    [n]
//   n    values
//   out  [n]; null: nothing is written
//   top  raised to the bits of the largest magnitude
template <Element S, Element D>
inline void convert_values(const typename Stored<S>::type* x, long n, typename Stored<D>::type* out, uint32_t& top) {
    Words most = words(0);
    long i = 0;
    if constexpr (S == D && S != kF32) {  // twice as many at once, and no widening
        for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
            const Words both = load_words(x + i);
            most = max16(most, both & words(0x7FFF7FFF));
            if (out) store((uint32_t*)(out + i), both);
        }
        most = max(most & words(0xFFFF), most >> 16);
    }
    for (; i < n; i += kLanes) {
        const Head here = head((int)std::min<long>(n - i, kLanes));
        const Words value = bits16<S>(x + i, here);
        most = max(most, value & words(S == kF32 ? 0x7FFFFFFF : 0x7FFF));
        if (out) convert16<S, D>(value, out + i, here);
    }
    top = std::max(top, largest(most));
}

// out[c][r] = x[r][c].
//
//   x              [rows, columns]
//   rows, columns  at most 16 of each
//   out            [columns, rows]
inline void transpose16(Rows<const uint16_t> x, int rows, int columns, Rows<uint16_t> out) {
    Halves a[16], b[16];
    const Head in = head(columns), to = head(rows);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) load(x[r], r < rows ? in : head(0), a[r]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[i] = zip_low16(a[2 * i], a[2 * i + 1]);
        b[i + 8] = zip_high16(a[2 * i], a[2 * i + 1]);
    }
    // b[i]: columns 0-3 (and 8-11) of rows 2i, 2i+1; b[i + 8]: columns 4-7 (and 12-15)
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int half = i / 4 * 8, pair = i % 4;
        a[half + pair] = zip_low32(b[half + 2 * pair], b[half + 2 * pair + 1]);
        a[half + pair + 4] = zip_high32(b[half + 2 * pair], b[half + 2 * pair + 1]);
    }
    // a[4j + p]: columns 2j, 2j+1 (and 8 further) of rows 4p … 4p+3
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) {
            b[4 * j + p] = zip_low64(a[4 * j + 2 * p], a[4 * j + 2 * p + 1]);
            b[4 * j + 2 + p] = zip_high64(a[4 * j + 2 * p], a[4 * j + 2 * p + 1]);
        }
    // b[2c + p]: column c (low half) and c + 8 (high half) of rows 8p … 8p+7
#pragma GCC unroll 8
    for (int c = 0; c < 8; c++) {
        if (c < columns) store(out[c], join_first(b[2 * c], b[2 * c + 1]), to);
        if (c + 8 < columns) store(out[c + 8], join_second(b[2 * c], b[2 * c + 1]), to);
    }
}

inline void transpose16(Rows<const float> x, int rows, int columns, Rows<float> out) {
    Floats a[16], b[16];
    const Head in = head(columns), to = head(rows);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) load(x[r], r < rows ? in : head(0), a[r]);
    transpose16(a, b);
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++)
        if (c < columns) store(out[c], b[c], to);
}

class SlabRows {
   public:
    SlabRows(Element out, void* data) : out_(out), data_(data) {}

    // Write A's rows and Bᵀ's rows of one job; returns whether that was done. What lies between the rows stays as it is.
    //
    //   job    its starts are addresses
    //   fault  written: why not
    bool write(const ReadJob& job, ReadFault& fault) { return side(job, 0, fault) && side(job, 1, fault); }

   private:
    bool side(const ReadJob& job, int side, ReadFault& fault) {
        fault.side = side;
        switch (side ? job.b_element : job.a_element) {
            case kF32: return to<kF32>(job, side, fault);
            case kF16: return to<kF16>(job, side, fault);
            default: return to<kBF16>(job, side, fault);
        }
    }

    template <Element S> bool to(const ReadJob& job, int side, ReadFault& fault) {
        switch (out_) {
            case kF32: return tensor<S, kF32>(job, side, fault);
            case kF16: return tensor<S, kF16>(job, side, fault);
            default: return tensor<S, kBF16>(job, side, fault);
        }
    }

    template <Element S, Element D> bool tensor(const ReadJob& job, int side, ReadFault& fault) {
        using In = typename Stored<S>::type;
        using Out = typename Stored<D>::type;
        Out* out = (Out*)data_ + job.first + (side ? job.b_offset : job.a_offset);
        const In* in = (const In*)(side ? job.b_start : job.a_start);
        uint32_t top = 0;
        if (side) transpose<S, D>(in, job.d_out, job.rank, {out, job.slab_elems}, top);
        else
            for (long r = 0; r < job.rank; r++)
                convert_values<S, D>(in + r * job.d_in, job.d_in, out + r * job.slab_elems, top);
        if (top >= limit<S, S>()) fault.fault = kNotFinite;
        else if (top >= limit<S, D>()) fault.fault = kBeyondRange;
        return fault.fault == kNone;
    }

    // out[c][r] = x[r][c], as many rows at a time as stay in the cache.
    //
    //   x      [rows, width]
    //   out    [width, rows]
    //   top    see convert_values
    template <Element S, Element D>
    static void transpose(const typename Stored<S>::type* x, long rows, long width, Rows<typename Stored<D>::type> out,
                          uint32_t& top) {
        using Out = typename Stored<D>::type;
        const long most = std::max(kLeastRows, kChunkBytes / (width * (long)sizeof(*x)) / 16 * 16);
        thread_local std::vector<char> buffer;  // kept: the system clears fresh pages at some cost
        const size_t bytes = (size_t)std::min(most, rows) * width * sizeof(Out);
        if (S != D && buffer.size() < bytes) buffer.resize(bytes);
        for (long row = 0; row < rows; row += most) {
            const long count = std::min(most, rows - row);
            const Out* from;
            if constexpr (S == D) {
                from = x + row * width;
                convert_values<S, S>(from, count * width, nullptr, top);
            } else {
                from = (const Out*)buffer.data();
                convert_values<S, D>(x + row * width, count * width, (Out*)buffer.data(), top);
            }
            for (long c = 0; c < width; c += 16)
                for (long r = 0; r < count; r += 16)
                    transpose16(Rows<const Out>{from + r * width + c, width}, (int)std::min<long>(16, count - r),
                                (int)std::min<long>(16, width - c), out.from(c, row + r));
        }
    }

    Element out_;
    void* data_;
};

}  // namespace chorus

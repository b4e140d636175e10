// Lays out an adapter's tensors, as a safetensors file has them, in slabs: A's rows as they lie, B transposed to rows,
// both in the model's element type.
#pragma once
#include <algorithm>
#include <vector>
#include "simd.h"

namespace chorus {

constexpr long kChunkBytes = 128 << 10;  // converted at once: that, and the same converted, stay in L2

enum Element : int64_t { kF32 = 0, kF16 = 1, kBF16 = 2 };
enum Fault : int64_t { kNone = 0, kEnds = 1, kUnreadable = 2, kNotFinite = 3, kBeyondRange = 4 };

// One module of one layer; mirrors ReadJob in ops/native_reader.py.
struct ReadJob {
    int64_t a_start, b_start;        // bytes from the file's beginning; addresses where they are in memory
    int64_t a_element, b_element;    // Element of the file's tensors
    int64_t rank, d_in, d_out;       // A: [rank, d_in], B: [d_out, rank]
    int64_t first, slab_elems;       // rank-row i's slab begins at element first + i·slab_elems of the output
    int64_t a_offset, b_offset;      // from the slab's beginning to row i of A, and of Bᵀ
};

struct ReadFault {
    int64_t fault, job, side, error;
};  // side: 0 for A, 1 for B; error: errno

template <Element E> struct Stored {
    using type = uint16_t;
};
template <> struct Stored<kF32> {
    using type = float;
};

template <Element S> inline __m512i bits16(const typename Stored<S>::type* p, __mmask16 mask) {
    if constexpr (S == kF32) return _mm512_maskz_loadu_epi32(mask, p);
    else return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
}

// From this magnitude's bits on, a value of S is NaN or infinite itself, or becomes infinite when rounded to D.
template <Element S, Element D> constexpr uint32_t limit() {
    if (S == kF32) return D == kBF16 ? 0x7F7F8000 : D == kF16 ? 0x477FF000 : 0x7F800000;
    if (S == kBF16) return D == kF16 ? 0x4780 : 0x7F80;
    return 0x7C00;
}

// To the nearest, ties to even, subnormal numbers kept: as torch does.
template <Element S, Element D>
inline void convert16(__m512i bits, typename Stored<D>::type* out, __mmask16 mask) {
    if constexpr (S == D) {
        if constexpr (D == kF32) _mm512_mask_storeu_epi32(out, mask, bits);
        else _mm256_mask_storeu_epi16(out, mask, _mm512_cvtepi32_epi16(bits));
        return;
    }
    if constexpr (S == kBF16) bits = _mm512_slli_epi32(bits, 16);
    if constexpr (S == kF16) bits = _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)));
    if constexpr (D == kF32) _mm512_mask_storeu_epi32(out, mask, bits);
    if constexpr (D == kF16)
        _mm256_mask_storeu_epi16(out, mask, _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT));
    if constexpr (D == kBF16) {
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
        _mm256_mask_storeu_epi16(out, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
}

// Convert n values; the bits of the largest magnitude seen are kept in `top`.
template <Element S, Element D>
inline void convert_values(const typename Stored<S>::type* x, long n, typename Stored<D>::type* out, uint32_t& top) {
    __m512i most = _mm512_setzero_si512();
    long i = 0;
    if constexpr (S == D && S != kF32) {  // twice as many at once, and no widening
        const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
        for (; i + 32 <= n; i += 32) {
            const __m512i bits = _mm512_loadu_si512(x + i);
            most = _mm512_max_epu16(most, _mm512_and_si512(bits, magnitude));
            _mm512_storeu_si512(out + i, bits);
        }
        most = _mm512_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(most, 16));
    }
    const __m512i magnitude = _mm512_set1_epi32(S == kF32 ? 0x7FFFFFFF : 0x7FFF);
    for (; i < n; i += kLanes) {
        const __mmask16 mask = head_mask((int)std::min<long>(n - i, kLanes));
        const __m512i bits = bits16<S>(x + i, mask);
        most = _mm512_max_epu32(most, _mm512_and_si512(bits, magnitude));
        convert16<S, D>(bits, out + i, mask);
    }
    top = std::max(top, (uint32_t)_mm512_reduce_max_epu32(most));
}

// The largest magnitude's bits among n values, kept in `top`.
template <Element S>
inline void note_values(const typename Stored<S>::type* x, long n, uint32_t& top) {
    __m512i most = _mm512_setzero_si512();
    constexpr int kCount = 64 / (int)sizeof(*x);
    const __m512i magnitude = S == kF32 ? _mm512_set1_epi32(0x7FFFFFFF) : _mm512_set1_epi16(0x7FFF);
    for (long i = 0; i < n; i += kCount) {
        __m512i bits;
        if (n - i >= kCount) bits = _mm512_loadu_si512(x + i);
        else if constexpr (S == kF32) bits = _mm512_maskz_loadu_epi32(head_mask((int)(n - i)), x + i);
        else bits = _mm512_maskz_loadu_epi16(((__mmask32)1 << (n - i)) - 1, x + i);
        bits = _mm512_and_si512(bits, magnitude);
        most = S == kF32 ? _mm512_max_epu32(most, bits) : _mm512_max_epu16(most, bits);
    }
    if (S != kF32)
        most = _mm512_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0xFFFF)), _mm512_srli_epi32(most, 16));
    top = std::max(top, (uint32_t)_mm512_reduce_max_epu32(most));
}

// out[c · ldo + r] = x[r · ldx + c] for at most 16 rows and 16 columns.
inline void transpose16(const uint16_t* x, long ldx, int rows, int columns, uint16_t* out, long ldo) {
    __m256i a[16], b[16];
    const __mmask16 in = head_mask(columns), to = head_mask(rows);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) a[r] = r < rows ? _mm256_maskz_loadu_epi16(in, x + r * ldx) : _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[i] = _mm256_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[i + 8] = _mm256_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
    // b[i]: columns 0-3 (and 8-11) of rows 2i, 2i+1; b[i + 8]: columns 4-7 (and 12-15)
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int half = i / 4 * 8, pair = i % 4;
        a[half + pair] = _mm256_unpacklo_epi32(b[half + 2 * pair], b[half + 2 * pair + 1]);
        a[half + pair + 4] = _mm256_unpackhi_epi32(b[half + 2 * pair], b[half + 2 * pair + 1]);
    }
    // a[4j + p]: columns 2j, 2j+1 (and 8 further) of rows 4p … 4p+3
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) {
            b[4 * j + p] = _mm256_unpacklo_epi64(a[4 * j + 2 * p], a[4 * j + 2 * p + 1]);
            b[4 * j + 2 + p] = _mm256_unpackhi_epi64(a[4 * j + 2 * p], a[4 * j + 2 * p + 1]);
        }
    // b[2c + p]: column c (low half) and c + 8 (high half) of rows 8p … 8p+7
#pragma GCC unroll 8
    for (int c = 0; c < 8; c++) {
        if (c < columns)
            _mm256_mask_storeu_epi16(out + c * ldo, to, _mm256_permute2x128_si256(b[2 * c], b[2 * c + 1], 0x20));
        if (c + 8 < columns)
            _mm256_mask_storeu_epi16(out + (c + 8) * ldo, to, _mm256_permute2x128_si256(b[2 * c], b[2 * c + 1], 0x31));
    }
}

inline void transpose16(const float* x, long ldx, int rows, int columns, float* out, long ldo) {
    __m512 a[16], b[16];
    const __mmask16 in = head_mask(columns), to = head_mask(rows);
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) a[r] = r < rows ? _mm512_maskz_loadu_ps(in, x + r * ldx) : _mm512_setzero_ps();
    transpose16(a, b);
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++)
        if (c < columns) _mm512_mask_storeu_ps(out + c * ldo, to, b[c]);
}

class SlabRows {
   public:
    SlabRows(Element out, void* data) : out_(out), data_(data) {}

    // A's rows and Bᵀ's rows of one job. What lies between the rows stays as it is.
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
        if (side) transpose<S, D>(in, job.d_out, job.rank, out, job.slab_elems, top);
        else
            for (long r = 0; r < job.rank; r++)
                convert_values<S, D>(in + r * job.d_in, job.d_in, out + r * job.slab_elems, top);
        if (top >= limit<S, S>()) fault.fault = kNotFinite;
        else if (top >= limit<S, D>()) fault.fault = kBeyondRange;
        return fault.fault == kNone;
    }

    // out[c · ldo + r] = x[r · width + c], as many rows at a time as stay in the cache.
    template <Element S, Element D>
    static void transpose(const typename Stored<S>::type* x, long rows, long width, typename Stored<D>::type* out,
                          long ldo, uint32_t& top) {
        using Out = typename Stored<D>::type;
        const long most = std::max<long>(16, kChunkBytes / (width * (long)sizeof(*x)) / 16 * 16);
        thread_local std::vector<char> buffer;  // kept: the system clears fresh pages at some cost
        const size_t bytes = (size_t)std::min(most, rows) * width * sizeof(Out);
        if (S != D && buffer.size() < bytes) buffer.resize(bytes);
        for (long row = 0; row < rows; row += most) {
            const long count = std::min(most, rows - row);
            const Out* from;
            if constexpr (S == D) {
                from = x + row * width;
                note_values<S>(from, count * width, top);
            } else {
                from = (const Out*)buffer.data();
                convert_values<S, D>(x + row * width, count * width, (Out*)buffer.data(), top);
            }
            for (long c = 0; c < width; c += 16)
                for (long r = 0; r < count; r += 16)
                    transpose16(from + r * width + c, width, (int)std::min<long>(16, count - r),
                                (int)std::min<long>(16, width - c), out + c * ldo + row + r, ldo);
        }
    }

    Element out_;
    void* data_;
};

}  // namespace chorus

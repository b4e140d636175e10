// y[m, n] (+)= bias[n] + Σ_k x[m, k] · w[n, k] with w packed in panels of 32 output columns: [N/32][K/pair][32][pair].
//
// One packed copy serves decode (a few rows: the panel streams from memory once) and prefill (many rows: the panel
// stays in L2 while tiles of rows pass by).
#pragma once
#include <algorithm>
#include "gemm/operands.h"
#include "simd/simd.h"
#include "units.h"

namespace chorus {

constexpr int kPanel = 32;    // output columns of a panel
constexpr long kPrefetchBytes = 8192;
constexpr int kRowChunk = 192;  // rows: their activations stay in L2 while panels pass

template <class T> inline size_t panel_elems(int k) { return (size_t)k * kPanel; }

// More of the reduction dimension for the same outputs, from other memory: y += Σ_k x[m, k] · w[n, k].
template <class X>
struct Extra {
    Rows<const X> x;
    Panel<X> w;
};

// Weights that a pass over half a panel fetches for the passes over the next panel: a part of them each, so that memory is
// read all the while. step: bytes for each word of the reduction dimension.
struct Ahead {
    const char* at;
    long step;
};

// Addresses of a tile's rows: an address is a pointer and 1, 2, 4 or 8 times a register, so that the addresses of all
// rows take one register for each odd number below ROWS and no instruction. Left to itself, the compiler takes a
// pointer for each row, keeps what it has no register for in memory, and loads it once for every step.
template <int ROWS>
struct RowAddresses {
    long odd[(ROWS + 1) / 2];  // bytes to rows 1, 3, 5 …

    explicit RowAddresses(long row_bytes) {
#pragma GCC unroll 6
        for (int i = 0; i < (ROWS + 1) / 2; i++) {
            odd[i] = (2 * i + 1) * row_bytes;
            asm("" : "+r"(odd[i]));
        }
    }
    template <class X>
    CHORUS_INLINE const X* of(const X* x, int row) const {
        if (!row) return x;
        const int twos = __builtin_ctz(row);
        return (const X*)((const char*)x + (odd[(row >> twos) / 2] << twos));
    }
};

// acc[r][h] += Σ_k x[r, k] · w[16·h …, k] over WORDS words of the reduction dimension.
//
//   x      row 0, at the first word
//   rows   addresses of the other rows
//   w      the panel, at the first word
//   acc    sums
//   ahead  moved on by what is fetched
template <class T, int ROWS, int HALVES, bool FETCH, int WORDS>
CHORUS_INLINE void multiply_words(const Act<T>* x, const RowAddresses<ROWS>& rows, const T* w, Floats (*acc)[HALVES],
                                  Ahead& ahead) {
    using K = Kind<T>;
    using A = Kind<Act<T>>;
    if constexpr (FETCH && HALVES == 2) {
#pragma GCC unroll 4
        for (int i = 0; i < 2 * WORDS; i++) prefetch(w, kPrefetchBytes + 64 * i);
    } else if constexpr (FETCH) {
#pragma GCC unroll 2
        for (int i = 0; i < WORDS; i++) prefetch_later(ahead.at + i * ahead.step);
        ahead.at += WORDS * ahead.step;
    }
#pragma GCC unroll 4
    for (int s = 0; s < WORDS * K::steps; s++) {
        typename A::Reg weights[HALVES];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++)
            weights[h] = K::step(load_words(w + (s / K::steps * kPanel + h * kLanes) * K::pair), s % K::steps);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const auto b = A::broadcast(rows.of(x, r) + s * (K::pair / K::steps));
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) acc[r][h] = A::mac(acc[r][h], weights[h], b);
        }
    }
}

// acc[r][h] += Σ_k x[r, k] · w[16·h …, k], from the first k to the last.
//
//   x      [ROWS, k]
//   w      begins with the 16·HALVES columns that are multiplied
//   acc    sums
//   ahead  see Ahead; without FETCH nothing is fetched
template <class T, int ROWS, int HALVES, bool FETCH>
inline void multiply(Rows<const Act<T>> x, Panel<T> w, Floats (*acc)[HALVES], Ahead ahead = {}) {
    constexpr int step = kWords * Kind<T>::pair;
    const RowAddresses<ROWS> rows(x.stride * (long)sizeof(Act<T>));
    const Act<T>*at = x.data, *end = at + w.k / step * step;
    const T* panel = w.data;
    for (; at < end; at += step, panel += step * kPanel)
        multiply_words<T, ROWS, HALVES, FETCH, kWords>(at, rows, panel, acc, ahead);
    if (kWords > 1 && w.k % step) multiply_words<T, ROWS, HALVES, FETCH, 1>(at, rows, panel, acc, ahead);
}

// ROWS rows against HALVES times 16 columns of a panel. Not inline: heights beside each other in one function leave the
// compiler too few registers for each.
//
//   x      [ROWS, k]
//   w      begins with the tile's columns
//   out    begins with the tile's rows and columns
//   extra  begins with them, too; null: none
//   ahead  see Ahead
template <class T, int ROWS, int HALVES>
__attribute__((noinline)) void tile(Rows<const Act<T>> x, Panel<T> w, const Outputs& out, const Extra<Act<T>>* extra,
                                    Ahead ahead) {
    const Rows<float> y = out.y;
    Head heads[HALVES];
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) heads[h] = head(std::max(0, out.columns - h * kLanes));
    Floats acc[ROWS][HALVES];
#pragma GCC unroll 24
    for (int i = 0; i < ROWS * HALVES; i++) acc[i / HALVES][i % HALVES] = floats(0);
    if (out.accumulate)
#pragma GCC unroll 24
        for (int i = 0; i < ROWS * HALVES; i++)
            acc[i / HALVES][i % HALVES] = load16(y[i / HALVES] + i % HALVES * kLanes, heads[i % HALVES]);
    if (out.bias)
#pragma GCC unroll 24
        for (int i = 0; i < ROWS * HALVES; i++)
            acc[i / HALVES][i % HALVES] =
                acc[i / HALVES][i % HALVES] + load16(out.bias + i % HALVES * kLanes, heads[i % HALVES]);
    multiply<T, ROWS, HALVES, true>(x, w, acc, ahead);
    if (extra) multiply<Act<T>, ROWS, HALVES, false>(extra->x, extra->w, acc);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++)
            if (!h || bits(heads[h])) store16(y[r] + h * kLanes, acc[r][h], heads[h]);
}

// Another thread may have written them: the product would wait for them before its first step.
inline void fetch_outputs(Rows<float> y, int rows) {
    for (int r = 0; r < rows; r++) {
        prefetch(y[r]);
        prefetch(y[r] + kLanes);
    }
}

// out (+)= x · wᵀ + bias (+ extra): all rows against one panel, in tiles of about equal height, as a tile of few rows takes
// as long as one of some more.
//
//   x      [rows, k]
//   w      a panel
//   out    [rows, columns]
//   extra  added as well; null: none
//   more   the panel behind this one comes next, and is fetched meanwhile
template <class T>
void panel_gemm(Rows<const Act<T>> x, int rows, Panel<T> w, Outputs out, const Extra<Act<T>>* extra = nullptr,
                bool more = false) {
    constexpr int pair = Kind<T>::pair;
    constexpr long word = kPanel * pair * sizeof(T);
    Extra<Act<T>> here{};
    if (extra) here.x = extra->x, here.w.k = extra->w.k;
    int tiles = (rows + kRows - 1) / kRows;
    const long step = more ? word / (2 * tiles) : 0;
    Ahead ahead{(const char*)(more ? w.data + panel_elems<T>(w.k) : w.data), step};
    for (; tiles > 0; tiles--) {
        const int height = (rows + tiles - 1) / tiles;
        if (out.accumulate) fetch_outputs(out.y.from(height), std::min(height, rows - height));
        with_number<kRows>(height, [&](auto n) {
            constexpr int halves = n() <= kWideRows ? 2 : 1;  // of the panel in registers at once
            for (int c = 0; c < out.columns; c += halves * kLanes, ahead.at += step * (w.k / pair)) {
                if (extra) here.w.data = extra->w.data + c * Kind<Act<T>>::pair;
                tile<T, n(), halves>(x, {w.data + c * pair, w.k}, out.from(0, c), extra ? &here : nullptr, ahead);
            }
        });
        rows -= height, x = x.from(height), out = out.from(height), here.x = here.x.from(height);
    }
}

CHORUS_UNIT_PRODUCTS void panel_gemm<float>(Rows<const float>, int, Panel<float>, Outputs, const Extra<float>*, bool);
CHORUS_UNIT_PRODUCTS void panel_gemm<bf16>(Rows<const Act<bf16>>, int, Panel<bf16>, Outputs, const Extra<Act<bf16>>*,
                                           bool);

}  // namespace chorus

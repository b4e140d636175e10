// Norm, rotary embedding and gated activation of one token.
#pragma once
#include "simd.h"

namespace chorus {

// out = x / sqrt(mean(x²) + eps) · weight
//
//   x, out  [n]; may be the same
//   weight  [n] float32
//   n       elements
template <class T>
inline void rms_norm(const float* x, const float* weight, int n, float eps, T* out) {
    Floats squares = floats(0);
    for (int i = 0; i < n; i += kLanes) {
        const Floats v = load16(x + i, head(n - i));
        squares = fma(v, v, squares);
    }
    const Floats factor = floats(1.0f / __builtin_sqrtf(sum(squares) / n + eps));
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(out + i, load16(x + i, here) * factor * load16(weight + i, here), here);
    }
}

// Rotate one head, half-split form.
//
//   x, out    [head_dim]; may be the same
//   cos, sin  [head_dim] float32: of the token's position
template <class Out>
inline void rotate(const float* x, const float* cos, const float* sin, int head_dim, Out* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += kLanes) {
        const Head here = head(half - i);
        const Floats a = load16(x + i, here), b = load16(x + half + i, here);
        const Floats c0 = load16(cos + i, here), s0 = load16(sin + i, here);
        const Floats c1 = load16(cos + half + i, here), s1 = load16(sin + half + i, here);
        store16(out + i, fms(a, c0, b * s0), here);
        store16(out + half + i, fma(b, c1, a * s1), here);
    }
}

// Copy n elements, rounded to the type of `out`.
template <class In, class Out>
inline void convert(const In* x, int n, Out* out) {
    for (int i = 0; i < n; i += kLanes) store16(out + i, load16(x + i, head(n - i)), head(n - i));
}

// out = silu(gate) · up
//
//   gate, up  [n] float32
//   n         elements
//   out       [n]
template <class T>
inline void silu_and_mul(const float* gate, const float* up, int n, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats g = load16(gate + i, here);
        const Floats e = exp16(min(floats(88.0f), floats(0) - g));
        store16(out + i, g / (floats(1.0f) + e) * load16(up + i, here), here);
    }
}

}  // namespace chorus

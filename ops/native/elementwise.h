// Norm, rotary embedding and gated activation of one token.
#pragma once
#include "simd.h"

namespace chorus {

// out = x / sqrt(mean(x²) + eps) · weight
template <class T>
inline void rms_norm(const float* x, const float* weight, int n, float eps, T* out) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < n; i += kLanes) {
        const __m512 v = load16(x + i, head_mask(n - i));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / n + eps));
    for (int i = 0; i < n; i += kLanes) {
        const __mmask16 mask = head_mask(n - i);
        store16(out + i, _mm512_mul_ps(_mm512_mul_ps(load16(x + i, mask), factor), load16(weight + i, mask)), mask);
    }
}

// Rotate one head, half-split form; x and out may be the same.
template <class Out>
inline void rotate(const float* x, const float* cos, const float* sin, int head_dim, Out* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i += kLanes) {
        const __mmask16 mask = head_mask(half - i);
        const __m512 a = load16(x + i, mask), b = load16(x + half + i, mask);
        const __m512 c0 = load16(cos + i, mask), s0 = load16(sin + i, mask);
        const __m512 c1 = load16(cos + half + i, mask), s1 = load16(sin + half + i, mask);
        store16(out + i, _mm512_fmsub_ps(a, c0, _mm512_mul_ps(b, s0)), mask);
        store16(out + half + i, _mm512_fmadd_ps(b, c1, _mm512_mul_ps(a, s1)), mask);
    }
}

template <class In, class Out>
inline void convert(const In* x, int n, Out* out) {
    for (int i = 0; i < n; i += kLanes) store16(out + i, load16(x + i, head_mask(n - i)), head_mask(n - i));
}

// out = silu(gate) · up
template <class T>
inline void silu_and_mul(const float* gate, const float* up, int n, T* out) {
    const __m512 one = _mm512_set1_ps(1.0f), most = _mm512_set1_ps(88.0f);
    for (int i = 0; i < n; i += kLanes) {
        const __mmask16 mask = head_mask(n - i);
        const __m512 g = load16(gate + i, mask);
        const __m512 e = exp16(_mm512_min_ps(most, _mm512_sub_ps(_mm512_setzero_ps(), g)));
        store16(out + i, _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), load16(up + i, mask)), mask);
    }
}

}  // namespace chorus

// Norms, rotary embedding, gated activations and factors of one token.
#pragma once
#include <algorithm>
#include "simd/simd.h"

namespace chorus {

// Σ x²
inline float sum_of_squares(const float* x, int n) {
    Floats squares = floats(0);
    for (int i = 0; i < n; i += kLanes) {
        const Floats v = load16(x + i, head(n - i));
        squares = fma(v, v, squares);
    }
    return sum(squares);
}

// out = x / sqrt(mean + eps) · weight
//
//   x, out  [n]; may be the same
//   weight  [n] float32
//   n       elements
//   mean    of the squares of all elements that are normalised together
template <class T>
inline void scale_to_norm(const float* x, const float* weight, int n, float mean, float eps, T* out) {
    const Floats factor = floats(1.0f / __builtin_sqrtf(mean + eps));
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(out + i, load16(x + i, here) * factor * load16(weight + i, here), here);
    }
}

// out = x / sqrt(mean(x²) + eps) · weight; parameters as above
template <class T>
inline void rms_norm(const float* x, const float* weight, int n, float eps, T* out) {
    scale_to_norm(x, weight, n, sum_of_squares(x, n) / n, eps, out);
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) · weight + bias; bias: [n] float32, or null; other parameters as above
template <class T>
inline void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, T* out) {
    Floats all = floats(0), squares = floats(0);
    for (int i = 0; i < n; i += kLanes) all = all + load16(x + i, head(n - i));
    const Floats mean = floats(sum(all) / n);
    for (int i = 0; i < n; i += kLanes) {
        const Floats v = keep(load16(x + i, head(n - i)) - mean, head(n - i), floats(0));
        squares = fma(v, v, squares);
    }
    const Floats factor = floats(1.0f / __builtin_sqrtf(sum(squares) / n + eps));
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats v = (load16(x + i, here) - mean) * factor * load16(weight + i, here);
        store16(out + i, bias ? v + load16(bias + i, here) : v, here);
    }
}

// What a norm computes: as Python's NormKind, by name.
#define NORM_KINDS(EACH)   \
    EACH(NormKind, kRms)   \
    EACH(NormKind, kLayer) \
    EACH(NormKind, kBiasedLayer)  // a weight's bias lies behind it

#define NAME(Enum, name) name,
enum class NormKind : int32_t { NORM_KINDS(NAME) };
#undef NAME

template <class T>
inline void run_norm(NormKind kind, const float* x, const float* weight, int n, float eps, T* out) {
    switch (kind) {
        case NormKind::kRms: return rms_norm(x, weight, n, eps, out);
        case NormKind::kLayer: return layer_norm(x, weight, nullptr, n, eps, out);
        case NormKind::kBiasedLayer: return layer_norm(x, weight, weight + n, n, eps, out);
    }
}

// Rotate elements i and i + dim / 2 together.
//
//   x, out    [dim]; may be the same
//   cos, sin  [dim] float32: of the token's position
template <class Out>
inline void rotate_halves(const float* x, const float* cos, const float* sin, int dim, Out* out) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += kLanes) {
        const Head here = head(half - i);
        const Floats a = load16(x + i, here), b = load16(x + half + i, here);
        const Floats c0 = load16(cos + i, here), s0 = load16(sin + i, here);
        const Floats c1 = load16(cos + half + i, here), s1 = load16(sin + half + i, here);
        store16(out + i, fms(a, c0, b * s0), here);
        store16(out + half + i, fma(b, c1, a * s1), here);
    }
}

// Rotate elements 2i and 2i + 1 together; parameters as above
template <class Out>
inline void rotate_pairs(const float* x, const float* cos, const float* sin, int dim, Out* out) {
    for (int i = 0; i < dim; i += kLanes) {
        const Head here = head(dim - i);
        float other[kLanes] = {};
        for (int j = 0; j < std::min(kLanes, dim - i); j += 2) other[j] = -x[i + j + 1], other[j + 1] = x[i + j];
        store16(out + i, fma(load16(x + i, here), load16(cos + i, here), load16(other) * load16(sin + i, here)), here);
    }
}

// Copy n elements, rounded to the type of `out`.
template <class In, class Out>
inline void convert(const In* x, int n, Out* out) {
    for (int i = 0; i < n; i += kLanes) store16(out + i, load16(x + i, head(n - i)), head(n - i));
}

// A position's angles.
//
//   cos, sin     [dim] float32
//   dim          leading elements of a head that are rotated; the others are kept
//   interleaved  elements 2i and 2i + 1 together, rather than i and i + dim / 2
struct Rotation {
    const float *cos, *sin;
    int dim;
    bool interleaved;

    // x, out: [head_dim], apart
    template <class Out>
    void run(const float* x, int head_dim, Out* out) const {
        if (interleaved) rotate_pairs(x, cos, sin, dim, out);
        else rotate_halves(x, cos, sin, dim, out);
        convert(x + dim, head_dim - dim, out + dim);
    }
};

// out = x · weight, element by element
template <class T>
inline void multiply_each(const float* x, const float* weight, int n, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(out + i, load16(x + i, here) * load16(weight + i, here), here);
    }
}

// out = factor · x; parameters as above
template <class T>
inline void multiply(const float* x, float factor, int n, T* out) {
    for (int i = 0; i < n; i += kLanes) store16(out + i, load16(x + i, head(n - i)) * floats(factor), head(n - i));
}

// x = factor · x
inline void scale_by(float* x, int n, float factor) { multiply(x, factor, n, x); }

// out = x + y
template <class T>
inline void sum(const float* x, const float* y, int n, T* out) {
    for (int i = 0; i < n; i += kLanes)
        store16(out + i, load16(x + i, head(n - i)) + load16(y + i, head(n - i)), head(n - i));
}

// x += factor · y
inline void add_scaled(const float* y, int n, float factor, float* x) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(x + i, load16(x + i, here) + load16(y + i, here) * floats(factor), here);
    }
}

// x becomes at least -limit and at most limit.
inline void clip_each(float* x, int n, float limit) {
    const Floats most = floats(limit), least = floats(-limit);
    for (int i = 0; i < n; i += kLanes) store16(x + i, max(least, min(most, load16(x + i, head(n - i)))), head(n - i));
}

// x = softcap · tanh(factor · x / softcap)
inline void cap(float* x, int n, float factor, float softcap) {
    const Floats inner = floats(factor / softcap), outer = floats(softcap);
    for (int i = 0; i < n; i += kLanes) store16(x + i, outer * tanh16(load16(x + i, head(n - i)) * inner), head(n - i));
}

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 · atanh(u / (2 + u)), whose series in steps of at
// most 1/9 takes eight terms.
inline Floats softplus16(Floats x) {
    const Floats u = exp16(floats(0) - as_floats(as_words(x) & words(0x7FFFFFFF)));
    const Floats s = u / (u + floats(2.0f)), squared = s * s;
    Floats p = floats(2.0f / 15);
    p = fma(p, squared, floats(2.0f / 13));
    p = fma(p, squared, floats(2.0f / 11));
    p = fma(p, squared, floats(2.0f / 9));
    p = fma(p, squared, floats(2.0f / 7));
    p = fma(p, squared, floats(2.0f / 5));
    p = fma(p, squared, floats(2.0f / 3));
    p = fma(p, squared, floats(2.0f));
    return fma(p, s, max(floats(0), x));  // this order lets NaN through
}

// 1 / (1 + e^-x)
inline Floats sigmoid16(Floats x) { return floats(1.0f) / (floats(1.0f) + exp16(min(floats(88.0f), floats(0) - x))); }

// x / (1 + e^-x)
inline Floats silu16(Floats x) { return x / (floats(1.0f) + exp16(min(floats(88.0f), floats(0) - x))); }

// out = silu(gate) · up
//
//   gate, up  [n] float32
//   n         elements
//   out       [n]
template <class T>
inline void silu_and_mul(const float* gate, const float* up, int n, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(out + i, silu16(load16(gate + i, here)) * load16(up + i, here), here);
    }
}

// gelu(x) by tanh: x/2 · (1 + tanh(u)) = x / (1 + e^(-2u)) with u = sqrt(2/π) · (x + 0.044715 x³)
inline Floats gelu16(Floats x) {
    const Floats u = x * fma(x * x, floats(0.0713548162726f), floats(1.59576912160573f));
    return x / (floats(1.0f) + exp16(min(floats(88.0f), floats(0) - u)));
}

// out = gelu(gate) · up; parameters as above
template <class T>
inline void gelu_and_mul(const float* gate, const float* up, int n, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(out + i, gelu16(load16(gate + i, here)) * load16(up + i, here), here);
    }
}

// Φ(x), of the standard normal distribution: the tail beyond |x| by Abramowitz and Stegun's 7.1.26, to 1e-7.
inline Floats normal16(Floats x) {
    const Words sign = as_words(x) & words(0x80000000);
    const Floats z = as_floats(as_words(x) & words(0x7FFFFFFF)) * floats(0.70710678118654752f);
    const Floats t = floats(1.0f) / fma(z, floats(0.3275911f), floats(1.0f));
    Floats p = floats(1.061405429f);
    p = fma(p, t, floats(-1.453152027f));
    p = fma(p, t, floats(1.421413741f));
    p = fma(p, t, floats(-0.284496736f));
    p = fma(p, t, floats(0.254829592f));
    const Floats near = min(floats(9.0f), z);  // e^-81 is 0 beside 1; this order lets NaN through
    const Floats half = max(floats(0), floats(0.5f) - floats(0.5f) * p * t * exp16(floats(0) - near * near));
    return floats(0.5f) + as_floats(as_words(half) | sign);
}

// out = gate · Φ(gate) · up; parameters as above
template <class T>
inline void gelu_by_erf_and_mul(const float* gate, const float* up, int n, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats g = load16(gate + i, here);
        store16(out + i, g * normal16(g) * load16(up + i, here), here);
    }
}

// out = max(gate, 0)² · up; parameters as above
template <class T>
inline void relu_squared_and_mul(const float* gate, const float* up, int n, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats g = max(floats(0), load16(gate + i, here));  // this order lets NaN through
        store16(out + i, g * g * load16(up + i, here), here);
    }
}

// x · sigmoid(gate), with one gate of all
//
//   x  [n]: changed
template <class T>
inline void apply_gate_of_all(float gate, int n, T* x) {
    const Floats e = exp16(min(floats(88.0f), floats(-gate)));
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(x + i, load16(x + i, here) / (floats(1.0f) + e), here);
    }
}

// x · sigmoid(gate)
//
//   gate  [n] float32
//   x     [n]: changed
template <class T>
inline void apply_gate(const float* gate, int n, T* x) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats e = exp16(min(floats(88.0f), floats(0) - load16(gate + i, here)));
        store16(x + i, load16(x + i, here) / (floats(1.0f) + e), here);
    }
}

// x · log(1 + e^gate), likewise.
template <class T>
inline void apply_softplus_of_all(float gate, int n, T* x) {
    const Floats by = softplus16(floats(gate));
    for (int i = 0; i < n; i += kLanes) store16(x + i, load16(x + i, head(n - i)) * by, head(n - i));
}
template <class T>
inline void apply_softplus(const float* gate, int n, T* x) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(x + i, load16(x + i, here) * softplus16(load16(gate + i, here)), here);
    }
}

// out = (up + 1) · gate · sigmoid(alpha · gate), with gate at most `limit` and up within ± limit; other parameters as of
// silu_and_mul
template <class T>
inline void clamped_swiglu(const float* gate, const float* up, int n, float alpha, float limit, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats g = min(floats(limit), load16(gate + i, here));  // this order lets NaN through
        const Floats u = max(floats(-limit), min(floats(limit), load16(up + i, here)));
        const Floats e = exp16(min(floats(88.0f), g * floats(-alpha)));
        store16(out + i, (u + floats(1.0f)) * (g / (floats(1.0f) + e)), here);
    }
}

// out = silu(min(gate, limit)) · up, with up within ± limit; other parameters as of silu_and_mul
template <class T>
inline void limited_swiglu(const float* gate, const float* up, int n, float limit, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats g = min(floats(limit), load16(gate + i, here));  // this order lets NaN through
        store16(out + i, silu16(g) * max(floats(-limit), min(floats(limit), load16(up + i, here))), here);
    }
}

// out = min(silu(gate), limit) · up, likewise
template <class T>
inline void bounded_swiglu(const float* gate, const float* up, int n, float limit, T* out) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        const Floats g = min(floats(limit), silu16(load16(gate + i, here)));
        store16(out + i, g * max(floats(-limit), min(floats(limit), load16(up + i, here))), here);
    }
}

// Of a gate; then those without one.
enum Activation : int32_t {
    kSilu,
    kGelu,
    kReluSquaredGate,
    kGeluByErfGate,
    kClampedSwiglu,
    kLimitedSwiglu,
    kBoundedSwiglu,
    kGeluAlone,
    kGeluByErf,
    kReluSquared,
    kXielu,
    kRelu
};

inline bool is_gated(Activation activation) { return activation < kGeluAlone; }

// What becomes of a gate and what it multiplies. alpha, limit: of those activations that have them.
struct Gating {
    Activation activation;
    float alpha, limit;
};

// The activation has a gate.
template <class T>
inline void activate(const Gating& it, const float* gate, const float* up, int n, T* out) {
    switch (it.activation) {
        case kGelu: return gelu_and_mul(gate, up, n, out);
        case kReluSquaredGate: return relu_squared_and_mul(gate, up, n, out);
        case kGeluByErfGate: return gelu_by_erf_and_mul(gate, up, n, out);
        case kClampedSwiglu: return clamped_swiglu(gate, up, n, it.alpha, it.limit, out);
        case kLimitedSwiglu: return limited_swiglu(gate, up, n, it.limit, out);
        case kBoundedSwiglu: return bounded_swiglu(gate, up, n, it.limit, out);
        default: return silu_and_mul(gate, up, n, out);
    }
}

}  // namespace chorus

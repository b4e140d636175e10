// Activations of feed-forward parts without a gate; the arithmetic of ops/elementwise/activations.py and ops/elementwise/elementwise.py.
#pragma once
#include <cmath>
#include "elementwise/elementwise.h"

namespace chorus {

// xIELU: a·x² + beta·x above 0, (e^min(x, eps) - 1 - x)·b + beta·x below.
struct Xielu {
    float above, below, beta, eps;

    // parameters: [4]: what softplus makes a of, the same of b less beta, beta, and eps
    explicit Xielu(const float* parameters)
        : above(softplus(parameters[0])),
          below(parameters[2] + softplus(parameters[1])),
          beta(parameters[2]),
          eps(parameters[3]) {}

    Floats operator()(Floats x) const {
        const Floats up = max(floats(0), x), down = x - up;  // one of them is 0
        // 1 below 0, else 0: also there the exponential is that of eps at most, which is below 0
        const Floats is_below = min(floats(1.0f), max(floats(0), x * floats(-3e38f)));
        const Floats curved = (expm1_16(min(floats(eps), x)) - down) * is_below * floats(below);
        return fma(up * up, floats(above), curved) + x * floats(beta);
    }

   private:
    static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
};

// out = each(x) of sixteen elements at a time
//
//   x    [n] float32
//   out  [n]
template <class T, class Each>
inline void map16(const float* x, int n, T* out, Each each) {
    for (int i = 0; i < n; i += kLanes) {
        const Head here = head(n - i);
        store16(out + i, each(load16(x + i, here)), here);
    }
}

// out = activation(x), of one without a gate; xielu: its parameters, else unused
template <class T>
inline void activate_alone(Activation activation, const float* xielu, const float* x, int n, T* out) {
    const Floats zero = floats(0);
    switch (activation) {
        case kGeluAlone: return map16(x, n, out, [&](Floats v) { return gelu16(v); });
        case kGeluByErf: return map16(x, n, out, [&](Floats v) { return v * normal16(v); });
        case kXielu: return map16(x, n, out, Xielu(xielu));
        case kRelu: return map16(x, n, out, [&](Floats v) { return max(zero, v); });
        default:  // kReluSquared
            return map16(x, n, out, [&](Floats v) {
                const Floats up = max(zero, v);
                return up * up;
            });
    }
}

}  // namespace chorus

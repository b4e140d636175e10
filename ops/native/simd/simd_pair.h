// Vectors of sixteen lanes made of halves, for levels with shorter registers. A level defines everything for one
// register first; what is here does it for both halves.
#pragma once
#include <algorithm>
#include <type_traits>
#include "simd/lanes.h"

namespace chorus {

template <class H>
struct Pair {
    H low, high;
};

#define CHORUS_OPERATOR(op)                                                 \
    template <class H>                                                      \
    CHORUS_INLINE Pair<H> operator op(const Pair<H>& a, const Pair<H>& b) { \
        return {a.low op b.low, a.high op b.high};                          \
    }
CHORUS_OPERATOR(+)
CHORUS_OPERATOR(-)
CHORUS_OPERATOR(*)
CHORUS_OPERATOR(/)
CHORUS_OPERATOR(&)
CHORUS_OPERATOR(|)
#undef CHORUS_OPERATOR
template <class H> CHORUS_INLINE Pair<H> operator<<(const Pair<H>& a, int bits) {
    return {a.low << bits, a.high << bits};
}
template <class H> CHORUS_INLINE Pair<H> operator>>(const Pair<H>& a, int bits) {
    return {a.low >> bits, a.high >> bits};
}

// Functions of one, two and three vectors.
#define CHORUS_ONE(f)                                                                       \
    template <class H> CHORUS_INLINE auto f(const Pair<H>& a) -> Pair<decltype(f(a.low))> { \
        return {f(a.low), f(a.high)};                                                       \
    }
#define CHORUS_TWO(f)                                                                \
    template <class H> CHORUS_INLINE Pair<H> f(const Pair<H>& a, const Pair<H>& b) { \
        return {f(a.low, b.low), f(a.high, b.high)};                                 \
    }
#define CHORUS_THREE(f)                                                                                \
    template <class H> CHORUS_INLINE Pair<H> f(const Pair<H>& a, const Pair<H>& b, const Pair<H>& c) { \
        return {f(a.low, b.low, c.low), f(a.high, b.high, c.high)};                                    \
    }
CHORUS_ONE(as_floats)
CHORUS_ONE(as_words)
CHORUS_ONE(round)
CHORUS_ONE(from_half)
CHORUS_ONE(from_ints)
CHORUS_ONE(to_ints)
CHORUS_ONE(to_half)
CHORUS_ONE(widen_first)
CHORUS_ONE(widen_second)
CHORUS_TWO(max)
CHORUS_TWO(min)
CHORUS_TWO(max16)
CHORUS_TWO(scale2)
CHORUS_TWO(zip_low)
CHORUS_TWO(zip_high)
CHORUS_TWO(zip_low2)
CHORUS_TWO(zip_high2)
CHORUS_THREE(fma)
CHORUS_THREE(mac16)
CHORUS_THREE(fms)
CHORUS_THREE(fnma)
CHORUS_THREE(scale2)
#undef CHORUS_ONE
#undef CHORUS_TWO
#undef CHORUS_THREE

template <int BITS, class H> CHORUS_INLINE Pair<H> down16(const Pair<H>& v) {
    return {down16<BITS>(v.low), down16<BITS>(v.high)};
}
template <class H> CHORUS_INLINE void in_register(Pair<H>& v) { in_register(v.low), in_register(v.high); }

template <class V> constexpr int lanes_of(const V&) { return sizeof(V) / 4; }
template <class V> constexpr int doubles_of(const V&) { return sizeof(V) / 8; }

template <class E, class H> CHORUS_INLINE void fill(E x, Pair<H>& v) { fill(x, v.low), fill(x, v.high); }
// Elements may be narrower than lanes; words of any memory are as many bytes as lanes.
template <class E, class H> CHORUS_INLINE void load(const E* p, Pair<H>& v) {
    load(p, v.low), load(p + lanes_of(v.low), v.high);
}
template <class H> CHORUS_INLINE void load(const double* p, Pair<H>& v) {
    load(p, v.low), load(p + doubles_of(v.low), v.high);
}
template <class E, class H> CHORUS_INLINE void store(E* p, const Pair<H>& v) {
    store(p, v.low), store(p + lanes_of(v.low), v.high);
}
template <class H> CHORUS_INLINE void stream(float* p, const Pair<H>& v) {
    stream(p, v.low), stream(p + lanes_of(v.low), v.high);
}
template <class H> CHORUS_INLINE void store(double* p, const Pair<H>& v) {
    store(p, v.low), store(p + doubles_of(v.low), v.high);
}

// Number of the first lanes that are meant.
struct Head {
    int count;
};
inline Head head(int count) { return {count}; }
inline unsigned bits(Head h) { return h.count >= kLanes ? 0xFFFF : (1u << h.count) - 1; }

// Only the head's elements are read, 0 beyond, or written: through memory, since what is beyond may not be there.
template <class E, class V> CHORUS_INLINE void load(const E* p, Head h, V& v) {
    constexpr int most = std::is_same_v<E, double> ? 8 : kLanes;
    if (__builtin_expect(h.count >= most, 1)) return load(p, v);
    E elements[most] = {};
    memcpy(elements, p, std::max(0, h.count) * sizeof(E));
    load(elements, v);
}
template <class E, class V> CHORUS_INLINE void store(E* p, const V& v, Head h) {
    constexpr int most = std::is_same_v<E, double> ? 8 : kLanes;
    if (__builtin_expect(h.count >= most, 1)) return store(p, v);
    E elements[most];
    store(elements, v);
    memcpy(p, elements, std::max(0, h.count) * sizeof(E));
}
template <class V> inline V keep(const V& v, Head h, const V& other) {
    if (h.count >= kLanes) return v;
    float elements[kLanes], others[kLanes];
    store(elements, v), store(others, other);
    for (int i = std::max(0, h.count); i < kLanes; i++) elements[i] = others[i];
    V out;
    load(elements, out);
    return out;
}
template <class E, class H> CHORUS_INLINE void load_two(const E* one, const E* other, int count, Pair<H>& v) {
    if (count >= kLanes / 2) return load(one, v.low), load(other, v.high);
    E elements[kLanes] = {};
    memcpy(elements, one, count * sizeof(E)), memcpy(elements + kLanes / 2, other, count * sizeof(E));
    load(elements, v);
}

template <class H> CHORUS_INLINE Pair<H> where_not_below(const Pair<H>& a, const Pair<H>& b, const Pair<H>& yes,
                                                         const Pair<H>& no) {
    return {where_not_below(a.low, b.low, yes.low, no.low), where_not_below(a.high, b.high, yes.high, no.high)};
}
#define CHORUS_COMPARE(f)                                                             \
    template <class H> CHORUS_INLINE unsigned f(const Pair<H>& a, const Pair<H>& b) { \
        return f(a.low, b.low) | f(a.high, b.high) << lanes_of(a.low);                \
    }
CHORUS_COMPARE(below)
CHORUS_COMPARE(not_above)
CHORUS_COMPARE(equal)
#undef CHORUS_COMPARE

// In the order of every level: halves are added lane by lane down to one.
template <class H> CHORUS_INLINE auto sum(const Pair<H>& v) { return sum(v.low + v.high); }
template <class H> CHORUS_INLINE auto largest(const Pair<H>& v) { return largest(max(v.low, v.high)); }

template <class H> CHORUS_INLINE Pair<H> sixteenth(const double* table, const Pair<H>& count) {
    return {sixteenth(table, count.low), sixteenth(table, count.high)};
}

// The lanes of `which`, side by side; beyond them anything may be written, as far as a whole vector.
template <class E, class V> inline void pack_lanes(E* p, const V& v, unsigned which) {
    E elements[kLanes];
    store(elements, v);
    for (; which; which &= which - 1) *p++ = elements[__builtin_ctz(which)];
}

}  // namespace chorus

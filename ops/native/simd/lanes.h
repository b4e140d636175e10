// What every level's vectors have in common: sixteen lanes of 32 bits, in the same order.
#pragma once
#include <cstdint>
#include <cstring>

#define CHORUS_INLINE inline __attribute__((always_inline))
#define CHORUS_INLINED __attribute__((always_inline))  // of a lambda

namespace chorus {

constexpr int kLanes = 16;  // of a vector: a 512-bit register, or several shorter ones

using bf16 = uint16_t;

inline float widen(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline float widen(float v) { return v; }

// Weights are streamed faster than out-of-order execution alone looks ahead: eight rows' products fill its window after
// some 2 KB. Reading beyond an allocation's end is harmless for a prefetch. An intrinsic will not do: GCC takes a function
// that does nothing but prefetch for one without effects, and where it is not inlined, leaves its calls out.
inline void prefetch(const void* p, long ahead_bytes = 0) {
#ifdef __x86_64__
    asm volatile("prefetcht0 %a0" : : "p"((const char*)p + ahead_bytes));
#else
    asm volatile("prfm pldl1keep, %a0" : : "p"((const char*)p + ahead_bytes));
#endif
}

// The same into the second-level cache: what is needed only when others have passed through the first.
inline void prefetch_later(const void* p) {
#ifdef __x86_64__
    asm volatile("prefetcht1 %a0" : : "p"(p));
#else
    asm volatile("prfm pldl2keep, %a0" : : "p"(p));
#endif
}

// Order what was streamed past the caches before what is stored from now on.
inline void end_streams() {
#ifdef __x86_64__
    asm volatile("sfence" : : : "memory");
#endif
}

// Let the processor's other thread run while this one waits for memory to change.
inline void relax() {
#ifdef __x86_64__
    asm volatile("pause");
#else
    asm volatile("yield");
#endif
}

}  // namespace chorus

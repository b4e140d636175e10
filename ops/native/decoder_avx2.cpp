// The library for processors with AVX2, FMA and F16C.
#ifdef __x86_64__
#include "supported.h"
CHORUS_SUPPORTED(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))

#pragma GCC target("avx2,fma,f16c,bmi2")
#include "simd/simd_avx2.h"
#include "library.h"
#endif

// The library for processors with AVX-512 (F, BW, VL, DQ).
#ifdef __x86_64__
#include "supported.h"
CHORUS_SUPPORTED(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2")
#include "simd/simd_avx512.h"
#include "library.h"
#endif

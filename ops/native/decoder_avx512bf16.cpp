// The library for processors with AVX-512 (F, BW, VL, DQ) and its products of bf16 and of integers (VNNI): processors with the
// first have the second.
#ifdef __x86_64__
#include "supported.h"
CHORUS_SUPPORTED(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,bmi2")
#define CHORUS_BF16
#include "simd/simd_avx512.h"
#include "library.h"
#endif

// The library for processors with tile registers (AMX-BF16) beside AVX-512 and its products of bf16.
#ifdef __x86_64__
#include <sys/syscall.h>
#include <unistd.h>
#include "supported.h"

namespace chorus {
[[maybe_unused]] static bool tiles_work();

// Linux saves tiles for a process that asked for it: ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA.
[[maybe_unused]] static bool permitted() { return !syscall(SYS_arch_prctl, 0x1023, 18); }
}  // namespace chorus

CHORUS_SUPPORTED(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                 __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && chorus::permitted() &&
                 chorus::tiles_work())

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16,avx2,fma,bmi2")
#define CHORUS_BF16
#define CHORUS_AMX
#include "simd/simd_avx512.h"
#include "library.h"

// An emulator, or a system that loses tiles when threads change, is found out here.
static bool chorus::tiles_work() { return tiles_are_exact<AmxTiles>(); }
#endif

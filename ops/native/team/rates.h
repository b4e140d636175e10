// What threads could do at best with the level's instructions: kernels are held against it by section `levels` of perf/bench.
#pragma once
#include <chrono>
#include "gemm/gemm.h"
#include "team/pool.h"

namespace chorus {

// Seconds in which all threads together run work(member).
template <class Work>
inline double seconds_of(Team& team, Work work) {
    team.run([](Team::Member&) {});  // they are awake
    const auto began = std::chrono::steady_clock::now();
    team.run(work);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Bytes per second that threads read from memory, each a part of it.
//
//   team    threads
//   memory  [bytes]
inline double read_rate(Team& team, const char* memory, int64_t bytes) {
    const int64_t part = bytes / team.size() / 256 * 256;
    const double seconds = seconds_of(team, [&](Team::Member& me) {
        Words seen[4] = {words(0), words(0), words(0), words(0)};
        const char* from = memory + part * me.thread;
        for (int64_t at = 0; at < part; at += 256)
            for (int i = 0; i < 4; i++) {
                prefetch(from + at + 64 * i, kPrefetchBytes);
                seen[i] = seen[i] | load_words(from + at + 64 * i);
            }
        volatile uint32_t most = largest((seen[0] | seen[1]) | (seen[2] | seen[3]));
        (void)most;
    });
    return part * team.size() / seconds;
}

// The same, where threads read and write each byte, in place; both count.
inline double update_rate(Team& team, char* memory, int64_t bytes) {
    const int64_t part = bytes / team.size() / 256 * 256;
    const double seconds = seconds_of(team, [&](Team::Member& me) {
        char* from = memory + part * me.thread;
        for (int64_t at = 0; at < part; at += 256)
            for (int i = 0; i < 4; i++) {
                prefetch(from + at + 64 * i, kPrefetchBytes);
                auto* here = (uint32_t*)(from + at + 64 * i);
                store(here, load_words(here) | words(1));
            }
    });
    return 2 * part * team.size() / seconds;
}

#ifdef CHORUS_AMX
// The same of tiles.
inline double tiles_rate(Team& team, int64_t rounds) {
    const double seconds = seconds_of(team, [&](Team::Member&) {
        alignas(64) static const bf16 zeros[kTileRows * kTileDepth] = {};
        AmxTiles::configure(kTileRows, kTileRows);
        AmxTiles::load<4>(zeros, 64), AmxTiles::load<5>(zeros, 64), AmxTiles::load<6>(zeros, 64);
        AmxTiles::load<7>(zeros, 64);
        for (int64_t n = 0; n < rounds; n++) {
            AmxTiles::multiply<0, 4, 6>(), AmxTiles::multiply<1, 4, 7>();
            AmxTiles::multiply<2, 5, 6>(), AmxTiles::multiply<3, 5, 7>();
        }
        AmxTiles::release();
    });
    return 4.0 * 2 * kTileRows * kTileColumns * kTileDepth * rounds * team.size() / seconds;
}
#endif

// Floating-point operations per second of products of T with operands in registers.
//
//   team    threads
//   rounds  how often a register tile is multiplied
template <class T>
inline double gemm_rate(Team& team, int64_t rounds) {
#ifdef CHORUS_AMX
    if constexpr (std::is_same_v<T, bf16>) return tiles_rate(team, rounds);
#endif
    using A = Kind<Act<T>>;
    const double seconds = seconds_of(team, [&](Team::Member&) {
        alignas(64) Act<T> operands[64] = {};
        float start[kTileVectors * kLanes];  // all different: the compiler would compute what is equal once
        for (int i = 0; i < kTileVectors * kLanes; i++) start[i] = (float)i;
        Floats acc[kTileVectors];
#pragma GCC unroll 24
        for (int i = 0; i < kTileVectors; i++) acc[i] = load16(start + i * kLanes);
        const auto a = A::load(operands), b = A::load(operands + 32);
        for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 24
            for (int i = 0; i < kTileVectors; i++) acc[i] = A::mac(acc[i], a, b);
        for (int i = 1; i < kTileVectors; i++) acc[0] = acc[0] + acc[i];
        volatile float all = sum(acc[0]);
        (void)all;
    });
    return 2.0 * A::pair * kLanes * kTileVectors * rounds * team.size() / seconds;
}

}  // namespace chorus

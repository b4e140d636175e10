// Sums over the ranks of one machine, processes that compute shares of the same layers, in memory that they share.
//
// A sum is that of rank 0's part, then rank 1's and so on, whichever rank was first: the same bits on every rank and in
// every run. Each rank has two buffers, used in turns: a rank writes to a buffer again only after the next sum, which
// began on no rank before that rank had read this one.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include "simd/lanes.h"

namespace chorus {

class Ranks {
   public:
    static constexpr int kMost = 64;
    enum State { kWell, kFailed, kLost };  // of the step: some rank gave it up; of the ranks: they never meet again

    // One rank.
    //
    //   memory    [bytes(size, floats)], zeroed, on a page boundary, the same for all ranks
    //   rank      number of this one, from 0
    //   size      ranks
    //   floats    of a buffer
    //   seconds   that a rank waits for the others; then all are lost
    //   spinning  seconds after which a rank that waits sleeps, to be woken by the others
    Ranks(void* memory, int rank, int size, int64_t floats, double seconds, double spinning)
        : shared_((Shared*)memory),
          rank_(rank),
          size_(size),
          floats_(floats),
          patience_(seconds),
          spinning_(spinning) {}
    // Another rank of the same process.
    Ranks(const Ranks& first, int rank)
        : Ranks(first.shared_, rank, first.size_, first.floats_, first.patience_, first.spinning_) {}

    static int64_t bytes(int size, int64_t floats) { return sizeof(Shared) + 2 * size * floats * sizeof(float); }

    int rank() const { return rank_; }
    int size() const { return size_; }
    int64_t floats() const { return floats_; }

    // Once at the beginning of a step, by its number, which grows; every rank has left the step before.
    void begin(int64_t step) {
        step_ = step;
        at_ = step << kSumBits;
    }

    // Where this rank writes its part of the next sum.
    float* mine() const { return buffer(at_ + 1, rank_); }

    // Once the part is written: wait for all ranks' parts. At once where the step has failed or the ranks are lost.
    State meet() {
        post();
        return wait();
    }

    // The first half of `meet`: a rank may do other work before it waits for the others' parts. It must wait before it
    // writes its part of the next sum, which lies where the others may still be reading its last one.
    void post() {
        shared_->posted[rank_].at.store(count(), std::memory_order_release);
        tell();
    }
    // Of a rank that a device is: count the next sum, which the device says itself, in `word`, that its part is written
    // of, and waits for by the others' words.
    int64_t count() { return ++at_; }
    std::atomic<int64_t>* word(int rank) const { return &shared_->posted[rank].at; }
    // Sums so far in the step.
    int sums() const { return (int)(at_ & ((1 << kSumBits) - 1)); }
    State wait() {
        const auto began = Clock::now();
        for (int i = 0; i % kSpins || seconds_since(began) < spinning_; i++) {
            if (all_posted()) return kWell;
            if (state() != kWell) return state();
            relax();
        }
        for (;;) {
            shared_->sleepers.fetch_add(1);
            const int seen = shared_->posts.load();
            const bool done = all_posted();
            if (!done && state() == kWell) {
                const timespec most{0, 100'000'000};
                syscall(SYS_futex, &shared_->posts, FUTEX_WAIT, seen, &most, nullptr, 0);
            }
            shared_->sleepers.fetch_sub(1);
            if (done || all_posted()) return kWell;
            if (state() != kWell) return state();
            if (seconds_since(began) > patience_) lose();
        }
    }

    // A rank's part of the sum that `meet` was for.
    const float* part(int rank) const { return buffer(at_, rank); }

    // Add the parts of the ranks from `from` on.
    //
    //   out    [count] float32: added to
    //   first  element of the parts
    //   from   rank
    void add(float* out, int64_t first, int64_t count, int from = 0) const {
        for (int r = from; r < size_; r++) {
            const float* x = part(r) + first;
            for (int64_t i = 0; i < count; i++) out[i] += x[i];
        }
    }

    // Replace data, [count] float32, by the sum of all ranks' data: rank 0's first, so that nothing is added to 0.
    State add_up(float* data, int64_t count) {
        for (int64_t first = 0; first < count; first += floats_) {
            const int64_t now = std::min(floats_, count - first);
            memcpy(mine(), data + first, now * sizeof(float));
            if (const State state = meet(); state != kWell) return state;
            memcpy(data + first, part(0), now * sizeof(float));
            add(data + first, 0, now, 1);
        }
        return kWell;
    }

    // Gather rows of which each rank has some columns.
    //
    //   part   [rows, this rank's columns, from width · rank / size on] float32
    //   rows   of all ranks
    //   width  columns of all ranks
    //   out    [rows, width]: written; null on a rank that wants none
    State gather(const float* part, int64_t rows, int64_t width, float* out) {
        auto begin = [&](int r) { return width * r / size_; };
        const int64_t own = begin(rank_ + 1) - begin(rank_), most = floats_ / ((width + size_ - 1) / size_);
        for (int64_t first = 0; first < rows; first += most) {
            const int64_t now = std::min(most, rows - first);
            memcpy(mine(), part + first * own, now * own * sizeof(float));
            if (const State state = meet(); state != kWell) return state;
            for (int r = 0; out && r < size_; r++) {
                const int64_t columns = begin(r + 1) - begin(r);
                for (int64_t i = 0; i < now; i++)
                    memcpy(out + (first + i) * width + begin(r), this->part(r) + i * columns, columns * sizeof(float));
            }
        }
        return kWell;
    }

    State state() const {
        if (shared_->lost.load(std::memory_order_relaxed)) return kLost;
        return shared_->failed.load(std::memory_order_relaxed) >= step_ ? kFailed : kWell;
    }

    // Have every rank leave a step, or this one and all to come; from any thread.
    void fail(int64_t step) {
        shared_->failed.store(step);
        tell();
    }
    void lose() {
        shared_->lost.store(1);
        tell();
    }

   private:
    using Clock = std::chrono::steady_clock;
    static constexpr int kSumBits = 20, kSpins = 32;

    static double seconds_since(Clock::time_point began) {
        return std::chrono::duration<double>(Clock::now() - began).count();
    }

    struct Shared {
        alignas(64) std::atomic<int> posts, sleepers, lost;
        std::atomic<int64_t> failed;  // the last step that a rank gave up
        struct alignas(64) {
            std::atomic<int64_t> at;  // the last sum that a rank has written its part of
        } posted[kMost];
        alignas(4096) char end[4096];
    };

    float* buffer(int64_t at, int rank) const { return (float*)(shared_ + 1) + ((at & 1) * size_ + rank) * floats_; }
    bool all_posted() const {
        for (int r = 0; r < size_; r++)
            if (shared_->posted[r].at.load(std::memory_order_acquire) < at_) return false;
        return true;
    }
    void tell() {
        shared_->posts.fetch_add(1);
        if (shared_->sleepers.load()) syscall(SYS_futex, &shared_->posts, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    Shared* shared_;
    const int rank_, size_;
    const int64_t floats_;
    const double patience_, spinning_;
    int64_t step_ = 0, at_ = 0;
};

}  // namespace chorus

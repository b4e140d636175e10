// A team of threads that run one function together (SPMD) with barriers and shared work counters.
//
// Within a step the threads spin at first: phases take microseconds. Between steps the helpers sleep, so that an idle
// engine costs nothing and HTTP has the cores.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <climits>
#include <functional>
#include <thread>
#include <vector>

namespace chorus {

class Team {
   public:
    explicit Team(int threads) : size_(threads), shares_(threads) {
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this, i] { serve(i); });
    }
    ~Team() {
        stop_ = true;
        wake();
        for (auto& helper : helpers_) helper.join();
    }
    int size() const { return size_; }

    // Run body(thread) on every thread of the team; the caller is thread 0.
    void run(const std::function<void(int)>& body) {
        body_ = &body;
        round_ += phase_.load(std::memory_order_relaxed);
        phase_ = 0;
        for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        wake();
        body(0);
        auto all_done = [&] { return done_.load(std::memory_order_acquire) == size_ - 1; };
        while (!spin(all_done)) sched_yield();
    }

    // Hand out units 0 … count-1 to whichever thread is free, then meet. Called by every thread of the team alike.
    template <class Work>
    void each(int &phase, int count, Work work) {
        auto& counter = counters_[phase % 3];
        for (int unit; (unit = counter.fetch_add(1, std::memory_order_relaxed)) < count;) work(unit);
        barrier(phase);
    }

    // As `each`, but every thread has its own units 0 … count(thread)-1 and does them in order, so that what a unit leads
    // up to in memory is this thread's too. Whoever is done takes from the end of what another still has to do.
    // work(owner, unit, more): more says that the owner's next unit follows on the same thread.
    template <class Count, class Work>
    void each_own(int& phase, int thread, Count count, Work work) {
        const uint32_t tag = (round_ + phase) & kTagMask;
        for (int i = 0; i < size_; i++) {
            const int owner = (thread + i) % size_;
            bool more = false;
            for (int unit; (unit = take(shares_[owner], tag, count(owner), i > 0, more)) >= 0;) work(owner, unit, more);
        }
        barrier(phase);
    }

   private:
    // A thread's units that are left in the phase `tag`: tag, last, first. Whoever comes first sets it up for its phase,
    // so that a thread that isn't running holds up nothing but the unit it is in.
    struct alignas(64) Share : std::atomic<uint64_t> {};
    static constexpr uint32_t kTagMask = 0xFFFFFF;
    static constexpr int kUnitBits = 20;
    static constexpr int kSpins = 4000;

    static int take(Share& share, uint64_t tag, int count, bool from_end, bool& more) {
        constexpr uint64_t mask = (1 << kUnitBits) - 1;
        uint64_t state = share.load(std::memory_order_relaxed);
        for (;;) {
            const bool set_up = state >> 2 * kUnitBits == tag;
            uint64_t first = set_up ? state & mask : 0, last = set_up ? state >> kUnitBits & mask : (uint64_t)count;
            if (set_up && first >= last) return -1;
            const bool none = first >= last;
            const int unit = none ? -1 : from_end ? (int)--last : (int)first++;
            more = !from_end && first < last;
            if (share.compare_exchange_weak(state, tag << 2 * kUnitBits | last << kUnitBits | first, std::memory_order_relaxed)) return unit;
        }
    }

    void barrier(int& phase) {
        int at = phase++;
        if (size_ == 1) {
            counters_[at % 3].store(0, std::memory_order_relaxed);
            phase_.store(at + 1, std::memory_order_relaxed);
            return;
        }
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            counters_[(at + 2) % 3].store(0, std::memory_order_relaxed);  // nobody is in that phase yet, nor still
            phase_.store(at + 1);
            if (sleepers_.load()) futex(phase_, FUTEX_WAKE_PRIVATE, INT_MAX);
        } else if (!spin([&] { return phase_.load(std::memory_order_acquire) > at; })) {
            sleepers_.fetch_add(1);
            while (phase_.load() == at) futex(phase_, FUTEX_WAIT_PRIVATE, at);
            sleepers_.fetch_sub(1);
        }
    }

    // Whether it was ready within some 50 µs. Who takes longer isn't running, but waits for this or another core: sleep, and
    // the system puts it here, where `sched_yield` would leave it there.
    template <class Ready>
    static bool spin(Ready ready) {
        for (int i = 0; i < kSpins; i++) {
            if (ready()) return true;
            _mm_pause();
        }
        return false;
    }

    static void futex(std::atomic<int>& word, int operation, int value) {
        syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
    }

    void wake() {
        epoch_.fetch_add(1, std::memory_order_release);
        futex(epoch_, FUTEX_WAKE_PRIVATE, INT_MAX);
    }

    void serve(int thread) {
        int seen = 0;
        for (;;) {
            for (int i = 0; epoch_.load(std::memory_order_acquire) == seen && i < 2000; i++) _mm_pause();
            while (epoch_.load(std::memory_order_acquire) == seen)
                futex(epoch_, FUTEX_WAIT_PRIVATE, seen);
            seen = epoch_.load(std::memory_order_acquire);
            if (stop_) return;
            (*body_)(thread);
            done_.fetch_add(1, std::memory_order_acq_rel);
        }
    }

    const int size_;
    std::vector<std::thread> helpers_;
    const std::function<void(int)>* body_ = nullptr;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<int> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    struct alignas(64) Counter : std::atomic<int> { using std::atomic<int>::atomic; using std::atomic<int>::operator=; };
    Counter counters_[3];
    uint32_t round_ = 0;  // phases of all steps before this one
    std::vector<Share> shares_;
};

}  // namespace chorus

// A team of threads that run one function together (SPMD) with barriers and shared work counters.
//
// Within a step the threads spin: phases take microseconds. Between steps the helpers sleep, so that an idle engine
// costs nothing and HTTP has the cores.
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
    explicit Team(int threads) : size_(threads) {
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
        phase_ = 0;
        for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        wake();
        body(0);
        spin([&] { return done_.load(std::memory_order_acquire) == size_ - 1; });
    }

    // Hand out units 0 … count-1 to whichever thread is free, then meet. Called by every thread of the team alike.
    template <class Work>
    void each(int &phase, int count, Work work) {
        auto& counter = counters_[phase % 3];
        for (int unit; (unit = counter.fetch_add(1, std::memory_order_relaxed)) < count;) work(unit);
        barrier(phase);
    }

   private:
    void barrier(int& phase) {
        int at = phase++;
        if (size_ == 1) {
            counters_[at % 3].store(0, std::memory_order_relaxed);
            return;
        }
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            counters_[(at + 2) % 3].store(0, std::memory_order_relaxed);  // nobody is in that phase yet, nor still
            phase_.store(at + 1, std::memory_order_release);
        } else {
            spin([&] { return phase_.load(std::memory_order_acquire) > at; });
        }
    }

    template <class Ready>
    static void spin(Ready ready) {
        for (int i = 0; !ready(); i++) {
            if (i < 4000) _mm_pause();
            else sched_yield();  // fewer cores than threads: let the other one work
        }
    }

    void wake() {
        epoch_.fetch_add(1, std::memory_order_release);
        syscall(SYS_futex, &epoch_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void serve(int thread) {
        int seen = 0;
        for (;;) {
            for (int i = 0; epoch_.load(std::memory_order_acquire) == seen && i < 2000; i++) _mm_pause();
            while (epoch_.load(std::memory_order_acquire) == seen)
                syscall(SYS_futex, &epoch_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
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
    struct alignas(64) Counter : std::atomic<int> { using std::atomic<int>::atomic; using std::atomic<int>::operator=; };
    Counter counters_[3];
};

}  // namespace chorus

// A team of threads that run one function together (SPMD) with barriers and shared work counters.
//
// Within a step the threads spin at first: phases take microseconds. Between steps the helpers sleep, so that an idle
// engine costs nothing and HTTP has the cores.
//
// A thread at a barrier waits for threads that may not be running: another process has their core, or there are more
// threads than cores. Where that takes more time than the threads save, steps run on half of them; after a pause,
// longer each time it was in vain, on twice as many again.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <functional>
#include <thread>
#include <vector>
#include "simd/lanes.h"

namespace chorus {

class Team {
   public:
    // threads: the most of a step, the caller's included.
    explicit Team(int threads) : most_(std::clamp(threads, 1, kMost)), size_(most_), shares_(most_) {
        for (int i = 1; i < most_; i++) helpers_.emplace_back([this, i] { serve(i); });
    }
    ~Team() {
        stop_ = true;
        begin_round(most_);
        for (auto& helper : helpers_) helper.join();
    }
    int most() const { return most_; }  // threads there are
    int size() const { return size_; }  // threads of the next step: 0 … size-1

    // A thread of the team within a `run`.
    struct Member {
        const int thread;
        int phase = 0;  // barriers that the thread has passed
    };

    // Run body(member) on the threads of the step; the caller is thread 0.
    void run(const std::function<void(Member&)>& body) {
        body_ = &body;
        caller_ = pthread_self();
        round_ += phase_.load(std::memory_order_relaxed);
        phase_ = 0;
        for (auto& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        Member caller{0};
        if (size_ == 1 && most_ == 1) return body(caller);
        const auto began = Clock::now(), worked = work_time();
        if (size_ > 1 || size_ < told_) begin_round(size_);
        body(caller);
        wait(done_, [this](int done) { return done == size_ - 1; });
        const auto ended = Clock::now();
        choose_size(ended, ended - began, work_time() - worked);
    }

    // Hand out units to whichever thread is free, then meet. Called by every thread of the team alike.
    //
    //   me     the calling thread
    //   count  units
    //   work   work(unit)
    template <class Work>
    void each(Member& me, int count, Work work) {
        auto& next = counters_[me.phase % 3].next;
        for (int unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(unit);
        barrier(me);
    }

    // As `each`, but thread t has units begin(t) … begin(t + 1)-1 and does them in order, so that what a unit leads up to
    // in memory is this thread's too. A thread that is done takes units from the end of another's.
    //
    //   me     the calling thread
    //   begin  first unit of a thread; of the team's size: their number
    //   work   work(unit, more, owner); more: the owner's next unit follows on the same thread
    template <class Begin, class Work>
    void each_own(Member& me, Begin begin, Work work) {
        const uint32_t tag = (round_ + me.phase) & kTagMask;
        const int size = size_;
        for (int i = 0; i < size; i++) {
            const int owner = (me.thread + i) % size, first = begin(owner), count = begin(owner + 1) - first;
            bool more = false;
            for (int unit; (unit = take(shares_[owner], tag, count, i > 0, more)) >= 0;)
                work(first + unit, more, owner);
        }
        barrier(me);
    }

    // Work that units of a phase wait for: how much of it, since the step began, has been handed out, and how much is done.
    struct alignas(64) Gate {
        std::atomic<int> given{0}, done{0};
    };

    // Return once a gate's work below `end` is done; this thread runs the units that no thread has begun. The work of a
    // later phase follows that of earlier phases.
    //
    //   gate  counts the work
    //   end   unit behind the last, since the step began
    //   work  work(unit)
    template <class Work>
    void pass(Gate& gate, int end, Work work) {
        if (gate.done.load(std::memory_order_acquire) >= end) return;
        for (int i = gate.given.load(std::memory_order_relaxed); i < end;) {
            if (!gate.given.compare_exchange_weak(i, i + 1, std::memory_order_relaxed)) continue;
            work(i);
            if (gate.done.fetch_add(1) == end - 1 && sleepers_.load())
                futex(gate.done, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX);
            i = gate.given.load(std::memory_order_relaxed);
        }
        wait(gate.done, [end](int done) { return done >= end; });
    }

   private:
    using Clock = std::chrono::steady_clock;

    // A thread's units that are left in the phase `tag`: tag, last, first. The first thread to take one sets it up for
    // its phase, so that a thread that isn't running holds up nothing but the unit it is in.
    struct alignas(64) Share : std::atomic<uint64_t> {};
    static constexpr uint32_t kTagMask = 0xFFFFFF;
    static constexpr int kUnitBits = 20;
    static constexpr int kSpins = 4000;
    static constexpr int kMost = 255;  // threads; what is left of epoch_ counts the steps

    static constexpr Clock::duration kWindow = std::chrono::milliseconds(10),
                                     kShortestPause = std::chrono::milliseconds(50),
                                     kLongestPause = std::chrono::seconds(2);

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
            if (share.compare_exchange_weak(state, tag << 2 * kUnitBits | last << kUnitBits | first,
                                            std::memory_order_relaxed))
                return unit;
        }
    }

    void barrier(Member& me) {
        const int at = me.phase++;
        if (size_ == 1) {
            counters_[at % 3].next.store(0, std::memory_order_relaxed);
            phase_.store(at + 1, std::memory_order_relaxed);
            return;
        }
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            counters_[(at + 2) % 3].next.store(0, std::memory_order_relaxed);  // of phases at - 1 and at + 2, now empty
            phase_.store(at + 1);
            if (sleepers_.load()) futex(phase_, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX);
        } else {
            wait(phase_, [at](int phase) { return phase > at; });
        }
    }

    // Wait until word is ready; the thread that makes it ready wakes its sleepers.
    template <class Ready>
    void wait(std::atomic<int>& word, Ready ready) {
        if (ready(word.load(std::memory_order_acquire))) return;
        const bool counts = pthread_equal(pthread_self(), caller_);
        const auto began = counts ? Clock::now() : Clock::time_point{};
        const bool spun = spin([&] { return ready(word.load(std::memory_order_acquire)); });
        if (counts) spun_ += Clock::now() - began;
        if (spun) return;
        sleepers_.fetch_add(1);
        for (int now; !ready(now = word.load());) futex(word, FUTEX_WAIT_BITSET_PRIVATE, now);
        sleepers_.fetch_sub(1);
    }

    // True if it was ready within some 50 µs. A thread that takes longer isn't running, but waits for this or another
    // core: if this thread sleeps, the system puts that one here, where `sched_yield` would leave it there.
    template <class Ready>
    static bool spin(Ready ready) {
        for (int i = 0; i < kSpins; i++) {
            if (ready()) return true;
            relax();
        }
        return false;
    }

    // Processor time of this thread: what it sleeps and what others take of its processor is not in it.
    static Clock::time_point work_time() {
        timespec now;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return Clock::time_point(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
    }

    // By the caller's work against all of its time, over so long that one interruption doesn't count: threads that lose more
    // than half of their time, to waiting for each other or to other processes, are no faster than half as many.
    void choose_size(Clock::time_point ended, Clock::duration spent, Clock::duration worked) {
        spent_ += spent;
        worked_ += worked;
        if (spent_ < kWindow) return;
        if (size_ > 1 && 2 * (worked_ - spun_) < spent_) {
            size_ /= 2;
            again_ = ended + pause_;
            pause_ = std::min(2 * pause_, kLongestPause);
        } else if (size_ < most_ && ended >= again_) {
            size_ = std::min(2 * size_, most_);
        } else if (size_ == most_) {
            pause_ = kShortestPause;
        }
        spent_ = worked_ = spun_ = {};
    }

    static void futex(std::atomic<int>& word, int operation, int value, uint32_t threads = ~0u) {
        syscall(SYS_futex, &word, operation, value, nullptr, nullptr, threads);
    }

    // Wake threads 1 … size-1 for a step; the others sleep on. Threads dropped since the last step are woken once more,
    // so that the last step that a sleeper has seen never has as many threads as the step that it is woken for.
    void begin_round(int size) {
        const int round = epoch_.load(std::memory_order_relaxed) / (kMost + 1) % (1 << 20) + 1;
        epoch_.store(round * (kMost + 1) + size, std::memory_order_release);
        const bool all = size < told_ || size > 32;
        futex(epoch_, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, all ? ~0u : (uint32_t)((1ull << size) - 1) & ~1u);
        told_ = size;
    }

    void serve(int thread) {
        bool idle = false;
        for (int seen = 0, now;;) {
            for (int i = 0; !idle && epoch_.load(std::memory_order_acquire) == seen && i < 2000; i++) relax();
            while ((now = epoch_.load(std::memory_order_acquire)) == seen)
                futex(epoch_, FUTEX_WAIT_BITSET_PRIVATE, seen, 1u << thread % 32);
            seen = now;
            if (stop_) return;
            const int size = now % (kMost + 1);
            idle = thread >= size;
            if (idle) continue;
            Member me{thread};
            (*body_)(me);
            if (done_.fetch_add(1) == size - 2 && sleepers_.load()) futex(done_, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX);
        }
    }

    const int most_;
    int size_, told_ = 0;  // told_: of the last step that woke helpers
    std::vector<std::thread> helpers_;
    const std::function<void(Member&)>* body_ = nullptr;
    std::atomic<bool> stop_{false};
    pthread_t caller_{};
    Clock::duration spent_{}, worked_{},
        spun_{};  // the caller's time at this size, on a processor, and of that waiting
    Clock::duration pause_ = kShortestPause;
    Clock::time_point again_{};  // when to try more threads
    alignas(64) std::atomic<int> epoch_{0};  // the step's number and its threads
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    struct alignas(64) Counter {
        std::atomic<int> next{0};  // unit of a phase
    };
    Counter counters_[3];
    uint32_t round_ = 0;  // phases of all steps before this one
    std::vector<Share> shares_;
};

}  // namespace chorus

// A few threads that share the work of a call. Between calls they sleep; within one they wait for each other by
// yielding, so that a process that wants their core gets it.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <strings.h>
#include <system_error>
#include <thread>
#include <vector>

class Team {
  public:
    // As many threads as there are to be had, if that is fewer than `wanted`.
    explicit Team(int wanted) : wanted(wanted) {
        const bool is_bound = binds_threads(wanted);
        cpu_set_t all;
        memset(&all, 0xff, sizeof all); // the system leaves those that this process may use
        try {
            for (int t = 1; t < wanted; ++t) {
                helpers.emplace_back([this, t] { serve(t); });
                if (is_bound) pthread_setaffinity_np(helpers.back().native_handle(), sizeof all, &all);
            }
        } catch (const std::system_error&) {
        }
        size = (int)helpers.size() + 1; // which helpers read in their first call, not before
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            task = nullptr;
            call.fetch_add(1, std::memory_order_release);
        }
        wake.notify_all();
        for (auto& helper : helpers) helper.join();
    }

    // work(thread number) on every thread; returns when all are done.
    void run(const std::function<void(int)>& work) {
        if (size > 1) {
            std::lock_guard<std::mutex> lock(mutex);
            task = &work;
            call.fetch_add(1, std::memory_order_release);
            wake.notify_all();
        }
        work(0);
        barrier();
    }

    // Waits until every thread of the team is here.
    void barrier() {
        if (size == 1) return;
        const unsigned mine = turn.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn.load(std::memory_order_acquire) == mine; ++spins) {
            if (spins >= 2000) sched_yield();
        }
    }

    const int wanted;
    int size;

  private:
    // Whether OpenMP has bound this thread to fewer cores than it has threads: ours would all inherit its core.
    static bool binds_threads(int threads) {
        const char* bind = getenv("OMP_PROC_BIND");
        if (!(bind && strcasecmp(bind, "false")) && !getenv("GOMP_CPU_AFFINITY") && !getenv("KMP_AFFINITY")) return false;
        cpu_set_t own;
        return !sched_getaffinity(0, sizeof own, &own) && CPU_COUNT(&own) < threads;
    }

    void serve(int t) {
        unsigned seen = 0;
        for (;;) {
            for (int spins = 0; spins < 200 && call.load(std::memory_order_acquire) == seen; ++spins) sched_yield();
            std::unique_lock<std::mutex> lock(mutex);
            wake.wait(lock, [&] { return call.load(std::memory_order_acquire) != seen; });
            seen = call.load(std::memory_order_acquire);
            const std::function<void(int)>* work = task;
            lock.unlock();
            if (!work) return;
            (*work)(t);
            barrier();
        }
    }

    std::vector<std::thread> helpers;
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<unsigned> call{0};
    const std::function<void(int)>* task = nullptr;
    std::atomic<int> arrived{0};
    std::atomic<unsigned> turn{0};
};

// Numbers 0..n-1, handed out in chunks to whichever thread asks next.
class Counter {
  public:
    template <class F> void each(int n, int chunk, F&& f) {
        for (;;) {
            const int begin = next.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= n) return;
            for (int i = begin; i < n && i < begin + chunk; ++i) f(i);
        }
    }
    // The same in runs of neighbours, long ones first: 1 / `parts` of what is left, so that all finish together.
    template <class F> void each_in_runs(int n, int parts, F&& f) {
        for (;;) {
            int begin = next.load(std::memory_order_relaxed), end;
            do {
                if (begin >= n) return;
                end = begin + std::max(1, (n - begin) / parts);
            } while (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed));
            for (int i = begin; i < end; ++i) f(i);
        }
    }
    void reset() { next.store(0, std::memory_order_relaxed); }

  private:
    std::atomic<int> next{0};
    char padding[60];
};

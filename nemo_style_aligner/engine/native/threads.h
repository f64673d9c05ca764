// A few threads that share the work of a call.
#pragma once
#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <linux/futex.h>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <strings.h>
#include <sys/syscall.h>
#include <system_error>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

// A number that some threads change and others wait for. Waiting threads spin for a moment, then yield, then sleep:
// where two processes share the cores, waiting threads of both that only yield would keep a core busy with each other,
// while the threads they wait for share another.
class Signal {
  public:
    unsigned value() const { return number.load(std::memory_order_acquire); }

    void change() {
        number.fetch_add(1); // sequentially consistent: a sleeper not seen below sees this, or the kernel does
        if (sleepers.load() > 0) syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void wait_while(unsigned old) {
        for (int i = 0; i < LOOKS; ++i)
            if (value() != old) return;
        for (int i = 0; i < YIELDS; ++i) {
            sched_yield();
            if (value() != old) return;
        }
        sleepers.fetch_add(1);
        const timespec limit{1, 0}; // then they look again
        while (number.load() == old) syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, old, &limit, nullptr, 0);
        sleepers.fetch_sub(1);
    }

  private:
    static constexpr int LOOKS = 2000, YIELDS = 50;
    std::atomic<unsigned> number{0};
    static_assert(sizeof number == 4); // what the kernel compares
    std::atomic<int> sleepers{0};
};

class Team {
  public:
    // `wanted` threads, the caller among them; fewer if the system gives no more.
    explicit Team(int wanted) : wanted(wanted) {
        const bool is_bound = binds_threads(wanted);
        cpu_set_t all;
        memset(&all, 0xff, sizeof all); // the system masks out those that this process may not use
        try {
            for (int t = 1; t < wanted; ++t) {
                helpers.emplace_back([this, t] { serve(t); });
                if (is_bound) pthread_setaffinity_np(helpers.back().native_handle(), sizeof all, &all);
            }
        } catch (const std::system_error&) {
        }
        size = (int)helpers.size() + 1; // helpers first read it in their first call
    }
    ~Team() {
        task = nullptr;
        call.change();
        for (auto& helper : helpers) helper.join();
    }

    // work(thread number) on every thread; returns when all are done.
    void run(const std::function<void(int)>& work) {
        task = &work;
        call.change();
        work(0);
        barrier();
    }

    // Waits until every thread of the team is here.
    void barrier() {
        if (size == 1) return;
        const unsigned mine = turn.value();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) < size - 1) return turn.wait_while(mine);
        arrived.store(0, std::memory_order_relaxed);
        turn.change();
    }

    const int wanted;
    int size;

  private:
    // Whether OpenMP has bound this thread to fewer cores than `threads`: helpers would all inherit its cores.
    static bool binds_threads(int threads) {
        const char* bind = getenv("OMP_PROC_BIND");
        if (!(bind && strcasecmp(bind, "false")) && !getenv("GOMP_CPU_AFFINITY") && !getenv("KMP_AFFINITY")) return false;
        cpu_set_t own;
        return !sched_getaffinity(0, sizeof own, &own) && CPU_COUNT(&own) < threads;
    }

    void serve(int t) {
        for (unsigned seen = 0;; ++seen) { // misses none: the caller waits for all before its next call
            call.wait_while(seen);
            if (!task) return;
            (*task)(t);
            barrier();
        }
    }

    std::vector<std::thread> helpers;
    Signal call, turn;
    const std::function<void(int)>* task = nullptr;
    std::atomic<int> arrived{0};
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
    // f(i, the number that this thread gets next; n or more if none) for each of a thread's numbers. The first is
    // `thread`, so that threads know beforehand what they begin with; they ask for those from `threads` on.
    template <class F> void each_knowing_next(int n, int thread, int threads, F&& f) {
        for (int i = thread, following; i < n; i = following) {
            following = threads + next.fetch_add(1, std::memory_order_relaxed);
            f(i, following);
        }
    }
    void reset() { next.store(0, std::memory_order_relaxed); }

  private:
    std::atomic<int> next{0};
    char padding[60];
};

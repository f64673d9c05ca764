// What the layers' functions share: threads, their memory, and rows of numbers that may end within a vector.
#pragma once
#include "threads.h"
#include "vectors.h"
#include <memory>
#include <unistd.h>

namespace {

// ---- threads --------------------------------------------------------------------------------------------------------

std::mutex team_in_use;

// The threads of this process. A child of fork() inherits none of its parent's and gets its own.
Team& team(int threads) {
    static Team* current = nullptr;
    static pid_t owner = 0;
    if (!current || owner != getpid() || current->wanted != threads) {
        if (owner == getpid()) delete current;
        current = new Team(threads);
        owner = getpid();
    }
    return *current;
}

// Calls f(i) for i in 0..n-1, each on whichever thread asks next. A caller that finds the team at work for another
// thread of this process computes alone. std::bad_alloc on any thread is thrown again in the caller.
template <class F> void parallel(int threads, int n, F&& f) {
    Counter counter;
    std::atomic<bool> is_short{false};
    const auto work = [&](int) {
        try {
            counter.each(n, 1, f);
        } catch (const std::bad_alloc&) {
            is_short = true;
        }
    };
    std::unique_lock<std::mutex> lock(team_in_use, std::defer_lock);
    if (threads > 1 && n > 1 && lock.try_lock()) team(threads).run(work);
    else work(0);
    if (is_short) throw std::bad_alloc();
}

// Calls f(begin, end) for pieces of 0..n-1, one per thread.
template <class F> void in_pieces(int threads, int n, F&& f) {
    parallel(threads, threads, [&](int i) { f((int64_t)n * i / threads, (int64_t)n * (i + 1) / threads); });
}

// Memory of one thread, kept for its next task, cut into arrays of floats.
class Scratch {
  public:
    explicit Scratch(size_t floats) {
        static thread_local std::vector<float> memory;
        if (memory.size() < floats + 16) {
            memory.clear(); // so that resizing does not copy it
            memory.resize(floats + 16);
        }
        next = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    }
    float* take(size_t floats) {
        float* mine = next;
        next += floats;
        return mine;
    }

  private:
    float* next;
};

// ---- rows of numbers ------------------------------------------------------------------------------------------------

INLINE vf load_wide(const float* p) { return load<vf>(p); }
INLINE vf load_wide(const bf16* p) { return (vf)(widen_integers(p) << 16); }

// The first `n` of LANES numbers; the others are 0.
template <class T> INLINE vf load_some(const T* p, int n) {
    if (n >= LANES) return load_wide(p);
    vf v = {};
    for (int i = 0; i < n; ++i) v[i] = widen(p[i]);
    return v;
}
template <class T> INLINE void store_some(T* p, vf v, int n) {
    if (n >= LANES) return store_as(p, v);
    for (int i = 0; i < n; ++i) set_as(p + i, v[i]);
}

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

} // namespace

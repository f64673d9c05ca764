// Products of bf16 with AMX tiles: 16 rows of 64 bytes each, sums in fp32. Other kernels have none.
#pragma once
#include "vectors.h"

#if KERNEL == KERNEL_AMX
#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>

#if EMULATE
struct Tile {
    unsigned char bytes[16][64];
};
static thread_local Tile tiles[8];
#define TILE_ZERO(t) memset(&tiles[t], 0, sizeof(Tile))
#define TILE_LOAD(t, p, stride)                                                                                        \
    for (int r_ = 0; r_ < 16; ++r_) memcpy(tiles[t].bytes[r_], (const char*)(p) + (size_t)r_ * (stride), 64)
#define TILE_STORE(t, p, stride)                                                                                       \
    for (int r_ = 0; r_ < 16; ++r_) memcpy((char*)(p) + (size_t)r_ * (stride), tiles[t].bytes[r_], 64)
static void tile_multiply(Tile& c, const Tile& a, const Tile& b) {
    float (*sum)[16] = (float (*)[16])c.bytes;
    const bf16(*x)[32] = (const bf16(*)[32])a.bytes;
    const bf16(*w)[32] = (const bf16(*)[32])b.bytes;
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                sum[m][n] += widen(x[m][2 * k]) * widen(w[k][2 * n]);
                sum[m][n] += widen(x[m][2 * k + 1]) * widen(w[k][2 * n + 1]);
            }
}
#define TILE_MULTIPLY(c, a, b) tile_multiply(tiles[c], tiles[a], tiles[b])
static void configure_tiles() {}
static void release_tiles() {}
static int prepare_tiles() { return 0; }
#else
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p, stride) _tile_loadd(t, p, stride)
#define TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define TILE_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)
static void configure_tiles() { // eight of 16 rows of 64 bytes
    struct alignas(64) Config {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(Config) == 64);
    // A constant: GCC's intrinsic claims to read only 8 bytes, so it might drop stores to the others.
    static const Config config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}
static void release_tiles() { _tile_release(); }
// Asks Linux for permission to use tiles, for this process; 0 if they may be used, else errno.
static int prepare_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) ? errno : 0;
}
#endif

// The left factor of a product: rows of bf16, by 32 of depth.
struct LeftRows {
    const bf16* at;
    size_t row_bytes; // from a row to the next
    size_t step;      // numbers from 32 of depth to the next 32
    size_t below;     // numbers from 16 rows to the next 16
};

// c[16 * TALL][32] = left[16 * TALL rows][depth] * panel[depth / 2][32 pairs]. What is multiplied with next, `next`, is
// prefetched where PREFETCHES, and `panel` itself: for weights that come from memory.
template <int TALL, bool PREFETCHES>
static INLINE void multiply_tiles(LeftRows left, int depth, const bf16* panel, const void* next, float* c) {
#if !EMULATE
    __asm__ volatile("" ::: "memory"); // GCC's tile loads do not declare that they read memory: keep earlier stores
#endif
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (TALL == 2) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int i = 0; i < depth; i += 32, panel += 32 * 32, left.at += left.step) {
#if !EMULATE
        if (PREFETCHES) {
            // Three blocks of depth ahead; the hardware's prefetcher is too late.
            const char* ahead =
                i + 96 < depth ? (const char*)(panel + 96 * 32) : (const char*)next + (i + 96 - depth) * 64;
#pragma GCC unroll 32
            for (int line = 0; line < 32; ++line) _mm_prefetch(ahead + 64 * line, _MM_HINT_T0);
        }
#endif
        TILE_LOAD(6, panel, 128);
        TILE_LOAD(7, panel + 32, 128);
        TILE_LOAD(4, left.at, left.row_bytes);
        TILE_MULTIPLY(0, 4, 6);
        TILE_MULTIPLY(1, 4, 7);
        if (TALL == 2) {
            TILE_LOAD(5, left.at + left.below, left.row_bytes);
            TILE_MULTIPLY(2, 5, 6);
            TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, c, 128);
    TILE_STORE(1, c + 16, 128);
    if (TALL == 2) {
        TILE_STORE(2, c + 16 * 32, 128);
        TILE_STORE(3, c + 16 * 32 + 16, 128);
    }
}
#else
static void configure_tiles() {}
static void release_tiles() {}
static int prepare_tiles() { return 0; }
#endif

// A thread's tiles, where its kernel has any, for as long as this lives.
struct Tiles {
    Tiles() { configure_tiles(); }
    ~Tiles() { release_tiles(); }
};

// 0, or errno where the system does not allow the kernel's instructions. Once per process, before anything else.
extern "C" int prepare() { return prepare_tiles(); }

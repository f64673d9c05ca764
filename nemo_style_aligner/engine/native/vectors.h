// Vectors of LANES floats in the compiler's own vector types, so that one source serves every processor. What has an
// instruction of its own (bf16 dot products, AMX tiles) is chosen by KERNEL:
//
//   KERNEL_FMA  fp32 fused multiply-add; activations are fp32, bf16 weights are widened in registers
//   KERNEL_DOT  AVX-512 bf16 dot products; activations are bf16, sums fp32
//   KERNEL_AMX  AMX bf16 tiles for matrix products, dot products for attention
//
// EMULATE replaces those instructions by plain C++ of the same meaning, for processors (and tests) without them.
#pragma once
#define KERNEL_FMA 0
#define KERNEL_DOT 1
#define KERNEL_AMX 2
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

#define INLINE inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef uint16_t bf16;

template <class V> static INLINE V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V> static INLINE void store(void* p, V v) { memcpy(p, &v, sizeof v); }

// LANES integers, widened. For __builtin_convertvector GCC emits five instructions where the processor has one.
#if defined(__AVX512F__) && LANES == 16
static INLINE vu widen_integers(const uint16_t* p) { return (vu)_mm512_cvtepu16_epi32(load<__m256i>(p)); }
#elif defined(__AVX2__) && LANES == 8
static INLINE vu widen_integers(const uint16_t* p) { return (vu)_mm256_cvtepu16_epi32(load<__m128i>(p)); }
#else
static INLINE vu widen_integers(const uint16_t* p) { return __builtin_convertvector(load<vh>(p), vu); }
#endif
typedef uint32_t vu8 __attribute__((vector_size(32)));

// out[c][r] = in[r][c] of 8 x 8 32-bit words
static INLINE void transpose8(const vu8 (&in)[8], vu8 (&out)[8]) {
    vu8 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shuffle(in[i], in[i + 1], vu8{0, 8, 1, 9, 4, 12, 5, 13});
        a[i + 1] = __builtin_shuffle(in[i], in[i + 1], vu8{2, 10, 3, 11, 6, 14, 7, 15});
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = __builtin_shuffle(a[i], a[i + 2], vu8{0, 1, 8, 9, 4, 5, 12, 13});
        b[i + 1] = __builtin_shuffle(a[i], a[i + 2], vu8{2, 3, 10, 11, 6, 7, 14, 15});
        b[i + 2] = __builtin_shuffle(a[i + 1], a[i + 3], vu8{0, 1, 8, 9, 4, 5, 12, 13});
        b[i + 3] = __builtin_shuffle(a[i + 1], a[i + 3], vu8{2, 3, 10, 11, 6, 7, 14, 15});
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        out[i] = __builtin_shuffle(b[i], b[i + 4], vu8{0, 1, 2, 3, 8, 9, 10, 11});
        out[i + 4] = __builtin_shuffle(b[i], b[i + 4], vu8{4, 5, 6, 7, 12, 13, 14, 15});
    }
}

static INLINE vf splat(float x) { return x - vf{}; } // not x + 0, which would turn -0 into +0
static INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

// 0, 1, 2, ...
static INLINE vi lane_numbers() {
    vi lanes;
    for (int i = 0; i < LANES; ++i) lanes[i] = i;
    return lanes;
}
// Reduces all lanes to one by f(vf, vf), in halves: an order that does not depend on the processor.
template <class F> static INLINE float across_lanes(vf v, F&& f) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) v = f(v, __builtin_shuffle(v, lane_numbers() ^ half));
    return v[0];
}
static INLINE float sum_lanes(vf v) {
    return across_lanes(v, [](vf a, vf b) { return a + b; });
}
static INLINE float max_lanes(vf v) {
    return across_lanes(v, [](vf a, vf b) { return vmax(a, b); });
}

// ---- bf16: the upper half of a float; rounding is to nearest, ties to even -----------------------------------------

static INLINE float widen(bf16 x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static INLINE float widen(float x) { return x; }
static INLINE bf16 narrow(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (std::isnan(x)) return (bf16)(u >> 16 | 0x40); // rounding could carry into the exponent or the sign
    return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
// The same for a vector of uint32_t, the bits of floats.
template <class V> static INLINE V narrowed(V u) {
    const V nan = (V)((u & 0x7fffffff) > 0x7f800000);
    return (((u + 0x7fff + ((u >> 16) & 1)) & ~nan) | ((u | 0x400000) & nan)) >> 16;
}
static INLINE void store_as(float* p, vf v) { store(p, v); }
static INLINE void store_as(bf16* p, vf v) {
#if !EMULATE && KERNEL != KERNEL_FMA
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, 32);
#else
    store(p, __builtin_convertvector(narrowed((vu)v), vh));
#endif
}
static INLINE void set_as(float* p, float x) { *p = x; }
static INLINE void set_as(bf16* p, float x) { *p = narrow(x); }
// Stores n numbers as T.
template <class T> static INLINE void store_row(T* p, const float* x, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store_as(p + i, load<vf>(x + i));
    for (; i < n; ++i) set_as(p + i, x[i]);
}

// ---- exp ------------------------------------------------------------------------------------------------------------

// e^x to about 2 units in the last place; exactly 0 below -87, where results would soon be denormal, and infinity where
// they overflow or would soon, above 88; NaN of NaN.
// x is split into n ln 2 + f, |f| <= ln 2 / 2 (Cody and Waite), and e^f taken from its Taylor series of degree 7
// (remainder below 6e-9).
static INLINE vf vexp(vf x) {
#if defined(__AVX512F__) && LANES == 16
    const vf low = splat(-87.0f), high = splat(89.0f);
    vf c = (vf)_mm512_min_ps((__m512)high, _mm512_max_ps((__m512)low, (__m512)x)); // in this order NaN stays NaN
#else
    const vf low = splat(-87.0f), high = splat(88.0f);
    vf c = low > x ? low : x; // in this order NaN stays NaN
#endif
    const float round = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf shifted = c * 1.44269504089f + round;
    vf n = shifted - round;
    vf f = c - n * 0.693359375f; // ln 2 in two parts, the first exact in few bits
    f = f + n * 2.12194440e-4f;
    vf p = splat(1.0f / 5040);
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
#if defined(__AVX512F__) && LANES == 16 // multiplies by 2^n in one instruction, which overflows to infinity
    const __mmask16 is_low = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_LT_OQ);
    return (vf)_mm512_maskz_scalef_ps(~is_low, (__m512)p, (__m512)n);
#else
    vi exponent = ((vi)shifted - 0x4B400000) << 23;
    vf y = (vf)((vi)p + exponent) + (c - c); // NaN again, which the integer addition may have hidden
    y = x > high ? splat(INFINITY) : y; // where the exponent may overflow
    return x < low ? vf{} : y;
#endif
}

// tanh(x) to about 3 units in the last place; NaN of NaN. Near 0, where e^-2x would leave few digits, from its Taylor
// series of degree 11 (remainder below 1e-9).
static INLINE vf vtanh(vf x) {
    const vf size = x < 0.0f ? -x : x, square = x * x;
    const vf e = vexp(-2.0f * size), far = (1.0f - e) / (1.0f + e);
    vf near = splat(-1382.0f / 155925);
    near = near * square + 62.0f / 2835;
    near = near * square - 17.0f / 315;
    near = near * square + 2.0f / 15;
    near = near * square - 1.0f / 3;
    near = x + x * square * near;
    return size < 0.3f ? near : x < 0.0f ? -far : far;
}

// The natural logarithm of x, normal and at least 1; NaN of NaN. From a straight line between powers of two, 0.06 off at
// most, two steps of Halley's method, each of which leaves a twelfth of the error's cube.
static INLINE vf vlog(vf x) {
    vf y = __builtin_convertvector((vi)x - 0x3f800000, vf) * (0.69314718056f / 8388608);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const vf e = vexp(y);
        y += 2.0f * (x - e) / (x + e);
    }
    return y;
}

// ---- products of pairs of bf16 --------------------------------------------------------------------------------------

#if KERNEL != KERNEL_FMA
// sum + the dot products of a pair of bf16 with each of LANES pairs.
static INLINE vf add_dot(vf sum, uint32_t pair, vu pairs) {
#if EMULATE
    sum += widen((bf16)pair) * (vf)(pairs << 16);
    return sum + widen((bf16)(pair >> 16)) * (vf)(pairs & 0xffff0000u);
#else
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)pairs);
#endif
}

// LANES pairs of numbers, rounded to bf16: the first of each pair from `first`, the second from `second`.
static INLINE vu pairs_of(vf first, vf second) {
#if EMULATE
    return narrowed((vu)first) | narrowed((vu)second) << 16;
#else
    const auto bits = [](vf x) { return (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); };
    return bits(first) | bits(second) << 16;
#endif
}
#endif

// ---- numbers known at run time only ---------------------------------------------------------------------------------

// f(std::integral_constant<int, n>{}) for a number n in 1..MOST that is known only at run time.
template <int MOST, class F> static INLINE void with_constant(int n, F&& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_constant<MOST - 1>(n, f);
    }
    f(std::integral_constant<int, MOST>{});
}

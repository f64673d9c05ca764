// SwiGLU and RMSNorm, forward and backward.
#pragma once
#include "rows.h"

namespace {

// ---- SwiGLU ---------------------------------------------------------------------------------------------------------

template <class T> void swiglu(const T* x, T* out, int rows, int width, int threads) {
    in_pieces(threads, rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T *gate = x + row * 2 * width, *up = gate + width;
            for (int i = 0; i < width; i += LANES) {
                const vf g = load_some(gate + i, width - i);
                store_some(out + row * width + i, g * sigmoid(g) * load_some(up + i, width - i), width - i);
            }
        }
    });
}

// grad_x may be x.
template <class T> void swiglu_backward(const T* x, const T* grad, T* grad_x, int rows, int width, int threads) {
    in_pieces(threads, rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T *gate = x + row * 2 * width, *up = gate + width;
            T *grad_gate = grad_x + row * 2 * width, *grad_up = grad_gate + width;
            for (int i = 0; i < width; i += LANES) {
                const int n = width - i;
                const vf g = load_some(gate + i, n), u = load_some(up + i, n), s = sigmoid(g);
                const vf slope = load_some(grad + row * width + i, n);
                store_some(grad_up + i, slope * g * s, n);
                store_some(grad_gate + i, slope * u * (s + g * s * (1.0f - s)), n);
            }
        }
    });
}

// ---- RMSNorm --------------------------------------------------------------------------------------------------------

// Of x or, where there is `added`, of x + added, which goes to `sum` and may replace either.
template <class T>
void rms_norm(const T* x, const T* added, const float* weight, T* sum, T* out, float* scale, int rows, int width,
              float epsilon, int threads) {
    in_pieces(threads, rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* from = (added ? sum : x) + row * width;
            vf squares = {};
            for (int i = 0; i < width; i += LANES) {
                const int n = width - i;
                if (added) {
                    const vf both = load_some(x + row * width + i, n) + load_some(added + row * width + i, n);
                    store_some(sum + row * width + i, both, n);
                }
                const vf v = load_some(from + i, n);
                squares += v * v;
            }
            scale[row] = 1 / std::sqrt(sum_lanes(squares) / width + epsilon);
            for (int i = 0; i < width; i += LANES)
                store_some(out + row * width + i,
                           load_some(from + i, width - i) * scale[row] * load_some(weight + i, width - i), width - i);
        }
    });
}

// grad_weight [threads][width]: the sum over each thread's rows. Where there is `added`, it is added to grad_x, which is
// rounded before and after. grad_x may be grad.
template <class T>
void rms_norm_backward(const T* x, const float* weight, const float* scale, const T* grad, const T* added, T* grad_x,
                       float* grad_weight, int rows, int width, int threads) {
    parallel(threads, threads, [&](int thread) {
        float* sums = grad_weight + (size_t)thread * width;
        std::fill(sums, sums + width, 0.0f);
        const int64_t begin = (int64_t)rows * thread / threads, end = (int64_t)rows * (thread + 1) / threads;
        for (int64_t row = begin; row < end; ++row) {
            const T *from = x + row * width, *slope = grad + row * width;
            vf along = {};
            for (int i = 0; i < width; i += LANES) {
                const int n = width - i;
                const vf product = load_some(slope + i, n) * load_some(from + i, n) * scale[row];
                along += product * load_some(weight + i, n);
                store_some(sums + i, load_some(sums + i, n) + product, n);
            }
            // The output does not depend on the length of x, so the gradient has no component along x.
            const float mean = sum_lanes(along) / width;
            for (int i = 0; i < width; i += LANES) {
                const int n = width - i;
                const vf normed = load_some(from + i, n) * scale[row];
                const vf g = load_some(slope + i, n) * load_some(weight + i, n);
                T* to = grad_x + row * width + i;
                store_some(to, (g - normed * mean) * scale[row], n);
                if (added) store_some(to, load_some(to, n) + load_some(added + row * width + i, n), n);
            }
        }
    });
}

} // namespace

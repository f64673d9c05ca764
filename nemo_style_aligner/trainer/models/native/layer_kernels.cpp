// Parts of a transformer, forward and backward, for which torch makes many passes over memory on CPUs.
// Numbers in memory are fp32 or bf16 (T), arithmetic is fp32 except for products of bf16. `layer_kernels.py`
// says what each function computes.
#include "attention.h"
#include "elementwise.h"
#include "logits.h"
#include "packed_products.h"

// Calls f with a value of the type that numbers have in memory. Returns 0, or 1 if memory is short.
template <class F> static int with_type(int is_bf16, F&& f) {
    try {
        is_bf16 ? f(bf16()) : f(float());
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

extern "C" {

int layer_attention(const Attention* a) {
    return with_type(a->is_bf16, [&](auto x) { attention_forward<decltype(x)>(*a); });
}

int layer_attention_backward(const Attention* a) {
    return with_type(a->is_bf16, [&](auto x) { attention_backward<decltype(x)>(*a); });
}

int layer_swiglu(const void* x, void* out, int rows, int width, int is_bf16, int threads) {
    return with_type(is_bf16, [&](auto type) {
        typedef decltype(type) T;
        swiglu((const T*)x, (T*)out, rows, width, threads);
    });
}

int layer_swiglu_backward(const void* x, const void* grad, void* grad_x, int rows, int width, int is_bf16,
                          int threads) {
    return with_type(is_bf16, [&](auto type) {
        typedef decltype(type) T;
        swiglu_backward((const T*)x, (const T*)grad, (T*)grad_x, rows, width, threads);
    });
}

int layer_rms_norm(const void* x, const void* added, const float* weight, void* sum, void* out, float* scale, int rows,
                   int width, float epsilon, int is_bf16, int threads) {
    return with_type(is_bf16, [&](auto type) {
        typedef decltype(type) T;
        rms_norm((const T*)x, (const T*)added, weight, (T*)sum, (T*)out, scale, rows, width, epsilon, threads);
    });
}

int layer_rms_norm_backward(const void* x, const float* weight, const float* scale, const void* grad, const void* added,
                            void* grad_x, float* grad_weight, int rows, int width, int is_bf16, int threads) {
    return with_type(is_bf16, [&](auto type) {
        typedef decltype(type) T;
        rms_norm_backward((const T*)x, weight, scale, (const T*)grad, (const T*)added, (T*)grad_x, grad_weight, rows,
                          width, threads);
    });
}

int layer_measure_logits(const void* logits, const int64_t* targets, float* normalizer, float* at_target, float* entropy,
                         int rows, int width, float scale, int is_bf16, int threads) {
    return with_type(is_bf16, [&](auto type) {
        typedef decltype(type) T;
        measure_logits((const T*)logits, targets, scale, normalizer, at_target, entropy, rows, width, threads);
    });
}

int layer_logits_gradient(const void* logits, const int64_t* targets, const float* normalizer, const float* entropy,
                          const float* grad, const float* grad_entropy, void* out, int rows, int width, float scale,
                          int is_bf16, int threads) {
    return with_type(is_bf16, [&](auto type) {
        typedef decltype(type) T;
        logits_gradient((const T*)logits, targets, scale, normalizer, entropy, grad, grad_entropy, (T*)out, rows, width,
                        threads);
    });
}

#if KERNEL != KERNEL_FMA
int layer_add_product(float* total, const void* columns, const void* rows, int tokens, int n, int k, int threads) {
    return with_type(1, [&](auto) {
        weight_gradients::add_product({total, (const bf16*)columns, (const bf16*)rows, tokens, n, k}, threads);
    });
}

void layer_pack(const void* weight, void* out, int n, int k, int is_transposed, int threads) {
    packed_products::pack((const bf16*)weight, n, k, is_transposed, (uint32_t*)out, threads);
}

void layer_multiply_packed(const void* a, const void* packed, void* out, int rows, int depth, int columns, int threads) {
    packed_products::multiply({(const bf16*)a, (const uint32_t*)packed, (bf16*)out, rows, depth, columns}, threads);
}
#endif
}

// AdamW on a flat fp32 shard in one pass on the GPU: clip, moments, decay, master weights and their bf16 copy.
//
// Scalars that change from step to step (learning rate, update count, clip factor, non-finite flag) are read from
// device memory, so that a step needs no host synchronisation and a captured graph may be replayed. Bound by memory:
// 16 bytes read, 12 or 14 written, and 4 more where the gradient is zeroed, for each parameter.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int THREADS = 256;
constexpr int VECTOR = 4;  // 16-byte loads and stores


struct Factors {
    float decay, step_size, correction, clip;
};

struct Element {
    float parameter, gradient, exp_avg, exp_avg_sq;
};

// The same for all threads; powers in fp64 as torch does, since 1 - beta2^t cancels for small t.
__device__ Factors make_factors(const float* lr, const float* updates, const float* clip, double beta1, double beta2,
                                double weight_decay) {
    const double step = (double)*updates + 1.0, rate = *lr;
    return {(float)(1.0 - rate * weight_decay), (float)(rate / (1.0 - pow(beta1, step))),
            (float)sqrt(1.0 - pow(beta2, step)), clip ? *clip : 1.0f};
}

__device__ __forceinline__ void update(Element& e, const Factors& f, float weight1, float beta2, float weight2,
                                       float eps) {
    const float g = e.gradient * f.clip;
    e.exp_avg += weight1 * (g - e.exp_avg);
    e.exp_avg_sq = beta2 * e.exp_avg_sq + weight2 * (g * g);
    const float denominator = sqrtf(e.exp_avg_sq) / f.correction + eps;
    e.parameter = e.parameter * f.decay - f.step_size * e.exp_avg / denominator;
}

__global__ void __launch_bounds__(THREADS)
    adamw_kernel(int64_t size, float* __restrict__ parameter, float* __restrict__ gradient, float* __restrict__ exp_avg,
                 float* __restrict__ exp_avg_sq, __nv_bfloat16* __restrict__ low_precision, const float* lr,
                 const float* updates, const float* clip, const float* non_finite, double beta1, double beta2,
                 float eps, double weight_decay, bool zero_gradient, bool aligned) {
    __shared__ Factors shared;
    const bool skip = non_finite != nullptr && *non_finite != 0.0f;
    if (threadIdx.x == 0) shared = make_factors(lr, updates, clip, beta1, beta2, weight_decay);
    __syncthreads();
    const Factors f = shared;
    const float weight1 = (float)(1.0 - beta1), keep2 = (float)beta2, weight2 = (float)(1.0 - beta2);
    const int64_t stride = (int64_t)gridDim.x * THREADS;
    const int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t vectors = aligned ? size / VECTOR : 0;

    for (int64_t i = thread; i < vectors; i += stride) {
        float4* gradients = reinterpret_cast<float4*>(gradient) + i;
        if (!skip) {
            float4 p = reinterpret_cast<float4*>(parameter)[i], g = *gradients;
            float4 m = reinterpret_cast<float4*>(exp_avg)[i], v = reinterpret_cast<float4*>(exp_avg_sq)[i];
            Element lanes[VECTOR] = {
                {p.x, g.x, m.x, v.x}, {p.y, g.y, m.y, v.y}, {p.z, g.z, m.z, v.z}, {p.w, g.w, m.w, v.w}};
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) update(lanes[k], f, weight1, keep2, weight2, eps);
            p = make_float4(lanes[0].parameter, lanes[1].parameter, lanes[2].parameter, lanes[3].parameter);
            m = make_float4(lanes[0].exp_avg, lanes[1].exp_avg, lanes[2].exp_avg, lanes[3].exp_avg);
            v = make_float4(lanes[0].exp_avg_sq, lanes[1].exp_avg_sq, lanes[2].exp_avg_sq, lanes[3].exp_avg_sq);
            reinterpret_cast<float4*>(parameter)[i] = p;
            reinterpret_cast<float4*>(exp_avg)[i] = m;
            reinterpret_cast<float4*>(exp_avg_sq)[i] = v;
            if (low_precision) {
                __nv_bfloat162* low = reinterpret_cast<__nv_bfloat162*>(low_precision) + 2 * i;
                low[0] = __floats2bfloat162_rn(p.x, p.y);
                low[1] = __floats2bfloat162_rn(p.z, p.w);
            }
        }
        if (zero_gradient) *gradients = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (int64_t i = vectors * VECTOR + thread; i < size; i += stride) {
        if (!skip) {
            Element e = {parameter[i], gradient[i], exp_avg[i], exp_avg_sq[i]};
            update(e, f, weight1, keep2, weight2, eps);
            parameter[i] = e.parameter;
            exp_avg[i] = e.exp_avg;
            exp_avg_sq[i] = e.exp_avg_sq;
            if (low_precision) low_precision[i] = __float2bfloat16_rn(e.parameter);
        }
        if (zero_gradient) gradient[i] = 0.0f;
    }
}

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

// All pointers are device memory; low_precision (bf16), clip and non_finite may be null. `updates` counts the updates
// before this one. Nothing but the gradient changes where *non_finite is not 0. Returns the launch's cudaError_t.
extern "C" __attribute__((visibility("default"))) int engine_adamw_cuda(
    void* stream, int64_t size, float* parameter, float* gradient, float* exp_avg, float* exp_avg_sq,
    void* low_precision, const float* lr, const float* updates, const float* clip, const float* non_finite,
    double beta1, double beta2, double eps, double weight_decay, int zero_gradient) {
    if (size <= 0) return (int)cudaSuccess;
    int device = 0, processors = 1;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return (int)status;
    const bool aligned = aligned16(parameter) && aligned16(gradient) && aligned16(exp_avg) && aligned16(exp_avg_sq) &&
                         aligned16(low_precision);
    const int64_t wanted = (size + THREADS * VECTOR - 1) / (THREADS * VECTOR);
    const int blocks = (int)(wanted < (int64_t)processors * 8 ? wanted : (int64_t)processors * 8);
    adamw_kernel<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        size, parameter, gradient, exp_avg, exp_avg_sq, static_cast<__nv_bfloat16*>(low_precision), lr, updates, clip,
        non_finite, beta1, beta2, (float)eps, weight_decay, zero_gradient != 0, aligned);
    return (int)cudaGetLastError();
}

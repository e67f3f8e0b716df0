// cuBLAS on a machine without a GPU: the one GEMM this project uses, over oneDNN.
//
// Arguments are checked as strictly as cuBLAS checks them, column-major leading dimensions included. Results do not
// depend on how many cores a rank owns: each OpenMP thread computes slabs of the output with single-threaded oneDNN
// (inside a parallel region it runs with one thread), and slabs whose sizes are multiples of 16 give bitwise the whole
// product's values. (oneDNN's own threading splits K for some shapes, which changes the sums.) bf16 products go through
// oneDNN's matmul where the processor has AVX-512; all other 16-bit products are computed in fp32 from converted
// operands, which is right everywhere and slow.
#pragma once

#include <omp.h>
#include <dnnl.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };

struct cublasContext {
    cudaStream_t stream = nullptr;
};
using cublasHandle_t = cublasContext*;

inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
    *handle = new cublasContext;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

namespace standin {

inline size_t size_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

// A stored matrix: its first element, type, distance between rows, and whether it stands for its transpose.
struct Stored {
    const char* data;
    cudaDataType type;
    int64_t ld;
    bool transposed;
};

// The matrix [rows, cols] that `x` stands for, in fp32.
inline void widen(const Stored& x, int64_t rows, int64_t cols, std::vector<float>& out) {
    out.resize(size_t(rows * cols));
    auto convert = [&](auto* data) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; ++j)
                out[size_t(i * cols + j)] = float(x.transposed ? data[j * x.ld + i] : data[i * x.ld + j]);
    };
    if (x.type == CUDA_R_16BF) convert(reinterpret_cast<const __nv_bfloat16*>(x.data));
    if (x.type == CUDA_R_16F) convert(reinterpret_cast<const __half*>(x.data));
    if (x.type == CUDA_R_32F) convert(reinterpret_cast<const float*>(x.data));
}

// out [rows, cols] = scale left [rows, k] right [k, cols] + keep out, row-major, from operands converted to fp32.
inline bool multiply_widened(int rows, int cols, int k, float scale, const Stored& left, const Stored& right,
                             float keep, void* out, cudaDataType out_type, int64_t ldc) {
    thread_local std::vector<float> a, b, c;
    widen(left, rows, k, a);
    widen(right, k, cols, b);
    widen({static_cast<const char*>(out), out_type, ldc, false}, rows, cols, c);
    if (dnnl_sgemm('N', 'N', rows, cols, k, scale, a.data(), k, b.data(), cols, keep, c.data(), cols) != dnnl_success)
        return false;
    auto convert = [&](auto* data) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; ++j) data[i * ldc + j] = c[size_t(i * cols + j)];
    };
    if (out_type == CUDA_R_16BF) convert(static_cast<__nv_bfloat16*>(out));
    if (out_type == CUDA_R_16F) convert(static_cast<__half*>(out));
    if (out_type == CUDA_R_32F) convert(static_cast<float*>(out));
    return true;
}

// The same for bf16 operands and scale 1, by oneDNN's matmul. Primitives are kept: making one takes a millisecond.
inline bool multiply_bf16(int rows, int cols, int k, const Stored& left, const Stored& right, float keep, void* out,
                          cudaDataType out_type, int64_t ldc) {
    using namespace dnnl;
    using Key = std::tuple<int, int, int, bool, bool, int64_t, int64_t, int64_t, bool, float>;
    struct Primitive {
        memory::desc left, right, out;
        matmul run;
    };
    thread_local const engine cpu(engine::kind::cpu, 0);
    thread_local stream in_order(cpu);
    thread_local std::map<Key, Primitive> primitives;
    const bool wide = out_type == CUDA_R_32F;
    const Key key{rows, cols, k, left.transposed, right.transposed, left.ld, right.ld, ldc, wide, keep};
    auto found = primitives.find(key);
    if (found == primitives.end()) {
        auto desc = [](int64_t r, int64_t c, memory::data_type type, int64_t ld, bool transposed) {
            return memory::desc({r, c}, type, transposed ? memory::dims{1, ld} : memory::dims{ld, 1});
        };
        const memory::desc a = desc(rows, k, memory::data_type::bf16, left.ld, left.transposed);
        const memory::desc b = desc(k, cols, memory::data_type::bf16, right.ld, right.transposed);
        const memory::desc c = desc(rows, cols, wide ? memory::data_type::f32 : memory::data_type::bf16, ldc, false);
        primitive_attr attributes;
        post_ops after;
        if (keep != 0) after.append_sum(keep);
        attributes.set_post_ops(after);
#if DNNL_VERSION_MAJOR >= 3
        const matmul::primitive_desc made(cpu, a, b, c, attributes);
#else
        const matmul::primitive_desc made(matmul::desc(a, b, c), attributes, cpu);
#endif
        found = primitives.emplace(key, Primitive{a, b, c, matmul(made)}).first;
    }
    const Primitive& primitive = found->second;
    primitive.run.execute(in_order, {{DNNL_ARG_SRC, memory(primitive.left, cpu, const_cast<char*>(left.data))},
                                     {DNNL_ARG_WEIGHTS, memory(primitive.right, cpu, const_cast<char*>(right.data))},
                                     {DNNL_ARG_DST, memory(primitive.out, cpu, out)}});
    return true;
}

// out [rows, cols] = scale left [rows, k] right [k, cols] + keep out, row-major, by one thread.
inline bool multiply(int rows, int cols, int k, float scale, const Stored& left, const Stored& right, float keep,
                     void* out, cudaDataType out_type, int64_t ldc) {
    if (left.type == CUDA_R_32F)
        return dnnl_sgemm(left.transposed ? 'T' : 'N', right.transposed ? 'T' : 'N', rows, cols, k, scale,
                          reinterpret_cast<const float*>(left.data), left.ld,
                          reinterpret_cast<const float*>(right.data), right.ld, keep, static_cast<float*>(out),
                          ldc) == dnnl_success;
    omp_set_num_threads(1);  // of this thread's own region
    static const bool has_vectors = __builtin_cpu_supports("avx512bw");
    const bool by_onednn =
        left.type == CUDA_R_16BF && has_vectors && scale == 1 && k > 0 && (keep == 0 || out_type == CUDA_R_32F);
    if (by_onednn) return multiply_bf16(rows, cols, k, left, right, keep, out, out_type, ldc);
    return multiply_widened(rows, cols, k, scale, left, right, keep, out, out_type, ldc);
}

}  // namespace standin

// C = alpha op(A) op(B) + beta C, column-major: op(A) is [m, k], op(B) [k, n], C [m, n]; `batch` of them, stride*
// elements apart. A and B are of one type (fp32, bf16, fp16), C of that or fp32; sums are fp32. With beta = 0, C is not
// read. oneDNN is row-major, so it computes C^T = op(B)^T op(A)^T, n rows.
inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                                                 int m, int n, int k, const void* alpha, const void* A,
                                                 cudaDataType a_type, int lda, long long stride_a, const void* B,
                                                 cudaDataType b_type, int ldb, long long stride_b, const void* beta,
                                                 void* C, cudaDataType c_type, int ldc, long long stride_c, int batch,
                                                 cublasComputeType_t compute, cublasGemmAlgo_t) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    const int a_rows = ta == CUBLAS_OP_N ? m : k, b_rows = tb == CUBLAS_OP_N ? k : n;
    auto at_least_one = [](int rows) { return rows > 1 ? rows : 1; };
    if (m < 0 || n < 0 || k < 0 || batch < 0 || lda < at_least_one(a_rows) || ldb < at_least_one(b_rows) ||
        ldc < at_least_one(m) || !alpha || !beta)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (a_type != b_type || (c_type != a_type && c_type != CUDA_R_32F) || compute != CUBLAS_COMPUTE_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m == 0 || n == 0 || batch == 0) return CUBLAS_STATUS_SUCCESS;
    if ((k > 0 && (!A || !B)) || !C) return CUBLAS_STATUS_INVALID_VALUE;
    standin::wait_stream(handle->stream);

    const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
    const size_t size = standin::size_of(a_type), c_size = standin::size_of(c_type);
    // A part of one product: rows [row, row + rows) and columns [col, col + cols) of the row-major C^T.
    auto multiply = [&](int index, int row, int rows, int col, int cols) {
        const int64_t left = index * stride_b + int64_t(row) * (tb == CUBLAS_OP_N ? ldb : 1);
        const int64_t right = index * stride_a + int64_t(col) * (ta == CUBLAS_OP_N ? 1 : lda);
        const int64_t out = index * stride_c + int64_t(row) * ldc + col;
        return standin::multiply(rows, cols, k, scale,
                                 {static_cast<const char*>(B) + left * int64_t(size), b_type, ldb, tb == CUBLAS_OP_T},
                                 {static_cast<const char*>(A) + right * int64_t(size), a_type, lda, ta == CUBLAS_OP_T},
                                 keep, static_cast<char*>(C) + out * int64_t(c_size), c_type, ldc);
    };
    const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    const bool by_rows = n >= m;
    const int extent = by_rows ? n : m, units = extent / 16;
    int slabs = std::min(units, threads);
    // In 16 bits oneDNN sums in an order that depends on a slab's size, so their number depends on the shape only
    if (a_type != CUDA_R_32F) slabs = std::clamp(extent / 192, 1, 16);
    bool ok = true;
    if (threads > 1 && batch > 1) {
#pragma omp parallel for schedule(static) reduction(&& : ok)
        for (int index = 0; index < batch; ++index) ok = multiply(index, 0, n, 0, m) && ok;
    } else if (batch == 1 && slabs > 1) {
        // Slabs of whole units of 16, the last with the rest: a slab of one row would be summed in another order
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : ok)
        for (int slab = 0; slab < slabs; ++slab) {
            const int begin = units * slab / slabs * 16;
            const int end = slab + 1 < slabs ? units * (slab + 1) / slabs * 16 : extent;
            ok = (by_rows ? multiply(0, begin, end - begin, 0, m) : multiply(0, 0, n, begin, end - begin)) && ok;
        }
    } else {
        omp_set_num_threads(1);  // oneDNN's threads too
        for (int index = 0; index < batch; ++index) ok = multiply(index, 0, n, 0, m) && ok;
        omp_set_num_threads(threads);
    }
    return ok ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

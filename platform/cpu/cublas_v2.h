// cuBLAS on a machine without a GPU: the one GEMM this project uses, over oneDNN.
//
// Arguments are checked as strictly as cuBLAS checks them, column-major leading dimensions included. Results do not
// depend on how many cores a rank owns: each OpenMP thread computes slabs of the output with single-threaded oneDNN
// (inside a parallel region it runs with one thread), and slabs whose sizes are multiples of 16 give bitwise the whole
// product's values. (oneDNN's own threading splits K for some shapes, which changes the sums.)
#pragma once

#include <dnnl.h>
#include <omp.h>

#include <cstdint>

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
enum cudaDataType { CUDA_R_32F = 0 };

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

// C = alpha op(A) op(B) + beta C, column-major: op(A) is [m, k], op(B) [k, n], C [m, n], fp32; `batch` of them, stride*
// elements apart. With beta = 0, C is not read. oneDNN's sgemm is row-major, so it computes C^T = op(B)^T op(A)^T, n
// rows.
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
    if (a_type != CUDA_R_32F || b_type != CUDA_R_32F || c_type != CUDA_R_32F || compute != CUBLAS_COMPUTE_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m == 0 || n == 0 || batch == 0) return CUBLAS_STATUS_SUCCESS;
    if ((k > 0 && (!A || !B)) || !C) return CUBLAS_STATUS_INVALID_VALUE;
    standin::wait_stream(handle->stream);

    const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
    // A part of one product: rows [row, row + rows) and columns [col, col + cols) of the row-major C^T.
    auto multiply = [&](int index, int row, int rows, int col, int cols) {
        const float* left =
            static_cast<const float*>(B) + index * stride_b + int64_t(row) * (tb == CUBLAS_OP_N ? ldb : 1);
        const float* right =
            static_cast<const float*>(A) + index * stride_a + int64_t(col) * (ta == CUBLAS_OP_N ? 1 : lda);
        float* out = static_cast<float*>(C) + index * stride_c + int64_t(row) * ldc + col;
        return dnnl_sgemm(tb == CUBLAS_OP_N ? 'N' : 'T', ta == CUBLAS_OP_N ? 'N' : 'T', rows, cols, k, scale, left, ldb,
                          right, lda, keep, out, ldc) == dnnl_success;
    };
    const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
    const bool by_rows = n >= m;
    const int extent = by_rows ? n : m, units = extent / 16;
    bool ok = true;
    if (threads > 1 && batch > 1) {
#pragma omp parallel for schedule(static) reduction(&& : ok)
        for (int index = 0; index < batch; ++index) ok = multiply(index, 0, n, 0, m) && ok;
    } else if (threads > 1 && units > 1) {
        // Slabs of whole units of 16, the last with the rest: a slab of one row would be summed in another order
        const int slabs = units < threads ? units : threads;
#pragma omp parallel for schedule(static) reduction(&& : ok)
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

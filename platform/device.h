// What every component takes for granted from the CUDA toolkit: checked calls, memory, kernel launches and GEMMs.
//
// The same source compiles with nvcc (cuda_runtime.h and cublas_v2.h are NVIDIA's) and with g++ (they are the
// stand-in's, platform/cpu/). Rules kept here:
//   - every CUDA, cuBLAS and MPI call is checked; a failure names rank, call, file and line and ends every rank;
//   - kernels are written as "one block per row, threads stride over columns by blockDim.x", or as a flat range;
//     threads cooperate only through block_sum, block_max and __syncthreads, so one thread per block is a legal launch;
//   - every allocation starts at a multiple of 64 bytes: a vector loop that peels by address would sum in another
//   order.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "platform/mpi/progress.h"
#include "platform/precision.h"

// ---------------------------------------------------------------------------------------------------------------------
// Errors

// A mistake of the user's: the message names the flag, the numbers and what would be valid. main() prints it once and
// exits with status 2.
struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A failure while running. Prints rank, call, place and reason, then ends every rank of the job: none is left waiting.
[[noreturn]] inline void fail(const char* file, int line, const std::string& call, const std::string& reason) {
    int initialized = 0, finalized = 0, rank = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    const bool mpi = initialized && !finalized;
    if (mpi) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::fflush(stdout);
    std::fprintf(stderr, "rank %d failed: %s at %s:%d: %s\n", rank, call.c_str(), file, line, reason.c_str());
    std::fflush(stderr);
    usleep(300000);  // the launcher may drop what it has not yet read when the job is aborted
    if (mpi) MPI_Abort(MPI_COMM_WORLD, 1);
    std::_Exit(1);
}

inline std::string mpi_error(int status) {
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(status, text, &length);
    return std::string(text, length);
}

#define CUDA_CHECK(call)                                                                          \
    do {                                                                                          \
        const cudaError_t status_ = (call);                                                       \
        if (status_ != cudaSuccess) fail(__FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
    } while (0)
#define CUBLAS_CHECK(call)                                                                    \
    do {                                                                                      \
        const cublasStatus_t status_ = (call);                                                \
        if (status_ != CUBLAS_STATUS_SUCCESS)                                                 \
            fail(__FILE__, __LINE__, #call, "cuBLAS status " + std::to_string(int(status_))); \
    } while (0)
#define MPI_CHECK(call)                                                                  \
    do {                                                                                 \
        const int status_ = (call);                                                      \
        if (status_ != MPI_SUCCESS) fail(__FILE__, __LINE__, #call, mpi_error(status_)); \
    } while (0)

// Waits for a message without spinning: between polls the core is offered to the other ranks.
inline void wait_for(MPI_Request request, const char* call) {
    int done = 0;
    auto finished = [&] {
        if (!done) MPI_CHECK(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
        return done != 0;
    };
    standin::wait(finished, [&] { return std::string(call); });
}
// A nonblocking MPI call, all arguments but the request, and its wait: where ranks outnumber cores, a blocking call,
// which spins, takes a hundred times as long.
#define MPI_FINISH(call, ...)                    \
    do {                                         \
        MPI_Request request_;                    \
        MPI_CHECK(call(__VA_ARGS__, &request_)); \
        wait_for(request_, #call);               \
    } while (0)

// ---------------------------------------------------------------------------------------------------------------------
// A rank's device

// Seconds on a monotonic clock.
inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Something a rank did, for --trace (platform/trace.h). Seconds by now().
struct TraceEvent {
    std::string name, category;
    double start = 0, end = 0;
};

// A rank's device: one stream for computation, one cuBLAS handle. Counts the floating-point operations of every GEMM
// (2 M N K each); when `profiling`, the seconds spent in each kernel and in the GEMMs (synchronising after each); when
// `tracing`, the larger operations as events.
struct Device {
    cudaStream_t stream = nullptr;
    cublasHandle_t blas = nullptr;
    double gemm_flops = 0;
    bool profiling = false;
    std::map<std::string, double> seconds;
    bool tracing = false;
    std::vector<TraceEvent> events;

    Device() {
        CUDA_CHECK(cudaStreamCreate(&stream));
        CUBLAS_CHECK(cublasCreate(&blas));
        CUBLAS_CHECK(cublasSetStream(blas, stream));
    }
    ~Device() {
        cublasDestroy(blas);
        cudaStreamDestroy(stream);
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
};

// Adds the time until its end to `device.seconds[name]` when profiling.
struct ProfileScope {
    Device& device;
    const std::string name;
    double start = 0;
    ProfileScope(Device& device, std::string name) : device(device), name(std::move(name)) {
        if (device.profiling) start = now();
    }
    ~ProfileScope() {
        if (!device.profiling) return;
        cudaStreamSynchronize(device.stream);
        device.seconds[name] += now() - start;
    }
};

// Records an event from here to its end when tracing; name() is asked for only then.
struct TraceScope {
    Device& device;
    const bool active;
    size_t index = 0;
    template <class Name>
    TraceScope(Device& device, const char* category, Name name) : device(device), active(device.tracing) {
        if (!active) return;
        cudaStreamSynchronize(device.stream);
        index = device.events.size();
        device.events.push_back({name(), category, now(), 0});
    }
    ~TraceScope() {
        if (!active) return;
        cudaStreamSynchronize(device.stream);
        device.events[index].end = now();
    }
};

// Device memory for `size` elements of T, zeroed, 64-byte aligned, freed with its owner.
template <class T>
struct DeviceBuffer {
    T* data = nullptr;
    size_t size = 0;

    DeviceBuffer() = default;
    explicit DeviceBuffer(size_t size) : size(size) {
        if (size == 0) return;
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&data), size * sizeof(T)));
        CUDA_CHECK(cudaMemset(data, 0, size * sizeof(T)));
    }
    ~DeviceBuffer() {
        if (data) cudaFree(data);
    }
    DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data, other.data);
        std::swap(size, other.size);
        return *this;
    }
};

// `count` elements rounded up so that they divide into `shards` parts that each begin at a multiple of 64 bytes, in
// fp32 and in `real`.
inline size_t padded_size(int64_t count, int shards = 1) {
    const size_t unit = 64 / sizeof(real) * size_t(shards);
    return (size_t(count) + unit - 1) / unit * unit;
}

// Copies `count` elements to or from the device and waits until they are there.
template <class T>
void to_device(Device& device, T* destination, const T* source, size_t count) {
    CUDA_CHECK(cudaMemcpyAsync(destination, source, count * sizeof(T), cudaMemcpyHostToDevice, device.stream));
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
}
template <class T>
void to_host(Device& device, T* destination, const T* source, size_t count) {
    CUDA_CHECK(cudaMemcpyAsync(destination, source, count * sizeof(T), cudaMemcpyDeviceToHost, device.stream));
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
}
template <class T>
std::vector<T> to_vector(Device& device, const T* source, size_t count) {
    std::vector<T> values(count);
    to_host(device, values.data(), source, count);
    return values;
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

constexpr int kBlock = 256;  // threads per block on a GPU; the CPU stand-in runs every block with one thread

// The name of a kernel, taken from the compiler's own spelling of this function's type.
template <auto kernel>
std::string kernel_name() {
    std::string_view name = __PRETTY_FUNCTION__;
    name.remove_prefix(name.find("kernel = ") + 9);
    return std::string(name.substr(0, name.find_first_of("<;]")));
}

// Starts `kernel` on `grid` blocks of `block` threads. The one place where the two toolkits differ in syntax.
template <auto kernel, class... Args>
void launch(Device& device, int64_t grid, int block, Args... args) {
    if (grid == 0) return;
    ProfileScope scope(device, device.profiling ? kernel_name<kernel>() : std::string());
#ifdef __CUDACC__
    kernel<<<unsigned(grid), block, 0, device.stream>>>(args...);
    CUDA_CHECK(cudaGetLastError());
#else
    standin::run_blocks(grid, block, [&] { kernel(args...); });
#endif
}

// The sum (maximum) of `x` over the threads of a block, returned to every thread. All threads must call it. Right for
// every blockDim.x up to 1024; added in an order fixed by blockDim.x.
template <bool maximum, class T>
__device__ inline T block_reduce(T x) {
    if (blockDim.x == 1) return x;
    __shared__ T warps[32];
    auto combine = [](T a, T b) { return maximum ? (a > b ? a : b) : a + b; };
    // The last warp may be short: lanes that do not exist are left out, and lane 0 still gets all that do
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, rest = blockDim.x - 32 * warp;
    const unsigned lanes = rest < 32 ? rest : 32, mask = 0xffffffffu >> (32 - lanes);
    for (unsigned offset = 16; offset > 0; offset /= 2) {
        const T other = __shfl_xor_sync(mask, x, int(offset));
        if ((lane ^ offset) < lanes) x = combine(x, other);
    }
    __syncthreads();  // the previous reduction's readers are done with `warps`
    if (lane == 0) warps[warp] = x;
    __syncthreads();
    x = warps[0];
    for (unsigned i = 1; i < (blockDim.x + 31) / 32; ++i) x = combine(x, warps[i]);
    return x;
}
template <class T>
__device__ inline T block_sum(T x) {
    return block_reduce<false>(x);
}
template <class T>
__device__ inline T block_max(T x) {
    return block_reduce<true>(x);
}

// A flat range: block k owns elements [k * kFlat, (k+1) * kFlat) of n. Cut at multiples of 64 whatever the number of
// cores, so that which elements fall into a vector loop's scalar tail never depends on the machine.
constexpr int64_t kFlat = 4096;
inline int64_t flat_grid(int64_t n) { return (n + kFlat - 1) / kFlat; }
template <class F>
__device__ inline void for_flat(int64_t n, F f) {
    const int64_t begin = int64_t(blockIdx.x) * kFlat;
    const int64_t end = begin + kFlat < n ? begin + kFlat : n;
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) f(i);
}

// ---------------------------------------------------------------------------------------------------------------------
// GEMM

template <class T>
constexpr cudaDataType blas_type() {
    if constexpr (std::is_same_v<T, float>) return CUDA_R_32F;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return CUDA_R_16BF;
    if constexpr (std::is_same_v<T, __half>) return CUDA_R_16F;
}

// C = alpha op(A) op(B) + beta C for `batch` row-major matrices on the device: op(A) is [m, k], op(B) is [k, n], C is
// [m, n], in `real` (activations) or fp32 (parameters' gradients), accumulated in fp32; op transposes where
// `transposed`; ld is the distance between stored rows and stride the distance between the batch's matrices, in
// elements. cuBLAS is column-major, so it is asked for C^T = op(B)^T op(A)^T.
struct Matrix {
    const real* data;
    int64_t ld;
    int64_t stride = 0;
    bool transposed = false;
};
template <class Out>
void gemm(Device& device, int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, Out* c, int64_t ldc, float alpha = 1.0f,
          float beta = 0.0f, int64_t stride_c = 0, int64_t batch = 1) {
    if (m == 0 || n == 0 || batch == 0) return;
    ProfileScope scope(device, device.profiling ? (batch > 1 ? "gemm (batched)" : "gemm") : "");
    device.gemm_flops += 2.0 * double(m) * double(n) * double(k) * double(batch);
    CUBLAS_CHECK(cublasGemmStridedBatchedEx(
        device.blas, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, int(n), int(m),
        int(k), &alpha, b.data, blas_type<real>(), int(b.ld), b.stride, a.data, blas_type<real>(), int(a.ld), a.stride,
        &beta, c, blas_type<Out>(), int(ldc), stride_c, int(batch), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// The CUDA runtime on a machine without a GPU: the few names this project uses, with the same meaning on the host.
//
// A kernel runs as one thread per block: threadIdx and blockDim are compile-time constants, so a loop "for (j =
// threadIdx.x; ...; j += blockDim.x)" is a plain loop that g++ vectorises; blocks are divided among the rank's OpenMP
// threads. Everything executes at once, at the call, except messages (nccl.h): a stream is the list of the messages
// still on their way, an event a place in such a list, and whoever waits for either lets all of them progress.
#pragma once

#include <omp.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../mpi/progress.h"

#define __global__ static
#define __device__
#define __host__

#ifdef PTDP_FIBERS
#include "fibers.h"  // for tests: real threads per block
#else
#define __shared__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
namespace standin {
struct ZeroIndex {
    static constexpr unsigned x = 0, y = 0, z = 0;
};
struct UnitSize {
    static constexpr unsigned x = 1, y = 1, z = 1;
};
}  // namespace standin
constexpr standin::ZeroIndex threadIdx;
constexpr standin::UnitSize blockDim;
inline thread_local dim3 blockIdx, gridDim;

inline void __syncthreads() {}
template <class T>
T __shfl_xor_sync(unsigned, T value, int) {
    return value;
}
#endif

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
inline const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorNotReady:
            return "device not ready";
    }
    return "unknown error";
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams, events and what they wait for

struct CUstream_st {
    std::deque<std::shared_ptr<standin::Operation>> pending;
};
struct CUevent_st {
    std::shared_ptr<standin::Operation> last;  // of the stream when the event was recorded
    double time = 0;
};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

namespace standin {

inline std::vector<cudaStream_t>& streams() {
    static std::vector<cudaStream_t> list;
    return list;
}

// Polls the messages of every stream once; true if anything moved.
inline bool progress_streams() {
    bool moved = false;
    for (cudaStream_t stream : streams()) {
        bool earlier_done = true;  // an operation is complete only behind all those before it on its stream
        for (auto& operation : stream->pending) {
            if (!operation->started) {
                if (operation != stream->pending.front()) break;  // only in rendezvous mode: one after another
                operation->started = true;
                operation->start();
                moved = true;
            }
            if (!operation->done && operation->finished() && earlier_done) operation->done = moved = true;
            earlier_done = earlier_done && operation->done;
        }
        while (!stream->pending.empty() && stream->pending.front()->done) stream->pending.pop_front();
    }
    return moved;
}

// Takes a share of the operation: progress() drops the queue's own when it is done.
inline void wait_operation(std::shared_ptr<Operation> operation) {
    if (operation) wait([&] { return operation->done; }, [&] { return operation->waits_for(); });
}
inline void wait_stream(cudaStream_t stream) {
    while (stream && !stream->pending.empty()) wait_operation(stream->pending.front());
}

#ifndef PTDP_FIBERS
// Runs f() once per block. A rank with several cores divides the blocks among them; results cannot depend on how, since
// no block reads what another writes.
template <class F>
void run_blocks(int64_t grid, int /*threads per block: always run as one*/, F f) {
    auto run = [&](int64_t block) {
        blockIdx.x = unsigned(block);
        gridDim.x = unsigned(grid);
        f();
    };
    if (grid > 1 && omp_get_max_threads() > 1 && !omp_in_parallel()) {
#pragma omp parallel for schedule(static)
        for (int64_t block = 0; block < grid; ++block) run(block);
    } else {
        for (int64_t block = 0; block < grid; ++block) run(block);
    }
}
#endif

}  // namespace standin

inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = new CUstream_st;
    standin::streams().push_back(*stream);
    standin::state().progress_streams = standin::progress_streams;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    standin::wait_stream(stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    standin::wait_stream(stream);
    auto& streams = standin::streams();
    for (size_t i = 0; i < streams.size(); ++i)
        if (streams[i] == stream) streams.erase(streams.begin() + i);
    delete stream;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    for (cudaStream_t stream : standin::streams()) standin::wait_stream(stream);
    return cudaSuccess;
}

constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->last = stream->pending.empty() ? nullptr : stream->pending.back();
    event->time = standin::wall_seconds();
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    standin::wait_operation(event->last);
    return cudaSuccess;
}
// On a GPU the stream waits; here the host does, at the call, since what follows on the stream executes at its call.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned = 0) {
    standin::wait_operation(event->last);
    return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

// 64-byte aligned, so that vector loops do not depend on where a buffer lies; large buffers ask for huge pages, but for
// their end, so that no more is used than was asked for.
inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > SIZE_MAX / 2) return cudaErrorMemoryAllocation;
#ifdef PTDP_FIBERS
    *pointer = standin::guarded_malloc(bytes);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
#else
    const size_t huge = size_t(2) << 20, alignment = bytes >= 2 * huge ? huge : 64;
    if (posix_memalign(pointer, alignment, (bytes + 63) / 64 * 64) != 0) return cudaErrorMemoryAllocation;
    if (alignment == huge) madvise(*pointer, bytes / huge * huge, MADV_HUGEPAGE);
    return cudaSuccess;
#endif
}
inline cudaError_t cudaFree(void* pointer) {
#ifdef PTDP_FIBERS
    standin::guarded_free(pointer);
#else
    free(pointer);
#endif
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
    if (bytes > 0) memset(pointer, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
    standin::wait_stream(stream);
    return cudaMemset(pointer, value, bytes);
}
inline cudaError_t cudaMemcpy(void* destination, const void* source, size_t bytes, cudaMemcpyKind) {
    if (bytes > 0) memmove(destination, source, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    standin::wait_stream(stream);
    return cudaMemcpy(destination, source, bytes, kind);
}

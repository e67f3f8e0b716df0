// Kernels run as a GPU runs them, for the tests: every CUDA thread is a fiber (Boost.Context), with real threadIdx and
// blockDim, __syncthreads, warp shuffles and shared memory. cuda_runtime.h includes this when PTDP_FIBERS is defined.
//
// The order in which blocks and threads run is drawn from $PTDP_FIBER_SEED, and $PTDP_FIBER_BLOCK replaces the number
// of threads per block. Ends the process with the kernel's block and thread when
//   - a barrier is not reached by all threads of a block, or a shuffle not by all lanes of its mask;
//   - device memory is accessed outside of an allocation: each ends at a page that may not be touched, and what lies
//     between is checked when it is freed.
// Shared memory holds NaNs when a block starts. A race shows as a result that depends on the seed.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <vector>

// Every shared variable lies in one section, so that all of them can be poisoned
#define __shared__ static __attribute__((section("ptdp_shared")))
extern "C" char __start_ptdp_shared[] __attribute__((weak));
extern "C" char __stop_ptdp_shared[] __attribute__((weak));

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockDim, blockIdx, gridDim;

namespace standin {

constexpr int kLanes = 32;

// A thread of the block that is running.
struct Fiber {
    enum class Waits { nothing, barrier, shuffle };
    boost::context::fiber context;
    Waits waits = Waits::nothing;
    bool done = false;
    unsigned mask = 0;      // of the shuffle it waits in
    uint64_t shuffles = 0;  // it has taken part in
};

struct BlockState {
    std::vector<Fiber> fibers;
    boost::context::fiber scheduler;
    // What lanes hand over, by warp, parity of the shuffle, lane: a lane is at most one shuffle ahead of another
    std::vector<std::array<std::array<uint64_t, kLanes>, 2>> handed;
    size_t current = 0;
    bool running = false;
    std::mt19937 order{unsigned(std::getenv("PTDP_FIBER_SEED") ? std::atoi(std::getenv("PTDP_FIBER_SEED")) : 1)};
};
inline BlockState& block_state() {
    static BlockState state;
    return state;
}

[[noreturn]] inline void kernel_failed(const char* reason) {
    std::fprintf(stderr, "kernel failed in block %u, thread %u of %u: %s\n", blockIdx.x, threadIdx.x, blockDim.x,
                 reason);
    std::_Exit(3);
}

// Goes back to the scheduler until what the current fiber waits for has happened.
inline void yield_fiber(Fiber::Waits waits) {
    BlockState& block = block_state();
    block.fibers[block.current].waits = waits;
    block.scheduler = std::move(block.scheduler).resume();
}

// Runs the threads of one block, in random order, each until it waits or ends.
template <class F>
void run_block(unsigned threads, F& kernel) {
    BlockState& block = block_state();
    std::memset(__start_ptdp_shared, 0xff, size_t(__stop_ptdp_shared - __start_ptdp_shared));
    block.fibers.clear();
    block.fibers.resize(threads);
    block.handed.assign((threads + kLanes - 1) / kLanes, {});
    static std::vector<boost::context::stack_context> stacks;
    static boost::context::protected_fixedsize_stack allocator(64 * 1024);
    while (stacks.size() < threads) stacks.push_back(allocator.allocate());
    struct Kept {  // stacks are used again by the next block
        void deallocate(boost::context::stack_context&) {}
    };
    for (unsigned i = 0; i < threads; ++i) {
        boost::context::preallocated place(stacks[i].sp, stacks[i].size, stacks[i]);
        block.fibers[i].context =
            boost::context::fiber(std::allocator_arg, place, Kept(), [&, i](boost::context::fiber&& back) {
                block.scheduler = std::move(back);
                kernel();
                block.fibers[i].done = true;
                return std::move(block.scheduler);
            });
    }
    std::vector<unsigned> ready(threads);
    std::iota(ready.begin(), ready.end(), 0u);
    unsigned left = threads;
    while (left > 0) {
        if (ready.empty()) {
            size_t at_barrier = 0;
            for (const Fiber& fiber : block.fibers) at_barrier += !fiber.done && fiber.waits == Fiber::Waits::barrier;
            if (at_barrier == threads) {
                for (unsigned i = 0; i < threads; ++i) {
                    block.fibers[i].waits = Fiber::Waits::nothing;
                    ready.push_back(i);
                }
            } else {
                kernel_failed(at_barrier > 0 ? "some threads wait at a barrier that others do not reach"
                                             : "some lanes wait in a shuffle that others do not reach");
            }
        }
        const size_t pick = block.order() % ready.size();
        const unsigned i = ready[pick];
        ready[pick] = ready.back();
        ready.pop_back();
        Fiber& fiber = block.fibers[i];
        threadIdx.x = i;
        block.current = i;
        fiber.context = std::move(fiber.context).resume();
        if (fiber.done) {
            --left;
        } else if (fiber.waits == Fiber::Waits::shuffle) {
            // The last lane to arrive releases its warp
            const unsigned first = i / kLanes * kLanes;
            bool all = true;
            for (unsigned lane = 0; lane < unsigned(kLanes); ++lane) {
                if (!(fiber.mask >> lane & 1)) continue;
                if (first + lane >= threads) kernel_failed("a shuffle's mask names a lane that does not exist");
                const Fiber& other = block.fibers[first + lane];
                if (other.waits == Fiber::Waits::shuffle && other.mask != fiber.mask)
                    kernel_failed("lanes of a warp wait in shuffles with different masks");
                all = all && other.waits == Fiber::Waits::shuffle && other.shuffles == fiber.shuffles;
            }
            for (unsigned lane = 0; lane < unsigned(kLanes) && all; ++lane) {
                if (!(fiber.mask >> lane & 1)) continue;
                block.fibers[first + lane].waits = Fiber::Waits::nothing;
                ready.push_back(first + lane);
            }
        }
    }
}

template <class F>
void run_blocks(int64_t grid, int threads, F kernel) {
    if (const char* given = std::getenv("PTDP_FIBER_BLOCK")) threads = std::atoi(given);
    BlockState& block = block_state();
    std::vector<int64_t> order(grid);
    std::iota(order.begin(), order.end(), int64_t(0));
    std::shuffle(order.begin(), order.end(), block.order);
    gridDim.x = unsigned(grid);
    blockDim.x = unsigned(threads);
    block.running = true;
    for (int64_t index : order) {
        blockIdx.x = unsigned(index);
        run_block(unsigned(threads), kernel);
    }
    block.running = false;
}

}  // namespace standin

inline void __syncthreads() { standin::yield_fiber(standin::Fiber::Waits::barrier); }

// The value that lane (own lane xor offset) hands over; all lanes of the mask take part.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    standin::BlockState& block = standin::block_state();
    standin::Fiber& fiber = block.fibers[block.current];
    const unsigned me = threadIdx.x, lane = me % standin::kLanes, warp = me / standin::kLanes;
    if (!(mask >> lane & 1)) standin::kernel_failed("a thread takes part in a shuffle whose mask leaves it out");
    auto& slots = block.handed[warp][fiber.shuffles % 2];
    std::memcpy(&slots[lane], &value, sizeof value);
    fiber.mask = mask;
    ++fiber.shuffles;
    standin::yield_fiber(standin::Fiber::Waits::shuffle);
    const unsigned other = lane ^ unsigned(offset);
    if (!(mask >> other & 1)) return value;  // undefined on a GPU: callers must not use it
    T result;
    std::memcpy(&result, &slots[other], sizeof result);
    return result;
}

namespace standin {

// Allocations that end at a forbidden page.
struct Guarded {
    char* mapped = nullptr;
    size_t mapped_size = 0, size = 0;
};
inline std::map<void*, Guarded>& allocations() {
    static std::map<void*, Guarded> list;
    return list;
}
constexpr unsigned char kCanary = 0xa5;

inline void* guarded_malloc(size_t bytes) {
    static const bool handled = [] {
        struct sigaction action = {};
        action.sa_flags = SA_SIGINFO;
        action.sa_sigaction = [](int, siginfo_t*, void*) {
            if (block_state().running) kernel_failed("access outside of device memory");
            std::_Exit(4);
        };
        static char stack[64 * 1024];
        const stack_t alternate = {stack, 0, sizeof stack};
        sigaltstack(&alternate, nullptr);
        action.sa_flags |= SA_ONSTACK;
        sigaction(SIGSEGV, &action, nullptr);
        return true;
    }();
    (void)handled;
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), rounded = (bytes + 63) / 64 * 64;
    const size_t pages = (rounded + page - 1) / page * page;
    void* mapped = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* begin = static_cast<char*>(mapped);
    mprotect(begin + pages, page, PROT_NONE);
    char* pointer = begin + pages - rounded;
    std::memset(begin, kCanary, size_t(pointer - begin));
    std::memset(pointer + bytes, kCanary, rounded - bytes);
    allocations()[pointer] = {begin, pages + page, bytes};
    return pointer;
}
inline void guarded_free(void* pointer) {
    const auto found = allocations().find(pointer);
    if (found == allocations().end()) return;
    const Guarded guarded = found->second;
    const char* data = static_cast<const char*>(pointer);
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    auto intact = [](const char* begin, const char* end) {
        return std::all_of(begin, end, [](char c) { return static_cast<unsigned char>(c) == kCanary; });
    };
    if (!intact(guarded.mapped, data) || !intact(data + guarded.size, guarded.mapped + guarded.mapped_size - page)) {
        std::fprintf(stderr, "a kernel wrote outside of an allocation of %zu bytes\n", guarded.size);
        std::_Exit(3);
    }
    munmap(guarded.mapped, guarded.mapped_size);
    allocations().erase(found);
}

}  // namespace standin

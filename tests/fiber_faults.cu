// Kernels with faults, built with fibers only: tests/test_kernels.cu checks that each is caught.
#include "tests/harness.h"
#include "tests/model.h"

namespace {

__global__ void missed_barrier_kernel(float* x) {
    if (threadIdx.x % 2 == 0) __syncthreads();
    x[threadIdx.x] = 1;
}
__global__ void missed_shuffle_kernel(float* x) {
    if (threadIdx.x != 5) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
}
__global__ void wrong_mask_kernel(float* x) { x[threadIdx.x] = __shfl_xor_sync(0xffffu, x[threadIdx.x], 1); }
__global__ void beyond_kernel(float* x, int n) { x[n + threadIdx.x] = 1; }
__global__ void before_kernel(float* x) { x[-1 - int(threadIdx.x)] = 1; }
__global__ void off_by_one_kernel(const float* x, float* y, int n) {
    for (int j = threadIdx.x; j <= n; j += blockDim.x) y[j % n] = x[j];
}
// Each thread uses its own part of the sum for all
__global__ void missing_reduction_kernel(const float* x, float* y, int n) {
    float sum = 0;
    for (int j = threadIdx.x; j < n; j += blockDim.x) sum += x[j];
    for (int j = threadIdx.x; j < n; j += blockDim.x) y[j] = x[j] / sum;
}
// Reads what its neighbour may or may not have written yet
__global__ void race_kernel(float* x) {
    const unsigned next = (threadIdx.x + 1) % blockDim.x;
    x[threadIdx.x] = 2 * x[next];
}
__global__ void uninitialized_kernel(float* x) {
    __shared__ float values[256];
    if (threadIdx.x > 0) values[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}
__global__ void sums_kernel(const float* x, float* sums, float* maxima) {
    const float sum = block_sum(x[blockIdx.x * blockDim.x + threadIdx.x]);
    const float largest = block_max(x[blockIdx.x * blockDim.x + threadIdx.x]);
    const float again = block_sum(sum);  // a second reduction directly behind
    sums[blockIdx.x * blockDim.x + threadIdx.x] = sum + 1000 * again;
    maxima[blockIdx.x * blockDim.x + threadIdx.x] = largest;
}

}  // namespace

TEST_CASE("fault: a barrier") {
    TestDevice device;
    auto x = device.zeros(64);
    launch<missed_barrier_kernel>(device.device, 1, 64, x.data);
}
TEST_CASE("fault: a shuffle") {
    TestDevice device;
    auto x = device.zeros(64);
    launch<missed_shuffle_kernel>(device.device, 1, 64, x.data);
}
TEST_CASE("fault: a mask") {
    TestDevice device;
    auto x = device.zeros(64);
    launch<wrong_mask_kernel>(device.device, 1, 64, x.data);
}
TEST_CASE("fault: beyond an allocation") {
    TestDevice device;
    auto x = device.zeros(64);
    launch<beyond_kernel>(device.device, 1, 64, x.data, 64);
}
TEST_CASE("fault: an off-by-one read") {
    TestDevice device;
    auto x = device.random(64, 1), y = device.zeros(64);
    launch<off_by_one_kernel>(device.device, 1, 64, x.data, y.data, 64);
}
TEST_CASE("fault: a missing reduction") {
    TestDevice device;
    auto x = device.integers(100, 1), y = device.zeros(100);
    launch<missing_reduction_kernel>(device.device, 1, kBlock, x.data, y.data, 100);
    device.floats(y);
}
TEST_CASE("fault: in the rest of an allocation's last line") {
    TestDevice device;
    auto x = device.zeros(60);
    launch<beyond_kernel>(device.device, 1, 4, x.data, 60);
}
TEST_CASE("fault: before an allocation") {
    TestDevice device;
    auto x = device.zeros(64);
    launch<before_kernel>(device.device, 1, 4, x.data);
}
TEST_CASE("fault: a race") {
    TestDevice device;
    auto x = device.random(64, 1);
    launch<race_kernel>(device.device, 1, 64, x.data);
    device.floats(x);
}
TEST_CASE("fault: shared memory nobody wrote") {
    TestDevice device;
    auto x = device.zeros(64);
    launch<uninitialized_kernel>(device.device, 1, 64, x.data);
    const std::vector<float> values = device.floats(x);
    CHECK(std::isnan(values[63]));
    CHECK(values[0] == 1);
}
TEST_CASE("block_sum and block_max are right at every blockDim") {
    TestDevice device;
    for (int block = 1; block <= 1024; block += block < 130 ? 1 : 61) {
        CAPTURE(block);
        const auto x = device.integers(3 * block, block);
        auto sums = device.zeros(3 * block), maxima = device.zeros(3 * block);
        launch<sums_kernel>(device.device, 3, block, x.data, sums.data, maxima.data);
        const std::vector<float> values = device.floats(x), S = device.floats(sums), M = device.floats(maxima);
        for (int b = 0; b < 3; ++b) {
            float sum = 0, largest = -10;
            for (int i = 0; i < block; ++i) {
                sum += values[b * block + i];
                largest = std::max(largest, values[b * block + i]);
            }
            for (int i = 0; i < block; ++i) {
                REQUIRE(S[b * block + i] == sum + 1000 * (sum * float(block)));
                REQUIRE(M[b * block + i] == largest);
            }
        }
    }
}

// What the component tests share: device buffers of test values, and kernels run on them.
#pragma once

#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include "gpt.cu"

#ifdef PTDP_FIBERS
// A number that stands for everything the tests have read from their device, printed at the end: tests/test_kernels.cu
// compares it between orders of threads.
struct Results {
    uint64_t hash = 1469598103934665603ull;
    ~Results() { std::printf("results %016llx\n", static_cast<unsigned long long>(hash)); }
    void add(const std::vector<float>& values) {
        for (float value : values) {
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            hash = (hash ^ bits) * 1099511628211ull;
        }
    }
};
inline Results& results() {
    static Results all;
    return all;
}
#endif

struct TestDevice {
    Device device;

    template <class T>
    DeviceBuffer<T> upload(const std::vector<T>& values) {
        DeviceBuffer<T> buffer(values.size());
        if (!values.empty()) to_device(device, buffer.data, values.data(), values.size());
        return buffer;
    }
    DeviceBuffer<float> upload(std::initializer_list<float> values) { return upload(std::vector<float>(values)); }
    DeviceBuffer<float> zeros(int64_t n) { return DeviceBuffer<float>(n); }
    DeviceBuffer<float> copy(const DeviceBuffer<float>& other) { return upload(floats(other)); }

    // Uniform in [-range, range].
    DeviceBuffer<float> random(int64_t n, uint32_t seed, float range = 1.0f) {
        std::mt19937 generator(seed);
        std::vector<float> values(n);
        for (float& x : values) x = range * (float(generator()) / 2147483648.0f - 1.0f);
        return upload(values);
    }
    // Integers in [-3, 3]: their sums and products are exact in fp32.
    DeviceBuffer<float> integers(int64_t n, uint32_t seed) {
        std::mt19937 generator(seed);
        std::vector<float> values(n);
        for (float& x : values) x = float(int(generator() % 7) - 3);
        return upload(values);
    }
    std::vector<float> floats(const DeviceBuffer<float>& buffer) {
        const std::vector<float> values = to_vector(device, buffer.data, buffer.size);
#ifdef PTDP_FIBERS
        results().add(values);
#endif
        return values;
    }
    std::vector<double> doubles(const DeviceBuffer<float>& buffer) {
        const auto values = floats(buffer);
        return std::vector<double>(values.begin(), values.end());
    }

    template <class T>
    static T* argument(const DeviceBuffer<T>& buffer) {
        return buffer.data;
    }
    template <class T, class = std::enable_if_t<!std::is_class_v<T> || std::is_same_v<T, Dropout>>>
    static T argument(const T& value) {
        return value;
    }
    template <auto kernel, class... Args>
    void run(int64_t grid, const Args&... args) {
        launch<kernel>(device, grid, kBlock, argument(args)...);
    }
};

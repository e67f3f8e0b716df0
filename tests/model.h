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

inline GptConfig small_model(int64_t layers, int64_t hidden, int64_t heads, int64_t sequence, int64_t vocab,
                             double init_std = 0.02) {
    GptConfig config;
    config.layers = layers;
    config.hidden = hidden;
    config.heads = heads;
    config.sequence = sequence;
    config.vocab = vocab;
    config.init_std = init_std;
    return config;
}

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

    // What `real` makes of a value: tests compute from these, so that a kernel's own roundings are all that differs.
    static float representable(float x) { return float(real(x)); }

    // Uniform in [-range, range].
    DeviceBuffer<float> random(int64_t n, uint32_t seed, float range = 1.0f) {
        std::mt19937 generator(seed);
        std::vector<float> values(n);
        for (float& x : values) x = representable(range * (float(generator()) / 2147483648.0f - 1.0f));
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

    // Runs a kernel on buffers, by reference, and values. Tests hold every number in fp32; what the kernel takes as
    // `real` is converted for it and, if it may write there, converted back.
    template <auto kernel, class... Args>
    void run(int64_t grid, Args&&... args) {
        run_kernel<kernel>(grid, kernel, args...);
    }

private:
    template <class Parameter, class T>
    struct Argument {  // a value
        const T& value;
        Argument(Device&, const T& value) : value(value) {}
        operator T() const { return value; }
    };
    template <class Parameter, class T>
    struct Argument<Parameter, DeviceBuffer<T>> {
        static constexpr bool converts =
            std::is_same_v<T, float> && !std::is_same_v<std::remove_const_t<std::remove_pointer_t<Parameter>>, T>;
        Device& device;
        const DeviceBuffer<T>& buffer;
        DeviceBuffer<real> converted;
        Argument(Device& device, const DeviceBuffer<T>& buffer) : device(device), buffer(buffer) {
            if constexpr (converts) {
                const std::vector<T> values = to_vector(device, buffer.data, buffer.size);
                const std::vector<real> narrow(values.begin(), values.end());
                converted = DeviceBuffer<real>(narrow.size());
                to_device(device, converted.data, narrow.data(), narrow.size());
            }
        }
        ~Argument() {
            if constexpr (converts && !std::is_const_v<std::remove_pointer_t<Parameter>>) {
                const std::vector<real> narrow = to_vector(device, converted.data, converted.size);
                const std::vector<T> values(narrow.begin(), narrow.end());
                to_device(device, buffer.data, values.data(), values.size());
            }
        }
        operator Parameter() const {
            if constexpr (converts)
                return converted.data;
            else
                return buffer.data;
        }
    };
    template <auto kernel, class... Parameters, class... Args>
    void run_kernel(int64_t grid, void (*)(Parameters...), const Args&... args) {
        launch_with<kernel, Parameters...>(grid, Argument<Parameters, Args>(device, args)...);
    }
    template <auto kernel, class... Parameters, class... Arguments>
    void launch_with(int64_t grid, const Arguments&... arguments) {
        launch<kernel>(device, grid, kBlock, static_cast<Parameters>(arguments)...);
    }
};

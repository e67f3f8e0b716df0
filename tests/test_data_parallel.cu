// The optimizer's kernels against double loops, the learning rate, and the buckets of the gradient reduction.
#include "data_parallel.cu"

#include "tests/harness.h"
#include "tests/model.h"

namespace {

constexpr double kEpsilon = 0x1p-24;  // half the distance of fp32 numbers at 1

std::vector<int64_t> sizes() { return {1, 2, 63, 64, 65, 1000, kFlat - 1, kFlat, kFlat + 1, 3 * kFlat + 17}; }

}  // namespace

TEST_CASE("AdamW: ten steps against a double loop, and independent of other elements") {
    TestDevice device;
    const double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, lr = 1e-2, decay = 0.1, scale = 0.5;
    for (int64_t n : sizes()) {
        CAPTURE(n);
        auto weight = device.random(n, 1), m = device.zeros(n), v = device.zeros(n);
        std::vector<double> W = device.doubles(weight), M(n, 0.0), V(n, 0.0);
        for (int step = 1; step <= 10; ++step) {
            auto gradient = device.random(n, 100 + step);
            const std::vector<double> G = device.doubles(gradient);
            const double rate = lr / (1 - std::pow(beta1, step)), correction = 1 / (1 - std::pow(beta2, step));
            device.run<adam_kernel>(flat_grid(n), weight, weight, gradient, m, v, n, float(scale), float(beta1),
                                    float(beta2), float(epsilon), float(rate), float(correction),
                                    float(1 - lr * decay));
            for (int64_t i = 0; i < n; ++i) {
                const double g = G[i] * scale;
                M[i] = beta1 * M[i] + (1 - beta1) * g;
                V[i] = beta2 * V[i] + (1 - beta2) * g * g;
                W[i] = W[i] * (1 - lr * decay) - rate * M[i] / (std::sqrt(V[i] * correction) + epsilon);
            }
        }
        const std::vector<double> ours = device.doubles(weight);
        double worst = 0;
        // Per step, the weight, at most 1, is rounded twice, and the step, at most 4 lr, about sixteen times
        for (int64_t i = 0; i < n; ++i) worst = std::max(worst, std::abs(ours[i] - W[i]));
        CHECK(worst <= 10 * (2 + 4 * lr * 16) * kEpsilon);
    }
}

TEST_CASE("sums of squares against a double loop") {
    TestDevice device;
    for (int64_t n : sizes()) {
        CAPTURE(n);
        const auto x = device.integers(n, 3);
        DeviceBuffer<double> partial(flat_grid(n));
        device.run<sum_of_squares_kernel>(flat_grid(n), x, partial, n);
        double sum = 0, expected = 0;
        for (double part : to_vector(device.device, partial.data, partial.size)) sum += part;
        for (double value : device.doubles(x)) expected += value * value;
        CHECK(sum == expected);  // integers: exact
    }
}

TEST_CASE("adding vectors is exact on integers") {
    TestDevice device;
    for (int64_t n : sizes()) {
        const auto x = device.integers(n, 4);
        auto y = device.integers(n, 5);
        const std::vector<float> X = device.floats(x);
        std::vector<float> expected = device.floats(y);
        for (int64_t i = 0; i < n; ++i) expected[i] += X[i];
        device.run<add_kernel>(flat_grid(n), x, y, n);
        CHECK(device.floats(y) == expected);
    }
}

TEST_CASE("the learning rate warms up linearly, then decays as asked") {
    auto rate = [](int64_t i, Decay decay) { return learning_rate(i, 1.0, 0.1, decay, 4, 24); };
    for (Decay decay : {Decay::constant, Decay::linear, Decay::cosine}) {
        CHECK(rate(1, decay) == 0.25);
        CHECK(rate(4, decay) == 1.0);
    }
    CHECK(rate(14, Decay::constant) == 1.0);
    CHECK(rate(100, Decay::constant) == 1.0);
    CHECK(rate(14, Decay::linear) == doctest::Approx(0.55).epsilon(1e-15));
    CHECK(rate(14, Decay::cosine) == doctest::Approx(0.55).epsilon(1e-15));
    CHECK(rate(9, Decay::linear) == doctest::Approx(0.775).epsilon(1e-15));
    CHECK(rate(9, Decay::cosine) == doctest::Approx(0.1 + 0.9 * (0.5 + std::sqrt(0.125))).epsilon(1e-15));
    for (Decay decay : {Decay::linear, Decay::cosine})
        for (int64_t i : {24, 25, 1000}) CHECK(rate(i, decay) == 0.1);
    CHECK(learning_rate(1, 1.0, 0.1, Decay::linear, 0, 10) == doctest::Approx(0.91).epsilon(1e-15));
}

TEST_CASE("every gradient is in one bucket, and a bucket is ready when its last layer is") {
    TestDevice device;
    GptConfig config;
    config.layers = 12;
    config.hidden = 16;
    config.heads = 2;
    config.sequence = 4;
    config.vocab = 11;
    const size_t layer_floats = 12 * 16 * 16 + 13 * 16;
    for (int p : {1, 2, 3})
        for (int v : {1, 2})
            for (int p_rank = 0; p_rank < p; ++p_rank)
                for (size_t bucket_floats : {size_t(1), 3 * layer_floats, size_t(1) << 30}) {
                    Grid grid;
                    grid.p = p;
                    grid.p_rank = p_rank;
                    Gpt gpt(device.device, grid.tensor, config, 1, p, p_rank, v);
                    GradientReduction reduction(gpt, grid, false, bucket_floats);
                    std::vector<int> covered(gpt.parameters.size(), 0);
                    for (const auto* buckets : {&reduction.layer_buckets, &reduction.end_buckets})
                        for (const Bucket& bucket : *buckets)
                            for (size_t i = bucket.first; i < bucket.last; ++i) ++covered[i];
                    for (int times : covered) REQUIRE(times == 1);
                    // The backward's order: last chunk first, last layer first
                    size_t done = 0;
                    for (int chunk = v - 1; chunk >= 0; --chunk)
                        for (int layer = int(gpt.chunks[chunk].layers.size()) - 1; layer >= 0; --layer) {
                            const size_t bucket = reduction.bucket_of[chunk][layer];
                            REQUIRE(bucket >= done);  // in the order in which they are completed
                            done = bucket;
                            reduction.gradient_ready(chunk, layer);
                        }
                    for (const Bucket& bucket : reduction.layer_buckets) {
                        REQUIRE(bucket.ready == 0);
                        REQUIRE(size_t(bucket.layers) == (bucket.last - bucket.first) / kLayerParameters);
                    }
                    const size_t per_bucket = bucket_floats / layer_floats;
                    const size_t layers = size_t(config.layers) / p;
                    if (per_bucket == 0) REQUIRE(reduction.layer_buckets.size() == layers);
                    if (per_bucket > layers) REQUIRE(reduction.layer_buckets.size() == 1);
                }
}

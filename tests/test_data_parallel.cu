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

namespace {

GptConfig model_of(int64_t layers) { return small_model(layers, 16, 2, 4, 11); }
constexpr size_t kLayerFloats = 12 * 16 * 16 + 13 * 16;

// A small integer for element k of the whole model's parameter `index`.
float integer(int index, int64_t k) { return float((k * 5 + index * 3) % 7 - 3); }

// This rank's slice of such gradients, times `factor`; padding is zero.
void fill(TestDevice& device, Gpt& gpt, float factor) {
    for (const Parameter& parameter : gpt.parameters) {
        std::vector<float> values(parameter.local_size(), 0.0f);
        for (int64_t r = 0; r < parameter.local_rows; ++r)
            for (int64_t c = 0; c < parameter.local_cols && parameter.first_row + r < parameter.rows; ++c)
                values[r * parameter.local_cols + c] =
                    factor *
                    integer(parameter.index, (parameter.first_row + r) * parameter.cols + parameter.global_column(c));
        to_device(device.device, gpt.gradients.data + parameter.offset, values.data(), values.size());
    }
}
std::vector<float> gradient_of(TestDevice& device, Gpt& gpt, const Parameter& parameter) {
    return to_vector(device.device, gpt.gradients.data + parameter.offset, parameter.local_size());
}

}  // namespace

TEST_CASE("a bucket is reduced when its last layer is ready, and not before [lab 4.1]") {
    check_worker(2, "worker: buckets", 20);
}
TEST_CASE("worker: buckets" * doctest::skip()) {
    const auto grid = make_grid(1, 2, 1);
    TestDevice device;
    for (int v : {1, 2})
        for (size_t bucket_floats : {size_t(1), 3 * kLayerFloats, size_t(1) << 30}) {
            CAPTURE(v);
            CAPTURE(bucket_floats);
            Gpt gpt(device.device, grid->tensor, model_of(8), 1, 1, 0, v);
            GradientReduction reduction(gpt, *grid, false, bucket_floats);
            for (int iteration = 0; iteration < 2; ++iteration) {
                CAPTURE(iteration);
                fill(device, gpt, float(1 + grid->d_rank));  // sum over the replicas: 3 times
                std::vector<int> ready(reduction.layer_buckets.size(), 0);
                for (int chunk = v - 1; chunk >= 0; --chunk)
                    for (int layer = int(gpt.chunks[chunk].layers.size()) - 1; layer >= 0; --layer) {
                        reduction.gradient_ready(chunk, layer);
                        ++ready[reduction.bucket_of[chunk][layer]];
                        for (size_t i = 0; i < ready.size(); ++i) {
                            const Bucket& bucket = reduction.layer_buckets[i];
                            const Parameter& parameter = gpt.parameters[bucket.first];
                            const int64_t k = integer(parameter.index, 0) != 0 ? 0 : 1;  // not both are 0
                            const float factor = gradient_of(device, gpt, parameter)[k] / integer(parameter.index, k);
                            if (ready[i] < bucket.layers)
                                REQUIRE_MESSAGE(factor == float(1 + grid->d_rank),
                                                "hint: a bucket is reduced before all its layers are ready");
                            else
                                REQUIRE_MESSAGE(
                                    factor == 3.0f,
                                    (factor > 3 ? "hint: a bucket is reduced more than once"
                                     : iteration > 0
                                         ? "hint: in the second iteration a bucket is not reduced: its count "
                                           "must start again"
                                         : "hint: a bucket is not reduced when its last layer is ready"));
                        }
                    }
            }
        }
}

TEST_CASE("the tied embedding's two contributions are added once, over stages and replicas [lab 4.2]") {
    for (int ranks : {1, 2, 3, 4}) check_worker(ranks, "worker: tied embeddings", 20);
}
TEST_CASE("worker: tied embeddings" * doctest::skip()) {
    const int p = world_size() == 4 ? 2 : world_size(), d = world_size() / p;
    const auto grid = make_grid(1, d, p);
    TestDevice device;
    Gpt gpt(device.device, grid->tensor, model_of(6), 1, p, grid->p_rank);
    GradientReduction reduction(gpt, *grid, false);
    fill(device, gpt, 0);
    // Of replica r: the first stage's is 1 + r times the integers, the last stage's 10 (1 + r) times
    const float own = float(1 + grid->d_rank), sum = float(d * (d + 1)) / 2;
    const int64_t size = gpt.embedding_slice.local_size();
    auto set = [&](float* place, float factor) {
        std::vector<float> values(size);
        for (int64_t k = 0; k < size; ++k) values[k] = factor * integer(0, k);
        to_device(device.device, place, values.data(), values.size());
    };
    if (grid->first_stage()) set(gpt.wte.gradient, own);
    if (grid->last_stage()) set(gpt.head.gradient, 10 * own);
    reduction.finish();
    for (bool first : {true, false}) {
        if (first ? !grid->first_stage() : !grid->last_stage() || p == 1) continue;
        const auto ours = to_vector(device.device, first ? gpt.wte.gradient : gpt.head.gradient, size);
        auto times = [&](float factor) {
            std::vector<double> values(size);
            for (int64_t k = 0; k < size; ++k) values[k] = double(factor) * double(integer(0, k));
            return values;
        };
        const std::vector<double> expected = times(11 * sum);
        REQUIRE_MESSAGE(
            std::equal(ours.begin(), ours.end(), expected.begin()),
            hint(ours, "the tied embedding's gradient is not the sum of the first and the last stage's contributions",
                 {{"the embedding's gradient misses the output layer's contribution", times(sum)},
                  {"the output layer's copy misses the embedding's contribution", times(10 * sum)},
                  {"the tied gradient's output layer part is counted twice", times(21 * sum)},
                  {"the tied gradient is counted twice", times(22 * sum)}}));
    }
    for (const Parameter& parameter : gpt.parameters)
        if (parameter.index != 0)
            for (float value : gradient_of(device, gpt, parameter))
                REQUIRE_MESSAGE(value == 0, "hint: a gradient that is not the tied embedding's changes in finish()");
}

TEST_CASE("the gradient norm counts every parameter of the model once [lab 4.3]") {
    for (int ranks : {1, 2, 3, 4, 8}) check_worker(ranks, "worker: gradient norm", 20);
}
TEST_CASE("worker: gradient norm" * doctest::skip()) {
    struct Layout {
        int t, d, p;
    };
    std::vector<Layout> layouts;
    for (int t : {1, 2})
        for (int d : {1, 2, 3})
            for (int p : {1, 2, 3})
                if (t * d * p == world_size()) layouts.push_back({t, d, p});
    TestDevice device;
    for (const Layout& layout : layouts)
        for (bool distributed : {false, true}) {
            CAPTURE(layout.t);
            CAPTURE(layout.d);
            CAPTURE(layout.p);
            CAPTURE(distributed);
            const auto grid = make_grid(layout.t, layout.d, layout.p);
            Gpt gpt(device.device, grid->tensor, model_of(6), 1, layout.p, grid->p_rank, 1, distributed ? layout.d : 1);
            Optimizer optimizer(gpt, *grid, {}, distributed);
            fill(device, gpt, 1);
            for (size_t i = 0; distributed && i < gpt.parameters.size(); ++i) {  // another replica's part: not reduced
                const Parameter& parameter = gpt.parameters[i];
                const OptimizerSlice& slice = optimizer.slices[i];
                std::vector<float> all(parameter.padded, 50.0f);
                const auto part = to_vector(device.device, gpt.gradients.data + slice.offset, slice.size);
                std::copy(part.begin(), part.end(), all.begin() + int64_t(slice.offset - parameter.offset));
                to_device(device.device, gpt.gradients.data + parameter.offset, all.data(), all.size());
            }
            double whole = 0, replicated = 0, tied = 0;
            for (const Parameter& parameter : gpt_parameters(gpt.config)) {
                double sum = 0;
                for (int64_t k = 0; k < parameter.rows * parameter.cols; ++k)
                    sum += double(integer(parameter.index, k)) * double(integer(parameter.index, k));
                whole += sum;
                if (parameter.split == Split::replicated) replicated += sum;
                if (parameter.index == 0) tied = sum;
            }
            const double norm = optimizer.gradient_norm();
            const std::vector<float> square = {float(norm * norm)};
            const double t = layout.t, d = layout.d, p = layout.p;
            std::vector<Mistake> mistakes = {
                {"the tied embedding is counted twice in the norm: the last stage's copy does not count",
                 {whole + (p > 1 ? tied : 0)}},
                {"parameters that every tensor rank holds whole are counted t times in the norm",
                 {whole + (t - 1) * replicated}},
                {"the norm is not summed over the model group", {p * t > 1 ? -1.0 : whole}},
                {"the norm is summed over the data group though each replica has the whole gradient", {d * whole}}};
            REQUIRE_MESSAGE(
                norm == std::sqrt(whole),
                hint(square,
                     distributed && d > 1
                         ? "the norm is not the whole model's: with a distributed optimizer each replica has "
                           "a part of each gradient, which the data group adds up"
                         : "the norm is not the whole model's: it is summed over the model group",
                     mistakes));
        }
}

TEST_CASE("a distributed optimizer takes the same step [lab 4.4]") {
    for (int d : {1, 2, 3}) check_worker(d, "worker: distributed optimizer", 20);
}
TEST_CASE("worker: distributed optimizer" * doctest::skip()) {
    const int d = world_size();
    const auto grid = make_grid(1, d, 1);
    TestDevice device;
    std::vector<float> weights[2];
    std::vector<Parameter> parameters[2];
    for (bool distributed : {false, true}) {
        Gpt gpt(device.device, grid->tensor, model_of(4), 1, 1, 0, 1, distributed ? d : 1);
        GradientReduction reduction(gpt, *grid, distributed, kLayerFloats);
        Optimizer optimizer(gpt, *grid, {}, distributed);
        for (int step = 0; step < 2; ++step) {
            fill(device, gpt, float(1 + grid->d_rank));
            for (const auto* buckets : {&reduction.layer_buckets, &reduction.end_buckets})
                for (const Bucket& bucket : *buckets) reduction.reduce(bucket);
            for (size_t i = 0; i < gpt.parameters.size(); ++i) {
                const Parameter& parameter = gpt.parameters[i];
                const OptimizerSlice& slice = optimizer.slices[i];
                const auto part = to_vector(device.device, gpt.gradients.data + slice.offset, slice.size);
                for (size_t k = 0; k < part.size(); ++k) {
                    const int64_t at = int64_t(slice.offset - parameter.offset + k);
                    if (at >= parameter.local_size()) break;
                    const float one = integer(parameter.index, at / parameter.cols * parameter.cols +
                                                                   parameter.global_column(at % parameter.cols));
                    REQUIRE_MESSAGE(part[k] == one * float(d * (d + 1)) / 2,
                                    "hint: replica r's part, the r-th of d equal parts of each tensor, is not the sum "
                                    "over the replicas: the reduce-scatter");
                }
            }
            optimizer.step(1.0, 1e-2);
        }
        weights[distributed] = device.floats(gpt.weights);
        parameters[distributed] = gpt.parameters;
    }
    for (size_t i = 0; i < parameters[0].size(); ++i) {
        const std::string& name = parameters[0][i].name;
        CAPTURE(name);
        const auto plain = weights[0].begin() + int64_t(parameters[0][i].offset),
                   ours = weights[1].begin() + int64_t(parameters[1][i].offset);
        REQUIRE_MESSAGE(std::equal(plain, plain + parameters[0][i].local_size(), ours),
                        "hint: a replica's weights are not those of a plain step: the parts that other replicas update "
                        "come by the all-gather, each to its place");
    }
}

TEST_CASE("every gradient is in one bucket, and the buckets are in the order of the backward [lab 4.1]") {
    TestDevice device;
    const GptConfig config = model_of(12);
    for (int p : {1, 2, 3})
        for (int v : {1, 2})
            for (int p_rank = 0; p_rank < p; ++p_rank)
                for (size_t bucket_floats : {size_t(1), 3 * kLayerFloats, size_t(1) << 30}) {
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
                        REQUIRE_MESSAGE(bucket.ready == 0, "hint: a bucket's count does not start again");
                        REQUIRE(size_t(bucket.layers) == (bucket.last - bucket.first) / kLayerParameters);
                    }
                    const size_t per_bucket = bucket_floats / kLayerFloats;
                    const size_t layers = size_t(config.layers) / p;
                    if (per_bucket == 0) REQUIRE(reduction.layer_buckets.size() == layers);
                    if (per_bucket > layers) REQUIRE(reduction.layer_buckets.size() == 1);
                }
}

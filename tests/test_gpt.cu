// Unit tests of gpt.cu and tensor_parallel.cu on one rank: every kernel against a plain loop in double, forward and
// backward, at sizes 1, 2, odd and larger than any block; then the whole model against values made with Hugging Face
// GPT-2.
#include "gpt.cu"

#include "tests/bounds.h"
#include "tests/harness.h"
#include "tests/model.h"

namespace {

constexpr double kEpsilon = 1.1920929e-7;  // fp32

// Every element within `terms` roundings (fp32) of the largest expected magnitude: a sum of n terms, each rounded, is
// off by at most n eps times the sum of magnitudes; `magnitude` is that bound's scale. In 16 bits a result is also
// rounded when it is stored: `stores` times on the way.
void check_close(const std::vector<float>& actual, const std::vector<double>& expected, double terms,
                 double magnitude = 0, double stores = 1, const std::string& otherwise = "",
                 const std::vector<Mistake>& mistakes = {}) {
    REQUIRE(actual.size() == expected.size());
    for (double y : expected) magnitude = std::max(magnitude, std::abs(y));
    double worst = 0;
    for (size_t i = 0; i < actual.size(); ++i) worst = std::max(worst, std::abs(double(actual[i]) - expected[i]));
    const bool close = worst <= (terms * kEpsilon + (kMixed ? stores * kRoundoff : 0)) * (magnitude + 1e-30);
    CHECK_MESSAGE(close, (otherwise.empty() || close ? "" : hint(actual, otherwise, mistakes)));
}

const std::vector<std::pair<int, int>> kSizes = {{1, 1}, {2, 2}, {3, 7}, {5, 64}, {33, 17}, {65, 130}, {40, 1100}};

double gelu(double z) { return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z))); }
double gelu_slope(double z) {
    const double u = std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z), t = std::tanh(u);
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
}

}  // namespace

TEST_CASE("layernorm: forward against a double loop [lab 1.1]") {
    TestDevice device;
    for (const auto& size : kSizes) {
        const int rows = size.first, h = size.second;
        CAPTURE(rows);
        CAPTURE(h);
        const auto x = device.random(rows * h, 1), gamma = device.random(h, 2), beta = device.random(h, 3);
        auto y = device.zeros(rows * h), mean = device.zeros(rows), rstd = device.zeros(rows);
        device.run<layernorm_forward_kernel>(rows, x, gamma, beta, y, mean, rstd, h, kLayerNormEpsilon);
        const auto X = device.doubles(x), G = device.doubles(gamma), B = device.doubles(beta);
        std::vector<double> Y(rows * h), M(rows), R(rows), unbiased(rows * h), bare(rows * h), raw(rows * h);
        double largest_rstd = 0;
        for (int i = 0; i < rows; ++i) {
            double variance = 0;
            for (int j = 0; j < h; ++j) M[i] += X[i * h + j] / h;
            for (int j = 0; j < h; ++j) variance += (X[i * h + j] - M[i]) * (X[i * h + j] - M[i]) / h;
            R[i] = 1 / std::sqrt(variance + 1e-5);
            largest_rstd = std::max(largest_rstd, R[i]);
            const double r_unbiased = 1 / std::sqrt(variance * h / std::max(1, h - 1) + 1e-5);
            for (int j = 0; j < h; ++j) {
                const double centred = X[i * h + j] - M[i];
                Y[i * h + j] = centred * R[i] * G[j] + B[j];
                unbiased[i * h + j] = centred * r_unbiased * G[j] + B[j];
                bare[i * h + j] = centred * R[i];
                raw[i * h + j] = X[i * h + j] * R[i] * G[j] + B[j];
            }
        }
        // x - mean loses what x's magnitude (1) costs, times 1/std
        const double terms = 8 + h;
        check_close(device.floats(y), Y, terms, largest_rstd, 1, "y is not (x - mean) rstd gamma + beta",
                    {{"LayerNorm's variance is divided by h - 1; it is the row's own, divided by h", unbiased},
                     {"LayerNorm's output misses gamma and beta", bare},
                     {"LayerNorm's output is x rstd gamma + beta: the mean is not taken off x", raw},
                     {"nothing was written to y", std::vector<double>(rows * h)}});
        check_close(device.floats(mean), M, terms, 1, 0, "the row's mean is not kept for the backward");
        // The variance's error is relative, and 1/std is at most 1/sqrt(epsilon), where x - mean has none
        check_close(device.floats(rstd), R, terms, largest_rstd * largest_rstd, 0,
                    "the row's 1/sqrt(variance + epsilon) is not kept for the backward");
    }
}

TEST_CASE("layernorm: backward against a double loop [lab 1.2]") {
    TestDevice device;
    for (const auto& size : kSizes) {
        const int rows = size.first, h = size.second;
        CAPTURE(rows);
        CAPTURE(h);
        const auto x = device.random(rows * h, 1), gamma = device.random(h, 2), dy = device.random(rows * h, 4),
                   residual = device.random(rows * h, 5);
        const auto X = device.doubles(x), G = device.doubles(gamma), D = device.doubles(dy),
                   start = device.doubles(residual);
        std::vector<float> means(rows), rstds(rows);
        std::vector<double> DX(rows * h), DG(h), DB(h), fixed(rows * h), no_gamma(rows * h), alone(rows * h),
            once(rows * h);
        double largest_rstd = 0;
        for (int i = 0; i < rows; ++i) {
            double m = 0, variance = 0;
            for (int j = 0; j < h; ++j) m += X[i * h + j] / h;
            for (int j = 0; j < h; ++j) variance += (X[i * h + j] - m) * (X[i * h + j] - m) / h;
            const double r = 1 / std::sqrt(variance + 1e-5);
            largest_rstd = std::max(largest_rstd, r);
            means[i] = float(m);
            rstds[i] = float(r);
            double s1 = 0, s2 = 0, s1_bare = 0, s2_bare = 0;
            for (int j = 0; j < h; ++j) {
                const double n = (X[i * h + j] - m) * r, d = D[i * h + j];
                s1 += d * G[j] / h;
                s2 += d * G[j] * n / h;
                s1_bare += d / h;
                s2_bare += d * n / h;
            }
            for (int j = 0; j < h; ++j) {
                const int at = i * h + j;
                const double n = (X[at] - m) * r, g = D[at] * G[j];
                DX[at] = start[at] + (g - s1 - n * s2) * r;
                fixed[at] = start[at] + g * r;
                once[at] = start[at] + (g - s1) * r;
                no_gamma[at] = start[at] + (D[at] - s1_bare - n * s2_bare) * r;
                alone[at] = (g - s1 - n * s2) * r;
                DG[j] += D[at] * n;
                DB[j] += D[at];
            }
        }
        const auto mean = device.upload(means), rstd = device.upload(rstds);
        auto dx = device.copy(residual);
        auto partial = device.zeros(row_chunks(rows) * 2 * h), dgamma = device.zeros(h), dbeta = device.zeros(h);
        device.run<layernorm_backward_kernel<true>>(row_chunks(rows), x, gamma, mean, rstd, dy, dx, partial,
                                                    int64_t(rows), h);
        launch<add_chunk_sums_kernel>(device.device, (h + 63) / 64, 64, partial.data, row_chunks(rows), 2 * h, h,
                                      dgamma.data);
        launch<add_chunk_sums_kernel>(device.device, (h + 63) / 64, 64, partial.data + h, row_chunks(rows), 2 * h, h,
                                      dbeta.data);
        const double terms = 8 + h;
        check_close(device.floats(dx), DX, terms, largest_rstd * largest_rstd, 1,
                    "dx is not dx + rstd (g - mean(g) - n mean(g n)), g = dy gamma, n = (x - mean) rstd",
                    {{"LayerNorm's dx treats mean and variance as constants; they depend on x too", fixed},
                     {"LayerNorm's dx misses the term - n mean(dy gamma n), which comes from the variance", once},
                     {"LayerNorm's dx misses gamma: dy goes through it first", no_gamma},
                     {"LayerNorm's dx is overwritten where it is to be added to (accumulate)", alone}});
        check_close(device.floats(dgamma), DG, terms + rows, largest_rstd * std::sqrt(rows), 1,
                    "the chunk's sums for gamma are not those of dy (x - mean) rstd over its rows");
        check_close(device.floats(dbeta), DB, 8 + rows, std::sqrt(rows), 1,
                    "the chunk's sums for beta are not those of dy over its rows");
    }
}

TEST_CASE("bias and GeLU: forward and backward against double loops") {
    TestDevice device;
    for (const auto& size : kSizes) {
        const int rows = size.first, n = size.second;
        CAPTURE(rows);
        CAPTURE(n);
        const auto x = device.random(rows * n, 1, 6.0), bias = device.random(n, 2), dy = device.random(rows * n, 3);
        auto y = device.zeros(rows * n), dx = device.copy(dy), partial = device.zeros(row_chunks(rows) * n),
             dbias = device.zeros(n);
        device.run<bias_gelu_forward_kernel>(rows, x, bias, y, n);
        device.run<bias_gelu_backward_kernel>(row_chunks(rows), x, bias, dx, partial, int64_t(rows), n);
        launch<add_chunk_sums_kernel>(device.device, (n + 63) / 64, 64, partial.data, row_chunks(rows), n, n,
                                      dbias.data);
        const auto X = device.doubles(x), B = device.doubles(bias), D = device.doubles(dy);
        std::vector<double> Y(rows * n), DX(rows * n), DB(n);
        for (int i = 0; i < rows * n; ++i) {
            const double z = X[i] + B[i % n];
            Y[i] = gelu(z);
            DX[i] = D[i] * gelu_slope(z);
            DB[i % n] += DX[i];
        }
        check_close(device.floats(y), Y, 8, 7.0);
        check_close(device.floats(dx), DX, 32, 1.2);
        check_close(device.floats(dbias), DB, 32 + rows, std::sqrt(rows));
    }
    // Far from zero GeLU is the identity or zero, and never NaN
    auto x = device.upload({-1e4f, -100.0f, 100.0f, 1e4f}), bias = device.zeros(4), y = device.zeros(4);
    device.run<bias_gelu_forward_kernel>(1, x, bias, y, 4);
    const auto values = device.floats(y);
    CHECK(std::abs(values[0]) < 1e-20);
    CHECK(std::abs(values[1]) < 1e-20);
    CHECK(values[2] == 100.0f);
    CHECK(values[3] == TestDevice::representable(1e4f));
}

TEST_CASE("bias sums, bias addition and chunk sums are exact on integers") {
    TestDevice device;
    for (const auto& size : kSizes) {
        const int rows = size.first, n = size.second;
        CAPTURE(rows);
        CAPTURE(n);
        const auto dy = device.integers(rows * n, 1), bias = device.integers(n, 2);
        auto partial = device.zeros(row_chunks(rows) * n), sums = device.copy(bias), x = device.copy(dy);
        device.run<bias_backward_kernel>(row_chunks(rows), dy, partial, int64_t(rows), n);
        launch<add_chunk_sums_kernel>(device.device, (n + 63) / 64, 64, partial.data, row_chunks(rows), n, n,
                                      sums.data);
        device.run<add_bias_kernel>(rows, x, bias, n);
        const auto D = device.floats(dy), B = device.floats(bias);
        std::vector<float> expected = B, added(rows * n);
        for (int i = 0; i < rows * n; ++i) {
            expected[i % n] += D[i];
            added[i] = D[i] + B[i % n];
        }
        CHECK(device.floats(sums) == expected);
        CHECK(device.floats(x) == added);
    }
}

TEST_CASE("dropout: kept elements are scaled, the rate is right, the backward uses the same mask") {
    TestDevice device;
    const int s = 37, b = 3, h = 301;
    const Dropout dropout = make_dropout(0.25, 99, 7, 5, Site::mlp_dropout, 2);
    const auto ones = device.upload(std::vector<float>(s * b * h, 1.0f)), zeros = device.zeros(s * b * h),
               bias = device.zeros(h);
    auto y = device.zeros(s * b * h), dx = device.zeros(s * b * h);
    device.run<bias_dropout_add_forward_kernel>(s * b, ones, bias, zeros, y, b, h, dropout);
    device.run<dropout_backward_kernel>(s * b, ones, dx, b, h, dropout);
    const auto mask = device.floats(y);
    CHECK(device.floats(dx) == mask);
    int64_t kept = 0;
    for (float value : mask) {
        CHECK((value == 0.0f || value == TestDevice::representable(dropout.scale)));
        kept += value != 0.0f;
    }
    // Binomial: five standard deviations
    const double n = double(mask.size());
    CHECK(std::abs(kept - 0.75 * n) < 5 * std::sqrt(n * 0.25 * 0.75));

    SUBCASE("the mask depends on the sample, not on its place in the microbatch") {
        // Sample 6 of the global batch is column 1 above; now it is column 0 of a microbatch of one.
        const Dropout alone = make_dropout(0.25, 99, 7, 6, Site::mlp_dropout, 2);
        const auto one = device.upload(std::vector<float>(s * h, 1.0f));
        auto x = device.zeros(s * h);
        device.run<dropout_backward_kernel>(s, one, x, 1, h, alone);
        const auto single = device.floats(x);
        for (int i = 0; i < s; ++i)
            for (int j = 0; j < h; ++j) REQUIRE(single[i * h + j] == mask[(i * b + 1) * h + j]);
    }
    SUBCASE("another site, layer, iteration or seed is another mask") {
        for (const Dropout& other :
             {make_dropout(0.25, 99, 7, 5, Site::attention_output_dropout, 2),
              make_dropout(0.25, 99, 7, 5, Site::mlp_dropout, 3), make_dropout(0.25, 99, 8, 5, Site::mlp_dropout, 2),
              make_dropout(0.25, 98, 7, 5, Site::mlp_dropout, 2)}) {
            device.run<dropout_backward_kernel>(s * b, ones, dx, b, h, other);
            const auto different = device.floats(dx);
            int64_t same = 0;
            for (size_t i = 0; i < mask.size(); ++i) same += mask[i] == different[i];
            // Two independent masks agree with probability 0.75^2 + 0.25^2
            CHECK(std::abs(same - 0.625 * n) < 5 * std::sqrt(n * 0.625 * 0.375));
        }
    }
    SUBCASE("probability 0 changes nothing") {
        const Dropout none = make_dropout(0.0, 99, 7, 5, Site::mlp_dropout, 2);
        device.run<dropout_backward_kernel>(s * b, ones, dx, b, h, none);
        CHECK(device.floats(dx) == device.floats(ones));
    }
}

TEST_CASE("philox: the published test vectors of Philox-4x32-10") {
    const Random4 zeros = philox(0, 0, 0, 0, 0);
    CHECK(zeros.word[0] == 0x6627e8d5u);
    CHECK(zeros.word[1] == 0xe169c58du);
    CHECK(zeros.word[2] == 0xbc57ac4cu);
    CHECK(zeros.word[3] == 0x9b00dbd8u);
    const Random4 ones = philox(~0u, ~0u, ~0u, ~0u, ~uint64_t(0));
    CHECK(ones.word[0] == 0x408f276du);
    CHECK(ones.word[1] == 0x41c83b0eu);
    CHECK(ones.word[2] == 0xa20bc7c6u);
    CHECK(ones.word[3] == 0x6d5451fdu);
    const Random4 pi = philox(0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0x299f31d0a4093822u);
    CHECK(pi.word[0] == 0xd16cfe09u);
    CHECK(pi.word[1] == 0x94fdccebu);
    CHECK(pi.word[2] == 0x5001e420u);
    CHECK(pi.word[3] == 0x24126ea1u);
}

TEST_CASE("initial weights: normal, and the same for a slice as for the whole") {
    GptConfig config;
    config.layers = 2;
    config.hidden = 120;
    config.heads = 6;
    config.vocab = 101;
    for (const Parameter& whole : gpt_parameters(config)) {
        Parameter serial = whole;
        slice_parameter(serial, 1, 0);
        const auto all = initial_slice(serial, 3);
        REQUIRE(all.size() == size_t(whole.rows * whole.cols));
        if (whole.std > 0) {
            double sum = 0, squares = 0;
            for (float x : all) sum += x, squares += double(x) * x;
            const double n = double(all.size());
            CHECK(std::abs(sum / n) < 5 * whole.std / std::sqrt(n));
            CHECK(std::abs(squares / n / (whole.std * whole.std) - 1) < 5 * std::sqrt(2 / n));
        } else {
            for (float x : all) REQUIRE(x == float(whole.mean));
        }
        for (int t : {2, 3, 6})
            for (int rank = 0; rank < t; ++rank) {
                Parameter slice = whole;
                slice_parameter(slice, t, rank);
                const auto part = initial_slice(slice, 3);
                for (int64_t r = 0; r < slice.local_rows; ++r)
                    for (int64_t c = 0; c < slice.local_cols; ++c) {
                        // Both are stored by head; the slice's columns continue those of the ranks before it
                        const int64_t row = slice.first_row + r, column = slice.first_col + c;
                        const float expected = row < whole.rows ? all[row * whole.cols + column] : 0.0f;
                        REQUIRE(part[r * slice.local_cols + c] == expected);
                    }
            }
    }
}

TEST_CASE("embedding and positions: forward and backward are exact on integers") {
    TestDevice device;
    for (int h : {1, 2, 7, 130}) {
        const int s = 5, b = 3, V = 11, T = s * b;
        const std::vector<int> tokens = {3, 0, 10, 3, 3, 7, 1, 0, 9, 3, 2, 2, 10, 5, 3};
        const auto wte = device.integers(V * h, 1), wpe = device.integers(s * h, 2), dx = device.integers(T * h, 3);
        auto x = device.zeros(T * h), dwte = device.zeros(V * h), dwpe = device.zeros(s * h);
        const auto ids = device.upload(tokens);
        const SortedTokens sorted = sort_tokens(tokens);
        const auto distinct = device.upload(sorted.distinct), starts = device.upload(sorted.starts),
                   positions = device.upload(sorted.positions);
        const Dropout none;
        device.run<embedding_forward_kernel>(T, ids, wte, x, 0, V, h);
        device.run<position_dropout_forward_kernel>(T, x, wpe, b, h, none);
        device.run<position_backward_kernel>(s, dx, dwpe, b, h);
        device.run<embedding_backward_kernel>(int(sorted.distinct.size()), distinct, starts, positions, dx, dwte, 0, V,
                                              h);
        const auto E = device.floats(wte), P = device.floats(wpe), D = device.floats(dx);
        std::vector<float> X(T * h), DE(V * h), DP(s * h);
        for (int i = 0; i < T; ++i)
            for (int j = 0; j < h; ++j) {
                X[i * h + j] = E[tokens[i] * h + j] + P[i / b * h + j];
                DE[tokens[i] * h + j] += D[i * h + j];
                DP[i / b * h + j] += D[i * h + j];
            }
        CHECK(device.floats(x) == X);
        CHECK(device.floats(dwte) == DE);
        CHECK(device.floats(dwpe) == DP);
    }
}

TEST_CASE("causal softmax: forward, with dropout, against a double loop [lab 1.3]") {
    TestDevice device;
    for (int s : {1, 2, 7, 64, 77, 300}) {
        CAPTURE(s);
        const int b = 2, heads = 3, first_head = 4, matrices = b * heads;
        const float scale = 0.125f;
        for (double probability : {0.0, 0.3}) {
            const Dropout dropout = make_dropout(probability, 5, 11, 0, Site::attention_dropout, 1);
            const auto scores = device.random(matrices * s * s, 1, 20.0);
            auto p = device.copy(scores), q = device.random(matrices * s * s, 3);
            device.run<causal_softmax_forward_kernel>(matrices * s, p, q, s, heads, first_head, scale, dropout);
            const auto S = device.doubles(scores);
            std::vector<double> P(S.size()), unscaled(S.size()), unmasked(S.size()), unseen(S.size());
            for (int row = 0; row < matrices * s; ++row) {
                const int64_t base = int64_t(row) * s;
                double sum = 0, sum_unscaled = 0, sum_all = 0, sum_unseen = 0;
                for (int j = 0; j < s; ++j) {
                    sum_all += std::exp(scale * S[base + j]);
                    if (j < row % s) sum_unseen += std::exp(scale * S[base + j]);
                    if (j > row % s) continue;
                    sum += std::exp(scale * S[base + j]);
                    sum_unscaled += std::exp(S[base + j]);
                }
                for (int j = 0; j < s; ++j) {
                    unmasked[base + j] = std::exp(scale * S[base + j]) / sum_all;
                    if (j < row % s) unseen[base + j] = std::exp(scale * S[base + j]) / sum_unseen;
                    if (j > row % s) continue;
                    P[base + j] = std::exp(scale * S[base + j]) / sum;
                    unscaled[base + j] = std::exp(S[base + j]) / sum_unscaled;
                }
            }
            // Stored: exponentials, probabilities
            check_close(device.floats(p), P, 16 + s, 1.0, 2,
                        "row i is not exp(scale x) over its sum in columns 0 to i and 0 beyond",
                        {{"the softmax forgets the factor `scale`", unscaled},
                         {"the softmax has no causal mask: row i may see columns 0 to i only", unmasked},
                         {"the causal mask is off by one: row i sees column i too", unseen}});
            if (probability == 0) continue;
            const auto Q = device.floats(q);
            auto again = device.random(matrices * s * s, 4);
            device.run<attention_dropout_kernel>(matrices * s, p, again, s, heads, first_head, dropout);
            CHECK(device.floats(again) == Q);
            for (int row = 0; row < matrices * s; ++row)
                for (int j = 0; j < s; ++j) {
                    const int64_t at = int64_t(row) * s + j;
                    const bool kept = Q[at] != 0.0f;
                    REQUIRE((kept ? j <= row % s : true));
                    REQUIRE(std::abs(Q[at] - (kept ? P[at] * dropout.scale : 0.0)) <=
                            64 * kEpsilon + (kMixed ? 3 * dropout.scale * kRoundoff : 0));
                }
        }
    }
    // A row of large scores: exp alone would overflow
    auto p = device.upload({1e4f, 0.0f, 1e4f, 1e4f}), q = device.zeros(4);
    device.run<causal_softmax_forward_kernel>(2, p, q, 2, 1, 0, 1.0f, Dropout());
    CHECK_MESSAGE(device.floats(p) == std::vector<float>({1.0f, 0.0f, 0.5f, 0.5f}),
                  "hint: large scores overflow: the row's maximum is to be taken off before exp");
}

TEST_CASE("causal softmax: backward, with dropout, against a double loop [lab 1.4]") {
    TestDevice device;
    for (int s : {1, 2, 7, 64, 77, 300}) {
        CAPTURE(s);
        const int matrices = 6;
        const float scale = 0.125f, kept_scale = 1 / 0.7f;
        for (bool drops : {false, true}) {
            const auto scores = device.random(matrices * s * s, 1, 20.0), d = device.random(matrices * s * s, 2),
                       uniform = device.random(matrices * s * s, 3);
            const auto S = device.doubles(scores), D = device.doubles(d), U = device.doubles(uniform);
            std::vector<float> probabilities(S.size()), dropped(S.size());
            std::vector<double> DS(S.size()), unscaled(S.size()), no_sum(S.size()), of_p(S.size());
            for (int row = 0; row < matrices * s; ++row) {
                const int64_t base = int64_t(row) * s;
                double sum = 0, inner = 0, inner_p = 0;
                for (int j = 0; j <= row % s; ++j) sum += std::exp(scale * S[base + j]);
                for (int j = 0; j <= row % s; ++j) {
                    const double mask = drops ? (U[base + j] > -0.4 ? kept_scale : 0.0) : 1.0;
                    probabilities[base + j] = TestDevice::representable(float(std::exp(scale * S[base + j]) / sum));
                    dropped[base + j] = TestDevice::representable(float(probabilities[base + j] * mask));
                    inner += D[base + j] * dropped[base + j];
                    inner_p += D[base + j] * probabilities[base + j];
                }
                for (int j = 0; j <= row % s; ++j) {
                    const double dq = D[base + j] * dropped[base + j];
                    DS[base + j] = scale * (dq - probabilities[base + j] * inner);
                    unscaled[base + j] = dq - probabilities[base + j] * inner;
                    no_sum[base + j] = scale * dq;
                    of_p[base + j] = scale * probabilities[base + j] * (D[base + j] - inner_p);
                }
            }
            const auto p = device.upload(probabilities), q = device.upload(dropped);
            auto ds = device.copy(d);
            device.run<causal_softmax_backward_kernel>(matrices * s, p, q, ds, s, scale);
            // The gradient sums two products of what was stored
            check_close(device.floats(ds), DS, 16 + s, scale, 2 * 3 * kept_scale + 1,
                        "the gradient is not scale (d q - p sum(d q)) in columns 0 to i and 0 beyond",
                        {{"the softmax's backward forgets the factor `scale`", unscaled},
                         {"the softmax's backward misses - p sum(d q): every score changes the sum below all", no_sum},
                         {"the softmax's backward uses p where dropout made it q", of_p}});
        }
    }
}

TEST_CASE("attention dropout: a head's mask does not depend on how heads are divided") {
    TestDevice device;
    const int s = 33, b = 2, heads = 6;
    const Dropout dropout = make_dropout(0.5, 5, 11, 3, Site::attention_dropout, 1);
    const auto ones = device.upload(std::vector<float>(b * heads * s * s, 1.0f));
    auto whole = device.zeros(b * heads * s * s), part = device.zeros(b * 2 * s * s);
    device.run<attention_dropout_kernel>(b * heads * s, ones, whole, s, heads, 0, dropout);
    const auto all = device.floats(whole);
    for (int rank = 0; rank < 3; ++rank) {
        device.run<attention_dropout_kernel>(b * 2 * s, ones, part, s, 2, 2 * rank, dropout);
        const auto some = device.floats(part);
        for (int j = 0; j < b; ++j)
            for (int head = 0; head < 2; ++head)
                for (int i = 0; i < s * s; ++i)
                    REQUIRE(some[(j * 2 + head) * s * s + i] == all[(j * heads + 2 * rank + head) * s * s + i]);
    }
}

TEST_CASE("cross-entropy: a row's maximum and sum of exponentials against a double loop [lab 1.5]") {
    TestDevice device;
    for (int n : {1, 2, 17, 101, 300, 1100})
        for (int padding : {0, 3})
            for (float shift : {0.0f, 1e4f, -1e4f}) {
                CAPTURE(n);
                CAPTURE(padding);
                CAPTURE(shift);
                const int T = 9, columns = n + padding;
                auto L = device.floats(device.random(T * columns, 1, 4.0));
                for (int i = 0; i < T * columns; ++i)
                    L[i] = TestDevice::representable(i % columns < n ? L[i] + shift : 3e4f);
                const auto logits = device.upload(L);
                auto maximum = device.zeros(T), sum = device.zeros(T);
                device.run<cross_entropy_statistics_kernel>(T, logits, maximum, sum, columns, n);
                std::vector<float> largest(T, kLowest);
                std::vector<double> sums(T), with_padding(T);
                for (int i = 0; i < T; ++i) {
                    for (int j = 0; j < n; ++j) largest[i] = std::max(largest[i], L[i * columns + j]);
                    for (int j = 0; j < n; ++j) sums[i] += std::exp(double(L[i * columns + j]) - largest[i]);
                }
                const std::vector<float> found = device.floats(maximum);
                CHECK_MESSAGE(found == largest,
                              (padding > 0 && !found.empty() && found[0] == 3e4f
                                   ? "hint: padded columns (from `filled` on) take part in the maximum"
                               : shift < 0 ? "hint: the maximum of negative logits is not found: begin with kLowest"
                                           : "hint: the row's maximum is not found"));
                check_close(device.floats(sum), sums, 16 + n, 0, 0,
                            "the sum is not that of exp(logit - maximum) over the first `filled` columns");
            }
    // A rank that holds padding only
    auto logits = device.upload({5.0f, 6.0f}), maximum = device.zeros(1), sum = device.upload({7.0f});
    device.run<cross_entropy_statistics_kernel>(1, logits, maximum, sum, 2, 0);
    CHECK_MESSAGE(device.floats(maximum)[0] == kLowest, "hint: with no column filled the maximum is kLowest");
    CHECK_MESSAGE(device.floats(sum)[0] == 0.0f, "hint: with no column filled the sum is 0");
}

TEST_CASE("cross-entropy: losses and gradient from a row's statistics against a double loop [lab 1.6]") {
    TestDevice device;
    for (int n : {1, 2, 17, 101, 300, 1100})
        for (int padding : {0, 3}) {
            CAPTURE(n);
            CAPTURE(padding);
            // This rank holds columns [first, first + n) of a vocabulary; some targets are elsewhere
            const int T = 9, columns = n + padding, first = 5;
            const float scale = 1.0f / 18;
            const auto logits = device.random(T * columns, 1, 4.0);
            const auto L = device.doubles(logits);
            std::vector<int> targets(T);
            std::vector<float> maxima(T), sums(T), target_logits(T);
            std::vector<double> losses(T), gradient(T * columns), unscaled(T * columns), no_target(T * columns),
                signs(T);
            for (int i = 0; i < T; ++i) {
                targets[i] = i == 0 ? 0 : first + (i == 1 ? n - 1 : i * 7 % n);
                maxima[i] = 4.5f;
                double sum = 3;  // other ranks' share
                for (int j = 0; j < n; ++j) sum += std::exp(L[i * columns + j] - 4.5);
                const int local = targets[i] - first;
                target_logits[i] = float((local >= 0 ? L[i * columns + local] : 1.25) - 4.5);
                sums[i] = float(sum);
                losses[i] = std::log(sum) - target_logits[i];
                signs[i] = -losses[i];
                for (int j = 0; j < n; ++j) {
                    const double softmax = std::exp(L[i * columns + j] - 4.5) / sum;
                    no_target[i * columns + j] = scale * softmax;
                    unscaled[i * columns + j] = softmax - (j == local);
                    gradient[i * columns + j] = scale * (softmax - (j == local));
                }
            }
            auto dlogits = device.copy(logits), found = device.zeros(T);
            device.run<cross_entropy_gradient_kernel>(T, dlogits, device.upload(targets), device.upload(maxima),
                                                      device.upload(sums), device.upload(target_logits), found, columns,
                                                      n, first, scale);
            check_close(device.floats(found), losses, 16, 8.0, 0, "a row's loss is not log(sum) - target_logit",
                        {{"the losses have the wrong sign", signs}});
            check_close(device.floats(dlogits), gradient, 16 + n, scale, 1,
                        "the gradient is not (softmax - one-hot) scale, and 0 in padded columns",
                        {{"the logits' gradient forgets the factor `scale`", unscaled},
                         {"the logits' gradient misses the target: softmax minus one-hot", no_target}});
        }
}

TEST_CASE("cross-entropy: losses and gradient against double loops, padded columns, shifted logits") {
    TestDevice device;
    Group alone;
    for (int n : {1, 2, 17, 101, 300, 1100})
        for (int padding : {0, 3})
            for (float shift : {0.0f, 1e4f}) {
                CAPTURE(n);
                const int T = 9, columns = n + padding;
                const float scale = 1.0f / 18;
                auto L = device.floats(device.random(T * columns, 1, 4.0));
                for (float& x : L) x = TestDevice::representable(x + shift);
                auto logits = device.upload(std::vector<real>(L.begin(), L.end()));
                std::vector<int> targets(T);
                for (int i = 0; i < T; ++i) targets[i] = i == 0 ? n - 1 : i * 7 % n;
                const auto ids = device.upload(targets);
                auto losses = device.zeros(T), statistics = device.zeros(4 * T);
                vocab_parallel_cross_entropy(device.device, alone, logits.data, ids.data, losses.data, statistics.data,
                                             T, columns, 0, n, scale);
                std::vector<double> expected(T), gradient(T * columns, 0.0);
                for (int i = 0; i < T; ++i) {
                    double sum = 0;
                    for (int j = 0; j < n; ++j) sum += std::exp(double(L[i * columns + j]) - shift);
                    expected[i] = std::log(sum) + shift - double(L[i * columns + targets[i]]);
                    for (int j = 0; j < n; ++j)
                        gradient[i * columns + j] =
                            scale * (std::exp(double(L[i * columns + j]) - shift) / sum - (j == targets[i]));
                }
                check_close(device.floats(losses), expected, 16 + n, 8.0);
                const std::vector<real> dlogits = to_vector(device.device, logits.data, logits.size);
                check_close({dlogits.begin(), dlogits.end()}, gradient, 16 + n, scale);
            }
}

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
                 double magnitude = 0, double stores = 1) {
    REQUIRE(actual.size() == expected.size());
    for (double y : expected) magnitude = std::max(magnitude, std::abs(y));
    double worst = 0;
    for (size_t i = 0; i < actual.size(); ++i) worst = std::max(worst, std::abs(double(actual[i]) - expected[i]));
    CHECK(worst <= (terms * kEpsilon + (kMixed ? stores * kRoundoff : 0)) * (magnitude + 1e-30));
}

const std::vector<std::pair<int, int>> kSizes = {{1, 1}, {2, 2}, {3, 7}, {5, 64}, {33, 17}, {65, 130}, {40, 1100}};

double gelu(double z) { return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z))); }
double gelu_slope(double z) {
    const double u = std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z), t = std::tanh(u);
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
}

}  // namespace

TEST_CASE("layernorm: forward and backward against double loops") {
    TestDevice device;
    for (const auto& size : kSizes) {
        const int rows = size.first, h = size.second;
        CAPTURE(rows);
        CAPTURE(h);
        const auto x = device.random(rows * h, 1), gamma = device.random(h, 2), beta = device.random(h, 3),
                   dy = device.random(rows * h, 4), residual = device.random(rows * h, 5);
        auto y = device.zeros(rows * h), mean = device.zeros(rows), rstd = device.zeros(rows);
        device.run<layernorm_forward_kernel>(rows, x, gamma, beta, y, mean, rstd, h, kLayerNormEpsilon);
        auto dx = device.copy(residual);
        auto partial = device.zeros(row_chunks(rows) * 2 * h), dgamma = device.zeros(h), dbeta = device.zeros(h);
        device.run<layernorm_backward_kernel<true>>(row_chunks(rows), x, gamma, mean, rstd, dy, dx, partial,
                                                    int64_t(rows), h);
        launch<add_chunk_sums_kernel>(device.device, (h + 63) / 64, 64, partial.data, row_chunks(rows), 2 * h, h,
                                      dgamma.data);
        launch<add_chunk_sums_kernel>(device.device, (h + 63) / 64, 64, partial.data + h, row_chunks(rows), 2 * h, h,
                                      dbeta.data);

        const auto X = device.doubles(x), G = device.doubles(gamma), B = device.doubles(beta), D = device.doubles(dy),
                   R = device.doubles(residual);
        std::vector<double> Y(rows * h), DX(rows * h), DG(h), DB(h);
        double largest_rstd = 0;
        for (int i = 0; i < rows; ++i) {
            double m = 0, variance = 0;
            for (int j = 0; j < h; ++j) m += X[i * h + j] / h;
            for (int j = 0; j < h; ++j) variance += (X[i * h + j] - m) * (X[i * h + j] - m) / h;
            const double r = 1 / std::sqrt(variance + 1e-5);
            largest_rstd = std::max(largest_rstd, r);
            double s1 = 0, s2 = 0;
            for (int j = 0; j < h; ++j) {
                const double n = (X[i * h + j] - m) * r;
                Y[i * h + j] = n * G[j] + B[j];
                s1 += D[i * h + j] * G[j] / h;
                s2 += D[i * h + j] * G[j] * n / h;
            }
            for (int j = 0; j < h; ++j) {
                const double n = (X[i * h + j] - m) * r;
                DX[i * h + j] = R[i * h + j] + (D[i * h + j] * G[j] - s1 - n * s2) * r;
                DG[j] += D[i * h + j] * n;
                DB[j] += D[i * h + j];
            }
        }
        // x - mean loses what x's magnitude (1) costs, times 1/std
        const double terms = 8 + h;
        check_close(device.floats(y), Y, terms, largest_rstd);
        check_close(device.floats(dx), DX, terms, largest_rstd * largest_rstd);
        check_close(device.floats(dgamma), DG, terms + rows, largest_rstd * std::sqrt(rows));
        check_close(device.floats(dbeta), DB, 8 + rows, std::sqrt(rows));
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

TEST_CASE("causal softmax with dropout: forward and backward against double loops") {
    TestDevice device;
    for (int s : {1, 2, 7, 64, 77, 300}) {
        CAPTURE(s);
        const int b = 2, heads = 3, first_head = 4, matrices = b * heads;
        const float scale = 0.125f;
        for (double probability : {0.0, 0.3}) {
            const Dropout dropout = make_dropout(probability, 5, 11, 0, Site::attention_dropout, 1);
            const auto scores = device.random(matrices * s * s, 1, 20.0), d = device.random(matrices * s * s, 2);
            auto p = device.copy(scores), q = device.random(matrices * s * s, 3), ds = device.copy(d);
            device.run<causal_softmax_forward_kernel>(matrices * s, p, q, s, heads, first_head, scale, dropout);
            auto again = device.random(matrices * s * s, 4);
            device.run<attention_dropout_kernel>(matrices * s, p, again, s, heads, first_head, dropout);
            const auto Q = probability > 0 ? device.floats(q) : device.floats(p);
            if (probability > 0) CHECK(device.floats(again) == Q);
            device.run<causal_softmax_backward_kernel>(matrices * s, p, probability > 0 ? q : p, ds, s, scale);
            const auto S = device.doubles(scores), D = device.doubles(d);
            std::vector<double> P(S.size()), DS(S.size());
            for (int row = 0; row < matrices * s; ++row) {
                const int64_t base = int64_t(row) * s;
                double sum = 0, inner = 0;
                for (int j = 0; j <= row % s; ++j) sum += std::exp(scale * S[base + j]);
                for (int j = 0; j <= row % s; ++j) P[base + j] = std::exp(scale * S[base + j]) / sum;
                for (int j = 0; j < s; ++j) {
                    const bool kept = Q[base + j] != 0.0f;
                    REQUIRE((kept ? j <= row % s : true));
                    const double mask = kept ? dropout.scale : 0.0;
                    REQUIRE(std::abs(Q[base + j] - P[base + j] * mask) <=
                            64 * kEpsilon + (kMixed ? 3 * dropout.scale * kRoundoff : 0));
                    inner += D[base + j] * mask * P[base + j];
                }
                for (int j = 0; j < s; ++j) {
                    const double mask = Q[base + j] != 0.0f ? dropout.scale : 0.0;
                    DS[base + j] = scale * P[base + j] * (D[base + j] * mask - inner);
                }
            }
            // Stored: exponentials, probabilities, dropped ones. The gradient sums two products of those
            check_close(device.floats(p), P, 16 + s, 1.0, 2);
            check_close(device.floats(ds), DS, 16 + s, scale, 2 * 3 * dropout.scale + 1);
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

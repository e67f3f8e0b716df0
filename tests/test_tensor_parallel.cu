// Tensor parallelism (§2.3): every sharded layer against the unsharded one, forward and backward, for every t.
//
// A worker runs on t ranks. Each rank also computes the whole layer alone (a group of one) from the same values and
// compares its slice. Values are small integers, so that sums are exact and equality is due whatever the order of
// summation; where exp is involved the comparison is within a derived bound.
#include "tensor_parallel.cu"

#include <set>

#include "gpt.cu"
#include "platform/grid.h"
#include "tests/harness.h"
#include "tests/model.h"

namespace {

constexpr double kEpsilon = 1.1920929e-7;  // fp32

// This rank's slice of a whole tensor, both stored as the model stores them (QKV by head).
std::vector<float> slice_of(const Parameter& slice, const std::vector<float>& whole) {
    std::vector<float> part(slice.local_size(), 0.0f);
    for (int64_t r = 0; r < slice.local_rows; ++r)
        for (int64_t c = 0; c < slice.local_cols; ++c)
            if (slice.first_row + r < slice.rows)
                part[r * slice.local_cols + c] = whole[(slice.first_row + r) * slice.cols + slice.first_col + c];
    return part;
}

// A slice, told apart from slice_parameter(), so that each can be wrong alone.
Parameter make_parameter(int64_t rows, int64_t cols, Split split, int t, int t_rank) {
    Parameter parameter;
    parameter.rows = rows;
    parameter.cols = cols;
    parameter.split = split;
    parameter.local_rows = split == Split::rows ? rows / t + (rows % t > 0) : rows;
    parameter.local_cols = split == Split::columns ? cols / t : cols;
    if (split == Split::rows) parameter.first_row = parameter.local_rows * t_rank;
    if (split == Split::columns) parameter.first_col = parameter.local_cols * t_rank;
    return parameter;
}

// A matrix of integers on the host, row-major.
struct HostMatrix {
    int64_t rows = 0, cols = 0;
    std::vector<float> values;

    float at(int64_t r, int64_t c) const { return values[r * cols + c]; }
    HostMatrix columns(int64_t first, int64_t n) const {
        HostMatrix part{rows, n, {}};
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < n; ++c) part.values.push_back(at(r, first + c));
        return part;
    }
    HostMatrix some_rows(int64_t first, int64_t n) const {
        return {n, cols, {values.begin() + first * cols, values.begin() + (first + n) * cols}};
    }
    HostMatrix transposed() const {
        HostMatrix other{cols, rows, {}};
        for (int64_t c = 0; c < cols; ++c)
            for (int64_t r = 0; r < rows; ++r) other.values.push_back(at(r, c));
        return other;
    }
    std::vector<double> doubles(double factor = 1) const {
        std::vector<double> all(values.begin(), values.end());
        for (double& x : all) x *= factor;
        return all;
    }
};
HostMatrix operator*(const HostMatrix& x, const HostMatrix& y) {
    HostMatrix product{x.rows, y.cols, std::vector<float>(x.rows * y.cols, 0.0f)};
    for (int64_t i = 0; i < x.rows; ++i)
        for (int64_t k = 0; k < x.cols; ++k)
            for (int64_t j = 0; j < y.cols; ++j) product.values[i * y.cols + j] += x.at(i, k) * y.at(k, j);
    return product;
}
HostMatrix operator+(HostMatrix x, const HostMatrix& y) {
    for (size_t i = 0; i < x.values.size(); ++i) x.values[i] += y.values[i];
    return x;
}
HostMatrix integers(TestDevice& device, int64_t rows, int64_t cols, uint32_t seed) {
    return {rows, cols, device.floats(device.integers(rows * cols, seed))};
}

struct World {
    std::unique_ptr<Grid> grid;
    Group alone;
    World() : grid(make_grid(world_size(), 1, 1)) {}
};

void on_every_t(const std::string& worker) {
    for (int t : {1, 2, 3, 4, 6, 8}) check_worker(t, worker);
}

// Integers are compared exactly; a difference is told in a student's words.
void check_equal(const std::vector<float>& actual, const HostMatrix& expected, const std::string& otherwise,
                 const std::vector<Mistake>& mistakes) {
    REQUIRE_MESSAGE(actual == expected.values, hint(actual, otherwise, mistakes));
}

// A linear layer Y = X A by the whole matrices, and this rank's part of it.
struct LinearCase {
    HostMatrix x, A, dy, start;  // start: what dA holds before
    HostMatrix y, dx, dA;
    LinearCase(TestDevice& device, int64_t rows, int64_t in, int64_t out)
        : x(integers(device, rows, in, 1)),
          A(integers(device, in, out, 2)),
          dy(integers(device, rows, out, 3)),
          start(integers(device, in, out, 4)),
          y(x * A),
          dx(dy * A.transposed()),
          dA(start + x.transposed() * dy) {}
};
template <class F>
void for_linear_sizes(TestDevice& device, F check) {
    for (int64_t rows : {24, 1, 35})
        for (int64_t in : {24, 48})
            for (int64_t out : {24, 120}) check(rows, LinearCase(device, rows, in, out));
}

// dA, which held `start`: either layer's is x^T dy of its own part.
void check_weight_gradient(const std::vector<float>& actual, const HostMatrix& x, const HostMatrix& dy,
                           const HostMatrix& start, const HostMatrix& expected) {
    const HostMatrix fresh = x.transposed() * dy;
    std::vector<Mistake> mistakes = {
        {"the weight's gradient is overwritten; it adds up over an iteration's microbatches", fresh.doubles()},
        {"the weight's gradient is left as it was", start.doubles()}};
    if (start.rows == start.cols)
        mistakes.push_back({"the weight's gradient is dy^T x; it is x^T dy", (start + fresh.transposed()).doubles()});
    check_equal(actual, expected, "the weight's gradient has not grown by x^T dy", mistakes);
}

// An all-reduce by f's backward or g's forward.
template <class Operator>
void check_operator(Operator apply, const std::string& name) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    for (int64_t n : {1, 7, 1000}) {
        HostMatrix sum = integers(device, 1, n, 1);
        for (int rank = 1; rank < tensor.size; ++rank) sum = sum + integers(device, 1, n, 1 + rank);
        const HostMatrix addend = integers(device, 1, n, 1 + tensor.rank);
        auto data = device.upload(addend.values);
        apply(device.device, tensor, data.data, n);
        check_equal(device.floats(data), sum, name + " does not leave the sum over the tensor group on every rank",
                    {{name + " leaves every rank its own addend: the all-reduce is missing", addend.doubles()},
                     {name + " adds more than once", sum.doubles(tensor.size)}});
    }
}

}  // namespace

TEST_CASE("f's backward is an all-reduce on 1, 2, 3, 4, 6, 8 ranks [lab 2.1]") { on_every_t("worker: f"); }
TEST_CASE("worker: f" * doctest::skip()) { check_operator(f_backward, "f, backward,"); }

TEST_CASE("g's forward is an all-reduce on 1, 2, 3, 4, 6, 8 ranks [lab 2.2]") { on_every_t("worker: g"); }
TEST_CASE("worker: g" * doctest::skip()) { check_operator(g_forward, "g, forward,"); }

TEST_CASE("column parallel layers equal the whole layer on 1, 2, 3, 4, 6, 8 ranks [lab 2.3]") {
    on_every_t("worker: column parallel");
}
TEST_CASE("worker: column parallel" * doctest::skip()) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    for_linear_sizes(device, [&](int64_t rows, const LinearCase& whole) {  // all of x, some columns of y
        const int64_t in = whole.A.rows, n = whole.A.cols / tensor.size, first = tensor.rank * n;
        const HostMatrix A = whole.A.columns(first, n), dy = whole.dy.columns(first, n);
        const HostMatrix gradient = whole.dA.columns(first, n), start = whole.start.columns(first, n);
        const auto x = device.upload(whole.x.values), w = device.upload(A.values), pdy = device.upload(dy.values);
        auto dw = device.upload(start.values), y = device.zeros(rows * n), dx = device.zeros(rows * in);
        Linear part{{w.data, dw.data}, {}, in, n};
        column_parallel_forward(device.device, part, x.data, y.data, rows);
        check_equal(device.floats(y), whole.y.columns(first, n),
                    "a column parallel layer's output is not x A with this rank's columns of A",
                    {{"a column parallel layer's output stays zero", std::vector<double>(rows * n)}});
        column_parallel_backward(device.device, tensor, part, x.data, pdy.data, dx.data, rows);
        const HostMatrix own = dy * A.transposed();
        std::vector<Mistake> mistakes = {
            {"the gradient of a column parallel layer's input misses the all-reduce f", own.doubles()},
            {"the gradient of a column parallel layer's input goes through f more than once",
             whole.dx.doubles(tensor.size)}};
        if (in == n) mistakes.push_back({"the gradient of the input is dy A; it is dy A^T", (dy * A).doubles()});
        check_equal(device.floats(dx), whole.dx,
                    "the gradient of a column parallel layer's input is not dy A^T summed over the ranks", mistakes);
        check_weight_gradient(device.floats(dw), whole.x, dy, start, gradient);
    });
}

TEST_CASE("row parallel layers equal the whole layer on 1, 2, 3, 4, 6, 8 ranks [lab 2.4]") {
    on_every_t("worker: row parallel");
}
TEST_CASE("worker: row parallel" * doctest::skip()) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    for_linear_sizes(device, [&](int64_t rows, const LinearCase& whole) {  // some columns of x, an addend of y
        const int64_t out = whole.A.cols, n = whole.A.rows / tensor.size, first = tensor.rank * n;
        const HostMatrix A = whole.A.some_rows(first, n), x = whole.x.columns(first, n);
        const HostMatrix gradient = whole.dA.some_rows(first, n), start = whole.start.some_rows(first, n);
        const auto px = device.upload(x.values), w = device.upload(A.values), dy = device.upload(whole.dy.values);
        auto dw = device.upload(start.values), y = device.zeros(rows * out), dx = device.zeros(rows * n);
        Linear part{{w.data, dw.data}, {}, n, out};
        row_parallel_forward(device.device, tensor, part, px.data, y.data, rows);
        check_equal(
            device.floats(y), whole.y,
            "a row parallel layer's output is not x A summed over the ranks, each with its columns of x",
            {{"the output of a row parallel layer misses the all-reduce g", (x * A).doubles()},
             {"the output of a row parallel layer goes through g more than once", whole.y.doubles(tensor.size)}});
        row_parallel_backward(device.device, part, px.data, dy.data, dx.data, rows);
        std::vector<Mistake> mistakes;
        if (n == out) mistakes.push_back({"the gradient of the input is dy A; it is dy A^T", (whole.dy * A).doubles()});
        check_equal(device.floats(dx), whole.dx.columns(first, n),
                    "the gradient of a row parallel layer's input is not dy A^T with this rank's rows of A", mistakes);
        check_weight_gradient(device.floats(dw), x, whole.dy, start, gradient);
    });
}

TEST_CASE("slices cover a tensor once, in the order of ranks [lab 2.5]") {
    for (int t : {1, 2, 3, 4, 6, 8})
        for (Split split : {Split::replicated, Split::columns, Split::rows})
            for (int64_t rows : {1, 24, 101})
                for (int64_t cols : {24, 72}) {
                    CAPTURE(t);
                    CAPTURE(rows);
                    CAPTURE(cols);
                    std::vector<int> held(rows * cols, 0);
                    int64_t next_row = 0, next_col = 0;
                    for (int rank = 0; rank < t; ++rank) {
                        CAPTURE(rank);
                        Parameter slice;
                        slice.rows = rows;
                        slice.cols = cols;
                        slice.split = split;
                        slice_parameter(slice, t, rank);
                        if (split != Split::rows)
                            REQUIRE_MESSAGE(slice.local_rows == rows, "hint: only a split by rows leaves out rows");
                        if (split != Split::columns)
                            REQUIRE_MESSAGE(slice.local_cols == cols,
                                            "hint: only a split by columns leaves out columns");
                        if (split == Split::columns)
                            REQUIRE_MESSAGE(slice.local_cols * t == cols,
                                            "hint: by columns a rank has cols / t columns");
                        if (split == Split::rows)
                            REQUIRE_MESSAGE((slice.local_rows - 1) * t < rows,
                                            "hint: by rows a rank has rows / t rows, rounded up and no more");
                        REQUIRE_MESSAGE(slice.first_row == next_row,
                                        "hint: a slice does not begin with the row behind the last rank's");
                        REQUIRE_MESSAGE(slice.first_col == next_col,
                                        "hint: a slice does not begin with the column behind the last rank's");
                        if (split == Split::rows) next_row += slice.local_rows;
                        if (split == Split::columns) next_col += slice.local_cols;
                        for (int64_t r = slice.first_row; r < slice.first_row + slice.local_rows && r < rows; ++r)
                            for (int64_t c = slice.first_col; c < slice.first_col + slice.local_cols; ++c)
                                ++held[r * cols + c];
                    }
                    const int times = split == Split::replicated ? t : 1;
                    REQUIRE_MESSAGE(std::count(held.begin(), held.end(), times) == rows * cols,
                                    "hint: some elements are on no rank: by rows the size is rounded up");
                }
}

TEST_CASE("the embedding's rows, zero where another rank holds them [lab 2.6]") {
    TestDevice device;
    for (int t : {1, 2, 3, 8})
        for (int64_t V : {5, 8, 101})
            for (int64_t h : {1, 7, 48})
                for (int rank = 0; rank < t; ++rank) {
                    CAPTURE(t);
                    CAPTURE(rank);
                    const int64_t rows = 35;
                    const Parameter slice = make_parameter(V, h, Split::rows, t, rank);
                    std::vector<int> tokens(rows);
                    for (int64_t i = 0; i < rows; ++i) tokens[i] = int((i * i + 3 * i) % V);
                    // Rows that are not to be read stand around the slice
                    const HostMatrix table = integers(device, slice.first_row + slice.local_rows + V, h, 1);
                    const auto wte = device.upload(table.values);
                    const auto ids = device.upload(tokens);
                    auto x = device.upload(std::vector<float>(rows * h, 9.0f));
                    auto pick = [&](auto row_of) {
                        HostMatrix picked{rows, h, {}};
                        for (int token : tokens)
                            for (int64_t j = 0; j < h; ++j) {
                                const int64_t row = row_of(token);
                                picked.values.push_back(row < 0 ? 0.0f : table.at(row, j));
                            }
                        return picked;
                    };
                    auto mine = [&](int64_t token) {
                        return slice.first_row <= token && token < slice.first_row + slice.local_rows;
                    };
                    launch<embedding_forward_kernel>(device.device, rows, kBlock, static_cast<const int*>(ids.data),
                                                     static_cast<const real*>(wte.data + slice.first_row * h), x.data,
                                                     int(slice.first_row), int(slice.local_rows), int(h));
                    HostMatrix untouched = pick([&](int64_t token) { return mine(token) ? token : -1; });
                    const HostMatrix expected = untouched;
                    for (int64_t i = 0; i < rows; ++i)
                        for (int64_t j = 0; j < h && !mine(tokens[i]); ++j) untouched.values[i * h + j] = 9;
                    check_equal(
                        device.floats(x), expected,
                        "x is not the embedding's row of each token this rank holds, and zero elsewhere",
                        {{"a token that another rank holds leaves its place as it was; it must be zero, an "
                          "addend of the sum",
                          untouched.doubles()},
                         {"the slice begins at token first_row: its row 0 is that token's",
                          pick([&](int64_t token) { return mine(token) ? slice.first_row + token : -1; }).doubles()}});
                }
}

TEST_CASE("a rank's part of the vocabulary parallel loss [lab 2.7]") {
    TestDevice device;
    for (int64_t rows : {1, 6, 257})
        for (int n : {1, 5, 40}) {
            CAPTURE(rows);
            CAPTURE(n);
            const int first = 3;
            std::vector<int> targets(rows);
            for (int64_t i = 0; i < rows; ++i) targets[i] = int(i * 7 % (n + 8));  // some on other ranks
            const auto logits = device.random(rows * n, 1, 5.0f), own = device.random(rows, 2, 3.0f),
                       rise = device.random(rows, 3), sums = device.random(rows, 4);
            const auto L = device.doubles(logits), O = device.doubles(own), S0 = device.doubles(sums);
            std::vector<float> raised(rows);
            for (int64_t i = 0; i < rows; ++i) raised[i] = float(O[i] + 1 + device.doubles(rise)[i]);
            std::vector<double> S, target, wrong_sign, whole_logit, everywhere;
            for (int64_t i = 0; i < rows; ++i) {
                const double down = O[i] - double(raised[i]);
                S.push_back(S0[i] * std::exp(down));
                wrong_sign.push_back(S0[i] * std::exp(-down));
                const int64_t local = targets[i] - first;
                const bool mine = 0 <= local && local < n;
                target.push_back(mine ? L[i * n + local] - double(raised[i]) : 0.0);
                whole_logit.push_back(mine ? L[i * n + local] : 0.0);
                everywhere.push_back(L[i * n + std::min<int64_t>(targets[i], n - 1)] - double(raised[i]));
            }
            const auto ids = device.upload(targets);
            const auto maximum = device.upload(raised);
            auto sum = device.copy(sums), target_logit = device.upload(std::vector<float>(rows, 9.0f));
            device.run<cross_entropy_rescale_kernel>(flat_grid(rows), logits, ids, own, maximum, sum, target_logit,
                                                     rows, n, first);
            // A difference of numbers below 8, an exponential and a product: a few roundings
            auto check_near = [](const std::vector<float>& actual, const std::vector<double>& expected,
                                 const std::string& otherwise, const std::vector<Mistake>& mistakes) {
                double worst = 0;
                for (size_t i = 0; i < expected.size(); ++i)
                    worst = std::max(worst, std::abs(double(actual[i]) - expected[i]));
                REQUIRE_MESSAGE(worst <= 16 * kEpsilon, hint(actual, otherwise, mistakes));
            };
            check_near(device.floats(sum), S, "the sum is not times exp(own maximum - the group's maximum)",
                       {{"the sum still belongs to this rank's own maximum: bring it to the group's", S0},
                        {"the sum is rescaled the wrong way: the group's maximum is the larger one", wrong_sign}});
            check_near(device.floats(target_logit), target,
                       "the target's logit, less the group's maximum, is not what this rank gives",
                       {{"the target's logit is to be less the group's maximum", whole_logit},
                        {"a rank holds columns [first_column, first_column + n): elsewhere it gives 0", everywhere}});
        }
}

TEST_CASE("vocabulary parallel embedding equals the whole one on 1, 2, 3, 4, 6, 8 ranks") {
    on_every_t("worker: embedding");
}
TEST_CASE("worker: embedding" * doctest::skip()) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    for (int64_t V : {5, 8, 101})
        for (int64_t h : {1, 7, 48}) {
            const int64_t rows = 35;
            std::vector<int> tokens(rows);
            for (int64_t i = 0; i < rows; ++i) tokens[i] = int((i * i + 3 * i) % V);
            const auto ids = device.upload(tokens);
            const SortedTokens sorted = sort_tokens(tokens);
            const auto distinct = device.upload(sorted.distinct), starts = device.upload(sorted.starts),
                       positions = device.upload(sorted.positions);
            const auto wte = device.integers(V * h, 1), dx = device.integers(rows * h, 2);
            auto run = [&](Group& group, const Parameter& slice) {
                const auto part = device.upload(slice_of(slice, device.floats(wte)));
                auto gradient = device.zeros(slice.local_size()), x = device.zeros(rows * h);
                vocab_parallel_embedding_forward(device.device, group, {part.data, gradient.data}, slice, ids.data,
                                                 x.data, rows);
                device.run<embedding_backward_kernel>(int64_t(sorted.distinct.size()), distinct, starts, positions, dx,
                                                      gradient, int(slice.first_row), int(slice.local_rows), int(h));
                return std::make_pair(device.floats(x), device.floats(gradient));
            };
            const Parameter whole = make_parameter(V, h, Split::rows, 1, 0);
            const Parameter slice = make_parameter(V, h, Split::rows, tensor.size, tensor.rank);
            const auto expected = run(world.alone, whole), actual = run(tensor, slice);
            CHECK(actual.first == expected.first);
            CHECK(actual.second == slice_of(slice, expected.second));
        }
}

TEST_CASE("vocabulary parallel cross-entropy equals the whole one on 1, 2, 3, 4, 6, 8 ranks [lab 2.7]") {
    on_every_t("worker: cross-entropy");
}
TEST_CASE("worker: cross-entropy" * doctest::skip()) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    for (int64_t V : {3, 16, 101})
        for (float shift : {0.0f, 1e4f, -1e4f}) {
            const int64_t T = V;  // row i's target is token i: in every shard
            std::vector<int> targets(T);
            for (int64_t i = 0; i < T; ++i) targets[i] = int(i);
            const auto ids = device.upload(targets);
            auto values = device.floats(device.random(T * V, 7, 5.0f));
            for (float& x : values) x += shift;
            const float scale = 1.0f / 64;
            auto run = [&](Group& group, int64_t columns, int64_t first) {
                std::vector<float> local(T * columns, 1e6f);  // padding holds what must not matter
                for (int64_t i = 0; i < T; ++i)
                    for (int64_t c = 0; c < columns && first + c < V; ++c)
                        local[i * columns + c] = values[i * V + first + c];
                auto logits = device.upload(local), losses = device.zeros(T), scratch = device.zeros(4 * T);
                vocab_parallel_cross_entropy(device.device, group, logits.data, ids.data, losses.data, scratch.data, T,
                                             columns, first, V, scale);
                return std::make_pair(device.floats(losses), device.floats(logits));
            };
            const int64_t columns = (V + tensor.size - 1) / tensor.size, first = tensor.rank * columns;
            const auto expected = run(world.alone, V, 0), actual = run(tensor, columns, first);
            // Sums of V terms in another order
            double worst_loss = 0, worst_gradient = 0;
            for (int64_t i = 0; i < T; ++i) {
                worst_loss = std::max(worst_loss, double(std::abs(actual.first[i] - expected.first[i])));
                for (int64_t c = 0; c < columns; ++c) {
                    const float whole = first + c < V ? expected.second[i * V + first + c] : 0.0f;
                    worst_gradient = std::max(worst_gradient, double(std::abs(actual.second[i * columns + c] - whole)));
                    if (first + c >= V) CHECK(actual.second[i * columns + c] == 0.0f);
                }
            }
            const char* why =
                "hint: the maximum is the group's before the sums are rescaled to it; then sums and target "
                "logits are added over the group";
            CHECK_MESSAGE(worst_loss <= double(V) * kEpsilon * 10, why);
            CHECK_MESSAGE(worst_gradient <= double(V) * kEpsilon * scale, why);
        }
}

TEST_CASE("a whole transformer layer equals the unsharded one, dropout included, on 1, 2, 3, 4, 6, 8 ranks") {
    on_every_t("worker: layer");
}
TEST_CASE("worker: layer" * doctest::skip()) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    const GptConfig config = small_model(1, 48, 24, 7, 101, 0.2);
    const int64_t b = 3, T = config.sequence * b, h = config.hidden;
    struct Result {
        std::vector<float> out, dx;
        std::vector<std::vector<float>> gradients;
    };
    auto run = [&](Group& group) {
        Gpt gpt(device.device, group, config, b);
        Carver measure;
        carve_layer(measure, gpt.shape);
        DeviceBuffer<char> memory(measure.used);
        Carver carver{memory.data};
        const LayerActivations acts = carve_layer(carver, gpt.shape);
        Microbatch mb;
        mb.s = config.sequence;
        mb.b = b;
        mb.iteration = 3;
        const auto x = device.random(T * h, 1);
        auto out = device.zeros(T * h), dx = device.random(T * h, 2);
        layer_forward(gpt, gpt.chunks[0].layers[0], mb, acts, x.data, out.data);
        layer_backward(gpt, gpt.chunks[0].layers[0], mb, acts, x.data, dx.data);
        Result result{device.floats(out), device.floats(dx), {}};
        for (const Parameter& p : gpt.parameters)
            result.gradients.push_back(to_vector(device.device, gpt.gradients.data + p.offset, p.local_size()));
        return std::make_pair(result, gpt.parameters);
    };
    const auto [whole, whole_parameters] = run(world.alone);
    const double bytes_before = tensor.bytes();
    const auto [part, parameters] = run(tensor);
    // Two all-reduces forward, two backward (§2.3, §3.2), each of 2 (t-1)/t bsh elements, and no more
    const double expected_bytes = 8.0 * double(T * h) * (tensor.size - 1) / tensor.size * sizeof(float);
    CHECK(tensor.bytes() - bytes_before == doctest::Approx(expected_bytes).epsilon(1e-12));

    auto compare = [](const std::vector<float>& actual, const std::vector<float>& expected) {
        REQUIRE(actual.size() == expected.size());
        double squares = 0, worst = 0;
        for (size_t i = 0; i < actual.size(); ++i) {
            squares += double(expected[i]) * expected[i];
            worst = std::max(worst, double(std::abs(actual[i] - expected[i])) - 1e-5 * std::abs(expected[i]));
        }
        CHECK(worst <= 1e-6 * std::sqrt(squares) + 1e-12);  // design.md, Bounds
    };
    compare(part.out, whole.out);
    compare(part.dx, whole.dx);
    for (size_t i = 0; i < parameters.size(); ++i) {
        const std::string& name = parameters[i].name;
        CAPTURE(name);
        if (name.find("c_attn.bias") != std::string::npos) continue;  // its key part is zero by symmetry
        compare(part.gradients[i], slice_of(parameters[i], whole.gradients[i]));
    }
    // Replicated parameters: bitwise equal on every rank with no traffic of their own
    for (size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].split == Split::replicated) {
            std::vector<float> mine = part.gradients[i], first = mine;
            MPI_FINISH(MPI_Ibcast, first.data(), int(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
            CHECK(mine == first);
        }
}

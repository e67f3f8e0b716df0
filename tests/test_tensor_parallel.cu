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

Parameter make_parameter(int64_t rows, int64_t cols, Split split, int t, int t_rank) {
    Parameter parameter;
    parameter.rows = rows;
    parameter.cols = cols;
    parameter.split = split;
    slice_parameter(parameter, t, t_rank);
    return parameter;
}

// Columns [first, first + n) of a row-major matrix of `cols` columns.
std::vector<float> columns_of(const std::vector<float>& matrix, int64_t cols, int64_t first, int64_t n) {
    std::vector<float> part;
    for (size_t row = 0; row < matrix.size() / cols; ++row)
        part.insert(part.end(), matrix.begin() + row * cols + first, matrix.begin() + row * cols + first + n);
    return part;
}

struct World {
    std::unique_ptr<Grid> grid;
    Group alone;
    World() {
        int ranks = 0;
        MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
        grid = make_grid(ranks, 1, 1);
    }
};

void on_every_t(const std::string& worker) {
    for (int t : {1, 2, 3, 4, 6, 8}) {
        CAPTURE(t);
        const RunResult result = mpirun_self(t, worker);
        INFO(result.output);
        CHECK(result.status == 0);
    }
}

}  // namespace

TEST_CASE("column and row parallel layers equal the whole layer on 1, 2, 3, 4, 6, 8 ranks") {
    on_every_t("worker: linear layers");
}
TEST_CASE("worker: linear layers" * doctest::skip()) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    const int t = tensor.size;
    for (int64_t rows : {1, 3, 35})
        for (int64_t in : {24, 48})
            for (int64_t out : {24, 120}) {
                const auto x = device.integers(rows * in, 1), w = device.integers(in * out, 2),
                           dy = device.integers(rows * out, 3), start = device.integers(in * out, 4);
                auto y = device.zeros(rows * out), dx = device.zeros(rows * in), dw = device.copy(start);
                Linear whole{{w.data, dw.data}, {}, in, out};
                column_parallel_forward(device.device, whole, x.data, y.data, rows);
                column_parallel_backward(device.device, world.alone, whole, x.data, dy.data, dx.data, rows);

                {  // by columns: all of x, some columns of y
                    const Parameter slice = make_parameter(in, out, Split::columns, t, tensor.rank);
                    const auto pw = device.upload(slice_of(slice, device.floats(w)));
                    auto pdw = device.upload(slice_of(slice, device.floats(start)));
                    const auto pdy =
                        device.upload(columns_of(device.floats(dy), out, slice.first_col, slice.local_cols));
                    auto py = device.zeros(rows * slice.local_cols), pdx = device.zeros(rows * in);
                    Linear part{{pw.data, pdw.data}, {}, in, slice.local_cols};
                    column_parallel_forward(device.device, part, x.data, py.data, rows);
                    column_parallel_backward(device.device, tensor, part, x.data, pdy.data, pdx.data, rows);
                    CHECK(device.floats(py) == columns_of(device.floats(y), out, slice.first_col, slice.local_cols));
                    CHECK_MESSAGE(device.floats(pdx) == device.floats(dx),
                                  "the gradient of a column parallel layer's input misses the all-reduce f");
                    CHECK(device.floats(pdw) == slice_of(slice, device.floats(dw)));
                }
                {  // by rows: some columns of x, an addend of y
                    const Parameter slice = make_parameter(in, out, Split::rows, t, tensor.rank);
                    const auto pw = device.upload(slice_of(slice, device.floats(w)));
                    auto pdw = device.upload(slice_of(slice, device.floats(start)));
                    const auto px = device.upload(columns_of(device.floats(x), in, slice.first_row, slice.local_rows));
                    auto py = device.zeros(rows * out), pdx = device.zeros(rows * slice.local_rows);
                    Linear part{{pw.data, pdw.data}, {}, slice.local_rows, out};
                    row_parallel_forward(device.device, tensor, part, px.data, py.data, rows);
                    row_parallel_backward(device.device, part, px.data, dy.data, pdx.data, rows);
                    CHECK_MESSAGE(device.floats(py) == device.floats(y),
                                  "the output of a row parallel layer misses the all-reduce g");
                    CHECK(device.floats(pdx) == columns_of(device.floats(dx), in, slice.first_row, slice.local_rows));
                    CHECK(device.floats(pdw) == slice_of(slice, device.floats(dw)));
                }
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

TEST_CASE("vocabulary parallel cross-entropy equals the whole one on 1, 2, 3, 4, 6, 8 ranks") {
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
            CHECK(worst_loss <= double(V) * kEpsilon * 10);
            CHECK(worst_gradient <= double(V) * kEpsilon * scale);
        }
}

TEST_CASE("a whole transformer layer equals the unsharded one, dropout included, on 1, 2, 3, 4, 6, 8 ranks") {
    on_every_t("worker: layer");
}
TEST_CASE("worker: layer" * doctest::skip()) {
    World world;
    Group& tensor = world.grid->tensor;
    TestDevice device;
    GptConfig config;
    config.layers = 1;
    config.hidden = 48;
    config.heads = 24;
    config.sequence = 7;
    config.vocab = 101;
    config.init_std = 0.2;
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

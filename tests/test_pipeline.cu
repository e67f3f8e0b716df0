// Schedules as data: replays of all ranks on the host, with the streams and waits that the programs prescribe and with
// messages that block.
#include "pipeline.cu"

#include <set>

#include "tests/harness.h"
#include "tests/model.h"

namespace {

// Every microbatch goes through every chunk once forward and once backward, backwards in microbatch order per chunk,
// and never backward before forward.
void check_complete(const Schedule& schedule) {
    for (const auto& ops : schedule.ranks) {
        REQUIRE(ops.size() == size_t(2 * schedule.m * schedule.v));
        std::set<std::pair<int, int>> forwarded, backwarded;
        std::vector<int> next(schedule.v, 0);
        for (const Op& op : ops) {
            const auto key = std::make_pair(op.microbatch, op.chunk);
            if (op.forward) {
                REQUIRE(forwarded.insert(key).second);
            } else {
                REQUIRE(forwarded.count(key) == 1);
                REQUIRE(backwarded.insert(key).second);
                REQUIRE(op.microbatch == next[op.chunk]++);
            }
        }
        REQUIRE(backwarded.size() == size_t(schedule.m * schedule.v));
    }
}

void check_replay(ScheduleKind kind, int p, int v, int m) {
    CAPTURE(p);
    CAPTURE(v);
    CAPTURE(m);
    const Schedule schedule = make_schedule(kind, p, v, m);
    check_complete(schedule);
    const Program program = compile(schedule);
    for (double backward : {1.0, 1.5, 2.0}) {
        CAPTURE(backward);
        const Replay replayed = replay(schedule, program, uniform_cost(1, backward));
        REQUIRE(replayed.deadlock == "");
        for (int rank = 0; rank < p; ++rank) {
            REQUIRE(replayed.ops[rank].size() == schedule.ranks[rank].size());
            REQUIRE(replayed.in_flight[rank] == in_flight_formula(kind, p, rank, v, m));
        }
        // Sums of multiples of 1/2 are exact
        const double ideal = m * v * (1 + backward);
        REQUIRE((replayed.makespan - ideal) * v * m == (p - 1) * ideal);
        // No operation starts before its input is made
        std::map<std::tuple<bool, int, int>, double> made;
        for (int rank = 0; rank < p; ++rank)
            for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
                const Op& op = schedule.ranks[rank][i];
                made[{op.forward, op.chunk * p + rank, op.microbatch}] = replayed.ops[rank][i].end;
            }
        for (int rank = 0; rank < p; ++rank)
            for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
                const Op& op = schedule.ranks[rank][i];
                const int stage = op.chunk * p + rank;
                const double start = replayed.ops[rank][i].start;
                if (op.forward && stage > 0) REQUIRE(made.at({true, stage - 1, op.microbatch}) <= start);
                if (!op.forward && stage < p * v - 1) REQUIRE(made.at({false, stage + 1, op.microbatch}) <= start);
                if (!op.forward) REQUIRE(made.at({true, stage, op.microbatch}) <= start);
            }
        // With messages that take time nothing deadlocks either
        REQUIRE(replay(schedule, program, uniform_cost(1, backward), 0.25).deadlock == "");
    }
}

}  // namespace

TEST_CASE("replay: GPipe and 1F1B for p = 1..8, m = 1..6p") {
    for (int p = 1; p <= 8; ++p)
        for (int m = 1; m <= 6 * p; ++m) {
            check_replay(ScheduleKind::gpipe, p, 1, m);
            check_replay(ScheduleKind::one_f_one_b, p, 1, m);
        }
}

TEST_CASE("replay: interleaved 1F1B for p = 2..8, v = 2..4, m = p..6p") {
    for (int p = 2; p <= 8; ++p)
        for (int v = 2; v <= 4; ++v)
            for (int m = p; m <= 6 * p; m += p) check_replay(ScheduleKind::interleaved, p, v, m);
}

namespace {

// "F1 B1" or, with several chunks, "F1a B1b": Figure 4's notation.
std::string text_of(const std::vector<Op>& ops, int v) {
    std::string text;
    for (const Op& op : ops)
        text += std::string(text.empty() ? "" : " ") + (op.forward ? "F" : "B") + std::to_string(op.microbatch + 1) +
                (v > 1 ? std::string(1, char('a' + op.chunk)) : "");
    return text;
}
std::vector<Op> ops_of(const std::string& text) {
    std::vector<Op> ops;
    std::istringstream words(text);
    for (std::string word; words >> word;)
        ops.push_back(
            {word[0] == 'F', std::atoi(word.c_str() + 1) - 1, std::isalpha(word.back()) ? word.back() - 'a' : 0});
    return ops;
}

// The forwards before the first backward.
int warm_up(const std::vector<Op>& ops) {
    return int(std::find_if(ops.begin(), ops.end(), [](const Op& op) { return !op.forward; }) - ops.begin());
}

// Lists that wait for nothing that comes later, whatever schedule_ops does.
Schedule written_schedule(int p, int v, int m, const std::vector<std::string>& lists) {
    Schedule schedule{p, v, m, {}};
    for (const std::string& list : lists) schedule.ranks.push_back(ops_of(list));
    return schedule;
}

// A small model and a batch of microbatches on the device.
GptConfig batch_model() { return small_model(4, 24, 6, 5, 13, 0.2); }
struct Batch {
    std::vector<DeviceBuffer<int>> memory;
    std::vector<Microbatch> microbatches;
    Batch(TestDevice& device, const GptConfig& config, int m, bool training) {
        const int64_t b = 2, T = config.sequence * b;
        auto upload = [&](const std::vector<int>& values) {
            memory.push_back(device.upload(values));
            return static_cast<const int*>(memory.back().data);
        };
        for (int i = 0; i < m; ++i) {
            std::vector<int> tokens(T), targets(T);
            for (int64_t k = 0; k < T; ++k) {
                tokens[k] = int((i + k * k) % config.vocab);
                targets[k] = int((i + 3 * k + 1) % config.vocab);
            }
            const SortedTokens sorted = sort_tokens(tokens);
            Microbatch mb;
            mb.s = config.sequence;
            mb.b = b;
            mb.iteration = 1;
            mb.first_sample = b * i;
            mb.training = training;
            mb.loss_scale = 1.0f / float(m * T);
            mb.inputs = upload(tokens);
            mb.targets = upload(targets);
            mb.distinct = upload(sorted.distinct);
            mb.starts = upload(sorted.starts);
            mb.positions = upload(sorted.positions);
            mb.distinct_count = int(sorted.distinct.size());
            microbatches.push_back(mb);
        }
    }
    PipelineCallbacks callbacks() const {
        PipelineCallbacks these;
        these.microbatch = [this](int i) { return microbatches[i]; };
        return these;
    }
};

// The whole model's gradients without a pipeline, by parameter, and last the output layer's share of the embedding's.
std::vector<std::vector<float>> serial_gradients(TestDevice& device, Gpt& gpt, const Batch& batch) {
    Carver measure;
    carve_slot(measure, gpt.shape, gpt.config.layers, 0);
    DeviceBuffer<char> memory(measure.used);
    Carver carver{memory.data};
    const Slot slot = carve_slot(carver, gpt.shape, gpt.config.layers, 0);
    DeviceBuffer<real> x(gpt.shape.rows() * gpt.shape.h);
    for (const Microbatch& mb : batch.microbatches) {
        embedding_forward(gpt, mb, x.data);
        chunk_forward(gpt, gpt.chunks[0], mb, slot, x.data, [](size_t, const real*) {});
        head_forward_backward(gpt, mb, slot.outputs.back());
        chunk_backward(gpt, gpt.chunks[0], mb, slot, x.data, slot.outputs.back(), 0, [](int) {});
        embedding_backward(gpt, mb, slot.outputs.back());
    }
    std::vector<std::vector<float>> all;
    for (const Parameter& parameter : gpt.parameters)
        all.push_back(to_vector(device.device, gpt.gradients.data + parameter.offset, parameter.local_size()));
    all.push_back(device.floats(gpt.tied_gradient));
    return all;
}

}  // namespace

TEST_CASE("the k-th forward and backward of a rank go through the chunks in groups of p microbatches [lab 3.1]") {
    for (int p = 1; p <= 8; ++p)
        for (int v = 1; v <= 4; ++v)
            for (bool forward : {true, false}) {
                CAPTURE(p);
                CAPTURE(v);
                CAPTURE(forward);
                const int groups = v == 1 ? 5 : 3;
                std::vector<float> ours;
                std::vector<double> expected, forward_order, one_by_one;
                auto add = [](std::vector<double>& list, int microbatch, int chunk) {
                    list.push_back(microbatch);
                    list.push_back(chunk);
                };
                for (int group = 0; group < groups; ++group)
                    for (int c = 0; c < v; ++c)
                        for (int i = 0; i < p; ++i) {
                            add(expected, group * p + i, forward ? c : v - 1 - c);
                            add(forward_order, group * p + i, c);
                        }
                for (int microbatch = 0; microbatch < groups * p; ++microbatch)
                    for (int c = 0; c < v; ++c) add(one_by_one, microbatch, forward ? c : v - 1 - c);
                bool directions = true;
                for (int k = 0; k < groups * p * v; ++k) {
                    const Op op = kth_op(forward, k, p, v);
                    directions &= op.forward == forward;
                    ours.push_back(float(op.microbatch));
                    ours.push_back(float(op.chunk));
                }
                REQUIRE_MESSAGE(directions, "hint: the operation's `forward` is not the one asked for");
                REQUIRE_MESSAGE(
                    std::equal(ours.begin(), ours.end(), expected.begin()),
                    hint(ours, "microbatches do not go in groups of p through the chunks (Figure 4, below)",
                         {{"backwards go through the chunks from the last to the first", forward_order},
                          {"a microbatch goes through all chunks before the next one starts: they go in groups of p",
                           one_by_one}}));
            }
}

TEST_CASE("1F1B and interleaved 1F1B are the paper's Figure 4 [lab 3.2]") {
    struct Row {
        ScheduleKind kind;
        int rank, v, m;
        std::string list;
    };
    const std::vector<Row> rows = {
        {ScheduleKind::gpipe, 2, 1, 3, "F1 F2 F3 B1 B2 B3"},
        {ScheduleKind::one_f_one_b, 3, 1, 8, "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"},
        {ScheduleKind::one_f_one_b, 0, 1, 8, "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8"},
        {ScheduleKind::one_f_one_b, 0, 1, 2, "F1 F2 B1 B2"},
        {ScheduleKind::interleaved, 3, 2, 8,
         "F1a F2a F3a F4a F1b B1b F2b B2b F3b B3b F4b B4b F5a B1a F6a B2a F7a B3a F8a B4a F5b B5b F6b B6b F7b B7b F8b "
         "B8b B5a B6a B7a B8a"},
        {ScheduleKind::interleaved, 0, 2, 4, "F1a F2a F3a F4a F1b F2b F3b F4b B1b B2b B3b B4b B1a B2a B3a B4a"},
    };
    for (const Row& row : rows) {
        CAPTURE(row.rank);
        CAPTURE(row.v);
        CAPTURE(row.m);
        const std::vector<Op> ops = schedule_ops(row.kind, 4, row.rank, row.v, row.m), expected = ops_of(row.list);
        const int more = warm_up(ops) - warm_up(expected);
        std::string otherwise = "hint: a rank's list is not Figure 4's";
        if (more != 0)
            otherwise = "hint: the schedule is off: a rank does " + std::to_string(std::abs(more)) + " forwards " +
                        (more > 0 ? "more" : "less") + " before its first backward than Figure 4's";
        else if (ops.size() < expected.size())
            otherwise = "hint: a rank's list ends early: the backwards that are left are missing";
        REQUIRE_MESSAGE(text_of(ops, row.v) == row.list, otherwise);
    }
    for (int p = 1; p <= 6; ++p)
        for (int v = 1; v <= 3; ++v)
            for (int m = p; m <= 3 * p; m += p)
                check_complete(make_schedule(v > 1 ? ScheduleKind::interleaved : ScheduleKind::one_f_one_b, p, v, m));
}

namespace {

// This rank's gradients after a run equal those without a pipeline, to the bit.
void check_pipelined(TestDevice& device, Gpt& gpt, const std::vector<std::vector<float>>& serial) {
    for (const Parameter& parameter : gpt.parameters) {
        const auto ours = to_vector(device.device, gpt.gradients.data + parameter.offset, parameter.local_size());
        const auto& expected = parameter.tied_copy ? serial.back() : serial[parameter.index];
        const bool embedding = gpt.p_rank == 0 && parameter.index < kEmbeddingParameters;
        const bool untouched = std::count(ours.begin(), ours.end(), 0.0f) == int64_t(ours.size());
        const std::string name = parameter.name;
        std::string why = "hint: the gradient of " + name +
                          " is not the one without a pipeline: dx begins as the output's gradient, from the head or "
                          "from the exchange, and each chunk keeps its own input and slot";
        if (untouched) why = "hint: " + name + " gets no gradient: is every layer's backward run?";
        if (untouched && embedding) why = "hint: before layer 0 the embedding's backward is missing";
        REQUIRE_MESSAGE(ours == expected, why);
    }
    if (gpt.p == 1) REQUIRE(device.floats(gpt.tied_gradient) == serial.back());
}

}  // namespace

TEST_CASE("the executor's backwards leave the gradients that a model without a pipeline gets [lab 3.3]") {
    for (int p : {1, 2}) check_worker(p, "worker: backwards", 20);
}
TEST_CASE("worker: backwards" * doctest::skip()) {
    const int p = world_size();
    const auto grid = make_grid(1, 1, p);
    TestDevice device;
    const GptConfig config = batch_model();
    Group alone;
    Gpt whole(device.device, alone, config, 2);
    const Batch batch(device, config, 4, true);
    const auto serial = serial_gradients(device, whole, batch);
    std::vector<Schedule> schedules;
    if (p == 1)
        schedules = {written_schedule(1, 1, 4, {"F1 B1 F2 B2 F3 B3 F4 B4"}),
                     written_schedule(1, 1, 4, {"F1 F2 F3 F4 B1 B2 B3 B4"})};
    else
        schedules = {written_schedule(2, 1, 4, {"F1 F2 F3 F4 B1 B2 B3 B4", "F1 F2 F3 F4 B1 B2 B3 B4"}),
                     written_schedule(2, 1, 4, {"F1 F2 B1 F3 B2 F4 B3 B4", "F1 B1 F2 B2 F3 B3 F4 B4"}),
                     written_schedule(2, 2, 4,
                                      {"F1a F2a F1b F2b F3a B1b F4a B2b F3b B1a F4b B2a B3b B4b B3a B4a",
                                       "F1a F2a F1b B1b F2b B2b F3a B1a F4a B2a F3b B3b F4b B4b B3a B4a"})};
    for (const Schedule& schedule : schedules) {
        const std::string list = text_of(schedule.ranks[grid->p_rank], schedule.v);
        CAPTURE(list);
        const Program program = compile(schedule);
        Gpt gpt(device.device, grid->tensor, config, 2, p, grid->p_rank, schedule.v);
        PipelineExecutor executor(gpt, *grid, {}, {{&schedule, &program}});
        PipelineCallbacks callbacks = batch.callbacks();
        std::vector<std::pair<int, int>> complete, expected;
        callbacks.gradient_ready = [&](int chunk, int layer) { complete.push_back({chunk, layer}); };
        for (int chunk = schedule.v - 1; chunk >= 0; --chunk)
            for (int layer = int(gpt.chunks[chunk].layers.size()) - 1; layer >= 0; --layer)
                expected.push_back({chunk, layer});
        for (int iteration = 0; iteration < 2; ++iteration) {
            complete.clear();
            for (DeviceBuffer<float>* buffer : {&gpt.gradients, &gpt.tied_gradient})
                if (buffer->size > 0) CUDA_CHECK(cudaMemset(buffer->data, 0, buffer->size * sizeof(float)));
            std::string what;
            try {
                executor.run(schedule, program, callbacks, true);
            } catch (const std::out_of_range&) {
                what =
                    "hint: an operation does not find what another was to leave: what is sent stands in "
                    "state.leaving, what was kept under the forward's key";
            } catch (const std::logic_error&) {
                what =
                    "hint: the buffers run out: a backward gives back the slot, the input and the gradient it is "
                    "done with";
            }
            REQUIRE_MESSAGE(what.empty(), what);
            check_pipelined(device, gpt, serial);
            REQUIRE_MESSAGE(complete == expected,
                            "hint: gradient_ready is to be called once for each layer, with the last microbatch");
            REQUIRE_MESSAGE(executor.slots_in_use == 0, "hint: a backward does not release its forward's slot");
        }
    }
}

TEST_CASE("scatter/gather changes what is sent, not what arrives [lab 3.4]") {
    check_worker(6, "worker: scatter/gather", 20);
}
TEST_CASE("worker: scatter/gather" * doctest::skip()) {
    const auto grid = make_grid(3, 1, 2);
    TestDevice device;
    const GptConfig config = batch_model();
    const Batch batch(device, config, 3, false);
    const Schedule schedule = written_schedule(2, 1, 3, {"F1 F2 F3", "F1 F2 F3"});
    const Program program = compile(schedule);
    Gpt gpt(device.device, grid->tensor, config, 2, 2, grid->p_rank);
    double sent[2] = {};
    std::vector<float> losses[2];
    for (bool scatter_gather : {true, false}) {
        PipelineOptions options;
        options.scatter_gather = scatter_gather;
        PipelineExecutor executor(gpt, *grid, options, {{&schedule, &program}});
        const double before = grid->pipeline.bytes();
        executor.run(schedule, program, batch.callbacks(), false);
        sent[scatter_gather] = grid->pipeline.bytes() - before;
        if (grid->last_stage()) losses[scatter_gather] = device.floats(executor.losses);
    }
    CHECK_MESSAGE(losses[true] == losses[false],
                  "hint: the message that arrives is not the one that left: rank i sends the i-th part, it arrives in "
                  "the same place, and gather brings all t together");
    CHECK_MESSAGE(sent[true] * grid->t == sent[false], "hint: a rank sends other than 1/t of the message");
}

TEST_CASE("recomputation gives the same gradients to the bit [lab 3.5]") {
    TestDevice device;
    const GptConfig config = batch_model();
    Group alone;
    Grid grid;
    const Batch batch(device, config, 1, true);
    const Microbatch& mb = batch.microbatches[0];
    const Schedule schedule = written_schedule(1, 1, 1, {"F1 B1"});
    const Program program = compile(schedule);
    // Backwards with blocks of `block` layers in a slot made for blocks of `kept`
    auto gradients = [&](int64_t kept, int64_t block) {
        Gpt gpt(device.device, alone, config, 2);
        PipelineOptions options;
        options.recompute_layers = kept;
        PipelineExecutor executor(gpt, grid, options, {{&schedule, &program}});
        const Slot& slot = executor.slots.begin()->second;
        const auto x = device.random(gpt.shape.rows() * gpt.shape.h, 1);
        auto dx = device.random(gpt.shape.rows() * gpt.shape.h, 2);
        chunk_forward(gpt, gpt.chunks[0], mb, slot, x.data, [](size_t, const real*) {});
        chunk_backward(gpt, gpt.chunks[0], mb, slot, x.data, dx.data, block, [](int) {});
        std::vector<float> all = device.floats(gpt.gradients), input = device.floats(dx);
        all.insert(all.end(), input.begin(), input.end());
        return all;
    };
    const std::vector<float> expected = gradients(0, 0);
    for (int64_t block = 1; block <= config.layers; ++block) {
        CAPTURE(block);
        const std::vector<float> ours = gradients(block, block), stale = gradients(block, 0);
        REQUIRE_MESSAGE(
            ours == expected,
            hint(
                ours,
                "the gradients are not those without recomputation: the block that ends with layer i begins with layer "
                "i / block * block, whose input is kept; each layer's output is the next one's input",
                {{"a block's backward uses the activations of whatever block was computed last: compute it again first",
                  std::vector<double>(stale.begin(), stale.end())}}));
    }
}

TEST_CASE("a list that waits for itself is noticed") {
    Schedule schedule = make_schedule(ScheduleKind::one_f_one_b, 2, 1, 2);
    std::swap(schedule.ranks[1][0], schedule.ranks[1][1]);  // backward before forward
    CHECK_THROWS_AS(compile(schedule), std::logic_error);
}

TEST_CASE("messages issued inline, one by one, deadlock when they block: the replay sees it") {
    // Every rank's exchanges in the order of its own list instead of the common order of ticks
    const Schedule schedule = make_schedule(ScheduleKind::one_f_one_b, 4, 1, 8);
    Program program = compile(schedule);
    for (auto& steps : program.ranks) {
        std::vector<Step> exchanges;
        for (const Step& step : steps)
            if (!step.is_op) exchanges.push_back(step);
        std::reverse(exchanges.begin(), exchanges.end());
        size_t next = 0;
        if (&steps == &program.ranks[1])
            for (Step& step : steps)
                if (!step.is_op) step.exchange = exchanges[next++].exchange;
    }
    CHECK(replay(schedule, program, uniform_cost(1, 2)).deadlock != "");
}

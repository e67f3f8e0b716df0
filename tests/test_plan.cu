// plan.cu's performance model: against the paper's own measurements and formulas, and the program's answers and
// refusals. (Pictures of schedules: tests/test_train.cu.)
#define main plan_main  // this program's main is the harness's
#include "plan.cu"
#undef main

#include "tests/program.h"

namespace {

Job job_of(int64_t l, int64_t h, int64_t a, int64_t B) {
    Job job;
    job.l = l;
    job.h = h;
    job.a = a;
    job.B = B;
    return job;
}

RunResult run_plan(const Words& flags) { return run_command(Words{program("plan")} + flags); }

}  // namespace

TEST_CASE("the paper's 46 points: median error at most 4%, largest at most 15%") {
    const Hardware hw = read_hardware("a100");
    std::vector<double> errors;
    for (const PaperPoint& point : paper_points()) {
        const double error = paper_error(point, point.predicted(hw));
        CHECK_MESSAGE(std::abs(error) <= 0.15, point.name());
        errors.push_back(std::abs(error));
    }
    REQUIRE(errors.size() == 46);
    std::sort(errors.begin(), errors.end());
    CHECK(errors[23] <= 0.04);
    PaperPoint point = paper_points()[0];
    CHECK(paper_error(point, point.measured + 0.4) == 0);  // inside of what was rounded
    CHECK(paper_error(point, 2 * (point.measured + 0.5)) == doctest::Approx(1));
    CHECK(paper_error(point, 0.5 * (point.measured - 0.5)) == doctest::Approx(-0.5));
}

TEST_CASE("eq. 2 gives Table 1's parameters; eq. 4's days") {
    const std::vector<double> billions = {1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0};
    const std::vector<PaperPoint> points = paper_points();
    for (size_t i = 0; i < billions.size(); ++i)
        CHECK(std::abs(points[i].job.parameters() / 1e9 - billions[i]) <= 0.06);
    // 8 T P / (n X) leaves out s/(6h) and V/(16 l h): 175B, 300B tokens, 1024 GPUs at 140 TFLOP/s take 34 days
    const Job job = job_of(96, 12288, 96, 1536);
    Prediction at_140;
    at_140.seconds = job.flops() / (1024 * 140e12);
    CHECK(days_to_train(job, at_140, 300e9) == doctest::Approx(34).epsilon(0.05));
}

TEST_CASE("replayed pipelines: the formulas' bubbles, and what is not replayed") {
    Hardware hw = read_hardware("a100");
    hw.exchange = 0;
    hw.network_link = hw.device_link = 1e30;
    Job job = job_of(48, 4096, 32, 512);
    job.V = 1;  // no output layer to speak of
    for (int64_t p : {2, 4, 8})
        for (int64_t v : {1, 2, 3}) {
            const Layout x{p, 8, 1, v, 1};
            for (int64_t m : {p, 2 * p, 3 * p, 8 * p, 16 * p}) {
                CAPTURE(p);
                CAPTURE(v);
                CAPTURE(m);
                double bubble = 0;
                const double seconds = replayed_seconds(job, x, hw, int(m), &bubble);
                // The output layer with V = 1 adds a little to the last rank
                CHECK(bubble == doctest::Approx(bubble_formula(int(p), int(v), int(m))).epsilon(0.01));
                // The whole table, replayed without any shortcut
                const Pair layer = layer_time(hw, job, x), head = head_time(hw, job, x);
                const double layers = 48.0 / double(p * v);
                const Schedule schedule = make_schedule(v > 1 ? ScheduleKind::interleaved : ScheduleKind::one_f_one_b,
                                                        int(p), int(v), int(m));
                double end = 0;
                for (const auto& rank : timeline(schedule, [&](int r, const Op&op) {
                         const bool last = r == p - 1 && op.chunk == v - 1;
                         return op.forward ? layers * layer.forward + (last ? head.forward : 0)
                                           : layers * (layer.backward + layer.forward) + (last ? head.backward : 0);
                     }))
                    end = std::max(end, rank.back().end);
                CHECK(seconds == doctest::Approx(end).epsilon(1e-9));
            }
        }
}

namespace {

// Within the rounding of a few operations in double; a difference is told in a student's words.
void check_formula(double ours, double expected, const std::string& otherwise, const std::vector<Mistake>& mistakes) {
    CAPTURE(ours);
    CAPTURE(expected);
    REQUIRE_MESSAGE(std::abs(ours - expected) <= 1e-12 * std::abs(expected), hint({float(ours)}, otherwise, mistakes));
}

// Two nodes or more of 8 devices: 40 bytes a second within a node, 5 a link between nodes, where a round takes 3 s.
Hardware toy_cluster() {
    Hardware hw;
    hw.word = 2;
    hw.devices_per_node = 8;
    hw.device_link = 80;
    hw.device_link_share = 0.5;
    hw.network_link = 20;
    hw.network_share = 0.25;
    hw.exchange = 3;
    return hw;
}

}  // namespace

TEST_CASE("eq. 3 counts the matrix products' FLOPs [lab 5.1]") {
    for (const PaperPoint& point : paper_points())
        for (bool recompute : {true, false}) {
            const Job& job = point.job;
            const double B = double(job.B), s = double(job.s), h = double(job.h), l = double(job.l), V = double(job.V);
            const double linear = 2 * B * s * (3 * h * h + h * h + 4 * h * h + 4 * h * h),
                         attention = 2 * 2 * B * s * s * h;
            const double layer = linear + attention, head = 2 * B * s * h * V;
            check_formula(
                iteration_flops(job.config(), job.B, recompute), (recompute ? 4 : 3) * l * layer + 3 * head,
                "the FLOPs are not those of the matrix products: l layers of 24 B s h^2 + 4 B s^2 h, an output "
                "layer of 2 B s h V, and backward twice the forward",
                {{recompute ? "recomputation runs the layers' forward once more: 4 times, not 3"
                            : "nothing is recomputed here: the layers' forward is counted once",
                  {(recompute ? 3 : 4) * l * layer + 3 * head}},
                 {"the output layer is not recomputed: three times its forward",
                  {(recompute ? 4 : 3) * (l * layer + head)}},
                 {"only the forward is counted; the backward is twice that", {l * layer + head}},
                 {"a multiplication with its addition is two operations",
                  {((recompute ? 4 : 3) * l * layer + 3 * head) / 2}},
                 {"the attention's products of s x s scores are missing",
                  {(recompute ? 4 : 3) * l * linear + 3 * head}}});
        }
}

TEST_CASE("the bubble's formula is what the schedules give when replayed [lab 5.2]") {
    for (int p = 1; p <= 6; ++p)
        for (int v = 1; v <= (p > 1 ? 3 : 1); ++v)
            for (int m = p; m <= 4 * p; m += p) {
                CAPTURE(p);
                CAPTURE(v);
                CAPTURE(m);
                const Schedule schedule =
                    make_schedule(v > 1 ? ScheduleKind::interleaved : ScheduleKind::one_f_one_b, p, v, m);
                const double replayed = bubble_of(schedule, replay(schedule, compile(schedule), uniform_cost(1, 2)));
                const double bubble = double(p - 1), total = double(v * m);
                check_formula(bubble_formula(p, v, m), replayed, "the bubble is not (idle time) / (ideal time)",
                              {{"v chunks per rank make the bubble v times smaller", {bubble / m}},
                               {"the bubble is relative to the ideal time, m v, not to the whole with the bubble in it",
                                {bubble / (total + bubble)}},
                               {"p ranks fill and drain in p - 1 steps, not p", {double(p) / total}}});
            }
}

TEST_CASE("the activations in flight are what the schedules hold when replayed [lab 5.3]") {
    for (ScheduleKind kind : {ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::interleaved})
        for (int p = 2; p <= 6; ++p)
            for (int m = p; m <= 3 * p; m += p) {
                const int v = kind == ScheduleKind::interleaved ? 3 : 1;
                const Schedule schedule = make_schedule(kind, p, v, m);
                const Replay replayed = replay(schedule, compile(schedule), uniform_cost(1, 2));
                for (int rank = 0; rank < p; ++rank) {
                    CAPTURE(p);
                    CAPTURE(rank);
                    CAPTURE(v);
                    CAPTURE(m);
                    const int held = replayed.in_flight[rank];
                    const std::string name = kind == ScheduleKind::gpipe         ? "GPipe"
                                             : kind == ScheduleKind::one_f_one_b ? "1F1B"
                                                                                 : "interleaved 1F1B";
                    check_formula(
                        in_flight_formula(kind, p, rank, v, m), held,
                        name + " holds what its warm-up has forwarded and one more, of the m v there are",
                        {{name + " holds one more than its warm-up: in the steady state a forward comes before "
                                 "its backward",
                          {double(held - 1)}},
                         {name + " holds all m only if it is GPipe; 1F1B's point is that it does not", {double(m)}},
                         {"every rank but the first holds less: the warm-up gets shorter towards the end",
                          {double(replayed.in_flight[0])}}});
                }
            }
}

TEST_CASE("a ring's time is its bytes over its slowest edge [lab 5.4]") {
    const Hardware hw = toy_cluster();
    check_formula(ring_time(hw, 1200, 1, 1, 2), 0, "one rank sends nothing", {});
    // An all-reduce of 1200 bytes over 4 devices of a node: 2 * 3/4 * 1200 / 40
    check_formula(ring_time(hw, 1200, 4, 4, 2), 45, "within a node a ring runs at device_link device_link_share",
                  {{"each edge carries (n-1)/n of the bytes", {60}},
                   {"within a node nothing waits for the network", {51}},
                   {"the device link's rate is to be times device_link_share", {22.5}}});
    check_formula(ring_time(hw, 1200, 4, 4, 1), 22.5, "an all-gather (factor 1) carries half of an all-reduce", {});
    // 2 * 15/16 * 1600 / (5 * 1) + 2 * 3; with 8 devices a node the network's 8 links do 40, as fast as a device's
    check_formula(ring_time(hw, 1600, 16, 1, 2), 606, "between nodes a ring runs at the network links' rate",
                  {{"between nodes each of `factor` rounds takes hw.exchange to begin", {600}},
                   {"the ring runs over the network, not the device link", {81}},
                   {"hw.exchange is to be counted `factor` times", {603}}});
    check_formula(ring_time(hw, 1600, 16, 4, 2), 156, "the ring has the network links of `per_node` devices",
                  {{"the ring has the network links of `per_node` devices, here 4", {606}}});
    check_formula(ring_time(hw, 1600, 128, 16, 1), 1600.0 * 127 / 128 / 40 + 3,
                  "the slowest edge decides: 16 network links are faster than a device's",
                  {{"the slowest edge decides: here the device link", {1600.0 * 127 / 128 / 80 + 3}}});
}

TEST_CASE("a message between stages, with scatter/gather and without [lab 5.5]") {
    const Hardware hw = toy_cluster();
    Job job = job_of(8, 40, 8, 64);
    job.s = 5;
    job.scatter_gather = true;  // s b h words of 2 bytes: 400 b bytes
    check_formula(message_time(hw, job, {1, 8, 4, 1, 1}), 0, "without a pipeline there is no message", {});
    check_formula(message_time(hw, job, {2, 2, 2, 1, 1}), 10, "within one node a message goes over the device link",
                  {{"all of p t d = 8 devices are in one node here: nothing goes over the network", {83}}});
    check_formula(message_time(hw, job, {8, 1, 1, 1, 3}), 30, "a message is of b samples",
                  {{"a message is of b samples", {10}}});
    check_formula(message_time(hw, job, {16, 1, 1, 1, 1}), 83, "between nodes: bytes over the network, and hw.exchange",
                  {{"a message between nodes takes hw.exchange to begin", {80}}});
    job.scatter_gather = false;
    check_formula(message_time(hw, job, {2, 8, 1, 1, 1}), 83,
                  "without scatter/gather each rank sends the whole message",
                  {{"without scatter/gather each rank sends the whole message, not a t-th", {13}}});
    job.scatter_gather = true;
    // 400 / 8 / 5 + 3, then 7/8 * 400 / 40
    check_formula(message_time(hw, job, {2, 8, 1, 1, 1}), 21.75,
                  "with scatter/gather: a t-th over the network, then the "
                  "all-gather within the tensor group",
                  {{"scatter/gather costs an all-gather within the tensor group", {13}},
                   {"with scatter/gather each rank sends a t-th of the message", {91.75}},
                   {"the all-gather carries (t-1)/t of the message once (factor 1)", {30.5}}});
}

TEST_CASE("takeaway 1: of all (t, p) with t p = 64, tensor parallelism within a node is fastest") {
    const Hardware hw = read_hardware("a100");
    for (int64_t B : {32, 128}) {
        const Job job = job_of(64, 20480, 128, B);
        int64_t best = 0;
        double least = 1e300;
        for (int64_t t = 1; t <= 64; t *= 2) {
            const double seconds = predict(job, {64 / t, t, 1, 1, 1}, hw).seconds;
            if (seconds < least) {
                least = seconds;
                best = t;
            }
        }
        CHECK(best == 8);
    }
}

TEST_CASE("takeaway 2: data parallelism is faster than more model parallelism than the model needs") {
    const Hardware hw = read_hardware("a100");
    const Job job = job_of(32, 3840, 32, 512);  // 5.9 B parameters
    // Against the same with a larger pipeline, and with larger tensor groups than a node
    double before = 0;
    for (int64_t p : {1, 2, 4, 8, 16, 32}) {
        const double rate = predict(job, {p, 2, 32 / p, 1, 1}, hw).flops_per_device;
        if (before > 0) CHECK(rate < before);
        before = rate;
    }
    for (const Prediction& x : search(job, 64, hw, 3)) CHECK(x.layout.p * x.layout.t <= 8);
}

TEST_CASE("takeaway 3: the best microbatch size depends on model, p, d and B") {
    const Hardware hw = read_hardware("a100");
    auto best = [&](const Job& job, int64_t p, int64_t t, int64_t d) {
        int64_t best_b = 0;
        double least = 1e300;
        for (int64_t b : {1, 2, 4, 8, 16}) {
            if (!why_not(job, {p, t, d, 1, b}).empty()) continue;
            const double seconds = predict(job, {p, t, d, 1, b}, hw).seconds;
            if (seconds < least) {
                least = seconds;
                best_b = b;
            }
        }
        return best_b;
    };
    // A deep pipeline with few samples wants small microbatches, no pipeline large ones
    CHECK(best(job_of(32, 15360, 128, 32), 8, 8, 1) < best(job_of(4, 4096, 128, 32), 1, 1, 1));
    CHECK(best(job_of(32, 15360, 128, 32), 8, 8, 1) < best(job_of(32, 15360, 128, 2048), 8, 8, 1));
}

TEST_CASE("what does not fit is never proposed; an explicit layout that does not fit says so") {
    Hardware hw = read_hardware("a100");
    for (double gigabytes : {20.0, 40.0, 80.0}) {
        hw.memory = 1e9 * gigabytes;
        for (const Prediction& x : search(job_of(48, 8192, 64, 1536), 512, hw, 20)) {
            CHECK(x.fits);
            CHECK(x.memory <= hw.memory);
            CHECK(x.layout.devices() == 512);
            CHECK(why_not(job_of(48, 8192, 64, 1536), x.layout).empty());
        }
    }
    const Words model = {"--num-layers",          "96", "--hidden-size",       "12288",
                         "--num-attention-heads", "96", "--global-batch-size", "64"};
    const RunResult large =
        run_plan(model + Words{"--tp", "8", "--pp", "1", "--dp", "8", "--vp", "1", "--micro-batch-size", "1"});
    CHECK(large.status == 0);
    CHECK(contains(large.output, "WARNING: does not fit"));
    const RunResult none = run_plan(model + Words{"--gpus", "8"});
    CHECK(none.status == 2);
    CHECK(contains(none.output, "fits in 80 GB"));
}

TEST_CASE("plan answers: a search, one layout, JSON, and what flags change") {
    const Words model = {"--num-layers",          "96", "--hidden-size",       "12288",
                         "--num-attention-heads", "96", "--global-batch-size", "1536"};
    const RunResult found = run_plan(model + Words{"--gpus", "1024", "--train-tokens", "300e9", "--json"});
    REQUIRE_MESSAGE(found.status == 0, found.output);
    const json list = json::parse(found.output);
    REQUIRE(list.size() == 5);
    for (size_t i = 0; i < list.size(); ++i) {
        const json& x = list[i];
        CHECK(x["gpus"] == 1024);
        CHECK(x["memory_gb"] <= 80);
        CHECK(x["days"] > 20);
        CHECK(x["days"] < 40);
        CHECK(contains(x["reason"], "takeaway"));
        CHECK(contains(x["command"], "mpirun -np 1024 ./train"));
        if (i > 0) CHECK(x["iteration_seconds"] >= list[i - 1]["iteration_seconds"]);
    }
    // The best one, asked for by itself
    const json& best = list[0];
    auto number = [&](const char* name) { return best[name].dump(); };
    const Words layout =
        model + Words{"--tp",      number("t"),          "--pp",      number("p"), "--dp", number("d"), "--vp",
                      number("v"), "--micro-batch-size", number("b"), "--json"};
    auto seconds = [&](const Words& more) {
        const RunResult result = run_plan(layout + more);
        REQUIRE_MESSAGE(result.status == 0, result.output);
        return json::parse(result.output)["iteration_seconds"].get<double>();
    };
    const double plain = seconds({});
    CHECK(plain == doctest::Approx(best["iteration_seconds"].get<double>()));
    CHECK(seconds({"--no-fusion"}) > 1.05 * plain);
    CHECK(seconds({"--no-scatter-gather-tensors-in-pipeline"}) > plain);
    CHECK(seconds({"--recompute-granularity", "none"}) < 0.9 * plain);
    CHECK(seconds({"--hardware", "h100"}) < plain);
    TempDir dir;
    const RunResult paper = run_plan({"--paper", "--svg", dir.path.string()});
    CHECK(paper.status == 0);
    CHECK(contains(paper.output, "46 points"));
    CHECK(contains(paper.output, "Figure 17, not recomputing, B = 8 "));
    size_t dots = 0;
    for (const char* name : {"Table-1", "Figure-7", "Figure-11", "Figure-12", "Figure-17"}) {
        const std::string svg = read_file(dir.file(std::string(name) + ".svg"));
        CHECK(contains(svg, "</svg>"));
        for (size_t at = 0; (at = svg.find("<circle", at)) != std::string::npos; ++at) ++dots;
    }
    CHECK(dots == 46);
    CHECK(run_plan({"--paper", "--svg", dir.file("no/where")}).status == 2);
}

TEST_CASE("--this-machine measures as many ranks as the layout has, and predicts it") {
    const Words model = {
        "--num-layers", "2",   "--hidden-size",       "64", "--num-attention-heads",   "4",   "--seq-length", "64",
        "--vocab-size", "256", "--global-batch-size", "4",  "--recompute-granularity", "none"};
    auto layout = [](const char* t, const char* p, const char* d) {
        return Words{"--this-machine", "--tp", t, "--pp", p, "--dp", d, "--vp", "1", "--micro-batch-size", "1"};
    };
    const Words environment = {"OMP_NUM_THREADS=1"};
    for (const auto& [ranks, flags] : std::vector<std::pair<int, Words>>{{1, layout("1", "1", "1")},
                                                                         {2, layout("2", "1", "1")},
                                                                         {2, layout("1", "2", "1")},
                                                                         {2, layout("1", "1", "2")}}) {
        const RunResult result = mpirun(ranks, Words{program("plan"), "--json"} + flags + model, 60, environment);
        REQUIRE_MESSAGE(result.status == 0, result.output);
        const json x = json::parse(result.output);
        CHECK(x["gpus"] == ranks);
        CHECK(x["iteration_seconds"] > 1e-5);
        CHECK(x["iteration_seconds"] < 60);
        CHECK((x["data_parallel_seconds"] > 0) == (x["d"] == 2 || x["p"] == 2));  // tied embeddings count there
        CHECK((x["bubble"] > 0) == (x["p"] == 2));
    }
    const RunResult few = mpirun(1, Words{program("plan")} + layout("2", "1", "1") + model, 60, environment);
    CHECK(few.status == 2);
    CHECK(contains(few.output, "mpirun -np 2"));
    const RunResult none = mpirun(2, Words{program("plan"), "--this-machine"} + model, 60, environment);
    CHECK(none.status == 2);
    CHECK(contains(none.output, "--micro-batch-size too"));
}

TEST_CASE("plan refuses: sizes, layouts, hardware") {
    TempDir dir;
    const std::string good = read_file("examples/hardware/a100.json");
    REQUIRE(!good.empty());
    auto hardware = [&](const std::string& name, std::string text) {
        write_file(dir.file(name), text);
        return Words{"--paper", "--hardware", dir.file(name)};
    };
    auto replaced = [&](const std::string& from, const std::string& to) {
        std::string text = good;
        text.replace(text.find(from), from.size(), to);
        return text;
    };
    const Words layout = {"--tp", "8", "--pp", "4", "--dp", "2", "--vp", "1", "--micro-batch-size", "1"};
    const std::vector<std::pair<Words, Words>> mistakes = {
        {{"--gpus", "0"}, {"--gpus is 0"}},
        {{"--num-layers", "24"}, {"nothing to do"}},
        {{"--gpus", "-1"}, {"--gpus", "-1"}},
        {{"--gpus", "8", "--tp", "8"}, {"1 of the 5"}},
        {{"--gpus", "8", "--hidden-size", "100", "--num-attention-heads", "24"}, {"100", "24", "96 or 120"}},
        {{"--gpus", "8", "--train-tokens", "-1"}, {"--train-tokens"}},
        {{"--gpus", "8", "--recompute-granularity", "some"}, {"--recompute-granularity", "some"}},
        {layout + Words{"--num-layers", "5"}, {"--num-layers 5", "4"}},
        {layout + Words{"--global-batch-size", "7"}, {"--global-batch-size 7", "2"}},
        {layout + Words{"--gpus", "65"}, {"65", "64"}},
        {layout + Words{"--num-attention-heads", "12"}, {"12", "8"}},
        {{"--paper", "--hardware", "b200"}, {"--hardware b200"}},
        {{"--paper", "--hardware", dir.file("none.json")}, {"none.json"}},
        {hardware("empty", ""), {"not a JSON object"}},
        {hardware("list", "[1, 2]"), {"not a JSON object"}},
        {hardware("deep", std::string(60000, '[')), {"not a JSON object"}},
        {hardware("cut", good.substr(0, good.size() / 2)), {"not a JSON object"}},
        {hardware("huge", std::string(100000, ' ') + good), {"not a JSON object"}},
        {hardware("text", replaced("312", "\"fast\"")), {"peak_tflops", "not a number"}},
        {hardware("zero", replaced("2039", "0")), {"memory_gb_per_s", "is 0"}},
        {hardware("negative", replaced("130", "-130")), {"gemm_half_size", "-130"}},
        {hardware("infinite", replaced("312", "1e999")), {"infinite"}},
        {hardware("missing", replaced("exchange_ms", "exchange")), {"exchange_ms", "missing"}}};
    for (const auto& [flags, expected] : mistakes) {
        const RunResult result = run_plan(flags);
        CAPTURE(result.output);
        CHECK(result.status == 2);
        for (const std::string& part : expected) CHECK_MESSAGE(contains(result.output, part), part);
    }
}

// Mixed precision (§5): the bf16 and fp16 builds of the program and of the layout tests, run as their users run them.
#include "tests/program.h"

namespace {

const Words kPrecisions = {"bf16", "fp16"};

std::string build_of(const std::string& precision) {
    const char* build = std::getenv("BUILD");
    return std::string(build ? build : "build/cpu") + (precision == "fp32" ? "" : "-" + precision);
}

// ./train of a precision, with a log at dir/NAME.
RunResult run_train(const Run& run, const std::string& precision, int ranks, const Words& flags,
                    const std::string& log) {
    const Words argv = Words{build_of(precision) + "/train", "--log-file", run.dir.file(log)} + flags;
    return mpirun(ranks, argv, 120, {"OMP_NUM_THREADS=1"});
}

std::vector<double> losses(const Run& run, const std::string& log) {
    std::vector<double> list;
    for (const json& line : run.lines_of(log, "train")) list.push_back(line["loss"]);
    return list;
}

// How many cases a test program says have passed.
int passed_cases(const std::string& output) {
    const size_t at = output.find(" passed"), begin = output.rfind('|', at);
    return at == std::string::npos ? 0 : std::atoi(output.c_str() + begin + 1);
}

}  // namespace

TEST_CASE("bf16 and fp16: every kernel against double loops, as a CPU and as a GPU runs it") {
    for (const std::string& precision : kPrecisions)
        for (const char* program : {"/test_gpt", "/fibers/test_gpt"}) {
            CAPTURE(precision);
            CAPTURE(program);
            const RunResult result = run_command({build_of(precision) + program}, 300);
            CHECK_MESSAGE(result.status == 0, result.output);
            CHECK(passed_cases(result.output) >= 10);
        }
}

TEST_CASE("bf16 and fp16: the layout matrix, and overflow on any rank") {
    for (const std::string& precision : kPrecisions) {
        CAPTURE(precision);
        const RunResult result = run_command({build_of(precision) + "/test_layouts"}, 1500);
        CHECK_MESSAGE(result.status == 0, result.output);
        std::istringstream lines(result.output);
        for (std::string line; std::getline(lines, line);)
            if (line.find(" ranks: ") != std::string::npos) std::printf("%s, %s\n", precision.c_str(), line.c_str());
        CHECK(contains(result.output, precision == "fp16" ? "2 passed" : "1 passed"));
    }
}

TEST_CASE("bf16 and fp16: 200 iterations on real text, every loss within 1% of fp32's") {
    Run run;
    const RunResult book = run_command({"bible", "-f", "ge1:1-de34:12"});
    if (book.status != 0) {
        skip("there is no `bible` program here: loss curves of bf16 and fp16 were not compared with fp32's");
        return;
    }
    write_file(run.dir.file("book"), book.output);
    const Words flags = {"--num-layers",
                         "2",
                         "--hidden-size",
                         "64",
                         "--num-attention-heads",
                         "4",
                         "--seq-length",
                         "64",
                         "--micro-batch-size",
                         "4",
                         "--global-batch-size",
                         "16",
                         "--lr",
                         "1e-3",
                         "--train-iters",
                         "200",
                         "--eval-iters",
                         "0",
                         "--lr-warmup-iters",
                         "20",
                         "--data-path",
                         run.dir.file("book")};
    REQUIRE(run_train(run, "fp32", 1, flags, "fp32").status == 0);
    const std::vector<double> expected = losses(run, "fp32");
    REQUIRE(expected.size() == 200);
    CHECK(expected.back() < 0.6 * expected.front());
    struct Case {
        std::string precision;
        int ranks;
        Words layout;
    };
    for (const Case& c : std::vector<Case>{
             {"bf16", 1, {}},
             {"bf16", 4, {"--tp", "2", "--pp", "2"}},
             {"fp16", 1, {"--initial-loss-scale", "65536"}},
             {"fp16", 4, {"--tp", "2", "--initial-loss-scale", "65536", "--use-distributed-optimizer"}}}) {
        CAPTURE(c.precision);
        CAPTURE(c.ranks);
        const std::string log = c.precision + std::to_string(c.ranks);
        const RunResult result = run_train(run, c.precision, c.ranks, flags + c.layout, log);
        CHECK_MESSAGE(result.status == 0, result.output);
        const std::vector<double> actual = losses(run, log);
        REQUIRE(actual.size() == expected.size());
        double worst = 0;
        for (size_t i = 0; i < actual.size(); ++i)
            worst = std::max(worst, std::abs(actual[i] - expected[i]) / expected[i]);
        CHECK(worst < 0.01);
        CHECK(actual != expected);  // it did compute in another precision
        std::printf("%s, %d rank(s): losses within %.3f%% of fp32's over 200 iterations\n", c.precision.c_str(),
                    c.ranks, 100 * worst);
    }
}

TEST_CASE("fp16: the loss scale is found, logged, grows again, and a resumed run continues it") {
    Run run;
    const Words flags = kSmall + Words{"--data-path", run.dir.file("text"), "--loss-scale-window", "3"};
    const RunResult all = run_train(run, "fp16", 2, flags + Words{"--tp", "2", "--train-iters", "30"}, "all");
    REQUIRE_MESSAGE(all.status == 0, all.output);
    CHECK(contains(all.output, "step skipped, loss scale now 2147483648"));
    double expected = 4294967296.0;
    int good = 0, skipped = 0, doubled = 0;
    const std::vector<json> lines = run.lines_of("all", "train");
    REQUIRE(lines.size() == 30);
    for (const json& line : lines) {
        CAPTURE(line.dump());
        CHECK(line["loss_scale"] == expected);
        const bool overflow = line["skipped"];
        CHECK(overflow == line["grad_norm"].is_null());
        CHECK(line["loss"].is_number());
        skipped += overflow;
        good = overflow ? 0 : good + 1;
        if (overflow) expected /= 2;
        if (good == 3) {
            expected *= 2;
            good = 0;
            ++doubled;
        }
    }
    CHECK(skipped >= 5);
    CHECK(doubled >= 1);
    // Stopped while looking for the scale, and at another point while it grows
    for (const char* stop : {"4", "20"}) {
        CAPTURE(stop);
        const std::string saved = run.dir.file(std::string("saved") + stop), log = std::string("resumed") + stop;
        const Words decay = {"--tp", "2", "--lr-decay-iters", "30"};
        REQUIRE(run_train(run, "fp16", 2, flags + decay + Words{"--train-iters", stop, "--save", saved}, log).status ==
                0);
        REQUIRE(run_train(run, "fp16", 2, flags + decay + Words{"--train-iters", "30", "--load", saved}, log).status ==
                0);
        const std::vector<json> resumed = run.lines_of(log, "train");
        REQUIRE(resumed.size() == 30);
        for (size_t i = 0; i < resumed.size(); ++i)
            for (const char* name : {"iteration", "loss", "grad_norm", "loss_scale", "skipped", "lr"})
                CHECK(resumed[i][name] == lines[i][name]);
    }
    // Constant: the step is skipped and the scale stays
    REQUIRE(run_train(run, "fp16", 1,
                      kSmall + Words{"--data-path", run.dir.file("text"), "--train-iters", "3", "--loss-scale",
                                     "1099511627776"},
                      "constant")
                .status == 0);
    for (const json& line : run.lines_of("constant", "train")) {
        CHECK(line["loss_scale"] == 1099511627776.0);
        CHECK(line["skipped"] == true);
    }
}

TEST_CASE("a checkpoint holds fp32 master weights: every precision continues every other's") {
    Run run;
    const Words flags = kSmall + Words{"--data-path", run.dir.file("text"), "--lr-decay-iters", "20"};
    auto with = [](const std::string& precision) {
        return precision == "fp16" ? Words{"--initial-loss-scale", "1024"} : Words{};
    };
    const Words precisions = {"fp32", "bf16", "fp16"};
    for (const std::string& from : precisions) {
        const std::string saved = run.dir.file("from-" + from), log = "log-" + from;
        // Parts of the master weights are each on one replica only; --save puts them together
        const RunResult wrote = run_train(
            run, from, 2,
            flags + with(from) + Words{"--train-iters", "5", "--save", saved, "--use-distributed-optimizer"}, log);
        REQUIRE_MESSAGE(wrote.status == 0, wrote.output);
        for (const std::string& to : precisions) {
            CAPTURE(from);
            CAPTURE(to);
            const RunResult read = run_train(
                run, to, 2, flags + with(to) + Words{"--train-iters", "10", "--load", saved, "--tp", "2"}, log + to);
            CHECK_MESSAGE(read.status == 0, read.output);
            const std::vector<double> after = losses(run, log + to), same = losses(run, log + from);
            REQUIRE(after.size() == 5);
            for (size_t i = 0; i < after.size(); ++i)
                CHECK(std::abs(after[i] / losses(run, "log-" + from + "fp32")[i] - 1) < 0.01);
        }
    }
}

TEST_CASE("loss scaling flags: refused where they mean nothing, and out of range") {
    Run run;
    const Words flags = kSmall + Words{"--data-path", run.dir.file("text"), "--train-iters", "1"};
    const std::vector<std::pair<std::string, Words>> mistakes = {
        {"fp32", {"--loss-scale", "1024"}},         {"bf16", {"--loss-scale-window", "10"}},
        {"bf16", {"--initial-loss-scale", "1024"}}, {"fp16", {"--loss-scale", "1000"}},
        {"fp16", {"--loss-scale", "-1"}},           {"fp16", {"--initial-loss-scale", "0.5"}},
        {"fp16", {"--loss-scale-window", "0"}},     {"fp16", {"--loss-scale", "1024", "--loss-scale-window", "5"}}};
    for (const auto& [precision, more] : mistakes) {
        const RunResult result = run_train(run, precision, 1, flags + more, "log");
        CAPTURE(result.output);
        CHECK(result.status == 2);
        CHECK(contains(result.output, more[0]));
        CHECK(contains(result.output, more[1]) != (precision != "fp16"));
    }
}

// The program as its users meet it: ./train under mpirun, its messages, files and exit statuses.

#include "tests/bounds.h"
#include "tests/program.h"

TEST_CASE("a user's mistake gets one message, status 2, and nothing is written") {
    Run run;
    const std::string dir = run.dir.path.string();
    write_file(dir + "/empty", "");
    write_file(dir + "/short", "abc");
    write_file(dir + "/odd.bin", "abc");
    write_file(dir + "/tokens.bin", std::string(4000, '\1'));  // tokens are 257
    struct Mistake {
        int ranks;
        Words flags;
        Words expected;  // all in the message
    };
    const std::vector<Mistake> mistakes = {
        {1, {"--data-path", dir + "/missing"}, {"--data-path", "/missing", "No such file"}},
        {1, {"--data-path", dir + "/empty"}, {"--data-path", "empty"}},
        {1, {"--data-path", dir}, {"--data-path", "is a directory"}},
        {1, {"--data-path", dir + "/short"}, {"3 tokens", "--seq-length 16", "17"}},
        {1, {"--data-path", dir + "/odd.bin", "--vocab-size", "300"}, {"odd.bin", "3 bytes", "odd number"}},
        {1, {"--data-path", dir + "/tokens.bin"}, {"--vocab-size is required"}},
        {1, {"--data-path", dir + "/tokens.bin", "--vocab-size", "257"}, {"token 0 is 257", "--vocab-size 257"}},
        {1, {"--vocab-size", "20"}, {"not below --vocab-size 20"}},
        {1, {"--hidden-size", "30"}, {"--hidden-size 30", "--num-attention-heads 4", "1, 2, 3, 5"}},
        {1, {"--hidden-size", "0"}, {"--hidden-size is 0", "from 1"}},
        {1, {"--num-layers", "-3"}, {"--num-layers is -3"}},
        {1, {"--num-layers", "2.5"}, {"--num-layers", "2.5"}},
        {1, {"--seq-length", "99999999999"}, {"--seq-length", "1048576"}},
        {1, {"--seq-length", "1000000", "--hidden-size", "1000000"}, {"--seq-length 1000000", "memory"}},
        {1, {"--lr", "nan"}, {"--lr"}},
        {1, {"--lr", "-1"}, {"--lr is -1"}},
        {1, {"--min-lr", "1"}, {"--min-lr is 1", "0.0003"}},
        {1, {"--hidden-dropout", "1"}, {"--hidden-dropout is 1", "below 1"}},
        {1, {"--micro-batch-size", "3"}, {"--global-batch-size 8", "--micro-batch-size 3", "6 or 9"}},
        {1, {"--tp", "2"}, {"number of ranks, 1", "= 2", "start 2 ranks"}},
        {3, {"--tp", "2"}, {"number of ranks, 3", "start 2 or 4 ranks"}},
        {3, {"--tp", "3"}, {"--num-attention-heads 4", "--tensor-model-parallel-size 3", "1, 2, 4"}},
        {3, {"--pp", "3"}, {"--num-layers 4", "--pipeline-model-parallel-size 3", "1, 2, 4"}},
        {1, {"--pp", "8"}, {"--pipeline-model-parallel-size 8", "--num-layers 4"}},
        {2, {"--pp", "2", "--vp", "4"}, {"--num-layers 4", "--virtual-pipeline-size 4", "1, 2"}},
        {1, {"--vp", "2"}, {"--virtual-pipeline-size 2", "--pipeline-model-parallel-size is 1"}},
        {2, {"--pp", "2", "--vp", "2", "--global-batch-size", "7"}, {"microbatches, 7", "6 or 8"}},
        {2, {"--pp", "2", "--vp", "2", "--schedule", "gpipe"}, {"--schedule gpipe", "--virtual-pipeline-size is 2"}},
        {1, {"--schedule", "interleaved"}, {"--schedule interleaved", "--virtual-pipeline-size 2"}},
        {1, {"--schedule", "zigzag"}, {"zigzag", "gpipe, 1f1b, interleaved"}},
        {2, {"--pp", "2", "--num-layers-per-virtual-pipeline-stage", "3"}, {"--num-layers 4", "stage 3", "1, 2"}},
        {1, {"--recompute-granularity", "some"}, {"--recompute-granularity", "full"}},
        {1, {"--recompute-num-layers", "2"}, {"--recompute-num-layers 2", "--recompute-granularity full"}},
        {1,
         {"--recompute-granularity", "full", "--recompute-num-layers", "5"},
         {"--recompute-num-layers is 5", "to 4"}},
        {1, {"--split", "1,2"}, {"--split", "1,2"}},
        {1, {"--split", "0,1,1"}, {"--split", "0,1,1"}},
        {1, {"--trace-iterations", "2"}, {"--trace-iterations"}},
        {1, {"--lr-warmup-iters", "3"}, {"--lr-warmup-iters 3", "--lr-decay-iters 3"}},
        {1, {"--no-such-flag"}, {"--no-such-flag", "--help"}},
        {1, {"--config", dir + "/no.cfg"}, {"no.cfg"}},
        {1, {"--prompt", "\xff", "--vocab-size", "150"}, {"--prompt", "255", "150"}},
    };
    for (const Mistake& mistake : mistakes) {
        const Words outputs = {"--train-iters", "3",           "--log-file", dir + "/log",
                               "--dump",        dir + "/dump", "--trace",    dir + "/trace"};
        Words flags = kSmall + outputs;
        // What the mistake says again is said once: the first of two would be an error of its own
        for (size_t i = 0; i < mistake.flags.size(); ++i) {
            const auto found = std::find(flags.begin(), flags.end(), mistake.flags[i]);
            if (mistake.flags[i][0] == '-' && found != flags.end()) flags.erase(found, found + 2);
        }
        Words argv = {train_program()};
        const bool has_data =
            std::find(mistake.flags.begin(), mistake.flags.end(), "--data-path") != mistake.flags.end();
        if (!has_data) argv = argv + Words{"--data-path", dir + "/text"};
        argv = argv + flags + mistake.flags;
        const RunResult result = mistake.ranks == 1 ? run_command(argv) : mpirun(mistake.ranks, argv);
        std::string all;
        for (const std::string& word : mistake.flags) all += word + " ";
        CAPTURE(all);
        CAPTURE(result.output);
        CHECK(result.status == 2);
        for (const std::string& part : mistake.expected) CHECK_MESSAGE(contains(result.output, part), part);
        CHECK(std::count(result.output.begin(), result.output.end(), '\n') == 1);
        for (const char* name : {"/log", "/dump", "/trace"}) CHECK(!std::filesystem::exists(dir + name));
    }
}

TEST_CASE("what cannot be written is refused before training") {
    Run run;
    for (const char* flag : {"--log-file", "--trace", "--dump"}) {
        write_file(run.dir.file("file"), "");
        const RunResult result = run(1, kSmall + Words{"--train-iters", "3", flag, run.dir.file("file/below")});
        CAPTURE(result.output);
        CHECK(result.status == 2);
        CHECK(contains(result.output, flag));
    }
}

TEST_CASE("the log: a config line, a train line per iteration, evaluations") {
    Run run;
    const RunResult result = run(2, {"--num-layers",
                                     "2",
                                     "--hidden-size",
                                     "32",
                                     "--num-attention-heads",
                                     "4",
                                     "--seq-length",
                                     "16",
                                     "--micro-batch-size",
                                     "2",
                                     "--global-batch-size",
                                     "8",
                                     "--train-iters",
                                     "5",
                                     "--eval-interval",
                                     "2",
                                     "--eval-iters",
                                     "2",
                                     "--split",
                                     "8,2,0",
                                     "--log-file",
                                     run.dir.file("log"),
                                     "--lr-warmup-iters",
                                     "2"});
    REQUIRE_MESSAGE(result.status == 0, result.output);
    const std::vector<json> log = run.log("log");
    REQUIRE(log.size() == 1 + 5 + 4);  // evaluated at 0, 2, 4 and the end
    const json config = log[0];
    CHECK(config["type"] == "config");
    CHECK(config["data-parallel-size"] == 2);
    CHECK(config["num-microbatches"] == 2);
    CHECK(config["vocab-size"] == 256);
    CHECK(config["parameters"] == 2 * (12 * 32 * 32 + 13 * 32) + (256 + 16 + 2) * 32);
    // Every flag that --help lists is in the config line, but those of CLI11 itself
    std::istringstream help(run(1, {"--help"}).output);
    const std::string readme = read_file("README.md");
    int flags = 0;
    for (std::string word; help >> word;) {
        if (word.rfind("--", 0) != 0 || word == "--config") continue;
        std::string name = word.substr(2, word.find(',') == std::string::npos ? word.npos : word.find(',') - 2);
        if (name == "help" || name == "pp" || name == "tp" || name == "vp") continue;
        if (name == "train-iters" || config.contains(name)) ++flags;
        CHECK_MESSAGE(config.contains(name), name);
        CHECK_MESSAGE(contains(readme, "`--" + name), name);
    }
    CHECK(flags >= 40);
    const std::vector<json> lines = run.lines_of("log", "train"), evaluations = run.lines_of("log", "eval");
    REQUIRE(lines.size() == 5);
    for (int i = 0; i < 5; ++i) {
        CHECK(lines[i]["iteration"] == i + 1);
        CHECK(lines[i]["tokens"] == 128);
        CHECK(lines[i]["tokens_total"] == 128 * (i + 1));
        CHECK(lines[i]["loss"].get<double>() > 1);
        CHECK(lines[i]["grad_norm"].get<double>() > 0);
        for (const char* name : {"tokens_per_s", "tflops_per_rank", "iteration_ms"})
            CHECK(lines[i][name].get<double>() > 0);
    }
    CHECK(lines[0]["lr"].get<double>() == doctest::Approx(1.5e-4));
    REQUIRE(evaluations.size() == 4);
    CHECK(evaluations[1]["iteration"] == 2);
    CHECK(evaluations[3]["iteration"] == 5);
    CHECK(evaluations[3]["perplexity"].get<double>() ==
          doctest::Approx(std::exp(evaluations[3]["loss"].get<double>())));
}

TEST_CASE("the microbatch size changes nothing; repeated runs and more threads are bitwise the same") {
    Run run;
    auto train = [&](const std::string& name, const Words& flags, const Words& environment) {
        Words words = kSmall + Words{"--train-iters",    "6",      "--log-file",
                                     run.dir.file(name), "--dump", run.dir.file(name + ".dump")};
        if (!flags.empty()) {
            const auto b = std::find(words.begin(), words.end(), "--micro-batch-size");
            b[1] = flags[0];
        }
        const RunResult result = run(1, words, 60, environment);
        REQUIRE_MESSAGE(result.status == 0, result.output);
        return read_file(run.dir.file(name + ".dump/dump.safetensors"));
    };
    const std::string first = train("first", {}, {"OMP_NUM_THREADS=1"});
    CHECK(first.size() > 10000);
    CHECK(train("again", {}, {"OMP_NUM_THREADS=1"}) == first);
    CHECK(train("two threads", {}, {"OMP_NUM_THREADS=2"}) == first);
    CHECK(train("three threads", {}, {"OMP_NUM_THREADS=3"}) == first);
    train("b2", {"2"}, {});
    train("b4", {"4"}, {});
    const std::vector<json> lines = run.lines_of("first", "train");
    REQUIRE(lines.size() == 6);
    for (const char* other : {"b2", "b4"}) {
        const std::vector<json> others = run.lines_of(other, "train");
        REQUIRE(others.size() == 6);
        for (int i = 0; i < 6; ++i) {
            CHECK(relative_difference(others[i]["loss"], lines[i]["loss"]) <= kLossBound);
            CHECK(relative_difference(others[i]["grad_norm"], lines[i]["grad_norm"]) <= kNormBound);
        }
    }
}

TEST_CASE("one batch, repeated, is learned by heart") {
    Run run;
    write_file(run.dir.file("text"), some_text(16 * 8 + 1));  // 8 windows of 16 tokens: a batch
    const RunResult result = run(1, {"--num-layers",
                                     "2",
                                     "--hidden-size",
                                     "64",
                                     "--num-attention-heads",
                                     "4",
                                     "--seq-length",
                                     "16",
                                     "--micro-batch-size",
                                     "8",
                                     "--train-iters",
                                     "300",
                                     "--lr",
                                     "3e-3",
                                     "--hidden-dropout",
                                     "0",
                                     "--attention-dropout",
                                     "0",
                                     "--split",
                                     "1,0,0",
                                     "--log-file",
                                     run.dir.file("log")});
    REQUIRE_MESSAGE(result.status == 0, result.output);
    const std::vector<json> lines = run.lines_of("log", "train");
    REQUIRE(lines.size() == 300);
    CHECK(lines.front()["loss"].get<double>() > 4);
    CHECK(lines.back()["loss"].get<double>() < 0.05);
}

TEST_CASE("a loss that is not finite stops the run with the iteration and advice") {
    Run run;
    for (int ranks : {1, 4}) {
        Words flags = kSmall;
        flags[std::find(flags.begin(), flags.end(), "--lr") - flags.begin() + 1] = "1e6";
        const RunResult result = run(
            ranks, flags + Words{"--train-iters", "50", "--weight-decay", "1000000", "--pp", ranks == 4 ? "2" : "1"});
        CAPTURE(result.output);
        CHECK(result.status == 1);
        CHECK(contains(result.output, "is not finite"));
        CHECK(contains(result.output, "train: iteration "));
        CHECK(contains(result.output, "--lr"));
        CHECK(!contains(result.output, "iteration 50"));
    }
}

TEST_CASE("generation and evaluation are the same under every layout") {
    Run run;
    std::string sample;
    std::vector<double> losses;
    struct Case {
        int ranks;
        Words layout;
    };
    for (const Case& c : std::vector<Case>{{1, {}},
                                           {2, {"--tp", "2"}},
                                           {2, {"--pp", "2", "--vp", "2"}},
                                           {2, {}},
                                           {4, {"--tp", "2", "--pp", "2"}},
                                           {8, {"--tp", "2", "--pp", "2", "--vp", "2"}}}) {
        const std::string log = "log" + std::to_string(losses.size());
        const RunResult result = run(c.ranks, Words{"--num-layers",
                                                    "4",
                                                    "--hidden-size",
                                                    "32",
                                                    "--num-attention-heads",
                                                    "4",
                                                    "--seq-length",
                                                    "16",
                                                    "--micro-batch-size",
                                                    "1",
                                                    "--global-batch-size",
                                                    "8",
                                                    "--train-iters",
                                                    "10",
                                                    "--lr",
                                                    "3e-3",
                                                    "--split",
                                                    "8,2,0",
                                                    "--eval-iters",
                                                    "3",
                                                    "--generate",
                                                    "60",
                                                    "--temperature",
                                                    "0.7",
                                                    "--top-k",
                                                    "20",
                                                    "--top-p",
                                                    "0.95",
                                                    "--prompt",
                                                    "line ",
                                                    "--log-file",
                                                    run.dir.file(log)} +
                                                  c.layout);
        CAPTURE(result.output);
        REQUIRE(result.status == 0);
        const size_t begin = result.output.find("sample:\n"), end = result.output.find("the paper against this run");
        REQUIRE(begin != std::string::npos);
        const std::string text = result.output.substr(begin, end - begin);
        CHECK(text.size() == 8 + 5 + 60 + 1);
        if (sample.empty()) sample = text;
        CHECK(text == sample);
        const std::vector<json> evaluations = run.lines_of(log, "eval");
        REQUIRE(evaluations.size() == 2);
        losses.push_back(evaluations.back()["loss"]);
        CHECK(relative_difference(losses.back(), losses.front()) <= 1e-5);  // a learning rate above the bounds'
    }
}

TEST_CASE("the main job, examples/kjv.cfg on 8 ranks, for three iterations: the losses of one process") {
    Run run;
    write_file(run.dir.file("text"), some_text(40000));
    const Words words = {"--config",
                         "examples/kjv.cfg",
                         "--train-iters",
                         "3",
                         "--lr-warmup-iters",
                         "2",
                         "--lr",
                         "3e-4",
                         "--min-lr",
                         "3e-5",
                         "--generate",
                         "20",
                         "--log-interval",
                         "1"};
    const RunResult result = run(8, words + Words{"--log-file", run.dir.file("main")}, 300);
    REQUIRE_MESSAGE(result.status == 0, result.output);
    CHECK(contains(result.output, "process grid"));
    const RunResult serial =
        run(1, words + Words{"--tp", "1", "--pp", "1", "--vp", "1", "--log-file", run.dir.file("serial")}, 300);
    REQUIRE_MESSAGE(serial.status == 0, serial.output);
    for (const char* type : {"train", "eval"}) {
        const std::vector<json> lines = run.lines_of("main", type), expected = run.lines_of("serial", type);
        REQUIRE(!lines.empty());
        REQUIRE(lines.size() == expected.size());
        for (size_t i = 0; i < lines.size(); ++i)
            CHECK(relative_difference(lines[i]["loss"], expected[i]["loss"]) <= kLossBound);
    }
}

TEST_CASE("the predicted memory is within 10% of the measured") {
#ifdef __SANITIZE_ADDRESS__
    return skip("the predicted memory: AddressSanitizer's own memory is among what is measured");
#endif
    Run run;
    write_file(run.dir.file("text"), some_text(20000));
    const Words model = {"--num-layers",        "8",   "--hidden-size", "192", "--num-attention-heads", "8",
                         "--seq-length",        "128", "--eval-iters",  "0",   "--micro-batch-size",    "4",
                         "--global-batch-size", "32",  "--train-iters", "3"};
    struct Case {
        int ranks;
        Words layout;
    };
    for (const Case& c : std::vector<Case>{{1, {}},
                                           {1, {"--recompute-granularity", "full", "--recompute-num-layers", "2"}},
                                           {2, {"--tp", "2"}},
                                           {4, {"--pp", "4"}},
                                           {4, {"--pp", "2", "--vp", "2"}},
                                           {4, {"--pp", "4", "--schedule", "gpipe"}},
                                           {4, {"--tp", "2", "--use-distributed-optimizer"}},
                                           {8, {"--tp", "2", "--pp", "2", "--vp", "2"}}}) {
        const RunResult result = run(c.ranks, model + c.layout);
        CAPTURE(result.output);
        REQUIRE(result.status == 0);
        const size_t at = result.output.find("largest difference ");
        REQUIRE(at != std::string::npos);
        const double percent = std::atof(result.output.c_str() + at + std::strlen("largest difference "));
        CHECK(percent <= 10);
    }
}

TEST_CASE("--trace: every operation of every rank, in one file") {
    Run run;
    const RunResult result = run(8, kSmall + Words{"--train-iters", "4", "--trace", run.dir.file("trace"),
                                                   "--trace-iterations", "2-3", "--tp", "2", "--pp", "2", "--vp", "2"});
    REQUIRE_MESSAGE(result.status == 0, result.output);
    const json trace = json::parse(read_file(run.dir.file("trace")));
    std::map<int, std::map<std::string, int>> counts;
    std::map<int, std::vector<std::pair<double, double>>> operations;
    int tracks = 0;
    for (const json& event : trace["traceEvents"]) {
        if (event["ph"] == "M") {
            ++tracks;
            continue;
        }
        CHECK(event["ts"].get<double>() >= 0);
        CHECK(event["dur"].get<double>() >= 0);
        const std::string category = event["cat"];
        ++counts[event["tid"]][category];
        if (category == "forward" || category == "backward")
            operations[event["tid"]].push_back({event["ts"], event["ts"].get<double>() + event["dur"].get<double>()});
    }
    CHECK(tracks == 8);
    REQUIRE(counts.size() == 8);
    for (auto& entry : counts) {
        const int rank = entry.first;
        auto& count = entry.second;
        CAPTURE(rank);
        CHECK(count["forward"] == 2 * 2 * 4);  // iterations, chunks, microbatches
        CHECK(count["backward"] == 2 * 2 * 4);
        CHECK(count["tensor"] > 0);
        CHECK(count["data"] > 0);
        CHECK(count["exchange"] > 0);
        CHECK(count["optimizer"] == 2);
        auto& times = operations[rank];
        std::sort(times.begin(), times.end());
        for (size_t i = 1; i < times.size(); ++i) CHECK(times[i].first >= times[i - 1].second - 1.0);
    }
}

TEST_CASE("plan draws schedules, and refuses what has none") {
    TempDir dir;
    const std::string svg = dir.file("picture.svg");
    const RunResult result = run_command({program("plan"), "--draw-schedule", "--schedule", "interleaved", "--pp", "4",
                                          "--vp", "2", "--microbatches", "8", "--svg", svg});
    CAPTURE(result.output);
    REQUIRE(result.status == 0);
    CHECK(contains(result.output, "0.187500 replayed, (p - 1) / (v m) = 0.187500"));
    for (const char* device : {"device 1", "device 2", "device 3", "device 4"}) CHECK(contains(result.output, device));
    const std::string picture = read_file(svg);
    CHECK(picture.rfind("<svg", 0) == 0);
    CHECK(contains(picture, "</svg>"));
    size_t boxes = 0;
    for (size_t at = 0; (at = picture.find("<rect", at)) != std::string::npos; ++at) ++boxes;
    CHECK(boxes >= 4 * 2 * 2 * 8);  // a forward and a backward per device, chunk and microbatch

    const std::vector<std::pair<Words, Words>> mistakes = {
        {{"--schedule", "interleaved", "--pp", "4", "--vp", "2", "--microbatches", "6"}, {"6", "4 or 8"}},
        {{"--schedule", "zigzag", "--pp", "4", "--microbatches", "8"}, {"zigzag"}},
        {{"--schedule", "1f1b", "--pp", "0", "--microbatches", "8"}, {"size is 0", "from 1"}},
        {{"--schedule", "gpipe", "--vp", "2", "--pp", "2", "--microbatches", "8"}, {"gpipe", "2"}},
        {{"--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--svg", dir.file("no/where")},
         {"--svg", "where"}}};
    for (const auto& [flags, expected] : mistakes) {
        const RunResult refused = run_command(Words{program("plan"), "--draw-schedule"} + flags);
        CAPTURE(refused.output);
        CHECK(refused.status == 2);
        for (const std::string& part : expected) CHECK_MESSAGE(contains(refused.output, part), part);
    }
}

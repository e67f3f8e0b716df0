// Checkpoints: a run that was interrupted is the run that was not, under any layout; what is damaged is refused;
// whatever happens while one is written, a valid one is left.
#include "platform/checkpoint.h"

#include <sys/resource.h>

#include <random>
#include <set>

#include "tests/bounds.h"
#include "tests/program.h"

namespace {

// 20 iterations with dropout 0.1. V = 125 is padded for t > 1; Adam's epsilon as in tests/test_layouts.cu.
const Words kModel = {"--num-layers",        "4",   "--hidden-size", "32",   "--num-attention-heads", "4",
                      "--seq-length",        "16",  "--eval-iters",  "0",    "--micro-batch-size",    "1",
                      "--global-batch-size", "8",   "--lr",          "3e-4", "--lr-decay-iters",      "20",
                      "--vocab-size",        "125", "--adam-eps",    "1e-6"};

struct LayoutFlags {
    int ranks;
    Words flags;
};
const std::vector<LayoutFlags> kLayouts = {
    {1, {}},
    {2, {"--tp", "2"}},
    {2, {"--pp", "2", "--vp", "2"}},
    {2, {"--use-distributed-optimizer"}},
    {4, {"--tp", "4"}},
    {4, {"--pp", "4"}},
    {4, {"--tp", "2", "--use-distributed-optimizer"}},
    {8, {"--tp", "2", "--pp", "2", "--vp", "2", "--use-distributed-optimizer"}},
};

// The tensors of a dump: weights before its iteration's step, and gradients.
Tensors tensors_of(const std::string& path) {
    const SafeTensorsFile file(path);
    Tensors tensors;
    for (const auto& [name, tensor] : file.tensors)
        if (tensor.dtype == "F32") tensors[name] = tensor.floats();
    return tensors;
}

// Trains to `iterations`; the log goes to `name` and what `more` says.
RunResult train_to(const Run& run, const LayoutFlags& layout, int iterations, const std::string& name,
                   const Words& more = {}) {
    return run(layout.ranks, kModel + layout.flags +
                                 Words{"--train-iters", std::to_string(iterations), "--log-file", run.dir.file(name)} +
                                 more);
}

std::vector<json> numbers(const Run& run, const std::string& name) {
    std::vector<json> lines;
    for (const json& line : run.lines_of(name, "train"))
        lines.push_back({line["iteration"], line["loss"], line["grad_norm"], line["lr"], line["tokens_total"]});
    return lines;
}

}  // namespace

TEST_CASE("10 + 10 iterations are bitwise 20, on the same layout") {
    for (size_t i : {0, 2, 6, 7}) {
        const LayoutFlags& layout = kLayouts[i];
        Run run;
        CAPTURE(i);
        const std::string saved = run.dir.file("saved");
        REQUIRE(train_to(run, layout, 20, "whole", {"--dump", run.dir.file("dump-whole")}).status == 0);
        REQUIRE(train_to(run, layout, 10, "parts", {"--save", saved}).status == 0);
        const RunResult second =
            train_to(run, layout, 20, "parts", {"--load", saved, "--dump", run.dir.file("dump-parts")});
        REQUIRE_MESSAGE(second.status == 0, second.output);
        CHECK(contains(second.output, "iteration 10, 80 samples"));
        const std::vector<json> whole = numbers(run, "whole");
        REQUIRE(whole.size() == 20);
        CHECK(whole == numbers(run, "parts"));
        CHECK(run.lines_of("parts", "config").size() == 2);
        CHECK(read_file(run.dir.file("dump-whole/dump.safetensors")) ==
              read_file(run.dir.file("dump-parts/dump.safetensors")));
    }
}

TEST_CASE("a checkpoint of any layout is continued by any other, within the bounds") {
    Run run;
    REQUIRE(train_to(run, kLayouts[0], 20, "whole", {"--dump", run.dir.file("dump")}).status == 0);
    const std::vector<json> whole = numbers(run, "whole");
    const Tensors expected = tensors_of(run.dir.file("dump/dump.safetensors"));
    for (size_t i = 0; i < kLayouts.size(); ++i) {
        const std::string saved = run.dir.file("saved" + std::to_string(i));
        const RunResult first = train_to(run, kLayouts[i], 10, "first", {"--save", saved});
        REQUIRE_MESSAGE(first.status == 0, first.output);
        for (size_t step : {3, 5}) {
            const size_t j = (i + step) % kLayouts.size();
            CAPTURE(i);
            CAPTURE(j);
            const std::string log = "second" + std::to_string(i) + std::to_string(j);
            const RunResult second =
                train_to(run, kLayouts[j], 20, log, {"--load", saved, "--dump", run.dir.file(log + ".dump")});
            REQUIRE_MESSAGE(second.status == 0, second.output);
            const std::vector<json> lines = numbers(run, log);
            REQUIRE(lines.size() == 10);
            for (int k = 0; k < 10; ++k) {
                CHECK(lines[k][0] == 11 + k);
                CHECK(relative_difference(lines[k][1], whole[10 + k][1]) <= kLossBound);
                CHECK(relative_difference(lines[k][2], whole[10 + k][2]) <= kNormBound);
            }
            CHECK(worst_difference(tensors_of(run.dir.file(log + ".dump/dump.safetensors")), expected) <= 1);
        }
    }
}

TEST_CASE("--train-iters 0 --load evaluates and generates what the run that saved did") {
    Run run;
    const Words model = {"--num-layers",
                         "2",
                         "--hidden-size",
                         "32",
                         "--num-attention-heads",
                         "4",
                         "--seq-length",
                         "16",
                         "--global-batch-size",
                         "8",
                         "--micro-batch-size",
                         "2",
                         "--split",
                         "8,2,0",
                         "--eval-iters",
                         "2",
                         "--generate",
                         "40",
                         "--prompt",
                         "line ",
                         "--log-file",
                         run.dir.file("log")};
    const RunResult first = run(1, model + Words{"--train-iters", "10", "--save", run.dir.file("saved")});
    const RunResult second = run(2, model + Words{"--train-iters", "0", "--load", run.dir.file("saved"), "--pp", "2"});
    REQUIRE_MESSAGE(second.status == 0, second.output);
    const auto sample = [](const std::string& output) { return output.substr(output.find("sample:"), 7 + 6 + 40); };
    CHECK(sample(first.output) == sample(second.output));
    const std::vector<json> evaluations = run.lines_of("log", "eval");
    REQUIRE(evaluations.size() == 3);
    CHECK(evaluations[1]["loss"] == evaluations[2]["loss"]);
    CHECK(evaluations[2]["iteration"] == 10);
}

TEST_CASE("--save-hf and --load-hf: the same model comes back, in any layout; what is not GPT-2 is named") {
    Run run;
    const std::string hf = run.dir.file("hf"), again = run.dir.file("again");
    const Words batch = {
        "--global-batch-size", "8", "--micro-batch-size", "1", "--split", "8,2,0", "--eval-iters", "2", "--log-file",
        run.dir.file("log")};
    const Words sizes = {"--num-layers", "4",  "--hidden-size", "32", "--num-attention-heads", "4",
                         "--seq-length", "16", "--vocab-size",  "257"};
    REQUIRE(run(4, batch + sizes + Words{"--train-iters", "5", "--tp", "2", "--pp", "2", "--save-hf", hf}).status == 0);
    for (const LayoutFlags& layout : kLayouts) {
        const RunResult result =
            run(layout.ranks, batch + layout.flags + Words{"--train-iters", "0", "--load-hf", hf, "--save-hf", again});
        REQUIRE_MESSAGE(result.status == 0, result.output);
        CHECK(read_file(hf + "/model.safetensors") == read_file(again + "/model.safetensors"));
    }
    const std::vector<json> evaluations = run.lines_of("log", "eval");
    REQUIRE(evaluations.size() == 2 + kLayouts.size());
    for (size_t i = 2; i < evaluations.size(); ++i)
        CHECK(relative_difference(evaluations[i]["loss"], evaluations[1]["loss"]) <= kLossBound);

    auto refused = [&](const Words& expected, const Words& more = {}) {
        const RunResult result = run(1, batch + Words{"--train-iters", "0", "--load-hf", hf} + more);
        CAPTURE(result.output);
        CHECK(result.status == 2);
        for (const std::string& part : expected) CHECK_MESSAGE(contains(result.output, part), part);
    };
    refused({"--num-layers 3", "n_layer", "is 4"}, {"--num-layers", "3"});
    refused({"--seq-length 17", "n_positions", "is 16"}, {"--seq-length", "17"});
    refused({"--load", "--load-hf"}, {"--load", hf});
    const std::string config = read_file(hf + "/config.json"), model = read_file(hf + "/model.safetensors");
    auto with_config = [&](const char* key, const json& value) {
        json changed = json::parse(config);
        changed[key] = value;
        write_file(hf + "/config.json", changed.dump());
    };
    with_config("activation_function", "relu");
    refused({"activation_function", "relu", "gelu_new"});
    with_config("n_embd", 64);
    refused({"tensor wte.weight is [257, 32], not [257, 64]"});
    with_config("n_layer", 5);
    refused({"has no tensor h.4.ln_1.weight"});
    with_config("n_layer", 3);
    refused({"tensor h.3.", "is not GPT-2's"});
    with_config("vocab_size", "many");
    refused({"vocab_size"});
    write_file(hf + "/config.json", "{");
    refused({"config.json"});
    write_file(hf + "/config.json", config);
    write_file(hf + "/model.safetensors", model.substr(0, 1000));
    refused({"model.safetensors", "not a valid safetensors file"});
    std::filesystem::remove(hf + "/model.safetensors");
    refused({"model.safetensors", "No such file"});
}

TEST_CASE("a model of transformers' GPT2LMHeadModel comes in and goes out, with the same logits") {
    const std::string python = std::getenv("PYTHON") ? std::getenv("PYTHON") : "python3";
    if (run_command({python, "-c", "import torch, safetensors, transformers"}, 120).status != 0) {
        skip("torch, safetensors and transformers cannot be imported by " + python + " (PYTHON=... names another)");
        return;
    }
    const RunResult result = run_command({python, "tests/check_hf.py", train_program(), mpirun_program()}, 120);
    CHECK_MESSAGE(result.status == 0, result.output);
    CHECK(contains(result.output, "8 ranks"));
}

TEST_CASE("--save-interval and --keep leave the newest; saving over them starts anew") {
    Run run;
    const std::string saved = run.dir.file("saved");
    write_file(run.dir.file("saved.txt"), "");
    const RunResult result =
        train_to(run, kLayouts[1], 9, "log", {"--save", saved, "--save-interval", "2", "--keep", "2", "--load", saved});
    REQUIRE_MESSAGE(result.status == 0, result.output);
    CHECK(contains(result.output, "no checkpoint in " + saved + " yet"));
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(saved)) names.insert(entry.path().filename().string());
    CHECK(names == std::set<std::string>{"iter_0000008", "iter_0000009"});
    // What is no checkpoint is left alone
    write_file(saved + "/iter_0000099.part", "");
    write_file(saved + "/notes", "");
    write_file(saved + "/iter_0000008/notes", "");
    CHECK(contains(train_to(run, kLayouts[0], 12, "log", {"--load", saved}).output, "iteration 9, 72 samples"));
}

TEST_CASE("damaged, incomplete and foreign checkpoints are refused with one message, and nothing is written") {
    Run run;
    const std::string saved = run.dir.file("saved"), newest = saved + "/iter_0000004";
    REQUIRE(train_to(run, kLayouts[6], 4, "log", {"--save", saved, "--save-interval", "2"}).status == 0);
    const std::string shard = newest + "/shard_t1_p0_d1.safetensors", manifest = newest + "/manifest.json";
    const std::string whole = read_file(shard), text = read_file(manifest);
    REQUIRE(whole.size() > 1000);
    auto refused = [&](const Words& expected, const Words& more = {}) {
        for (const LayoutFlags& layout : {kLayouts[0], kLayouts[1]}) {
            std::filesystem::remove(run.dir.file("new-log"));
            const RunResult result = train_to(run, layout, 8, "new-log", Words{"--load", saved} + more);
            CAPTURE(result.output);
            CHECK(result.status == 2);
            CHECK(std::count(result.output.begin(), result.output.end(), '\n') == 1);
            for (const std::string& part : expected) CHECK_MESSAGE(contains(result.output, part), part);
            CHECK(!std::filesystem::exists(run.dir.file("new-log")));
        }
    };
    std::mt19937 random(5);
    for (int flip = 0; flip < 8; ++flip) {
        std::string bytes = whole;
        bytes[random() % bytes.size()] ^= char(1 << random() % 8);
        write_file(shard, bytes);
        refused({"--load", "shard_t1_p0_d1.safetensors", "damaged", newest});
    }
    write_file(shard, whole.substr(0, whole.size() - 1));
    refused({"shard_t1_p0_d1.safetensors", "damaged"});
    write_file(shard, "not a shard");
    refused({"shard_t1_p0_d1.safetensors", "not a valid safetensors file"});
    std::filesystem::remove(shard);
    refused({"shard_t1_p0_d1.safetensors", "No such file"});
    write_file(shard, whole);
    for (int flip = 0; flip < 8; ++flip) {
        std::string bytes = text;
        bytes[random() % bytes.size()] ^= 1;
        write_file(manifest, bytes);
        refused({"manifest.json", "damaged"});
    }
    write_file(manifest, text.substr(0, 100));
    refused({"manifest.json"});
    // Without its newest the one before is loaded
    std::filesystem::rename(newest, run.dir.file("away"));
    CHECK(contains(train_to(run, kLayouts[0], 6, "log", {"--load", saved}).output, "iteration 2, 16 samples"));
    const RunResult other =
        run(1, {"--load", saved, "--num-layers", "6", "--hidden-size", "96", "--vocab-size", "250"});
    CAPTURE(other.output);
    CHECK(other.status == 2);
    for (const char* part :
         {"of another model", "--num-layers 6 here, 4 there", "--num-attention-heads 6 here, 4 there",
          "--seq-length 256 here, 16 there", "--vocab-size 250 here, 125 there"})
        CHECK_MESSAGE(contains(other.output, part), part);
    CHECK(contains(other.output, "--hidden-size 96 here, 32 there"));
}

TEST_CASE("--load of a directory without a checkpoint, --save where nothing can be written") {
    Run run;
    RunResult result = train_to(run, kLayouts[0], 4, "log", {"--load", run.dir.file("nothing")});
    CHECK(result.status == 2);
    CHECK(contains(result.output, "holds no complete checkpoint"));
    for (const std::string& place : {std::string("/proc/saved"), run.dir.file("text") + "/saved"}) {
        result = train_to(run, kLayouts[0], 4, "log", {"--save", place});
        CHECK(result.status == 2);
        CHECK(contains(result.output, "--save " + place));
    }
    result = train_to(run, kLayouts[0], 4, "log", {"--save-interval", "2"});
    CHECK(result.status == 2);
    CHECK(contains(result.output, "--save-interval needs --save"));
}

TEST_CASE("a disk that fills up while saving: the run ends with a message, the checkpoint before it stays") {
    Run run;
    const std::string saved = run.dir.file("saved");
    REQUIRE(run(4, kSmall + Words{"--train-iters", "2", "--save", saved, "--tp", "2", "--pp", "2"}).status == 0);
    double seconds = 0;
    const RunResult result = harm_a_run(
        run, {"--tp", "2", "--pp", "2", "--save", saved, "--save-interval", "100", "--load", saved},
        [&](const std::vector<pid_t>& pids) {  // from now on the second half's files may not grow beyond 50 KB
            const rlimit limit = {50000, 50000};
            for (int rank : {2, 3}) CHECK(prlimit(pids[rank], RLIMIT_FSIZE, &limit, nullptr) == 0);
        },
        &seconds);
    CAPTURE(result.output);
    CHECK(result.status == 1);
    CHECK(contains(result.output, "shard_t0_p1.safetensors: cannot write: File too large"));
    CHECK(checkpoint_detail::iterations_in(saved) == std::vector<int64_t>{2});
    size_t entries = 0;
    for (const auto& entry : std::filesystem::directory_iterator(saved)) entries += entry.exists();
    CHECK(entries == 1);
    CHECK(contains(run(1, kSmall + Words{"--train-iters", "3", "--load", saved}).output, "iteration 2, 16 samples"));
}

TEST_CASE("SIGTERM and Ctrl-C save first") {
    for (int number : {SIGTERM, SIGINT})
        for (int rank : {0, 3}) {
            CAPTURE(number);
            Run run;
            double seconds = 0;
            const std::string saved = run.dir.file("saved");
            const RunResult result = harm_a_run(
                run, {"--tp", "2", "--pp", "2", "--save", saved},
                [&](const std::vector<pid_t>& pids) { kill(pids[rank], number); }, &seconds);
            CAPTURE(result.output);
            CHECK(result.status == 128 + SIGTERM);
            CHECK(seconds < 10);
            CHECK(contains(result.output, "asked to stop: continue with --load " + saved));
            const std::vector<int64_t> iterations = checkpoint_detail::iterations_in(saved);
            REQUIRE(iterations.size() == 1);
            CHECK(contains(run(1, kSmall + Words{"--train-iters", "0", "--load", saved}).output,
                           "iteration " + std::to_string(iterations[0])));
        }
}

TEST_CASE(
    "every rank killed at random moments while saving: a valid checkpoint is left, and continues to the same losses") {
    Run run;
    const LayoutFlags layout = {4, {"--tp", "2", "--pp", "2", "--log-interval", "1"}};
    REQUIRE(train_to(run, layout, 20, "whole").status == 0);
    const std::vector<json> whole = numbers(run, "whole");
    const std::string saved = run.dir.file("saved"), out = run.dir.file("out");
    std::mt19937 random(7);
    int interrupted = 0;
    for (int round = 0; round < (full_tests() ? 30 : 5); ++round) {
        CAPTURE(round);
        std::filesystem::remove_all(saved);
        write_file(out, "");
        std::string command = "exec ";
        for (const std::string& word :
             Words{mpirun_program(), "-np", "4", train_program(), "--data-path", run.dir.file("text")} + kModel +
                 layout.flags +
                 Words{"--train-iters", "1000000", "--save", saved, "--save-interval", "1", "--keep", "2"})
            command += word + " ";
        std::thread job([&] { run_command({"bash", "-c", command + ">" + out + " 2>&1"}, 60); });
        std::vector<pid_t> pids;
        for (int i = 0; i < 200 && pids.size() < 4; ++i) {
            usleep(50000);
            pids = pids_in(read_file(out));
        }
        while (pids.size() == 4 && !contains(read_file(out), "iteration 3 | checkpoint saved")) usleep(1000);
        usleep(random() % 200000);
        for (pid_t pid : pids) kill(pid, SIGKILL);
        job.join();
        REQUIRE(pids.size() == 4);
        for (const auto& entry : std::filesystem::directory_iterator(saved))
            interrupted += entry.path().extension() == ".part";
        const std::vector<int64_t> iterations = checkpoint_detail::iterations_in(saved);
        REQUIRE(!iterations.empty());
        const int64_t at = iterations.back();
        std::filesystem::remove(run.dir.file("rest"));
        const RunResult rest = train_to(run, layout, int(at) + 2, "rest", {"--load", saved, "--save", saved});
        REQUIRE_MESSAGE(rest.status == 0, rest.output);
        const std::vector<json> lines = numbers(run, "rest");
        REQUIRE(lines.size() == 2);
        for (int k = 0; k < 2; ++k)
            if (at + k < 20) CHECK(lines[k] == whole[at + k]);
        CHECK(checkpoint_detail::iterations_in(saved).back() == at + 2);
    }
    std::printf("%d of the kills came while a checkpoint was half written\n", interrupted);
}

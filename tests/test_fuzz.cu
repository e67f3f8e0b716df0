// Hostile input: files of arbitrary bytes (tests/parsers.h), and arbitrary combinations of flags.
#include "tests/parsers.h"

#include <random>

#include "tests/bounds.h"
#include "tests/program.h"

// ---------------------------------------------------------------------------------------------------------------------
// Files

namespace {

// A few random edits: a byte changed, a run of bytes deleted, repeated or overwritten, a number made extreme.
std::string mutated(std::string text, std::mt19937& random) {
    for (unsigned edits = 1 + random() % 4; edits > 0 && !text.empty(); --edits) {
        const size_t at = 1 + random() % text.size(), length = std::min(text.size() - 1, 1 + random() % 16);
        switch (random() % 5) {
            case 0:
                text[std::min(at, text.size() - 1)] ^= char(1 << random() % 8);
                break;
            case 1:
                text.erase(std::min(at, text.size() - length), length);
                break;
            case 2:
                text.insert(at, text.substr(random() % text.size(), length));
                break;
            case 3:
                for (size_t i = at; i < std::min(text.size(), at + 8); ++i) text[i] = random() % 2 ? '\xff' : '\x7f';
                break;
            default: {
                const size_t digit = text.find_first_of("0123456789", at);
                const char* extremes[] = {"18446744073709551615", "9223372036854775807", "-1", "1e999", "[[[[[[[[["};
                if (digit != std::string::npos) text.replace(digit, 1, extremes[random() % 5]);
            }
        }
    }
    return text;
}

template <class Reader>
void feed_all(const std::string& name, Reader reader) {
    TempDir dir;
    std::mt19937 random(11);
    int accepted = 0, inputs = 0, seeds = 0;
    for (const auto& entry : std::filesystem::directory_iterator("tests/seeds/" + name)) {
        const std::string seed = read_file(entry.path().string());
        CAPTURE(entry.path());
        ++seeds;
        parsers::feed(reader, dir.path.string(), seed);
        for (int i = 0; i < (full_tests() ? 20000 : 500); ++i) {
            const std::string input = mutated(seed, random);
            write_file(dir.file("input"), input);  // what is left of a crash
            accepted += parsers::feed(reader, dir.path.string(), input).empty();
            ++inputs;
        }
    }
    CHECK(seeds >= 6);
    CHECK(accepted > inputs / 100);  // not everything is refused at the first byte
    CHECK(accepted < inputs);
    std::printf("%s: %d seeds, %d mutations, %d of them accepted\n", name.c_str(), seeds, inputs, accepted);
}

}  // namespace

TEST_CASE("hostile model files: safetensors, checkpoints, Hugging Face's, --config, --hardware") {
    feed_all("files", [](auto& dir, auto& input) { parsers::read_files(dir, input); });
}

TEST_CASE("hostile token files: text, .bin, .idx, prompts") {
    feed_all("tokens", [](auto& dir, auto& input) { parsers::read_tokens(dir, input); });
}

TEST_CASE("seeds are what they claim to be: each is accepted") {
    TempDir dir;
    for (const auto& entry : std::filesystem::directory_iterator("tests/seeds/files")) {
        if (contains(entry.path().string(), "found-")) continue;
        CHECK_MESSAGE(parsers::feed(parsers::read_files, dir.path.string(), read_file(entry.path().string())) == "",
                      entry.path());
    }
    for (const auto& entry : std::filesystem::directory_iterator("tests/seeds/tokens")) {
        if (contains(entry.path().string(), "found-")) continue;
        CHECK_MESSAGE(parsers::feed(parsers::read_tokens, dir.path.string(), read_file(entry.path().string())) == "",
                      entry.path());
    }
}

TEST_CASE("a million brackets: no stack overflows") {
    TempDir dir;
    const std::string deep(1000000, '['), header = "{\"a\":" + deep;
    const uint64_t size = header.size();
    std::string shard(reinterpret_cast<const char*>(&size), 8);
    shard += header;
    for (const std::string& input :
         {std::string(1, '\0') + shard, "\x02\xff\xff" + std::string("{\"model_type\":") + deep, "\x04" + header})
        CHECK(parsers::feed(parsers::read_files, dir.path.string(), input) != "");
}

// ---------------------------------------------------------------------------------------------------------------------
// Flags

namespace {

// A drawn command line, and what the rules of §2 and the flags' own ranges say of it, written down here a second time.
struct Drawn {
    int ranks = 1;
    std::vector<std::pair<std::string, std::string>> flags;  // name without --, value ("": a switch)
    bool in_config = false;                                  // given in a file, not on the command line
    std::set<std::string> wrong;  // flags of which the refusal must name one; none: it trains

    void set(const std::string& name, const std::string& value) { flags.push_back({name, value}); }
    void set(const std::string& name, int64_t value) { set(name, std::to_string(value)); }
    Words words(const std::string& config_file) const {
        Words words;
        std::string config;
        for (const auto& [name, value] : flags) {
            words.push_back("--" + name);
            if (!value.empty()) words.push_back(value);
            config += name + "=" + (value.empty() ? "true" : value) + "\n";
        }
        if (!in_config) return words;
        write_file(config_file, config);
        return {"--config", config_file};
    }
};

Drawn draw(std::mt19937& random) {
    auto one_of = [&](std::initializer_list<int64_t> list) { return list.begin()[random() % list.size()]; };
    auto chance = [&](unsigned percent) { return random() % 100 < percent; };
    Drawn drawn;
    drawn.in_config = chance(25);
    // Sizes that fit each other most of the time
    const int64_t t = one_of({1, 1, 2, 2, 3, 4}), p = one_of({1, 1, 2, 2, 3, 4}), v = p > 1 ? one_of({1, 1, 2, 3}) : 1;
    int64_t d = one_of({1, 1, 2, 3});
    if (t * p * d > 8) d = 1;
    drawn.ranks = int(std::min<int64_t>(t * p * d, 8)) + (chance(4) ? 1 : 0);
    const int64_t a = t * one_of({1, 2, 3}) + (chance(4) ? 1 : 0), h = a * one_of({1, 3, 4, 8}) + (chance(4) ? 1 : 0);
    const int64_t l = p * v * one_of({1, 1, 2}) + (chance(4) ? 1 : 0), s = one_of({1, 2, 7, 16, 33}),
                  b = one_of({1, 1, 2, 3});
    const int64_t ranks = drawn.ranks, data = ranks % (t * p) == 0 ? ranks / (t * p) : 1;
    const int64_t m = one_of({1, 2, 3, 4}) * (v > 1 ? p : 1) + (chance(4) ? 1 : 0),
                  B = b * data * m + (chance(4) ? 1 : 0);
    drawn.set("num-layers", l);
    drawn.set("hidden-size", h);
    drawn.set("num-attention-heads", a);
    drawn.set("seq-length", s);
    drawn.set("micro-batch-size", b);
    drawn.set("global-batch-size", B);
    drawn.set(chance(50) ? "tp" : "tensor-model-parallel-size", t);
    drawn.set(chance(50) ? "pp" : "pipeline-model-parallel-size", p);
    if (v > 1 && l % (p * v) == 0 && chance(30))
        drawn.set("num-layers-per-virtual-pipeline-stage", l / (p * v));
    else if (v > 1 || chance(20))
        drawn.set("virtual-pipeline-size", v);
    auto wrong = [&](bool condition, std::initializer_list<const char*> names) {
        if (condition) drawn.wrong.insert(names.begin(), names.end());
    };
    wrong(h % a != 0, {"--hidden-size"});
    wrong(a % t != 0, {"--num-attention-heads"});
    wrong(h % t != 0, {"--hidden-size"});
    wrong(l % (p * v) != 0 || p > l, {"--num-layers"});
    wrong(ranks % (t * p) != 0, {"the number of ranks"});
    wrong(B % (b * data) != 0, {"--global-batch-size"});
    wrong(v > 1 && B / (b * data) % p != 0, {"--schedule", "--global-batch-size"});
    // What must not change the run
    if (chance(25)) drawn.set("no-scatter-gather-tensors-in-pipeline", "");
    if (chance(30)) drawn.set("use-distributed-optimizer", "");
    if (chance(30)) {
        drawn.set("recompute-granularity", "full");
        const int64_t layers = chance(50) ? 1 : std::max<int64_t>(1, l / (p * v)) + (chance(10) ? 1 : 0);
        drawn.set("recompute-num-layers", layers);
        wrong(layers > std::max<int64_t>(1, l / (p * v)), {"--recompute-num-layers"});
    }
    if (chance(40)) {
        const std::string schedule = chance(85) ? (v > 1        ? "interleaved"
                                                   : chance(50) ? "gpipe"
                                                                : "1f1b")
                                                : (v > 1 ? "gpipe" : "interleaved");
        drawn.set("schedule", schedule);
        wrong((v > 1) != (schedule == "interleaved"), {"--schedule"});
    }
    // What changes it in every layout alike
    if (chance(40)) drawn.set("attention-dropout", chance(50) ? "0" : "0.5");
    if (chance(40)) drawn.set("hidden-dropout", chance(50) ? "0" : "0.3");
    if (chance(30)) drawn.set("seed", int64_t(random()));
    if (chance(30)) drawn.set("vocab-size", 128 + int64_t(random() % 200));
    if (chance(30)) drawn.set("clip-grad", chance(50) ? "0" : "0.01");
    if (chance(30)) drawn.set("lr-decay-style", chance(50) ? "cosine" : "constant");
    if (chance(30)) drawn.set("init-method-std", "0.1");
    if (chance(20)) drawn.set("weight-decay", "0.1");
    if (chance(20)) drawn.set("split", "8,1,1");
    if (chance(20)) drawn.set("prompt", "two words");
    // One value that is wrong by itself
    if (chance(25)) {
        const std::vector<std::pair<std::string, std::vector<std::string>>> bad = {
            {"hidden-dropout", {"1", "-0.1", "nan", "inf", "half"}},
            {"attention-dropout", {"1.5", "-1", "1e400"}},
            {"seed", {"-1", "1.5", "99999999999999999999999"}},
            {"lr", {"-1e-3", "nan", "1e400", "fast"}},
            {"min-lr", {"1", "-1"}},
            {"clip-grad", {"-1", "nan"}},
            {"adam-beta1", {"1", "-0.5"}},
            {"split", {"1,2", "a,b,c", "0,1,1", "-1,1,1"}},
            {"lr-decay-style", {"step", "Linear"}},
            {"schedule", {"zigzag", "1F1B"}},
            {"recompute-granularity", {"selective", "yes"}},
            {"vocab-size", {"20", "-1", "2147483648"}},
            {"log-interval", {"0", "-1"}},
            {"eval-interval", {"0"}},
            {"keep", {"1"}},
            {"save-interval", {"1"}},
            {"comm-timeout", {"-1", "nan"}},
            {"loss-scale", {"3", "-1"}},
            {"trace-iterations", {"3", "2-1", "0-1", "x"}},
            {"top-p", {"1.5"}},
            {"lr-warmup-iters", {"-1"}},
            {"no-such-flag", {"1"}},
            {"seq-length-s", {"16"}},
        };
        const auto& [name, values] = bad[random() % bad.size()];
        bool there = false;
        for (const auto& flag : drawn.flags) there = there || flag.first == name;
        if (!there) {
            drawn.set(name, values[random() % values.size()]);
            drawn.wrong.insert(drawn.in_config ? name : "--" + name);
        }
    }
    return drawn;
}

// The flags of one process that trains the same run.
Words serial(const Drawn& drawn) {
    Words words;
    for (const auto& [name, value] : drawn.flags) {
        static const std::set<std::string> layout = {"tp",
                                                     "pp",
                                                     "tensor-model-parallel-size",
                                                     "pipeline-model-parallel-size",
                                                     "virtual-pipeline-size",
                                                     "num-layers-per-virtual-pipeline-stage",
                                                     "schedule",
                                                     "no-scatter-gather-tensors-in-pipeline",
                                                     "use-distributed-optimizer",
                                                     "recompute-granularity",
                                                     "recompute-num-layers",
                                                     "micro-batch-size"};
        if (layout.count(name)) continue;
        words.push_back("--" + name);
        if (!value.empty()) words.push_back(value);
    }
    return words + Words{"--micro-batch-size", "1"};
}

// Every flag is in the log's first line with the value that was given: nothing is adjusted silently.
void check_config(const Drawn& drawn, const json& config) {
    for (const auto& [given, value] : drawn.flags) {
        const std::string name = given == "tp"   ? "tensor-model-parallel-size"
                                 : given == "pp" ? "pipeline-model-parallel-size"
                                                 : given;
        REQUIRE_MESSAGE(config.contains(name), name);
        const json& used = config[name];
        if (used.is_boolean())
            CHECK_MESSAGE(used == true, name);
        else if (used.is_string())
            CHECK_MESSAGE(used == value, name);
        else
            CHECK_MESSAGE(used.get<double>() == std::strtod(value.c_str(), nullptr), name);
    }
}

}  // namespace

TEST_CASE(
    "any combination of flags trains to the serial run's losses, or is refused with a message that names a flag") {
    const char* count = std::getenv("PTDP_COMBINATIONS");
    const int combinations = count ? std::atoi(count) : full_tests() ? 300 : 30;
    const char* seed = std::getenv("PTDP_SEED");
    int tried = 0, trained = 0, refused = 0;
    for (; tried < combinations && seconds_left() > 0; ++tried) {
        std::mt19937 random(unsigned(1000003 * (seed ? std::atoi(seed) : 1) + tried));
        const Drawn drawn = draw(random);
        Run run;
        const Words fixed = {"--train-iters", "2", "--eval-iters", "0", "--lr-decay-iters", "20"};
        const Words words = drawn.words(run.dir.file("flags.cfg"));
        std::string text = "mpirun -np " + std::to_string(drawn.ranks) + " ./train";
        for (const std::string& word : words + fixed) text += " " + word;
        if (drawn.in_config) text += " (" + read_file(run.dir.file("flags.cfg")) + ")";
        CAPTURE(text);
        const RunResult result = run(drawn.ranks, words + fixed + Words{"--log-file", run.dir.file("log")});
        CAPTURE(result.output);
        if (!drawn.wrong.empty()) {
            ++refused;
            CHECK(result.status == 2);
            CHECK(std::count(result.output.begin(), result.output.end(), '\n') == 1);
            const bool named = std::any_of(drawn.wrong.begin(), drawn.wrong.end(),
                                           [&](const std::string& flag) { return contains(result.output, flag); });
            CHECK(named);
            CHECK(!std::filesystem::exists(run.dir.file("log")));
            continue;
        }
        ++trained;
        REQUIRE(result.status == 0);
        check_config(drawn, run.lines_of("log", "config")[0]);
        const RunResult one = run(1, serial(drawn) + fixed + Words{"--log-file", run.dir.file("serial")});
        REQUIRE_MESSAGE(one.status == 0, one.output);
        const std::vector<json> lines = run.lines_of("log", "train"), expected = run.lines_of("serial", "train");
        REQUIRE(lines.size() == 2);
        REQUIRE(expected.size() == 2);
        for (int k = 0; k < 2; ++k) {
            CHECK(relative_difference(lines[k]["loss"], expected[k]["loss"]) <= kLossBound);
            CHECK(relative_difference(lines[k]["grad_norm"], expected[k]["grad_norm"]) <= kNormBound);
        }
    }
    CHECK(trained > tried / 4);
    CHECK(refused > tried / 10);
    if (tried < combinations) std::printf("flags: stopped at the time limit\n");
    std::printf("%d combinations trained, %d were refused\n", trained, refused);
}

// Every layout computes the same run: layouts (p, t, d, v, schedule, b, scatter/gather, recomputation, distributed
// optimizer) on 1 to 8 ranks against one process, and against values made with Hugging Face GPT-2. One mpirun per
// world size runs many layouts, each a whole Trainer.
#define main train_main  // this program's main is the harness's
#include "train.cu"
#undef main

#include "tests/bounds.h"
#include "tests/harness.h"

namespace {

constexpr int kLayers = 24, kBatch = 24;

// Under AddressSanitizer the matrix looks for faults of memory, which the first iterations have
#ifdef __SANITIZE_ADDRESS__
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Of a run; $PTDP_ITERATIONS, or 10, or 1 in mixed precision (tests/bounds.h).
int iterations() {
    const char* given = std::getenv("PTDP_ITERATIONS");
    return given ? std::atoi(given) : kMixed ? 1 : kSanitized ? 2 : 10;
}

struct Layout {
    int p = 1, t = 1, d = 1, v = 1;
    std::string schedule = "1f1b";
    int b = 1, scatter = 1, recompute = 0, distributed = 0;  // recompute: layers per block

    int ranks() const { return p * t * d; }
    std::string text() const {
        std::ostringstream out;
        out << p << ' ' << t << ' ' << d << ' ' << v << ' ' << schedule << ' ' << b << ' ' << scatter << ' '
            << recompute << ' ' << distributed;
        return out.str();
    }
    // Layouts that differ only in p, v, schedule, scatter/gather and recomputation agree bitwise.
    std::string bitwise_key() const {
        return "t" + std::to_string(t) + "-d" + std::to_string(d) + "-b" + std::to_string(b) +
               (distributed && d > 1 ? "-distributed" : "");
    }
};
std::istream& operator>>(std::istream& in, Layout& l) {
    return in >> l.p >> l.t >> l.d >> l.v >> l.schedule >> l.b >> l.scatter >> l.recompute >> l.distributed;
}

// Every layout of the test's model on `ranks` ranks.
std::vector<Layout> all_layouts(int ranks) {
    std::vector<Layout> list;
    for (int p = 1; p <= ranks; ++p)
        for (int t = 1; t <= ranks; ++t) {
            if (ranks % (p * t) != 0) continue;
            const int d = ranks / (p * t);
            for (int v = 1; v <= 3; ++v)
                for (const char* schedule : {"gpipe", "1f1b", "interleaved"})
                    for (int b : {1, 2})
                        for (int scatter : {1, 0})
                            for (int recompute : {0, 1, 2})
                                for (int distributed : {0, 1}) {
                                    const bool interleaved = schedule == std::string("interleaved");
                                    const int m = kBatch / (b * d);
                                    if (kLayers % (p * v) != 0 || kBatch % (b * d) != 0 || interleaved != (v > 1) ||
                                        (v > 1 && (p == 1 || m % p != 0)) || recompute > kLayers / (p * v) ||
                                        (!scatter && (p == 1 || t == 1)) || (distributed && d == 1) ||
                                        (p == 1 && schedule != std::string("1f1b")))
                                        continue;
                                    list.push_back({p, t, d, v, schedule, b, scatter, recompute, distributed});
                                }
        }
    return list;
}

// A subset in which every pair of two factors' values that occurs at all occurs: chosen greedily.
std::vector<Layout> pairwise(const std::vector<Layout>& all) {
    using Pair = std::tuple<int, int, int, int>;
    auto pairs_of = [](const Layout& l) {
        const std::vector<int> values = {l.p, l.t,       l.d,         l.v,          int(l.schedule[0]),
                                         l.b, l.scatter, l.recompute, l.distributed};
        std::vector<Pair> pairs;
        for (size_t i = 0; i < values.size(); ++i)
            for (size_t j = 0; j < i; ++j) pairs.push_back({int(i), values[i], int(j), values[j]});
        return pairs;
    };
    std::set<Pair> open;
    for (const Layout& layout : all)
        for (const Pair& pair : pairs_of(layout)) open.insert(pair);
    std::vector<Layout> chosen;
    while (!open.empty()) {
        const Layout* best = nullptr;
        int most = 0;
        for (const Layout& layout : all) {
            int covers = 0;
            for (const Pair& pair : pairs_of(layout)) covers += int(open.count(pair));
            if (covers > most) {
                most = covers;
                best = &layout;
            }
        }
        for (const Pair& pair : pairs_of(*best)) open.erase(pair);
        chosen.push_back(*best);
    }
    return chosen;
}

Options options_of(const Layout& l, const std::string& data, std::vector<std::string> more) {
    std::vector<std::string> words = {"train",
                                      "--data-path",
                                      data,
                                      "--pp",
                                      std::to_string(l.p),
                                      "--tp",
                                      std::to_string(l.t),
                                      "--vp",
                                      std::to_string(l.v),
                                      "--schedule",
                                      l.schedule,
                                      "--micro-batch-size",
                                      std::to_string(l.b),
                                      "--lr-decay-style",
                                      "constant"};
    if (!l.scatter) words.push_back("--no-scatter-gather-tensors-in-pipeline");
    if (l.distributed) words.push_back("--use-distributed-optimizer");
    if (l.recompute)
        for (const std::string& word : {std::string("--recompute-granularity"), std::string("full"),
                                        std::string("--recompute-num-layers"), std::to_string(l.recompute)})
            words.push_back(word);
    words.insert(words.end(), more.begin(), more.end());
    std::vector<const char*> argv;
    for (const std::string& word : words) argv.push_back(word.c_str());
    std::string help;
    Options options = parse_options(int(argv.size()), argv.data(), &help);
    int ranks = 0;
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    validate(options, ranks);
    return options;
}

// The matrix's model: divides by many layouts; 101 tokens, so the vocabulary is padded for t > 1. Adam's epsilon is
// 1e-6 because with 1e-8 a gradient that is all rounding becomes a whole step, which then changes other gradients: of
// these 680400 weights four or so then differ by up to three times the bound after ten iterations, and none with 1e-6.
Options matrix_options(const Layout& layout, const std::string& data) {
    std::vector<std::string> flags = {"--num-layers",
                                      std::to_string(kLayers),
                                      "--hidden-size",
                                      "48",
                                      "--num-attention-heads",
                                      "24",
                                      "--seq-length",
                                      "8",
                                      "--vocab-size",
                                      "101",
                                      "--global-batch-size",
                                      std::to_string(kBatch),
                                      "--train-iters",
                                      std::to_string(iterations()),
                                      "--lr",
                                      "3e-4",
                                      "--lr-warmup-iters",
                                      "3",
                                      "--adam-eps",
                                      "1e-6"};
    if (kScalesLoss) flags.insert(flags.end(), {"--loss-scale", "1024"});
    return options_of(layout, data, flags);
}

// What a run computed: losses and norms of every iteration (both in double), initial and final weights, the last
// gradients before clipping.
struct Outcome {
    std::vector<double> losses, norms;
    Tensors initial, weights, gradients;
    // The tensors by the prefix of their names in a file
    std::vector<std::pair<std::string, Tensors*>> parts() {
        return {{"initial ", &initial}, {"weight ", &weights}, {"gradient ", &gradients}};
    }
};

Tensors gather(Trainer& trainer, const float* flat) {
    Tensors tensors;
    gather_parameters(trainer.grid, trainer.gpt, flat,
                      [&](const Parameter& p, const std::vector<float>& values) { tensors[p.name] = values; });
    return tensors;
}

uint64_t hash(Device& device, const real* data, size_t count) {
    uint64_t sum = 1469598103934665603ull;
    for (real value : to_vector(device, data, count)) {
        uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof value);
        sum = (sum ^ bits) * 1099511628211ull;
    }
    return sum;
}

// Weights bitwise equal across data parallel replicas; the tied embedding bitwise equal on first and last stage.
void check_replicas(Trainer& trainer) {
    const Grid& grid = trainer.grid;
    Device& device = trainer.gpt.device;
    uint64_t mine[2] = {hash(device, trainer.gpt.used_weights(), trainer.gpt.weights.size), 0};
    for (const Parameter& p : trainer.gpt.parameters)
        if (p.index == 0) mine[1] = hash(device, trainer.gpt.used_weights() + p.offset, p.local_size());
    std::vector<uint64_t> all(2 * grid.world_size);
    MPI_FINISH(MPI_Iallgather, mine, 2, MPI_UINT64_T, all.data(), 2, MPI_UINT64_T, MPI_COMM_WORLD);
    for (int d = 0; d < grid.d; ++d) {
        const int replica = grid.rank_of(grid.t_rank, d, grid.p_rank);
        REQUIRE(all[2 * replica] == mine[0]);
        const int first = grid.rank_of(grid.t_rank, d, 0), last = grid.rank_of(grid.t_rank, d, grid.p - 1);
        REQUIRE(all[2 * first + 1] == all[2 * last + 1]);
        REQUIRE(all[2 * first + 1] != 0);
    }
}

// Counted traffic equals the paper's formulas, and activations in flight the schedule's.
void check_counts(const Options& o, Trainer& trainer) {
    const Grid& grid = trainer.grid;
    double parameters = 0;
    for (const Parameter& p : trainer.gpt.parameters) parameters += double(p.padded);
    const double n = double(trainer.measured.iterations());
    const double local[] = {trainer.measured.bytes.tensor / n,
                            trainer.measured.bytes.pipeline / n,
                            trainer.measured.bytes.embedding / n,
                            trainer.measured.bytes.data / n,
                            parameters,
                            trainer.measured.flops / n};
    double total[6];
    MPI_FINISH(MPI_Iallreduce, local, total, 6, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    const FormulaBytes formula = formula_bytes(o, grid, total[4]);
    REQUIRE(total[0] == doctest::Approx(formula.layers + formula.vocabulary + formula.gather).epsilon(1e-12));
    REQUIRE(total[1] == doctest::Approx(formula.pipeline).epsilon(1e-12));
    REQUIRE(total[2] == doctest::Approx(formula.embedding).epsilon(1e-12));
    if (o.use_distributed_optimizer)
        REQUIRE(total[3] == doctest::Approx(formula.data).epsilon(1e-12));
    else  // a bucket is cut evenly over d, its padding goes with it
        REQUIRE(total[3] == doctest::Approx(formula.data).epsilon(1e-3));
    // The padded vocabulary is computed too
    Options padded = o;
    padded.vocab_size = (o.vocab_size + grid.t - 1) / grid.t * grid.t;
    REQUIRE(total[5] == doctest::Approx(iteration_flops(padded)).epsilon(1e-12));
    REQUIRE(trainer.executor.peak_slots == in_flight_formula(schedule_kind(o.schedule), grid.p, grid.p_rank,
                                                             int(o.virtual_pipeline_size), int(o.num_microbatches)));
    REQUIRE(trainer.executor.peak_slots ==
            pipeline_needs(trainer.training.schedule, trainer.training.program, grid.p_rank).slots);
}

Outcome run_layout(const Layout& layout, const std::string& data_path) {
    Options o = matrix_options(layout, data_path);
    const auto grid = make_grid(layout.t, layout.d, layout.p);
    const Dataset data = open_dataset(o);
    Device device;
    LogFile log;
    Trainer trainer(o, *grid, data, device, log);
    Outcome outcome;
    outcome.initial = gather(trainer, trainer.gpt.weights.data);
    for (int i = 0; i < iterations(); ++i) {
        if (i == iterations() - 1)
            trainer.before_step = [&] { outcome.gradients = gather(trainer, trainer.gpt.gradients.data); };
        const Trainer::Result result = trainer.train_iteration();
        outcome.losses.push_back(result.loss);
        outcome.norms.push_back(result.gradient_norm);
        check_replicas(trainer);
    }
    check_counts(o, trainer);
    trainer.optimizer.gather_weights();
    outcome.weights = gather(trainer, trainer.gpt.weights.data);
    return outcome;
}

void save(const std::string& path, Outcome& outcome) {
    SafeTensorsWriter writer;
    writer.add("losses", {int64_t(outcome.losses.size())}, outcome.losses);
    writer.add("norms", {int64_t(outcome.norms.size())}, outcome.norms);
    for (const auto& [prefix, tensors] : outcome.parts())
        for (const auto& [name, values] : *tensors) writer.add(prefix + name, {int64_t(values.size())}, values);
    writer.write(path);
}
Outcome load(const std::string& path) {
    const SafeTensorsFile file(path);
    Outcome outcome;
    auto doubles = [&](const char* name) {
        const SafeTensor& tensor = file.at(name);
        std::vector<double> values(tensor.bytes / sizeof(double));
        std::memcpy(values.data(), tensor.data, tensor.bytes);
        return values;
    };
    outcome.losses = doubles("losses");
    outcome.norms = doubles("norms");
    for (const auto& [prefix, tensors] : outcome.parts())
        for (const auto& [name, tensor] : file.tensors)
            if (name.rfind(prefix, 0) == 0) (*tensors)[name.substr(prefix.size())] = tensor.floats();
    return outcome;
}

bool bitwise_equal(const Tensors& x, const Tensors& y) {
    if (x.size() != y.size()) return false;
    for (const auto& [name, values] : x) {
        const auto found = y.find(name);
        if (found == y.end() || found->second.size() != values.size() ||
            std::memcmp(found->second.data(), values.data(), values.size() * sizeof(float)) != 0)
            return false;
    }
    return true;
}

void make_text(const std::string& path) {
    std::string text;
    for (int i = 0; i < 8 * 400 + 1; ++i) text += char(philox(i, 1, 2, 3, 4).word[0] % 101);
    write_file(path, text);
}

}  // namespace

// Runs the layouts in $PTDP_DIR/layouts on this world. The first outcome of a bitwise key is kept in a file; layouts of
// the same key, in this or a later world, must equal it bitwise; all must be within bounds of one process.
TEST_CASE("worker: layouts" * doctest::skip()) {
    const std::string dir = std::getenv("PTDP_DIR");
    std::ifstream list(dir + "/layouts");
    choose_threads();
    int rank = 0, ranks = 0;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    double worst_loss = 0, worst_norm = 0, worst_gradient = 0, worst_weight = 0;
    int count = 0, bitwise = 0, left = 0;
    for (Layout layout; list >> layout;) {
        if (layout.ranks() != ranks) continue;
        int late = std::getenv("PTDP_DEADLINE") && time(nullptr) > std::atol(std::getenv("PTDP_DEADLINE"));
        MPI_FINISH(MPI_Ibcast, &late, 1, MPI_INT, 0, MPI_COMM_WORLD);
        left += late;
        if (late) continue;
        CAPTURE(layout.text());
        const double start = now();
        Outcome outcome = run_layout(layout, dir + "/text");
        ++count;
        if (std::getenv("PTDP_VERBOSE") && rank == 0) std::printf("%s: %.1f s\n", layout.text().c_str(), now() - start);
        if (rank != 0) continue;
        const std::string reference = dir + "/reference", same = dir + "/" + layout.bitwise_key();
        if (access(reference.c_str(), R_OK) != 0) save(reference, outcome);
        const Outcome expected = load(reference);
        REQUIRE(bitwise_equal(outcome.initial, expected.initial));
        REQUIRE(outcome.losses.size() == expected.losses.size());
        double loss = 0, norm = 0;
        for (size_t i = 0; i < outcome.losses.size(); ++i) {
            loss = std::max(loss, relative_difference(outcome.losses[i], expected.losses[i]));
            norm = std::max(norm, relative_difference(outcome.norms[i], expected.norms[i]));
        }
        double gradient = 0, weight = 0;  // shares of the bound
        if (kMixed) {                     // the weights after a step of Adam, which is all sign, say nothing more
            gradient = worst_distance(outcome.gradients, expected.gradients) / mixed_bound(kLayers);
            CHECK(loss <= kRoundoff);
            CHECK(norm <= kRoundoff);
        } else {
            gradient = worst_difference(outcome.gradients, expected.gradients);
            weight = worst_difference(outcome.weights, expected.weights);
            CHECK(loss <= kLossBound);
            CHECK(norm <= kNormBound);
        }
        CHECK(gradient <= 1);
        CHECK(weight <= 1);
        worst_loss = std::max(worst_loss, loss);
        worst_norm = std::max(worst_norm, norm);
        worst_gradient = std::max(worst_gradient, gradient);
        worst_weight = std::max(worst_weight, weight);
        if (access(same.c_str(), R_OK) != 0) {
            save(same, outcome);
        } else {
            const Outcome twin = load(same);
            CHECK(outcome.losses == twin.losses);
            CHECK(outcome.norms == twin.norms);
            CHECK(bitwise_equal(outcome.gradients, twin.gradients));
            CHECK(bitwise_equal(outcome.weights, twin.weights));
            ++bitwise;
        }
    }
    if (rank == 0 && left > 0) std::printf("%d ranks: %d layouts stopped at the time limit\n", ranks, left);
    if (rank == 0)
        std::printf(
            "%d ranks: %d layouts (%d compared bitwise); largest differences from one process: loss %.2g, norm %.2g "
            "(relative), gradients %.2g and weights %.2g of the bound\n",
            ranks, count, bitwise, worst_loss, worst_norm, worst_gradient, worst_weight);
    CHECK(count + left > 0);
}

namespace {
// Every layout in a world of its size. share: the part of the time left that they may use, if there is a deadline; the
// worlds divide it by the processes that they start.
void run_worlds(const TempDir& dir, const std::vector<Layout>& layouts, int limit, double share = 1,
                const std::vector<std::string>& environment = {}) {
    std::string list;
    std::map<int, double> worlds;  // processes by size
    double processes = 0;
    for (const Layout& layout : layouts) {
        list += layout.text() + "\n";
        worlds[layout.ranks()] += layout.ranks();
        processes += layout.ranks();
    }
    const double end = share * seconds_left();
    const double begin = double(time(nullptr));
    write_file(dir.file("layouts"), list);
    std::vector<std::string> with_dir = environment;
    with_dir.push_back("PTDP_DIR=" + dir.path.string());
    with_dir.push_back("OMP_NUM_THREADS=1");  // a second thread would spin, at the cost of whoever else needs the core
    for (const auto& world : worlds) {
        const int ranks = world.first;
        CAPTURE(ranks);
        std::vector<std::string> all = with_dir;
        const double moment = double(time(nullptr)), left = std::max(0.0, begin + end - moment);
        all.push_back("PTDP_DEADLINE=" + std::to_string(int64_t(moment + left * world.second / processes)));
        processes -= world.second;
        const RunResult result = mpirun_self(ranks, "worker: layouts", all, limit);
        CHECK_MESSAGE(result.status == 0, result.output);
        std::istringstream lines(result.output);
        for (std::string line; std::getline(lines, line);)
            if (line.find(" ranks: ") != std::string::npos) std::printf("%s\n", line.c_str());
    }
}
}  // namespace

TEST_CASE("the layout matrix: every layout computes the run of one process") {
    TempDir dir;
    make_text(dir.file("text"));
    std::vector<Layout> all;
    for (int ranks : {1, 2, 3, 4, 6, 8})
        for (const Layout& layout : all_layouts(ranks)) all.push_back(layout);
    std::vector<Layout> chosen = full_tests() ? all : pairwise(all);
    // One process first, and for every (t, d, b) the layout without a pipeline that others must equal bitwise
    std::vector<Layout> base = {Layout{}};
    for (const Layout& layout : chosen) {
        Layout flat = layout;
        flat.p = flat.v = flat.scatter = 1;
        flat.schedule = "1f1b";
        flat.recompute = 0;
        base.push_back(flat);
    }
    std::vector<Layout> list;
    std::set<std::string> seen;
    for (const auto* layouts : {&base, &chosen})
        for (const Layout& layout : *layouts)
            if (seen.insert(layout.text()).second) list.push_back(layout);
    std::printf("the layout matrix: %zu of %zu layouts, and %zu to compare with\n", chosen.size(), all.size(),
                list.size() - chosen.size());
    std::fflush(stdout);
    run_worlds(dir, list, full_tests() ? 3000 : 900, 0.6);
}

TEST_CASE("20 iterations: every t, and every schedule of p = 2, 3, 4, compute the run of one process" *
          doctest::skip(kMixed)) {
    TempDir dir;
    make_text(dir.file("text"));
    std::vector<Layout> layouts = {Layout{}};
    for (int t : {2, 3, 4, 6, 8}) layouts.push_back({1, t, 1, 1, "1f1b", 1, 1, 0, 0});
    // Microbatches (m = 24 / b) down to fewer than ranks, bitwise against one process with the same
    for (int b : {1, 12, 24}) {
        layouts.push_back({1, 1, 1, 1, "1f1b", b, 1, 0, 0});
        for (int p : {2, 3, 4}) {
            for (const char* schedule : {"gpipe", "1f1b"}) layouts.push_back({p, 1, 1, 1, schedule, b, 1, 0, 0});
            if (b == 1)
                for (int v : {2, 3})
                    if (kLayers % (p * v) == 0) layouts.push_back({p, 1, 1, v, "interleaved", b, 1, 0, 0});
        }
    }
    // Pipeline times tensor, with scatter/gather and without
    for (const auto& [p, t] : std::vector<std::pair<int, int>>{{2, 2}, {2, 4}, {4, 2}})
        for (int scatter : {1, 0}) layouts.push_back({p, t, 1, 1, "1f1b", 1, scatter, 0, 0});
    run_worlds(dir, layouts, 600, 0.6, {kSanitized ? "PTDP_ITERATIONS=2" : "PTDP_ITERATIONS=20"});
}

TEST_CASE("no hang and no difference with random delays and with messages that block" * doctest::skip(kMixed)) {
    TempDir dir;
    make_text(dir.file("text"));
    run_worlds(dir, {Layout{}, {1, 2, 1, 1, "1f1b", 1, 1, 0, 0}}, 120, 1, {"PTDP_ITERATIONS=2"});
    const std::vector<Layout> layouts = {{2, 1, 1, 1, "1f1b", 1, 1, 0, 0},
                                         {2, 2, 1, 3, "interleaved", 1, 1, 0, 0},
                                         {4, 1, 1, 2, "interleaved", 1, 1, 0, 0},
                                         {3, 1, 1, 1, "gpipe", 1, 1, 0, 0}};
    const int seeds = full_tests() ? 50 : 5;
    for (int seed = 1; seed <= seeds; ++seed) {
        if (seconds_left() == 0) {
            std::printf("random delays: %d of %d seeds stopped at the time limit\n", seeds - seed + 1, seeds);
            break;
        }
        for (const char* rendezvous : {"0", "1"}) {
            CAPTURE(seed);
            CAPTURE(rendezvous);
            std::vector<Layout> one = {layouts[seed % layouts.size()]};
            run_worlds(dir, one, 120, 1,
                       {"PTDP_DELAY_SEED=" + std::to_string(seed), std::string("PTDP_RENDEZVOUS=") + rendezvous,
                        "PTDP_ITERATIONS=2"});
        }
    }
}

// An infinity in one rank's gradients: all ranks skip that step alike, and the next ones are as if it had not been.
TEST_CASE("worker: infinity" * doctest::skip()) {
    choose_threads();
    std::istringstream words(std::getenv("PTDP_LAYOUT"));
    Layout layout;
    words >> layout;
    Options o = options_of(layout, std::string(std::getenv("PTDP_DIR")) + "/text",
                           {"--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length",
                            "8", "--vocab-size", "101", "--global-batch-size", "8", "--initial-loss-scale", "1024"});
    const auto grid = make_grid(layout.t, layout.d, layout.p);
    const Dataset data = open_dataset(o);
    Device device;
    LogFile log;
    Trainer trainer(o, *grid, data, device, log);
    auto weights = [&] {
        trainer.optimizer.gather_weights();
        return to_vector(device, trainer.gpt.weights.data, trainer.gpt.weights.size);
    };
    CHECK(!trainer.train_iteration().skipped);
    for (int victim : {0, grid->world_size - 1}) {
        const std::vector<float> before = weights();
        const double scale = trainer.loss_scale.scale;
        const int64_t steps = trainer.optimizer.step_count;
        const float infinity = std::numeric_limits<float>::infinity();
        // Gradients accumulate: what lies there before the iteration is summed with the rest
        if (grid->world_rank == victim)
            to_device(device, trainer.gpt.gradients.data + trainer.gpt.parameters[4].offset, &infinity, 1);
        const Trainer::Result result = trainer.train_iteration();
        CHECK(result.skipped);
        CHECK(is_finite(result.loss));
        CHECK(!is_finite(result.gradient_norm));
        CHECK(trainer.loss_scale.scale == scale / 2);
        CHECK(trainer.optimizer.step_count == steps);
        CHECK(weights() == before);
        const Trainer::Result next = trainer.train_iteration();
        CHECK(!next.skipped);
        CHECK(is_finite(next.loss));
        CHECK(is_finite(next.gradient_norm));
        CHECK(weights() != before);
    }
}

TEST_CASE("fp16: an infinity in one rank's gradient makes every rank skip the step" * doctest::skip(!kScalesLoss)) {
    TempDir dir;
    make_text(dir.file("text"));
    for (const Layout& layout : std::vector<Layout>{{1, 1, 1, 1, "1f1b", 2, 1, 0, 0},
                                                    {2, 2, 1, 1, "1f1b", 2, 1, 0, 0},
                                                    {1, 2, 2, 1, "1f1b", 2, 1, 0, 1},
                                                    {2, 2, 2, 2, "interleaved", 1, 1, 0, 0}}) {
        CAPTURE(layout.text());
        const RunResult result = mpirun_self(layout.ranks(), "worker: infinity",
                                             {"PTDP_DIR=" + dir.path.string(), "PTDP_LAYOUT=" + layout.text()}, 60);
        CHECK_MESSAGE(result.status == 0, result.output);
    }
}

// Loads the batches of two epochs and counts how often each window was read by all data parallel ranks together.
TEST_CASE("worker: epochs" * doctest::skip()) {
    int d = 0;
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &d));
    choose_threads();
    Layout layout;
    layout.d = d;
    Options o = options_of(layout, std::string(std::getenv("PTDP_DIR")) + "/text",
                           {"--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length",
                            "8", "--global-batch-size", "8", "--split", "8,1,1"});
    const auto grid = make_grid(1, d, 1);
    const Dataset data = open_dataset(o);
    const int64_t n = data.training_windows(), B = o.global_batch_size;
    REQUIRE(n % B == 0);
    Device device;
    LogFile log;
    Trainer trainer(o, *grid, data, device, log);
    std::vector<int> orders[2];
    for (int epoch = 0; epoch < 2; ++epoch) {
        std::vector<int> reads(n, 0), order(n, 0);
        for (int64_t step = 0; step < n / B; ++step) {
            const int64_t first = epoch * n + step * B;
            trainer.load_batch([&](int64_t k) {
                const int64_t window = data.training_window(first + k);
                ++reads.at(window);
                order[step * B + k] = int(window);
                return data.window(window);
            });
        }
        MPI_FINISH(MPI_Iallreduce, MPI_IN_PLACE, reads.data(), int(n), MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        CHECK(std::all_of(reads.begin(), reads.end(), [](int times) { return times == 1; }));
        MPI_FINISH(MPI_Iallreduce, MPI_IN_PLACE, order.data(), int(n), MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        CHECK(!std::is_sorted(order.begin(), order.end()));
        orders[epoch] = order;
    }
    CHECK(orders[0] != orders[1]);
}

TEST_CASE("an epoch reads every training window exactly once, for d = 1, 2, 4" * doctest::skip(kMixed)) {
    TempDir dir;
    make_text(dir.file("text"));
    for (int d : {1, 2, 4}) {
        CAPTURE(d);
        const RunResult result = mpirun_self(d, "worker: epochs", {"PTDP_DIR=" + dir.path.string()});
        CHECK_MESSAGE(result.status == 0, result.output);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Values made with Hugging Face GPT-2 in float64 (tests/golden)

TEST_CASE("worker: golden" * doctest::skip()) {
    choose_threads();
    std::istringstream words(std::getenv("PTDP_LAYOUT"));
    Layout layout;
    std::string path;
    words >> layout >> path;
    const SafeTensorsFile file(path);
    auto number = [&](const char* name) { return nlohmann::json::parse(file.metadata.at(name)); };
    auto text = [&](const char* name) { return number(name).dump(); };
    const std::string data_path = std::string(std::getenv("PTDP_DIR")) + "/text";
    Options o = options_of(layout, data_path,
                           {"--num-layers",
                            text("layers"),
                            "--hidden-size",
                            text("hidden"),
                            "--num-attention-heads",
                            text("heads"),
                            "--seq-length",
                            text("sequence"),
                            "--vocab-size",
                            text("vocab"),
                            "--global-batch-size",
                            text("batch"),
                            "--lr",
                            "3e-4",
                            "--hidden-dropout",
                            "0",
                            "--attention-dropout",
                            "0",
                            "--weight-decay",
                            "0.01"});
    const auto grid = make_grid(layout.t, layout.d, layout.p);
    const Dataset data = open_dataset(o);
    Device device;
    LogFile log;
    Trainer trainer(o, *grid, data, device, log);
    Gpt& gpt = trainer.gpt;

    std::vector<size_t> offsets = {0};
    for (const Parameter& p : gpt_parameters(gpt.config)) offsets.push_back(offsets.back() + p.rows * p.cols);
    auto tensors_of = [&](const char* name) {
        const std::vector<float> flat = file.at(name).floats();
        REQUIRE(flat.size() == offsets.back());
        Tensors tensors;
        for (const Parameter& p : gpt_parameters(gpt.config))
            tensors[p.name].assign(flat.begin() + offsets[p.index], flat.begin() + offsets[p.index + 1]);
        return tensors;
    };
    const Tensors weights = tensors_of("weight"), gradients = tensors_of("grad"), after = tensors_of("after");
    // The weights come in as any Hugging Face model's do
    const std::string hf = std::string(std::getenv("PTDP_DIR")) + "/hf";
    if (grid->world_rank == 0) {
        std::filesystem::create_directories(hf);
        SafeTensorsWriter writer;
        for (const Parameter& p : gpt_parameters(gpt.config))
            writer.add("transformer." + p.name, p.shape(), weights.at(p.name));
        writer.write(hf + "/model.safetensors");
    }
    MPI_FINISH(MPI_Ibarrier, MPI_COMM_WORLD);
    load_hf(HfModel(hf, hf_tensors(gpt.config)), gpt);
    const std::vector<int32_t> tokens = file.at("tokens").ints();
    const int64_t s = o.seq_length, b = o.micro_batch_size, V = o.vocab_size;
    auto window = [&](int64_t k) {
        return std::vector<int32_t>(tokens.begin() + k * (s + 1), tokens.begin() + (k + 1) * (s + 1));
    };

    // Logits of every microbatch
    const std::vector<float> logits = file.at("logits").floats();
    double largest = 0, worst_logit = 0;
    for (float x : logits) largest = std::max(largest, double(std::abs(x)));
    int64_t rows_checked = 0;
    const int64_t columns = gpt.shape.local_vocab;
    DeviceBuffer<real> all(grid->t * s * b * columns);
    trainer.load_batch(window);
    PipelineCallbacks callbacks;
    callbacks.microbatch = [&](int i) { return trainer.microbatch(i, false); };
    callbacks.head = [&](const Microbatch& mb, real* x) {
        head_forward(trainer.gpt, x, mb.rows());
        all_gather(device, trainer.gpt.tensor, gpt.work.logits, all.data, mb.rows() * columns);
        const std::vector<real> ours = to_vector(device, all.data, all.size);
        for (int64_t row = 0; row < mb.rows(); ++row, ++rows_checked)
            for (int64_t token = 0; token < V; ++token) {
                const float x_ours = ours[(token / columns * mb.rows() + row) * columns + token % columns];
                const float x_theirs = logits[((mb.first_sample + row % b) * s + row / b) * V + token];
                worst_logit = std::max(worst_logit, double(std::abs(x_ours - x_theirs)));
            }
    };
    trainer.executor.run(trainer.evaluation.schedule, trainer.evaluation.program, callbacks, false);
    if (grid->last_stage()) {
        CHECK(rows_checked == o.num_microbatches * s * b);
        CHECK(worst_logit <= kLogitBound * largest);
    }

    // Losses and norms of five steps, the first gradient, the weights at the end
    const nlohmann::json losses = number("losses"), norms = number("grad_norms");
    Tensors allowance;
    for (int step = 0; step < number("steps").get<int>(); ++step) {
        o.dump = step == 0 ? std::getenv("PTDP_DIR") : "";  // the trainer dumps at the last iteration
        o.train_iters = step == 0 ? 1 : 100;
        const Trainer::Result result = trainer.train_on(window);
        CHECK(relative_difference(result.loss, losses[step]) <= kLossBound);
        CHECK(relative_difference(result.gradient_norm, norms[step]) <= kNormBound);
        add_adam_noise(gradients, gradients, o.global_batch_size * s, result.lr,
                       allowance);  // the first step's stand for all
    }
    const Tensors ours = gather(trainer, gpt.weights.data);
    if (grid->world_rank == 0) {
        CHECK(worst_difference(ours, after, allowance) <= 1);
        const SafeTensorsFile dumped(std::string(std::getenv("PTDP_DIR")) + "/dump.safetensors");
        Tensors dumped_gradients;
        for (const auto& [name, values] : gradients) dumped_gradients[name] = dumped.at("gradient." + name).floats();
        CHECK(worst_difference(dumped_gradients, gradients) <= 1);
    }
}

namespace {
void check_golden(const std::string& file, const Layout& layout) {
    TempDir dir;
    make_text(dir.file("text"));
    CAPTURE(layout.text());
    const RunResult result =
        mpirun_self(layout.ranks(), "worker: golden",
                    {"PTDP_DIR=" + dir.path.string(), "PTDP_LAYOUT=" + layout.text() + " tests/golden/" + file}, 120);
    CHECK_MESSAGE(result.status == 0, result.output);
}
}  // namespace

TEST_CASE("Hugging Face GPT-2's values, small model, one process" * doctest::skip(kMixed)) {
    for (int b : {1, 3}) check_golden("small.safetensors", {1, 1, 1, 1, "1f1b", b, 1, 0, 0});
}
TEST_CASE("Hugging Face GPT-2's values, wide model, t = 1, 2, 3, 4, 6, 8" * doctest::skip(kMixed)) {
    for (int t : {1, 2, 3, 4, 6, 8}) check_golden("wide.safetensors", {1, t, 1, 1, "1f1b", 4, 1, 0, 0});
}
TEST_CASE("Hugging Face GPT-2's values, wide model, composed layouts" * doctest::skip(kMixed)) {
    for (const Layout& layout : std::vector<Layout>{{2, 1, 1, 1, "1f1b", 1, 1, 0, 0},
                                                    {2, 1, 1, 2, "interleaved", 1, 1, 0, 0},
                                                    {4, 1, 1, 1, "gpipe", 2, 1, 0, 0},
                                                    {1, 1, 4, 1, "1f1b", 1, 1, 0, 1},
                                                    {2, 2, 2, 2, "interleaved", 1, 1, 1, 1},
                                                    {2, 2, 2, 1, "1f1b", 2, 0, 0, 0},
                                                    {4, 2, 1, 2, "interleaved", 1, 1, 1, 0},
                                                    {2, 3, 1, 1, "1f1b", 1, 1, 0, 0}})
        check_golden("wide.safetensors", layout);
}

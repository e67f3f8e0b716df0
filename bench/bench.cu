// make bench: how fast this machine trains, as shares of its own GEMM peak and as ratios taken in one run.
//
// Without arguments it runs itself, once per configuration, and prints tables: one process on one core and on all;
// tensor, pipeline and all 8-rank layouts against one process with every core; what recomputation costs; bf16 against
// fp32 (BF16_BENCH names this program's bf16 build). With
// arguments, which are those of ./train, it is such a run: it trains --train-iters iterations on random tokens after
// one that is not timed, and rank 0 prints a line of JSON.
//
// Rules kept here: medians of iterations (forward, backward, optimizer); the FLOPs of a run are eq. 3's; the peak is
// the best of several 2048^3 products before and after the iterations, by the same process with the same threads.
#define main train_main  // this program's main is below
#include "train.cu"
#undef main

#include <omp.h>

#include "tests/process.h"

namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

// ---------------------------------------------------------------------------------------------------------------------
// One configuration

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

// The best of `rounds` products of 2048^3, in FLOP/s.
double gemm_peak(Device& device, int rounds) {
    constexpr int64_t n = 2048;
    DeviceBuffer<real> a(n * n), b(n * n), c(n * n);
    double best = 0;
    for (int i = 0; i < rounds; ++i) {
        CUDA_CHECK(cudaStreamSynchronize(device.stream));
        const double start = now();
        gemm(device, n, n, n, {a.data, n}, {b.data, n}, c.data, n);
        CUDA_CHECK(cudaStreamSynchronize(device.stream));
        best = std::max(best, 2.0 * n * n * n / (now() - start));
    }
    return best;
}

// A configuration's run, on every rank. Prints "BENCH {...}" from rank 0.
int run_configuration(int argc, char** argv) {
    int ranks = 1;
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    std::string help;
    Options o = parse_options(argc, argv, &help);
    validate(o, ranks);
    const Dataset data = open_dataset(o);
    choose_threads();
    const auto grid =
        make_grid(int(o.tensor_model_parallel_size), int(o.data_parallel_size), int(o.pipeline_model_parallel_size));
    Device device;
    LogFile log;
    Trainer trainer(o, *grid, data, device, log);
    const double peak_before = ranks == 1 ? gemm_peak(device, 4) : 0;
    trainer.train_iteration();
    trainer.measured = Measured();
    for (int64_t i = 0; i < o.train_iters; ++i) trainer.train_iteration();
    json result = {{"seconds", median(trainer.measured.seconds)},
                   {"tokens", o.global_batch_size * o.seq_length},
                   {"flops", iteration_flops(o)}};
    if (ranks == 1) {
        result["peak"] = std::max(peak_before, gemm_peak(device, 4));
        device.profiling = true;
        trainer.train_iteration();
        result["where"] = device.seconds;
    }
    // What the operations' CPU times would give with a core for each rank
    json facts = json::array();
    for (double cpu : trainer.measured.op_cpu) facts.push_back(cpu / double(trainer.measured.iterations()));
    const std::vector<std::string> texts = gather_texts(facts.dump());
    if (grid->world_rank == 0 && grid->p > 1) {
        std::vector<std::vector<double>> cpu;
        for (int rank = 0; rank < grid->p; ++rank) cpu.push_back(json::parse(texts[grid->rank_of(0, 0, rank)]));
        const Schedule& schedule = trainer.training.schedule;
        const ReplayedBubble replayed = replayed_bubble(schedule, trainer.training.program, cpu);
        result["bubble"] = replayed.bubble;
        result["bubble_formula"] = bubble_formula(schedule.p, schedule.v, schedule.m);
        result["imbalance"] = replayed.imbalance;
    }
    if (!o.save.empty()) {
        const double start = now();
        save(o, *grid, trainer);
        const double saved = now();
        const auto checkpoint = open_checkpoint(o.save, grid->world_rank, ranks);
        const double opened = now();
        load(*checkpoint, *grid, trainer);
        const double loaded = now();
        result["save_seconds"] = saved - start;
        result["open_seconds"] = opened - saved;
        result["load_seconds"] = loaded - opened;
        double bytes = 0;
        for (const auto& file : checkpoint->files) bytes += double(file->file.size);
        result["checkpoint_bytes"] = bytes;
    }
    if (grid->world_rank == 0) std::printf("BENCH %s\n", result.dump().c_str());
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The tables

struct Bench {
    TempDir dir;
    int cores = omp_get_num_procs();

    Bench() {
        std::string tokens;
        for (uint32_t i = 0; i < 200000; ++i) tokens += char(philox(i, 1, 2, 3, 4).word[0]);
        write_file(dir.file("text"), tokens);
        // uint16 tokens below 50304, for the vocabulary of B
        std::string words;
        for (uint32_t i = 0; i < 100000; ++i) {
            const uint32_t token = philox(i, 4, 3, 2, 1).word[0] % 50304;
            words += char(token & 255);
            words += char(token >> 8);
        }
        write_file(dir.file("tokens.bin"), words);
    }

    // Runs a configuration on `ranks` ranks with `threads` threads each (0: the cores divided among the ranks).
    json run(int ranks, int threads, Words flags, double dropout, int iterations,
             const std::string& program = self_program()) {
        const bool words = std::find(flags.begin(), flags.end(), "--vocab-size") != flags.end();
        Words argv = {program, "--data-path", dir.file(words ? "tokens.bin" : "text")};
        argv.insert(argv.end(), flags.begin(), flags.end());
        const std::string p = options_detail::text(dropout);
        for (const std::string& word : Words{"--hidden-dropout", p, "--attention-dropout", p, "--train-iters",
                                             std::to_string(iterations), "--eval-iters", "0"})
            argv.push_back(word);
        Words environment = {"OMP_WAIT_POLICY=passive"};
        if (threads > 0) environment.push_back("OMP_NUM_THREADS=" + std::to_string(threads));
        const RunResult result = mpirun(ranks, argv, 600, environment);
        const size_t at = result.output.find("BENCH ");
        if (result.status != 0 || at == std::string::npos) {
            std::fprintf(stderr, "bench: a run failed with status %d:\n%s\n", result.status, result.output.c_str());
            std::exit(1);
        }
        return json::parse(result.output.substr(at + 6, result.output.find('\n', at) - at - 6));
    }
};

Words operator+(Words x, const Words& y) {
    x.insert(x.end(), y.begin(), y.end());
    return x;
}

const Words A = {"--num-layers", "6",   "--hidden-size",      "384", "--num-attention-heads", "6",
                 "--seq-length", "256", "--micro-batch-size", "8"};
const Words B = {"--num-layers", "12",  "--hidden-size",      "768", "--num-attention-heads", "12",
                 "--seq-length", "512", "--micro-batch-size", "2",   "--vocab-size",          "50304"};
const Words C = {"--num-layers", "4",   "--hidden-size",      "256", "--num-attention-heads", "4",
                 "--seq-length", "128", "--micro-batch-size", "16"};

double per_second(const json& run) { return run["tokens"].get<double>() / run["seconds"].get<double>(); }

// "gemm 70%, ...": the largest parts of a profiled iteration.
std::string where_text(const json& run) {
    std::vector<std::pair<double, std::string>> parts;
    double total = 0;
    for (const auto& [name, seconds] : run["where"].items()) {
        parts.push_back({seconds.get<double>(), name});
        total += seconds.get<double>();
    }
    std::sort(parts.rbegin(), parts.rend());
    std::string text;
    for (size_t i = 0; i < parts.size() && i < 9; ++i) {
        char part[96];
        std::snprintf(part, sizeof part, "%s%s %.1f%%", i ? ", " : "", parts[i].second.c_str(),
                      100 * parts[i].first / total);
        text += part;
    }
    return text;
}

// Every memory-bound kernel's rate against a plain copy's, [T, h] activations of one layer's size; bytes as beside the
// kernels. One process with every core, or one GPU.
void kernels(Bench& bench) {
    omp_set_num_threads(bench.cores);
    Device device;
    constexpr int64_t s = 512, b = 8, T = s * b, h = 1024, a = 4, chunks = T / kChunkRows;
    const double word = sizeof(real);
    DeviceBuffer<real> x(T * h), y(T * h), z(T * h), row(4 * h);
    DeviceBuffer<float> statistics(2 * T), partial(chunks * 2 * h), gradient(s * h), losses(T);
    DeviceBuffer<float> weight(T * h), m(T * h), v(T * h), sums(h);
    DeviceBuffer<real> used(T * h), scores(b * a * s * s), dropped(b * a * s * s);
    DeviceBuffer<double> squares(flat_grid(T * h));
    DeviceBuffer<int> tokens(T), targets(T);
    std::vector<int> ids(T);
    for (int64_t i = 0; i < T; ++i) ids[i] = int(i);
    to_device(device, tokens.data, ids.data(), ids.size());
    Group alone;
    const Dropout none = make_dropout(0, 1, 1, 0, Site::mlp_dropout, 0),
                  some = make_dropout(0.1, 1, 1, 0, Site::mlp_dropout, 0);
    auto rate = [&](double bytes, const std::function<void()>& run) {
        std::vector<double> seconds;
        for (int i = 0; i < 8; ++i) {
            CUDA_CHECK(cudaStreamSynchronize(device.stream));
            const double start = now();
            run();
            CUDA_CHECK(cudaStreamSynchronize(device.stream));
            if (i > 0) seconds.push_back(now() - start);
        }
        return bytes / median(seconds) / 1e9;
    };
    const double all = double(T * h), square = double(b * a * s * s);
    const double copy = rate(2 * word * all, [&] {
        CUDA_CHECK(cudaMemcpyAsync(y.data, x.data, T * h * sizeof(real), cudaMemcpyDeviceToDevice, device.stream));
    });
    std::printf("kernels, %s, T = %ld, h = %ld: GB/s, and share of a copy's %.1f GB/s\n", kPrecision, long(T), long(h),
                copy);
    auto line = [&](const char* name, double bytes, const std::function<void()>& run) {
        const double measured = rate(bytes, run);
        std::printf("  %-36s %8.1f  %4.0f%%\n", name, measured, 100 * measured / copy);
        std::fflush(stdout);
    };
    float *mean = statistics.data, *rstd = mean + T;
    line("layernorm forward", 2 * word * all, [&] {
        launch<layernorm_forward_kernel>(device, T, kBlock, x.data, row.data, row.data, y.data, mean, rstd, int(h),
                                         1e-5f);
    });
    line("layernorm backward", 4 * word * all, [&] {
        launch<layernorm_backward_kernel<true>>(device, chunks, kBlock, x.data, row.data, mean, rstd, y.data, z.data,
                                                partial.data, T, int(h));
    });
    line("bias addition", 2 * word * all,
         [&] { launch<add_bias_kernel>(device, T, kBlock, x.data, row.data, int(h)); });
    line("bias backward", word * all,
         [&] { launch<bias_backward_kernel>(device, chunks, kBlock, x.data, partial.data, T, int(h)); });
    line("bias + GeLU forward", 2 * word * all,
         [&] { launch<bias_gelu_forward_kernel>(device, T, kBlock, x.data, row.data, y.data, int(h)); });
    line("bias + GeLU backward", 3 * word * all, [&] {
        launch<bias_gelu_backward_kernel>(device, chunks, kBlock, x.data, row.data, y.data, partial.data, T, int(h));
    });
    for (const Dropout& dropout : {none, some}) {
        const bool drops = dropout.active();
        line(drops ? "bias + dropout + add forward" : "bias + add forward", 3 * word * all, [&] {
            launch<bias_dropout_add_forward_kernel>(device, T, kBlock, x.data, row.data, y.data, z.data, int(b), int(h),
                                                    dropout);
        });
        line(drops ? "causal softmax + dropout forward" : "causal softmax forward", (drops ? 4 : 2) * word * square,
             [&] {
                 launch<causal_softmax_forward_kernel>(device, b * a * s, kBlock, scores.data, dropped.data, int(s),
                                                       int(a), 0, 0.1f, dropout);
             });
    }
    line("causal softmax backward", 3 * word * square, [&] {
        launch<causal_softmax_backward_kernel>(device, b * a * s, kBlock, dropped.data, dropped.data, scores.data,
                                               int(s), 0.1f);
    });
    line("dropout backward", 2 * word * all,
         [&] { launch<dropout_backward_kernel>(device, T, kBlock, x.data, y.data, int(b), int(h), some); });
    line("cross-entropy, forward and backward", 4 * word * all, [&] {
        vocab_parallel_cross_entropy(device, alone, x.data, targets.data, losses.data, weight.data, T, h, 0, h, 1.0f);
    });
    line("embedding forward", 2 * word * all,
         [&] { launch<embedding_forward_kernel>(device, T, kBlock, tokens.data, x.data, y.data, 0, int(T), int(h)); });
    line("position backward", word * all,
         [&] { launch<position_backward_kernel>(device, s, kBlock, x.data, gradient.data, int(b), int(h)); });
    line("sum of squares", 4 * all,
         [&] { launch<sum_of_squares_kernel>(device, flat_grid(T * h), kBlock, m.data, squares.data, T * h); });
    line("Adam", (28 + (kMixed ? word : 0)) * all, [&] {
        launch<adam_kernel>(device, flat_grid(T * h), kBlock, weight.data, used.data, m.data, m.data, v.data, T * h,
                            1.0f, 0.9f, 0.999f, 1e-8f, 1e-4f, 1.0f, 1.0f);
    });
    std::printf("  GEMM 2048^3: %.1f GFLOP/s\n", gemm_peak(device, 4) / 1e9);
}

// The serial program on one core and on all; `python`, if not empty, can import PyTorch.
void one_process(Bench& bench, const std::string& python) {
    std::printf(
        "one process (A: l=6 h=384 a=6 s=256 b=8 V=256; B: l=12 h=768 a=12 s=512 b=2 V=50304; C: l=4 h=256 a=4 s=128 "
        "b=16 V=256)\n"
        "model cores dropout  ms/iteration  tokens/s  GFLOP/s  GEMM peak  share\n");
    const std::vector<std::tuple<const char*, Words, int>> models = {{"A", A, 7}, {"B", B, 3}, {"C", C, 30}};
    for (const auto& [name, flags, iterations] : models)
        for (int cores : bench.cores > 1 ? std::vector<int>{1, bench.cores} : std::vector<int>{1})
            for (double dropout : {0.0, 0.1}) {
                const json run = bench.run(1, cores, flags, dropout, iterations);
                const double rate = run["flops"].get<double>() / run["seconds"].get<double>(), peak = run["peak"];
                std::printf("%-5s %5d %7.1f %13.1f %9.0f %8.1f %10.1f %5.1f%%\n", name, cores, dropout,
                            1e3 * run["seconds"].get<double>(), per_second(run), rate / 1e9, peak / 1e9,
                            100 * rate / peak);
                std::printf("      %s\n", where_text(run).c_str());
                if (!python.empty()) {
                    const RunResult other =
                        run_command(Words{python, "bench/torch_gpt.py", std::to_string(cores),
                                          options_detail::text(dropout), std::to_string(iterations)} +
                                        flags,
                                    600, {"OMP_WAIT_POLICY=passive"});
                    const double seconds = std::strtod(other.output.c_str(), nullptr);
                    if (other.status == 0 && seconds > 0)
                        std::printf("      PyTorch: %.1f ms, %.1f%% of the peak; this is %.2f times as fast\n",
                                    1e3 * seconds, 100 * run["flops"].get<double>() / seconds / peak,
                                    seconds / run["seconds"].get<double>());
                    else
                        std::printf("      PyTorch failed:\n%s\n", other.output.c_str());
                }
                std::fflush(stdout);
            }
}

// Ranks that share layers or the batch's pipeline, and what recomputing activations costs.
void parallel(Bench& bench) {
    std::printf("\ntensor and pipeline parallel ranks against one process with %d threads, dropout 0\n", bench.cores);
    const json whole = bench.run(1, bench.cores, B, 0, 3);
    for (int t : {2, 6}) {
        const json run = bench.run(t, 1, B + Words{"--tp", std::to_string(t)}, 0, t == 2 ? 3 : 2);
        std::printf("  B, t = %d: %.2f of the throughput (%.0f against %.0f ms)\n", t,
                    per_second(run) / per_second(whole), 1e3 * run["seconds"].get<double>(),
                    1e3 * whole["seconds"].get<double>());
        std::fflush(stdout);
    }
    Words small = A;
    small.back() = "1";  // the microbatch
    small = small + Words{"--global-batch-size", "8"};
    const json one = bench.run(1, bench.cores, small, 0, 5), two = bench.run(2, 1, small + Words{"--pp", "2"}, 0, 5);
    const double ratio = per_second(two) / per_second(one), bubble = two["bubble_formula"];
    std::printf(
        "  A, B = 8, b = 1, p = 2: %.2f of the throughput; %.2f after the bubble (%.4f by formula, %.4f replayed from "
        "CPU "
        "times; busiest stage / mean %.3f)\n",
        ratio, ratio * (1 + bubble), bubble, two["bubble"].get<double>(), two["imbalance"].get<double>());
    for (const auto& [name, flags] : std::vector<std::pair<const char*, Words>>{{"A", A}, {"B", B}}) {
        // Taken in turns, since a machine's speed drifts
        std::vector<double> ratios;
        double by_flops = 0;
        for (int round = 0; round < 3; ++round) {
            const json plain = bench.run(1, bench.cores, flags, 0, 2),
                       again = bench.run(1, bench.cores, flags + Words{"--recompute-granularity", "full"}, 0, 2);
            ratios.push_back(again["seconds"].get<double>() / plain["seconds"].get<double>());
            by_flops = again["flops"].get<double>() / plain["flops"].get<double>();
        }
        std::printf("  %s, recomputation: %.3f times as long; by FLOPs %.3f\n", name, median(ratios), by_flops);
        std::fflush(stdout);
    }
}

void eight_ranks(Bench& bench) {
    const Words job = {"--config", "examples/kjv.cfg", "--lr-warmup-iters", "1", "--generate", "0"};
    const Words flat = {"--tp", "1", "--pp", "1", "--vp", "1"};
    const json one = bench.run(1, bench.cores, job + flat, 0, 5);
    std::printf(
        "\nthe main job's model (examples/kjv.cfg) on 8 ranks against one process with %d threads (%.0f ms)\n"
        "  t  p  d  v  ms/iteration  throughput\n",
        bench.cores, 1e3 * one["seconds"].get<double>());
    for (int t : {1, 2})
        for (int p : {1, 2, 4})
            for (int v : {1, 2}) {
                const int d = 8 / (t * p);
                if ((v > 1 && (p == 1 || 4 % (p * v) != 0)) || 32 % (4 * d) != 0 || (v > 1 && 32 / (4 * d) % p != 0))
                    continue;
                const json run = bench.run(
                    8, 1, job + Words{"--tp", std::to_string(t), "--pp", std::to_string(p), "--vp", std::to_string(v)},
                    0, 5);
                std::printf("  %d  %d  %d  %d %13.0f %11.2f\n", t, p, d, v, 1e3 * run["seconds"].get<double>(),
                            per_second(run) / per_second(one));
                std::fflush(stdout);
            }
}

// What `plan --this-machine` predicts of small layouts, beside what they take; `program` is that program.
void predictions(Bench& bench, const std::string& program) {
    struct Case {
        int t, p, d, v, b;
        bool recompute;
    };
    std::printf(
        "\n./plan --this-machine against ./train: l=4 h=512 a=8 s=256 V=256, B=16, dropout 0\n"
        "  t  p  d  v  b  recompute  predicted ms  measured ms  ratio\n");
    for (const Case& c : std::vector<Case>{{1, 1, 1, 1, 1, false},
                                           {1, 1, 1, 1, 4, false},
                                           {1, 1, 1, 1, 4, true},
                                           {2, 1, 1, 1, 2, false},
                                           {1, 2, 1, 1, 2, false},
                                           {1, 2, 1, 2, 2, false},
                                           {1, 1, 2, 1, 2, false},
                                           {2, 2, 1, 1, 2, false},
                                           {1, 2, 2, 1, 2, false}}) {
        const int ranks = c.t * c.p * c.d;
        if (ranks > bench.cores) continue;
        const Words model = {"--num-layers",
                             "4",
                             "--hidden-size",
                             "512",
                             "--num-attention-heads",
                             "8",
                             "--seq-length",
                             "256",
                             "--global-batch-size",
                             "16",
                             "--micro-batch-size",
                             std::to_string(c.b),
                             "--tp",
                             std::to_string(c.t),
                             "--pp",
                             std::to_string(c.p),
                             "--vp",
                             std::to_string(c.v)};
        const RunResult planned =
            mpirun(ranks,
                   Words{program, "--this-machine", "--json", "--dp", std::to_string(c.d), "--vocab-size", "256",
                         "--recompute-granularity", c.recompute ? "full" : "none"} +
                       model,
                   120, {"OMP_WAIT_POLICY=passive", "OMP_NUM_THREADS=1"});
        if (planned.status != 0) {
            std::fprintf(stderr, "bench: plan failed with status %d:\n%s\n", planned.status, planned.output.c_str());
            std::exit(1);
        }
        const double predicted = json::parse(planned.output)["iteration_seconds"];
        const json run =
            bench.run(ranks, 1, model + (c.recompute ? Words{"--recompute-granularity", "full"} : Words{}), 0, 2);
        const double measured = run["seconds"];
        std::printf("  %d  %d  %d  %d  %d  %-9s %13.0f %12.0f %6.2f\n", c.t, c.p, c.d, c.v, c.b,
                    c.recompute ? "yes" : "no", 1e3 * predicted, 1e3 * measured, predicted / measured);
        std::fflush(stdout);
    }
}

// bf16 against fp32, taken in turns; `program` is this program's bf16 build.
void precision(Bench& bench, const std::string& program) {
    std::printf("\nbf16 against fp32, dropout 0 (GEMM peaks in GFLOP/s)\n");
    for (const auto& [name, flags] : std::vector<std::pair<const char*, Words>>{{"A", A}, {"B", B}})
        for (int cores : bench.cores > 1 ? std::vector<int>{1, bench.cores} : std::vector<int>{1}) {
            std::vector<double> ratios;
            double peak = 0, narrow_peak = 0;
            for (int round = 0; round < 3; ++round) {
                const json wide = bench.run(1, cores, flags, 0, 2), narrow = bench.run(1, cores, flags, 0, 2, program);
                ratios.push_back(wide["seconds"].get<double>() / narrow["seconds"].get<double>());
                peak = std::max(peak, wide["peak"].get<double>());
                narrow_peak = std::max(narrow_peak, narrow["peak"].get<double>());
            }
            std::printf("  %s, %d core(s): %.2f times as fast (peaks %.0f and %.0f)\n", name, cores, median(ratios),
                        narrow_peak / 1e9, peak / 1e9);
            std::fflush(stdout);
        }
}

// Saving against dd, which writes as many bytes to the same directory and flushes them; loading, with the checksums.
void checkpoints(Bench& bench) {
    const Words model = {"--num-layers", "6",  "--hidden-size",      "768", "--num-attention-heads", "12",
                         "--seq-length", "64", "--micro-batch-size", "1",   "--vocab-size",          "50304"};
    std::printf("\ncheckpoints in %s\n", bench.dir.path.c_str());
    for (int ranks : {1, 2}) {
        std::vector<double> ratios, save, dd, open, load;
        double bytes = 0;
        for (int round = 0; round < 3; ++round) {
            const json run = bench.run(
                ranks, 1, model + Words{"--tp", std::to_string(ranks), "--save", bench.dir.file("saved")}, 0, 1);
            bytes = run["checkpoint_bytes"];
            const RunResult plain = run_command(
                {"dd", "if=/dev/zero", "of=" + bench.dir.file("dd" + std::to_string(ranks) + std::to_string(round)),
                 "bs=1M", "count=" + std::to_string(int64_t(bytes) >> 20), "conv=fsync"},
                300);
            save.push_back(run["save_seconds"]);
            dd.push_back(plain.seconds);
            ratios.push_back(plain.seconds / save.back());
            open.push_back(run["open_seconds"]);
            load.push_back(run["load_seconds"]);
        }
        std::printf(
            "  %d rank(s), %.2f GB: saving %.2f s, %.2f of dd's rate (%.2f s); loading %.2f GB/s, of which checksums "
            "%.0f%%\n",
            ranks, bytes / 1e9, median(save), median(ratios), median(dd), bytes / 1e9 / (median(open) + median(load)),
            100 * median(open) / (median(open) + median(load)));
        std::fflush(stdout);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && argv[1][0] == '-') {
        MPI_CHECK(MPI_Init(&argc, &argv));
        MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
        int status = 2;
        if (all_succeed([&] { status = run_configuration(argc, argv); })) status = 0;
        MPI_CHECK(MPI_Finalize());
        return status;
    }
    // Which tables: all, or those named
    auto wanted = [&](const std::string& name) {
        for (int i = 1; i < argc; ++i)
            if (name == argv[i]) return true;
        return argc == 1;
    };
    Bench bench;
    const std::string python = std::getenv("PYTHON") ? std::getenv("PYTHON") : "python3";
    const bool torch = wanted("one") && run_command({python, "-c", "import torch"}, 60).status == 0;
    if (wanted("kernels")) {
        MPI_CHECK(MPI_Init(&argc, &argv));
        kernels(bench);
        MPI_CHECK(MPI_Finalize());
    }
    if (wanted("one")) one_process(bench, torch ? python : "");
    if (wanted("one") && !torch) std::printf("PyTorch cannot be imported here: no comparison with it\n");
    if (wanted("parallel")) parallel(bench);
    if (wanted("layouts")) eight_ranks(bench);
    if (wanted("checkpoints")) checkpoints(bench);
    const std::string self = self_program();
    if (wanted("plan")) predictions(bench, self.substr(0, self.rfind('/')) + "/plan");
    const char* bf16 = std::getenv("BF16_BENCH");
    if (wanted("precision") && bf16 && *bf16) precision(bench, bf16);
    return 0;
}

// Training (§5): flags, the training loop, metrics, evaluation, generation.
//
//   mpirun -np N ./train --tp T --pp P ...
//
// One iteration: every rank runs its list of forwards and backwards over the batch's microbatches (pipeline.cu),
// gradients are reduced as they become complete (data_parallel.cu), the optimizer steps. Nothing in this file knows how
// a layer is split.
//
// Rules kept here:
//   - loss is the sum over the global batch's tokens divided by their number, summed per sample and then in sample
//   order, so
//     it does not depend on the layout;
//   - a user's mistake ends every rank with status 2 and one message, before any communicator exists.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "data_parallel.cu"
#include "gpt.cu"
#include "pipeline.cu"
#include "platform/data.h"
#include "platform/grid.h"
#include "platform/log.h"
#include "platform/options.h"

// ---------------------------------------------------------------------------------------------------------------------
// What the paper's formulas say about a run

// Eq. 3: FLOPs of one iteration, all layers computed once more when recomputing; with the unpadded V.
inline double iteration_flops(const Options& o) {
    const double B = double(o.global_batch_size), s = double(o.seq_length), l = double(o.num_layers),
                 h = double(o.hidden_size), V = double(o.vocab_size);
    const bool recompute = o.recompute_granularity == "full";
    return (recompute ? 96 : 72) * B * s * l * h * h * (1 + s / (6 * h) + V / ((recompute ? 16 : 12) * l * h));
}

// ---------------------------------------------------------------------------------------------------------------------
// A microbatch's tokens

// A microbatch on the device: what the pipeline's first and last stage read.
struct Tokens {
    DeviceBuffer<int> inputs, targets, distinct, starts, positions;
    int distinct_count = 0;
};

// Uploads a microbatch from its windows, each s + 1 tokens: position i of sample j is element i b + j.
inline void upload_tokens(Device& device, const std::vector<std::vector<int32_t>>& windows, Tokens& tokens) {
    const size_t b = windows.size(), s = windows[0].size() - 1;
    std::vector<int> inputs(s * b), targets(s * b);
    for (size_t i = 0; i < s; ++i)
        for (size_t j = 0; j < b; ++j) {
            inputs[i * b + j] = windows[j][i];
            targets[i * b + j] = windows[j][i + 1];
        }
    const SortedTokens sorted = sort_tokens(inputs);
    auto upload = [&](DeviceBuffer<int>& buffer, const std::vector<int>& values) {
        if (buffer.size < values.size()) buffer = DeviceBuffer<int>(s * b + 1);
        to_device(device, buffer.data, values.data(), values.size());
    };
    upload(tokens.inputs, inputs);
    upload(tokens.targets, targets);
    upload(tokens.distinct, sorted.distinct);
    upload(tokens.starts, sorted.starts);
    upload(tokens.positions, sorted.positions);
    tokens.distinct_count = int(sorted.distinct.size());
}

// Makes a directory that a flag names, unless it is there; throws UserError.
inline void make_directory(const char* flag, const std::string& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (error || !std::filesystem::is_directory(path))
        throw UserError(std::string(flag) + " " + path + ": " + (error ? error.message() : "is not a directory"));
}

// ---------------------------------------------------------------------------------------------------------------------
// --dump: a whole tensor from its slices, whatever the layout

// The pipeline rank that holds the parameter of this index (the tied embedding: the first).
inline int pipeline_rank_of(const GptConfig& config, int p, int v, int index) {
    const int64_t layer = (index - kEmbeddingParameters) / kLayerParameters;
    if (index < kEmbeddingParameters) return 0;
    if (layer >= config.layers) return p - 1;
    return int(layer / (config.layers / (int64_t(p) * v)) % p);
}

// Copies a slice [local_rows, local_cols] to its place in the whole tensor, in Hugging Face's column order; padding is
// left out.
inline void place_slice(const Parameter& slice, const std::vector<float>& values, std::vector<float>& whole) {
    for (int64_t r = 0; r < slice.local_rows && slice.first_row + r < slice.rows; ++r)
        for (int64_t c = 0; c < slice.local_cols; ++c)
            whole[(slice.first_row + r) * slice.cols + slice.global_column(c)] = values[r * slice.local_cols + c];
}

// Calls consume(parameter, whole values) on world rank 0 for every parameter of the model, in order, given each rank's
// flat buffer (weights or gradients) on the device. Collective over the replica d_rank 0; other replicas return at
// once.
template <class F>
void gather_parameters(const Grid& grid, const Gpt& gpt, const float* flat, F consume) {
    if (grid.d_rank != 0) return;
    for (const Parameter& whole : gpt_parameters(gpt.config)) {
        const int owner = pipeline_rank_of(gpt.config, grid.p, gpt.v, whole.index);
        std::vector<float> values(grid.world_rank == 0 ? whole.rows * whole.cols : 0);
        for (int t_rank = 0; t_rank < (whole.split == Split::replicated ? 1 : grid.t); ++t_rank) {
            const int rank = grid.rank_of(t_rank, 0, owner);
            Parameter slice = whole;
            slice_parameter(slice, grid.t, t_rank);
            std::vector<float> part(slice.local_size());
            if (rank == grid.world_rank) {
                for (const Parameter& mine : gpt.parameters)
                    if (mine.index == whole.index && !mine.tied_copy)
                        to_host(gpt.device, part.data(), flat + mine.offset, part.size());
                if (rank != 0)
                    MPI_CHECK(MPI_Send(part.data(), int(part.size()), MPI_FLOAT, 0, whole.index, MPI_COMM_WORLD));
            } else if (grid.world_rank == 0) {
                MPI_CHECK(MPI_Recv(part.data(), int(part.size()), MPI_FLOAT, rank, whole.index, MPI_COMM_WORLD,
                                   MPI_STATUS_IGNORE));
            }
            if (grid.world_rank == 0) place_slice(slice, part, values);
        }
        if (grid.world_rank == 0) consume(whole, values);
    }
}

// Writes the iteration's weights, gradients (before clipping; each tensor whole, tied ones once) and loss. Collective.
inline void write_dump(const Options& o, const Grid& grid, const Gpt& gpt, double loss) {
    SafeTensorsWriter writer;
    auto shape = [](const Parameter& p) {
        return p.vector ? std::vector<int64_t>{p.cols} : std::vector<int64_t>{p.rows, p.cols};
    };
    gather_parameters(grid, gpt, gpt.weights.data, [&](const Parameter& parameter, const std::vector<float>& values) {
        writer.add(parameter.name, shape(parameter), values);
    });
    gather_parameters(grid, gpt, gpt.gradients.data, [&](const Parameter& parameter, const std::vector<float>& values) {
        writer.add("gradient." + parameter.name, shape(parameter), values);
    });
    if (grid.world_rank != 0) return;
    writer.add("loss", {1}, std::vector<double>{loss});
    try {
        writer.write(o.dump + "/dump.safetensors");
    } catch (const std::runtime_error& error) {
        fail(__FILE__, __LINE__, "write_dump", error.what());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The trainer: one rank's whole state

// std::isfinite may lie under -ffast-math, so the exponent's bits decide.
inline bool is_finite(double x) { return options_detail::finite(x); }

inline GptConfig gpt_config(const Options& o) {
    GptConfig config;
    config.layers = o.num_layers;
    config.hidden = o.hidden_size;
    config.heads = o.num_attention_heads;
    config.sequence = o.seq_length;
    config.vocab = o.vocab_size;
    config.hidden_dropout = o.hidden_dropout;
    config.attention_dropout = o.attention_dropout;
    config.init_std = o.init_method_std;
    config.seed = o.seed;
    return config;
}
inline ScheduleKind schedule_kind(const Options& o) {
    return o.schedule == "gpipe"  ? ScheduleKind::gpipe
           : o.schedule == "1f1b" ? ScheduleKind::one_f_one_b
                                  : ScheduleKind::interleaved;
}
inline Decay decay_of(const Options& o) {
    return o.lr_decay_style == "constant" ? Decay::constant
           : o.lr_decay_style == "linear" ? Decay::linear
                                          : Decay::cosine;
}
inline PipelineOptions pipeline_options(const Options& o) {
    return {o.recompute() ? o.recompute_num_layers : 0, !o.no_scatter_gather_tensors_in_pipeline};
}

// What one rank does for a batch: the schedule and the program compiled from it.
struct Plan {
    Schedule schedule;
    Program program;
    explicit Plan(Schedule made) : schedule(std::move(made)), program(compile(schedule)) {}
};
inline Plan training_plan(const Options& o) {
    return Plan(make_schedule(schedule_kind(o), int(o.pipeline_model_parallel_size), int(o.virtual_pipeline_size),
                              int(o.num_microbatches)));
}
// One sequence through all stages, for generation.
inline Plan single_plan(const Options& o) {
    Schedule schedule{int(o.pipeline_model_parallel_size), int(o.virtual_pipeline_size), 1, {}};
    schedule.ranks.resize(schedule.p);
    for (auto& ops : schedule.ranks)
        for (int chunk = 0; chunk < schedule.v; ++chunk) ops.push_back({true, 0, chunk});
    return Plan(schedule);
}

struct Trainer {
    const Options& o;
    Grid& grid;
    const Dataset& data;
    Device& device;
    LogFile& log;
    Plan training, evaluation, single;
    Gpt gpt;
    PipelineExecutor executor;
    GradientReduction reduction;
    Optimizer optimizer;
    std::vector<Tokens> microbatches;    // of the current batch; first and last stage only
    DeviceBuffer<double> sample_losses;  // [B]: each sample's sum over its tokens
    int64_t iteration = 0;

    Trainer(const Options& o, Grid& grid, const Dataset& data, Device& device, LogFile& log)
        : o(o),
          grid(grid),
          data(data),
          device(device),
          log(log),
          training(training_plan(o)),
          evaluation(forward_only(training.schedule)),
          single(single_plan(o)),
          gpt(device, grid.tensor, gpt_config(o), o.micro_batch_size, grid.p, grid.p_rank, int(o.virtual_pipeline_size),
              o.use_distributed_optimizer ? grid.d : 1),
          executor(gpt, grid, pipeline_options(o),
                   {{&training.schedule, &training.program},
                    {&evaluation.schedule, &evaluation.program},
                    {&single.schedule, &single.program}}),
          reduction(gpt, grid, o.use_distributed_optimizer),
          optimizer(gpt, grid, {o.adam_beta1, o.adam_beta2, o.adam_eps, o.weight_decay, o.clip_grad},
                    o.use_distributed_optimizer),
          microbatches(o.num_microbatches),
          sample_losses(o.global_batch_size) {}

    // Microbatch i, replica r, row j is sample (i d + r) b + j of the batch.
    int64_t first_sample(int64_t microbatch) const { return (microbatch * grid.d + grid.d_rank) * o.micro_batch_size; }

    // Loads the batch whose k-th sample is window window_of(k).
    template <class F>
    void load_batch(F window_of) {
        if (!grid.first_stage() && !grid.last_stage()) return;
        for (int64_t i = 0; i < o.num_microbatches; ++i) {
            std::vector<std::vector<int32_t>> windows;
            for (int64_t j = 0; j < o.micro_batch_size; ++j)
                windows.push_back(data.window(window_of(first_sample(i) + j)));
            upload_tokens(device, windows, microbatches[i]);
        }
    }

    Microbatch microbatch(int64_t i, bool is_training) const {
        Microbatch mb;
        mb.s = o.seq_length;
        mb.b = o.micro_batch_size;
        mb.iteration = iteration;
        mb.first_sample = first_sample(i);
        mb.training = is_training;
        mb.loss_scale = float(1.0 / (double(o.global_batch_size) * double(o.seq_length)));
        const Tokens& tokens = microbatches[i];
        mb.inputs = tokens.inputs.data;
        mb.targets = tokens.targets.data;
        mb.distinct = tokens.distinct.data;
        mb.starts = tokens.starts.data;
        mb.positions = tokens.positions.data;
        mb.distinct_count = tokens.distinct_count;
        return mb;
    }

    // The sums of losses of the batch's samples, in sample order, on every rank: each is exact, whoever computed it.
    std::vector<double> gather_losses() {
        std::vector<double> sums(o.global_batch_size, 0.0);
        if (grid.last_stage()) {
            const int64_t s = o.seq_length, b = o.micro_batch_size;
            const auto losses = to_vector(device, executor.losses.data, o.num_microbatches * s * b);
            for (int64_t i = 0; i < o.num_microbatches; ++i)
                for (int64_t j = 0; j < b; ++j)
                    for (int64_t k = 0; k < s; ++k) sums[first_sample(i) + j] += losses[(i * s + k) * b + j];
            to_device(device, sample_losses.data, sums.data(), sums.size());
            all_reduce(device, grid.data, sample_losses.data, int64_t(sums.size()));
        }
        broadcast(device, grid.pipeline, sample_losses.data, int64_t(sums.size()), grid.p - 1);
        return to_vector(device, sample_losses.data, sums.size());
    }

    struct Result {
        double loss = 0, gradient_norm = 0, lr = 0, seconds = 0;
    };

    // One iteration. Throws std::runtime_error, on every rank alike, if the loss or the gradient is not finite.
    Result train_iteration() {
        const double start = now();
        ++iteration;
        load_batch([&](int64_t k) { return data.training_window((iteration - 1) * o.global_batch_size + k); });
        PipelineCallbacks callbacks;
        callbacks.microbatch = [&](int i) { return microbatch(i, true); };
        callbacks.gradient_ready = [&](int chunk, int layer) { reduction.gradient_ready(chunk, layer); };
        executor.run(training.schedule, training.program, callbacks, true);
        reduction.finish();

        Result result;
        double sum = 0;
        for (double loss : gather_losses()) sum += loss;
        result.loss = sum / (double(o.global_batch_size) * double(o.seq_length));
        result.gradient_norm = optimizer.gradient_norm();
        result.lr = learning_rate(iteration, o.lr, o.min_lr, decay_of(o), o.lr_warmup_iters, o.lr_decay_iters);
        if (!is_finite(result.loss) || !is_finite(result.gradient_norm))
            throw std::runtime_error("iteration " + std::to_string(iteration) + ": the " +
                                     (is_finite(result.loss) ? "gradient" : "loss") +
                                     " is not finite; try a lower --lr (now " + options_detail::text(result.lr) +
                                     "), a longer --lr-warmup-iters or a smaller --clip-grad (now " +
                                     options_detail::text(o.clip_grad) + ")");
        if (!o.dump.empty() && iteration == o.train_iters) {
            if (o.use_distributed_optimizer) reduction.gather_gradients();
            write_dump(o, grid, gpt, result.loss);
        }
        optimizer.step(result.gradient_norm, result.lr);
        CUDA_CHECK(cudaStreamSynchronize(device.stream));
        result.seconds = now() - start;
        return result;
    }

    // Mean loss over the first --eval-iters batches of validation windows (all, if there are fewer), dropout off.
    double evaluate() {
        const int64_t B = o.global_batch_size, samples = std::min(o.eval_iters * B, data.validation_windows());
        PipelineCallbacks callbacks;
        callbacks.microbatch = [&](int i) { return microbatch(i, false); };
        double sum = 0;
        for (int64_t first = 0; first < samples; first += B) {
            // The last batch may be short: its remaining rows repeat windows and are not counted
            load_batch([&](int64_t k) { return data.first_validation + (first + k) % samples; });
            executor.run(evaluation.schedule, evaluation.program, callbacks, false);
            const std::vector<double> losses = gather_losses();
            for (int64_t k = 0; k < B && first + k < samples; ++k) sum += losses[k];
        }
        return sum / (double(samples) * double(o.seq_length));
    }

    // Continues --prompt by --generate tokens, calling emit(token) on every rank for each.
    template <class F>
    void generate(F emit) {
        std::vector<int32_t> ids = encode_prompt(data, o);
        Group& tensor = grid.tensor;
        DeviceBuffer<float> logits(gpt.shape.local_vocab * grid.t);
        DeviceBuffer<int32_t> chosen(1);
        Tokens tokens;
        for (int64_t n = 0; n < o.generate; ++n) {
            const int64_t length = std::min<int64_t>(int64_t(ids.size()), o.seq_length);
            std::vector<int32_t> window(ids.end() - length, ids.end());
            window.push_back(0);  // a target that nobody reads
            upload_tokens(device, {window}, tokens);
            PipelineCallbacks callbacks;
            callbacks.microbatch = [&](int) {
                Microbatch mb;
                mb.s = length;
                mb.b = 1;
                mb.training = false;
                mb.inputs = tokens.inputs.data;
                return mb;
            };
            callbacks.head = [&](const Microbatch&, float* x) {
                head_forward(gpt, x + (length - 1) * o.hidden_size, 1);
                all_gather(device, tensor, gpt.work.logits, logits.data, gpt.shape.local_vocab);
                const int32_t token = sample(to_vector(device, logits.data, o.vocab_size), n);
                to_device(device, chosen.data, &token, 1);
            };
            executor.run(single.schedule, single.program, callbacks, false);
            broadcast(device, grid.pipeline, chosen.data, 1, grid.p - 1);
            ids.push_back(to_vector(device, chosen.data, 1)[0]);
            emit(ids.back());
        }
    }

    // A token drawn from softmax(logits / temperature), restricted to --top-k and --top-p; the n-th draw of the run.
    int32_t sample(const std::vector<float>& logits, int64_t n) const {
        std::vector<int32_t> order(logits.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = int32_t(i);
        std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return logits[x] > logits[y]; });
        if (o.temperature == 0) return order[0];
        if (o.top_k > 0 && size_t(o.top_k) < order.size()) order.resize(o.top_k);
        std::vector<double> weights;
        double total = 0;
        for (int32_t id : order) {
            weights.push_back(std::exp((double(logits[id]) - double(logits[order[0]])) / o.temperature));
            total += weights.back();
        }
        if (o.top_p > 0) {
            double kept = 0;
            size_t count = 0;
            while (count < order.size() && kept < o.top_p * total) kept += weights[count++];
            order.resize(count);
            total = kept;
        }
        double target = philox(uint32_t(n), 0, uint32_t(Site::sampling), 0, o.seed).word[0] / 4294967296.0 * total;
        for (size_t i = 0; i < order.size(); ++i)
            if ((target -= weights[i]) < 0) return order[i];
        return order.back();
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// What a run prints

inline std::string duration(double seconds) {
    char text[32];
    const long total = long(seconds + 0.5);
    if (total >= 3600)
        std::snprintf(text, sizeof text, "%ldh%02ldm", total / 3600, total / 60 % 60);
    else
        std::snprintf(text, sizeof text, "%ldm%02lds", total / 60, total % 60);
    return text;
}

// This process's resident bytes, now or at most so far (Linux).
inline double resident_bytes(const char* field) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
        if (line.rfind(field, 0) == 0) return 1024.0 * std::strtod(line.c_str() + std::strlen(field), nullptr);
    return 0;
}

inline void print_plan(const Options& o, const GptConfig& config, const MemoryPlan& memory) {
    std::printf("GPT: %ld layers, hidden %ld, %ld heads, sequence %ld, vocabulary %ld: %ld parameters\n",
                long(o.num_layers), long(o.hidden_size), long(o.num_attention_heads), long(o.seq_length),
                long(o.vocab_size), long(parameter_count(config)));
    std::printf("layout: t = %ld, p = %ld, d = %ld, v = %ld; B = %ld, b = %ld, m = %ld; schedule %s\n",
                long(o.tensor_model_parallel_size), long(o.pipeline_model_parallel_size), long(o.data_parallel_size),
                long(o.virtual_pipeline_size), long(o.global_batch_size), long(o.micro_batch_size),
                long(o.num_microbatches), o.schedule.c_str());
    const double MB = 1e6;
    std::printf(
        "predicted memory of rank 0: %.1f MB (weights %.1f, gradients %.1f, optimizer %.1f, activations %.1f, messages "
        "%.1f, "
        "workspace %.1f, other %.1f)\n",
        memory.total() / MB, memory.weights / MB, memory.gradients / MB, memory.optimizer / MB, memory.activations / MB,
        memory.messages / MB, memory.workspace / MB, (memory.recompute + memory.tokens + memory.buffered) / MB);
    std::fflush(stdout);
}

// The cores this process may use, divided among the ranks on its host, unless OMP_NUM_THREADS says otherwise.
inline void choose_threads() {
#ifndef __CUDACC__
    if (std::getenv("OMP_NUM_THREADS")) return;
    MPI_Comm host;
    int ranks = 1;
    MPI_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host));
    MPI_CHECK(MPI_Comm_size(host, &ranks));
    MPI_CHECK(MPI_Comm_free(&host));
    omp_set_num_threads(std::max(1, omp_get_num_procs() / ranks));
#endif
}

// Trains, evaluates and generates as the options say. Returns the exit status.
inline int train(const Options& o, Grid& grid, const Dataset& data, LogFile& log) {
    const bool prints = grid.world_rank == 0;
    const double start_bytes = resident_bytes("VmRSS:");
    Device device;
    const GptConfig config = gpt_config(o);
    Trainer trainer(o, grid, data, device, log);
    const MemoryPlan memory =
        memory_plan(config, trainer.training.schedule, trainer.training.program, grid.t, grid.t_rank, grid.d,
                    grid.p_rank, o.micro_batch_size, o.use_distributed_optimizer, pipeline_options(o));
    if (prints) {
        print_plan(o, config, memory);
        nlohmann::ordered_json line = {{"type", "config"}};
        line.update(options_as_json(o));
        line["parameters"] = parameter_count(config);
        log.line(line);
    }
    const bool evaluates = o.eval_iters > 0 && data.validation_windows() > 0;
    if (prints && o.eval_iters > 0 && !evaluates)
        std::printf("no validation windows in --split %s: no evaluation\n", o.split.c_str());
    auto evaluate = [&] {
        const double loss = trainer.evaluate();
        if (!prints) return;
        std::printf("iteration %ld | validation loss %.4f | perplexity %.3f\n", long(trainer.iteration), loss,
                    std::exp(loss));
        std::fflush(stdout);
        log.line({{"type", "eval"}, {"iteration", trainer.iteration}, {"loss", loss}, {"perplexity", std::exp(loss)}});
    };

    const double tokens = double(o.global_batch_size) * double(o.seq_length), flops = iteration_flops(o);
    if (evaluates && o.train_iters > 0) evaluate();
    double interval_seconds = 0, all_seconds = 0;
    int64_t interval_iterations = 0;
    while (trainer.iteration < o.train_iters) {
        const Trainer::Result result = trainer.train_iteration();
        const int64_t i = trainer.iteration;
        interval_seconds += result.seconds;
        all_seconds += result.seconds;
        ++interval_iterations;
        if (prints) {
            log.line({{"type", "train"},
                      {"iteration", i},
                      {"loss", result.loss},
                      {"grad_norm", result.gradient_norm},
                      {"lr", result.lr},
                      {"tokens", int64_t(tokens)},
                      {"tokens_total", i * int64_t(tokens)},
                      {"tokens_per_s", tokens / result.seconds},
                      {"tflops_per_rank", flops / result.seconds / grid.world_size / 1e12},
                      {"iteration_ms", 1e3 * result.seconds}});
            if (i % o.log_interval == 0 || i == o.train_iters || i == 1) {
                const double seconds = interval_seconds / double(interval_iterations);
                std::printf(
                    "iteration %5ld/%ld | loss %.4f | grad norm %.3f | lr %.2e | %.0f tokens/s | %.3f TFLOP/s per rank "
                    "| %s left\n",
                    long(i), long(o.train_iters), result.loss, result.gradient_norm, result.lr, tokens / seconds,
                    flops / seconds / grid.world_size / 1e12,
                    duration(all_seconds / double(i) * double(o.train_iters - i)).c_str());
                std::fflush(stdout);
                interval_seconds = 0;
                interval_iterations = 0;
            }
        }
        if (evaluates && i % o.eval_interval == 0 && i < o.train_iters) evaluate();
    }
    if (evaluates) evaluate();
    if (o.generate > 0) {
        if (prints) std::printf("sample:\n%s", data.bytes ? o.prompt.c_str() : (" " + o.prompt).c_str());
        trainer.generate([&](int32_t id) {
            if (!prints) return;
            std::fputs(decode_token(data, id).c_str(), stdout);
            std::fflush(stdout);
        });
        if (prints) std::printf("\n");
    }
    if (prints)
        std::printf("memory of rank 0: predicted %.1f MB, measured %.1f MB (peak less start)\n", memory.total() / 1e6,
                    (resident_bytes("VmHWM:") - start_bytes) / 1e6);
    return 0;
}

// Runs `step` on every rank; if any rank throws a UserError, the first such rank prints it and all return false.
// Collective.
template <class F>
bool all_succeed(F step) {
    int rank = 0, ranks = 1;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    std::string message;
    int failed = ranks, first = ranks;
    try {
        step();
    } catch (const UserError& error) {
        message = error.what();
        failed = rank;
    }
    MPI_CHECK(MPI_Allreduce(&failed, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
    if (first == rank) std::fprintf(stderr, "train: %s\n", message.c_str());
    return first == ranks;
}

int main(int argc, char** argv) {
    MPI_CHECK(MPI_Init(&argc, &argv));
    MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    int rank = 0, ranks = 1, status = 2;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    Options options;
    Dataset data;
    LogFile log;
    std::string help;
    const bool ready = all_succeed([&] {
        options = parse_options(argc, argv, &help);
        if (!help.empty()) return;
        validate(options, ranks);
        data = open_dataset(options);
        encode_prompt(data, options);
        if (rank == 0 && !options.dump.empty()) make_directory("--dump", options.dump);
        if (rank == 0 && !options.log_file.empty()) log = LogFile(options.log_file);
    });
    if (ready && !help.empty()) {
        if (rank == 0) std::printf("%s", help.c_str());
        status = 0;
    } else if (ready) {
        choose_threads();
#ifndef __CUDACC__
        standin::set_comm_timeout(options.comm_timeout);
#endif
        try {
            const auto grid = make_grid(int(options.tensor_model_parallel_size), int(options.data_parallel_size),
                                        int(options.pipeline_model_parallel_size));
            status = train(options, *grid, data, log);
        } catch (const std::runtime_error& error) {  // on every rank alike
            if (rank == 0) std::fprintf(stderr, "train: %s\n", error.what());
            status = 1;
        }
    }
    MPI_CHECK(MPI_Finalize());
    return status;
}

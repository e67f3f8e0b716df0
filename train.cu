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
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>

#include "data_parallel.cu"
#include "gpt.cu"
#include "pipeline.cu"
#include "platform/checkpoint.h"
#include "platform/data.h"
#include "platform/grid.h"
#include "platform/huggingface.h"
#include "platform/log.h"
#include "platform/options.h"
#include "platform/picture.h"
#include "platform/trace.h"

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

// Throws UserError if a file that a flag names cannot be written; leaves no trace otherwise.
inline void check_writable(const char* flag, const std::string& path) {
    struct stat status;
    const bool there = stat(path.c_str(), &status) == 0;
    std::FILE* file = std::fopen(path.c_str(), "ab");
    if (!file) throw UserError(std::string(flag) + " " + path + ": " + std::strerror(errno));
    std::fclose(file);
    if (!there) std::remove(path.c_str());
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
                    MPI_FINISH(MPI_Isend, part.data(), int(part.size()), MPI_FLOAT, 0, whole.index, MPI_COMM_WORLD);
            } else if (grid.world_rank == 0) {
                MPI_FINISH(MPI_Irecv, part.data(), int(part.size()), MPI_FLOAT, rank, whole.index, MPI_COMM_WORLD);
            }
            if (grid.world_rank == 0) place_slice(slice, part, values);
        }
        if (grid.world_rank == 0) consume(whole, values);
    }
}

// What --dump keeps of an iteration beside weights and gradients, on this rank: layers' outputs [B, s, h], of which it
// fills in its own samples (tensor rank 0 only: the others hold the same), and the batch's tokens [B, s + 1].
struct DumpedBatch {
    std::map<int64_t, std::vector<float>> outputs;  // by layer
    std::vector<int32_t> tokens;

    // Layer's output [T, h] of a microbatch, row i b + j being position i of its sample j.
    void add(Device& device, const Microbatch& mb, int64_t layer, const real* output, int64_t B, int64_t h) {
        const std::vector<real> values = to_vector(device, output, size_t(mb.rows() * h));
        std::vector<float>& whole = outputs[layer];
        whole.resize(size_t(B * mb.s * h), 0.0f);
        for (int64_t i = 0; i < mb.s; ++i)
            for (int64_t j = 0; j < mb.b; ++j)
                std::copy_n(values.begin() + (i * mb.b + j) * h, h,
                            whole.begin() + ((mb.first_sample + j) * mb.s + i) * h);
    }
};

// Writes the iteration's weights, gradients (before clipping; each tensor whole, tied ones once), layers' outputs,
// tokens and loss. Collective.
inline void write_dump(const Options& o, const Grid& grid, const Gpt& gpt, const DumpedBatch& batch, double loss) {
    SafeTensorsWriter writer;
    gather_parameters(grid, gpt, gpt.weights.data, [&](const Parameter& parameter, const std::vector<float>& values) {
        writer.add(parameter.name, parameter.shape(), values);
    });
    gather_parameters(grid, gpt, gpt.gradients.data, [&](const Parameter& parameter, const std::vector<float>& values) {
        writer.add("gradient." + parameter.name, parameter.shape(), values);
    });
    // Each sample's outputs come from one rank and are zero on all others
    const int64_t B = o.global_batch_size, s = o.seq_length, h = o.hidden_size;
    for (int64_t layer = 0; layer < o.num_layers; ++layer) {
        const auto mine = batch.outputs.find(layer);
        const std::vector<float> nothing(mine == batch.outputs.end() ? B * s * h : 0, 0.0f);
        std::vector<float> all(grid.world_rank == 0 ? B * s * h : 0);
        const float* part = mine == batch.outputs.end() ? nothing.data() : mine->second.data();
        for (int64_t sample = 0; sample < B; ++sample)
            MPI_FINISH(MPI_Ireduce, part + sample * s * h, grid.world_rank == 0 ? all.data() + sample * s * h : nullptr,
                       int(s * h), MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
        if (grid.world_rank == 0) writer.add("h." + std::to_string(layer) + ".output", {B, s, h}, all);
    }
    if (grid.world_rank != 0) return;
    writer.add("tokens", {B, s + 1}, batch.tokens);
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
// Eq. 3, with the unpadded V.
inline double iteration_flops(const Options& o) {
    return iteration_flops(gpt_config(o), o.global_batch_size, o.recompute());
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
    return Plan(make_schedule(schedule_kind(o.schedule), int(o.pipeline_model_parallel_size),
                              int(o.virtual_pipeline_size), int(o.num_microbatches)));
}
// One sequence through all stages, for generation.
inline Plan single_plan(const Options& o) {
    Schedule schedule{int(o.pipeline_model_parallel_size), int(o.virtual_pipeline_size), 1, {}};
    schedule.ranks.resize(schedule.p);
    for (auto& ops : schedule.ranks)
        for (int chunk = 0; chunk < schedule.v; ++chunk) ops.push_back({true, 0, chunk});
    return Plan(schedule);
}

// Payload in bytes that a rank has sent, per group.
struct GroupBytes {
    double tensor = 0, data = 0, pipeline = 0, embedding = 0;
    void add(const Grid& grid, double sign) {
        tensor += sign * grid.tensor.bytes();
        data += sign * grid.data.bytes();
        pipeline += sign * grid.pipeline.bytes();
        embedding += sign * grid.embedding.bytes();
    }
};

// What this rank has measured over the training iterations, for the report at the end.
struct Measured {
    double flops = 0;             // of GEMMs
    GroupBytes bytes;             // of forward, backward, gradient reduction and the optimizer's weights
    std::vector<double> op_cpu;   // seconds per operation of the schedule, in its order, summed over iterations
    std::vector<double> seconds;  // per iteration
    std::vector<OpRecord> last;   // of the last iteration

    size_t iterations() const { return seconds.size(); }
};

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
    int64_t iteration = 0, samples = 0;  // done and consumed
    std::pair<int64_t, int64_t> traced;  // iterations, first to last
    std::function<void()> before_step;   // if set, called when gradients are reduced, before clipping and the step
    LossScale loss_scale;
    Measured measured;

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
          sample_losses(o.global_batch_size),
          traced(o.trace.empty() ? std::make_pair<int64_t, int64_t>(0, 0) : trace_range(o.trace_iterations)) {
        if (kScalesLoss)
            loss_scale = {o.loss_scale > 0 ? o.loss_scale : o.initial_loss_scale, o.loss_scale == 0,
                          o.loss_scale_window};
    }

    // Microbatch i, replica r, row j is sample (i d + r) b + j of the batch.
    int64_t first_sample(int64_t microbatch) const { return (microbatch * grid.d + grid.d_rank) * o.micro_batch_size; }

    // Loads the batch whose k-th sample is window_of(k), s + 1 tokens.
    template <class F>
    void load_batch(F window_of) {
        if (!grid.first_stage() && !grid.last_stage()) return;
        for (int64_t i = 0; i < o.num_microbatches; ++i) {
            std::vector<std::vector<int32_t>> windows;
            for (int64_t j = 0; j < o.micro_batch_size; ++j) windows.push_back(window_of(first_sample(i) + j));
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
        mb.loss_scale = float(loss_scale.scale / (double(o.global_batch_size) * double(o.seq_length)));
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
        double loss_scale = 1;  // that this iteration used
        bool skipped = false;   // fp16: its gradients overflowed, and the weights stayed as they were
    };

    // One iteration on the data's next batch.
    Result train_iteration() {
        const int64_t first = samples;
        return train_on([&](int64_t k) { return data.window(data.training_window(first + k)); });
    }

    // One iteration on the batch whose k-th sample is window_of(k). Throws std::runtime_error, on every rank alike, if
    // the loss or the gradient is not finite.
    template <class F>
    Result train_on(F window_of) {
        const double start = now();
        ++iteration;
        samples += o.global_batch_size;
        device.tracing = traced.first <= iteration && iteration <= traced.second;
        load_batch(window_of);
        PipelineCallbacks callbacks;
        callbacks.microbatch = [&](int i) { return microbatch(i, true); };
        callbacks.gradient_ready = [&](int chunk, int layer) { reduction.gradient_ready(chunk, layer); };
        const bool dumps = !o.dump.empty() && iteration == o.train_iters;
        DumpedBatch dumped;
        if (dumps && grid.t_rank == 0)
            callbacks.layer_output = [&](const Microbatch& mb, int64_t layer, const real* output) {
                dumped.add(device, mb, layer, output, o.global_batch_size, o.hidden_size);
            };
        for (int64_t k = 0; k < o.global_batch_size && dumps && grid.world_rank == 0; ++k)
            for (int32_t token : window_of(k)) dumped.tokens.push_back(token);
        const double flops_before = device.gemm_flops;
        measured.bytes.add(grid, -1);
        executor.run(training.schedule, training.program, callbacks, true);
        {
            TraceScope trace(device, "reduction", [] { return "last gradients"; });
            reduction.finish();
        }
        measured.bytes.add(grid, 1);
        measured.flops += device.gemm_flops - flops_before;
        measured.last = executor.records;
        measured.op_cpu.resize(executor.records.size());
        for (size_t i = 0; i < executor.records.size(); ++i) measured.op_cpu[i] += executor.records[i].cpu;

        Result result;
        double sum = 0;
        for (double loss : gather_losses()) sum += loss;
        result.loss = sum / (double(o.global_batch_size) * double(o.seq_length));
        result.loss_scale = loss_scale.scale;
        optimizer.unscale(loss_scale.scale);
        result.gradient_norm = optimizer.gradient_norm();
        result.lr = learning_rate(iteration, o.lr, o.min_lr, decay_of(o), o.lr_warmup_iters, o.lr_decay_iters);
        // Decided alike everywhere: losses and norm are the whole world's
        result.skipped = kScalesLoss && !(is_finite(result.loss) && is_finite(result.gradient_norm));
        if (result.skipped && loss_scale.dynamic && loss_scale.scale <= 1)
            throw std::runtime_error("iteration " + std::to_string(iteration) +
                                     ": the gradient overflows fp16 even at a loss scale of " +
                                     options_detail::text(loss_scale.scale) + "; try a lower --lr (now " +
                                     options_detail::text(o.lr) + ") or PRECISION=bf16");
        if (!result.skipped && (!is_finite(result.loss) || !is_finite(result.gradient_norm)))
            throw std::runtime_error("iteration " + std::to_string(iteration) + ": the " +
                                     (is_finite(result.loss) ? "gradient" : "loss") +
                                     " is not finite; try a lower --lr (now " + options_detail::text(result.lr) +
                                     "), a longer --lr-warmup-iters or a smaller --clip-grad (now " +
                                     options_detail::text(o.clip_grad) + ")");
        if (o.use_distributed_optimizer && (dumps || before_step)) reduction.gather_gradients();
        if (dumps) {
            optimizer.gather_weights();
            write_dump(o, grid, gpt, dumped, result.loss);
        }
        if (before_step) before_step();
        measured.bytes.add(grid, -1);
        {
            TraceScope trace(device, "optimizer", [] { return "optimizer"; });
            if (result.skipped)
                optimizer.clear_gradients();
            else
                optimizer.step(result.gradient_norm, result.lr);
        }
        loss_scale.update(result.skipped);
        measured.bytes.add(grid, 1);
        CUDA_CHECK(cudaStreamSynchronize(device.stream));
        device.tracing = false;
        result.seconds = now() - start;
        measured.seconds.push_back(result.seconds);
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
            load_batch([&](int64_t k) { return data.validation_window((first + k) % samples); });
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
        DeviceBuffer<real> logits(gpt.shape.local_vocab * grid.t);
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
            callbacks.head = [&](const Microbatch&, real* x) {
                head_forward(gpt, x + (length - 1) * o.hidden_size, 1);
                all_gather(device, tensor, gpt.work.logits, logits.data, gpt.shape.local_vocab);
                const std::vector<real> values = to_vector(device, logits.data, o.vocab_size);
                const int32_t token = sample({values.begin(), values.end()}, n);
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
// Checkpoints

// The sizes that a checkpoint's model and a run's must share.
inline nlohmann::ordered_json model_as_json(const Options& o) {
    return {{"num-layers", o.num_layers},
            {"hidden-size", o.hidden_size},
            {"num-attention-heads", o.num_attention_heads},
            {"seq-length", o.seq_length},
            {"vocab-size", o.vocab_size}};
}

// Throws UserError naming the sizes in which the checkpoint's model is another.
inline void check_model(const Options& o, const Checkpoint& checkpoint) {
    std::string differences;
    const nlohmann::ordered_json ours = model_as_json(o);
    for (const auto& [name, value] : ours.items()) {
        const auto theirs = checkpoint.state.model.value(name, nlohmann::ordered_json());
        if (theirs != value)
            differences += (differences.empty() ? "--" : ", --") + name + " " + value.dump() + " here, " +
                           theirs.dump() + " there";
    }
    if (!differences.empty())
        throw UserError("--load " + o.load + ": " + checkpoint.path + " is of another model: " + differences);
}

// This rank's slices of the model: weights, and Adam's two means. With `own`, only what no other rank holds too, so
// that the slices of all ranks make up each tensor once. Padding of the vocabulary is left out.
inline std::vector<Slice> model_slices(Gpt& gpt, Optimizer& optimizer, const Grid& grid, bool own) {
    std::vector<Slice> slices;
    for (size_t i = 0; i < gpt.parameters.size(); ++i) {
        const Parameter& p = gpt.parameters[i];
        const bool others = p.tied_copy || (p.split == Split::replicated && grid.t_rank > 0);
        if (own && others) continue;
        Slice slice;
        slice.rows = p.rows;
        slice.cols = p.cols;
        slice.first_row = p.first_row;
        slice.first_col = p.first_col;
        slice.local_rows = std::clamp<int64_t>(p.rows - p.first_row, 0, p.local_rows);
        slice.local_cols = p.local_cols;
        const int64_t whole = slice.local_rows * slice.local_cols;
        auto add = [&](const std::string& kind, float* data, int64_t begin, int64_t end) {
            slice.name = kind + "/" + p.name;
            slice.flat_begin = begin;
            slice.flat_end = std::min(whole, end);
            slice.data = data;
            if (slice.flat_begin < slice.flat_end) slices.push_back(slice);
        };
        if (!own || grid.d_rank == 0) add("weight", gpt.weights.data + p.offset, 0, whole);
        const OptimizerSlice& state = optimizer.slices[i];
        const int64_t begin = int64_t(state.offset - p.offset);
        if (!own || optimizer.distributed || grid.d_rank == 0) {
            add("exp_avg", optimizer.m.data + state.state, begin, begin + int64_t(state.size));
            add("exp_avg_sq", optimizer.v.data + state.state, begin, begin + int64_t(state.size));
        }
    }
    return slices;
}

// Writes --save's checkpoint of where the trainer is. Collective; throws std::runtime_error on all ranks alike.
inline void save(const Options& o, const Grid& grid, Trainer& trainer) {
    CheckpointState state{trainer.iteration,
                          trainer.samples,
                          trainer.optimizer.step_count,
                          kScalesLoss ? trainer.loss_scale.scale : 0.0,
                          trainer.loss_scale.good_steps,
                          model_as_json(o),
                          nlohmann::ordered_json{{"t", grid.t},
                                                 {"p", grid.p},
                                                 {"d", grid.d},
                                                 {"v", o.virtual_pipeline_size},
                                                 {"distributed-optimizer", o.use_distributed_optimizer}}};
    std::string name = "shard_t" + std::to_string(grid.t_rank) + "_p" + std::to_string(grid.p_rank);
    if (grid.d_rank > 0) name += "_d" + std::to_string(grid.d_rank);
    const double start = now();
    trainer.optimizer.gather_weights();
    save_checkpoint(trainer.device, o.save, name + ".safetensors",
                    model_slices(trainer.gpt, trainer.optimizer, grid, true), state, o.keep);
    if (grid.world_rank == 0) {
        std::printf("iteration %ld | checkpoint saved to %s in %.2f s\n", long(trainer.iteration), o.save.c_str(),
                    now() - start);
        std::fflush(stdout);
    }
}

// Puts the trainer where the checkpoint was written. Throws UserError.
inline void load(const Checkpoint& checkpoint, const Grid& grid, Trainer& trainer) {
    for (const Slice& slice : model_slices(trainer.gpt, trainer.optimizer, grid, false))
        load_slice(trainer.device, checkpoint, slice);
    trainer.gpt.round_weights();
    trainer.iteration = checkpoint.state.iteration;
    trainer.samples = checkpoint.state.samples;
    trainer.optimizer.step_count = checkpoint.state.optimizer_steps;
    if (trainer.loss_scale.dynamic && checkpoint.state.loss_scale > 0) {  // else the run that wrote it had none
        trainer.loss_scale.scale = checkpoint.state.loss_scale;
        trainer.loss_scale.good_steps = checkpoint.state.good_steps;
    }
}

// What --load-hf's model must hold.
inline std::vector<HfTensor> hf_tensors(const GptConfig& config) {
    std::vector<HfTensor> list;
    for (const Parameter& p : gpt_parameters(config))
        list.push_back({p.name, p.rows, p.cols, p.vector, p.name == "wpe.weight"});
    return list;
}

// This rank's slices of a Hugging Face model's weights.
inline void load_hf(const HfModel& model, Gpt& gpt) {
    for (const Parameter& p : gpt.parameters) {
        const SafeTensor& tensor = *model.tensors.at(p.name);
        std::vector<float> values(p.local_size(), 0.0f);
        for (int64_t r = 0; r < p.local_rows && p.first_row + r < p.rows; ++r)
            for (int64_t c = 0; c < p.local_cols; ++c)
                values[r * p.local_cols + c] = HfModel::value(tensor, (p.first_row + r) * p.cols + p.global_column(c));
        to_device(gpt.device, gpt.weights.data + p.offset, values.data(), values.size());
    }
    gpt.round_weights();
}

// Writes --save-hf's directory: config.json and model.safetensors, the whole model from rank 0. Collective; throws
// std::runtime_error on all ranks alike.
inline void save_hf(const Options& o, const Grid& grid, const Gpt& gpt) {
    SafeTensorsWriter writer;
    writer.metadata("format", "pt");
    gather_parameters(grid, gpt, gpt.weights.data, [&](const Parameter& p, const std::vector<float>& values) {
        writer.add("transformer." + p.name, p.shape(), values);
    });
    together([&] {
        if (grid.world_rank != 0) return;
        writer.write(o.save_hf + "/model.safetensors");
        const std::string config = hf_config(o);
        FileWriter out(o.save_hf + "/config.json");
        out.write(config.data(), config.size());
        out.finish();
    });
}

// The signal that asked the run to stop, of SIGINT and SIGTERM; 0: none.
inline volatile std::sig_atomic_t& stop_signal() {
    static volatile std::sig_atomic_t signal = 0;
    return signal;
}

// Whether any rank has been asked to stop. Collective.
inline bool any_rank_stops() {
    int mine = stop_signal() != 0, any = 0;
    MPI_FINISH(MPI_Iallreduce, &mine, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return any != 0;
}

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

// "0-2, 6-8" for the given half-open ranges.
inline std::string ranges_text(const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    std::string text;
    for (const auto& [begin, end] : ranges) {
        if (begin >= end) continue;
        text += (text.empty() ? "" : ", ") + std::to_string(begin);
        if (end - begin > 1) text += "-" + std::to_string(end - 1);
    }
    return text;
}

// The process grid: which rank, host and process holds which layers, heads and samples of a batch. Collective.
inline void print_grid(const Options& o, const Grid& grid, const GptConfig& config) {
    char host[MPI_MAX_PROCESSOR_NAME] = {};
    int length = 0;
    MPI_CHECK(MPI_Get_processor_name(host, &length));
    std::vector<std::pair<int64_t, int64_t>> layers, samples;
    const int64_t v = o.virtual_pipeline_size, b = o.micro_batch_size, heads = config.heads / grid.t;
    for (int chunk = 0; chunk < v; ++chunk) {
        const int64_t first = first_layer_of(config, grid.p, int(v), grid.p_rank, chunk);
        layers.push_back({first, first + config.layers / (grid.p * v)});
    }
    for (int64_t i = 0; i < std::min<int64_t>(o.num_microbatches, grid.d == 1 ? 1 : 2); ++i) {
        const int64_t first = (i * grid.d + grid.d_rank) * b;
        samples.push_back({first, first + (grid.d == 1 ? o.global_batch_size : b)});
    }
    const bool more = grid.d > 1 && o.num_microbatches > 2;
    char line[512];
    std::snprintf(
        line, sizeof line, "%4d  %-16.16s %8ld  %2d %2d %2d  %-18s %-8s %s%s", grid.world_rank, host, long(getpid()),
        grid.t_rank, grid.d_rank, grid.p_rank,
        (std::string(grid.first_stage() ? "E " : "") + ranges_text(layers) + (grid.last_stage() ? " H" : "")).c_str(),
        ranges_text({{grid.t_rank * heads, (grid.t_rank + 1) * heads}}).c_str(), ranges_text(samples).c_str(),
        more ? ", ..." : "");
    const std::vector<std::string> lines = gather_texts(line);
    if (grid.world_rank != 0) return;
    std::printf(
        "process grid (E: embedding, H: final LayerNorm and output layer):\n"
        "rank  host                  pid   t  d  p  layers             heads    samples of a batch\n");
    for (const std::string& text : lines) std::printf("%s\n", text.c_str());
}

// Bytes a whole training iteration sends, by the paper's formulas (§2.3, §3.2, §4.1), over all ranks.
struct FormulaBytes {
    double layers = 0, vocabulary = 0, gather = 0;  // tensor group
    double pipeline = 0, data = 0, embedding = 0;
};
inline FormulaBytes formula_bytes(const Options& o, const Grid& grid, double local_parameters_of_all_ranks) {
    const double t = grid.t, d = grid.d, p = grid.p, m = double(o.num_microbatches), b = double(o.micro_batch_size),
                 s = double(o.seq_length), h = double(o.hidden_size), v = double(o.virtual_pipeline_size),
                 word = sizeof(real), fp32 = 4;
    const double share = (t - 1) / t, microbatches = m * d, bsh = b * s * h;
    FormulaBytes bytes;
    // Per layer, device and microbatch: 8 b s h (t-1)/t elements, 12 when recomputing
    bytes.layers = (o.recompute() ? 12 : 8) * bsh * share * double(o.num_layers) * microbatches * t * word;
    // The embedding's g, the output layer's f, and three numbers per token
    bytes.vocabulary = (4 * bsh * word + 6 * b * s * fp32) * share * microbatches * t;
    const bool scatters = grid.t > 1 && !o.no_scatter_gather_tensors_in_pipeline;
    const double messages = p > 1 ? 2 * (p * v - 1) * microbatches : 0;  // one a boundary and direction
    bytes.pipeline = messages * bsh * (scatters ? 1 : t) * word;
    bytes.gather = scatters ? messages * bsh * share * t * word : 0;
    // Gradients, reduced, and the reduced gradients or the weights made from them
    bytes.data = (d - 1) / d * local_parameters_of_all_ranks * (fp32 + (o.use_distributed_optimizer ? word : fp32));
    const double vocab = double((o.vocab_size + grid.t - 1) / grid.t);
    bytes.embedding = p > 1 ? 2 * vocab * h * t * d * fp32 : 0;  // two ranks, 2 N / 2 elements each
    return bytes;
}

// The bubble that the operations' CPU times give when replayed, and the last iteration as it ran. `ranks`: per world
// rank, its facts from print_report.
inline void print_pipeline_report(const Grid& grid, const Plan& plan, const std::vector<nlohmann::json>& ranks) {
    const Schedule& schedule = plan.schedule;
    const int p = schedule.p, v = schedule.v, m = schedule.m;
    double first = 1e300;
    std::vector<std::vector<double>> cpu(p);
    std::vector<std::vector<Interval>> times(p);
    for (int rank = 0; rank < p; ++rank) {
        const nlohmann::json& facts = ranks[grid.rank_of(0, 0, rank)];
        cpu[rank] = facts["cpu"].get<std::vector<double>>();
        for (const auto& time : facts["times"]) times[rank].push_back({time[0].get<double>(), time[1].get<double>()});
        first = std::min(first, times[rank][0].start);
    }
    const ReplayedBubble replayed = replayed_bubble(schedule, plan.program, cpu);
    if (replayed.bubble > 0) {  // a GPU build has no CPU times
        std::printf("  %-44s %12.4f %12.4f\n", "bubble / ideal: (p-1)/(v m); CPU times replayed",
                    bubble_formula(p, v, m), replayed.bubble);
        std::printf("    %-42s %25.4f\n", "busiest stage / mean (embedding, logits)", replayed.imbalance);
    }
    for (auto& rank : times)
        for (Interval& time : rank) time = {time.start - first, time.end - first};
    const std::vector<PictureRow> rows = picture_rows(schedule, times);
    std::printf("  the last iteration as it ran, %.0f ms ('-' forward, '=' backward, '.' idle):\n%s",
                1e3 * picture_end(rows), draw_text(rows, 120 / picture_end(rows), v > 1, isatty(1) != 0).c_str());
}

// The paper against this run: what its formulas say beside what was counted and measured. Collective.
inline void print_report(const Options& o, const Grid& grid, const Trainer& trainer, double predicted_memory,
                         double measured_memory) {
    const Measured& mine = trainer.measured;
    if (mine.iterations() == 0) return;
    const double n = double(mine.iterations());
    double parameters = 0;
    for (const Parameter& parameter : trainer.gpt.parameters) parameters += double(parameter.local_size());
    const std::vector<double> local = {mine.flops / n,      mine.bytes.tensor / n,    mine.bytes.pipeline / n,
                                       mine.bytes.data / n, mine.bytes.embedding / n, parameters};
    std::vector<double> total(local.size());
    MPI_FINISH(MPI_Ireduce, local.data(), total.data(), int(local.size()), MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    nlohmann::json facts = {{"predicted", predicted_memory}, {"measured", measured_memory}};
    if (grid.t_rank == 0 && grid.d_rank == 0) {
        facts["cpu"] = nlohmann::json::array();
        for (double cpu : mine.op_cpu) facts["cpu"].push_back(cpu / n);
        for (const OpRecord& record : mine.last) facts["times"].push_back({record.start, record.end});
    }
    const std::vector<std::string> texts = gather_texts(facts.dump());
    if (grid.world_rank != 0) return;

    std::printf("the paper against this run (%ld iterations, all ranks)\n", long(mine.iterations()));
    std::printf("  %-44s %12s %12s\n", "per iteration", "formula", "counted");
    auto row = [](const char* name, double formula, double counted, double unit) {
        std::printf("  %-44s %12.4f %12.4f  (%+.2f%%)\n", name, formula / unit, counted / unit,
                    formula > 0 ? 100 * (counted / formula - 1) : 0.0);
    };
    row("GFLOP (eq. 3; counted from the GEMM calls)", iteration_flops(o), total[0], 1e9);
    const FormulaBytes formula = formula_bytes(o, grid, total[5]);
    if (grid.t > 1) {
        row("MB in tensor groups", formula.layers + formula.vocabulary + formula.gather, total[1], 1e6);
        std::printf("    %-42s %12.4f\n    %-42s %12.4f\n    %-42s %12.4f\n",
                    "layers: 8 b s h (t-1)/t each (12 recomputing)", formula.layers / 1e6,
                    "embedding, output layer and loss", formula.vocabulary / 1e6, "gathering what stages sent (4.1)",
                    formula.gather / 1e6);
    }
    if (grid.p > 1) {
        row("MB in pipeline groups", formula.pipeline, total[2], 1e6);
        row("MB in embedding groups", formula.embedding, total[4], 1e6);
    }
    if (grid.d > 1) row("MB in data groups (tensors padded to 64 bytes)", formula.data, total[3], 1e6);
    // §2.2.1, §2.2.2, §3.5: what rank 0 keeps between forward and backward
    const PipelineExecutor& executor = trainer.executor;
    const int in_flight =
        in_flight_formula(schedule_kind(o.schedule), grid.p, 0, int(o.virtual_pipeline_size), int(o.num_microbatches));
    row("MB of activations kept, rank 0, at most", in_flight * executor.slot_bytes(),
        executor.peak_slots * executor.slot_bytes(), 1e6);
    std::printf("    %d of %.3f MB, each %ld layer(s) of a microbatch%s\n", executor.peak_slots,
                executor.slot_bytes() / 1e6, long(o.num_layers / (grid.p * o.virtual_pipeline_size)),
                o.recompute() ? ", recomputed in the backward" : "");

    std::vector<nlohmann::json> ranks;
    for (const std::string& text : texts) ranks.push_back(nlohmann::json::parse(text));
    if (grid.p > 1) print_pipeline_report(grid, trainer.training, ranks);
    double least = 1e300, most = 0, most_predicted = 0, worst = 0;
    for (const auto& facts_of_rank : ranks) {
        const double predicted = facts_of_rank["predicted"], actual = facts_of_rank["measured"];
        least = std::min(least, actual);
        most = std::max(most, actual);
        most_predicted = std::max(most_predicted, predicted);
        worst = std::max(worst, std::abs(actual / predicted - 1));
    }
    std::printf(
        "  memory per rank: predicted at most %.1f MB; measured %.1f to %.1f MB (peak less start); largest "
        "difference %.0f%%\n",
        most_predicted / 1e6, least / 1e6, most / 1e6, 100 * worst);
    std::vector<double> seconds = mine.seconds;
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
    const double median = seconds[seconds.size() / 2];
    std::printf("  throughput: %.1f ms per iteration (median), %.0f tokens/s, %.3f TFLOP/s per rank\n", 1e3 * median,
                double(o.global_batch_size) * double(o.seq_length) / median,
                iteration_flops(o) / median / grid.world_size / 1e12);
}

inline void print_plan(const Options& o, const GptConfig& config, const MemoryPlan& memory) {
    std::printf("GPT: %ld layers, hidden %ld, %ld heads, sequence %ld, vocabulary %ld: %ld parameters\n",
                long(o.num_layers), long(o.hidden_size), long(o.num_attention_heads), long(o.seq_length),
                long(o.vocab_size), long(parameter_count(config)));
    std::printf("layout: t = %ld, p = %ld, d = %ld, v = %ld; B = %ld, b = %ld, m = %ld; schedule %s; precision %s\n",
                long(o.tensor_model_parallel_size), long(o.pipeline_model_parallel_size), long(o.data_parallel_size),
                long(o.virtual_pipeline_size), long(o.global_batch_size), long(o.micro_batch_size),
                long(o.num_microbatches), o.schedule.c_str(), kPrecision);
    const double MB = 1e6;
    std::printf(
        "predicted memory of rank 0: %.1f MB (weights %.1f, gradients %.1f, optimizer %.1f, activations %.1f, messages "
        "%.1f, "
        "workspace %.1f, other %.1f)\n",
        memory.total() / MB, memory.weights / MB, memory.gradients / MB, memory.optimizer / MB, memory.activations / MB,
        memory.messages / MB, memory.workspace / MB,
        (memory.recompute + memory.tokens + memory.buffered + memory.library) / MB);
    std::fflush(stdout);
}

// The rank among those on its host, and how many they are.
inline std::pair<int, int> rank_on_host() {
    MPI_Comm host;
    int rank = 0, ranks = 1;
    const standin::Deadline deadline("MPI_Comm_split_type");
    MPI_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host));
    MPI_CHECK(MPI_Comm_rank(host, &rank));
    MPI_CHECK(MPI_Comm_size(host, &ranks));
    MPI_CHECK(MPI_Comm_free(&host));
    return {rank, ranks};
}

// The cores this process may use, divided among the ranks on its host, unless OMP_NUM_THREADS says otherwise.
inline void choose_threads() {
#ifndef __CUDACC__
    if (std::getenv("OMP_NUM_THREADS")) return;
    omp_set_num_threads(std::max(1, omp_get_num_procs() / rank_on_host().second));
#endif
}

// On a GPU build: the GPU with this rank's number on its host, ranks in turns if they outnumber GPUs. Throws UserError
// if there is none, or if ranks would share one, which NCCL does not allow. Collective.
inline void choose_device() {
#ifdef __CUDACC__
    const auto [rank, ranks] = rank_on_host();
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
        throw UserError("this build needs a GPU, and there is none that it can use: make BACKEND=cpu is for the CPU");
#ifndef NCCL_OVER_MPI
    if (ranks > gpus)
        throw UserError(std::to_string(ranks) + " ranks on a host with " + std::to_string(gpus) +
                        " GPU(s), but NCCL allows one rank a GPU: start at most " + std::to_string(gpus) +
                        " a host, or build with make COMM=mpi");
    // Exchanges and tensor all-reduces may be in flight together, on two streams and two communicators, of which NCCL
    // by itself promises nothing. From 2.26 on it can be asked to start what a device is given in the host's order,
    // which is one total order on all ranks (pipeline.cu): then a started kernel never waits for one behind another.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
#endif
    CUDA_CHECK(cudaSetDevice(rank % gpus));
#endif
}

// Uses every library and group once, so that what they keep for themselves is there before the run's memory is
// measured. Collective.
inline void warm_up(Device& device, Grid& grid) {
    constexpr int64_t n = 256;
    DeviceBuffer<real> buffer(4 * n * n);
    for (bool ta : {false, true})
        for (bool tb : {false, true})
            gemm(device, n, n, n, {buffer.data, n, 0, ta}, {buffer.data + n * n, n, 0, tb}, buffer.data + 2 * n * n, n);
    for (Group* group : {&grid.tensor, &grid.data, &grid.pipeline, &grid.embedding, &grid.model})
        if (group->size > 1) all_reduce(device, *group, buffer.data, int64_t(buffer.size));
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    device.gemm_flops = 0;
}

// Trains, evaluates and generates as the options say. Returns the exit status.
inline int train(const Options& o, Grid& grid, const Dataset& data, LogFile& log, const Checkpoint* checkpoint,
                 const HfModel* hf_model) {
    const bool prints = grid.world_rank == 0;
    Device device;
    const GptConfig config = gpt_config(o);
    print_grid(o, grid, config);
    warm_up(device, grid);
    const double start_bytes = resident_bytes("VmRSS:");
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
    if (checkpoint) {
        together([&] { load(*checkpoint, grid, trainer); });
        if (prints)
            std::printf("continuing from %s: iteration %ld, %ld samples\n", checkpoint->path.c_str(),
                        long(trainer.iteration), long(trainer.samples));
    }
    if (hf_model) load_hf(*hf_model, trainer.gpt);
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
    if (evaluates && trainer.iteration == 0 && o.train_iters > 0) evaluate();
    if (!o.save.empty())
        for (int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int number) { stop_signal() = number; });
    const int64_t first_iteration = trainer.iteration;
    double interval_seconds = 0, all_seconds = 0;
    int64_t interval_iterations = 0;
    while (trainer.iteration < o.train_iters) {
        const Trainer::Result result = trainer.train_iteration();
        const int64_t i = trainer.iteration;
        interval_seconds += result.seconds;
        all_seconds += result.seconds;
        ++interval_iterations;
        if (prints) {
            auto number = [](double x) { return is_finite(x) ? nlohmann::ordered_json(x) : nlohmann::ordered_json(); };
            nlohmann::ordered_json line = {{"type", "train"},
                                           {"iteration", i},
                                           {"loss", number(result.loss)},
                                           {"grad_norm", number(result.gradient_norm)},
                                           {"lr", result.lr},
                                           {"tokens", int64_t(tokens)},
                                           {"tokens_total", trainer.samples * o.seq_length},
                                           {"tokens_per_s", tokens / result.seconds},
                                           {"tflops_per_rank", flops / result.seconds / grid.world_size / 1e12},
                                           {"iteration_ms", 1e3 * result.seconds}};
            if (kScalesLoss) {
                line["loss_scale"] = result.loss_scale;
                line["skipped"] = result.skipped;
            }
            log.line(line);
            if (result.skipped)
                std::printf("iteration %5ld/%ld | gradients overflow fp16: step skipped, loss scale now %.0f\n",
                            long(i), long(o.train_iters), trainer.loss_scale.scale);
            if (i % o.log_interval == 0 || i == o.train_iters || i == first_iteration + 1) {
                const double seconds = interval_seconds / double(interval_iterations);
                std::printf(
                    "iteration %5ld/%ld | loss %.4f | grad norm %.3f | lr %.2e | %.0f tokens/s | %.3f TFLOP/s per rank "
                    "| %s left\n",
                    long(i), long(o.train_iters), result.loss, result.gradient_norm, result.lr, tokens / seconds,
                    flops / seconds / grid.world_size / 1e12,
                    duration(all_seconds / double(i - first_iteration) * double(o.train_iters - i)).c_str());
                std::fflush(stdout);
                interval_seconds = 0;
                interval_iterations = 0;
            }
        }
        if (evaluates && i % o.eval_interval == 0 && i < o.train_iters) evaluate();
        if (o.save.empty()) continue;
        const bool stops = any_rank_stops();
        if (stops || i == o.train_iters || (o.save_interval > 0 && i % o.save_interval == 0)) save(o, grid, trainer);
        if (stops && i < o.train_iters) {
            if (prints) std::printf("asked to stop: continue with --load %s\n", o.save.c_str());
            return 128 + SIGTERM;
        }
    }
    if (evaluates) evaluate();
    if (!o.save_hf.empty()) {
        trainer.optimizer.gather_weights();
        save_hf(o, grid, trainer.gpt);
    }
    if (o.generate > 0) {
        if (prints) std::printf("sample:\n%s", data.training.text ? o.prompt.c_str() : (" " + o.prompt).c_str());
        trainer.generate([&](int32_t id) {
            if (!prints) return;
            std::fputs(data.tokenizer.decode(id).c_str(), stdout);
            std::fflush(stdout);
        });
        if (prints) std::printf("\n");
    }
    if (!o.trace.empty()) write_trace(o.trace, grid, device.events);
    print_report(o, grid, trainer, memory.total(), resident_bytes("VmHWM:") - start_bytes);
    return 0;
}

// Runs `step` on every rank; if any rank throws, its message (the first such rank's) is printed once and all return
// false. Collective.
template <class F>
bool all_succeed(F step) {
    try {
        together(step);
        return true;
    } catch (const std::runtime_error& error) {
        int rank = 0;
        MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
        if (rank == 0) std::fprintf(stderr, "train: %s\n", error.what());
        return false;
    }
}

int main(int argc, char** argv) {
    std::signal(SIGXFSZ, SIG_IGN);  // a file that would grow beyond its limit is an error like a full disk, not a crash
    {
        const standin::Deadline deadline("MPI_Init");
        MPI_CHECK(MPI_Init(&argc, &argv));
    }
    MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    int rank = 0, ranks = 1, status = 2;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    Options options;
    Dataset data;
    LogFile log;
    std::unique_ptr<Checkpoint> checkpoint;
    std::unique_ptr<HfModel> hf_model;
    std::string help;
    bool ready = all_succeed([&] {
        options = parse_options(argc, argv, &help);
        if (!help.empty()) return;
        if (options.comm_timeout >= 0) standin::state().comm_timeout = options.comm_timeout;
        choose_device();
        if (!options.load_hf.empty()) apply_hf_config(options);
        validate(options, ranks);
        data = open_dataset(options);
        encode_prompt(data, options);
        if (!options.load_hf.empty())
            hf_model = std::make_unique<HfModel>(options.load_hf, hf_tensors(gpt_config(options)));
        if (!options.load.empty()) {
            checkpoint = open_checkpoint(options.load, rank, ranks);
            if (checkpoint) check_model(options, *checkpoint);
            if (!checkpoint && options.load != options.save)
                throw UserError("--load " + options.load + ": holds no complete checkpoint");
        }
    });
    // Nothing is made before all else is right on every rank
    ready = ready && all_succeed([&] {
                if (rank != 0 || !help.empty()) return;
                if (!options.trace.empty()) check_writable("--trace", options.trace);
                if (!options.log_file.empty()) check_writable("--log-file", options.log_file);
                if (!options.dump.empty()) make_directory("--dump", options.dump);
                if (!options.save.empty()) {
                    make_directory("--save", options.save);
                    check_writable("--save", options.save + "/.writable");
                }
                if (!options.save_hf.empty()) make_directory("--save-hf", options.save_hf);
                if (!options.log_file.empty()) log = LogFile(options.log_file);
            });
    if (ready && !help.empty()) {
        if (rank == 0) std::printf("%s", help.c_str());
        status = 0;
    } else if (ready) {
        if (rank == 0 && !options.load.empty() && !checkpoint)
            std::printf("no checkpoint in %s yet: starting from the beginning\n", options.load.c_str());
        choose_threads();
        try {
            const auto grid = make_grid(int(options.tensor_model_parallel_size), int(options.data_parallel_size),
                                        int(options.pipeline_model_parallel_size));
            status = train(options, *grid, data, log, checkpoint.get(), hf_model.get());
        } catch (const std::runtime_error& error) {  // on every rank alike
            if (rank == 0) std::fprintf(stderr, "train: %s\n", error.what());
            status = 1;
        } catch (const std::bad_alloc&) {  // on this rank alone
            fail(__FILE__, __LINE__, "train", "out of memory");
        }
    }
    MPI_FINISH(MPI_Ibarrier, MPI_COMM_WORLD);  // says who is missing, as MPI_Finalize does not
    const standin::Deadline deadline("MPI_Finalize");
    MPI_CHECK(MPI_Finalize());
    return status;
}

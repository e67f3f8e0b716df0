// The program's options: one member, one default and one line of help each; names and defaults are Megatron-LM's where
// it has them. Everything that can be refused is refused here, before any communicator exists, with a message that
// names the flag, the numbers and what would be valid.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "platform/device.h"

struct Options {
    // Model
    int64_t num_layers = 6;           // l
    int64_t hidden_size = 384;        // h
    int64_t num_attention_heads = 6;  // a
    int64_t seq_length = 256;         // s
    int64_t vocab_size = 0;           // V; 0: the tokenizer's (256 for bytes)
    double attention_dropout = 0.1;   // of attention probabilities
    double hidden_dropout = 0.1;      // of embeddings and of what joins the residual stream
    double init_method_std = 0.02;    // standard deviation of initial weights

    // Layout
    int64_t tensor_model_parallel_size = 1;              // t
    int64_t pipeline_model_parallel_size = 1;            // p
    int64_t virtual_pipeline_size = 1;                   // v: model chunks per pipeline rank
    int64_t num_layers_per_virtual_pipeline_stage = 0;   // the same said in layers; 0: not said
    std::string schedule;                                // gpipe, 1f1b or interleaved; default by v
    bool no_scatter_gather_tensors_in_pipeline = false;  // §4.1 off
    bool use_distributed_optimizer = false;              // optimizer state divided over the data parallel ranks
    std::string recompute_granularity;                   // full: §3.5
    int64_t recompute_num_layers = 1;                    // layers per recomputed block

    // Batch and optimizer
    int64_t micro_batch_size = 8;   // b
    int64_t global_batch_size = 0;  // B; 0: b * d
    int64_t train_iters = 100;      // 0: only evaluate and generate
    double lr = 3e-4;               // learning rate after warm-up
    double min_lr = 0;              // at the end of the decay
    std::string lr_decay_style = "linear";
    int64_t lr_warmup_iters = 0;
    int64_t lr_decay_iters = 0;  // 0: train_iters
    double weight_decay = 0.01;
    double clip_grad = 1.0;                    // largest global gradient norm; 0: no clipping
    double loss_scale = 0;                     // fp16: constant factor of the loss; 0: found as the run goes
    double initial_loss_scale = 4294967296.0;  // 2^32
    int64_t loss_scale_window = 1000;          // good iterations after which it doubles
    double adam_beta1 = 0.9, adam_beta2 = 0.999, adam_eps = 1e-8;
    int64_t seed = 1234;

    // Data, evaluation, output
    std::string data_path, valid_data_path;
    std::string tokenizer_model;
    std::string split = "969,30,1";  // training, validation, test
    int64_t eval_interval = 1000, eval_iters = 100;
    int64_t log_interval = 10;  // Megatron-LM's 100 is long on a laptop
    std::string log_file;
    std::string dump;
    std::string save, load;        // directories of checkpoints
    std::string load_hf, save_hf;  // directories of Hugging Face GPT-2 models
    int64_t save_interval = 0;     // iterations; 0: only at the end
    int64_t keep = 0;              // newest checkpoints kept; 0: all
    std::string trace;
    std::string trace_iterations = "2-3";
    int64_t generate = 0;
    std::string prompt = "\n";
    double temperature = 1.0;
    int64_t top_k = 0;          // 0: all
    double top_p = 0;           // 0: all
    double comm_timeout = 600;  // seconds

    std::set<std::string> given;  // names of the options that the command line or --config sets

    // Derived by validate()
    int64_t data_parallel_size = 1;  // d
    int64_t num_microbatches = 1;    // m

    bool recompute() const { return recompute_granularity == "full"; }
};

// A size flag's largest sensible value: products of three of them stay far below 2^63.
constexpr int64_t kLargestSize = int64_t(1) << 20;

inline void add_options(CLI::App& app, Options& o) {
    app.option_defaults()->always_capture_default();
    app.set_config("--config", "", "read options from a file: one `name=value` a line");
    app.get_config_formatter_base()->arrayDelimiter(
        '\x1f');  // no option is a list: commas and spaces are a value's own
    app.allow_config_extras(CLI::config_extras_mode::error);
    app.get_formatter()->column_width(52);

    app.add_option("--num-layers", o.num_layers, "l: transformer layers")->group("Model");
    app.add_option("--hidden-size", o.hidden_size, "h: hidden size")->group("Model");
    app.add_option("--num-attention-heads", o.num_attention_heads, "a: attention heads")->group("Model");
    app.add_option("--seq-length", o.seq_length, "s: sequence length")->group("Model");
    app.add_option("--vocab-size", o.vocab_size, "V: vocabulary; 0: 256 for text, required for a .bin of tokens")
        ->group("Model");
    app.add_option("--attention-dropout", o.attention_dropout, "dropout of attention probabilities")->group("Model");
    app.add_option("--hidden-dropout", o.hidden_dropout, "dropout of embeddings and residual branches")->group("Model");
    app.add_option("--init-method-std", o.init_method_std, "standard deviation of initial weights")->group("Model");

    app.add_option("--tensor-model-parallel-size,--tp", o.tensor_model_parallel_size, "t: ranks that share a layer")
        ->group("Layout");
    app.add_option("--pipeline-model-parallel-size,--pp", o.pipeline_model_parallel_size, "p: ranks in a pipeline")
        ->group("Layout");
    app.add_option("--virtual-pipeline-size,--vp", o.virtual_pipeline_size, "v: model chunks per pipeline rank")
        ->group("Layout");
    app.add_option("--num-layers-per-virtual-pipeline-stage", o.num_layers_per_virtual_pipeline_stage,
                   "v, said as layers per chunk: l / (p v); 0: not said")
        ->group("Layout");
    app.add_option("--schedule", o.schedule, "gpipe, 1f1b or interleaved; default: interleaved if v > 1, else 1f1b")
        ->group("Layout");
    app.add_flag("--no-scatter-gather-tensors-in-pipeline", o.no_scatter_gather_tensors_in_pipeline,
                 "send whole activations between stages, not 1/t each")
        ->group("Layout");
    app.add_flag("--use-distributed-optimizer", o.use_distributed_optimizer,
                 "divide the optimizer's state over the data parallel ranks")
        ->group("Layout");
    app.add_option("--recompute-granularity", o.recompute_granularity, "full: recompute activations in the backward")
        ->group("Layout");
    app.add_option("--recompute-num-layers", o.recompute_num_layers,
                   "layers per recomputed block: only its input is kept")
        ->group("Layout");

    app.add_option("--micro-batch-size", o.micro_batch_size, "b: samples per microbatch")->group("Training");
    app.add_option("--global-batch-size", o.global_batch_size, "B: samples per iteration; 0: b d")->group("Training");
    app.add_option("--train-iters", o.train_iters, "iterations; 0: only evaluate and generate")->group("Training");
    app.add_option("--lr", o.lr, "learning rate after warm-up")->group("Training");
    app.add_option("--min-lr", o.min_lr, "learning rate at the end of the decay")->group("Training");
    app.add_option("--lr-decay-style", o.lr_decay_style, "constant, linear or cosine")->group("Training");
    app.add_option("--lr-warmup-iters", o.lr_warmup_iters, "iterations of linear warm-up")->group("Training");
    app.add_option("--lr-decay-iters", o.lr_decay_iters, "iteration at which the decay ends; 0: --train-iters")
        ->group("Training");
    app.add_option("--weight-decay", o.weight_decay, "of matrices (AdamW)")->group("Training");
    app.add_option("--loss-scale", o.loss_scale, "PRECISION=fp16: constant loss scale; 0: dynamic")->group("Training");
    app.add_option("--initial-loss-scale", o.initial_loss_scale, "PRECISION=fp16: first dynamic loss scale")
        ->group("Training");
    app.add_option("--loss-scale-window", o.loss_scale_window,
                   "PRECISION=fp16: iterations without overflow after which the loss scale doubles")
        ->group("Training");
    app.add_option("--clip-grad", o.clip_grad, "largest global gradient norm; 0: no clipping")->group("Training");
    app.add_option("--adam-beta1", o.adam_beta1, "decay of the gradient's mean")->group("Training");
    app.add_option("--adam-beta2", o.adam_beta2, "decay of the gradient's square")->group("Training");
    app.add_option("--adam-eps", o.adam_eps, "added to the root of the gradient's square")->group("Training");
    app.add_option("--seed", o.seed, "of initial weights, dropout, sample order and sampling")->group("Training");

    app.add_option("--data-path", o.data_path,
                   "text (bytes are tokens), or a .bin of token ids: nanoGPT's, llm.c's, Megatron-LM's with its .idx")
        ->group("Data and output");
    app.add_option("--valid-data-path", o.valid_data_path,
                   "validate on this file; all of --data-path is then for training")
        ->group("Data and output");
    app.add_option("--tokenizer-model", o.tokenizer_model,
                   "a SentencePiece model, for text, --prompt and what is generated")
        ->group("Data and output");
    app.add_option("--split", o.split, "shares of training, validation and test windows")->group("Data and output");
    app.add_option("--eval-interval", o.eval_interval, "iterations between evaluations")->group("Data and output");
    app.add_option("--eval-iters", o.eval_iters, "batches per evaluation; 0: none")->group("Data and output");
    app.add_option("--log-interval", o.log_interval, "iterations between printed lines")->group("Data and output");
    app.add_option("--log-file", o.log_file, "append a JSON object per iteration to this file")
        ->group("Data and output");
    app.add_option("--dump", o.dump, "directory for the last iteration's weights and gradients (safetensors)")
        ->group("Data and output");
    app.add_option("--save", o.save, "write checkpoints into this directory: at the end, on SIGTERM and Ctrl-C, and")
        ->group("Data and output");
    app.add_option("--save-interval", o.save_interval, "every so many iterations; 0: not")->group("Data and output");
    app.add_option("--keep", o.keep, "checkpoints kept, the newest; 0: all")->group("Data and output");
    app.add_option("--load", o.load, "continue from this directory's newest checkpoint")->group("Data and output");
    app.add_option("--load-hf", o.load_hf, "begin with the weights of this directory's Hugging Face GPT-2")
        ->group("Data and output");
    app.add_option("--save-hf", o.save_hf, "write the weights as a Hugging Face GPT-2 into this directory at the end")
        ->group("Data and output");
    app.add_option("--trace", o.trace, "write what every rank did, as Chrome trace events, to this file")
        ->group("Data and output");
    app.add_option("--trace-iterations", o.trace_iterations, "the iterations traced: FIRST-LAST")
        ->group("Data and output");
    app.add_option("--generate", o.generate, "tokens to generate at the end")->group("Data and output");
    app.add_option("--prompt", o.prompt, "what generation continues: text, or token ids for a .bin")
        ->group("Data and output");
    app.add_option("--temperature", o.temperature, "of sampling; 0: the likeliest token")->group("Data and output");
    app.add_option("--top-k", o.top_k, "sample from the k likeliest tokens; 0: all")->group("Data and output");
    app.add_option("--top-p", o.top_p, "sample from the likeliest tokens of this total probability; 0: all")
        ->group("Data and output");
    app.add_option("--comm-timeout", o.comm_timeout,
                   "seconds without progress after which a waiting rank ends the job; 0: never")
        ->group("Data and output");
}

// The options of a command line, or the text to print for --help (then *help is not empty). Throws UserError.
inline Options parse_options(int argc, const char* const* argv, std::string* help) {
    Options options;
    CLI::App app{"Trains a GPT with tensor, pipeline and data parallelism (PTD-P, SC'21).", "train"};
    add_options(app, options);
    try {
        app.parse(argc, argv);
        for (const CLI::Option* option : app.get_options())
            if (option->count() > 0 && !option->get_lnames().empty()) options.given.insert(option->get_lnames()[0]);
    } catch (const CLI::CallForHelp&) {
        *help = app.help();
    } catch (const CLI::ParseError& error) {
        throw UserError(std::string(error.what()) + " (--help lists the options)");
    }
    return options;
}

namespace options_detail {

inline std::string text(int64_t value) { return std::to_string(value); }
inline std::string text(double value) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%g", value);
    return buffer;
}

// std::isfinite may lie under -ffast-math, so the exponent's bits decide.
inline bool finite(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

inline void in_range(const char* flag, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        throw UserError(std::string(flag) + " is " + text(value) + ": it must be from " + text(low) + " to " +
                        text(high));
}
inline void in_range(const char* flag, double value, double low, double high, bool high_excluded = false) {
    if (!finite(value) || value < low || value > high || (high_excluded && value == high))
        throw UserError(std::string(flag) + " is " + text(value) + ": it must be from " + text(low) +
                        (high_excluded ? " to below " : " to ") + text(high));
}
inline void one_of(const char* flag, const std::string& value, const std::vector<std::string>& valid) {
    if (std::find(valid.begin(), valid.end(), value) != valid.end()) return;
    std::string list;
    for (const std::string& name : valid) list += (list.empty() ? "" : ", ") + name;
    throw UserError(std::string(flag) + " is \"" + value + "\": it must be one of " + list);
}

inline std::string divisors(int64_t n, int64_t also_divides = 0) {
    std::string list;
    for (int64_t i = 1; i <= n; ++i)
        if (n % i == 0 && (also_divides == 0 || also_divides % i == 0)) list += (list.empty() ? "" : ", ") + text(i);
    return list;
}
// The multiples of `unit` just below and above `value`.
inline std::string nearest_multiples(int64_t value, int64_t unit) {
    const int64_t below = value / unit * unit;
    return (below > 0 ? text(below) + " or " : "") + text(below + unit);
}

}  // namespace options_detail

// The three parts of --split, as shares.
inline std::vector<double> split_shares(const std::string& split) {
    std::vector<double> shares;
    size_t begin = 0;
    while (begin <= split.size()) {
        const size_t end = std::min(split.find(',', begin), split.size());
        const std::string part = split.substr(begin, end - begin);
        char* rest = nullptr;
        const double share = std::strtod(part.c_str(), &rest);
        if (part.empty() || *rest != '\0' || !options_detail::finite(share) || share < 0)
            shares.push_back(-1);
        else
            shares.push_back(share);
        begin = end + 1;
    }
    const bool bad = shares.size() != 3 || *std::min_element(shares.begin(), shares.end()) < 0 || shares[0] <= 0;
    if (bad)
        throw UserError("--split is \"" + split +
                        "\": it must be three shares, training (above 0), validation, test, such as 969,30,1");
    return shares;
}

// FIRST-LAST of --trace-iterations.
inline std::pair<int64_t, int64_t> trace_range(const std::string& range) {
    long long first = 0, last = 0;
    int used = 0;
    if (std::sscanf(range.c_str(), "%lld-%lld%n", &first, &last, &used) != 2 || size_t(used) != range.size() ||
        first < 1 || last < first)
        throw UserError("--trace-iterations is \"" + range +
                        "\": it must be FIRST-LAST, such as 2-3, from iteration 1 on");
    return {first, last};
}

inline const std::vector<std::string> kSchedules = {"gpipe", "1f1b", "interleaved"};

// Fills in --schedule's default for v chunks per rank, and refuses one that v does not fit. Throws UserError.
inline void choose_schedule(std::string& schedule, int64_t v) {
    if (schedule.empty()) schedule = v > 1 ? "interleaved" : "1f1b";
    if (v > 1 && schedule != "interleaved")
        throw UserError("--schedule " + schedule + " has one model chunk per rank, but --virtual-pipeline-size is " +
                        options_detail::text(v) + ": use --schedule interleaved or --virtual-pipeline-size 1");
    if (v == 1 && schedule == "interleaved")
        throw UserError(
            "--schedule interleaved needs --virtual-pipeline-size 2 or more, but it is 1: that is --schedule 1f1b");
}

inline void check_loss_scale(const Options& o) {
    using namespace options_detail;
    auto power_of_two = [](const char* flag, double value) {
        int exponent = 0;
        if (std::frexp(value, &exponent) != 0.5 || value < 1 || value > 0x1p60)
            throw UserError(std::string(flag) + " is " + text(value) +
                            ": it must be a power of two from 1 to 2^60, such as 65536");
    };
    if (o.loss_scale != 0) power_of_two("--loss-scale", o.loss_scale);
    power_of_two("--initial-loss-scale", o.initial_loss_scale);
    in_range("--loss-scale-window", o.loss_scale_window, 1, int64_t(1) << 31);
    for (const char* flag : {"loss-scale", "initial-loss-scale", "loss-scale-window"}) {
        if (!o.given.count(flag)) continue;
        if (!kScalesLoss)
            throw UserError("--" + std::string(flag) + " is for fp16, and this build computes in " + kPrecision +
                            ": leave it out, or build with make PRECISION=fp16");
        if (o.loss_scale != 0 && std::string(flag) != "loss-scale")
            throw UserError("--" + std::string(flag) + " is for a dynamic loss scale, but --loss-scale " +
                            text(o.loss_scale) + " is constant: give one of the two");
    }
}

// Every value by itself, and pairs of flags that exclude each other.
inline void validate_values(const Options& o) {
    using namespace options_detail;
    in_range("--num-layers", o.num_layers, 1, 100000);
    in_range("--hidden-size", o.hidden_size, 1, kLargestSize);
    in_range("--num-attention-heads", o.num_attention_heads, 1, kLargestSize);
    in_range("--seq-length", o.seq_length, 1, kLargestSize);
    in_range("--vocab-size", o.vocab_size, 0, int64_t(1) << 30);
    in_range("--micro-batch-size", o.micro_batch_size, 1, kLargestSize);
    in_range("--global-batch-size", o.global_batch_size, 0, int64_t(1) << 30);
    in_range("--train-iters", o.train_iters, 0, int64_t(1) << 31);
    in_range("--tensor-model-parallel-size", o.tensor_model_parallel_size, 1, kLargestSize);
    in_range("--pipeline-model-parallel-size", o.pipeline_model_parallel_size, 1, kLargestSize);
    in_range("--virtual-pipeline-size", o.virtual_pipeline_size, 1, kLargestSize);
    in_range("--num-layers-per-virtual-pipeline-stage", o.num_layers_per_virtual_pipeline_stage, 0, o.num_layers);
    in_range("--attention-dropout", o.attention_dropout, 0.0, 1.0, true);
    in_range("--hidden-dropout", o.hidden_dropout, 0.0, 1.0, true);
    in_range("--init-method-std", o.init_method_std, 0.0, 100.0);
    in_range("--seed", o.seed, 0, int64_t(1) << 62);
    in_range("--lr", o.lr, 0.0, 1e6);
    in_range("--min-lr", o.min_lr, 0.0, o.lr);
    in_range("--weight-decay", o.weight_decay, 0.0, 1e6);
    in_range("--clip-grad", o.clip_grad, 0.0, 1e30);
    check_loss_scale(o);
    in_range("--adam-beta1", o.adam_beta1, 0.0, 1.0, true);
    in_range("--adam-beta2", o.adam_beta2, 0.0, 1.0, true);
    in_range("--adam-eps", o.adam_eps, 0.0, 1.0);
    in_range("--lr-warmup-iters", o.lr_warmup_iters, 0, int64_t(1) << 31);
    in_range("--lr-decay-iters", o.lr_decay_iters, 0, int64_t(1) << 31);
    in_range("--eval-interval", o.eval_interval, 1, int64_t(1) << 31);
    in_range("--eval-iters", o.eval_iters, 0, int64_t(1) << 31);
    in_range("--log-interval", o.log_interval, 1, int64_t(1) << 31);
    in_range("--save-interval", o.save_interval, 0, int64_t(1) << 31);
    in_range("--keep", o.keep, 0, int64_t(1) << 31);
    if (o.save.empty() && (o.save_interval > 0 || o.keep > 0))
        throw UserError(std::string(o.save_interval > 0 ? "--save-interval" : "--keep") + " needs --save DIR");
    if (!o.load.empty() && !o.load_hf.empty())
        throw UserError("--load and --load-hf both say where weights come from: give one of them");
    in_range("--generate", o.generate, 0, kLargestSize);
    in_range("--temperature", o.temperature, 0.0, 1000.0);
    in_range("--top-k", o.top_k, 0, int64_t(1) << 30);
    in_range("--top-p", o.top_p, 0.0, 1.0);
    in_range("--comm-timeout", o.comm_timeout, 0.0, 1e9);
    one_of("--lr-decay-style", o.lr_decay_style, {"constant", "linear", "cosine"});
    if (!o.schedule.empty()) one_of("--schedule", o.schedule, kSchedules);
    if (!o.recompute_granularity.empty()) one_of("--recompute-granularity", o.recompute_granularity, {"full"});
    split_shares(o.split);
    if (!o.valid_data_path.empty() && o.given.count("split"))
        throw UserError("--split " + o.split + " and --valid-data-path " + o.valid_data_path +
                        " both say what to validate on: give one of them");
    const int64_t last_traced = trace_range(o.trace_iterations).second;
    if (!o.trace.empty() && last_traced > o.train_iters)
        throw UserError("--trace-iterations " + o.trace_iterations + " goes beyond --train-iters " +
                        text(o.train_iters));
}

// The model's sizes against the layout's; fills in v and the schedule.
inline void validate_layout(Options& o) {
    using namespace options_detail;
    const int64_t l = o.num_layers, h = o.hidden_size, a = o.num_attention_heads, s = o.seq_length;
    const int64_t t = o.tensor_model_parallel_size, p = o.pipeline_model_parallel_size;
    if (h % a != 0)
        throw UserError("--hidden-size " + text(h) + " is not divisible by --num-attention-heads " + text(a) +
                        ": valid numbers of heads are " + divisors(h));
    if (a % t != 0)
        throw UserError("--num-attention-heads " + text(a) + " is not divisible by --tensor-model-parallel-size " +
                        text(t) + ": valid sizes are " + divisors(a, h));
    if (h % t != 0)
        throw UserError("--hidden-size " + text(h) + " is not divisible by --tensor-model-parallel-size " + text(t) +
                        ": valid sizes are " + divisors(a, h));
    if (double(o.micro_batch_size) * double(s) * double(std::max(4 * h, o.vocab_size)) > 2e15 ||
        double(s) * double(s) * double(a) * double(o.micro_batch_size) > 2e15 ||
        double(s) * double(s) / 4 * double(a) > 4e9 || double(o.micro_batch_size) * double(s) > 2e9)
        throw UserError("--seq-length " + text(s) + ", --micro-batch-size " + text(o.micro_batch_size) +
                        ", --hidden-size " + text(h) + " and --num-attention-heads " + text(a) +
                        " together are beyond any machine's memory");
    if (p > l)
        throw UserError("--pipeline-model-parallel-size " + text(p) + " is more than --num-layers " + text(l) +
                        ": valid sizes are " + divisors(l));
    if (o.num_layers_per_virtual_pipeline_stage > 0) {
        const int64_t n = o.num_layers_per_virtual_pipeline_stage;
        if (l % (p * n) != 0)
            throw UserError("--num-layers " + text(l) + " is not divisible by --pipeline-model-parallel-size " +
                            text(p) + " times --num-layers-per-virtual-pipeline-stage " + text(n) +
                            ": valid layers per chunk are " +
                            (l % p == 0 ? divisors(l / p) : "none, since p does not divide l"));
        const int64_t v = l / (p * n);
        if (o.virtual_pipeline_size != 1 && o.virtual_pipeline_size != v)
            throw UserError("--virtual-pipeline-size " + text(o.virtual_pipeline_size) +
                            " and --num-layers-per-virtual-pipeline-stage " + text(n) + ", which makes it " + text(v) +
                            ", contradict each other: give one of them");
        o.virtual_pipeline_size = v;
    }
    const int64_t v = o.virtual_pipeline_size;
    if (v > 1 && p == 1)
        throw UserError("--virtual-pipeline-size " + text(v) +
                        " needs a pipeline, but --pipeline-model-parallel-size is 1: "
                        "use 2 or more, or --virtual-pipeline-size 1");
    if (l % (p * v) != 0) {
        std::string chunks;
        for (int64_t i = 1; i <= l / p; ++i)
            if (l % (p * i) == 0) chunks += (chunks.empty() ? "" : ", ") + text(i);
        throw UserError("--num-layers " + text(l) + " is not divisible by --pipeline-model-parallel-size " + text(p) +
                        " times --virtual-pipeline-size " + text(v) + ": valid numbers of layers near it are " +
                        nearest_multiples(l, p * v) + "; with " + text(l) + " layers, valid pipeline sizes are " +
                        divisors(l) +
                        (chunks.empty() ? "" : "; with this pipeline size, valid virtual sizes are " + chunks));
    }
    choose_schedule(o.schedule, v);
}

// The ranks and the batch against the layout; fills in d, B and m.
inline void validate_batch(Options& o, int64_t ranks) {
    using namespace options_detail;
    const int64_t t = o.tensor_model_parallel_size, p = o.pipeline_model_parallel_size, v = o.virtual_pipeline_size;
    if (ranks % (t * p) != 0)
        throw UserError("the number of ranks, " + text(ranks) + ", is not divisible by --tensor-model-parallel-size " +
                        text(t) + " times --pipeline-model-parallel-size " + text(p) + " = " + text(t * p) +
                        ": start " + nearest_multiples(ranks, t * p) + " ranks (mpirun -np)");
    const int64_t d = o.data_parallel_size = ranks / (t * p), b = o.micro_batch_size;
    if (o.global_batch_size == 0) o.global_batch_size = v > 1 ? b * d * p : b * d;
    if (o.global_batch_size % (b * d) != 0)
        throw UserError("--global-batch-size " + text(o.global_batch_size) +
                        " is not divisible by --micro-batch-size " + text(b) + " times the data parallel size " +
                        text(d) + " = " + text(b * d) + ": nearest valid sizes are " +
                        nearest_multiples(o.global_batch_size, b * d));
    const int64_t m = o.num_microbatches = o.global_batch_size / (b * d);
    if (v > 1 && m % p != 0)
        throw UserError("--schedule interleaved needs the number of microbatches, " + text(m) +
                        " (--global-batch-size " + text(o.global_batch_size) + " / (" + text(b) + " * " + text(d) +
                        ")), to be a multiple of --pipeline-model-parallel-size " + text(p) +
                        ": nearest valid batch sizes are " + nearest_multiples(o.global_batch_size, b * d * p));
    if (m * v > (int64_t(1) << 22))
        throw UserError("--global-batch-size " + text(o.global_batch_size) + " makes " + text(m) +
                        " microbatches, more than 4194304 / v: use a larger --micro-batch-size");
}

// Checks everything that the options and the number of ranks decide, and fills in what follows from them. Throws
// UserError.
inline void validate(Options& o, int64_t ranks) {
    using namespace options_detail;
    validate_values(o);
    validate_layout(o);
    validate_batch(o, ranks);
    if (!o.recompute() && o.recompute_num_layers != 1)
        throw UserError("--recompute-num-layers " + text(o.recompute_num_layers) +
                        " needs --recompute-granularity full");
    if (o.recompute())
        in_range("--recompute-num-layers", o.recompute_num_layers, 1,
                 o.num_layers / (o.pipeline_model_parallel_size * o.virtual_pipeline_size));
    if (o.lr_decay_iters == 0) o.lr_decay_iters = std::max<int64_t>(o.train_iters, 1);
    if (o.lr_warmup_iters > 0 && o.lr_warmup_iters >= o.lr_decay_iters && o.lr_decay_style != "constant")
        throw UserError("--lr-warmup-iters " + text(o.lr_warmup_iters) + " must be less than --lr-decay-iters " +
                        text(o.lr_decay_iters) + " (by default --train-iters)");
    if (o.data_path.empty()) throw UserError("--data-path is required: a text file, or a .bin of uint16 tokens");
}

// Every option as used, by its flag's name.
inline nlohmann::ordered_json options_as_json(const Options& o) {
    nlohmann::ordered_json json;
    auto put = [&](const char* name, auto value) { json[name] = value; };
    put("num-layers", o.num_layers);
    put("hidden-size", o.hidden_size);
    put("num-attention-heads", o.num_attention_heads);
    put("seq-length", o.seq_length);
    put("vocab-size", o.vocab_size);
    put("attention-dropout", o.attention_dropout);
    put("hidden-dropout", o.hidden_dropout);
    put("init-method-std", o.init_method_std);
    put("tensor-model-parallel-size", o.tensor_model_parallel_size);
    put("pipeline-model-parallel-size", o.pipeline_model_parallel_size);
    put("virtual-pipeline-size", o.virtual_pipeline_size);
    put("num-layers-per-virtual-pipeline-stage",
        o.num_layers / (o.pipeline_model_parallel_size * o.virtual_pipeline_size));
    put("data-parallel-size", o.data_parallel_size);
    put("schedule", o.schedule);
    put("no-scatter-gather-tensors-in-pipeline", o.no_scatter_gather_tensors_in_pipeline);
    put("use-distributed-optimizer", o.use_distributed_optimizer);
    put("recompute-granularity", o.recompute_granularity);
    put("recompute-num-layers", o.recompute_num_layers);
    put("micro-batch-size", o.micro_batch_size);
    put("global-batch-size", o.global_batch_size);
    put("num-microbatches", o.num_microbatches);
    put("train-iters", o.train_iters);
    put("lr", o.lr);
    put("min-lr", o.min_lr);
    put("lr-decay-style", o.lr_decay_style);
    put("lr-warmup-iters", o.lr_warmup_iters);
    put("lr-decay-iters", o.lr_decay_iters);
    put("weight-decay", o.weight_decay);
    put("precision", kPrecision);
    put("loss-scale", o.loss_scale);
    put("initial-loss-scale", o.initial_loss_scale);
    put("loss-scale-window", o.loss_scale_window);
    put("clip-grad", o.clip_grad);
    put("adam-beta1", o.adam_beta1);
    put("adam-beta2", o.adam_beta2);
    put("adam-eps", o.adam_eps);
    put("seed", o.seed);
    put("data-path", o.data_path);
    put("valid-data-path", o.valid_data_path);
    put("tokenizer-model", o.tokenizer_model);
    put("split", o.split);
    put("eval-interval", o.eval_interval);
    put("eval-iters", o.eval_iters);
    put("log-interval", o.log_interval);
    put("log-file", o.log_file);
    put("dump", o.dump);
    put("save", o.save);
    put("save-interval", o.save_interval);
    put("keep", o.keep);
    put("load", o.load);
    put("load-hf", o.load_hf);
    put("save-hf", o.save_hf);
    put("trace", o.trace);
    put("trace-iterations", o.trace_iterations);
    put("generate", o.generate);
    put("prompt", o.prompt);
    put("temperature", o.temperature);
    put("top-k", o.top_k);
    put("top-p", o.top_p);
    put("comm-timeout", o.comm_timeout);
    return json;
}

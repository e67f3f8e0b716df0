// The paper's analysis as a tool (§3, §5): which layout for this model on these devices, and why; and schedules as
// pictures (§2.2, Figures 3 and 4), drawn from the tables that `train` runs.
//
//   ./plan --gpus 1024 --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --global-batch-size 1536
//   ./plan --paper
//   ./plan --draw-schedule --schedule interleaved --pp 4 --vp 2 --microbatches 8
//
// Rules kept here:
//   - time comes from first principles: FLOPs, bytes and messages of §2.3, §3 and §4, over the rates of a hardware file
//     (examples/hardware/), which also holds the few constants that were set on the paper's own measurements;
//   - an iteration is the replay of pipeline.cu's tables; memory is what pipeline.cu's memory_plan() says;
//   - the paper's takeaways are not rules of the search: they come out of it.
//
// Defines: Hardware, the time of a layer, of messages and of an iteration; the search; the paper's figures; pictures.
#include <omp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "pipeline.cu"
#include "platform/hardware.h"
#include "platform/options.h"
#include "platform/picture.h"

// ---------------------------------------------------------------------------------------------------------------------
// Hardware (files: platform/hardware.h)

// This machine's rates with as many ranks as there are now, each with its share of the cores. Takes a few seconds;
// collective. The constants that a hardware file holds come from two sizes of GEMM and a few kernels against a copy.
inline Hardware measure_this_machine() {
    int ranks = 1;
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    if (!std::getenv("OMP_NUM_THREADS")) omp_set_num_threads(std::max(1, omp_get_num_procs() / ranks));
    const auto grid = make_grid(1, ranks, 1);
    Device device;
    auto seconds_of = [&](const std::function<void()>& run) {  // the median of 7, all ranks at once
        std::vector<double> list;
        for (int i = 0; i < 8; ++i) {
            CUDA_CHECK(cudaStreamSynchronize(device.stream));
            MPI_FINISH(MPI_Ibarrier, MPI_COMM_WORLD);
            const double start = now();
            run();
            CUDA_CHECK(cudaStreamSynchronize(device.stream));
            if (i > 0) list.push_back(now() - start);
        }
        std::sort(list.begin(), list.end());
        return list[list.size() / 2];
    };
    constexpr int64_t large = 1024, small = 128, T = 1024, h = 512;
    DeviceBuffer<real> a(large * large), b(large * large), c(large * large);
    auto gemm_rate = [&](int64_t n) {
        const int times = n == small ? 100 : 1;
        return times * 2 * double(n) * double(n) * double(n) / seconds_of([&] {
                   for (int i = 0; i < times; ++i) gemm(device, n, n, n, {a.data, n}, {b.data, n}, c.data, n);
               });
    };
    const double at_large = gemm_rate(large), at_small = gemm_rate(small);
    Hardware hw;
    hw.name = "this machine, " + std::to_string(ranks) + " rank(s)";
    hw.word = sizeof(real);
    // at_n = peak / (1 + half/n)^3 for both sizes
    const double q = std::cbrt(at_large / at_small);
    hw.gemm_half = q > 1 ? (q - 1) / (1 / double(small) - q / double(large)) : 0;
    if (hw.gemm_half < 0) hw.gemm_half = 0;
    hw.peak = at_large * std::pow(1 + hw.gemm_half / double(large), 3);
    DeviceBuffer<real> x(T * h), y(T * h), vector(h);
    DeviceBuffer<float> statistics(2 * T), partial(row_chunks(T) * 2 * h);
    const double bytes = double(sizeof(real)) * double(T * h);
    hw.memory_rate =
        2 * bytes / seconds_of([&] {
            CUDA_CHECK(cudaMemcpyAsync(y.data, x.data, T * h * sizeof(real), cudaMemcpyDeviceToDevice, device.stream));
        });
    const double kernels =
        11 * bytes / seconds_of([&] {
            launch<layernorm_forward_kernel>(device, T, kBlock, x.data, vector.data, vector.data, y.data,
                                             statistics.data, statistics.data + T, int(h), 1e-5f);
            launch<layernorm_backward_kernel<true>>(device, row_chunks(T), kBlock, x.data, vector.data, statistics.data,
                                                    statistics.data + T, y.data, x.data, partial.data, T, int(h));
            launch<bias_gelu_forward_kernel>(device, T, kBlock, x.data, vector.data, y.data, int(h));
            launch<bias_gelu_backward_kernel>(device, row_chunks(T), kBlock, x.data, vector.data, y.data, partial.data,
                                              T, int(h));
        });
    hw.memory_share = kernels / hw.memory_rate;
    hw.memory = 0.9 * double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE)) / ranks;
    hw.devices_per_node = 1 << 20;
    hw.device_link = 1e30;  // one rank sends nothing
    if (ranks > 1)
        hw.device_link =
            2.0 * (ranks - 1) / ranks * bytes / seconds_of([&] { all_reduce(device, grid->data, x.data, T * h); });
    hw.network_link = hw.device_link;
    return hw;
}

// ---------------------------------------------------------------------------------------------------------------------
// What is planned

// A model and batch, and how they are laid out; the notation is §3.1's.
struct Job {
    int64_t l = 24, h = 2304, a = 24, s = 2048, V = 51200, B = 512;
    bool recompute = true, scatter_gather = true, fusion = true;
    std::string schedule;  // default: interleaved if v > 1, else 1f1b

    double parameters() const {  // eq. 2
        const double L = double(l), H = double(h);
        return 12 * L * H * H * (1 + 13 / (12 * H) + double(V + s) / (12 * L * H));
    }
    GptConfig config() const {
        GptConfig config;
        config.layers = l;
        config.hidden = h;
        config.heads = a;
        config.sequence = s;
        config.vocab = V;
        return config;
    }
    double flops() const { return iteration_flops(config(), B, recompute); }
};
struct Layout {
    int64_t p = 1, t = 1, d = 1, v = 1, b = 1;
    int64_t devices() const { return p * t * d; }
};

inline ScheduleKind kind_of(const Job& job, const Layout& x) {
    return schedule_kind(job.schedule.empty() ? (x.v > 1 ? "interleaved" : "1f1b") : job.schedule);
}

constexpr double kOptimizerBytes = 40;  // moved per parameter: Adam's 28, unscaling, the norm, and casts

// Why a layout cannot be; empty if it can.
inline std::string why_not(const Job& job, const Layout& x) {
    using options_detail::text;
    auto divides = [](int64_t divisor, int64_t n) { return n % divisor == 0; };
    if (!divides(x.t, job.a)) return "--num-attention-heads " + text(job.a) + " is not a multiple of t = " + text(x.t);
    if (!divides(x.t, job.h)) return "--hidden-size " + text(job.h) + " is not a multiple of t = " + text(x.t);
    if (!divides(x.p * x.v, job.l))
        return "--num-layers " + text(job.l) + " is not a multiple of p v = " + text(x.p * x.v);
    if (!divides(x.b * x.d, job.B))
        return "--global-batch-size " + text(job.B) + " is not a multiple of b d = " + text(x.b * x.d);
    const int64_t m = job.B / (x.b * x.d);
    if (x.v > 1 && x.p == 1) return "v = " + text(x.v) + " needs a pipeline, but p is 1";
    if (x.v > 1 && !divides(x.p, m))
        return "the " + text(m) + " microbatches are not a multiple of p = " + text(x.p) + ", as v > 1 needs";
    return "";
}

// ---------------------------------------------------------------------------------------------------------------------
// Time, from first principles

// `batch` products of [m, k] and [k, n]: the slower of arithmetic and memory.
inline double gemm_time(const Hardware& hw, double m, double n, double k, double batch = 1) {
    const double half = hw.gemm_half;
    const double share = hw.gemm_share / ((1 + half / m) * (1 + half / n) * (1 + half / k));
    const double bytes = hw.word * batch * (m * k + k * n + m * n);
    return std::max(2 * m * n * k * batch / (hw.peak * share), bytes / (hw.memory_rate * hw.memory_share));
}
inline double moving_time(const Hardware& hw, double bytes) { return bytes / (hw.memory_rate * hw.memory_share); }

// The seconds of a ring over n = `ranks` devices, `per_node` of them on each node: every edge carries `factor` (n-1)/n
// of the bytes (2 for an all-reduce, 1 for an all-gather), at the rate of the slowest: device_link device_link_share
// within a node; between nodes network_link network_share, of which the ring has those of `per_node` devices, and every
// round of messages takes hw.exchange to begin, `factor` times. One rank sends nothing.
inline double ring_time(const Hardware& hw, double bytes, double ranks, double per_node, double factor) {
    // [lab 5.4] a ring's time
    if (ranks <= 1) return 0;
    const double inside = hw.device_link * hw.device_link_share,
                 between = hw.network_link * hw.network_share * per_node;
    const bool within = per_node >= ranks;
    return factor * (ranks - 1) / ranks * bytes / (within ? inside : std::min(inside, between)) +
           (within ? 0 : factor * hw.exchange);
    // [end]
}

struct Pair {
    double forward = 0, backward = 0;
};

// One layer's forward and backward of a microbatch on one device (§2.3, §4.2), recomputation not included.
inline Pair layer_time(const Hardware& hw, const Job& job, const Layout& x) {
    const double t = double(x.t), h = double(job.h), s = double(job.s), b = double(x.b), heads = double(job.a) / t;
    const double T = s * b, size = h / double(job.a);
    const double products = gemm_time(hw, T, 3 * h / t, h) + gemm_time(hw, T, h, h / t) +
                            gemm_time(hw, T, 4 * h / t, h) + gemm_time(hw, T, h, 4 * h / t) +
                            gemm_time(hw, s, s, size, b * heads) + gemm_time(hw, s, size, s, b * heads);
    // Elements read and written: two LayerNorms and two bias+dropout+add on the whole stream, bias+GeLU and the QKV
    // bias on 1/t; the softmax reads the visible half of its s x s scores, dropout reads, writes and keeps a mask (half
    // a word)
    const double stream = T * h, scores = b * heads * s * s;
    double forward = stream * (2 * 2 + 2 * 3 + (8 + 6) / t) + scores * (1.5 + 2.5);
    double backward = stream * (2 * 4 + 2 * 4 + (12 + 6) / t) + scores * (2.5 + 2);
    if (!job.fusion) {
        // bias, GeLU's factors, dropout and addition as kernels of their own; scaling, masking and softmax too
        forward += stream * (24 / t + 2 * 4) + scores * 6;
        backward += stream * (24 / t + 2 * 4) + scores * 4;
    }
    const double reduce = 2 * ring_time(hw, hw.word * stream, t, std::min(t, double(hw.devices_per_node)), 2);
    return {products + moving_time(hw, hw.word * forward) + reduce,
            2 * products + moving_time(hw, hw.word * backward) + reduce};
}

// The output layer and loss: logits [T, V/t], of which cross-entropy makes eight passes forward and three backward.
inline Pair head_time(const Hardware& hw, const Job& job, const Layout& x) {
    const double T = double(job.s * x.b), n = double(job.V) / double(x.t);
    const double product = gemm_time(hw, T, n, double(job.h));
    return {product + moving_time(hw, 38 * T * n), 2 * product + moving_time(hw, 14 * T * n)};
}

// A message between stages, with scatter/gather (§4.1) or without; the sender waits for it.
// Within one node, bytes over the device link; between nodes, the bytes (a t-th of them with scatter/gather) over the
// network link and hw.exchange, and with scatter/gather the all-gather within the tensor group (a ring of factor 1).
inline double message_time(const Hardware& hw, const Job& job, const Layout& x) {
    // [lab 5.5] a message between stages
    if (x.p == 1) return 0;
    const double bytes = hw.word * double(job.s * x.b * job.h), t = double(x.t);
    if (x.devices() <= hw.devices_per_node) return bytes / (hw.device_link * hw.device_link_share);
    const double link = hw.network_link * hw.network_share;
    if (!job.scatter_gather || x.t == 1) return bytes / link + hw.exchange;
    return bytes / t / link + hw.exchange + ring_time(hw, bytes, t, std::min(t, double(hw.devices_per_node)), 1);
    // [end]
}

// Parameters on the fullest device: its layers, and the embedding.
inline double parameters_per_device(const Job& job, const Layout& x) {
    const double h = double(job.h), t = double(x.t);
    return double(job.l) / double(x.p) * (12 * h * h + 13 * h) / t + double(job.V + job.s) * h / t;
}

// Gradients: rings over the data parallel group; devices of one tensor group fill a node first (§3.2).
inline double gradient_time(const Hardware& hw, const Job& job, const Layout& x) {
    const double replicas_on_node =
        std::max(1.0, std::min(double(x.d), std::floor(double(hw.devices_per_node) / double(x.t))));
    return ring_time(hw, hw.word * parameters_per_device(job, x), double(x.d), replicas_on_node, 2);
}

struct Prediction {
    Layout layout;
    double seconds = 0;                            // an iteration
    double pipeline = 0, data = 0, optimizer = 0;  // of which
    double bubble = 0;                             // of the replayed pipeline, relative to the ideal time
    double flops_per_device = 0, share = 0, memory = 0, weights_and_optimizer = 0;
    bool fits = true;
};

// The pipeline's time for m microbatches. Beyond 3 p the schedule repeats itself every p, so that is not replayed.
inline double replayed_seconds(const Job& job, const Layout& x, const Hardware& hw, int m, double* bubble) {
    const ScheduleKind kind = kind_of(job, x);
    const Pair layer = layer_time(hw, job, x), head = head_time(hw, job, x);
    const double layers = double(job.l) / double(x.p * x.v), message = message_time(hw, job, x);
    const double recompute = job.recompute ? layer.forward : 0;
    const OpCost cost = [&](int rank, const Op& op) {
        const bool last = rank == x.p - 1 && op.chunk == x.v - 1;
        return op.forward ? layers * layer.forward + message + (last ? head.forward : 0)
                          : layers * (layer.backward + recompute) + message + (last ? head.backward : 0);
    };
    auto makespan = [&](int count, double* ideal) {
        const Schedule schedule = make_schedule(kind, int(x.p), int(x.v), count);
        double end = 0;
        *ideal = 0;
        for (const auto& rank : timeline(schedule, cost)) {
            double busy = 0;
            for (const Interval& interval : rank) busy += interval.end - interval.start;
            *ideal = std::max(*ideal, busy);
            end = std::max(end, rank.back().end);
        }
        return end;
    };
    const int p = int(x.p), start = 2 * p + m % p;
    double ideal = 0, total = 0;
    if (m <= 4 * p || kind == ScheduleKind::gpipe) {
        total = makespan(m, &ideal);
    } else {
        double ideal_before = 0;
        const double before = makespan(start, &ideal_before);
        total = makespan(start + p, &ideal);
        const double periods = double(m - start - p) / p;
        total += periods * (total - before);
        ideal += periods * (ideal - ideal_before);
    }
    *bubble = (total - ideal) / ideal;
    return total;
}

// The memory of the fullest device in bytes, by the function that `train` predicts with.
inline MemoryPlan memory_of(const Job& job, const Layout& x, const Hardware& hw) {
    const int64_t m = job.B / (x.b * x.d);
    const ScheduleKind kind = kind_of(job, x);
    // More than 2 p microbatches are never in flight, but with GPipe
    const int64_t replayed = kind == ScheduleKind::gpipe ? m : std::min(m, 2 * x.p + m % x.p);
    const Schedule schedule = make_schedule(kind, int(x.p), int(x.v), int(replayed));
    const PipelineOptions options{job.recompute ? 1 : 0, job.scatter_gather};
    const Program program = compile(schedule);
    MemoryPlan most;
    for (int rank : {0, int(x.p) - 1}) {
        const MemoryPlan plan = memory_plan(job.config(), schedule, program, int(x.t), 0, int(x.d), rank, x.b, false,
                                            options, size_t(hw.word));
        if (plan.on_device() > most.on_device()) most = plan;
    }
    return most;
}

inline Prediction predict(const Job& job, const Layout& x, const Hardware& hw, const MemoryPlan& memory) {
    Prediction result;
    result.layout = x;
    const int64_t m = job.B / (x.b * x.d);
    result.pipeline = replayed_seconds(job, x, hw, int(m), &result.bubble);
    result.data = gradient_time(hw, job, x);  // and tied embeddings, between first and last stage
    if (x.p > 1) result.data += ring_time(hw, hw.word * double(job.V * job.h) / double(x.t), 2, 1, 2);
    result.optimizer = moving_time(hw, kOptimizerBytes * parameters_per_device(job, x));
    result.seconds = result.pipeline + result.data + result.optimizer;
    result.flops_per_device = job.flops() / result.seconds / double(x.devices());
    result.share = result.flops_per_device / hw.peak;
    result.memory = memory.on_device();
    result.weights_and_optimizer = memory.weights + memory.gradients + memory.optimizer;
    result.fits = result.memory <= hw.memory;
    return result;
}
inline Prediction predict(const Job& job, const Layout& x, const Hardware& hw) {
    return predict(job, x, hw, memory_of(job, x, hw));
}

// ---------------------------------------------------------------------------------------------------------------------
// The search

// Seconds without a replay, for choosing what to replay: work over the busiest stage and the formula's bubble.
inline double quick_seconds(const Job& job, const Layout& x, const Hardware& hw) {
    const Pair layer = layer_time(hw, job, x), head = head_time(hw, job, x);
    const double m = double(job.B) / double(x.b * x.d), layers = double(job.l) / double(x.p);
    const double both = layers * (layer.forward * (job.recompute ? 2 : 1) + layer.backward) +
                        2 * double(x.v) * message_time(hw, job, x);
    return m * (both + head.forward + head.backward) + double(x.p - 1) / double(x.v) * both + gradient_time(hw, job, x);
}

// A lower bound of a layout's memory: weights, gradients and optimizer of its layers, and the stage inputs in flight.
inline double least_memory(const Job& job, const Layout& x, const Hardware& hw) {
    const double inputs = double(std::min(x.p, job.B / (x.b * x.d))) * hw.word * double(job.s * x.b * job.h) *
                          double(job.l) / double(x.p);
    return (16 + (hw.word < 4 ? hw.word : 0)) * double(job.l) / double(x.p) * 12 * double(job.h) * double(job.h) /
               double(x.t) +
           (job.recompute ? inputs : 0);
}

// The `count` fastest layouts of all that divide and fit, best first.
inline std::vector<Prediction> search(const Job& job, int64_t devices, const Hardware& hw, size_t count) {
    std::vector<std::pair<double, Layout>> quick;
    auto divisors = [](int64_t n, int64_t most) {
        std::vector<int64_t> list;
        for (int64_t i = 1; i <= std::min(n, most); ++i)
            if (n % i == 0) list.push_back(i);
        return list;
    };
    for (int64_t t : divisors(devices, job.a))
        for (int64_t p : divisors(devices / t, job.l))
            for (int64_t v : divisors(std::max<int64_t>(1, job.l / p), 16))
                for (int64_t b = 1; b <= 64; b *= 2) {
                    const Layout x{p, t, devices / t / p, v, b};
                    if (!why_not(job, x).empty() || least_memory(job, x, hw) > hw.memory) continue;
                    quick.push_back({quick_seconds(job, x, hw), x});
                }
    std::sort(quick.begin(), quick.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
    std::vector<Prediction> found;
    size_t tried = 0;
    for (const auto& [seconds, x] : quick) {
        if (found.size() >= count && tried >= 3 * count) break;
        const MemoryPlan memory = memory_of(job, x, hw);
        if (memory.on_device() > hw.memory) continue;
        ++tried;
        found.push_back(predict(job, x, hw, memory));
    }
    std::sort(found.begin(), found.end(), [](const auto& x, const auto& y) { return x.seconds < y.seconds; });
    if (found.size() > count) found.resize(count);
    return found;
}

// ---------------------------------------------------------------------------------------------------------------------
// The paper's own measurements (TFLOP/s per GPU; Figure 17: sequences/s), read off its tables and plots

struct PaperPoint {
    std::string figure, series;
    double x = 0;  // on the figure's horizontal axis
    Job job;
    Layout layout;
    double measured = 0, rounding = 0;  // half of the last digit read
    bool sequences = false;

    std::string name() const {
        return figure + (series.empty() ? "" : ", " + series) + ", " + axis() + " = " + options_detail::text(x);
    }
    const char* axis() const {
        return figure == "Table 1" ? "h" : figure == "Figure 7" ? "b" : figure == "Figure 11" ? "p" : "B";
    }
    double predicted(const Hardware& hw) const {
        const Prediction prediction = predict(job, layout, hw);
        return sequences ? double(job.B) / prediction.seconds : prediction.flops_per_device / 1e12;
    }
};

inline std::vector<PaperPoint> paper_points() {
    std::vector<PaperPoint> points;
    auto add = [&](const std::string& figure, const std::string& series, int64_t at, int64_t l, int64_t h, int64_t a,
                   int64_t B, Layout x, double measured, bool recompute = true, bool sequences = false) {
        Job job;
        job.l = l;
        job.h = h;
        job.a = a;
        job.B = B;
        job.recompute = recompute;
        points.push_back({figure, series, double(at), job, x, measured, sequences ? 0.05 : 0.5, sequences});
    };
    using options_detail::text;
    struct Row {
        int64_t a, h, l, t, p, B, b, v, d;
        double measured;
    };
    for (const Row& r : std::vector<Row>{{24, 2304, 24, 1, 1, 512, 16, 1, 32, 137},
                                         {32, 3072, 30, 2, 1, 512, 16, 1, 32, 138},
                                         {32, 4096, 36, 4, 1, 512, 16, 1, 32, 142},
                                         {48, 6144, 40, 8, 1, 1024, 8, 1, 32, 135},
                                         {64, 8192, 48, 8, 2, 1536, 4, 1, 32, 138},
                                         {80, 10240, 60, 8, 4, 1792, 2, 3, 32, 140},
                                         {96, 12288, 80, 8, 8, 2304, 2, 2, 24, 148},
                                         {128, 16384, 96, 8, 16, 2160, 1, 2, 15, 155},
                                         {128, 20480, 105, 8, 35, 2520, 1, 3, 9, 163},
                                         {160, 25600, 128, 8, 64, 3072, 1, 1, 6, 163}})
        add("Table 1", "", r.h, r.l, r.h, r.a, r.B, {r.p, r.t, r.d, r.v, r.b}, r.measured);
    int64_t b = 1;
    for (double measured : {68, 78, 86, 89, 91}) {
        add("Figure 7", "", b, 4, 4096, 128, b, {1, 1, 1, 1, b}, measured);
        b *= 2;
    }
    for (const auto& [B, row] :
         std::vector<std::pair<int64_t, std::vector<double>>>{{8, {165, 142, 121, 87}}, {128, {175, 169, 166, 161}}})
        for (size_t i = 0; i < row.size(); ++i) {
            const int64_t p = int64_t(1) << i;
            add("Figure 11", "B = " + text(B), p, 3 * p, 20480, 128, B, {p, 8, 1, 1, 1}, row[i]);
        }
    for (const auto& [v, row] : std::vector<std::pair<int64_t, std::vector<double>>>{{1, {82, 109, 122, 130, 135}},
                                                                                     {4, {119, 134, 141, 143, 146}}})
        for (size_t i = 0; i < row.size(); ++i) {
            const int64_t B = 12 * int64_t(i + 1);
            add("Figure 12", "v = " + text(v), B, 96, 12288, 96, B, {12, 8, 1, v, 1}, row[i]);
        }
    for (const auto& [recompute, row] : std::vector<std::pair<bool, std::vector<double>>>{
             {true, {.6, 1.0, 1.8, 3.0, 4.3, 5.7, 6.8, 7.4, 7.8}}, {false, {.7, 1.3, 2.3, 3.9}}})
        for (size_t i = 0; i < row.size(); ++i) {
            const int64_t B = int64_t(1) << i;
            add("Figure 17", recompute ? "recomputing" : "not recomputing", B, 80, 12288, 96, B, {16, 8, 1, 1, 1},
                row[i], recompute, true);
        }
    return points;
}

// How far a prediction is outside of the interval that a measured number was rounded from, relative.
inline double paper_error(const PaperPoint& point, double predicted) {
    const double low = point.measured - point.rounding, high = point.measured + point.rounding;
    return predicted < low ? predicted / low - 1 : predicted > high ? predicted / high - 1 : 0.0;
}

// One SVG file per figure: measured as dots, predicted as lines.
inline void draw_paper(const Hardware& hw, const std::string& dir) {
    std::map<std::string, std::vector<PlotSeries>> figures;
    std::map<std::string, const char*> axes;
    for (const PaperPoint& point : paper_points()) {
        std::vector<PlotSeries>& series = figures[point.figure];
        if (series.empty() || series.back().name != point.series) series.push_back({point.series, {}});
        series.back().points.push_back({point.x, point.predicted(hw), point.measured});
        axes[point.figure] = point.axis();
    }
    for (const auto& [figure, series] : figures) {
        std::string name = figure;
        std::replace(name.begin(), name.end(), ' ', '-');
        const std::string path = dir + "/" + name + ".svg";
        std::ofstream file(path, std::ios::binary);
        file << plot_svg(figure + ": predicted (lines) and measured (dots)", axes[figure],
                         figure == "Figure 17" ? "sequences/s" : "TFLOP/s per GPU", series);
        file.close();
        if (!file) throw UserError("--svg " + dir + ": cannot write " + path);
    }
}

inline void compare_with_paper(const Hardware& hw, bool as_json) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    std::vector<double> errors;
    if (!as_json)
        std::printf("%s against the paper (TFLOP/s per GPU; Figure 17: sequences/s)\n%-44s %9s %9s %8s\n",
                    hw.name.c_str(), "", "predicted", "measured", "error");
    for (const PaperPoint& point : paper_points()) {
        const double predicted = point.predicted(hw), error = paper_error(point, predicted);
        errors.push_back(std::abs(error));
        list.push_back(
            {{"point", point.name()}, {"predicted", predicted}, {"measured", point.measured}, {"error", error}});
        if (!as_json)
            std::printf("%-44s %9.2f %9.1f %+7.1f%%\n", point.name().c_str(), predicted, point.measured, 100 * error);
    }
    std::sort(errors.begin(), errors.end());
    const double median = errors[errors.size() / 2], largest = errors.back();
    if (as_json)
        std::printf("%s\n",
                    nlohmann::ordered_json{{"points", list}, {"median_error", median}, {"largest_error", largest}}
                        .dump(2)
                        .c_str());
    else
        std::printf("%zu points: median error %.1f%%, largest %.1f%%\n", errors.size(), 100 * median, 100 * largest);
}

// ---------------------------------------------------------------------------------------------------------------------
// Answers

inline double days_to_train(const Job& job, const Prediction& x, double tokens) {
    return tokens / (double(job.B) * double(job.s)) * x.seconds / 86400;
}

inline std::string command_of(const Job& job, const Prediction& x) {
    using options_detail::text;
    const Layout& y = x.layout;
    std::string command = "mpirun -np " + text(y.devices()) + " ./train --tp " + text(y.t) + " --pp " + text(y.p);
    if (y.v > 1) command += " --vp " + text(y.v);
    if (!job.schedule.empty()) command += " --schedule " + job.schedule;
    command += " --micro-batch-size " + text(y.b) + " --global-batch-size " + text(job.B) + " --num-layers " +
               text(job.l) + " --hidden-size " + text(job.h) + " --num-attention-heads " + text(job.a) +
               " --seq-length " + text(job.s) + " --vocab-size " + text(job.V);
    if (job.recompute) command += " --recompute-granularity full";
    if (!job.scatter_gather) command += " --no-scatter-gather-tensors-in-pipeline";
    return command + " --data-path ...";
}

// Why this layout, in one line: what each of its numbers is good for here.
inline std::string reason_of(const Job& job, const Prediction& x, const Hardware& hw) {
    using options_detail::text;
    const Layout& y = x.layout;
    std::string reason;
    if (y.t > hw.devices_per_node)
        reason = "t = " + text(y.t) + " spans nodes, whose links are slow for it (takeaway 1)";
    else if (y.t == 1)
        reason = "t = 1: no tensor traffic";
    else
        reason = "t = " + text(y.t) + " stays inside a node (takeaway 1)";
    char part[256];
    std::snprintf(part, sizeof part,
                  "; p t = %ld leaves %.0f GB of weights and optimizer a device, d = %ld the rest (takeaway 2)",
                  long(y.p * y.t), x.weights_and_optimizer / 1e9, long(y.d));
    reason += part;
    std::snprintf(part, sizeof part, "; b = %ld: m = %ld microbatches, bubble %.1f%% (takeaway 3)", long(y.b),
                  long(job.B / (y.b * y.d)), 100 * x.bubble);
    return reason + part;
}

inline nlohmann::ordered_json as_json(const Job& job, const Prediction& x, const Hardware& hw, double tokens) {
    const Layout& y = x.layout;
    nlohmann::ordered_json json = {{"t", y.t},
                                   {"p", y.p},
                                   {"d", y.d},
                                   {"v", y.v},
                                   {"b", y.b},
                                   {"m", job.B / (y.b * y.d)},
                                   {"gpus", y.devices()},
                                   {"iteration_seconds", x.seconds},
                                   {"pipeline_seconds", x.pipeline},
                                   {"data_parallel_seconds", x.data},
                                   {"optimizer_seconds", x.optimizer},
                                   {"tflops_per_gpu", x.flops_per_device / 1e12},
                                   {"share_of_peak", x.share},
                                   {"sequences_per_second", double(job.B) / x.seconds},
                                   {"bubble", x.bubble},
                                   {"memory_gb", x.memory / 1e9},
                                   {"fits", x.fits},
                                   {"parameters", job.parameters()},
                                   {"reason", reason_of(job, x, hw)},
                                   {"command", command_of(job, x)}};
    if (tokens > 0) json["days"] = days_to_train(job, x, tokens);
    return json;
}

inline void print_predictions(const Job& job, const std::vector<Prediction>& list, const Hardware& hw, double tokens) {
    std::printf("%.1f B parameters on %ld x %s; B = %ld, %s\n", job.parameters() / 1e9, long(list[0].layout.devices()),
                hw.name.c_str(), long(job.B), job.recompute ? "recomputing activations" : "keeping activations");
    std::printf("   t    p     d   v   b  s/iteration  TFLOP/s/GPU  of peak  bubble  memory GB%s\n",
                tokens > 0 ? "    days" : "");
    for (const Prediction& x : list) {
        const Layout& y = x.layout;
        std::printf("%4ld %4ld %5ld %3ld %3ld %12.3f %12.1f %7.1f%% %6.1f%% %10.1f", long(y.t), long(y.p), long(y.d),
                    long(y.v), long(y.b), x.seconds, x.flops_per_device / 1e12, 100 * x.share, 100 * x.bubble,
                    x.memory / 1e9);
        if (tokens > 0) std::printf(" %7.1f", days_to_train(job, x, tokens));
        std::printf("\n     %s\n     %s\n", reason_of(job, x, hw).c_str(), command_of(job, x).c_str());
        if (!x.fits)
            std::printf("     WARNING: does not fit: %.1f GB are needed, a device has %.1f\n", x.memory / 1e9,
                        hw.memory / 1e9);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The program

struct PlanOptions {
    bool draw_schedule = false, paper = false, json = false, this_machine = false;
    int64_t gpus = 0, d = 0, b = 0, top = 5;
    Job job;
    std::string recompute = "full", hardware = "a100";
    bool no_scatter_gather = false, no_fusion = false;
    double train_tokens = 0;
    std::string schedule;         // default: interleaved if v > 1, else 1f1b
    int64_t t = 1, p = 4, v = 1;  // tensor ranks, pipeline ranks, model chunks per rank
    int64_t m = 8;                // microbatches
    double forward_time = 1;      // of a microbatch on one device: all its chunks
    double backward_time = 0;     // 0: twice the forward's
    std::string svg;              // file
    std::string color = "auto";   // auto, always or never
    bool layout_given = false;    // --tp --pp --dp --vp --micro-batch-size
};

inline void add_options(CLI::App& app, PlanOptions& o) {
    app.option_defaults()->always_capture_default();
    app.add_option("--gpus", o.gpus, "find the best layouts for so many devices")->group("Planning");
    app.add_flag("--paper", o.paper, "predict the paper's Table 1 and Figures 7, 11, 12 and 17")->group("Planning");
    app.add_option("--num-layers", o.job.l, "l")->group("Planning");
    app.add_option("--hidden-size", o.job.h, "h")->group("Planning");
    app.add_option("--num-attention-heads", o.job.a, "a")->group("Planning");
    app.add_option("--seq-length", o.job.s, "s")->group("Planning");
    app.add_option("--vocab-size", o.job.V, "V")->group("Planning");
    app.add_option("--global-batch-size", o.job.B, "B")->group("Planning");
    app.add_option("--hardware", o.hardware, "a100, h100 or a file like examples/hardware/template.json")
        ->group("Planning");
    app.add_flag(
           "--this-machine", o.this_machine,
           "measure this machine's rates in place of --hardware: mpirun -np (t p d) ./plan --this-machine --tp ...")
        ->group("Planning");
    app.add_option("--recompute-granularity", o.recompute, "full, or none: keep every activation")->group("Planning");
    app.add_flag("--no-scatter-gather-tensors-in-pipeline", o.no_scatter_gather, "without section 4.1")
        ->group("Planning");
    app.add_flag("--no-fusion", o.no_fusion, "without section 4.2's fused kernels")->group("Planning");
    app.add_option("--train-tokens", o.train_tokens, "also say how many days so many tokens take")->group("Planning");
    app.add_option("--top", o.top, "how many layouts")->group("Planning");
    app.add_flag("--json", o.json, "answer in JSON")->group("Planning");
    app.add_option("--tensor-model-parallel-size,--tp", o.t,
                   "t; with --pp, --dp, --vp and --micro-batch-size: this layout only")
        ->group("Layout");
    app.add_option("--dp", o.d, "d: data parallel size")->group("Layout");
    app.add_option("--micro-batch-size", o.b, "b: samples in a microbatch")->group("Layout");
    app.add_flag("--draw-schedule", o.draw_schedule, "draw a pipeline schedule's timeline")->group("Pictures");
    app.add_option("--schedule", o.schedule, "gpipe, 1f1b or interleaved; default: interleaved if v > 1, else 1f1b")
        ->group("Layout");
    app.add_option("--pipeline-model-parallel-size,--pp", o.p, "p: ranks in the pipeline")->group("Layout");
    app.add_option("--virtual-pipeline-size,--vp", o.v, "v: model chunks per rank")->group("Layout");
    app.add_option("--microbatches", o.m, "m: microbatches per iteration")->group("Pictures");
    app.add_option("--forward-time", o.forward_time, "time of a microbatch's forward on one device")->group("Pictures");
    app.add_option("--backward-time", o.backward_time, "of its backward; 0: twice the forward's")->group("Pictures");
    app.add_option("--svg", o.svg, "also write the picture to this SVG file; --paper: the figures to this directory")
        ->group("Pictures");
    app.add_option("--color", o.color, "auto (when the output is a terminal), always or never")->group("Pictures");
}

// --draw-schedule's options, and what follows from them. Throws UserError.
inline void validate_picture(PlanOptions& o) {
    using namespace options_detail;
    in_range("--pipeline-model-parallel-size", o.p, 1, 256);
    in_range("--virtual-pipeline-size", o.v, 1, 64);
    in_range("--microbatches", o.m, 1, 4096);
    if (!(o.forward_time > 0 && o.forward_time < 1e9))
        throw UserError("--forward-time is " + std::to_string(o.forward_time) + ": it must be above 0");
    if (!(o.backward_time >= 0 && o.backward_time < 1e9))
        throw UserError("--backward-time is " + std::to_string(o.backward_time) + ": it must be 0 or above");
    if (o.backward_time == 0) o.backward_time = 2 * o.forward_time;
    if (!o.schedule.empty()) one_of("--schedule", o.schedule, kSchedules);
    one_of("--color", o.color, {"auto", "always", "never"});
    if (o.v > 1 && o.p == 1)
        throw UserError("--virtual-pipeline-size " + text(o.v) +
                        " needs a pipeline, but --pipeline-model-parallel-size is 1: use 2 or more");
    choose_schedule(o.schedule, o.v);
    if (o.v > 1 && o.m % o.p != 0)
        throw UserError("--microbatches " + text(o.m) + " is not a multiple of --pipeline-model-parallel-size " +
                        text(o.p) + ", as --schedule interleaved needs: nearest valid numbers are " +
                        nearest_multiples(o.m, o.p));
}

// The same for planning.
inline void validate_plan(PlanOptions& o) {
    using namespace options_detail;
    in_range("--num-layers", o.job.l, 1, 10000);
    in_range("--hidden-size", o.job.h, 1, kLargestSize);
    in_range("--num-attention-heads", o.job.a, 1, kLargestSize);
    in_range("--seq-length", o.job.s, 1, kLargestSize);
    in_range("--vocab-size", o.job.V, 1, int64_t(1) << 30);
    in_range("--global-batch-size", o.job.B, 1, int64_t(1) << 24);
    if (!o.paper && !o.layout_given) in_range("--gpus", o.gpus, 1, int64_t(1) << 20);
    in_range("--top", o.top, 1, 1000);
    if (!(o.train_tokens >= 0 && o.train_tokens <= 1e18))
        throw UserError("--train-tokens is " + text(o.train_tokens) + ": it must be from 0 to 1e18");
    if (o.job.h % o.job.a != 0)
        throw UserError("--hidden-size " + text(o.job.h) + " is not a multiple of --num-attention-heads " +
                        text(o.job.a) + ": nearest valid sizes are " + nearest_multiples(o.job.h, o.job.a));
    one_of("--recompute-granularity", o.recompute, {"full", "none"});
    if (!o.schedule.empty()) one_of("--schedule", o.schedule, kSchedules);
    o.job.recompute = o.recompute == "full";
    o.job.scatter_gather = !o.no_scatter_gather;
    o.job.fusion = !o.no_fusion;
    o.job.schedule = o.schedule;
    if (!o.layout_given) return;
    in_range("--tensor-model-parallel-size", o.t, 1, int64_t(1) << 20);
    in_range("--pipeline-model-parallel-size", o.p, 1, 1024);
    in_range("--dp", o.d, 1, int64_t(1) << 20);
    in_range("--virtual-pipeline-size", o.v, 1, 1024);
    in_range("--micro-batch-size", o.b, 1, kLargestSize);
    choose_schedule(o.job.schedule, o.v);
    const std::string why = why_not(o.job, {o.p, o.t, o.d, o.v, o.b});
    if (!why.empty()) throw UserError(why);
    if (o.gpus > 0 && o.gpus != o.p * o.t * o.d)
        throw UserError("--gpus is " + text(o.gpus) + ", but --tp " + text(o.t) + " x --pp " + text(o.p) + " x --dp " +
                        text(o.d) + " is " + text(o.p * o.t * o.d) + ": leave --gpus out, or make them equal");
}

// --this-machine: rank 0 answers for all. Throws UserError, on every rank alike.
inline void plan_here(const PlanOptions& o) {
    using options_detail::text;
    int rank = 0, ranks = 1;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    if (!o.layout_given)
        throw UserError("--this-machine predicts one layout: give --tp, --pp, --dp, --vp and --micro-batch-size too");
    if (ranks != o.p * o.t * o.d)
        throw UserError("--this-machine: there are " + std::to_string(ranks) + " ranks, but the layout has " +
                        text(o.p * o.t * o.d) + ": start it with mpirun -np " + text(o.p * o.t * o.d));
    const Hardware hw = measure_this_machine();
    if (rank != 0) return;
    const Prediction x = predict(o.job, {o.p, o.t, o.d, o.v, o.b}, hw);
    if (o.json) {
        std::printf("%s\n", as_json(o.job, x, hw, o.train_tokens).dump(2).c_str());
        return;
    }
    std::printf("measured, per rank: GEMM %.1f GFLOP/s (half of it at %.0f^3), copy %.1f GB/s, kernels %.0f%% of that",
                hw.peak / 1e9, hw.gemm_half / (std::cbrt(2.0) - 1), hw.memory_rate / 1e9, 100 * hw.memory_share);
    if (ranks > 1) std::printf(", messages %.2f GB/s", hw.device_link / 1e9);
    std::printf("\n");
    print_predictions(o.job, {x}, hw, o.train_tokens);
}

inline void plan(const PlanOptions& o) {
    const Hardware hw = read_hardware(o.hardware);
    if (o.paper) {
        if (!o.svg.empty()) draw_paper(hw, o.svg);
        return compare_with_paper(hw, o.json);
    }
    std::vector<Prediction> list;
    if (o.layout_given)
        list.push_back(predict(o.job, {o.p, o.t, o.d, o.v, o.b}, hw));
    else
        list = search(o.job, o.gpus, hw, size_t(o.top));
    if (list.empty())
        throw UserError("no layout of this model on " + options_detail::text(o.gpus) +
                        " devices divides evenly and fits in " + options_detail::text(hw.memory / 1e9) +
                        " GB: try more --gpus, another --global-batch-size or " + "--recompute-granularity full");
    if (o.json) {
        nlohmann::ordered_json all = nlohmann::ordered_json::array();
        for (const Prediction& x : list) all.push_back(as_json(o.job, x, hw, o.train_tokens));
        std::printf("%s\n", (o.layout_given ? all[0] : all).dump(2).c_str());
    } else {
        print_predictions(o.job, list, hw, o.train_tokens);
    }
}

inline void draw_schedule(const PlanOptions& o) {
    const int p = int(o.p), v = int(o.v), m = int(o.m);
    const Schedule schedule = make_schedule(schedule_kind(o.schedule), p, v, m);
    const Replay replayed = replay(schedule, compile(schedule), uniform_cost(o.forward_time / v, o.backward_time / v));
    const std::vector<PictureRow> rows = picture_rows(schedule, replayed.ops);
    char title[256];
    std::snprintf(title, sizeof title, "%s: p = %d, v = %d, m = %d, t_f = %g, t_b = %g", o.schedule.c_str(), p, v, m,
                  o.forward_time, o.backward_time);
    if (!o.svg.empty()) {
        std::ofstream file(o.svg, std::ios::binary);
        file << draw_svg(rows, title, v > 1);
        file.close();
        if (!file) throw UserError("--svg " + o.svg + ": cannot write");
    }
    const bool colour = o.color == "always" || (o.color == "auto" && isatty(1));
    std::printf("%s\n%s", title, draw_text(rows, readable_scale(rows, v > 1), v > 1, colour).c_str());
    if (!colour)
        std::printf("(microbatch%s; '-' forward, '=' backward, '.' bubble)\n", v > 1 ? " and chunk, a, b, ..." : "");
    std::printf("bubble / ideal time: %.6f replayed, (p - 1) / (v m) = %.6f by the formula\n",
                bubble_of(schedule, replayed), bubble_formula(p, v, m));
    std::printf("chunk activations in flight, at most, per device:");
    for (int rank = 0; rank < p; ++rank) std::printf(" %d", replayed.in_flight[rank]);
    std::printf(" (each 1/%d of a device's layers)\n", v);
}

// What the flags ask for. Throws UserError and CLI::Error.
inline void run(CLI::App& app, PlanOptions& options, int argc, char** argv) {
    app.parse(argc, argv);
    int given = 0;
    for (const char* flag : {"--tp", "--pp", "--dp", "--vp", "--micro-batch-size"}) given += app.count(flag) > 0;
    options.layout_given = given == 5;
    if (options.draw_schedule) {
        validate_picture(options);
        draw_schedule(options);
    } else if (options.paper || options.this_machine || app.count("--gpus") > 0 || options.layout_given) {
        if (!options.paper && !options.layout_given && given > 0)
            throw UserError("--tp, --pp, --dp, --vp and --micro-batch-size name one layout together, but " +
                            std::to_string(given) + " of the 5 are given: give all, or none to search");
        if (options.this_machine && !options.layout_given) options.gpus = 1;  // plan_here() says what is missing
        validate_plan(options);
        if (options.this_machine)
            plan_here(options);
        else
            plan(options);
    } else {
        if (argc > 1)
            throw UserError(
                "nothing to do: give --gpus N, a whole layout (--tp --pp --dp --vp --micro-batch-size), "
                "--this-machine, --paper or --draw-schedule");
        std::printf("%s", app.help().c_str());
    }
}

int main(int argc, char** argv) {
    PlanOptions options;
    CLI::App app{"Plans layouts and draws the schedules of pipeline parallelism (PTD-P, SC'21).", "plan"};
    add_options(app, options);
    int status = 0, rank = 0;
    bool measures = false;  // only then is this an MPI program
    for (int i = 1; i < argc; ++i) measures = measures || std::string(argv[i]) == "--this-machine";
    if (measures) {
        MPI_CHECK(MPI_Init(&argc, &argv));
        MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    }
    try {
        run(app, options, argc, argv);
    } catch (const CLI::CallForHelp&) {
        if (rank == 0) std::printf("%s", app.help().c_str());
    } catch (const CLI::ParseError& error) {
        if (rank == 0) std::fprintf(stderr, "plan: %s (--help lists the options)\n", error.what());
        status = 2;
    } catch (const UserError& error) {
        if (rank == 0) std::fprintf(stderr, "plan: %s\n", error.what());
        status = 2;
    }
    if (measures) MPI_CHECK(MPI_Finalize());
    return status;
}

// Pipeline parallelism (§2.2, §4.1) and activation recomputation (§3.5).
//
// Rules kept here:
//   - a schedule is data: each rank's list of (forward | backward, microbatch, chunk), made by a small pure function.
//   One
//     executor runs any list; `plan`, its pictures and the run's own report use the same lists;
//   - messages are part of the table: what is sent when is compiled from the lists of all ranks into exchanges that
//   every rank
//     issues in one total order, so that no schedule deadlocks even if every message blocks until it is received;
//   - moving work between stages or chunks changes no arithmetic: each chunk runs its backwards in microbatch order.
//
// Defines: schedules; the timeline and exchanges compiled from them; replay; then memory, chunk forward and backward,
// and the executor.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "gpt.cu"
#include "platform/device.h"
#include "platform/grid.h"
#include "platform/picture.h"

// ---------------------------------------------------------------------------------------------------------------------
// Schedules

enum class ScheduleKind { gpipe, one_f_one_b, interleaved };

// Of --schedule, one of gpipe, 1f1b, interleaved.
inline ScheduleKind schedule_kind(const std::string& name) {
    return name == "gpipe"  ? ScheduleKind::gpipe
           : name == "1f1b" ? ScheduleKind::one_f_one_b
                            : ScheduleKind::interleaved;
}

struct Op {
    bool forward = true;
    int microbatch = 0;
    int chunk = 0;
};
inline bool operator==(const Op& x, const Op& y) {
    return x.forward == y.forward && x.microbatch == y.microbatch && x.chunk == y.chunk;
}

// A rank's k-th forward (backward), k = 0, 1, ...: microbatches go in groups of p through the rank's v chunks one after
// the other (§2.2.2), forwards from chunk 0 up and backwards from chunk v - 1 down. With v = 1 it is microbatch k.
inline Op kth_op(bool forward, int k, int p, int v) {
    // [lab 3.1] interleaving: the k-th forward or backward
    const int chunk = k % (p * v) / p;
    return {forward, k / (p * v) * p + k % p, forward ? chunk : v - 1 - chunk};
    // [end]
}

// Pipeline rank `rank`'s operations for m microbatches and v chunks per rank, in order: some forwards (the warm-up),
// then one forward and one backward in turn, then the backwards that are left. GPipe's warm-up is all forwards
// (§2.2.1); 1F1B's as many as there are ranks behind this one (§2.2.1), so that the first backward comes when its
// gradient can be there; interleaved 1F1B's two for every rank behind, and (v - 1) p for the chunks before the last
// (§2.2.2). There are m v forwards at most; interleaved, m must be a multiple of p.
inline std::vector<Op> schedule_ops(ScheduleKind kind, int p, int rank, int v, int m) {
    // [lab 3.2] the list of a rank
    const int total = m * v;
    int warmup = v == 1 ? p - rank - 1 : 2 * (p - rank - 1) + (v - 1) * p;
    if (kind == ScheduleKind::gpipe) warmup = total;
    warmup = std::min(warmup, total);
    std::vector<Op> ops;
    for (int k = 0; k < warmup; ++k) ops.push_back(kth_op(true, k, p, v));
    for (int k = warmup; k < total; ++k) {
        ops.push_back(kth_op(true, k, p, v));
        ops.push_back(kth_op(false, k - warmup, p, v));
    }
    for (int k = total - warmup; k < total; ++k) ops.push_back(kth_op(false, k, p, v));
    return ops;
    // [end]
}

// ---------------------------------------------------------------------------------------------------------------------
// Timeline and exchanges

// The lists of all ranks. Stage k = chunk p + rank: a forward needs stage k - 1's, a backward stage k + 1's; the last
// stage's backward needs its own forward.
struct Schedule {
    int p = 1, v = 1, m = 1;
    std::vector<std::vector<Op>> ranks;

    int stages() const { return p * v; }
};
inline Schedule make_schedule(ScheduleKind kind, int p, int v, int m) {
    Schedule schedule{p, v, m, {}};
    for (int rank = 0; rank < p; ++rank) schedule.ranks.push_back(schedule_ops(kind, p, rank, v, m));
    return schedule;
}
// The same without backwards, for evaluation.
inline Schedule forward_only(Schedule schedule) {
    for (auto& ops : schedule.ranks)
        ops.erase(std::remove_if(ops.begin(), ops.end(), [](const Op& op) { return !op.forward; }), ops.end());
    return schedule;
}

// The time an operation takes on a rank.
using OpCost = std::function<double(int rank, const Op& op)>;
inline OpCost uniform_cost(double forward, double backward) {
    return [=](int, const Op& op) { return op.forward ? forward : backward; };
}

struct Interval {
    double start = 0, end = 0;
};

// The lists of all ranks as a picture, given when each operation ran (per rank, in list order).
inline std::vector<PictureRow> picture_rows(const Schedule& schedule, const std::vector<std::vector<Interval>>& times) {
    std::vector<PictureRow> rows(schedule.p);
    for (int rank = 0; rank < schedule.p; ++rank)
        for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
            const Op& op = schedule.ranks[rank][i];
            rows[rank].push_back({op.forward, op.microbatch, op.chunk, times[rank][i].start, times[rank][i].end});
        }
    return rows;
}

// When each operation of each rank runs if it starts as soon as its rank is free and its input is made; messages take
// no time. Throws std::logic_error if the lists wait for each other.
inline std::vector<std::vector<Interval>> timeline(const Schedule& schedule, const OpCost& cost) {
    std::map<std::tuple<bool, int, int>, double> made;  // (forward, stage, microbatch) -> time
    std::vector<std::vector<Interval>> result(schedule.p);
    std::vector<double> free(schedule.p, 0.0);
    bool moved = true;
    while (moved) {
        moved = false;
        for (int rank = 0; rank < schedule.p; ++rank)
            while (result[rank].size() < schedule.ranks[rank].size()) {
                const Op& op = schedule.ranks[rank][result[rank].size()];
                const int stage = op.chunk * schedule.p + rank, last = schedule.stages() - 1;
                double start = free[rank];
                const bool first = op.forward && stage == 0;
                const auto input = op.forward      ? std::make_tuple(true, stage - 1, op.microbatch)
                                   : stage == last ? std::make_tuple(true, stage, op.microbatch)
                                                   : std::make_tuple(false, stage + 1, op.microbatch);
                if (!first) {
                    const auto found = made.find(input);
                    if (found == made.end()) break;
                    start = std::max(start, found->second);
                }
                free[rank] = start + cost(rank, op);
                made[{op.forward, stage, op.microbatch}] = free[rank];
                result[rank].push_back({start, free[rank]});
                moved = true;
            }
    }
    for (int rank = 0; rank < schedule.p; ++rank)
        if (result[rank].size() < schedule.ranks[rank].size())
            throw std::logic_error("the schedule's operations wait for each other");
    return result;
}

// The output of `forward` ? a forward : a backward of `microbatch`, from one stage to its neighbour.
struct Message {
    bool forward = true;
    int microbatch = 0;
    int from_stage = 0, to_stage = 0;
    int from = 0, to = 0;  // pipeline ranks
};
inline bool operator<(const Message& x, const Message& y) {
    return std::tie(x.from, x.to, x.forward, x.microbatch, x.from_stage) <
           std::tie(y.from, y.to, y.forward, y.microbatch, y.from_stage);
}

// All messages produced at one tick: one NCCL group per rank that has a part in it.
struct Exchange {
    double tick = 0;
    std::vector<Message> messages;  // in the order both ends use
};

// What a rank's host issues, in order: an operation or its part of an exchange.
struct Step {
    bool is_op = true;
    Op op;
    int exchange = -1;  // is_op: the exchange that brings the input, or -1; else: the exchange to issue
    bool produces =
        false;  // is_op: some exchange sends its output; else: the exchange sends the preceding operation's output
};
struct Program {
    std::vector<Exchange> exchanges;       // of all ranks, in tick order
    std::vector<std::vector<Step>> ranks;  // per rank
};

// Compiles the lists into programs: run with t_f = 1 and t_b = 2, all messages produced at a tick form its exchange.
// Every rank issues its exchanges in tick order, each behind its operations that end by that tick. An exchange waits
// only for the operations that produce what it sends, an operation only for the exchange that brings its input: all
// ranks agree on one order, so no group ever waits for a later one, even if every message blocks.
inline Program compile(const Schedule& schedule) {
    const auto times = timeline(schedule, uniform_cost(1, 2));
    std::map<double, std::vector<Message>> by_tick;
    for (int rank = 0; rank < schedule.p; ++rank)
        for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
            const Op& op = schedule.ranks[rank][i];
            const int stage = op.chunk * schedule.p + rank, next = op.forward ? stage + 1 : stage - 1;
            if (schedule.p == 1 || next < 0 || next >= schedule.stages()) continue;
            by_tick[times[rank][i].end].push_back({op.forward, op.microbatch, stage, next, rank, next % schedule.p});
        }
    Program program;
    std::map<std::tuple<bool, int, int>, int> brought_by;  // (forward, receiving stage, microbatch) -> exchange
    for (auto& [tick, messages] : by_tick) {
        std::sort(messages.begin(), messages.end());
        for (const Message& message : messages)
            brought_by[{message.forward, message.to_stage, message.microbatch}] = int(program.exchanges.size());
        program.exchanges.push_back({tick, messages});
    }
    for (int rank = 0; rank < schedule.p; ++rank) {
        std::vector<Step> steps;
        size_t next = 0;
        auto issue_until = [&](double tick) {  // this rank's exchanges before `tick`
            for (; next < program.exchanges.size() && program.exchanges[next].tick < tick; ++next) {
                const Exchange& exchange = program.exchanges[next];
                bool takes_part = false, sends = false;
                for (const Message& message : exchange.messages) {
                    takes_part |= message.from == rank || message.to == rank;
                    sends |= message.from == rank;
                }
                if (takes_part) steps.push_back({false, {}, int(next), sends});
            }
        };
        for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
            const Op& op = schedule.ranks[rank][i];
            issue_until(times[rank][i].end);
            const int stage = op.chunk * schedule.p + rank;
            const auto found = brought_by.find({op.forward, stage, op.microbatch});
            const int neighbour = op.forward ? stage + 1 : stage - 1;
            steps.push_back({true, op, found == brought_by.end() ? -1 : found->second,
                             schedule.p > 1 && neighbour >= 0 && neighbour < schedule.stages()});
        }
        issue_until(1e300);
        program.ranks.push_back(std::move(steps));
    }
    return program;
}

// ---------------------------------------------------------------------------------------------------------------------
// Replay: all ranks on the host, with the streams and waits that the program prescribes

struct Replay {
    std::vector<std::vector<Interval>> ops;  // per rank, in list order
    std::vector<int> in_flight;              // per rank: most chunk activations held at once
    double makespan = 0;
    std::string deadlock;  // who waits for what, if anyone does forever
};

// Runs the program with blocking messages: a rank's part of an exchange starts when its previous exchange is complete
// and what it sends is made, and is complete `message_time` after every partner's part has started.
inline Replay replay(const Schedule& schedule, const Program& program, const OpCost& cost, double message_time = 0) {
    constexpr double kNever = -1;
    const int p = schedule.p, exchanges = int(program.exchanges.size());
    std::vector<std::vector<double>> started(p, std::vector<double>(exchanges, kNever)), ended = started;
    Replay result;
    result.ops.resize(p);
    result.in_flight.assign(p, 0);
    // Per rank: the host's next step on each of its two streams
    std::vector<std::vector<const Step*>> compute(p), comm(p);
    std::vector<std::vector<int>> ops_before(p);  // per exchange part: operations issued before it
    for (int rank = 0; rank < p; ++rank)
        for (const Step& step : program.ranks[rank]) {
            if (!step.is_op) ops_before[rank].push_back(int(compute[rank].size()));
            (step.is_op ? compute : comm)[rank].push_back(&step);
        }
    std::vector<size_t> next_comm(p, 0);
    std::vector<double> compute_free(p, 0.0), comm_free(p, 0.0);
    auto end_of = [&](int rank, int exchange) {  // when the exchange is complete on a rank, if that is known
        if (started[rank][exchange] == kNever) return kNever;
        double end = started[rank][exchange];
        for (const Message& message : program.exchanges[exchange].messages) {
            if (message.from != rank && message.to != rank) continue;
            const double partner = started[message.from == rank ? message.to : message.from][exchange];
            if (partner == kNever) return kNever;
            end = std::max(end, partner);
        }
        return end + message_time;
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (int rank = 0; rank < p; ++rank) {
            while (next_comm[rank] < comm[rank].size()) {
                const Step& step = *comm[rank][next_comm[rank]];
                if (started[rank][step.exchange] == kNever) {
                    double start = comm_free[rank];
                    const int producer = ops_before[rank][next_comm[rank]] - 1;
                    if (step.produces) {
                        if (int(result.ops[rank].size()) <= producer) break;
                        start = std::max(start, result.ops[rank][producer].end);
                    }
                    started[rank][step.exchange] = start;
                    moved = true;
                }
                const double end = end_of(rank, step.exchange);
                if (end == kNever) break;
                ended[rank][step.exchange] = comm_free[rank] = end;
                ++next_comm[rank];
                moved = true;
            }
            while (result.ops[rank].size() < compute[rank].size()) {
                const Step& step = *compute[rank][result.ops[rank].size()];
                double start = compute_free[rank];
                if (step.exchange >= 0) {
                    if (ended[rank][step.exchange] == kNever) break;
                    start = std::max(start, ended[rank][step.exchange]);
                }
                compute_free[rank] = start + cost(rank, step.op);
                result.ops[rank].push_back({start, compute_free[rank]});
                result.makespan = std::max(result.makespan, compute_free[rank]);
                moved = true;
            }
        }
    }
    for (int rank = 0; rank < p; ++rank) {
        if (result.ops[rank].size() < compute[rank].size()) {
            const Step& step = *compute[rank][result.ops[rank].size()];
            result.deadlock += "rank " + std::to_string(rank) + (step.op.forward ? " forward " : " backward ") +
                               std::to_string(step.op.microbatch) + " of chunk " + std::to_string(step.op.chunk) +
                               " waits for exchange " + std::to_string(step.exchange) + "; ";
        }
        int held = 0;
        for (const Op& op : schedule.ranks[rank]) {
            held += op.forward ? 1 : -1;
            result.in_flight[rank] = std::max(result.in_flight[rank], held);
        }
    }
    return result;
}

// The bubble relative to the ideal time, (makespan - ideal) / ideal, ideal being the busiest rank's work without
// waiting (§2.2.1).
inline double bubble_of(const Schedule& schedule, const Replay& replayed) {
    double ideal = 0;
    for (int rank = 0; rank < schedule.p; ++rank) {
        double busy = 0;
        for (const Interval& interval : replayed.ops[rank]) busy += interval.end - interval.start;
        ideal = std::max(ideal, busy);
    }
    return (replayed.makespan - ideal) / ideal;
}
// The bubble that measured operations give when replayed: cpu[rank][i] is the time of the i-th operation in the rank's
// list. And the busiest stage's work over the mean: embedding, output layer and loss are on the ends.
struct ReplayedBubble {
    double bubble = 0, imbalance = 1;
};
inline ReplayedBubble replayed_bubble(const Schedule& schedule, const Program& program,
                                      const std::vector<std::vector<double>>& cpu) {
    std::map<std::tuple<int, bool, int, int>, double> times;
    double sum = 0, busiest = 0;
    for (int rank = 0; rank < schedule.p; ++rank) {
        double busy = 0;
        for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
            const Op& op = schedule.ranks[rank][i];
            busy += times[{rank, op.forward, op.microbatch, op.chunk}] = cpu[rank][i];
        }
        sum += busy;
        busiest = std::max(busiest, busy);
    }
    if (sum <= 0) return {};
    const Replay replayed = replay(schedule, program, [&](int rank, const Op& op) {
        return times.at({rank, op.forward, op.microbatch, op.chunk});
    });
    return {bubble_of(schedule, replayed), busiest * schedule.p / sum};
}

// The bubble's time relative to the ideal time (§2.2.1, §2.2.2).
inline double bubble_formula(int p, int v, int m) {
    // [lab 5.2] the bubble
    return double(p - 1) / (double(v) * double(m));
    // [end]
}

// Chunk activations in flight on a rank, at most: those that its warm-up has forwarded and one more (§2.2.1, §2.2.2).
inline int in_flight_formula(ScheduleKind kind, int p, int rank, int v, int m) {
    // [lab 5.3] activations in flight
    if (kind == ScheduleKind::gpipe) return m;
    if (v == 1) return std::min(m, p - rank);
    return std::min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1);
    // [end]
}

// ---------------------------------------------------------------------------------------------------------------------
// A model chunk's forward and backward, and activation recomputation (§3.5)

// What one microbatch keeps on one chunk from forward to backward. With recomputation only the input of every N layers
// and the chunk's output are its own; the rest of `outputs` and all of `layers` is scratch shared by every slot.
struct Slot {
    std::vector<LayerActivations> layers;  // [layers of the chunk]
    std::vector<real*> outputs;            // [layers of the chunk] of [T, h]
};

// Layers per recomputed block; 0: nothing is recomputed. Layer i's output is kept if it is some block's input or the
// last.
inline bool output_kept(int64_t layer, int64_t layers, int64_t block) {
    return block == 0 || (layer + 1) % block == 0 || layer + 1 == layers;
}

// The part of a slot that is its own.
inline Slot carve_slot(Carver& carver, const Shape& shape, int64_t layers, int64_t block) {
    Slot slot;
    slot.layers.resize(layers);
    slot.outputs.resize(layers);
    for (int64_t i = 0; i < layers; ++i) {
        if (block == 0) slot.layers[i] = carve_layer(carver, shape);
        if (output_kept(i, layers, block)) slot.outputs[i] = carver.take(shape.rows() * shape.h);
    }
    return slot;
}

// The scratch that all slots share when recomputing: one block's activations.
inline Slot carve_recompute_scratch(Carver& carver, const Shape& shape, int64_t block) {
    Slot scratch;
    for (int64_t i = 0; i < block; ++i) {
        scratch.layers.push_back(carve_layer(carver, shape));
        scratch.outputs.push_back(carver.take(shape.rows() * shape.h));
    }
    return scratch;
}

// The chunk's output, in slot.outputs.back(), for its input x [T, h]; `layer_done(i, output)` is called with layer i's.
template <class F>
void chunk_forward(Gpt& gpt, const Chunk& chunk, const Microbatch& mb, const Slot& slot, const real* x, F layer_done) {
    for (size_t i = 0; i < chunk.layers.size(); ++i) {
        layer_forward(gpt, chunk.layers[i], mb, slot.layers[i], x, slot.outputs[i]);
        x = slot.outputs[i];
        layer_done(i, x);
    }
}

// dx [T, h], the gradient of the chunk's output, becomes that of its input x; `layer_done(i)` is called as soon as
// layer i's gradients are complete for this microbatch. Blocks of `block` layers (0: none) are first computed again
// from their input (§3.5): the block that ends with layer i begins with layer i / block * block, whose input is kept.
template <class F>
void chunk_backward(Gpt& gpt, const Chunk& chunk, const Microbatch& mb, const Slot& slot, const real* x, real* dx,
                    int64_t block, F layer_done) {
    auto input_of = [&](int64_t layer) { return layer == 0 ? x : slot.outputs[layer - 1]; };
    const int64_t layers = int64_t(chunk.layers.size());
    for (int64_t i = layers - 1; i >= 0; --i) {
        if (block > 0 && output_kept(i, layers, block)) {
            // [lab 3.5] recomputation
            // The block's own output is not needed again: it goes to scratch that no forward reads.
            for (int64_t j = i / block * block; j <= i; ++j)
                layer_forward(gpt, chunk.layers[j], mb, slot.layers[j], input_of(j),
                              j == i ? gpt.work.norm : slot.outputs[j]);
            // [end]
        }
        layer_backward(gpt, chunk.layers[i], mb, slot.layers[i], input_of(i), dx);
        layer_done(int(i));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory: counted by walking a rank's program, so that it is known before the run

struct PipelineOptions {
    int64_t recompute_layers = 0;  // §3.5: layers per recomputed block; 0: no recomputation
    bool scatter_gather = true;    // §4.1
};

// How many buffers a rank's program needs at once.
struct PipelineNeeds {
    int slots = 0;   // chunk activations in flight (§2.2.1, §2.2.2)
    int inputs = 0;  // [T, h]: a chunk's input, from the exchange that brings it (or the embedding) to its backward
    int gradients =
        0;  // [T, h]: from the exchange that brings it (or the loss) to the one that sends it, and one to spare
};
inline PipelineNeeds pipeline_needs(const Schedule& schedule, const Program& program, int rank) {
    const bool training =
        std::any_of(schedule.ranks[rank].begin(), schedule.ranks[rank].end(), [](const Op& op) { return !op.forward; });
    PipelineNeeds needs;
    int slots = 0, inputs = 0, gradients = 0;
    bool sends_gradients = false;
    for (const Step& step : program.ranks[rank]) {
        if (!step.is_op) {
            for (const Message& message : program.exchanges[step.exchange].messages) {
                if (message.to == rank) ++(message.forward ? inputs : gradients);
                if (message.from == rank && !message.forward) {
                    --gradients;
                    sends_gradients = true;
                }
            }
        } else if (step.op.forward) {
            ++slots;
            if (step.exchange < 0) ++inputs;
        } else if (step.exchange < 0) {
            ++gradients;
        }
        needs.slots = std::max(needs.slots, slots);
        needs.inputs = std::max(needs.inputs, inputs);
        needs.gradients = std::max(needs.gradients, gradients);
        if (step.is_op && (!training || !step.op.forward)) {
            --slots;
            --inputs;
        }
        if (step.is_op && !step.op.forward && !step.produces) --gradients;
    }
    needs.gradients += sends_gradients;
    return needs;
}

// Bytes of one slot, and of the scratch that recomputation shares.
inline size_t slot_bytes(const Shape& shape, int64_t layers, int64_t recompute_layers, size_t word = sizeof(real)) {
    Carver measure;
    measure.word = word;
    carve_slot(measure, shape, layers, recompute_layers);
    return measure.used;
}
inline size_t recompute_scratch_bytes(const Shape& shape, int64_t layers, int64_t recompute_layers,
                                      size_t word = sizeof(real)) {
    Carver measure;
    measure.word = word;
    carve_recompute_scratch(measure, shape, std::min(layers, recompute_layers));
    return measure.used;
}

// Bytes a rank needs, by kind.
struct MemoryPlan {
    double weights = 0, gradients = 0, optimizer = 0;  // 4 (mixed: 6), 4 and 8 bytes per parameter on this rank
    double activations = 0;                            // slots: what is kept from forward to backward
    double recompute = 0;                              // scratch for one recomputed block
    double messages = 0;                               // chunk inputs and gradients between stages
    double workspace = 0;                              // scratch within a layer, logits
    double tokens = 0;                                 // of the global batch's share, and their losses
    double buffered = 0;                               // the CPU build's copies of messages and its scratch for sums
    double library = 0;                                // oneDNN's packed operands: measured, 2.5 MB a thread
    PipelineNeeds needs;
    // Without what only a CPU build needs
    double on_device() const {
        return weights + gradients + optimizer + activations + recompute + messages + workspace + tokens;
    }
    double total() const { return on_device() + buffered + library; }
};

// The memory of pipeline rank p_rank, tensor rank t_rank, for d replicas, before anything is allocated;
// `word`: bytes of an activation.
inline MemoryPlan memory_plan(const GptConfig& config, const Schedule& schedule, const Program& program, int t,
                              int t_rank, int d, int p_rank, int64_t b, bool distributed,
                              const PipelineOptions& options, size_t word = sizeof(real)) {
    const int p = schedule.p, v = schedule.v;
    const Shape shape = gpt_shape(config, t, b);
    const bool first = p_rank == 0, last = p_rank == p - 1;
    const int64_t layers = config.layers / (int64_t(p) * v);
    MemoryPlan plan;
    plan.needs = pipeline_needs(schedule, program, p_rank);
    const auto parameters = local_parameters(config, t, t_rank, p, p_rank, v, distributed ? d : 1);
    const double size = double(local_parameter_size(parameters));
    plan.weights = (4.0 + (word < 4 ? double(word) : 0.0)) * size;
    plan.gradients = 4 * size + (first && last ? 4.0 * double(shape.local_vocab * shape.h) : 0.0);
    plan.optimizer = 8 * size / (distributed ? d : 1);
    plan.activations = double(plan.needs.slots) * double(slot_bytes(shape, layers, options.recompute_layers, word));
    if (options.recompute_layers)
        plan.recompute = double(recompute_scratch_bytes(shape, layers, options.recompute_layers, word));
    const double message = double(word * padded_size(shape.rows() * shape.h));
    plan.messages = (plan.needs.inputs + plan.needs.gradients) * message;
    Carver measure;
    measure.word = word;
    carve_workspace(measure, shape, last);
    plan.workspace = double(measure.used);
    if (first || last) plan.tokens = 4.0 * schedule.m * double(5 * shape.rows());
    if (last) plan.tokens += 4.0 * schedule.m * double(shape.rows());
#ifndef __CUDACC__
    double summed = std::min(4 * size, double(4 << 20));  // a bucket; else one tensor
    if (distributed) {
        summed = 0;
        for (const Parameter& parameter : parameters) summed = std::max(summed, 4.0 * double(parameter.padded));
    }
    plan.buffered = (t > 1 ? message : 0) + (p > 1 ? 2 * message : 0) + (d > 1 ? summed : 0);
    plan.library = 2.5e6 * omp_get_max_threads();
#endif
    return plan;
}

// ---------------------------------------------------------------------------------------------------------------------
// The executor: runs any program

// One operation as it ran on this rank, for traces and for the replay of what a core per rank would give.
struct OpRecord {
    Op op;
    double start = 0, end = 0;  // seconds, by now(), from when its input was there
    double cpu = 0;             // thread CPU seconds, waits excluded (CPU build)
};

// What a caller supplies and gets.
struct PipelineCallbacks {
    std::function<Microbatch(int)> microbatch;     // the i-th of the batch
    std::function<void(int, int)> gradient_ready;  // (chunk, layer of the chunk): complete for the whole batch
    // If set, called with each layer's output [T, h]
    std::function<void(const Microbatch&, int64_t layer, const real*)> layer_output;
    // If set, takes the loss's place: the last layer's output [T, h]
    std::function<void(const Microbatch&, real*)> head;
};

struct PipelineExecutor {
    // Buffers are handed out in the order in which they came back, each with the event after which it is free.
    struct Pool {
        std::deque<std::pair<real*, cudaEvent_t>> free;
        real* take(cudaStream_t stream) {
            if (free.empty()) throw std::logic_error("a pipeline buffer pool is empty");
            const auto [data, event] = free.front();
            free.pop_front();
            if (event) CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
            return data;
        }
        void give_back(real* data, cudaEvent_t after) { free.push_back({data, after}); }
    };

    Gpt& gpt;
    Grid& grid;
    PipelineOptions options;
    cudaStream_t exchange_stream = nullptr;
    std::vector<cudaEvent_t> op_done, exchange_done;
    DeviceBuffer<char> memory;
    std::map<real*, Slot> slots;  // by their memory
    Pool slot_pool, inputs, gradients;
    DeviceBuffer<float> losses;     // last stage: [m, T]
    std::vector<OpRecord> records;  // of the last run
    int slots_in_use = 0, peak_slots = 0;

    // Owns buffers for the largest needs of `plans` (schedules that will be run).
    PipelineExecutor(Gpt& gpt, Grid& grid, const PipelineOptions& options,
                     const std::vector<std::pair<const Schedule*, const Program*>>& plans)
        : gpt(gpt), grid(grid), options(options) {
        CUDA_CHECK(cudaStreamCreate(&exchange_stream));
        PipelineNeeds needs;
        size_t ops = 0, exchanges = 0;
        int m = 0;
        for (const auto& [schedule, program] : plans) {
            const PipelineNeeds these = pipeline_needs(*schedule, *program, grid.p_rank);
            needs.slots = std::max(needs.slots, these.slots);
            needs.inputs = std::max(needs.inputs, these.inputs);
            needs.gradients = std::max(needs.gradients, these.gradients);
            ops = std::max(ops, schedule->ranks[grid.p_rank].size());
            exchanges = std::max(exchanges, program->exchanges.size());
            m = std::max(m, schedule->m);
        }
        create_events(op_done, ops);
        create_events(exchange_done, exchanges);

        const int64_t layers = int64_t(gpt.chunks[0].layers.size()), message = gpt.shape.rows() * gpt.shape.h;
        const size_t slot_size = ::slot_bytes(gpt.shape, layers, options.recompute_layers);
        const size_t scratch_size =
            options.recompute_layers ? recompute_scratch_bytes(gpt.shape, layers, options.recompute_layers) : 0;
        memory = DeviceBuffer<char>(scratch_size + needs.slots * slot_size +
                                    (needs.inputs + needs.gradients) * padded_size(message) * sizeof(real));
        Carver carver{memory.data};
        Slot scratch;
        if (options.recompute_layers)
            scratch = carve_recompute_scratch(carver, gpt.shape, std::min(layers, options.recompute_layers));
        for (int i = 0; i < needs.slots; ++i) {
            real* place = reinterpret_cast<real*>(carver.base + carver.used);
            Slot slot = carve_slot(carver, gpt.shape, layers, options.recompute_layers);
            for (int64_t layer = 0; layer < layers && options.recompute_layers; ++layer) {
                slot.layers[layer] = scratch.layers[layer % options.recompute_layers];
                if (!slot.outputs[layer]) slot.outputs[layer] = scratch.outputs[layer % options.recompute_layers];
            }
            slots[place] = slot;
            slot_pool.give_back(place, nullptr);
        }
        for (int i = 0; i < needs.inputs; ++i) inputs.give_back(carver.take(message), nullptr);
        for (int i = 0; i < needs.gradients; ++i) gradients.give_back(carver.take(message), nullptr);
        if (grid.last_stage()) losses = DeviceBuffer<float>(m * gpt.shape.rows());
    }
    ~PipelineExecutor() {
        for (auto* events : {&op_done, &exchange_done})
            for (cudaEvent_t event : *events) cudaEventDestroy(event);
        cudaStreamDestroy(exchange_stream);
    }
    PipelineExecutor(const PipelineExecutor&) = delete;
    PipelineExecutor& operator=(const PipelineExecutor&) = delete;

    // What one microbatch keeps on one chunk.
    double slot_bytes() const {
        return double(::slot_bytes(gpt.shape, int64_t(gpt.chunks[0].layers.size()), options.recompute_layers));
    }

    static void create_events(std::vector<cudaEvent_t>& events, size_t count) {
        events.resize(count);
        for (cudaEvent_t& event : events) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }

    // What a run keeps track of, by (forward, stage, microbatch).
    using Key = std::tuple<bool, int, int>;
    struct Run {
        std::map<Key, real*> arriving;     // buffers that an exchange fills
        std::map<Key, real*> leaving;      // what an exchange will send
        std::map<Key, real*> slot, input;  // held from forward to backward, by (true, stage, microbatch)
        bool training = true;
        size_t ops = 0;
    };

    // Scatter/gather (§4.1): of a message [T, h] that all t ranks of a tensor group hold alike, each sends its 1/t to
    // its counterpart on the next stage, whose tensor group gathers the whole.
    bool scatters() const { return options.scatter_gather && grid.t > 1; }
    // part_size: the elements a rank sends; part_of: where they begin; gather: makes what has arrived whole again.
    int64_t part_size(const Microbatch& mb) const {
        const int64_t whole = mb.rows() * gpt.config.hidden;
        if (!scatters()) return whole;
        // [lab 3.4] scatter/gather: the size of a part
        return whole / grid.t;
        // [end]
    }
    real* part_of(real* message, const Microbatch& mb) const {
        if (!scatters()) return message;
        // [lab 3.4] scatter/gather: this rank's part
        return message + grid.t_rank * part_size(mb);
        // [end]
    }
    void gather(real* message, const Microbatch& mb) {
        if (!scatters()) return;
        // [lab 3.4] scatter/gather: the whole
        all_gather(gpt.device, grid.tensor, part_of(message, mb), message, part_size(mb));
        // [end]
    }

    // Runs this rank's steps. Losses of a training or evaluation run are left in `losses` (last stage).
    void run(const Schedule& schedule, const Program& program, const PipelineCallbacks& callbacks, bool training) {
        Run state;
        state.training = training;
        records.clear();
        for (const Step& step : program.ranks[grid.p_rank]) {
            if (!step.is_op) {
                exchange(program, step, state, callbacks);
                continue;
            }
            if (step.exchange >= 0) {
                TraceScope trace(gpt.device, "wait",
                                 [&] { return "wait for exchange " + std::to_string(step.exchange); });
                CUDA_CHECK(cudaStreamWaitEvent(gpt.device.stream, exchange_done[step.exchange], 0));
            }
            OpRecord record{step.op, now(), 0, busy_cpu_seconds()};
            TraceScope trace(gpt.device, step.op.forward ? "forward" : "backward", [&] {
                return (step.op.forward ? "forward " : "backward ") + std::to_string(step.op.microbatch) + ", chunk " +
                       std::to_string(step.op.chunk);
            });
            if (step.op.forward)
                forward(schedule, step, state, callbacks);
            else
                backward(schedule, step, state, callbacks);
            record.end = now();
            record.cpu = busy_cpu_seconds() - record.cpu;
            records.push_back(record);
            ++state.ops;
        }
        CUDA_CHECK(cudaStreamSynchronize(exchange_stream));
        CUDA_CHECK(cudaStreamSynchronize(gpt.device.stream));
    }

    void forward(const Schedule& schedule, const Step& step, Run& state, const PipelineCallbacks& callbacks) {
        const int stage = step.op.chunk * schedule.p + grid.p_rank;
        const Key key{true, stage, step.op.microbatch};
        const Chunk& chunk = gpt.chunks[step.op.chunk];
        const Microbatch mb = callbacks.microbatch(step.op.microbatch);
        cudaStream_t stream = gpt.device.stream;
        real* slot_memory = slot_pool.take(stream);
        peak_slots = std::max(peak_slots, ++slots_in_use);
        const Slot& slot = slots.at(slot_memory);
        real* x;
        if (chunk.first) {
            x = inputs.take(stream);
            embedding_forward(gpt, mb, x);
        } else {
            x = state.arriving.at(key);
            state.arriving.erase(key);
            gather(x, mb);
        }
        chunk_forward(gpt, chunk, mb, slot, x, [&](size_t i, const real* output) {
            if (callbacks.layer_output) callbacks.layer_output(mb, chunk.layers[i].index, output);
        });
        real* out = slot.outputs.back();
        if (chunk.last) {
            if (callbacks.head) {
                callbacks.head(mb, out);
            } else {
                head_forward_backward(gpt, mb, out);
                CUDA_CHECK(cudaMemcpyAsync(losses.data + step.op.microbatch * mb.rows(), gpt.work.losses,
                                           mb.rows() * sizeof(float), cudaMemcpyDeviceToDevice, stream));
            }
        } else if (step.produces) {
            state.leaving[key] = out;
        }
        cudaEvent_t done = op_done[state.ops];
        CUDA_CHECK(cudaEventRecord(done, stream));
        state.slot[key] = slot_memory;
        if (state.training) {
            state.input[key] = x;
        } else {
            inputs.give_back(x, done);
            if (!step.produces) release_slot(state, key, done);
        }
    }

    // Runs a backward: finds what its forward left (slot and input); takes the gradient of the chunk's output from the
    // exchange that brought it, or, behind the head, copies it from the output's place; runs the chunk's backward, and
    // before layer 0 the embedding's; hands the gradient to the exchange that sends it, or its buffer back; and gives
    // back the forward's slot and input. A buffer is given back with the event after which it is free.
    void backward(const Schedule& schedule, const Step& step, Run& state, const PipelineCallbacks& callbacks) {
        const int stage = step.op.chunk * schedule.p + grid.p_rank;
        const Key key{false, stage, step.op.microbatch}, forward_key{true, stage, step.op.microbatch};
        const Chunk& chunk = gpt.chunks[step.op.chunk];
        const Microbatch mb = callbacks.microbatch(step.op.microbatch);
        cudaStream_t stream = gpt.device.stream;
        // [lab 3.3] the executor: a backward
        const Slot& slot = slots.at(state.slot.at(forward_key));
        real* x = state.input.at(forward_key);
        real* dx;
        if (chunk.last) {  // the loss has left the gradient in the output's place
            dx = gradients.take(stream);
            CUDA_CHECK(cudaMemcpyAsync(dx, slot.outputs.back(), mb.rows() * gpt.config.hidden * sizeof(real),
                                       cudaMemcpyDeviceToDevice, stream));
        } else {
            dx = state.arriving.at(key);
            state.arriving.erase(key);
            gather(dx, mb);
        }
        const bool last_microbatch = step.op.microbatch == schedule.m - 1;
        chunk_backward(gpt, chunk, mb, slot, x, dx, options.recompute_layers, [&](int layer) {
            if (last_microbatch && callbacks.gradient_ready) callbacks.gradient_ready(step.op.chunk, layer);
        });
        if (chunk.first) embedding_backward(gpt, mb, dx);
        cudaEvent_t done = op_done[state.ops];
        CUDA_CHECK(cudaEventRecord(done, stream));
        if (step.produces)
            state.leaving[key] = dx;
        else
            gradients.give_back(dx, done);
        release_slot(state, forward_key, done);
        inputs.give_back(x, done);
        state.input.erase(forward_key);
        // [end]
    }

    void release_slot(Run& state, const Key& key, cudaEvent_t after) {
        slot_pool.give_back(state.slot.at(key), after);
        state.slot.erase(key);
        --slots_in_use;
    }

    // This rank's part of an exchange: one group on the exchange stream, which waits for the operation that produced
    // what it sends, and for whoever used the buffers it receives into.
    void exchange(const Program& program, const Step& step, Run& state, const PipelineCallbacks& callbacks) {
        TraceScope trace(gpt.device, "exchange", [&] { return "issue exchange " + std::to_string(step.exchange); });
        if (step.produces) CUDA_CHECK(cudaStreamWaitEvent(exchange_stream, op_done[state.ops - 1], 0));
        const std::vector<Message>& messages = program.exchanges[step.exchange].messages;
        const int rank = grid.p_rank;
        NCCL_CHECK(ncclGroupStart());
        for (const Message& message : messages) {
            if (message.from != rank && message.to != rank) continue;
            const Microbatch mb = callbacks.microbatch(message.microbatch);
            const int64_t count = part_size(mb);
            if (message.from == rank) {
                real* data = state.leaving.at({message.forward, message.from_stage, message.microbatch});
                NCCL_CHECK(ncclSend(part_of(data, mb), count, nccl_type<real>(), message.to, grid.pipeline.comm,
                                    exchange_stream));
                grid.pipeline.computed_bytes += double(count) * sizeof(real);
            } else {
                real* data = (message.forward ? inputs : gradients).take(exchange_stream);
                state.arriving[{message.forward, message.to_stage, message.microbatch}] = data;
                NCCL_CHECK(ncclRecv(part_of(data, mb), count, nccl_type<real>(), message.from, grid.pipeline.comm,
                                    exchange_stream));
            }
        }
        NCCL_CHECK(ncclGroupEnd());
        cudaEvent_t done = exchange_done[step.exchange];
        CUDA_CHECK(cudaEventRecord(done, exchange_stream));
        for (const Message& message : messages) {
            if (message.from != rank) continue;
            const Key key{message.forward, message.from_stage, message.microbatch};
            if (!message.forward) gradients.give_back(state.leaving.at(key), done);
            if (message.forward && !state.training) release_slot(state, key, done);
            state.leaving.erase(key);
        }
    }

    // Thread CPU time spent computing: what a rank with a core of its own would need. 0 on a GPU build.
    static double busy_cpu_seconds() {
#ifdef __CUDACC__
        return 0;
#else
        return standin::thread_cpu_seconds() - standin::state().waiting_cpu;
#endif
    }
};

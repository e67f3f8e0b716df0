// Training (§5): flags, the training loop, metrics, evaluation, generation.
//
//   mpirun -np N ./train --tp T --pp P ...
//
// One iteration: every rank runs its list of forwards and backwards over the batch's microbatches (pipeline.cu), gradients are
// reduced as they become complete (data_parallel.cu), the optimizer steps. Nothing in this file knows how a layer is split.
//
// Rules kept here:
//   - loss is the sum over the global batch's tokens divided by their number, summed per sample and then in sample order, so
//     it does not depend on the layout;
//   - a user's mistake ends every rank with status 2 and one message, before any communicator exists.
#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>

#include "data_parallel.cu"
#include "gpt.cu"
#include "pipeline.cu"
#include "platform/data.h"
#include "platform/dump.h"
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
// A batch's tokens

// The microbatches of a batch on the device: what this rank's first and last stage read.
struct Batch {
    struct Tokens {
        DeviceBuffer<int> inputs, targets, distinct, starts, positions;
        int distinct_count = 0;
    };
    std::vector<Tokens> microbatches;
};

// Uploads a microbatch from its windows, each s + 1 tokens: position i of sample j is element i b + j.
inline void upload_tokens(Device& device, const std::vector<std::vector<int32_t>>& windows, Batch::Tokens& tokens) {
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

// ---------------------------------------------------------------------------------------------------------------------
// --dump: a whole tensor from its slices, whatever the layout

// The pipeline rank that holds the parameter of this index (the tied embedding: the first).
inline int pipeline_rank_of(const GptConfig& config, int p, int v, int index) {
    const int64_t layer = (index - kEmbeddingParameters) / kLayerParameters;
    if (index < kEmbeddingParameters) return 0;
    if (layer >= config.layers) return p - 1;
    return int(layer / (config.layers / (int64_t(p) * v)) % p);
}

// Copies a slice [local_rows, local_cols] to its place in the whole tensor, in Hugging Face's column order; padding is left out.
inline void place_slice(const Parameter& slice, const std::vector<float>& values, std::vector<float>& whole) {
    for (int64_t r = 0; r < slice.local_rows && slice.first_row + r < slice.rows; ++r)
        for (int64_t c = 0; c < slice.local_cols; ++c)
            whole[(slice.first_row + r) * slice.cols + slice.global_column(c)] = values[r * slice.local_cols + c];
}

// Calls consume(parameter, whole values) on world rank 0 for every parameter of the model, in order, given each rank's flat
// buffer (weights or gradients) on the device. Collective over the replica d_rank 0; other replicas return at once.
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

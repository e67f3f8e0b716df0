// Tensor model parallelism (§2.3): how each layer of a transformer is divided among the t ranks of a tensor group.
//
// A linear layer Y = X A is divided by the columns of A (every rank computes some columns of Y from the whole X) or by
// its rows (every rank computes an addend of the whole Y from its columns of X). A column parallel layer followed by a
// row parallel one needs no communication between them; around the pair stand two conjugate operators:
//   f: identity forward, all-reduce backward     (before the column parallel layer)
//   g: all-reduce forward, identity backward     (after the row parallel layer)
// Two such pairs make a layer (attention by heads, MLP), so it costs two all-reduces forward and two backward.
//
// Rules kept here:
//   - the serial program is the case t = 1, not a copy: a group of one makes every collective an identity;
//   - activations between the pairs are bitwise equal on all ranks of the group, so replicated parameters (LayerNorm,
//     row parallel biases, positions) get bitwise equal gradients with no extra traffic;
//   - the vocabulary is padded to a multiple of t; padded rows take no part in the softmax and get zero gradient.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "platform/device.h"
#include "platform/grid.h"
#include "platform/precision.h"
#include "platform/random.h"

// ---------------------------------------------------------------------------------------------------------------------
// Parameters and their slices

enum class Split { replicated, columns, rows };

// One parameter tensor of the whole model, [rows, cols] (a vector is [1, cols]), and this rank's slice of it,
// [local_rows, local_cols] at `offset` floats into the rank's flat weight and gradient buffers.
struct Parameter {
    std::string name;  // Hugging Face GPT-2's
    int index = 0;     // in the whole model's order
    int64_t rows = 1, cols = 0;
    bool vector = false;
    Split split = Split::replicated;
    bool qkv = false;          // columns are stored by head, [a, 3, h/a]; Hugging Face stores [3, a, h/a]
    int64_t head_size = 0;     // h/a, for qkv
    double std = 0, mean = 0;  // initial values are N(mean, std^2)
    bool tied_copy = false;    // the last stage's copy of the embedding (p > 1): it counts, and is saved, only once

    int64_t local_rows = 0, local_cols = 0;
    int64_t first_row = 0, first_col = 0;  // of the slice; rows beyond `rows` are padding of the vocabulary
    size_t offset = 0, padded = 0;         // floats

    int64_t local_size() const { return local_rows * local_cols; }
    // Of the whole tensor, as files give it.
    std::vector<int64_t> shape() const {
        return vector ? std::vector<int64_t>{cols} : std::vector<int64_t>{rows, cols};
    }
    bool decays() const { return !vector; }  // AdamW leaves biases and LayerNorm alone

    // The slice's column c is this column of the whole tensor.
    int64_t global_column(int64_t c) const {
        const int64_t column = first_col + c;
        if (!qkv) return column;
        const int64_t head = column / (3 * head_size), part = column / head_size % 3;
        return part * (cols / 3) + head * head_size + column % head_size;
    }
};

// Fills in the slice of tensor rank `t_rank` of t: local_rows, local_cols, first_row and first_col. Split by columns,
// each rank has cols / t of them (they divide); by rows, rows / t rounded up, so the last rank's may go beyond `rows`:
// padding, which only the vocabulary needs. Replicated parameters are whole on every rank.
inline void slice_parameter(Parameter& parameter, int t, int t_rank) {
    // [lab 2.5] slices by columns and by rows
    parameter.local_rows = parameter.rows;
    parameter.local_cols = parameter.cols;
    if (parameter.split == Split::rows) parameter.local_rows = (parameter.rows + t - 1) / t;
    if (parameter.split == Split::columns) parameter.local_cols = parameter.cols / t;
    parameter.first_row = parameter.split == Split::rows ? t_rank * parameter.local_rows : 0;
    parameter.first_col = parameter.split == Split::columns ? t_rank * parameter.local_cols : 0;
    // [end]
}

// The slice's initial values, [local_rows, local_cols]: those of the whole tensor, whatever the layout. Padding is
// zero.
inline std::vector<float> initial_slice(const Parameter& parameter, uint64_t seed) {
    std::vector<float> slice(parameter.local_size(), 0.0f);
    const int64_t blocks = (parameter.cols + 63) / 64;
    std::vector<float> row(parameter.std > 0 ? 64 * blocks : 0);
    for (int64_t r = 0; r < parameter.local_rows && parameter.first_row + r < parameter.rows; ++r) {
        for (int64_t block = 0; block < int64_t(row.size()) / 64; ++block)
            normal_block(seed, parameter.index, parameter.first_row + r, block, row.data() + 64 * block);
        for (int64_t c = 0; c < parameter.local_cols; ++c) {
            const double deviate = row.empty() ? 0.0 : row[parameter.global_column(c)];
            slice[r * parameter.local_cols + c] = float(parameter.mean + parameter.std * deviate);
        }
    }
    return slice;
}

// ---------------------------------------------------------------------------------------------------------------------
// f, g and the two linear layers

struct Tensor {
    real* value = nullptr;
    float* gradient = nullptr;  // accumulated over the microbatches of an iteration
};

// A rank's shard of Y = X A + bias: weight [in, out], sizes on this rank. The bias is added by the fused kernel that
// follows (§4.2), so neither function below touches it.
struct Linear {
    Tensor weight, bias;
    int64_t in = 0, out = 0;
};

// f, backward: every rank of the group holds an addend of dx [count], and gets the sum in its place.
inline void f_backward(Device& device, Group& tensor, real* dx, int64_t count) {
    // [lab 2.1] f, backward
    all_reduce(device, tensor, dx, count);
    // [end]
}

// g, forward: every rank of the group holds an addend of y [count], and gets the sum in its place.
inline void g_forward(Device& device, Group& tensor, real* y, int64_t count) {
    // [lab 2.2] g, forward
    all_reduce(device, tensor, y, count);
    // [end]
}

// y [rows, out/t] = x [rows, in] A, A [in, out/t] (f is the identity here). Matrices are gemm's (platform/device.h):
// {data, distance between rows, 0, transposed}.
inline void column_parallel_forward(Device& device, const Linear& layer, const real* x, real* y, int64_t rows) {
    // [lab 2.3] column parallel layer: forward
    gemm(device, rows, layer.out, layer.in, {x, layer.in}, {layer.weight.value, layer.out}, y, layer.out);
    // [end]
}

// dx [rows, in] = f(dy [rows, out/t] A^T) and dA += x^T dy, accumulated (beta = 1) over an iteration's microbatches.
inline void column_parallel_backward(Device& device, Group& tensor, const Linear& layer, const real* x, const real* dy,
                                     real* dx, int64_t rows) {
    // [lab 2.3] column parallel layer: backward
    gemm(device, rows, layer.in, layer.out, {dy, layer.out}, {layer.weight.value, layer.out, 0, true}, dx, layer.in);
    f_backward(device, tensor, dx, rows * layer.in);
    gemm(device, layer.in, layer.out, rows, {x, layer.in, 0, true}, {dy, layer.out}, layer.weight.gradient, layer.out,
         1.0f, 1.0f);
    // [end]
}

// y [rows, out] = g(x [rows, in/t] A), A [in/t, out].
inline void row_parallel_forward(Device& device, Group& tensor, const Linear& layer, const real* x, real* y,
                                 int64_t rows) {
    // [lab 2.4] row parallel layer: forward
    gemm(device, rows, layer.out, layer.in, {x, layer.in}, {layer.weight.value, layer.out}, y, layer.out);
    g_forward(device, tensor, y, rows * layer.out);
    // [end]
}

// dx [rows, in/t] = dy [rows, out] A^T and dA += x^T dy (g is the identity here).
inline void row_parallel_backward(Device& device, const Linear& layer, const real* x, const real* dy, real* dx,
                                  int64_t rows) {
    // [lab 2.4] row parallel layer: backward
    gemm(device, rows, layer.in, layer.out, {dy, layer.out}, {layer.weight.value, layer.out, 0, true}, dx, layer.in);
    gemm(device, layer.in, layer.out, rows, {x, layer.in, 0, true}, {dy, layer.out}, layer.weight.gradient, layer.out,
         1.0f, 1.0f);
    // [end]
}

// ---------------------------------------------------------------------------------------------------------------------
// Vocabulary parallel embedding: rank i holds rows [i Vp/t, (i+1) Vp/t) of the padded embedding [Vp, h].

// x [rows, h] = the embedding's row of each token [rows], or zero if another rank holds it: wte [local_rows, h] begins
// at token first_row. One block per token.
__global__ void embedding_forward_kernel(const int* tokens, const real* wte, real* x, int first_row, int local_rows,
                                         int h) {
    // [lab 2.6] vocabulary parallel embedding
    const int64_t row = blockIdx.x;
    const int local = tokens[row] - first_row;
    const bool mine = 0 <= local && local < local_rows;
    for (int j = threadIdx.x; j < h; j += blockDim.x) x[row * h + j] = mine ? wte[int64_t(local) * h + j] : real(0.0f);
    // [end]
}

// gradient [Vp/t, h] += dx [rows, h] of every position that holds the token. One block per distinct token, which adds
// its positions in order: no atomics, so a repeated run is bitwise the same. distinct [n]: token ids; starts [n + 1]:
// ranges of `positions` [rows], the microbatch's rows sorted by token.
__global__ void embedding_backward_kernel(const int* distinct, const int* starts, const int* positions, const real* dx,
                                          float* gradient, int first_row, int local_rows, int h) {
    const int local = distinct[blockIdx.x] - first_row;
    if (local < 0 || local >= local_rows) return;
    float* sum = gradient + int64_t(local) * h;
    for (int k = starts[blockIdx.x]; k < starts[blockIdx.x + 1]; ++k) {
        const real* row = dx + int64_t(positions[k]) * h;
        for (int j = threadIdx.x; j < h; j += blockDim.x) sum[j] += float(row[j]);
    }
}

// x [rows, h] = embedding of tokens [rows] (device), whole on every rank of the group.
inline void vocab_parallel_embedding_forward(Device& device, Group& tensor, const Tensor& wte, const Parameter& slice,
                                             const int* tokens, real* x, int64_t rows) {
    launch<embedding_forward_kernel>(device, rows, kBlock, tokens, wte.value, x, int(slice.first_row),
                                     int(slice.local_rows), int(slice.cols));
    g_forward(device, tensor, x, rows * slice.cols);
}

// ---------------------------------------------------------------------------------------------------------------------
// Vocabulary parallel cross-entropy: the logits stay split; per token only the maximum, the sum of exponentials and the
// target's logit are exchanged (3 numbers in place of V).

constexpr float kLowest = -1e30f;  // below every logit; finite, since -ffast-math promises nothing about infinity

// Per row of logits [rows, n], of which the first `filled` columns are not padding: maximum [rows] (kLowest if there
// are none) and the sum [rows] of exp(logit - maximum). One block per row. Reads 4 bytes per logit (twice, the second
// time from cache).
__global__ void cross_entropy_statistics_kernel(const real* logits, float* maximum, float* sum, int n, int filled) {
    // [lab 1.5] cross-entropy, maximum and sum of exponentials
    const real* row = logits + int64_t(blockIdx.x) * n;
    float largest = kLowest;
    for (int j = threadIdx.x; j < filled; j += blockDim.x) largest = float(row[j]) > largest ? float(row[j]) : largest;
    largest = block_max(largest);
    float total = 0;
    for (int j = threadIdx.x; j < filled; j += blockDim.x) total += expf(float(row[j]) - largest);
    total = block_sum(total);
    if (threadIdx.x == 0) {
        maximum[blockIdx.x] = largest;
        sum[blockIdx.x] = total;
    }
    // [end]
}

// Brings this rank's sum [rows] from its own maximum [rows] to the group's, and writes the target's logit, less the
// group's maximum, where this rank holds it, else 0. A flat kernel.
__global__ void cross_entropy_rescale_kernel(const real* logits, const int* targets, const float* own_maximum,
                                             const float* maximum, float* sum, float* target_logit, int64_t rows, int n,
                                             int first_column) {
    // [lab 2.7] vocabulary parallel loss: one rank's part
    for_flat(rows, [=](int64_t i) {
        sum[i] *= expf(own_maximum[i] - maximum[i]);
        const int local = targets[i] - first_column;
        target_logit[i] = 0 <= local && local < n ? float(logits[i * n + local]) - maximum[i] : 0.0f;
    });
    // [end]
}

// losses [rows] = log sum - target, and in place of the logits their gradient: (softmax - one-hot) * scale, 0 in padded
// columns. One block per row. Reads and writes 4 bytes per logit.
__global__ void cross_entropy_gradient_kernel(real* logits, const int* targets, const float* maximum, const float* sum,
                                              const float* target_logit, float* losses, int n, int filled,
                                              int first_column, float scale) {
    const int64_t i = blockIdx.x;
    real* row = logits + i * n;
    const int local = targets[i] - first_column;
    // [lab 1.6] cross-entropy, loss and gradient
    const float largest = maximum[i], factor = scale / sum[i];
    // The target's column is subtracted from before it is rounded
    const float at_target = 0 <= local && local < filled ? expf(float(row[local]) - largest) * factor - scale : 0.0f;
    __syncthreads();
    for (int j = threadIdx.x; j < filled; j += blockDim.x) row[j] = real(expf(float(row[j]) - largest) * factor);
    for (int j = filled + threadIdx.x; j < n; j += blockDim.x) row[j] = real(0.0f);
    __syncthreads();
    if (threadIdx.x == 0) {
        losses[i] = logf(sum[i]) - target_logit[i];
        if (0 <= local && local < filled) row[local] = real(at_target);
    }
    // [end]
}

// Cross-entropy of logits [rows, n] (this rank's columns [first_column, first_column + n) of V) against targets [rows].
// Writes losses [rows], bitwise equal on all ranks, and replaces the logits by their gradient times `scale`. Three
// steps: each rank's own maximum and sum; the group's maximum, to which each sum is rescaled, and the group's sum and
// the target's logit, which one rank has; then loss and gradient. statistics [4 * rows] is scratch.
inline void vocab_parallel_cross_entropy(Device& device, Group& tensor, real* logits, const int* targets, float* losses,
                                         float* statistics, int64_t rows, int64_t n, int64_t first_column, int64_t V,
                                         float scale) {
    float* own_maximum = statistics;
    float* maximum = own_maximum + rows;
    float* sum = maximum + rows;
    float* target_logit = sum + rows;
    const int filled = int(std::clamp<int64_t>(V - first_column, 0, n));
    launch<cross_entropy_statistics_kernel>(device, rows, kBlock, logits, own_maximum, sum, int(n), filled);
    // [lab 2.7] vocabulary parallel loss: over the group
    CUDA_CHECK(cudaMemcpyAsync(maximum, own_maximum, rows * sizeof(float), cudaMemcpyDeviceToDevice, device.stream));
    all_reduce(device, tensor, maximum, rows, ncclMax);
    launch<cross_entropy_rescale_kernel>(device, flat_grid(rows), kBlock, logits, targets, own_maximum, maximum, sum,
                                         target_logit, rows, int(n), int(first_column));
    all_reduce(device, tensor, sum, 2 * rows);  // the sums and the targets' logits in one message
    // [end]
    launch<cross_entropy_gradient_kernel>(device, rows, kBlock, logits, targets, maximum, sum, target_logit, losses,
                                          int(n), filled, int(first_column), scale);
}

// The transformer (§2.3, §4.2): GPT-2, forward and backward, written by hand.
//
// Learned positions, pre-LayerNorm, causal attention, GeLU (tanh), biases everywhere, tied input and output embeddings,
// dropout on embeddings, attention and residuals. Linear layers, embedding and loss are tensor_parallel.cu's.
//
// Rules kept here:
//   - activations are [s, b, h] and heads [s, b, a, h/a] (§4.2), so attention is strided batched GEMMs without copies;
//     a matrix "[T, h]" below has T = s b rows, row i b + j being position i of the microbatch's sample j;
//   - what the paper fuses is one kernel: bias+GeLU, bias+dropout+add, scale+mask+softmax(+dropout);
//   - dropout masks are not stored: they are functions of global coordinates (platform/random.h), computed again;
//   - sums over rows are cut into chunks of kChunkRows rows, whatever the machine, and added in order;
//   - what a layer's backward needs lives in LayerActivations, whose size is known before the run; everything else in
//   one
//     Workspace shared by all layers.
//
// Defines: the kernels; GptConfig and the parameter list; Gpt (one rank's part of the model); layer forward and
// backward; the embedding at the model's start and the head (final LayerNorm, output layer, loss) at its end.
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
#include "tensor_parallel.cu"

// ---------------------------------------------------------------------------------------------------------------------
// Kernels. T rows; one block per row or per chunk of kChunkRows rows, threads along the columns. Bytes per element are
// fp32's; `real` in 16 bits halves them.

constexpr int kChunkRows = 32;
inline int64_t row_chunks(int64_t rows) { return (rows + kChunkRows - 1) / kChunkRows; }

// y [T, h] = (x - mean) / sqrt(variance + epsilon) * gamma + beta; keeps mean and 1/std [T] for the backward. The
// variance is that of the row, divided by h, summed in a second pass from x - mean. One block per row. 8 bytes per
// element.
__global__ void layernorm_forward_kernel(const real* x, const real* gamma, const real* beta, real* y, float* mean,
                                         float* rstd, int h, float epsilon) {
    // [lab 1.1] LayerNorm, forward
    const int64_t row = blockIdx.x;
    const real* in = x + row * h;
    real* out = y + row * h;
    float sum = 0;
    for (int j = threadIdx.x; j < h; j += blockDim.x) sum += float(in[j]);
    const float m = block_sum(sum) / h;
    float squares = 0;
    for (int j = threadIdx.x; j < h; j += blockDim.x) squares += (float(in[j]) - m) * (float(in[j]) - m);
    const float r = 1.0f / sqrtf(block_sum(squares) / h + epsilon);
    for (int j = threadIdx.x; j < h; j += blockDim.x)
        out[j] = real((float(in[j]) - m) * r * float(gamma[j]) + float(beta[j]));
    if (threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
    // [end]
}

// dx [T, h] (+)= the gradient of LayerNorm's input x [T, h], given dy [T, h]; partial [chunks, 2 h] = each chunk's sums
// for gamma's and beta's gradients: dy n and dy, where n = (x - mean) rstd. The mean and the variance depend on x too,
// so with g = dy gamma, dx = rstd (g - mean(g) - n mean(g n)), means over the row. dx may be x. One block per chunk of
// rows. 16 bytes per element.
template <bool accumulate>
__global__ void layernorm_backward_kernel(const real* x, const real* gamma, const float* mean, const float* rstd,
                                          const real* dy, real* dx, float* partial, int64_t rows, int h) {
    float* dgamma = partial + int64_t(blockIdx.x) * 2 * h;
    float* dbeta = dgamma + h;
    for (int j = threadIdx.x; j < 2 * h; j += blockDim.x) dgamma[j] = 0;
    __syncthreads();
    const int64_t first = int64_t(blockIdx.x) * kChunkRows;
    for (int64_t row = first; row < rows && row < first + kChunkRows; ++row) {
        // [lab 1.2] LayerNorm, backward
        const float m = mean[row], r = rstd[row];
        float sum_dy = 0, sum_dy_normalized = 0;
        for (int j = threadIdx.x; j < h; j += blockDim.x) {
            const float d = float(dy[row * h + j]) * float(gamma[j]);
            sum_dy += d;
            sum_dy_normalized += d * (float(x[row * h + j]) - m) * r;
        }
        const float mean_dy = block_sum(sum_dy) / h, mean_dy_normalized = block_sum(sum_dy_normalized) / h;
        for (int j = threadIdx.x; j < h; j += blockDim.x) {
            const float d = float(dy[row * h + j]), normalized = (float(x[row * h + j]) - m) * r;
            dgamma[j] += d * normalized;
            dbeta[j] += d;
            const float gradient = (d * float(gamma[j]) - mean_dy - normalized * mean_dy_normalized) * r;
            dx[row * h + j] = real(accumulate ? float(dx[row * h + j]) + gradient : gradient);
        }
        // [end]
    }
}

// gradient [n] += the sum over chunks of partial [chunks, stride]'s first n columns, in chunk order; uses chunk 0's row
// as the running sum. One block per 64 columns.
__global__ void add_chunk_sums_kernel(float* partial, int64_t chunks, int stride, int n, float* gradient) {
    const int begin = blockIdx.x * 64, end = begin + 64 < n ? begin + 64 : n;
    for (int64_t chunk = 1; chunk < chunks; ++chunk)
        for (int j = begin + threadIdx.x; j < end; j += blockDim.x) partial[j] += partial[chunk * stride + j];
    for (int j = begin + threadIdx.x; j < end; j += blockDim.x) gradient[j] += partial[j];
}

// x [T, n] += bias [n]. One block per row. 8 bytes per element.
__global__ void add_bias_kernel(real* x, const real* bias, int n) {
    real* row = x + int64_t(blockIdx.x) * n;
    for (int j = threadIdx.x; j < n; j += blockDim.x) row[j] = real(float(row[j]) + float(bias[j]));
}

// partial [chunks, n] = each chunk's column sums of dy [T, n]. One block per chunk of rows. 4 bytes per element.
__global__ void bias_backward_kernel(const real* dy, float* partial, int64_t rows, int n) {
    float* sums = partial + int64_t(blockIdx.x) * n;
    for (int j = threadIdx.x; j < n; j += blockDim.x) sums[j] = 0;
    const int64_t first = int64_t(blockIdx.x) * kChunkRows;
    for (int64_t row = first; row < rows && row < first + kChunkRows; ++row)
        for (int j = threadIdx.x; j < n; j += blockDim.x) sums[j] += float(dy[row * n + j]);
}

// y [T, n] = GeLU(x [T, n] + bias [n]) (§4.2), in its tanh form: 0.5 z (1 + tanh u) = z / (1 + exp(-2u)),
// u = sqrt(2/pi) (z + 0.044715 z^3). One block per row. 8 bytes per element.
constexpr float kGeluScale = 0.7978845608028654f, kGeluCubic = 0.044715f;
__device__ inline float gelu_sigmoid(float z) {
    const float twice_u = 2 * kGeluScale * (z + kGeluCubic * z * z * z);
    return 1.0f / (1.0f + expf(twice_u > -80.0f ? -twice_u : 80.0f));  // exp stays finite
}
__global__ void bias_gelu_forward_kernel(const real* x, const real* bias, real* y, int n) {
    const int64_t row = int64_t(blockIdx.x) * n;
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        const float z = float(x[row + j]) + float(bias[j]);
        y[row + j] = real(z * gelu_sigmoid(z));
    }
}

// dy [T, n], the gradient of GeLU's output, becomes that of its input; partial [chunks, n] = each chunk's column sums
// of it, for the bias. One block per chunk of rows. 12 bytes per element.
__global__ void bias_gelu_backward_kernel(const real* x, const real* bias, real* dy, float* partial, int64_t rows,
                                          int n) {
    float* sums = partial + int64_t(blockIdx.x) * n;
    for (int j = threadIdx.x; j < n; j += blockDim.x) sums[j] = 0;
    const int64_t first = int64_t(blockIdx.x) * kChunkRows;
    for (int64_t row = first; row < rows && row < first + kChunkRows; ++row)
        for (int j = threadIdx.x; j < n; j += blockDim.x) {
            const float z = float(x[row * n + j]) + float(bias[j]), sigmoid = gelu_sigmoid(z);
            const float slope = 2 * kGeluScale * (1 + 3 * kGeluCubic * z * z);
            const float d = float(dy[row * n + j]) * sigmoid * (1 + z * (1 - sigmoid) * slope);
            dy[row * n + j] = real(d);
            sums[j] += d;
        }
}

// y [T, h] = residual [T, h] + dropout(x [T, h] + bias [h]) (§4.2). One block per row i b + j. 12 bytes per element.
__global__ void bias_dropout_add_forward_kernel(const real* x, const real* bias, const real* residual, real* y, int b,
                                                int h, Dropout dropout) {
    const int64_t row = blockIdx.x;
    for_dropout(dropout, row / b, row % b, h, h, [=](int j, float multiplier) {
        y[row * h + j] = real(float(residual[row * h + j]) + (float(x[row * h + j]) + float(bias[j])) * multiplier);
    });
}

// dx [T, h] = dropout's gradient of dy [T, h]. dx may be dy. One block per row i b + j. 8 bytes per element.
__global__ void dropout_backward_kernel(const real* dy, real* dx, int b, int h, Dropout dropout) {
    const int64_t row = blockIdx.x;
    for_dropout(dropout, row / b, row % b, h, h,
                [=](int j, float multiplier) { dx[row * h + j] = real(float(dy[row * h + j]) * multiplier); });
}

// x [T, h] = dropout(x + wpe [s, h]'s row i). One block per row i b + j. 8 bytes per element.
__global__ void position_dropout_forward_kernel(real* x, const real* wpe, int b, int h, Dropout dropout) {
    const int64_t row = blockIdx.x, position = row / b;
    for_dropout(dropout, position, row % b, h, h, [=](int j, float multiplier) {
        x[row * h + j] = real((float(x[row * h + j]) + float(wpe[position * h + j])) * multiplier);
    });
}

// gradient [s, h] += dx [s, b, h] summed over b. One block per position. 4 bytes per element.
__global__ void position_backward_kernel(const real* dx, float* gradient, int b, int h) {
    const int64_t position = blockIdx.x;
    for (int sample = 0; sample < b; ++sample)
        for (int j = threadIdx.x; j < h; j += blockDim.x)
            gradient[position * h + j] += float(dx[(position * b + sample) * h + j]);
}

// In place: row i of scores [b, a/t, s, s] becomes softmax(scale * scores) over columns 0..i, and 0 beyond: the causal
// mask skips. The row's maximum is taken off before exp, which changes nothing but keeps it from overflowing. With
// dropout, `dropped` (as scores) gets the masked probabilities. One block per row. 8 (16) bytes per element.
__global__ void causal_softmax_forward_kernel(real* scores, real* dropped, int s, int local_heads, int first_head,
                                              float scale, Dropout dropout) {
    const int64_t row = blockIdx.x, matrix = row / s;
    const int visible = int(row % s) + 1;
    real* p = scores + row * s;
    // [lab 1.3] causal softmax, forward
    float largest = kLowest;
    for (int j = threadIdx.x; j < visible; j += blockDim.x) largest = float(p[j]) > largest ? float(p[j]) : largest;
    largest = block_max(largest);
    float sum = 0;
    for (int j = threadIdx.x; j < visible; j += blockDim.x) {
        const float exponential = expf((float(p[j]) - largest) * scale);
        p[j] = real(exponential);
        sum += exponential;
    }
    const float factor = 1.0f / block_sum(sum);
    for (int j = threadIdx.x; j < visible; j += blockDim.x) p[j] = real(float(p[j]) * factor);
    for (int j = visible + threadIdx.x; j < s; j += blockDim.x) p[j] = real(0.0f);
    // [end]
    if (!dropout.active()) return;
    __syncthreads();  // below, other threads visit the same elements
    real* q = dropped + row * s;
    const int64_t global_row = (matrix % local_heads + first_head) * s + row % s;
    for_dropout(dropout, global_row, matrix / local_heads, s, visible,
                [=](int j, float multiplier) { q[j] = real(float(p[j]) * multiplier); });
    for (int j = visible + threadIdx.x; j < s; j += blockDim.x) q[j] = real(0.0f);
}

// dropped = dropout(probabilities) again, for the backward. As above. 8 bytes per element.
__global__ void attention_dropout_kernel(const real* probabilities, real* dropped, int s, int local_heads,
                                         int first_head, Dropout dropout) {
    const int64_t row = blockIdx.x, matrix = row / s;
    const int visible = int(row % s) + 1;
    const real* p = probabilities + row * s;
    real* q = dropped + row * s;
    const int64_t global_row = (matrix % local_heads + first_head) * s + row % s;
    for_dropout(dropout, global_row, matrix / local_heads, s, visible,
                [=](int j, float multiplier) { q[j] = real(float(p[j]) * multiplier); });
    for (int j = visible + threadIdx.x; j < s; j += blockDim.x) q[j] = real(0.0f);
}

// In place: d [b, a/t, s, s], the gradient of the dropped probabilities q, becomes that of the scores before scaling:
// scale (d q - p sum(d q)), because the gradient of p is d q / p (q = p * mask). Without dropout q is p.
// One block per row. 16 bytes per element (12 without dropout).
__global__ void causal_softmax_backward_kernel(const real* probabilities, const real* dropped, real* d, int s,
                                               float scale) {
    const int64_t row = blockIdx.x;
    const int visible = int(row % s) + 1;
    const real* p = probabilities + row * s;
    const real* q = dropped + row * s;
    real* dp = d + row * s;
    // [lab 1.4] causal softmax, backward
    float sum = 0;
    for (int j = threadIdx.x; j < visible; j += blockDim.x) sum += float(dp[j]) * float(q[j]);
    sum = block_sum(sum);
    for (int j = threadIdx.x; j < visible; j += blockDim.x)
        dp[j] = real(scale * (float(dp[j]) * float(q[j]) - float(p[j]) * sum));
    for (int j = visible + threadIdx.x; j < s; j += blockDim.x) dp[j] = real(0.0f);
    // [end]
}

// ---------------------------------------------------------------------------------------------------------------------
// The model's shape and its parameters

struct GptConfig {
    int64_t layers = 6, hidden = 384, heads = 6, sequence = 256, vocab = 256;
    double hidden_dropout = 0.1, attention_dropout = 0.1, init_std = 0.02;
    uint64_t seed = 1234;

    int64_t head_size() const { return hidden / heads; }
};
constexpr float kLayerNormEpsilon = 1e-5f;

// Eq. 2, without its approximations: tied weights once, padding not.
inline int64_t parameter_count(const GptConfig& c) {
    return c.layers * (12 * c.hidden * c.hidden + 13 * c.hidden) + (c.vocab + c.sequence + 2) * c.hidden;
}

// Eq. 3: the FLOPs of one iteration on B samples: per layer and sample the products take 24 s h^2 + 4 s^2 h forward
// (two for every multiplication with its addition), the output layer's 2 s h V; backward twice that. When recomputing,
// layers are computed forward once more, the output layer not.
inline double iteration_flops(const GptConfig& c, int64_t batch, bool recompute) {
    // [lab 5.1] eq. 3
    const double B = double(batch), s = double(c.sequence), l = double(c.layers), h = double(c.hidden),
                 V = double(c.vocab);
    return (recompute ? 96 : 72) * B * s * l * h * h * (1 + s / (6 * h) + V / ((recompute ? 16 : 12) * l * h));
    // [end]
}

constexpr int kLayerParameters = 12, kEmbeddingParameters = 2;
inline int gpt_parameter_count(const GptConfig& c) {
    return kEmbeddingParameters + int(c.layers) * kLayerParameters + 2;
}

// The whole model's parameters in Hugging Face's order: wte, wpe, 12 per layer, the final LayerNorm. Linear weights are
// [in, out]: §2.3's Y = X A. Projections into the residual stream start at std / sqrt(2 l), as in GPT-2.
inline std::vector<Parameter> gpt_parameters(const GptConfig& c) {
    const int64_t h = c.hidden;
    std::vector<Parameter> list;
    auto add = [&](const std::string& name, int64_t rows, int64_t cols, Split split, double std) {
        Parameter parameter;
        parameter.name = name;
        parameter.index = int(list.size());
        parameter.rows = rows;
        parameter.cols = cols;
        parameter.split = split;
        parameter.std = std;
        list.push_back(parameter);
    };
    auto add_vector = [&](const std::string& name, int64_t cols, Split split, double mean = 0) {
        add(name, 1, cols, split, 0);
        list.back().vector = true;
        list.back().mean = mean;
    };
    auto add_norm = [&](const std::string& name) {
        add_vector(name + ".weight", h, Split::replicated, 1);
        add_vector(name + ".bias", h, Split::replicated);
    };
    add("wte.weight", c.vocab, h, Split::rows, c.init_std);
    add("wpe.weight", c.sequence, h, Split::replicated, c.init_std);
    const double residual_std = c.init_std / std::sqrt(2.0 * double(c.layers));
    for (int64_t layer = 0; layer < c.layers; ++layer) {
        const std::string prefix = "h." + std::to_string(layer) + ".";
        add_norm(prefix + "ln_1");
        add(prefix + "attn.c_attn.weight", h, 3 * h, Split::columns, c.init_std);
        add_vector(prefix + "attn.c_attn.bias", 3 * h, Split::columns);
        for (size_t i = list.size() - 2; i < list.size(); ++i) {
            list[i].qkv = true;
            list[i].head_size = c.head_size();
        }
        add(prefix + "attn.c_proj.weight", h, h, Split::rows, residual_std);
        add_vector(prefix + "attn.c_proj.bias", h, Split::replicated);
        add_norm(prefix + "ln_2");
        add(prefix + "mlp.c_fc.weight", h, 4 * h, Split::columns, c.init_std);
        add_vector(prefix + "mlp.c_fc.bias", 4 * h, Split::columns);
        add(prefix + "mlp.c_proj.weight", 4 * h, h, Split::rows, residual_std);
        add_vector(prefix + "mlp.c_proj.bias", h, Split::replicated);
    }
    add_norm("ln_f");
    return list;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory: one function says where everything lies, with base = nullptr only how much there is

struct Carver {
    char* base = nullptr;
    size_t used = 0;             // bytes
    size_t word = sizeof(real);  // of activations; `plan` asks for other formats than its own
    real* take(int64_t count) { return reinterpret_cast<real*>(take_bytes(size_t(count) * word)); }
    float* take_fp32(int64_t count) { return reinterpret_cast<float*>(take_bytes(size_t(count) * sizeof(float))); }
    char* take_bytes(size_t bytes) {
        char* place = base ? base + used : nullptr;
        used += (bytes + 63) / 64 * 64;
        return place;
    }
};

// The sizes of a microbatch on this rank.
struct Shape {
    int64_t s = 0, b = 0;     // sequence length, samples
    int64_t h = 0, a = 0;     // hidden size, heads
    int64_t t = 1;            // tensor parallel size
    int64_t local_vocab = 0;  // padded V / t
    bool dropout = false;     // attention dropout is on: masked probabilities need a buffer
    int64_t rows() const { return s * b; }
    int64_t scores() const { return b * (a / t) * s * s; }
};

// What a layer keeps from its forward for its backward, per microbatch in flight (§3.5's A_intermediate).
struct LayerActivations {
    real* ln_1;              // [T, h]
    float *mean_1, *rstd_1;  // [T]
    real* qkv;               // [T, a/t, 3, h/a]
    real* probabilities;     // [b, a/t, s, s], before dropout
    real* context;           // [T, h/t]: the heads' outputs
    real* middle;            // [T, h]: the residual stream between attention and MLP
    real* ln_2;              // [T, h]
    float *mean_2, *rstd_2;  // [T]
    real* fc;                // [T, 4h/t]: before bias and GeLU
    real* gelu;              // [T, 4h/t]
};
inline LayerActivations carve_layer(Carver& carver, const Shape& shape) {
    const int64_t T = shape.rows(), h = shape.h, t = shape.t;
    LayerActivations a;
    a.ln_1 = carver.take(T * h);
    a.mean_1 = carver.take_fp32(T);
    a.rstd_1 = carver.take_fp32(T);
    a.qkv = carver.take(T * 3 * h / t);
    a.probabilities = carver.take(shape.scores());
    a.context = carver.take(T * h / t);
    a.middle = carver.take(T * h);
    a.ln_2 = carver.take(T * h);
    a.mean_2 = carver.take_fp32(T);
    a.rstd_2 = carver.take_fp32(T);
    a.fc = carver.take(T * 4 * h / t);
    a.gelu = carver.take(T * 4 * h / t);
    return a;
}

// Scratch that lives no longer than one layer's forward or backward, shared by all.
struct Workspace {
    real* branch;       // [T, h]: a branch's output before it joins the residual stream; its gradient
    real* norm;         // [T, h]: gradient of a LayerNorm's output
    real* wide;         // [T, 4h/t]: gradient inside the MLP, or of qkv
    real* context;      // [T, h/t]: gradient of the heads' outputs
    real* dropped;      // [b, a/t, s, s]: probabilities after dropout
    real* scores;       // [b, a/t, s, s]: gradient of the probabilities
    float* partial;     // [chunks, max(2h, 4h/t)]: column sums
    real* logits;       // [T, Vp/t], last stage only
    float* statistics;  // [6 T]: cross-entropy's, and the final LayerNorm's mean and rstd
    float* losses;      // [T]
};
inline Workspace carve_workspace(Carver& carver, const Shape& shape, bool last_stage) {
    const int64_t T = shape.rows(), h = shape.h, t = shape.t;
    Workspace w;
    w.branch = carver.take(T * h);
    w.norm = carver.take(T * h);
    w.wide = carver.take(T * 4 * h / t);
    w.context = carver.take(T * h / t);
    w.dropped = carver.take(shape.dropout ? shape.scores() : 0);
    w.scores = carver.take(shape.scores());
    w.partial = carver.take_fp32(row_chunks(T) * std::max(2 * h, 4 * h / t));
    w.logits = carver.take(last_stage ? T * shape.local_vocab : 0);
    w.statistics = carver.take_fp32(last_stage ? 6 * T : 0);
    w.losses = carver.take_fp32(last_stage ? T : 0);
    return w;
}

// ---------------------------------------------------------------------------------------------------------------------
// One rank's part of the model

struct Norm {
    Tensor weight, bias;
};
struct Layer {
    int64_t index = 0;  // in the whole model
    Norm ln_1;
    Linear qkv, projection;
    Norm ln_2;
    Linear fc, fc_projection;
};

// A model chunk: consecutive layers, with the embedding before them or the head behind them at the model's two ends.
struct Chunk {
    std::vector<Layer> layers;
    bool first = false, last = false;
};

// A microbatch: its tokens on the device, and which numbers of the run it stands for.
struct Microbatch {
    int64_t s = 0, b = 0;
    int64_t iteration = 0;
    int64_t first_sample = 0;                         // column j is sample first_sample + j of the global batch
    bool training = true;                             // dropout on, gradients wanted
    float loss_scale = 1;                             // 1 / tokens in the global batch
    const int *inputs = nullptr, *targets = nullptr;  // [s, b]
    const int *distinct = nullptr, *starts = nullptr, *positions = nullptr;  // inputs sorted by token
    int distinct_count = 0;

    int64_t rows() const { return s * b; }
};

// The rows of a microbatch sorted by their token, which gives the embedding's gradient a fixed order of summation:
// token distinct[k] stands at rows positions[starts[k] .. starts[k + 1]), ascending.
struct SortedTokens {
    std::vector<int> distinct, starts, positions;
};
inline SortedTokens sort_tokens(const std::vector<int>& tokens) {
    SortedTokens sorted;
    sorted.positions.resize(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) sorted.positions[i] = int(i);
    std::stable_sort(sorted.positions.begin(), sorted.positions.end(),
                     [&](int x, int y) { return tokens[x] < tokens[y]; });
    for (size_t i = 0; i < tokens.size(); ++i) {
        const int token = tokens[sorted.positions[i]];
        if (!sorted.distinct.empty() && sorted.distinct.back() == token) continue;
        sorted.distinct.push_back(token);
        sorted.starts.push_back(int(i));
    }
    sorted.starts.push_back(int(tokens.size()));
    return sorted;
}

struct Gpt {
    Device& device;
    Group& tensor;
    GptConfig config;
    Shape shape;  // of a full microbatch
    int p = 1, p_rank = 0, v = 1;

    std::vector<Parameter> parameters;       // this rank's, in the order of their offsets
    DeviceBuffer<float> weights, gradients;  // the weights that the optimizer updates
    DeviceBuffer<real> rounded;              // those that layers use, if they are of another type
    DeviceBuffer<float> tied_gradient;       // [Vp/t, h]: the output layer's share, where both ends are on this rank
    DeviceBuffer<char> work_memory;
    Workspace work = {};

    std::vector<Chunk> chunks;
    Parameter embedding_slice;  // of wte, on the ranks of the first and last stage
    Tensor wte, wpe;            // first stage
    Norm ln_f;                  // last stage
    Tensor head;                // last stage: the tied embedding as the output layer's weight

    Gpt(Device& device, Group& tensor, const GptConfig& config, int64_t microbatch, int p = 1, int p_rank = 0,
        int v = 1, int shards = 1);

    // The weights in use, laid out as `weights`.
    real* used_weights() {
        void* weights_in_fp32 = weights.data;
        return kMixed ? rounded.data : static_cast<real*>(weights_in_fp32);
    }
    // Brings the weights in use up to date with all of `weights`.
    void round_weights();

    bool holds_tied_copy() const { return p > 1 && (p_rank == 0 || p_rank == p - 1); }
};

// The layers of model chunk c on pipeline rank r: [(c p + r) l/(p v), ...), l/(p v) of them (§2.2.2).
inline int64_t first_layer_of(const GptConfig& config, int p, int v, int p_rank, int chunk) {
    return (int64_t(chunk) * p + p_rank) * (config.layers / (int64_t(p) * v));
}

inline Shape gpt_shape(const GptConfig& config, int t, int64_t microbatch) {
    Shape shape;
    shape.s = config.sequence;
    shape.b = microbatch;
    shape.h = config.hidden;
    shape.a = config.heads;
    shape.t = t;
    shape.local_vocab = (config.vocab + t - 1) / t;
    shape.dropout = config.attention_dropout > 0;
    return shape;
}

// The slices that pipeline rank p_rank (tensor rank t_rank) holds, in the order in which a backward finishes with them
// when read from the end. Each is padded so that it divides into `shards` aligned parts (data_parallel.cu).
inline std::vector<Parameter> local_parameters(const GptConfig& config, int t, int t_rank, int p, int p_rank, int v,
                                               int shards) {
    const std::vector<Parameter> all = gpt_parameters(config);
    std::vector<Parameter> list;
    const int64_t per_chunk = config.layers / (int64_t(p) * v);
    if (p_rank == 0) list.insert(list.end(), all.begin(), all.begin() + kEmbeddingParameters);
    for (int chunk = 0; chunk < v; ++chunk) {
        const auto begin =
            all.begin() + kEmbeddingParameters + first_layer_of(config, p, v, p_rank, chunk) * kLayerParameters;
        list.insert(list.end(), begin, begin + per_chunk * kLayerParameters);
    }
    if (p_rank == p - 1) list.insert(list.end(), all.end() - 2, all.end());
    if (p > 1 && p_rank == p - 1) {
        list.push_back(all[0]);
        list.back().tied_copy = true;
    }
    size_t offset = 0;
    for (Parameter& parameter : list) {
        slice_parameter(parameter, t, t_rank);
        parameter.offset = offset;
        parameter.padded = padded_size(parameter.local_size(), shards);
        offset += parameter.padded;
    }
    return list;
}
inline size_t local_parameter_size(const std::vector<Parameter>& parameters) {
    return parameters.back().offset + parameters.back().padded;
}

inline Gpt::Gpt(Device& device, Group& tensor, const GptConfig& config, int64_t microbatch, int p, int p_rank, int v,
                int shards)
    : device(device), tensor(tensor), config(config), p(p), p_rank(p_rank), v(v) {
    shape = gpt_shape(config, tensor.size, microbatch);
    parameters = local_parameters(config, tensor.size, tensor.rank, p, p_rank, v, shards);
    weights = DeviceBuffer<float>(local_parameter_size(parameters));
    gradients = DeviceBuffer<float>(weights.size);
    if (kMixed) rounded = DeviceBuffer<real>(weights.size);

    size_t next = 0;
    auto take = [&] {
        const Parameter& parameter = parameters[next++];
        return Tensor{used_weights() + parameter.offset, gradients.data + parameter.offset};
    };
    auto take_norm = [&] {
        const Tensor weight = take();
        return Norm{weight, take()};
    };
    auto take_linear = [&] {
        Linear linear;
        linear.in = parameters[next].local_rows;
        linear.out = parameters[next].local_cols;
        linear.weight = take();
        linear.bias = take();
        return linear;
    };
    const bool first = p_rank == 0, last = p_rank == p - 1;
    if (first) {
        embedding_slice = parameters[next];
        wte = take();
        wpe = take();
    }
    for (int c = 0; c < v; ++c) {
        Chunk chunk;
        chunk.first = first && c == 0;
        chunk.last = last && c == v - 1;
        for (int64_t i = 0; i < config.layers / (int64_t(p) * v); ++i) {
            Layer layer;
            layer.index = first_layer_of(config, p, v, p_rank, c) + i;
            layer.ln_1 = take_norm();
            layer.qkv = take_linear();
            layer.projection = take_linear();
            layer.ln_2 = take_norm();
            layer.fc = take_linear();
            layer.fc_projection = take_linear();
            chunk.layers.push_back(layer);
        }
        chunks.push_back(chunk);
    }
    if (last) ln_f = take_norm();
    if (last && first) {
        tied_gradient = DeviceBuffer<float>(embedding_slice.local_size());
        head = {wte.value, tied_gradient.data};
    } else if (last) {
        embedding_slice = parameters[next];
        head = take();
    }

    for (const Parameter& parameter : parameters) {
        const std::vector<float> slice = initial_slice(parameter, config.seed);
        to_device(device, weights.data + parameter.offset, slice.data(), slice.size());
    }
    round_weights();
    Carver measure;
    carve_workspace(measure, shape, last);
    work_memory = DeviceBuffer<char>(measure.used);
    Carver carver{work_memory.data};
    work = carve_workspace(carver, shape, last);
}

// y [n] = x [n] rounded. A flat kernel.
__global__ void round_kernel(const float* x, real* y, int64_t n) {
    for_flat(n, [=](int64_t i) { y[i] = real(x[i]); });
}
inline void Gpt::round_weights() {
    if (kMixed)
        launch<round_kernel>(device, flat_grid(int64_t(weights.size)), kBlock, weights.data, rounded.data,
                             int64_t(weights.size));
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward and backward of the pieces

inline Dropout hidden_dropout(const Gpt& gpt, const Microbatch& mb, Site site, int64_t layer) {
    return make_dropout(mb.training ? gpt.config.hidden_dropout : 0.0, gpt.config.seed, mb.iteration, mb.first_sample,
                        site, layer);
}
inline Dropout attention_dropout(const Gpt& gpt, const Microbatch& mb, int64_t layer) {
    return make_dropout(mb.training ? gpt.config.attention_dropout : 0.0, gpt.config.seed, mb.iteration,
                        mb.first_sample, Site::attention_dropout, layer);
}

inline void layernorm_forward(Gpt& gpt, const Norm& norm, const real* x, real* y, float* mean, float* rstd,
                              int64_t rows) {
    launch<layernorm_forward_kernel>(gpt.device, rows, kBlock, x, norm.weight.value, norm.bias.value, y, mean, rstd,
                                     int(gpt.config.hidden), kLayerNormEpsilon);
}

// gradient [n] += sums of the chunks' partial sums, which lie `stride` apart from column `first` on.
inline void add_chunk_sums(Gpt& gpt, int64_t rows, int64_t stride, int64_t first, int64_t n, float* gradient) {
    launch<add_chunk_sums_kernel>(gpt.device, (n + 63) / 64, 64, gpt.work.partial + first, row_chunks(rows),
                                  int(stride), int(n), gradient);
}

// dx [T, h] (+)= LayerNorm's gradient of dy [T, h]; gamma's and beta's gradients are accumulated.
template <bool accumulate>
void layernorm_backward(Gpt& gpt, const Norm& norm, const real* x, const float* mean, const float* rstd, const real* dy,
                        real* dx, int64_t rows) {
    const int64_t h = gpt.config.hidden;
    launch<layernorm_backward_kernel<accumulate>>(gpt.device, row_chunks(rows), kBlock, x, norm.weight.value, mean,
                                                  rstd, dy, dx, gpt.work.partial, rows, int(h));
    add_chunk_sums(gpt, rows, 2 * h, 0, h, norm.weight.gradient);
    add_chunk_sums(gpt, rows, 2 * h, h, h, norm.bias.gradient);
}

inline void bias_backward(Gpt& gpt, const real* dy, int64_t n, float* gradient, int64_t rows) {
    launch<bias_backward_kernel>(gpt.device, row_chunks(rows), kBlock, dy, gpt.work.partial, rows, int(n));
    add_chunk_sums(gpt, rows, n, 0, n, gradient);
}

// The gradient entering a branch: dx [T, h] through the branch's dropout. Without dropout it is dx itself.
inline const real* dropout_backward(Gpt& gpt, const Microbatch& mb, const Dropout& dropout, const real* dx) {
    if (!dropout.active()) return dx;
    launch<dropout_backward_kernel>(gpt.device, mb.rows(), kBlock, dx, gpt.work.branch, int(mb.b),
                                    int(gpt.config.hidden), dropout);
    return gpt.work.branch;
}

// The parts of qkv as batches of b a/t matrices [s, h/a]: position, sample and head are strides, nothing is copied
// (§4.2).
struct Heads {
    int64_t batch, s, size;
    int64_t qkv_ld, qkv_stride, context_ld, context_stride;
};
inline Heads heads_of(const Gpt& gpt, const Microbatch& mb) {
    const int64_t local_heads = gpt.config.heads / gpt.tensor.size, size = gpt.config.head_size();
    return {mb.b * local_heads, mb.s, size, mb.b * local_heads * 3 * size, 3 * size, mb.b * local_heads * size, size};
}

// context [T, h/t] = softmax(Q K^T / sqrt(h/a)) V for this rank's heads; qkv [T, a/t, 3, h/a] has its bias.
inline void attention_forward(Gpt& gpt, const Microbatch& mb, int64_t layer, const LayerActivations& acts) {
    const Heads n = heads_of(gpt, mb);
    const real *q = acts.qkv, *k = q + n.size, *v = k + n.size;
    const int local_heads = int(n.batch / mb.b);
    const Dropout dropout = attention_dropout(gpt, mb, layer);
    gemm(gpt.device, n.s, n.s, n.size, {q, n.qkv_ld, n.qkv_stride}, {k, n.qkv_ld, n.qkv_stride, true},
         acts.probabilities, n.s, 1.0f, 0.0f, n.s * n.s, n.batch);
    launch<causal_softmax_forward_kernel>(gpt.device, n.batch * n.s, kBlock, acts.probabilities, gpt.work.dropped,
                                          int(n.s), local_heads, gpt.tensor.rank * local_heads,
                                          1.0f / sqrtf(float(n.size)), dropout);
    const real* probabilities = dropout.active() ? gpt.work.dropped : acts.probabilities;
    gemm(gpt.device, n.s, n.size, n.s, {probabilities, n.s, n.s * n.s}, {v, n.qkv_ld, n.qkv_stride}, acts.context,
         n.context_ld, 1.0f, 0.0f, n.context_stride, n.batch);
}

// dqkv [T, a/t, 3, h/a] from dcontext [T, h/t].
inline void attention_backward(Gpt& gpt, const Microbatch& mb, int64_t layer, const LayerActivations& acts,
                               const real* dcontext, real* dqkv) {
    const Heads n = heads_of(gpt, mb);
    const real *q = acts.qkv, *k = q + n.size, *v = k + n.size;
    real *dq = dqkv, *dk = dq + n.size, *dv = dk + n.size;
    const int local_heads = int(n.batch / mb.b);
    const int64_t square = n.s * n.s;
    const Dropout dropout = attention_dropout(gpt, mb, layer);
    const real* probabilities = acts.probabilities;
    if (dropout.active()) {
        launch<attention_dropout_kernel>(gpt.device, n.batch * n.s, kBlock, acts.probabilities, gpt.work.dropped,
                                         int(n.s), local_heads, gpt.tensor.rank * local_heads, dropout);
        probabilities = gpt.work.dropped;
    }
    gemm(gpt.device, n.s, n.size, n.s, {probabilities, n.s, square, true}, {dcontext, n.context_ld, n.context_stride},
         dv, n.qkv_ld, 1.0f, 0.0f, n.qkv_stride, n.batch);
    gemm(gpt.device, n.s, n.s, n.size, {dcontext, n.context_ld, n.context_stride}, {v, n.qkv_ld, n.qkv_stride, true},
         gpt.work.scores, n.s, 1.0f, 0.0f, square, n.batch);
    launch<causal_softmax_backward_kernel>(gpt.device, n.batch * n.s, kBlock, acts.probabilities, probabilities,
                                           gpt.work.scores, int(n.s), 1.0f / sqrtf(float(n.size)));
    gemm(gpt.device, n.s, n.size, n.s, {gpt.work.scores, n.s, square}, {k, n.qkv_ld, n.qkv_stride}, dq, n.qkv_ld, 1.0f,
         0.0f, n.qkv_stride, n.batch);
    gemm(gpt.device, n.s, n.size, n.s, {gpt.work.scores, n.s, square, true}, {q, n.qkv_ld, n.qkv_stride}, dk, n.qkv_ld,
         1.0f, 0.0f, n.qkv_stride, n.batch);
}

// out [T, h] = the layer's output for x [T, h]; keeps in `acts` what the backward needs.
inline void layer_forward(Gpt& gpt, const Layer& layer, const Microbatch& mb, const LayerActivations& acts,
                          const real* x, real* out) {
    Device& device = gpt.device;
    const int64_t T = mb.rows();
    const int b = int(mb.b), h = int(gpt.config.hidden);

    // Attention: column parallel by heads, then row parallel (§2.3, Figure 5b)
    layernorm_forward(gpt, layer.ln_1, x, acts.ln_1, acts.mean_1, acts.rstd_1, T);
    column_parallel_forward(device, layer.qkv, acts.ln_1, acts.qkv, T);
    launch<add_bias_kernel>(device, T, kBlock, acts.qkv, layer.qkv.bias.value, int(layer.qkv.out));
    attention_forward(gpt, mb, layer.index, acts);
    row_parallel_forward(device, gpt.tensor, layer.projection, acts.context, gpt.work.branch, T);
    launch<bias_dropout_add_forward_kernel>(device, T, kBlock, gpt.work.branch, layer.projection.bias.value, x,
                                            acts.middle, b, h,
                                            hidden_dropout(gpt, mb, Site::attention_output_dropout, layer.index));

    // MLP: column parallel, GeLU, row parallel (§2.3, Figure 5a)
    layernorm_forward(gpt, layer.ln_2, acts.middle, acts.ln_2, acts.mean_2, acts.rstd_2, T);
    column_parallel_forward(device, layer.fc, acts.ln_2, acts.fc, T);
    launch<bias_gelu_forward_kernel>(device, T, kBlock, acts.fc, layer.fc.bias.value, acts.gelu, int(layer.fc.out));
    row_parallel_forward(device, gpt.tensor, layer.fc_projection, acts.gelu, gpt.work.branch, T);
    launch<bias_dropout_add_forward_kernel>(device, T, kBlock, gpt.work.branch, layer.fc_projection.bias.value,
                                            acts.middle, out, b, h,
                                            hidden_dropout(gpt, mb, Site::mlp_dropout, layer.index));
}

// dx [T, h], the gradient of the layer's output, becomes that of its input x [T, h]; parameters' gradients accumulate.
inline void layer_backward(Gpt& gpt, const Layer& layer, const Microbatch& mb, const LayerActivations& acts,
                           const real* x, real* dx) {
    Device& device = gpt.device;
    const int64_t T = mb.rows();
    Workspace& work = gpt.work;

    const real* dy = dropout_backward(gpt, mb, hidden_dropout(gpt, mb, Site::mlp_dropout, layer.index), dx);
    bias_backward(gpt, dy, layer.fc_projection.out, layer.fc_projection.bias.gradient, T);
    row_parallel_backward(device, layer.fc_projection, acts.gelu, dy, work.wide, T);
    launch<bias_gelu_backward_kernel>(device, row_chunks(T), kBlock, acts.fc, layer.fc.bias.value, work.wide,
                                      work.partial, T, int(layer.fc.out));
    add_chunk_sums(gpt, T, layer.fc.out, 0, layer.fc.out, layer.fc.bias.gradient);
    column_parallel_backward(device, gpt.tensor, layer.fc, acts.ln_2, work.wide, work.norm, T);
    layernorm_backward<true>(gpt, layer.ln_2, acts.middle, acts.mean_2, acts.rstd_2, work.norm, dx, T);

    dy = dropout_backward(gpt, mb, hidden_dropout(gpt, mb, Site::attention_output_dropout, layer.index), dx);
    bias_backward(gpt, dy, layer.projection.out, layer.projection.bias.gradient, T);
    row_parallel_backward(device, layer.projection, acts.context, dy, work.context, T);
    attention_backward(gpt, mb, layer.index, acts, work.context, work.wide);
    bias_backward(gpt, work.wide, layer.qkv.out, layer.qkv.bias.gradient, T);
    column_parallel_backward(device, gpt.tensor, layer.qkv, acts.ln_1, work.wide, work.norm, T);
    layernorm_backward<true>(gpt, layer.ln_1, x, acts.mean_1, acts.rstd_1, work.norm, dx, T);
}

// x [T, h] = dropout(embedding of the microbatch's inputs + positions).
inline void embedding_forward(Gpt& gpt, const Microbatch& mb, real* x) {
    vocab_parallel_embedding_forward(gpt.device, gpt.tensor, gpt.wte, gpt.embedding_slice, mb.inputs, x, mb.rows());
    launch<position_dropout_forward_kernel>(gpt.device, mb.rows(), kBlock, x, gpt.wpe.value, int(mb.b),
                                            int(gpt.config.hidden),
                                            hidden_dropout(gpt, mb, Site::embedding_dropout, 0));
}

// Accumulates the gradients of both embeddings from dx [T, h], the gradient of the first layer's input (overwritten).
inline void embedding_backward(Gpt& gpt, const Microbatch& mb, real* dx) {
    const int b = int(mb.b), h = int(gpt.config.hidden);
    const Dropout dropout = hidden_dropout(gpt, mb, Site::embedding_dropout, 0);
    if (dropout.active()) launch<dropout_backward_kernel>(gpt.device, mb.rows(), kBlock, dx, dx, b, h, dropout);
    launch<position_backward_kernel>(gpt.device, mb.s, kBlock, dx, gpt.wpe.gradient, b, h);
    launch<embedding_backward_kernel>(gpt.device, mb.distinct_count, kBlock, mb.distinct, mb.starts, mb.positions, dx,
                                      gpt.wte.gradient, int(gpt.embedding_slice.first_row),
                                      int(gpt.embedding_slice.local_rows), h);
}

// logits [rows, Vp/t] (work.logits) of x [rows, h]: final LayerNorm, then the tied embedding as a column parallel
// layer.
inline void head_forward(Gpt& gpt, const real* x, int64_t rows) {
    const int64_t h = gpt.config.hidden, columns = gpt.shape.local_vocab;
    float* mean = gpt.work.statistics + 4 * rows;
    layernorm_forward(gpt, gpt.ln_f, x, gpt.work.branch, mean, mean + rows, rows);
    gemm(gpt.device, rows, columns, h, {gpt.work.branch, h}, {gpt.head.value, h, 0, true}, gpt.work.logits, columns);
}

// The model's end: losses [T] (work.losses) of x [T, h], the last layer's output. When training, x becomes its own
// gradient, and the last stage's backward begins from it as any other stage's begins from what the next one sent. So
// the logits need not be kept from forward to backward, whatever the schedule: one buffer serves every microbatch.
inline void head_forward_backward(Gpt& gpt, const Microbatch& mb, real* x) {
    Device& device = gpt.device;
    Workspace& work = gpt.work;
    const int64_t T = mb.rows(), h = gpt.config.hidden, columns = gpt.shape.local_vocab;
    head_forward(gpt, x, T);
    vocab_parallel_cross_entropy(device, gpt.tensor, work.logits, mb.targets, work.losses, work.statistics, T, columns,
                                 gpt.embedding_slice.first_row, gpt.config.vocab, mb.loss_scale);
    if (!mb.training) return;
    gemm(device, T, h, columns, {work.logits, columns}, {gpt.head.value, h}, work.norm, h);
    f_backward(device, gpt.tensor, work.norm, T * h);
    gemm(device, columns, h, T, {work.logits, columns, 0, true}, {work.branch, h}, gpt.head.gradient, h, 1.0f, 1.0f);
    float* mean = work.statistics + 4 * T;
    layernorm_backward<false>(gpt, gpt.ln_f, x, mean, mean + T, work.norm, x, T);
}

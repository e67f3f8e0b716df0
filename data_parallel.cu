// Data parallelism (§2.1): gradients summed over the d replicas, then one optimizer step that every replica agrees on.
//
// Rules kept here:
//   - gradients are reduced in contiguous fp32 buckets, each as soon as the last microbatch's backward has produced its
//     last gradient; a bucket is one or more whole layers, in the order in which the backward finishes with them;
//   - tied embeddings get two contributions, of the input embedding and of the output layer. They are kept apart and
//   added
//     once per iteration: over the embedding group first (at p = 1, on the one rank), then over the data group. Their
//     bucket is the last, and they count once in the norm;
//   - the gradient norm is a sum of per-tensor sums in double, combined in the whole model's parameter order, so that
//     moving layers between ranks cannot change its last bit, hence the clipping factor, hence every weight;
//   - with --use-distributed-optimizer each tensor (not each bucket) is divided over the d replicas: gradients are
//     reduce-scattered, every replica updates its part, weights are all-gathered.
//
// Defines: GradientReduction, the gradient norm, AdamW, the learning rate's schedule.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gpt.cu"
#include "platform/device.h"
#include "platform/grid.h"

// ---------------------------------------------------------------------------------------------------------------------
// Gradient reduction

// y [n] += x [n]. A flat kernel. 12 bytes per element.
__global__ void add_kernel(const float* x, float* y, int64_t n) {
    for_flat(n, [=](int64_t i) { y[i] += x[i]; });
}

// A run of consecutive parameters whose gradients are reduced together.
struct Bucket {
    size_t first = 0, last = 0;  // parameters [first, last) of the rank's list
    int layers = 0;              // layers in it
    int ready = 0;               // of them, in this iteration
};

struct GradientReduction {
    Gpt& gpt;
    Grid& grid;
    bool distributed;
    std::vector<Bucket> layer_buckets;           // in the order in which the backward completes them
    std::vector<Bucket> end_buckets;             // embeddings; final LayerNorm and tied copy
    std::vector<std::vector<size_t>> bucket_of;  // [chunk][layer of the chunk]

    // Buckets of at least `bucket_floats` gradients, whole layers each.
    GradientReduction(Gpt& gpt, Grid& grid, bool distributed, size_t bucket_floats = size_t(1) << 20)
        : gpt(gpt), grid(grid), distributed(distributed) {
        size_t next = grid.first_stage() ? kEmbeddingParameters : 0;
        if (next > 0) end_buckets.push_back({0, next, 0, 0});
        std::vector<size_t> start;  // of each layer's parameters, chunk by chunk
        for (const Chunk& chunk : gpt.chunks)
            for (size_t i = 0; i < chunk.layers.size(); ++i, next += kLayerParameters) start.push_back(next);
        if (next < gpt.parameters.size()) end_buckets.push_back({next, gpt.parameters.size(), 0, 0});

        bucket_of.resize(gpt.chunks.size());
        size_t layer = start.size();
        for (size_t chunk = gpt.chunks.size();
             chunk-- > 0;) {  // the last chunk's backward ends first, its last layer's too
            bucket_of[chunk].resize(gpt.chunks[chunk].layers.size());
            for (size_t i = bucket_of[chunk].size(); i-- > 0;) {
                --layer;
                const bool open = !layer_buckets.empty() && floats(layer_buckets.back()) < bucket_floats;
                if (!open) layer_buckets.push_back({start[layer], start[layer] + kLayerParameters, 0, 0});
                layer_buckets.back().first = start[layer];
                layer_buckets.back().layers++;
                bucket_of[chunk][i] = layer_buckets.size() - 1;
            }
        }
    }

    size_t floats(const Bucket& bucket) const {
        const Parameter &first = gpt.parameters[bucket.first], &last = gpt.parameters[bucket.last - 1];
        return last.offset + last.padded - first.offset;
    }

    // Sums a bucket over the data group: whole on every replica, or each replica's part of each tensor on that replica,
    // in place: replica r's is the r-th of d equal parts of the tensor's `padded` floats.
    void reduce(const Bucket& bucket) {
        if (!distributed) {
            float* begin = gpt.gradients.data + gpt.parameters[bucket.first].offset;
            all_reduce(gpt.device, grid.data, begin, int64_t(floats(bucket)));
            return;
        }
        // [lab 4.4] distributed optimizer: reduce-scatter
        for (size_t i = bucket.first; i < bucket.last; ++i) {
            float* gradient = gpt.gradients.data + gpt.parameters[i].offset;
            const int64_t part = int64_t(gpt.parameters[i].padded) / grid.d;
            reduce_scatter(gpt.device, grid.data, gradient, gradient + grid.d_rank * part, part);
        }
        // [end]
    }

    // Makes every replica's gradients whole again after reduce-scatters (for --dump).
    void gather_gradients() {
        for (const Parameter& parameter : gpt.parameters) {
            float* gradient = gpt.gradients.data + parameter.offset;
            const int64_t part = int64_t(parameter.padded) / grid.d;
            all_gather(gpt.device, grid.data, gradient + grid.d_rank * part, gradient, part);
        }
    }

    // The last microbatch's backward has finished with this layer (the pipeline executor's callback). Counts it in its
    // bucket, and reduces the bucket when all its layers are there; the count then starts again, for the next
    // iteration.
    void gradient_ready(int chunk, int layer) {
        // [lab 4.1] buckets
        Bucket& bucket = layer_buckets[bucket_of[chunk][layer]];
        if (++bucket.ready < bucket.layers) return;
        bucket.ready = 0;
        reduce(bucket);
        // [end]
    }

    // After the last backward: the tied embedding's two contributions, then the buckets at the model's ends. At p = 1
    // the output layer's contribution is in gpt.tied_gradient and joins gpt.wte's; else the first stage has one, in
    // gpt.wte, and the last the other, in gpt.head, and both get the sum over the embedding group.
    void finish() {
        const int64_t size = gpt.embedding_slice.local_size();
        // [lab 4.2] tied embeddings
        if (grid.p == 1)
            launch<add_kernel>(gpt.device, flat_grid(size), kBlock, gpt.tied_gradient.data, gpt.wte.gradient, size);
        else if (gpt.holds_tied_copy())
            all_reduce(gpt.device, grid.embedding, grid.first_stage() ? gpt.wte.gradient : gpt.head.gradient, size);
        // [end]
        for (const Bucket& bucket : end_buckets) reduce(bucket);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Optimizer

// partial [blocks] = each flat block's sum of x^2 over x [n], in double. A flat kernel. 4 bytes per element.
__global__ void sum_of_squares_kernel(const float* x, double* partial, int64_t n) {
    double sum = 0;
    for_flat(n, [&](int64_t i) { sum += double(x[i]) * double(x[i]); });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// x [n] *= factor. A flat kernel. 8 bytes per element.
__global__ void scale_kernel(float* x, int64_t n, float factor) {
    for_flat(n, [=](int64_t i) { x[i] *= factor; });
}

// What the loss is multiplied by so that gradients keep clear of fp16's smallest numbers (Micikevicius et al., "Mixed
// Precision Training", ICLR'18). Powers of two: scaling and unscaling are exact. Dynamic: an overflow halves the scale
// and that step is skipped; `window` steps in a row without one double it.
struct LossScale {
    double scale = 1;
    bool dynamic = false;
    int64_t window = 1000, good_steps = 0;

    void update(bool overflow) {
        if (!dynamic) return;
        good_steps = overflow ? 0 : good_steps + 1;
        if (overflow) scale /= 2;
        if (good_steps == window) {
            scale *= 2;
            good_steps = 0;
        }
    }
};

struct AdamConfig {
    double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, weight_decay = 0.01, clip = 1.0;  // clip 0: no clipping
};

// One AdamW step (Loshchilov and Hutter) on n elements; gradients are first multiplied by `scale` (clipping). `rate` is
// lr / (1 - beta1^step), `correction` is 1 / (1 - beta2^step), `keep` is 1 - lr * weight decay. `used` [n] becomes the
// new weight rounded (in fp32 it is the weight itself). A flat kernel. 28 bytes per element, and `used`.
__global__ void adam_kernel(float* weight, real* used, const float* gradient, float* m, float* v, int64_t n,
                            float scale, float beta1, float beta2, float epsilon, float rate, float correction,
                            float keep) {
    for_flat(n, [=](int64_t i) {
        const float g = gradient[i] * scale;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        weight[i] = weight[i] * keep - rate * m[i] / (sqrtf(v[i] * correction) + epsilon);
        if (kMixed) used[i] = real(weight[i]);
    });
}

// The part of each tensor that this replica updates: all of it, or the d_rank-th of d equal parts.
struct OptimizerSlice {
    size_t offset = 0, size = 0;  // floats, into the flat weights and gradients
    size_t state = 0;             // floats, into m and v
};

struct Optimizer {
    Gpt& gpt;
    Grid& grid;
    AdamConfig config;
    bool distributed;
    std::vector<OptimizerSlice> slices;  // one per parameter
    DeviceBuffer<float> m, v;
    DeviceBuffer<double> partial, tensor_sums;
    int64_t step_count = 0;

    Optimizer(Gpt& gpt, Grid& grid, const AdamConfig& config, bool distributed)
        : gpt(gpt), grid(grid), config(config), distributed(distributed) {
        size_t state = 0;
        int64_t blocks = 0;
        for (const Parameter& parameter : gpt.parameters) {
            const size_t size = distributed ? parameter.padded / grid.d : parameter.padded;
            slices.push_back({parameter.offset + (distributed ? grid.d_rank * size : 0), size, state});
            state += size;
            blocks += flat_grid(int64_t(size));
        }
        m = DeviceBuffer<float>(state);
        v = DeviceBuffer<float>(state);
        partial = DeviceBuffer<double>(blocks);
        tensor_sums = DeviceBuffer<double>(gpt_parameter_count(gpt.config));
    }

    // Takes the loss scale out of the reduced gradients (all of them: with a distributed optimizer, parts that other
    // replicas own are not yet reduced, and are not used).
    void unscale(double scale) {
        if (scale != 1)
            launch<scale_kernel>(gpt.device, flat_grid(int64_t(gpt.gradients.size)), kBlock, gpt.gradients.data,
                                 int64_t(gpt.gradients.size), float(1 / scale));
    }

    // The norm of the whole model's reduced gradient, the same on every rank; not finite if any rank's part is not.
    // Each parameter counts once: a replicated one on tensor rank 0 only, the tied copy not at all. The sums of all
    // parameters are added over the model group (the ranks of one replica) and, where each replica has a part of each,
    // the data group.
    double gradient_norm() {
        int64_t block = 0;
        for (const OptimizerSlice& slice : slices) {
            launch<sum_of_squares_kernel>(gpt.device, flat_grid(int64_t(slice.size)), kBlock,
                                          gpt.gradients.data + slice.offset, partial.data + block, int64_t(slice.size));
            block += flat_grid(int64_t(slice.size));
        }
        const std::vector<double> blocks = to_vector(gpt.device, partial.data, partial.size);
        std::vector<double> sums(tensor_sums.size, 0.0);
        block = 0;
        for (size_t i = 0; i < slices.size(); ++i) {
            const Parameter& parameter = gpt.parameters[i];
            double sum = 0;
            for (int64_t k = 0; k < flat_grid(int64_t(slices[i].size)); ++k) sum += blocks[block++];
            // [lab 4.3] the gradient norm: what counts
            const bool counted_elsewhere =
                parameter.tied_copy || (parameter.split == Split::replicated && grid.t_rank > 0);
            if (!counted_elsewhere) sums[parameter.index] = sum;
            // [end]
        }
        to_device(gpt.device, tensor_sums.data, sums.data(), sums.size());
        // [lab 4.3] the gradient norm: over all ranks
        if (distributed) all_reduce(gpt.device, grid.data, tensor_sums.data, int64_t(sums.size()));
        all_reduce(gpt.device, grid.model, tensor_sums.data, int64_t(sums.size()));
        // [end]
        double total = 0;
        for (double sum : to_vector(gpt.device, tensor_sums.data, sums.size())) total += sum;
        return std::sqrt(total);
    }

    // Clips by the given global norm, updates the weights at learning rate `lr`, and clears the gradients. With a
    // distributed optimizer each replica then has its part of the new weights, and an all-gather makes them whole.
    void step(double norm, double lr) {
        ++step_count;
        const double scale = config.clip > 0 ? std::min(1.0, config.clip / (norm + 1e-6)) : 1.0;
        const double rate = lr / (1 - std::pow(config.beta1, double(step_count)));
        const double correction = 1 / (1 - std::pow(config.beta2, double(step_count)));
        for (size_t i = 0; i < slices.size(); ++i) {
            const Parameter& parameter = gpt.parameters[i];
            const OptimizerSlice& slice = slices[i];
            const double keep = parameter.decays() ? 1 - lr * config.weight_decay : 1.0;
            launch<adam_kernel>(gpt.device, flat_grid(int64_t(slice.size)), kBlock, gpt.weights.data + slice.offset,
                                gpt.used_weights() + slice.offset, gpt.gradients.data + slice.offset,
                                m.data + slice.state, v.data + slice.state, int64_t(slice.size), float(scale),
                                float(config.beta1), float(config.beta2), float(config.epsilon), float(rate),
                                float(correction), float(keep));
            if (distributed) {
                // [lab 4.4] distributed optimizer: all-gather
                all_gather(gpt.device, grid.data, gpt.used_weights() + slice.offset,
                           gpt.used_weights() + parameter.offset, int64_t(slice.size));
                // [end]
            }
        }
        clear_gradients();
    }

    // Makes `gpt.weights` whole on every replica: in mixed precision step() hands on the rounded weights only.
    void gather_weights() {
        if (!distributed || !kMixed) return;
        for (size_t i = 0; i < slices.size(); ++i)
            all_gather(gpt.device, grid.data, gpt.weights.data + slices[i].offset,
                       gpt.weights.data + gpt.parameters[i].offset, int64_t(slices[i].size));
    }

    void clear_gradients() {
        for (DeviceBuffer<float>* buffer : {&gpt.gradients, &gpt.tied_gradient})
            if (buffer->size > 0)
                CUDA_CHECK(cudaMemsetAsync(buffer->data, 0, buffer->size * sizeof(float), gpt.device.stream));
    }
};

enum class Decay { constant, linear, cosine };

// The learning rate of iteration 1, 2, ...: linear warm-up over the first `warmup` iterations, then decay to `min_lr`
// at iteration `decay_iterations`.
inline double learning_rate(int64_t iteration, double lr, double min_lr, Decay decay, int64_t warmup,
                            int64_t decay_iterations) {
    if (iteration <= warmup) return lr * double(iteration) / double(warmup);
    if (decay == Decay::constant) return lr;
    if (iteration >= decay_iterations) return min_lr;
    const double progress = double(iteration - warmup) / double(decay_iterations - warmup);
    const double remaining =
        decay == Decay::linear ? 1 - progress : 0.5 * (1 + std::cos(3.14159265358979323846 * progress));
    return min_lr + (lr - min_lr) * remaining;
}

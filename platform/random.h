// Random numbers that do not depend on the layout: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC'11), a pure function of a key and a counter. Whoever needs a number computes it; no state, no order.
//
// Rules: integers are exact everywhere, so dropout masks need no care. Normal deviates go through log and cos, whose
// last bits may differ between a vector loop and its scalar tail, so they are always computed in whole blocks of 64.
#pragma once

#include <cmath>
#include <cstdint>

#include "platform/device.h"

struct Random4 {
    uint32_t word[4];
};

// Four random 32-bit words for a 128-bit counter and a 64-bit key.
__host__ __device__ inline Random4 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t(0xD2511F53u) * c0;
        const uint64_t product1 = uint64_t(0xCD9E8D57u) * c2;
        const uint32_t high0 = uint32_t(product0 >> 32), high1 = uint32_t(product1 >> 32);
        c0 = high1 ^ c1 ^ k0;
        c1 = uint32_t(product1);
        c2 = high0 ^ c3 ^ k1;
        c3 = uint32_t(product0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Where a random number is used: the third counter word is site + 8 * layer, so no two uses share a number.
enum class Site : uint32_t {
    embedding_dropout,
    attention_dropout,
    attention_output_dropout,
    mlp_dropout,
    weights,
    order,
    sampling
};

// One dropout layer's mask: a function of seed, iteration, global sample, layer, site and element. Column j of the
// microbatch's b samples is sample `first_sample + j` of the global batch.
struct Dropout {
    uint64_t seed = 0;
    uint32_t iteration = 0, first_sample = 0, site = 0;
    uint32_t threshold = 0;  // an element is kept when its random word is not below: probability * 2^32
    float scale = 1.0f;      // of kept elements: 1 / (1 - probability); 1 when there is no dropout

    __host__ __device__ bool active() const { return threshold != 0; }
};

inline Dropout make_dropout(double probability, uint64_t seed, int64_t iteration, int64_t first_sample, Site site,
                            int64_t layer) {
    return {seed,
            uint32_t(iteration),
            uint32_t(first_sample),
            uint32_t(site) + 8 * uint32_t(layer),
            uint32_t(probability * 4294967296.0),
            float(1.0 / (1.0 - probability))};
}

// Calls f(j, multiplier) for this thread's elements j < visible of a row of n; multiplier is `scale` if kept, else 0.
// `row` is the row's global index within its sample and `sample` its column in the microbatch. A call to philox serves
// elements 64 k + lane + {0, 16, 32, 48}: neighbouring threads (or vector lanes) then touch neighbouring elements.
template <class F>
__device__ inline void for_dropout(const Dropout& dropout, int64_t row, int64_t sample, int n, int visible, F f) {
    if (!dropout.active()) {
        for (int j = threadIdx.x; j < visible; j += blockDim.x) f(j, 1.0f);
        return;
    }
    const int lanes = int(blockDim.x) < 16 ? int(blockDim.x) : 16;
    const int blocks_at_once = int(blockDim.x) / lanes;
    for (int block = int(threadIdx.x) / lanes; 64 * block < visible; block += blocks_at_once) {
        const uint32_t counter = uint32_t(row * ((n + 63) / 64) + block) * 16;
        auto visit = [&](int lane, bool whole) {
            const Random4 random = philox(counter + lane, dropout.first_sample + uint32_t(sample), dropout.site,
                                          dropout.iteration, dropout.seed);
            for (int word = 0; word < 4; ++word) {
                const int j = 64 * block + 16 * word + lane;
                if (whole || j < visible) f(j, random.word[word] >= dropout.threshold ? dropout.scale : 0.0f);
            }
        };
        if (64 * (block + 1) <= visible) {
            for (int lane = int(threadIdx.x) % lanes; lane < 16; lane += lanes) visit(lane, true);
        } else {
            for (int lane = int(threadIdx.x) % lanes; lane < 16; lane += lanes) visit(lane, false);
        }
    }
}

// 64 standard normal deviates (Box-Muller): block `block` of row `row` of the whole model's parameter tensor `tensor`.
inline void normal_block(uint64_t seed, uint32_t tensor, uint32_t row, uint32_t block, float* out /* [64] */) {
    double radius[32], angle[32];
    for (int lane = 0; lane < 16; ++lane) {
        const Random4 random = philox(block * 16 + lane, row, uint32_t(Site::weights), tensor, seed);
        for (int pair = 0; pair < 2; ++pair) {
            radius[16 * pair + lane] = (random.word[2 * pair] + 1.0) / 4294967296.0;  // (0, 1]
            angle[16 * pair + lane] = random.word[2 * pair + 1] * (2.0 * 3.14159265358979323846 / 4294967296.0);
        }
    }
    for (int i = 0; i < 32; ++i) radius[i] = std::sqrt(-2.0 * std::log(radius[i]));
    for (int i = 0; i < 32; ++i) out[i] = float(radius[i] * std::cos(angle[i]));
    for (int i = 0; i < 32; ++i) out[32 + i] = float(radius[i] * std::sin(angle[i]));
}

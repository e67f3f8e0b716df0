// The tolerances of whole runs, in one place: fp32, learning rate at most 3e-4, at most 20 iterations, against one
// process or against values computed in float64. Everything that can be exact is compared bitwise instead.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "platform/precision.h"

constexpr double kLossBound = 2e-6;   // relative
constexpr double kNormBound = 1e-5;   // relative, of the gradient norm before clipping
constexpr double kLogitBound = 1e-5;  // largest difference over largest |logit|

inline double relative_difference(double x, double y) { return std::abs(x - y) / std::max(std::abs(y), 1e-300); }

// A parameter's kind: its name without the layer's number.
inline std::string kind_of(const std::string& name) {
    std::string kind;
    for (char c : name)
        if (c < '0' || c > '9') kind += c;
    return kind;
}

// Mixed precision, one iteration, against one process in the same format, whose unit roundoff is u: 2^-8 for bf16,
// 2^-11 for fp16. Two layouts round differently wherever a sum is cut in t parts, and everywhere behind that.
//   A tensor's gradient, norm over norm: what is rounded in full size is the residual stream, twice a layer, forward
//   and
// backward; a branch's roundings count by the branch's share of it, which is small. Each is spread evenly over (-u, u),
// of variance u^2/3, independent in the two runs, and they add like a random walk: sqrt(2 * 4 l / 3) u.
//   Loss and norm, relative: sums over so many values, rounded independently, that less than one rounding is left: u.
constexpr double kRoundoff = kScalesLoss ? 0x1p-11 : 0x1p-8;
inline double mixed_bound(int64_t layers) { return std::sqrt(2 * 4.0 * double(layers) / 3) * kRoundoff; }

using Tensors = std::map<std::string, std::vector<float>>;

inline std::map<std::string, double> norms_of_kinds(const Tensors& tensors) {
    std::map<std::string, double> norms;
    for (const auto& [name, values] : tensors)
        for (float x : values) norms[kind_of(name)] += double(x) * double(x);
    for (auto& [kind, norm] : norms) norm = std::sqrt(norm);
    return norms;
}

// What Adam makes of rounding in the gradients of one step, added to `allowance`: a step is lr m / sqrt(v), so a
// gradient that is off by delta moves its weight by up to 2 lr delta / sqrt(v), and by no more than 2 lr, a whole step
// either way, where delta is all there is. `sizes` is sqrt(v) (after its bias correction) of every element. A gradient
// is a sum over tokens, whose roundings, 2^-24 each, add like a random walk: delta is 2^-24 sqrt(tokens) of that kind's
// gradients' root mean square.
inline void add_adam_noise(const Tensors& gradients, const Tensors& sizes, int64_t tokens, double lr,
                           Tensors& allowance) {
    const std::map<std::string, double> norms = norms_of_kinds(gradients);
    std::map<std::string, double> counts;
    for (const auto& [name, values] : gradients) counts[kind_of(name)] += double(values.size());
    for (const auto& [name, values] : sizes) {
        std::vector<float>& allowed = allowance[name];
        allowed.resize(values.size());
        const double delta = 0x1p-24 * std::sqrt(double(tokens) / counts.at(kind_of(name))) * norms.at(kind_of(name));
        const bool qkv_bias = name.find("c_attn.bias") != std::string::npos;
        for (size_t i = 0; i < values.size(); ++i) {
            // The key part of a QKV bias has zero gradient by symmetry: there is nothing but rounding
            const bool zero = qkv_bias && i / (values.size() / 3) == 1;
            allowed[i] += float(2 * lr * (zero || delta >= std::abs(values[i]) ? 1 : delta / std::abs(values[i])));
        }
    }
}

// The largest |x - y| / (1e-5 |y| + 1e-6 |all of that kind|) over all tensors: at most 1 is within bounds. For weights,
// `allowance` adds what Adam made of rounding.
inline double worst_difference(const Tensors& actual, const Tensors& expected, const Tensors& allowance = {}) {
    const std::map<std::string, double> norms = norms_of_kinds(expected);
    double worst = actual.size() == expected.size() ? 0 : 1e30;
    for (const auto& [name, values] : expected) {
        const auto found = actual.find(name), allowed = allowance.find(name);
        if (found == actual.end() || found->second.size() != values.size()) return 1e30;
        for (size_t i = 0; i < values.size(); ++i) {
            const double difference = std::abs(double(found->second[i]) - double(values[i]));
            double bound = 1e-5 * std::abs(double(values[i])) + 1e-6 * norms.at(kind_of(name)) + 1e-12;
            if (allowed != allowance.end()) bound += allowed->second[i];
            if (difference > bound && std::getenv("PTDP_VERBOSE"))
                std::printf("%s[%zu]: %.9g, expected %.9g, %.2f of the bound %.3g\n", name.c_str(), i, found->second[i],
                            values[i], difference / bound, bound);
            worst = std::max(worst, difference / bound);
        }
    }
    return worst;
}

// The largest |x - y| / |all of that kind| over all tensors, norms of whole tensors.
inline double worst_distance(const Tensors& actual, const Tensors& expected) {
    const std::map<std::string, double> norms = norms_of_kinds(expected);
    double worst = actual.size() == expected.size() ? 0 : 1e30;
    for (const auto& [name, values] : expected) {
        const auto found = actual.find(name);
        if (found == actual.end() || found->second.size() != values.size()) return 1e30;
        double squares = 0;
        for (size_t i = 0; i < values.size(); ++i) {
            const double difference = double(found->second[i]) - double(values[i]);
            squares += difference * difference;
        }
        worst = std::max(worst, std::sqrt(squares) / norms.at(kind_of(name)));
    }
    return worst;
}

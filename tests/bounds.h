// The tolerances of whole runs, in one place: fp32, learning rate at most 3e-4, at most 20 iterations, against one
// process or against values computed in float64. Everything that can be exact is compared bitwise instead.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

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

using Tensors = std::map<std::string, std::vector<float>>;

// The largest |x - y| / (1e-5 |y| + 1e-6 |all of that kind|) over all tensors: at most 1 is within bounds. The key part
// of a QKV bias has zero gradient by symmetry, where Adam amplifies rounding: for weights it may differ by
// `key_bias_bound` (2 x learning rate x steps) instead. So may any weight whose gradient (`gradients`, if given) is
// below the bound that gradients themselves have: its sign, hence Adam's step, is undetermined for the same reason.
inline double worst_difference(const Tensors& actual, const Tensors& expected, double key_bias_bound,
                               const Tensors* gradients = nullptr) {
    std::map<std::string, double> squares, gradient_squares;
    if (gradients)
        for (const auto& [name, values] : *gradients)
            for (float g : values) gradient_squares[kind_of(name)] += double(g) * double(g);
    for (const auto& [name, values] : expected)
        for (float y : values) squares[kind_of(name)] += double(y) * double(y);
    double worst = actual.size() == expected.size() ? 0 : 1e30;
    for (const auto& [name, values] : expected) {
        const auto found = actual.find(name);
        if (found == actual.end() || found->second.size() != values.size()) return 1e30;
        const bool qkv_bias = name.find("c_attn.bias") != std::string::npos;
        const size_t third = values.size() / 3;
        for (size_t i = 0; i < values.size(); ++i) {
            const double difference = std::abs(double(found->second[i]) - double(values[i]));
            double bound = 1e-5 * std::abs(double(values[i])) + 1e-6 * std::sqrt(squares[kind_of(name)]) + 1e-12;
            if (qkv_bias && key_bias_bound > 0 && i / third == 1) bound = key_bias_bound;
            if (gradients && std::abs(gradients->at(name)[i]) <= 1e-6 * std::sqrt(gradient_squares[kind_of(name)]))
                bound = key_bias_bound;
            if (difference > bound && std::getenv("PTDP_VERBOSE"))
                std::printf("%s[%zu]: %.9g, expected %.9g, %.2f of the bound\n", name.c_str(), i, found->second[i],
                            values[i], difference / bound);
            worst = std::max(worst, difference / bound);
        }
    }
    return worst;
}

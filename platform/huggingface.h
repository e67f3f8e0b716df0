// Hugging Face GPT-2 directories: config.json and model.safetensors, in (--load-hf) and out (--save-hf).
//
// Weights have the same names, without the prefix `transformer.`, and the same [in, out] shapes as in this project
// (GPT-2's Conv1D). A model is taken only if it is one that this project computes: GPT-2 with gelu_new, pre-LayerNorm
// with epsilon 1e-5, plain attention scaling and tied embeddings. What is missing, unknown or of another shape is
// named.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "platform/device.h"
#include "platform/options.h"
#include "platform/safetensors.h"

// Reads --load-hf's config.json into the options: the model's sizes, which flags may repeat but not contradict; a
// shorter
// --seq-length uses the first positions only. Throws UserError.
inline void apply_hf_config(Options& o) {
    const std::string path = o.load_hf + "/config.json";
    auto refuse = [&](const std::string& reason) { return UserError("--load-hf " + path + ": " + reason); };
    nlohmann::ordered_json config;
    try {
        const MappedFile file(path);
        config = parse_json({file.data, file.size});
        if (!config.is_object()) throw std::runtime_error("is not a JSON object");
    } catch (const std::exception& error) {
        throw UserError("--load-hf: " + path + ": " + error.what());
    }
    auto must_be = [&](const char* key, const nlohmann::ordered_json& value) {
        if (config.value(key, value) != value)
            throw refuse(std::string(key) + " is " + config[key].dump() + ", but only " + value.dump() +
                         " is computed here");
    };
    must_be("model_type", "gpt2");
    must_be("activation_function", "gelu_new");
    must_be("scale_attn_weights", true);
    must_be("scale_attn_by_inverse_layer_idx", false);
    must_be("reorder_and_upcast_attn", false);
    must_be("add_cross_attention", false);
    must_be("tie_word_embeddings", true);
    if (std::abs(config.value("layer_norm_epsilon", 1e-5) - 1e-5) > 1e-12) must_be("layer_norm_epsilon", 1e-5);
    auto size = [&](const char* key, const char* flag, int64_t& option, bool may_be_less) {
        if (!config.contains(key) || !config[key].is_number_integer() || config[key].get<int64_t>() < 1)
            throw refuse(std::string(key) + " is missing or not a size");
        const int64_t value = config[key].get<int64_t>();
        const bool given = o.given.count(flag) > 0;
        if (given && (may_be_less ? option > value : option != value))
            throw UserError(std::string("--") + flag + " " + std::to_string(option) + ", but " + key + " in " + path +
                            " is " + std::to_string(value));
        if (!given) option = value;
    };
    size("n_layer", "num-layers", o.num_layers, false);
    size("n_embd", "hidden-size", o.hidden_size, false);
    size("n_head", "num-attention-heads", o.num_attention_heads, false);
    size("n_positions", "seq-length", o.seq_length, true);
    size("vocab_size", "vocab-size", o.vocab_size, false);
    if (config.contains("n_inner") && !config["n_inner"].is_null()) must_be("n_inner", 4 * o.hidden_size);
}

// What is asked of a model's tensors: [rows, cols], or [cols] for a vector. More rows than asked for are allowed where
// `rows_at_least` is set (positions).
struct HfTensor {
    std::string name;
    int64_t rows = 1, cols = 0;
    bool vector = false, rows_at_least = false;
};

// An open model directory: every tensor that was asked for is there and has its shape.
struct HfModel {
    SafeTensorsFile file;
    std::map<std::string, const SafeTensor*> tensors;  // by name, without the prefix

    // Throws UserError naming the first tensor that is missing, unknown or mis-shaped.
    HfModel(const std::string& dir, const std::vector<HfTensor>& wanted) try : file(dir + "/model.safetensors") {
        const std::string path = dir + "/model.safetensors", prefix = "transformer.";
        auto shape_text = [](const std::vector<int64_t>& shape) {
            std::string text;
            for (int64_t extent : shape) text += (text.empty() ? "[" : ", ") + std::to_string(extent);
            return (text.empty() ? "[" : text) + "]";
        };
        std::map<std::string, const SafeTensor*> found;
        for (const auto& [name, tensor] : file.tensors)
            found[name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name] = &tensor;
        for (const HfTensor& want : wanted) {
            const auto tensor = found.find(want.name);
            if (tensor == found.end()) throw std::runtime_error("has no tensor " + want.name);
            std::vector<int64_t> shape = {want.rows, want.cols}, actual = tensor->second->shape;
            if (want.vector) shape = {want.cols};
            if (want.rows_at_least && actual.size() == 2 && actual[0] > want.rows) actual[0] = want.rows;
            if (actual != shape)
                throw std::runtime_error("tensor " + want.name + " is " + shape_text(tensor->second->shape) + ", not " +
                                         shape_text(shape));
            const std::string& type = tensor->second->dtype;
            if (type != "F32" && type != "F16" && type != "BF16")
                throw std::runtime_error("tensor " + want.name + " is " + type + ", not F32, F16 or BF16");
            tensors[want.name] = tensor->second;
            found.erase(tensor);
        }
        for (const auto& [name, tensor] : found) {
            // The causal mask, which old files hold too, and the tied output layer
            const bool mask = name.size() > 10 && (name.substr(name.size() - 10) == ".attn.bias" ||
                                                   name.find(".attn.masked_bias") != std::string::npos);
            if (!mask && name != "lm_head.weight") throw std::runtime_error("tensor " + name + " is not GPT-2's");
        }
    } catch (const std::runtime_error& error) {
        throw UserError("--load-hf " + dir + "/model.safetensors: " + error.what());
    }

    // Element i of a tensor, as fp32.
    static float value(const SafeTensor& tensor, int64_t i) {
        if (tensor.dtype == "F32") {
            float x;
            std::memcpy(&x, tensor.data + 4 * i, 4);
            return x;
        }
        uint16_t half;
        std::memcpy(&half, tensor.data + 2 * i, 2);
        uint32_t bits = uint32_t(half) << 16;  // BF16
        float x;
        if (tensor.dtype == "F16") {
            const int exponent = half >> 10 & 31, fraction = half & 1023;
            if (exponent == 0) {  // zero or subnormal
                x = std::ldexp(float(fraction), -24);
                return half >> 15 ? -x : x;
            }
            bits = uint32_t(half >> 15) << 31 | uint32_t(exponent == 31 ? 255 : exponent + 112) << 23 |
                   uint32_t(fraction) << 13;
        }
        std::memcpy(&x, &bits, 4);
        return x;
    }
};

// config.json for a model of these options.
inline std::string hf_config(const Options& o) {
    const nlohmann::ordered_json config = {{"architectures", {"GPT2LMHeadModel"}},
                                           {"model_type", "gpt2"},
                                           {"vocab_size", o.vocab_size},
                                           {"n_positions", o.seq_length},
                                           {"n_embd", o.hidden_size},
                                           {"n_layer", o.num_layers},
                                           {"n_head", o.num_attention_heads},
                                           {"n_inner", nullptr},
                                           {"activation_function", "gelu_new"},
                                           {"layer_norm_epsilon", 1e-5},
                                           {"initializer_range", o.init_method_std},
                                           {"embd_pdrop", o.hidden_dropout},
                                           {"resid_pdrop", o.hidden_dropout},
                                           {"attn_pdrop", o.attention_dropout},
                                           {"tie_word_embeddings", true},
                                           {"bos_token_id", nullptr},
                                           {"eos_token_id", nullptr},
                                           {"torch_dtype", "float32"}};
    return config.dump(2) + "\n";
}

// Hardware files (examples/hardware/*.json): a device's rates and the few constants that plan.cu's performance model
// needs.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "platform/options.h"
#include "platform/safetensors.h"

// Rates in FLOP/s, bytes and bytes/s each way; the shares are what is reached of them.
struct Hardware {
    std::string name;
    double peak = 0, memory_rate = 0, memory = 0;
    int devices_per_node = 1;
    double word = 2;  // bytes of a weight in use, an activation, a gradient in a message: fp16 in the paper (§5)
    double device_link = 0;   // per device, inside a node
    double network_link = 0;  // per device, one of as many network links as a node has devices
    // Set on Table 1 and Figures 7, 11, 12 and 17 together (least cubes of the relative errors):
    double gemm_share = 1,
           gemm_half = 0;     // a GEMM's share of the peak is gemm_share / ((1 + half/m) (1 + half/n) (1 + half/k))
    double memory_share = 1;  // of memory_rate, in kernels that only move data
    double device_link_share = 1, network_share = 1;
    double exchange = 0;  // seconds before a message between nodes begins: launch, synchronisation, latency
};

// Reads a hardware file; throws UserError that names the file and what is wrong.
inline Hardware read_hardware(const std::string& name) {
    const bool is_name = name.find('/') == std::string::npos && name.find('.') == std::string::npos;
    const std::string path = is_name ? "examples/hardware/" + name + ".json" : name;
    std::ifstream file(path, std::ios::binary);
    if (!file) throw UserError("--hardware " + name + ": cannot read " + path + "; a100, h100 or a file like them");
    std::string text(size_t(1) << 16, '\0');
    file.read(text.data(), std::streamsize(text.size()));
    text.resize(size_t(file.gcount()));
    nlohmann::ordered_json json;
    try {
        json = parse_json(text);
    } catch (const std::exception&) {  // not an object either
    }
    if (!json.is_object()) throw UserError("--hardware " + path + ": is not a JSON object of at most 64 KB");
    auto number = [&](const char* key, double least, double most) {
        if (!json.contains(key) || !json[key].is_number())
            throw UserError("--hardware " + path + ": \"" + key + "\" is missing or not a number");
        const double value = json[key];
        if (!(value >= least && value <= most))
            throw UserError("--hardware " + path + ": \"" + key + "\" is " + options_detail::text(value) +
                            ": it must be from " + options_detail::text(least) + " to " + options_detail::text(most));
        return value;
    };
    Hardware hw;
    hw.name = json.contains("name") && json["name"].is_string() ? json["name"].get<std::string>() : path;
    hw.peak = 1e12 * number("peak_tflops", 1e-6, 1e9);
    hw.memory_rate = 1e9 * number("memory_gb_per_s", 1e-3, 1e9);
    hw.memory = 1e9 * number("memory_gb", 1e-3, 1e9);
    hw.word = number("bytes_per_value", 1, 8);
    hw.devices_per_node = int(number("devices_per_node", 1, 4096));
    hw.device_link = 1e9 * number("device_link_gb_per_s", 1e-6, 1e9);
    hw.network_link = 1e9 * number("network_link_gb_per_s", 1e-6, 1e9);
    hw.gemm_share = number("gemm_share", 1e-6, 1);
    hw.gemm_half = number("gemm_half_size", 0, 1e6);
    hw.memory_share = number("memory_share", 1e-6, 1);
    hw.device_link_share = number("device_link_share", 1e-6, 1);
    hw.network_share = number("network_share", 1e-6, 1);
    hw.exchange = 1e-3 * number("exchange_ms", 0, 1e6);
    return hw;
}

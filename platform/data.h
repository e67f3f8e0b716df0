// Training data: a file of tokens, cut into windows, in an order that depends on neither the layout nor the machine.
//
// Window i is tokens [i s, i s + s]: s inputs and, one further, s targets. The file has n = floor((N - 1) / s) windows
// (the tail is dropped), which --split cuts into contiguous training, validation and test ranges. The run's g-th
// training sample is training window perm(g / n)(g mod n), a seeded permutation of each epoch that is computed, not
// stored. No rank draws an order of its own. Evaluation reads the first validation windows in order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "platform/options.h"
#include "platform/random.h"
#include "platform/safetensors.h"

// The image of `index` under a pseudo-random permutation of [0, n): a balanced Feistel network on the smallest even
// number of bits that holds n, walked until it lands below n. A bijection for every n, key and epoch.
inline int64_t permute(int64_t index, int64_t n, uint64_t seed, uint64_t epoch) {
    int half_bits = 1;
    while ((int64_t(1) << 2 * half_bits) < n) ++half_bits;
    const uint32_t mask = uint32_t((uint64_t(1) << half_bits) - 1);
    uint64_t x = uint64_t(index);
    do {
        uint32_t left = uint32_t(x >> half_bits), right = uint32_t(x) & mask;
        for (uint32_t round = 0; round < 6; ++round) {
            const uint32_t mixed = philox(right, round, uint32_t(Site::order), uint32_t(epoch), seed).word[0] & mask;
            const uint32_t next = left ^ mixed;
            left = right;
            right = next;
        }
        x = uint64_t(left) << half_bits | right;
    } while (x >= uint64_t(n));
    return int64_t(x);
}

struct Dataset {
    std::unique_ptr<MappedFile> file;
    bool bytes = true;  // tokens are bytes; else little-endian uint16
    int64_t tokens = 0, sequence = 0;
    int64_t first_validation = 0, first_test = 0, windows = 0;  // training is [0, first_validation)
    uint64_t seed = 0;

    int token(int64_t i) const {
        if (bytes) return uint8_t(file->data[i]);
        uint16_t value;
        std::memcpy(&value, file->data + 2 * i, 2);
        return value;
    }
    // The s + 1 tokens of window i.
    std::vector<int32_t> window(int64_t i) const {
        std::vector<int32_t> result(sequence + 1);
        for (int64_t k = 0; k <= sequence; ++k) result[k] = token(i * sequence + k);
        return result;
    }
    int64_t training_windows() const { return first_validation; }
    int64_t validation_windows() const { return first_test - first_validation; }
    // The window that is the run's `sample`-th training sample.
    int64_t training_window(int64_t sample) const {
        const int64_t n = training_windows();
        return permute(sample % n, n, seed, uint64_t(sample / n));
    }
};

// Opens --data-path; sets --vocab-size where the data decides it. Throws UserError: a missing, unreadable, empty or too
// short file, a directory, a token not below V.
inline Dataset open_dataset(Options& o) {
    Dataset data;
    const std::string& path = o.data_path;
    try {
        data.file = std::make_unique<MappedFile>(path);
    } catch (const std::runtime_error& error) {
        throw UserError("--data-path " + std::string(error.what()) + ": it must be a readable file");
    }
    data.bytes = path.size() < 4 || path.compare(path.size() - 4, 4, ".bin") != 0;
    const size_t size = data.file->size;
    if (size == 0) throw UserError("--data-path " + path + ": is empty");
    if (!data.bytes && size % 2 != 0)
        throw UserError("--data-path " + path + ": a .bin holds uint16 tokens, but it is " + std::to_string(size) +
                        " bytes long, an odd number");
    if (!data.bytes && o.vocab_size == 0)
        throw UserError("--vocab-size is required for a .bin of tokens (--data-path " + path + ")");
    if (o.vocab_size == 0) o.vocab_size = 256;
    data.tokens = int64_t(data.bytes ? size : size / 2);
    data.sequence = o.seq_length;
    data.seed = o.seed;
    data.windows = (data.tokens - 1) / o.seq_length;
    if (data.windows < 1)
        throw UserError("--data-path " + path + ": has " + std::to_string(data.tokens) + " tokens, but --seq-length " +
                        std::to_string(o.seq_length) + " needs at least " + std::to_string(o.seq_length + 1));
    const std::vector<double> shares = split_shares(o.split);
    const double total = shares[0] + shares[1] + shares[2];
    data.first_validation = int64_t(double(data.windows) * shares[0] / total + 0.5);
    data.first_test = int64_t(double(data.windows) * (shares[0] + shares[1]) / total + 0.5);
    if (data.first_validation < 1)
        throw UserError("--split " + o.split + " leaves no training window of the " + std::to_string(data.windows) +
                        " in --data-path " + path + ": give a larger first share or a longer file");
    for (int64_t i = 0; i < data.tokens; ++i)
        if (data.token(i) >= o.vocab_size)
            throw UserError("--data-path " + path + ": token " + std::to_string(i) + " is " +
                            std::to_string(data.token(i)) + ", not below --vocab-size " + std::to_string(o.vocab_size));
    return data;
}

// ---------------------------------------------------------------------------------------------------------------------
// Prompts and generated text: bytes as they are, or token ids separated by spaces

inline std::vector<int32_t> encode_prompt(const Dataset& data, const Options& o) {
    std::vector<int32_t> ids;
    if (data.bytes) {
        for (char c : o.prompt) ids.push_back(uint8_t(c));
    } else {
        const char* text = o.prompt.c_str();
        char* end = nullptr;
        for (long id = std::strtol(text, &end, 10); end != text; id = std::strtol(text, &end, 10)) {
            ids.push_back(int32_t(std::clamp(id, -1L, long(INT32_MAX))));
            text = end;
        }
        if (std::string(text).find_first_not_of(" \n\t") != std::string::npos)
            throw UserError("--prompt \"" + o.prompt +
                            "\": for a .bin of tokens it must be token ids separated by spaces");
    }
    if (ids.empty()) ids.push_back(0);
    for (int32_t id : ids)
        if (id < 0 || id >= o.vocab_size)
            throw UserError("--prompt: token " + std::to_string(id) + " is not below --vocab-size " +
                            std::to_string(o.vocab_size));
    return ids;
}
inline std::string decode_token(const Dataset& data, int32_t id) {
    return data.bytes ? (id < 256 ? std::string(1, char(id)) : "?") : " " + std::to_string(id);
}

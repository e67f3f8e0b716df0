// Training data: a file of tokens, cut into windows, in an order that depends on neither the layout nor the machine.
//
// The file is text, whose bytes are the tokens or which a SentencePiece model encodes, or holds token ids:
// Megatron-LM's .bin with its .idx beside it (MMapIndexedDataset), llm.c's .bin (magic 20240520), or nanoGPT's .bin,
// raw uint16. Files are mapped, not read.
//
// Window i is tokens [i s, i s + s]: s inputs and, one further, s targets. The file has n = floor((N - 1) / s) windows
// (the tail is dropped), which --split cuts into contiguous training, validation and test ranges. The run's g-th
// training sample is training window perm(g / n)(g mod n), a seeded permutation of each epoch that is computed, not
// stored. No rank draws an order of its own. Evaluation reads the first validation windows in order.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "platform/options.h"
#include "platform/random.h"
#include "platform/safetensors.h"
#include "platform/tokenizer.h"

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

// A file of tokens.
struct TokenFile {
    std::unique_ptr<MappedFile> file;
    std::vector<int32_t> encoded;  // of text with a tokenizer's model
    bool text = true;
    int width = 1;  // bytes per token, little-endian
    bool is_signed = false;
    const char* first = nullptr;  // token 0
    int64_t count = 0;

    int64_t at(int64_t i) const {
        const char* place = first + i * width;
        if (width == 1) return is_signed ? int64_t(int8_t(*place)) : int64_t(uint8_t(*place));
        uint64_t bits = 0;
        std::memcpy(&bits, place, width);
        if (!is_signed || width == 8) return int64_t(bits);
        const int shift = 64 - 8 * width;
        return int64_t(bits << shift) >> shift;
    }
};

// What Megatron-LM's index says of its .bin: 9 bytes of magic, the version, a code for the type, the numbers of
// sequences and of documents' ends; then each sequence's length (int32), its place in bytes (int64), and the documents'
// ends, which windows ignore. Throws std::runtime_error.
inline void read_megatron_index(const std::string& path, TokenFile& tokens) {
    const MappedFile index(path);
    constexpr size_t header = 9 + 8 + 1 + 8 + 8;
    auto read = [&](auto& value, size_t at) { std::memcpy(&value, index.data + at, sizeof value); };
    if (index.size < header || std::memcmp(index.data, "MMIDIDX\0\0", 9) != 0)
        throw std::runtime_error(path + ": is not an index of Megatron-LM's (MMapIndexedDataset)");
    uint64_t version, sequences, documents;
    uint8_t code;
    read(version, 9);
    read(code, 17);
    read(sequences, 18);
    read(documents, 26);
    if (version != 1) throw std::runtime_error(path + ": has version " + std::to_string(version) + ", not 1");
    const std::map<int, std::pair<int, bool>> types = {{1, {1, false}}, {2, {1, true}}, {3, {2, true}},
                                                       {4, {4, true}},  {5, {8, true}}, {8, {2, false}}};
    const auto type = types.find(code);
    if (type == types.end())
        throw std::runtime_error(path + ": type code " + std::to_string(code) + " is no integer's");
    tokens.width = type->second.first;
    tokens.is_signed = type->second.second;
    const size_t room = index.size - header;
    if (sequences > room / 12 || documents > room / 8 || sequences * 12 + documents * 8 != room)
        throw std::runtime_error(path + ": its length does not fit its " + std::to_string(sequences) + " sequences");
    uint64_t end = 0;
    for (uint64_t i = 0; i < sequences; ++i) {
        int32_t length;
        int64_t place;
        read(length, header + 4 * i);
        read(place, header + 4 * sequences + 8 * i);
        if (length < 0 || place != int64_t(end))
            throw std::runtime_error(path + ": sequence " + std::to_string(i) + " does not follow the one before it");
        end += uint64_t(length) * tokens.width;
    }
    if (end != tokens.file->size)
        throw std::runtime_error(path + ": says " + std::to_string(end) + " bytes, but the .bin has " +
                                 std::to_string(tokens.file->size));
    tokens.first = tokens.file->data;
    tokens.count = int64_t(end / tokens.width);
}

// Throws UserError: a missing, unreadable or malformed file, a directory.
inline TokenFile open_tokens(const char* flag, const std::string& path) {
    TokenFile tokens;
    auto refuse = [&](const std::string& reason) { return UserError(std::string(flag) + " " + reason); };
    try {
        tokens.file = std::make_unique<MappedFile>(path);
    } catch (const std::runtime_error& error) {
        throw refuse(error.what() + std::string(": it must be a readable file"));
    }
    const size_t size = tokens.file->size;
    if (size == 0) throw refuse(path + ": is empty");
    tokens.text = path.size() < 4 || path.compare(path.size() - 4, 4, ".bin") != 0;
    tokens.first = tokens.file->data;
    tokens.count = int64_t(size);
    if (tokens.text) return tokens;

    const std::string index = path.substr(0, path.size() - 4) + ".idx";
    constexpr size_t llmc_header = 256 * sizeof(int32_t);
    int32_t llmc[3] = {};
    std::memcpy(llmc, tokens.file->data, std::min(size, sizeof llmc));
    if (access(index.c_str(), F_OK) == 0) {
        try {
            read_megatron_index(index, tokens);
        } catch (const std::runtime_error& error) {
            throw refuse(error.what());
        }
        return tokens;
    }
    tokens.width = 2;
    if (llmc[0] == 20240520) {
        if (llmc[1] != 1) throw refuse(path + ": is llm.c's, of version " + std::to_string(llmc[1]) + ", not 1");
        if (size < llmc_header || int64_t(size - llmc_header) != 2 * int64_t(llmc[2]))
            throw refuse(path + ": its header says " + std::to_string(llmc[2]) + " tokens, but it is " +
                         std::to_string(size) + " bytes long");
        tokens.first += llmc_header;
        tokens.count = llmc[2];
        return tokens;
    }
    if (size % 2 != 0)
        throw refuse(path + ": a .bin holds uint16 tokens, but it is " + std::to_string(size) +
                     " bytes long, an odd number");
    tokens.count = int64_t(size / 2);
    return tokens;
}

struct Dataset {
    TokenFile training, validation;  // validation: of --valid-data-path, else not used
    Tokenizer tokenizer;
    int64_t sequence = 0;
    int64_t first_validation = 0, first_test = 0, windows = 0;  // training is [0, first_validation)
    uint64_t seed = 0;

    // The s + 1 tokens of window i of a file.
    std::vector<int32_t> window(const TokenFile& file, int64_t i) const {
        std::vector<int32_t> result(sequence + 1);
        for (int64_t k = 0; k <= sequence; ++k) result[k] = int32_t(file.at(i * sequence + k));
        return result;
    }
    std::vector<int32_t> window(int64_t i) const { return window(training, i); }
    std::vector<int32_t> validation_window(int64_t i) const {
        return validation.file ? window(validation, i) : window(training, first_validation + i);
    }
    int64_t training_windows() const { return first_validation; }
    int64_t validation_windows() const { return first_test - first_validation; }
    // The window that is the run's `sample`-th training sample.
    int64_t training_window(int64_t sample) const {
        const int64_t n = training_windows();
        return permute(sample % n, n, seed, uint64_t(sample / n));
    }
};

// The number of windows of s + 1 tokens in a file whose ids are all below V. Throws UserError.
inline int64_t count_windows(const char* flag, const std::string& path, const TokenFile& tokens, const Options& o) {
    const int64_t windows = (tokens.count - 1) / o.seq_length;
    if (windows < 1)
        throw UserError(std::string(flag) + " " + path + ": has " + std::to_string(tokens.count) +
                        " tokens, but --seq-length " + std::to_string(o.seq_length) + " needs at least " +
                        std::to_string(o.seq_length + 1));
    for (int64_t i = 0; i < tokens.count; ++i)
        if (tokens.at(i) < 0 || tokens.at(i) >= o.vocab_size)
            throw UserError(std::string(flag) + " " + path + ": token " + std::to_string(i) + " is " +
                            std::to_string(tokens.at(i)) + ", not below --vocab-size " + std::to_string(o.vocab_size));
    return windows;
}

// Opens --data-path and --valid-data-path; sets --vocab-size where the data decides it. Throws UserError: a missing,
// unreadable, empty, malformed or too short file, a directory, a token not below V.
inline Dataset open_dataset(Options& o) {
    Dataset data;
    if (!o.tokenizer_model.empty()) data.tokenizer.load(o.tokenizer_model);
    auto open = [&](const char* flag, const std::string& path) {
        TokenFile tokens = open_tokens(flag, path);
        if (tokens.text && data.tokenizer.model) {
            tokens.encoded = data.tokenizer.encode(std::string(tokens.first, tokens.count));
            tokens.first = reinterpret_cast<const char*>(tokens.encoded.data());
            tokens.count = int64_t(tokens.encoded.size());
            tokens.width = 4;
        }
        return tokens;
    };
    data.training = open("--data-path", o.data_path);
    data.tokenizer.bytes = data.training.text;
    if (!data.training.text && !data.tokenizer.model && o.vocab_size == 0)
        throw UserError("--vocab-size is required for a .bin of tokens (--data-path " + o.data_path + ")");
    if (o.vocab_size == 0) o.vocab_size = data.tokenizer.vocabulary();
    data.sequence = o.seq_length;
    data.seed = o.seed;
    data.windows = count_windows("--data-path", o.data_path, data.training, o);
    const std::vector<double> shares = split_shares(o.split);
    const double total = shares[0] + shares[1] + shares[2];
    data.first_validation = int64_t(double(data.windows) * shares[0] / total + 0.5);
    data.first_test = int64_t(double(data.windows) * (shares[0] + shares[1]) / total + 0.5);
    if (!o.valid_data_path.empty()) {
        data.validation = open("--valid-data-path", o.valid_data_path);
        if (data.validation.text != data.training.text)
            throw UserError("--valid-data-path " + o.valid_data_path + " and --data-path " + o.data_path +
                            ": one is text and the other a .bin of tokens");
        data.first_validation = data.windows;  // all of --data-path is for training
        data.first_test = data.windows + count_windows("--valid-data-path", o.valid_data_path, data.validation, o);
    }
    if (data.first_validation < 1)
        throw UserError("--split " + o.split + " leaves no training window of the " + std::to_string(data.windows) +
                        " in --data-path " + o.data_path + ": give a larger first share or a longer file");
    return data;
}

// The ids of --prompt. Throws UserError.
inline std::vector<int32_t> encode_prompt(const Dataset& data, const Options& o) {
    std::vector<int32_t> ids;
    try {
        ids = data.tokenizer.encode(o.prompt);
    } catch (const UserError& error) {
        throw UserError(std::string("--prompt: ") + error.what());
    }
    if (ids.empty()) ids.push_back(0);
    for (int32_t id : ids)
        if (id < 0 || id >= o.vocab_size)
            throw UserError("--prompt: token " + std::to_string(id) + " is not below --vocab-size " +
                            std::to_string(o.vocab_size));
    return ids;
}

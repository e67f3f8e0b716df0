// Every parser of files, fed with arbitrary bytes: what `make fuzz` (tests/fuzz.cu) mutates under libFuzzer, and what
// tests/test_fuzz.cu replays and mutates in every `make test`.
//
// The promise: for any bytes a parser returns or throws std::runtime_error with a message; it neither crashes nor
// hangs, and at no time holds more memory than kBytesPerByte times the file's size and kBytes.
//
// An input's first byte chooses the format, the rest is the file (or both files, see split()). Include this in one
// file of a program only: it replaces operator new, to count.
#pragma once

#include <malloc.h>

#include <cstdlib>
#include <new>

#include "platform/checkpoint.h"
#include "platform/data.h"
#include "platform/hardware.h"
#include "platform/huggingface.h"
#include "platform/options.h"
#include "tests/process.h"

namespace parsers {

// JSON of three bytes ("{},") becomes a value of 16 bytes, its map of 48 and, while the array grows, a copy of both.
constexpr size_t kBytesPerByte = 128;
constexpr size_t kBytes = size_t(4) << 20;  // CLI11's description of all options, and what the library keeps

struct Memory {
    size_t live = 0, peak = 0;
};
inline Memory& memory() {
    static thread_local Memory memory;
    return memory;
}
inline void* counted(size_t size) {
    void* block = std::malloc(size);
    if (!block) throw std::bad_alloc();
    memory().live += malloc_usable_size(block);
    memory().peak = std::max(memory().peak, memory().live);
    return block;
}
inline void released(void* block) {
    const size_t size = block ? malloc_usable_size(block) : 0;
    memory().live -= std::min(memory().live, size);
    std::free(block);
}

// The rest of an input as two files: a 16-bit little-endian length of the first, then both.
struct Two {
    std::string first, second;
};
inline Two split(const std::string& bytes) {
    if (bytes.size() < 2) return {bytes, ""};
    const size_t length = std::min(bytes.size() - 2, size_t(uint8_t(bytes[0])) | size_t(uint8_t(bytes[1])) << 8);
    return {bytes.substr(2, length), bytes.substr(2 + length)};
}

inline void touch(const SafeTensorsFile& file) {
    volatile char sum = 0;
    for (const auto& [name, tensor] : file.tensors)
        for (size_t i = 0; i < tensor.bytes; ++i) sum = char(sum + tensor.data[i]);
}

// A checkpoint of one shard. The manifest gets the CRC32s that it should have, or no mutation would come past them.
inline void read_checkpoint(const std::string& dir, const Two& input) {
    using namespace checkpoint_detail;
    const std::string path = dir + "/iter_0000007";
    fs::create_directories(path);
    write_file(path + "/shard.safetensors", input.second);
    auto crc = [](const std::string& text) {
        return hex(uint32_t(crc32_z(0, reinterpret_cast<const unsigned char*>(text.data()), text.size())));
    };
    std::string manifest = input.first;
    try {
        auto json = parse_json(manifest);
        if (json.is_object() && json.contains("files") && json["files"].is_array() && json["files"].empty())
            json["files"].push_back(
                {{"name", "shard.safetensors"}, {"bytes", input.second.size()}, {"crc32", crc(input.second)}});
        manifest = json.dump();
    } catch (const std::exception&) {  // then as it is
    }
    manifest += "\n";
    write_file(path + "/manifest.json", manifest + crc(manifest) + "\n");
    const auto checkpoint = open_checkpoint(dir, 0, 1);
    if (!checkpoint) return;
    static Device device;
    std::vector<float> values(64);
    for (const auto& [name, pieces] : checkpoint->pieces)
        for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{4, 6}, {1, 8}, {pieces[0].slice.rows, 2}})
            if (rows > 0 && rows * cols <= int64_t(values.size())) try {
                    Slice slice{name, rows, cols, 0, 0, rows, cols, 0, rows * cols, values.data()};
                    load_slice(device, *checkpoint, slice);
                    slice = {name, pieces[0].slice.rows, pieces[0].slice.cols, 1, 1, 3, 2, 1, 5, values.data()};
                    load_slice(device, *checkpoint, slice);
                } catch (const UserError&) {  // it holds another tensor
                }
}

// Model files: safetensors, checkpoints, Hugging Face directories, --config, --hardware.
inline void read_files(const std::string& dir, const std::string& input) {
    const std::string rest = input.substr(1), file = dir + "/file";
    switch (uint8_t(input[0]) % 5) {
        case 0:
            write_file(file, rest);
            touch(SafeTensorsFile(file));
            break;
        case 1:
            read_checkpoint(dir, split(rest));
            break;
        case 2: {
            const Two two = split(rest);
            write_file(dir + "/config.json", two.first);
            write_file(dir + "/model.safetensors", two.second);
            Options o;
            o.load_hf = dir;
            o.data_path = "x";
            apply_hf_config(o);
            validate(o, 1);
            const HfModel model(dir, {{"wte.weight", 3, 2}, {"wpe.weight", 2, 2, false, true}, {"b", 1, 2, true}});
            volatile float sum = 0;
            for (const auto& [name, tensor] : model.tensors)
                for (int64_t i = 0; i < 2; ++i) sum = sum + HfModel::value(*tensor, i);
            break;
        }
        case 3: {
            write_file(file, rest);
            const char* argv[] = {"train", "--config", file.c_str(), "--data-path", "x"};
            std::string help;
            Options o = parse_options(5, argv, &help);
            validate(o, 2);
            break;
        }
        case 4:
            write_file(file, rest);
            read_hardware(file);
            break;
    }
}

// Tokens: text, a raw or llm.c's .bin, a .bin with Megatron-LM's .idx; and the flags that say what of them is used.
// The first bytes of the rest: s - 1, and 16 V's bits.
inline void read_tokens(const std::string& dir, const std::string& input) {
    if (input.size() < 3) return;
    const int format = uint8_t(input[0]) % 4;
    const Two two = split(input.substr(3));
    Options o;
    o.seq_length = 1 + uint8_t(input[1]) % 32;
    o.vocab_size = format == 0 ? 0 : int64_t(1) << uint8_t(input[2]) % 31;
    o.data_path = dir + (format == 0 ? "/text" : format == 1 ? "/tokens.bin" : "/indexed.bin");
    write_file(o.data_path, format == 1 ? input.substr(3) : two.second);
    if (format == 2) write_file(dir + "/indexed.idx", two.first);
    if (format == 0) o.split = two.first;
    if (format == 3) {
        o.prompt = two.first;
        std::filesystem::remove(dir + "/indexed.idx");
        try {
            trace_range(two.first);
        } catch (const UserError&) {  // it need not be one
        }
    }
    const Dataset data = open_dataset(o);
    encode_prompt(data, o);
    for (int64_t i = 0; i < std::min<int64_t>(data.training_windows(), 64); ++i)
        for (int32_t token : data.window(data.training_window(i)))
            if (token < 0 || token >= o.vocab_size) std::abort();
    for (int64_t i = 0; i < std::min<int64_t>(data.validation_windows(), 64); ++i) data.validation_window(i);
}

// Runs a reader on an input, in `dir`. Returns the message with which the input was refused, or nothing. Aborts on
// any other exception and on too much memory, as libFuzzer wants it.
template <class Reader>
std::string feed(Reader reader, const std::string& dir, const std::string& input) {
    if (input.empty()) return "";
    std::string message;
    const size_t before = memory().peak = memory().live;
    try {
        reader(dir, input);
    } catch (const std::runtime_error& error) {
        message = error.what();
        if (message.empty()) std::abort();
    }
    const size_t used = memory().peak - before;
    if (used > kBytes + kBytesPerByte * input.size()) {
        std::fprintf(stderr, "%zu bytes of memory for %zu bytes of input\n", used, input.size());
        std::abort();
    }
    return message;
}

}  // namespace parsers

#ifdef __CUDACC__  // nvcc takes these for device functions too, which nothing here calls
#pragma nv_diag_suppress 20011, 20014
#endif
void* operator new(size_t size) { return parsers::counted(size); }
void* operator new[](size_t size) { return parsers::counted(size); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void operator delete(void* block) noexcept { parsers::released(block); }
void operator delete[](void* block) noexcept { parsers::released(block); }
void operator delete(void* block, size_t) noexcept { parsers::released(block); }
void operator delete[](void* block, size_t) noexcept { parsers::released(block); }

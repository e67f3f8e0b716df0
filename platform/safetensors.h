// safetensors files: an 8-byte little-endian header length, a JSON header, the tensors' bytes. The format of --dump and
// of the tests' reference values; every other framework reads it.
//
// A reader maps the file and checks everything before it hands out a pointer: a malformed file is an exception, never a
// crash.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

// A file mapped for reading; nothing is read before it is touched.
struct MappedFile {
    const char* data = nullptr;
    size_t size = 0;

    // Throws std::runtime_error with the path and the system's reason.
    explicit MappedFile(const std::string& path) {
        const int file = open(path.c_str(), O_RDONLY);
        if (file < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
        struct stat status = {};
        const bool ok = fstat(file, &status) == 0;
        if (ok && S_ISDIR(status.st_mode)) {
            close(file);
            throw std::runtime_error(path + ": is a directory");
        }
        size = ok ? size_t(status.st_size) : 0;
        void* mapped = size > 0 ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
        const int error = errno;
        close(file);
        if (!ok || mapped == MAP_FAILED) throw std::runtime_error(path + ": " + std::strerror(error));
        data = static_cast<const char*>(mapped);
    }
    ~MappedFile() {
        if (data) munmap(const_cast<char*>(data), size);
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
};

// A file written aside and renamed when it is whole and on the disk; removed if that never happens. Throws
// std::runtime_error with the path and the system's reason.
struct FileWriter {
    const std::string path, aside;
    int file = -1;
    uint64_t bytes = 0;
    uint32_t crc = 0;  // CRC32 (zlib's) of what has been written

    explicit FileWriter(const std::string& path) : path(path), aside(path + ".part") {
        file = open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
        if (file < 0) refuse();
    }
    ~FileWriter() {
        if (file >= 0) {
            close(file);
            unlink(aside.c_str());
        }
    }
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;

    void write(const void* data, size_t size) {
        const char* from = static_cast<const char*>(data);
        crc = uint32_t(crc32_z(crc, reinterpret_cast<const unsigned char*>(from), size));
        bytes += size;
        while (size > 0) {
            const ssize_t count = ::write(file, from, std::min(size, size_t(1) << 30));
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) refuse();
            from += count;
            size -= size_t(count);
        }
    }
    // Returns the CRC32 of the whole.
    uint32_t finish() {
        if (fsync(file) != 0) refuse();
        const int closed = close(file);
        file = -1;
        if (closed != 0 || rename(aside.c_str(), path.c_str()) != 0) {
            const int error = errno;
            unlink(aside.c_str());
            errno = error;
            refuse();
        }
        return crc;
    }
    [[noreturn]] void refuse() const { throw std::runtime_error(path + ": cannot write: " + std::strerror(errno)); }
};

// A JSON text from a file that nobody vouches for: deep nesting, which would overflow the stack of whatever walks it,
// is refused. Throws std::exception.
inline nlohmann::ordered_json parse_json(std::string_view text) {
    const auto depth_limited = [](int depth, nlohmann::ordered_json::parse_event_t, nlohmann::ordered_json&) {
        if (depth > 8) throw std::runtime_error("its JSON is nested too deeply");
        return true;
    };
    return nlohmann::ordered_json::parse(text.begin(), text.end(), depth_limited);
}

struct SafeTensor {
    std::string dtype;  // "F32", "I32", ...
    std::vector<int64_t> shape;
    const char* data = nullptr;
    size_t bytes = 0;

    // Its values, if it is of that dtype; else throws.
    std::vector<float> floats() const { return values<float>("F32"); }
    std::vector<int32_t> ints() const { return values<int32_t>("I32"); }

private:
    template <class T>
    std::vector<T> values(const char* expected) const {
        if (dtype != expected) throw std::runtime_error("a tensor is " + dtype + ", not " + expected);
        std::vector<T> result(bytes / sizeof(T));
        std::memcpy(result.data(), data, bytes);
        return result;
    }
};

inline size_t safetensors_item_size(const std::string& dtype) {
    if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
    if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
    if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
    if (dtype == "I8" || dtype == "U8" || dtype == "BOOL") return 1;
    return 0;
}

struct SafeTensorsFile {
    MappedFile file;
    std::map<std::string, SafeTensor> tensors;
    std::map<std::string, std::string> metadata;

    // Throws std::runtime_error naming the file and what is wrong with it.
    explicit SafeTensorsFile(const std::string& path) : file(path) {
        try {
            parse();
        } catch (const std::exception& error) {
            throw std::runtime_error(path + ": not a valid safetensors file: " + error.what());
        }
    }

    const SafeTensor& at(const std::string& name) const {
        const auto found = tensors.find(name);
        if (found == tensors.end()) throw std::runtime_error("no tensor named " + name);
        return found->second;
    }

private:
    void parse() {
        uint64_t header_size = 0;
        if (file.size < sizeof header_size) throw std::runtime_error("it is shorter than its header's length");
        std::memcpy(&header_size, file.data, sizeof header_size);
        if (header_size > file.size - sizeof header_size)
            throw std::runtime_error("its header is longer than the file");
        const char* begin = file.data + sizeof header_size;
        const auto header = parse_json(std::string_view(begin, header_size));
        if (!header.is_object()) throw std::runtime_error("its header is not a JSON object");
        const uint64_t data_size = file.size - sizeof header_size - header_size;
        std::map<uint64_t, uint64_t> ranges;
        for (const auto& [name, entry] : header.items()) {
            if (name == "__metadata__") {
                for (const auto& [key, value] : entry.items()) metadata[key] = value.get<std::string>();
                continue;
            }
            SafeTensor tensor;
            tensor.dtype = entry.at("dtype").get<std::string>();
            uint64_t expected = safetensors_item_size(tensor.dtype);
            if (expected == 0) throw std::runtime_error("tensor " + name + " has unknown dtype " + tensor.dtype);
            for (const auto& extent : entry.at("shape")) {
                if (!extent.is_number_unsigned()) throw std::runtime_error("tensor " + name + " has a bad shape");
                const uint64_t n = extent.get<uint64_t>();
                if (n > uint64_t(INT64_MAX) || __builtin_mul_overflow(expected, n, &expected))
                    throw std::runtime_error("tensor " + name + " has an absurd shape");
                tensor.shape.push_back(int64_t(n));
            }
            const auto& offsets = entry.at("data_offsets");
            if (offsets.size() != 2 || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned())
                throw std::runtime_error("tensor " + name + " has bad offsets");
            const uint64_t first = offsets[0].get<uint64_t>(), last = offsets[1].get<uint64_t>();
            if (first > last || last > data_size) throw std::runtime_error("tensor " + name + " lies outside the file");
            if (last - first != expected) throw std::runtime_error("tensor " + name + "'s size does not fit its shape");
            if (expected > 0 && !ranges.emplace(first, last).second)
                throw std::runtime_error("tensor " + name + " overlaps another");
            tensor.data = begin + header_size + first;
            tensor.bytes = size_t(expected);
            tensors[name] = tensor;
        }
        uint64_t end = 0;
        for (const auto& [first, last] : ranges) {
            if (first < end) throw std::runtime_error("two tensors overlap");
            end = last;
        }
    }
};

// Collects tensors and writes them as one file: aside first, flushed to the disk, then renamed, so that a file of that
// name is always whole. Tensors may be handed over as functions that are called when they are written, one after
// another.
struct SafeTensorsWriter {
    // Writes bytes [begin, begin + size) of a tensor to `out`.
    using Source = std::function<void(uint64_t begin, size_t size, char* out)>;
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    std::vector<std::pair<uint64_t, Source>> tensors;  // bytes of each, and where they come from
    uint64_t size = 0;

    struct Written {
        uint64_t bytes = 0;
        uint32_t crc32 = 0;  // of the whole file
    };

    void metadata(const std::string& key, const std::string& value) { header["__metadata__"][key] = value; }
    void add(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape, size_t bytes,
             Source source) {
        header[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {size, size + bytes}}};
        tensors.push_back({bytes, std::move(source)});
        size += bytes;
    }
    template <class T>
    void add(const std::string& name, const std::vector<int64_t>& shape, const std::vector<T>& values) {
        static_assert(std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, int32_t>);
        const char* dtype = std::is_same_v<T, int32_t> ? "I32" : sizeof(T) == 4 ? "F32" : "F64";
        const char* begin = reinterpret_cast<const char*>(values.data());
        const std::vector<char> copy(begin, begin + values.size() * sizeof(T));
        add(name, dtype, shape, copy.size(),
            [copy](uint64_t begin, size_t size, char* out) { std::memcpy(out, copy.data() + begin, size); });
    }

    // Throws std::runtime_error with the path and the system's reason; then no file of that name has been touched.
    Written write(const std::string& path) const {
        std::string text = header.dump();
        text.resize((text.size() + 7) / 8 * 8, ' ');  // tensors begin at a multiple of 8
        const uint64_t header_size = text.size();
        FileWriter out(path);
        out.write(&header_size, sizeof header_size);
        out.write(text.data(), text.size());
        std::vector<char> piece(size_t(1) << 20);  // small enough to stay in the cache for the CRC32 and the write
        for (const auto& [bytes, source] : tensors)
            for (uint64_t begin = 0; begin < bytes; begin += piece.size()) {
                const size_t count = size_t(std::min<uint64_t>(piece.size(), bytes - begin));
                source(begin, count, piece.data());
                out.write(piece.data(), count);
            }
        const uint32_t crc = out.finish();
        return {out.bytes, crc};
    }
};

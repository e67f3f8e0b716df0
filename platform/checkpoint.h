// Checkpoints (§5.10): every rank writes what it alone holds, in parallel; any layout reads what it needs of it.
//
//   DIR/iter_0000010/shard_t0_p0.safetensors ...   tensors, each with its name, whole shape and slice (docs/formats.md)
//   DIR/iter_0000010/manifest.json                 the model, the iteration, every file's size and CRC32
//
// Rules kept here:
//   - a checkpoint is written in a directory of another name, flushed, and renamed when it is complete, manifest last:
//     whatever happens meanwhile, the previous one stays valid;
//   - values are fp32, whatever the run computes in;
//   - pieces of a tensor never overlap, so a reader knows that it has all of it by counting;
//   - everything is checked before anything is loaded. Failures are UserErrors that name the file.
//
// Defines: Slice; save_checkpoint; Checkpoint, open_checkpoint and load_slices.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "platform/device.h"
#include "platform/grid.h"
#include "platform/safetensors.h"

// Part of a whole tensor [rows, cols], on this rank's device: the elements [flat_begin, flat_end), in row-major order,
// of the rectangle [local_rows, local_cols] at (first_row, first_col); `data` points to the first of them.
struct Slice {
    std::string name;
    int64_t rows = 0, cols = 0;
    int64_t first_row = 0, first_col = 0, local_rows = 0, local_cols = 0;
    int64_t flat_begin = 0, flat_end = 0;
    float* data = nullptr;

    int64_t size() const { return flat_end - flat_begin; }
};

// What identifies a checkpoint beside its tensors.
struct CheckpointState {
    int64_t iteration = 0, samples = 0, optimizer_steps = 0;
    double loss_scale = 0;          // fp16; 0: the run did not scale its loss
    int64_t good_steps = 0;         // iterations since the loss scale last changed
    nlohmann::ordered_json model;   // sizes that a run which loads it must have
    nlohmann::ordered_json layout;  // of the run that wrote it: for people
};

constexpr int kCheckpointFormat = 1;

namespace checkpoint_detail {
namespace fs = std::filesystem;

inline std::string name_of(int64_t iteration) {
    char name[32];
    std::snprintf(name, sizeof name, "iter_%07ld", long(iteration));
    return name;
}
inline std::string hex(uint32_t crc) {
    char text[16];
    std::snprintf(text, sizeof text, "%08x", unsigned(crc));
    return text;
}
inline void flush_directory(const std::string& path) {
    const int directory = open(path.c_str(), O_RDONLY);
    const bool ok = directory >= 0 && fsync(directory) == 0;
    const int error = errno;
    if (directory >= 0) close(directory);
    if (!ok) throw std::runtime_error(path + ": cannot flush: " + std::strerror(error));
}

// A JSON value that must be a whole number from 0 to 2^62.
inline int64_t whole(const nlohmann::ordered_json& value) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t(1) << 62)
        throw std::runtime_error(value.dump() + " is not a size");
    return value.get<int64_t>();
}

// The iterations of the complete checkpoints in a directory, ascending.
inline std::vector<int64_t> iterations_in(const std::string& dir) {
    std::vector<int64_t> list;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(dir, error)) {
        const std::string name = entry.path().filename().string();
        int64_t iteration = 0;
        int used = 0;
        if (std::sscanf(name.c_str(), "iter_%ld%n", &iteration, &used) == 1 && size_t(used) == name.size() &&
            iteration >= 0 && fs::exists(entry.path() / "manifest.json", error))
            list.push_back(iteration);
    }
    std::sort(list.begin(), list.end());
    return list;
}
}  // namespace checkpoint_detail

// Writes a checkpoint into `dir`: each rank its slices (none: no file) as `file_name`, rank 0 the manifest. Then
// removes all but the newest `keep` (0: none). Collective; throws std::runtime_error on all ranks alike, and then
// nothing that was there before is touched.
inline void save_checkpoint(Device& device, const std::string& dir, const std::string& file_name,
                            const std::vector<Slice>& slices, const CheckpointState& state, int64_t keep) {
    using namespace checkpoint_detail;
    int rank = 0;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    const std::string final_path = dir + "/" + name_of(state.iteration), aside = final_path + ".part";
    together([&] {
        if (rank != 0) return;
        fs::remove_all(aside);
        fs::create_directories(aside);
    });
    nlohmann::json written = nullptr;
    try {
        together([&] {
            if (slices.empty()) return;
            SafeTensorsWriter writer;
            for (const Slice& slice : slices) {
                const nlohmann::json place = {{"shape", {slice.rows, slice.cols}},
                                              {"rows", {slice.first_row, slice.first_row + slice.local_rows}},
                                              {"cols", {slice.first_col, slice.first_col + slice.local_cols}},
                                              {"flat", {slice.flat_begin, slice.flat_end}}};
                writer.metadata(slice.name, place.dump());
                const bool whole = slice.size() == slice.local_rows * slice.local_cols;
                const size_t bytes = size_t(slice.size()) * sizeof(float);
                writer.add(slice.name, "F32",
                           whole ? std::vector<int64_t>{slice.local_rows, slice.local_cols}
                                 : std::vector<int64_t>{slice.size()},
                           bytes, [&device, &slice](uint64_t begin, size_t size, char* out) {
                               to_host(device, out, reinterpret_cast<const char*>(slice.data) + begin, size);
                           });
            }
            const SafeTensorsWriter::Written file = writer.write(aside + "/" + file_name);
            written = {{"name", file_name}, {"bytes", file.bytes}, {"crc32", hex(file.crc32)}};
        });
        const std::vector<std::string> files = gather_texts(written.dump());
        together([&] {
            if (rank != 0) return;
            nlohmann::ordered_json manifest = {{"format", kCheckpointFormat},
                                               {"iteration", state.iteration},
                                               {"samples", state.samples},
                                               {"optimizer_steps", state.optimizer_steps},
                                               {"loss_scale", state.loss_scale},
                                               {"good_steps", state.good_steps},
                                               {"model", state.model},
                                               {"layout", state.layout},
                                               {"files", nlohmann::ordered_json::array()}};
            for (const std::string& file : files)
                if (file != "null") manifest["files"].push_back(nlohmann::ordered_json::parse(file));
            // The manifest's second line is the CRC32 of its first
            const std::string text = manifest.dump() + "\n";
            FileWriter out(aside + "/manifest.json");
            out.write(text.data(), text.size());
            const std::string crc = hex(out.crc) + "\n";
            out.write(crc.data(), crc.size());
            out.finish();
            flush_directory(aside);
            fs::remove_all(final_path);  // of an earlier run from an earlier iteration
            fs::rename(aside, final_path);
            flush_directory(dir);
        });
    } catch (const std::runtime_error&) {
        std::error_code ignored;
        if (rank == 0) fs::remove_all(aside, ignored);
        throw;
    }
    if (rank != 0 || keep == 0) return;
    const std::vector<int64_t> all = iterations_in(dir);
    std::error_code ignored;
    for (size_t i = 0; i + size_t(keep) < all.size(); ++i) {
        // Renamed first, so that what is left of it never looks complete
        const std::string old = dir + "/" + name_of(all[i]);
        fs::rename(old, old + ".part", ignored);
        fs::remove_all(old + ".part", ignored);
    }
}

// A checkpoint open for reading: its files mapped, nothing of the tensors read yet.
struct Checkpoint {
    struct Piece {
        Slice slice;  // without data
        const char* bytes = nullptr;
    };
    std::string path;
    CheckpointState state;
    std::vector<std::unique_ptr<SafeTensorsFile>> files;
    std::map<std::string, std::vector<Piece>> pieces;  // by tensor
};

// Opens the newest complete checkpoint in `dir` and checks all of it: manifest, sizes, headers, and of every `ranks`-th
// file from `rank` on the CRC32, so that all ranks together have read all files once. Null if there is none. Throws
// UserError.
inline std::unique_ptr<Checkpoint> open_checkpoint(const std::string& dir, int rank, int ranks) {
    using namespace checkpoint_detail;
    const std::vector<int64_t> iterations = iterations_in(dir);
    if (iterations.empty()) return nullptr;
    auto checkpoint = std::make_unique<Checkpoint>();
    const std::string path = checkpoint->path = dir + "/" + name_of(iterations.back());
    auto refuse = [&](const std::string& reason) -> UserError {
        return UserError("--load " + dir + ": " + reason + "; the checkpoint is damaged: move " + path +
                         " away to load the one before it");
    };
    try {
        const std::string manifest_path = path + "/manifest.json";
        const MappedFile file(manifest_path);
        const std::string text(file.data, file.size);
        const size_t line = text.find('\n');
        if (line == std::string::npos) throw std::runtime_error(manifest_path + ": is truncated");
        const uint32_t crc = uint32_t(crc32_z(0, reinterpret_cast<const unsigned char*>(text.data()), line + 1));
        if (text.substr(line + 1) != hex(crc) + "\n") throw std::runtime_error(manifest_path + ": its CRC32 is wrong");
        const auto manifest = parse_json(text.substr(0, line));
        if (manifest.at("format") != kCheckpointFormat)
            throw std::runtime_error(manifest_path + ": has format " + manifest.at("format").dump() + ", not " +
                                     std::to_string(kCheckpointFormat));
        checkpoint->state = {whole(manifest.at("iteration")),
                             whole(manifest.at("samples")),
                             whole(manifest.at("optimizer_steps")),
                             manifest.value("loss_scale", 0.0),
                             whole(manifest.value("good_steps", nlohmann::ordered_json(0u))),
                             manifest.at("model"),
                             manifest.at("layout")};
        if (!checkpoint->state.model.is_object()) throw std::runtime_error(manifest_path + ": its model is no object");
        if (const double scale = checkpoint->state.loss_scale; !(scale >= 0 && scale <= 0x1p60))
            throw std::runtime_error(manifest_path + ": its loss scale is not one");
        int index = 0;
        std::set<std::string> names;
        for (const auto& entry : manifest.at("files")) {
            const std::string name = entry.at("name").get<std::string>(), shard = path + "/" + name;
            if (name.find('/') != std::string::npos || !names.insert(name).second)
                throw std::runtime_error(manifest_path + ": names " + name + " twice, or outside its directory");
            checkpoint->files.push_back(std::make_unique<SafeTensorsFile>(shard));
            const SafeTensorsFile& tensors = *checkpoint->files.back();
            if (tensors.file.size != entry.at("bytes").get<uint64_t>())
                throw std::runtime_error(shard + ": is " + std::to_string(tensors.file.size) + " bytes long, not " +
                                         entry.at("bytes").dump());
            if (index++ % ranks == rank) {
                const auto* bytes = reinterpret_cast<const unsigned char*>(tensors.file.data);
                if (hex(uint32_t(crc32_z(0, bytes, tensors.file.size))) != entry.at("crc32"))
                    throw std::runtime_error(shard + ": its CRC32 is wrong");
            }
            for (const auto& [tensor_name, tensor] : tensors.tensors) {
                const auto place = parse_json(tensors.metadata.at(tensor_name));
                Slice s;
                s.name = tensor_name;
                auto range = [&](const char* key, int64_t& first, int64_t& second) {
                    first = whole(place.at(key).at(0));
                    second = whole(place.at(key).at(1));
                };
                range("shape", s.rows, s.cols);
                range("rows", s.first_row, s.local_rows);
                range("cols", s.first_col, s.local_cols);
                range("flat", s.flat_begin, s.flat_end);
                constexpr int64_t largest = int64_t(1) << 30;  // products stay below 2^63, in bytes too
                const bool inside = s.rows <= largest && s.cols <= largest && s.first_row <= s.local_rows &&
                                    s.local_rows <= s.rows && s.first_col <= s.local_cols && s.local_cols <= s.cols;
                s.local_rows -= s.first_row;
                s.local_cols -= s.first_col;
                if (!inside || s.flat_end < s.flat_begin || s.flat_end > s.local_rows * s.local_cols ||
                    tensor.dtype != "F32" || tensor.bytes != size_t(s.size()) * sizeof(float))
                    throw std::runtime_error(shard + ": tensor " + tensor_name + " does not fit its place");
                checkpoint->pieces[tensor_name].push_back({s, tensor.data});
            }
        }
    } catch (const std::exception& error) {
        throw refuse(error.what());
    }
    return checkpoint;
}

// Copies a tensor's elements from the checkpoint's pieces to this rank's slice of it. Throws UserError if the
// checkpoint lacks some of them.
inline void load_slice(Device& device, const Checkpoint& checkpoint, const Slice& slice) {
    std::vector<float> values(slice.size());
    int64_t found = 0;
    const auto pieces = checkpoint.pieces.find(slice.name);
    if (pieces != checkpoint.pieces.end())
        for (const Checkpoint::Piece& piece : pieces->second) {
            const Slice& from = piece.slice;
            if (from.rows != slice.rows || from.cols != slice.cols)
                throw UserError("--load: tensor " + slice.name + " of " + checkpoint.path + " is [" +
                                std::to_string(from.rows) + ", " + std::to_string(from.cols) + "], but here it is [" +
                                std::to_string(slice.rows) + ", " + std::to_string(slice.cols) + "]");
            const int64_t first_row = std::max(from.first_row, slice.first_row),
                          last_row = std::min(from.first_row + from.local_rows, slice.first_row + slice.local_rows);
            const int64_t first_col = std::max(from.first_col, slice.first_col),
                          last_col = std::min(from.first_col + from.local_cols, slice.first_col + slice.local_cols);
            for (int64_t row = first_row; row < last_row && first_col < last_col; ++row) {
                // The row's part in both, as flat ranges of either
                int64_t source = (row - from.first_row) * from.local_cols + first_col - from.first_col;
                int64_t target = (row - slice.first_row) * slice.local_cols + first_col - slice.first_col;
                const int64_t skip = std::max({int64_t(0), from.flat_begin - source, slice.flat_begin - target});
                const int64_t end = std::min({last_col - first_col, from.flat_end - source, slice.flat_end - target});
                if (skip >= end) continue;
                std::memcpy(values.data() + target + skip - slice.flat_begin,
                            piece.bytes + (source + skip - from.flat_begin) * int64_t(sizeof(float)),
                            size_t(end - skip) * sizeof(float));
                found += end - skip;
            }
        }
    if (found != slice.size())
        throw UserError("--load: " + checkpoint.path + " holds " + std::to_string(found) + " of the " +
                        std::to_string(slice.size()) + " elements needed of " + slice.name);
    to_device(device, slice.data, values.data(), values.size());
}

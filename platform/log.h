// --log-file: one JSON object a line, every number with all its digits. A resumed run appends, beginning with a new
// config line.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "platform/device.h"

struct LogFile {
    std::FILE* file = nullptr;
    std::string path;

    LogFile() = default;
    // Throws UserError if the file cannot be opened for appending.
    explicit LogFile(const std::string& path) : file(std::fopen(path.c_str(), "ab")), path(path) {
        if (!file) throw UserError("--log-file " + path + ": " + std::strerror(errno));
    }
    LogFile(LogFile&& other) noexcept { *this = std::move(other); }
    LogFile& operator=(LogFile&& other) noexcept {
        std::swap(file, other.file);
        std::swap(path, other.path);
        return *this;
    }
    ~LogFile() {
        if (file) std::fclose(file);
    }

    // Writes a line, at once; does nothing without a file. A write that fails ends the job, and leaves the lines
    // before.
    void line(const nlohmann::ordered_json& object) {
        if (!file) return;
        const std::string text = object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
        struct stat before = {};
        const bool known = fstat(fileno(file), &before) == 0 && S_ISREG(before.st_mode);
        if (std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0) return;
        const int error = errno;
        if (known && ftruncate(fileno(file), before.st_size) != 0)
            std::fprintf(stderr, "%s ends in half a line\n", path.c_str());
        fail(__FILE__, __LINE__, "write to --log-file " + path, std::strerror(error));
    }
};

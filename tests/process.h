// Running programs under a time limit, and temporary files: for the tests and the benchmark.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

extern char** environ;

struct RunResult {
    int status = -1;  // exit status; 124 at the time limit; 128 + signal if killed
    std::string output;
    double seconds = 0;
};

// Runs a command (argv[0] looked up in PATH) in a process group of its own; returns its status and what it printed.
// `environment` adds or replaces "NAME=value" entries. A child never sees this process's own MPI launcher.
inline RunResult run_command(const std::vector<std::string>& argv, int limit_seconds = 60,
                             const std::vector<std::string>& environment = {}) {
    const auto start = std::chrono::steady_clock::now();
    auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
    int pipes[2];
    if (pipe(pipes) != 0) return {};
    const pid_t child = fork();
    if (child == 0) {
        setpgid(0, 0);
        dup2(open("/dev/null", O_RDONLY), 0);
        dup2(pipes[1], 1);
        dup2(pipes[1], 2);
        close(pipes[0]);
        close(pipes[1]);
        std::vector<std::string> keep;
        for (char** entry = environ; *entry; ++entry) {
            const std::string text = *entry;
            if (text.rfind("PMI", 0) == 0 || text.rfind("HYD", 0) == 0 || text.rfind("MPI_LOCAL", 0) == 0) continue;
            keep.push_back(text.substr(0, text.find('=')));
        }
        std::vector<std::string> values;
        for (const std::string& name : keep) values.push_back(name + "=" + getenv(name.c_str()));
        clearenv();
        for (std::string& value : values) putenv(strdup(value.c_str()));
        for (const std::string& entry : environment) putenv(strdup(entry.c_str()));
        std::vector<char*> arguments;
        for (const std::string& argument : argv) arguments.push_back(strdup(argument.c_str()));
        arguments.push_back(nullptr);
        execvp(arguments[0], arguments.data());
        std::fprintf(stderr, "cannot run %s: %s\n", arguments[0], std::strerror(errno));
        _exit(127);
    }
    close(pipes[1]);
    RunResult result;
    bool killed = false;
    for (;;) {
        pollfd poller{pipes[0], POLLIN, 0};
        poll(&poller, 1, 100);
        if (poller.revents & (POLLIN | POLLHUP)) {
            char buffer[65536];
            const ssize_t count = read(pipes[0], buffer, sizeof buffer);
            if (count <= 0) break;
            result.output.append(buffer, count);
        }
        if (!killed && elapsed() > limit_seconds) {
            killed = true;
            result.output += "\n[killed: still running after " + std::to_string(limit_seconds) + " seconds]\n";
            kill(-child, SIGTERM);  // mpirun ends its ranks, which are not in its process group
            usleep(300000);
            kill(-child, SIGKILL);
        }
        if (killed && elapsed() > limit_seconds + 10) break;
    }
    close(pipes[0]);
    int status = 0;
    waitpid(child, &status, 0);
    result.status = killed ? 124 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result.seconds = elapsed();
    return result;
}

inline std::string mpirun_program() {
    for (const char* path : {"/usr/bin/mpirun.mpich", "/usr/local/bin/mpirun.mpich"})
        if (access(path, X_OK) == 0) return path;
    return "mpirun";
}

// mpirun -np `ranks` argv..., with MPICH's launcher.
inline RunResult mpirun(int ranks, std::vector<std::string> argv, int limit_seconds = 60,
                        const std::vector<std::string>& environment = {}) {
    const std::vector<std::string> launcher = {mpirun_program(), "-np", std::to_string(ranks)};
    argv.insert(argv.begin(), launcher.begin(), launcher.end());
    return run_command(argv, limit_seconds, environment);
}

// This program's own path.
inline std::string self_program() {
    char self[PATH_MAX] = {};
    return readlink("/proc/self/exe", self, sizeof self - 1) < 0 ? "" : self;
}

// A directory that disappears with its owner.
struct TempDir {
    std::filesystem::path path;
    TempDir() {
        std::string name = (std::filesystem::temp_directory_path() / "ptdp-XXXXXX").string();
        path = mkdtemp(name.data());
    }
    ~TempDir() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;
    std::string file(const std::string& name) const { return (path / name).string(); }
};

inline void write_file(const std::string& path, const std::string& contents) {
    std::ofstream(path, std::ios::binary) << contents;
}
inline std::string read_file(const std::string& path) {
    std::ostringstream contents;
    contents << std::ifstream(path, std::ios::binary).rdbuf();
    return contents.str();
}

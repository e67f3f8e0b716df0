// What the tests of the program share: ./train as its users start it.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/harness.h"

using nlohmann::json;
using Words = std::vector<std::string>;

inline std::string program(const char* name) {
    const char* build = std::getenv("BUILD");
    return std::string(build ? build : "build/cpu") + "/" + name;
}
inline std::string train_program() { return program("train"); }

inline Words operator+(Words x, const Words& y) {
    x.insert(x.end(), y.begin(), y.end());
    return x;
}

// A text of `size` bytes in which something can be learned.
inline std::string some_text(int size) {
    std::string text;
    for (int i = 0; int(text.size()) < size; ++i) text += "line " + std::to_string(i * i % 97) + " of the text\n";
    return text.substr(0, size);
}

inline const Words kSmall = {"--num-layers",        "4",  "--hidden-size", "32",  "--num-attention-heads", "4",
                             "--seq-length",        "16", "--eval-iters",  "0",   "--micro-batch-size",    "1",
                             "--global-batch-size", "8",  "--lr",          "3e-4"};

struct Run {
    TempDir dir;
    Run() { write_file(dir.file("text"), some_text(4000)); }
    RunResult operator()(int ranks, const Words& flags, int limit = 60, const Words& environment = {}) const {
        const Words argv = Words{train_program(), "--data-path", dir.file("text")} + flags;
        return ranks == 1 ? run_command(argv, limit, environment) : mpirun(ranks, argv, limit, environment);
    }
    std::vector<json> log(const std::string& name) const {
        std::vector<json> lines;
        std::istringstream text(read_file(dir.file(name)));
        for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
        return lines;
    }
    std::vector<json> lines_of(const std::string& name, const std::string& type) const {
        std::vector<json> chosen;
        for (const json& line : log(name))
            if (line["type"] == type) chosen.push_back(line);
        return chosen;
    }
};

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The process ids in the grid that a run has printed, by rank.
inline std::vector<pid_t> pids_in(const std::string& output) {
    std::vector<pid_t> pids;
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
        int rank = 0;
        char host[64];
        long pid = 0;
        if (std::sscanf(line.c_str(), "%d %63s %ld", &rank, host, &pid) == 3 && rank == int(pids.size()))
            pids.push_back(pid_t(pid));
    }
    return pids;
}

// A job in the background: mpirun and the ranks of ./train that it starts, wherever they are in their lives.
struct RunningJob {
    std::string out;
    RunResult result;
    std::thread thread;

    // `arguments`: mpirun's, such as {"-np", "4", train_program(), ...}; what it prints goes to `out`.
    RunningJob(const Words& arguments, const std::string& out, const Words& environment = {}, int limit = 60)
        : out(out) {
        std::string command = "exec " + mpirun_program();
        for (const std::string& word : arguments) command += " '" + word + "'";
        write_file(out, "");
        thread = std::thread([this, command, out, environment, limit] {
            result = run_command({"sh", "-c", command + " >" + out + " 2>&1"}, limit, environment);
        });
    }
    ~RunningJob() {
        if (thread.joinable()) thread.join();
    }
    RunningJob(const RunningJob&) = delete;
    RunningJob& operator=(const RunningJob&) = delete;

    std::string output() const { return read_file(out); }
    // Waits until condition() holds; false if the time is up first.
    template <class F>
    bool until(F condition, double seconds = 30) const {
        const auto start = std::chrono::steady_clock::now();
        while (!condition()) {
            if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) return false;
            usleep(1000);
        }
        return true;
    }
    bool until_prints(const std::string& text) const {
        return until([&] { return contains(output(), text); });
    }
    // Waits for the end; returns the seconds that took.
    double finish() {
        const auto start = std::chrono::steady_clock::now();
        thread.join();
        result.output = output();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
};

// The processes of ./train whose command line contains `text`, such as a directory's name that only one job has;
// ordered by number, which is not always the order of ranks.
inline std::vector<pid_t> ranks_of(const std::string& text) {
    std::vector<pid_t> pids;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
        const pid_t pid = pid_t(std::atoi(entry.path().filename().c_str()));
        if (pid <= 0 || !contains(read_file(entry.path() / "cmdline"), text)) continue;
        const std::string status = read_file(entry.path() / "status");
        if (status.rfind("Name:\ttrain\n", 0) == 0 && !contains(status, "State:\tZ")) pids.push_back(pid);
    }
    std::sort(pids.begin(), pids.end());
    return pids;
}

// Starts ./train on 4 ranks for ever, calls `harm` with the process ids it printed once it trains, and waits for its
// end.
template <class F>
RunResult harm_a_run(const Run& run, const Words& flags, F harm, double* seconds) {
    RunningJob job(Words{"-np", "4", train_program(), "--data-path", run.dir.file("text"), "--train-iters", "1000000",
                         "--log-interval", "1"} +
                       kSmall + flags,
                   run.dir.file("out"));
    CHECK(job.until_prints("iteration     3/"));
    const std::vector<pid_t> pids = pids_in(job.output());
    CHECK(pids.size() == 4);
    if (pids.size() == 4) harm(pids);
    *seconds = job.finish();
    return job.result;
}

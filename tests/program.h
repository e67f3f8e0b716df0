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

// Starts ./train on 4 ranks for ever, calls `harm` with the process ids it printed once it trains, and waits for its
// end.
template <class F>
RunResult harm_a_run(const Run& run, const Words& flags, F harm, double* seconds) {
    const std::string out = run.dir.file("out");
    std::string command = "exec " + mpirun_program() + " -np 4 " + train_program() + " --data-path " +
                          run.dir.file("text") + " --train-iters 1000000 --log-interval 1";
    for (const std::string& word : kSmall + flags) command += " " + word;
    RunResult result;
    std::thread job([&] { result = run_command({"sh", "-c", command + " >" + out + " 2>&1"}, 60); });
    std::vector<pid_t> pids;
    for (int i = 0; i < 300; ++i) {
        usleep(100000);
        const std::string text = read_file(out);
        if (!contains(text, "iteration     3/")) continue;
        pids = pids_in(text);
        break;
    }
    const auto start = std::chrono::steady_clock::now();
    if (pids.size() == 4) harm(pids);
    job.join();
    *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    CHECK(pids.size() == 4);
    result.output = read_file(out);
    return result;
}

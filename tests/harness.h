// The tests' main program, and how a test starts a world of its own.
//
// A case that needs several ranks runs this same binary under mpirun with `mpirun_self(ranks, "worker: name")`; the
// worker is a TEST_CASE("worker: name" * doctest::skip()), so that it runs only when it is asked for. Every run has a
// time limit, after which all its processes are killed, and reports what its ranks printed (with --comm-timeout they
// say whom they wait for).
#pragma once

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

#include "tests/process.h"

// Runs one worker case of this binary on `ranks` ranks; a rank that waits for half the limit says for whom.
inline RunResult mpirun_self(int ranks, const std::string& worker, std::vector<std::string> environment = {},
                             int limit_seconds = 60) {
    environment.push_back("PTDP_COMM_TIMEOUT=" + std::to_string(limit_seconds / 2));
    return mpirun(ranks, {self_program(), "--no-skip", "--test-case=" + worker, "--no-intro"}, limit_seconds,
                  environment);
}

// The same as a check of the case at hand, with what its ranks printed.
inline void check_worker(int ranks, const std::string& worker, int limit_seconds = 60) {
    CAPTURE(ranks);
    const RunResult result = mpirun_self(ranks, worker, {}, limit_seconds);
    INFO(result.output);
    REQUIRE(result.status == 0);
}
inline int world_size() {
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    return ranks;
}

// Says that this case could not be checked here, and why; tests/run then counts it as skipped, not as passed.
inline void skip(const std::string& reason) { std::printf("[skipped] %s\n", reason.c_str()); }

// What a student reads (`make grade`): `otherwise`, or the mistake whose result theirs is. Results are compared to 1e-3
// of the largest expected magnitude.
struct Mistake {
    std::string what;
    std::vector<double> result;
};
inline std::string hint(const std::vector<float>& actual, const std::string& otherwise,
                        const std::vector<Mistake>& mistakes) {
    for (const Mistake& mistake : mistakes) {
        bool same = mistake.result.size() == actual.size();
        double largest = 0;
        for (double y : mistake.result) largest = std::max(largest, std::abs(y));
        for (size_t i = 0; same && i < actual.size(); ++i)
            same = std::abs(double(actual[i]) - mistake.result[i]) <= 1e-3 * largest;
        if (same) return "hint: " + mistake.what;
    }
    return "hint: " + otherwise;
}

// The exhaustive matrices run only under `make test-full`.
inline bool full_tests() { return std::getenv("PTDP_FULL") != nullptr; }

// Seconds until $PTDP_DEADLINE, when long tests stop by themselves; without one, for ever.
inline double seconds_left() {
    const char* deadline = std::getenv("PTDP_DEADLINE");
    return deadline ? std::max(0.0, std::atof(deadline) - double(time(nullptr))) : 1e9;
}

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    doctest::Context context(argc, argv);
    const int status = context.run();
    MPI_Finalize();
    return status;
}

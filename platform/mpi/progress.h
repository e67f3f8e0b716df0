// Waiting for messages without spinning, for MPI in NCCL's place (nccl.h) and the CUDA stand-in's streams.
#pragma once

#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

namespace standin {

// Something that finishes later: `start` posts its messages, `finished` polls them. `waits_for` describes it for the
// user.
struct Operation {
    std::function<void()> start;
    std::function<bool()> finished;
    std::function<std::string()> waits_for;
    bool started = false, done = false;
};

struct State {
    std::function<bool()> progress_streams = [] { return false; };  // messages that a stream waits for
    std::function<bool()> progress_sends = [] { return false; };    // buffered messages whose sender went on
    // Seconds without progress; 0: none. PTDP_COMM_TIMEOUT counts until --comm-timeout is known.
    double comm_timeout = std::getenv("PTDP_COMM_TIMEOUT") ? std::atof(std::getenv("PTDP_COMM_TIMEOUT")) : 600;
    double waiting_cpu = 0;   // thread CPU seconds spent waiting, so that others can be told from them
    bool rendezvous = false;  // messages block, as NCCL's may: see nccl.h
};
inline State& state() {
    static State state;
    return state;
}

inline double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline double thread_cpu_seconds() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// Says what this rank waits for, and ends the job.
[[noreturn]] inline void timed_out(double waited, const std::string& what) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::fprintf(stderr, "rank %d has waited %.0f seconds without progress in %s\n", rank, waited, what.c_str());
    std::fflush(stderr);
    const double start = wall_seconds();  // let the others say whom they wait for, too
    while (wall_seconds() - start < 1.0) sched_yield();
    MPI_Abort(MPI_COMM_WORLD, 1);
    std::_Exit(1);
}

// comm_timeout for the few MPI calls that cannot be polled: ends the process, and with it the job, unless it is gone
// before.
struct Deadline {
    explicit Deadline(const char* call) {
        const double seconds = state().comm_timeout;
        if (seconds <= 0 || seconds > 1e9) return;
        std::snprintf(text(), kText, "a rank has waited %.0f seconds without progress in %s\n", seconds, call);
        signal(SIGALRM, [](int) {
            if (write(2, text(), std::strlen(text())) >= 0) usleep(300000);  // the launcher must read it first
            _exit(1);
        });
        alarm(unsigned(std::ceil(seconds)));
    }
    ~Deadline() { alarm(0); }
    Deadline(const Deadline&) = delete;
    Deadline& operator=(const Deadline&) = delete;

private:
    static constexpr size_t kText = 128;
    static char* text() {
        static char text[kText];
        return text;
    }
};

// Polls every message of this process once; true if anything moved.
inline bool progress() {
    const bool sent = state().progress_sends();
    return state().progress_streams() || sent;
}

// Returns when condition() holds. Never spins: between polls the core is offered to the other ranks. After comm_timeout
// seconds in which nothing moved, says what is awaited and ends the job.
template <class Condition, class Description>
void wait(Condition condition, Description waits_for) {
    if (condition()) return;
    const double cpu = thread_cpu_seconds();
    double last_progress = wall_seconds();
    while (!condition()) {
        if (progress()) {
            last_progress = wall_seconds();
            continue;
        }
        sched_yield();
        const double waited = wall_seconds() - last_progress;
        if (state().comm_timeout > 0 && waited > state().comm_timeout) timed_out(waited, waits_for());
    }
    state().waiting_cpu += thread_cpu_seconds() - cpu;
}

}  // namespace standin

// Waiting for messages without spinning, for MPI in NCCL's place (nccl.h) and the CUDA stand-in's streams.
#pragma once

#include <sched.h>
#include <time.h>

#include <chrono>
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
    std::function<void(double, const std::string&)> timed_out;
    double comm_timeout = 600;  // seconds without progress; 0: none
    double waiting_cpu = 0;     // thread CPU seconds spent waiting, so that others can be told from them
    bool rendezvous = false;    // messages block, as NCCL's may: see nccl.h
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
        if (state().timed_out && state().comm_timeout > 0 && waited > state().comm_timeout)
            state().timed_out(waited, waits_for());
    }
    state().waiting_cpu += thread_cpu_seconds() - cpu;
}

}  // namespace standin

// --trace: what every rank did, as Chrome trace events in one file that Perfetto and chrome://tracing open: one track
// per rank, clocks aligned.
//
// Times are the host's. On a GPU the host waits for the device at both ends of an event while tracing, so that they are
// the device's too; a traced iteration is then slower than others.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "platform/device.h"
#include "platform/grid.h"
#include "platform/safetensors.h"

// Seconds to add to this rank's now() to get rank 0's: 0 on the same host, else half of the quickest of ten round
// trips. Collective.
inline double clock_offset() {
    int rank = 0, ranks = 1;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    char host[MPI_MAX_PROCESSOR_NAME] = {}, first_host[MPI_MAX_PROCESSOR_NAME] = {};
    int length = 0;
    MPI_CHECK(MPI_Get_processor_name(host, &length));
    std::memcpy(first_host, host, sizeof host);
    MPI_FINISH(MPI_Ibcast, first_host, sizeof first_host, MPI_CHAR, 0, MPI_COMM_WORLD);
    const int elsewhere = std::strcmp(host, first_host) != 0;
    std::vector<int> all(ranks);
    MPI_FINISH(MPI_Iallgather, &elsewhere, 1, MPI_INT, all.data(), 1, MPI_INT, MPI_COMM_WORLD);
    double offset = 0, quickest = 1e300;
    for (int other = 1; other < ranks; ++other) {
        if (!all[other]) continue;
        for (int round = 0; round < 10; ++round) {
            double theirs = 0;
            if (rank == 0) {
                MPI_FINISH(MPI_Irecv, &theirs, 1, MPI_DOUBLE, other, 0, MPI_COMM_WORLD);
                theirs = now();
                MPI_FINISH(MPI_Isend, &theirs, 1, MPI_DOUBLE, other, 0, MPI_COMM_WORLD);
            } else if (rank == other) {
                const double sent = now();
                MPI_FINISH(MPI_Isend, &sent, 1, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD);
                MPI_FINISH(MPI_Irecv, &theirs, 1, MPI_DOUBLE, 0, 0, MPI_COMM_WORLD);
                const double received = now();
                if (received - sent < quickest) {
                    quickest = received - sent;
                    offset = theirs - (sent + received) / 2;
                }
            }
        }
    }
    return offset;
}

// Writes all ranks' events to `path` from rank 0. Collective. A write that fails ends the job.
inline void write_trace(const std::string& path, const Grid& grid, const std::vector<TraceEvent>& events) {
    const double offset = clock_offset();
    double first = 1e300, start = 0;
    for (const TraceEvent& event : events) first = std::min(first, event.start + offset);
    MPI_FINISH(MPI_Iallreduce, &first, &start, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
    const std::string name = "rank " + std::to_string(grid.world_rank) + " (t " + std::to_string(grid.t_rank) + ", d " +
                             std::to_string(grid.d_rank) + ", p " + std::to_string(grid.p_rank) + ")";
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    list.push_back(
        {{"ph", "M"}, {"name", "thread_name"}, {"pid", 0}, {"tid", grid.world_rank}, {"args", {{"name", name}}}});
    for (const TraceEvent& event : events)
        list.push_back({{"ph", "X"},
                        {"name", event.name},
                        {"cat", event.category},
                        {"pid", 0},
                        {"tid", grid.world_rank},
                        {"ts", 1e6 * (event.start + offset - start)},
                        {"dur", 1e6 * (event.end - event.start)}});
    const std::string text = list.dump();
    const std::vector<std::string> texts = gather_texts(text.substr(1, text.size() - 2));
    if (grid.world_rank != 0) return;
    try {
        FileWriter file(path);
        auto write = [&](const std::string& part) { file.write(part.data(), part.size()); };
        write("{\"traceEvents\":[\n");
        for (size_t i = 0; i < texts.size(); ++i) write((i ? ",\n" : "") + texts[i]);
        write("\n],\"displayTimeUnit\":\"ms\"}\n");
        file.finish();
    } catch (const std::runtime_error& error) {
        fail(__FILE__, __LINE__, "write to --trace", error.what());
    }
}

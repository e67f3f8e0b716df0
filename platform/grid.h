// The process grid (§3.2): which tensor, data and pipeline rank this process is, and the groups it talks in.
//
// World rank = t_rank + t * (d_rank + d * p_rank): tensor parallel ranks are neighbours, so they share a node as long
// as t is at most the number of devices in a node (§3.2, takeaway 1). Groups are passed explicitly; there are no
// globals. Every collective goes through the functions below, which count the payload a rank hands over, per group.
#pragma once

#include <mpi.h>
#include <nccl.h>

#include <memory>
#include <new>
#include <string>
#include <vector>

#include "platform/device.h"

#define NCCL_CHECK(call)                                                                          \
    do {                                                                                          \
        const ncclResult_t status_ = (call);                                                      \
        if (status_ != ncclSuccess) fail(__FILE__, __LINE__, #call, ncclGetErrorString(status_)); \
    } while (0)

// A communicator and this rank's place in it. A group of one needs no communicator: its collectives do nothing.
struct Group {
    std::string name;
    std::vector<int> members;  // world ranks
    int rank = 0, size = 1;
    ncclComm_t comm = nullptr;
    double computed_bytes = 0;  // payload of this rank's messages by the formulas below

    // Payload in bytes this rank has sent in the group: counted by the stand-in; NCCL does not tell, so there it is
    // computed.
    double bytes() const {
#ifndef NCCL_OVER_MPI
        return computed_bytes;
#else
        return comm ? double(standin::bytes_sent(comm)) : 0.0;
#endif
    }

    Group() = default;
    ~Group() {
        if (comm) ncclCommDestroy(comm);
    }
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
};

struct Grid {
    int world_rank = 0, world_size = 1;
    int t = 1, d = 1, p = 1;
    int t_rank = 0, d_rank = 0, p_rank = 0;
    Group tensor;     // same d_rank and p_rank
    Group data;       // same t_rank and p_rank
    Group pipeline;   // same t_rank and d_rank, in stage order
    Group embedding;  // the pipeline group's first and last rank, which both hold the tied embedding
    Group model;      // same d_rank: one whole model

    bool first_stage() const { return p_rank == 0; }
    bool last_stage() const { return p_rank == p - 1; }
    int rank_of(int t_rank, int d_rank, int p_rank) const { return t_rank + t * (d_rank + d * p_rank); }
};

// Fills in this rank's group of the given world ranks. Collective over MPI_COMM_WORLD: every rank calls it for its own
// group of each kind, in the same order; a rank that belongs to no group of this kind passes an empty list.
inline void make_group(const Grid& grid, const std::string& name, const std::vector<int>& members, Group& group) {
    group.name = name;
    group.members = members;
    group.size = int(members.size());
    ncclUniqueId id = {};
    for (int i = 0; i < group.size; ++i)
        if (members[i] == grid.world_rank) group.rank = i;
    const bool root = group.size > 1 && group.rank == 0;
    if (root) NCCL_CHECK(ncclGetUniqueId(&id));
    std::vector<ncclUniqueId> ids(grid.world_size);
    MPI_FINISH(MPI_Iallgather, &id, sizeof id, MPI_BYTE, ids.data(), sizeof id, MPI_BYTE, MPI_COMM_WORLD);
    if (group.size > 1) NCCL_CHECK(ncclCommInitRank(&group.comm, group.size, ids[members[0]], group.rank));
}

// Splits MPI_COMM_WORLD, whose size must be t * d * p, into the grid. Collective.
inline std::unique_ptr<Grid> make_grid(int t, int d, int p) {
    auto grid = std::make_unique<Grid>();
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &grid->world_rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &grid->world_size));
    grid->t = t;
    grid->d = d;
    grid->p = p;
    grid->t_rank = grid->world_rank % t;
    grid->d_rank = grid->world_rank / t % d;
    grid->p_rank = grid->world_rank / (t * d);
    std::vector<int> tensor, data, pipeline, embedding, model;
    for (int i = 0; i < t; ++i) tensor.push_back(grid->rank_of(i, grid->d_rank, grid->p_rank));
    for (int i = 0; i < d; ++i) data.push_back(grid->rank_of(grid->t_rank, i, grid->p_rank));
    for (int i = 0; i < p; ++i) pipeline.push_back(grid->rank_of(grid->t_rank, grid->d_rank, i));
    if (p > 1 && (grid->first_stage() || grid->last_stage())) embedding = {pipeline.front(), pipeline.back()};
    for (int stage = 0; stage < p; ++stage)
        for (int i = 0; i < t; ++i) model.push_back(grid->rank_of(i, grid->d_rank, stage));
    make_group(*grid, "tensor", tensor, grid->tensor);
    make_group(*grid, "data", data, grid->data);
    make_group(*grid, "pipeline", pipeline, grid->pipeline);
    make_group(*grid, "embedding", embedding, grid->embedding);
    make_group(*grid, "model", model, grid->model);
    return grid;
}

// Runs step() on every rank, then throws the first rank's std::runtime_error on all of them, if any threw. Collective.
template <class F>
void together(F step) {
    int rank = 0, ranks = 1;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    std::string message;
    int failed = ranks, first = ranks;
    try {
        step();
    } catch (const std::bad_alloc&) {
        message = "out of memory";
        failed = rank;
    } catch (const std::exception& error) {
        message = error.what();
        failed = rank;
    }
    MPI_FINISH(MPI_Iallreduce, &failed, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (first == ranks) return;
    int size = int(message.size());
    MPI_FINISH(MPI_Ibcast, &size, 1, MPI_INT, first, MPI_COMM_WORLD);
    message.resize(size);
    MPI_FINISH(MPI_Ibcast, message.data(), size, MPI_CHAR, first, MPI_COMM_WORLD);
    throw std::runtime_error(message);
}

// Every rank's text on rank 0, in rank order. Collective.
inline std::vector<std::string> gather_texts(const std::string& text) {
    int rank = 0, ranks = 1;
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    int size = int(text.size());
    std::vector<int> sizes(ranks), offsets(ranks, 0);
    MPI_FINISH(MPI_Igather, &size, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
    for (int i = 1; i < ranks; ++i) offsets[i] = offsets[i - 1] + sizes[i - 1];
    std::string all(rank == 0 ? size_t(offsets.back() + sizes.back()) : 0, '\0');
    MPI_FINISH(MPI_Igatherv, text.data(), size, MPI_CHAR, all.data(), sizes.data(), offsets.data(), MPI_CHAR, 0,
               MPI_COMM_WORLD);
    std::vector<std::string> texts;
    for (int i = 0; i < ranks && rank == 0; ++i) texts.push_back(all.substr(offsets[i], sizes[i]));
    return texts;
}

template <class T>
constexpr ncclDataType_t nccl_type() {
    if constexpr (std::is_same_v<T, float>) return ncclFloat32;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return ncclBfloat16;
    if constexpr (std::is_same_v<T, __half>) return ncclFloat16;
    if constexpr (std::is_same_v<T, double>) return ncclFloat64;
    if constexpr (std::is_same_v<T, int32_t>) return ncclInt32;
    if constexpr (std::is_same_v<T, int64_t>) return ncclInt64;
}

// In place: buffer [count] becomes the sum (or `op`) over the group, bitwise the same on every rank.
template <class T>
void all_reduce(Device& device, Group& group, T* buffer, int64_t count, ncclRedOp_t op = ncclSum) {
    if (group.size == 1 || count == 0) return;
    ProfileScope scope(device, "all-reduce (" + group.name + ")");
    TraceScope trace(device, group.name.c_str(), [&] { return "all-reduce (" + group.name + ")"; });
    NCCL_CHECK(ncclAllReduce(buffer, buffer, count, nccl_type<T>(), op, group.comm, device.stream));
    group.computed_bytes += 2.0 * double(count) * sizeof(T) * (group.size - 1) / group.size;
}

// whole [size * count] becomes every rank's part [count], in rank order; `part` may be its own place in `whole`.
template <class T>
void all_gather(Device& device, Group& group, const T* part, T* whole, int64_t count) {
    if (group.size == 1) {
        if (part != whole)
            CUDA_CHECK(cudaMemcpyAsync(whole, part, count * sizeof(T), cudaMemcpyDeviceToDevice, device.stream));
        return;
    }
    ProfileScope scope(device, "all-gather (" + group.name + ")");
    TraceScope trace(device, group.name.c_str(), [&] { return "all-gather (" + group.name + ")"; });
    NCCL_CHECK(ncclAllGather(part, whole, count, nccl_type<T>(), group.comm, device.stream));
    group.computed_bytes += double(count) * sizeof(T) * (group.size - 1);
}

// part [count] becomes this rank's share of the group's sum of whole [size * count]; it may be its own place in
// `whole`.
template <class T>
void reduce_scatter(Device& device, Group& group, const T* whole, T* part, int64_t count) {
    if (group.size == 1) {
        if (part != whole)
            CUDA_CHECK(cudaMemcpyAsync(part, whole, count * sizeof(T), cudaMemcpyDeviceToDevice, device.stream));
        return;
    }
    ProfileScope scope(device, "reduce-scatter (" + group.name + ")");
    TraceScope trace(device, group.name.c_str(), [&] { return "reduce-scatter (" + group.name + ")"; });
    NCCL_CHECK(ncclReduceScatter(whole, part, count, nccl_type<T>(), ncclSum, group.comm, device.stream));
    group.computed_bytes += double(count) * sizeof(T) * (group.size - 1);
}

// buffer [count] of the group's rank `root` goes to all.
template <class T>
void broadcast(Device& device, Group& group, T* buffer, int64_t count, int root) {
    if (group.size == 1) return;
    NCCL_CHECK(ncclBroadcast(buffer, buffer, count, nccl_type<T>(), root, group.comm, device.stream));
    if (group.rank == root) group.computed_bytes += double(count) * sizeof(T) * (group.size - 1);
}

// NCCL's calls over MPI: the same collectives between the same ranks, for machines without a GPU and, as COMM=mpi, for
// several ranks on one GPU, which NCCL refuses.
//
// Everything is built from nonblocking point-to-point messages, for three reasons: waiting polls and yields the core,
// so ranks may outnumber cores; sums run in rank order 0, 1, ..., n-1 at every position, so a result is bitwise the
// same on every rank and never depends on how a buffer was cut; and the bytes counted are what a rank really handed to
// MPI.
//   - ncclSend copies its data and returns: it never waits for its receiver. In rendezvous mode (set_rendezvous) it
//     does not copy, and the groups of a stream run strictly one after another, each complete only when its sends are
//     received: what NCCL allows itself, and what a schedule must survive.
//   - Groups of ncclSend and ncclRecv are pending on their stream until they have arrived; collectives complete at the
//     call.
//   - With a GPU (PTDP_STAGED) data goes through host memory, and groups, too, complete at the call: ranks issue
//     exchanges in one total order, so that this deadlocks no schedule (pipeline.cu).
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "progress.h"

#define NCCL_OVER_MPI
#ifdef __CUDACC__
#define PTDP_STAGED
#endif

enum ncclResult_t {
    ncclSuccess = 0,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5
};
enum ncclRedOp_t { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3 };
enum ncclDataType_t {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclInt64 = 4,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9
};
inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess:
            return "no error";
        case ncclSystemError:
            return "an MPI call failed";
        case ncclInternalError:
            return "internal error";
        case ncclInvalidArgument:
            return "invalid argument";
        case ncclInvalidUsage:
            return "invalid usage";
    }
    return "unknown error";
}

struct ncclUniqueId {
    char internal[128];
};

struct ncclComm {
    std::vector<int> world_ranks;
    int rank = 0;
    int tag = 0;  // of collectives; tag + 1: of sends and receives
    int64_t bytes_sent = 0;

    int size() const { return int(world_ranks.size()); }
};
using ncclComm_t = ncclComm*;

namespace standin {

inline size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
            return 1;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        case ncclInt32:
        case ncclFloat32:
            return 4;
        case ncclInt64:
        case ncclFloat64:
            return 8;
    }
    return 0;
}

// Messages on their way. `buffer` is the copy that a buffered send owns.
struct Messages {
    std::vector<MPI_Request> requests;
    std::vector<int> peers;  // world ranks, one per request
    std::vector<std::vector<char>> buffers;

    bool finished() {
        int all = 1;
        if (!requests.empty()) MPI_Testall(int(requests.size()), requests.data(), &all, MPI_STATUSES_IGNORE);
        return all != 0;
    }
    std::string unfinished_peers() {
        std::string list;
        for (size_t i = 0; i < requests.size(); ++i) {
            int done = 1;
            if (requests[i] != MPI_REQUEST_NULL) MPI_Request_get_status(requests[i], &done, MPI_STATUS_IGNORE);
            if (!done) list += (list.empty() ? "" : ", ") + std::to_string(peers[i]);
        }
        return list;
    }
};

constexpr size_t kLargestMessage = size_t(1) << 30;  // MPI counts are ints
inline int parts_of(size_t bytes) { return int((bytes + kLargestMessage - 1) / kLargestMessage); }

// Copies of messages that have arrived leave their memory for the next: else the heap fills with holes.
inline std::vector<std::vector<char>>& spare_copies() {
    static std::vector<std::vector<char>> spares;
    return spares;
}
inline std::vector<char> copy_of(const char* data, size_t bytes) {
    auto& spares = spare_copies();
    auto best = spares.end();
    for (auto spare = spares.begin(); spare != spares.end(); ++spare)
        if (spare->capacity() >= bytes && (best == spares.end() || spare->capacity() < best->capacity())) best = spare;
    std::vector<char> copy;
    if (best != spares.end()) {
        copy.swap(*best);
        best->swap(spares.back());
        spares.pop_back();
    }
    copy.assign(data, data + bytes);
    return copy;
}

// Posts a message of any size; `buffered` sends from a copy.
inline void post_send(ncclComm_t comm, const void* data, size_t bytes, int peer, int tag, Messages& messages,
                      bool buffered) {
    const char* from = static_cast<const char*>(data);
    if (buffered) {
        messages.buffers.push_back(copy_of(from, bytes));
        from = messages.buffers.back().data();
    }
    const bool blocking = state().rendezvous;
    for (int part = 0; part < parts_of(bytes); ++part) {
        const size_t begin = part * kLargestMessage;
        const int size = int(std::min(kLargestMessage, bytes - begin));
        MPI_Request request;
        (blocking ? MPI_Issend : MPI_Isend)(from + begin, size, MPI_BYTE, comm->world_ranks[peer], tag, MPI_COMM_WORLD,
                                            &request);
        messages.requests.push_back(request);
        messages.peers.push_back(comm->world_ranks[peer]);
    }
    comm->bytes_sent += int64_t(bytes);
}
inline void post_receive(ncclComm_t comm, void* data, size_t bytes, int peer, int tag, Messages& messages) {
    for (int part = 0; part < parts_of(bytes); ++part) {
        const size_t begin = part * kLargestMessage;
        const int size = int(std::min(kLargestMessage, bytes - begin));
        MPI_Request request;
        MPI_Irecv(static_cast<char*>(data) + begin, size, MPI_BYTE, comm->world_ranks[peer], tag, MPI_COMM_WORLD,
                  &request);
        messages.requests.push_back(request);
        messages.peers.push_back(comm->world_ranks[peer]);
    }
}

// The stand-in's own state beside the runtime's.
struct NcclState {
    std::list<Messages> buffered;  // sends whose sender went on
    struct PendingMessage {
        bool send;
        void* data;
        size_t bytes;
        int peer;
        ncclComm_t comm;
    };
    std::vector<PendingMessage> group;
    cudaStream_t group_stream = nullptr;
    int group_depth = 0;
    int communicators = 0;
    std::unique_ptr<std::mt19937> delays;  // PTDP_DELAY_SEED: tests sleep before messages
};
inline NcclState& nccl_state() {
    static NcclState* nccl = [] {
        auto* fresh = new NcclState;
        state().progress_sends = [fresh] {
            const size_t before = fresh->buffered.size();
            fresh->buffered.remove_if([](Messages& messages) {
                if (!messages.finished()) return false;
                for (std::vector<char>& copy : messages.buffers) spare_copies().push_back(std::move(copy));
                return true;
            });
            return fresh->buffered.size() < before;
        };
        if (const char* mode = std::getenv("PTDP_RENDEZVOUS")) state().rendezvous = mode[0] == '1';
        if (const char* seed = std::getenv("PTDP_DELAY_SEED")) {
            int rank = 0;
            MPI_Comm_rank(MPI_COMM_WORLD, &rank);
            fresh->delays = std::make_unique<std::mt19937>(unsigned(std::atoi(seed)) * 1000 + rank);
        }
        return fresh;
    }();
    return *nccl;
}

inline void set_rendezvous(bool on) { state().rendezvous = on; }
inline int64_t bytes_sent(ncclComm_t comm) { return comm->bytes_sent; }

// Fault injection for tests: up to 3 ms before an operation.
inline void random_delay() {
    if (!nccl_state().delays) return;
    const double until = wall_seconds() + 0.003 * double((*nccl_state().delays)()) / 4294967296.0;
    while (wall_seconds() < until) sched_yield();
}

inline void wait_messages(Messages& messages, const char* call) {
    wait([&] { return messages.finished(); },
         [&] { return std::string(call) + " for rank(s) " + messages.unfinished_peers(); });
}

// out [count] = parts[0] op parts[1] op ..., in that order at every position; out may be one of the parts. 16-bit
// floats are added in fp32 (`Sum`) and rounded once.
template <class T, class Sum>
void reduce_parts(const std::vector<const void*>& parts, void* out, size_t count, ncclRedOp_t op) {
    constexpr size_t kRun = 1024;
    Sum sum[kRun];
    for (size_t begin = 0; begin < count; begin += kRun) {
        const size_t n = std::min(kRun, count - begin);
        for (size_t part = 0; part < parts.size(); ++part) {
            const T* x = static_cast<const T*>(parts[part]) + begin;
            if (part == 0)
                for (size_t i = 0; i < n; ++i) sum[i] = Sum(x[i]);
            else if (op == ncclSum)
                for (size_t i = 0; i < n; ++i) sum[i] += Sum(x[i]);
            else if (op == ncclProd)
                for (size_t i = 0; i < n; ++i) sum[i] *= Sum(x[i]);
            else if (op == ncclMax)
                for (size_t i = 0; i < n; ++i) sum[i] = std::max(sum[i], Sum(x[i]));
            else
                for (size_t i = 0; i < n; ++i) sum[i] = std::min(sum[i], Sum(x[i]));
        }
        T* y = static_cast<T*>(out) + begin;
        for (size_t i = 0; i < n; ++i) y[i] = T(sum[i]);
    }
}
inline void reduce_parts(const std::vector<const void*>& parts, void* out, size_t count, ncclDataType_t type,
                         ncclRedOp_t op) {
    switch (type) {
        case ncclInt8:
            return reduce_parts<int8_t, int8_t>(parts, out, count, op);
        case ncclUint8:
            return reduce_parts<uint8_t, uint8_t>(parts, out, count, op);
        case ncclInt32:
            return reduce_parts<int32_t, int32_t>(parts, out, count, op);
        case ncclInt64:
            return reduce_parts<int64_t, int64_t>(parts, out, count, op);
        case ncclFloat16:
            return reduce_parts<__half, float>(parts, out, count, op);
        case ncclBfloat16:
            return reduce_parts<__nv_bfloat16, float>(parts, out, count, op);
        case ncclFloat32:
            return reduce_parts<float, float>(parts, out, count, op);
        case ncclFloat64:
            return reduce_parts<double, double>(parts, out, count, op);
    }
}

// The host's view of a call's device memory: that memory itself where there is no GPU, else a copy, brought in at the
// start if the call reads it and sent back by write(). Waits for what comes before on the stream.
struct HostView {
    char* data;
#ifdef PTDP_STAGED
    void* device;
    std::vector<char> copy;
    cudaStream_t stream;
    HostView(const void* device, size_t bytes, bool reads, cudaStream_t stream)
        : device(const_cast<void*>(device)), copy(bytes), stream(stream) {
        data = copy.data();
        if (reads) cudaMemcpyAsync(data, device, bytes, cudaMemcpyDeviceToHost, stream);
        cudaStreamSynchronize(stream);
    }
    void write() {
        cudaMemcpyAsync(device, data, copy.size(), cudaMemcpyHostToDevice, stream);
        cudaStreamSynchronize(stream);
    }
#else
    HostView(const void* memory, size_t, bool, cudaStream_t stream)
        : data(static_cast<char*>(const_cast<void*>(memory))) {
        wait_stream(stream);
    }
    void write() {}
#endif
};

inline bool valid(ncclComm_t comm, const void* a, const void* b, size_t count, ncclDataType_t type) {
    return comm && size_of(type) > 0 && (count == 0 || (a && b));
}

// Rank j's share of the sum of everybody's `send`: elements [begin[j], begin[j + 1]). Writes this rank's to `out`.
inline void scatter_reduce(ncclComm_t comm, const void* send, void* out, const std::vector<size_t>& begin,
                           ncclDataType_t type, ncclRedOp_t op, const char* call) {
    const size_t size = size_of(type), mine = begin[comm->rank + 1] - begin[comm->rank];
    const char* from = static_cast<const char*>(send);
    std::vector<char> received(mine * size * comm->size());
    std::vector<const void*> parts(comm->size());
    Messages messages;
    for (int peer = 0; peer < comm->size(); ++peer) {
        char* place = received.data() + peer * mine * size;
        parts[peer] = peer == comm->rank ? from + begin[peer] * size : place;
        if (peer != comm->rank) post_receive(comm, place, mine * size, peer, comm->tag, messages);
    }
    for (int peer = 0; peer < comm->size(); ++peer)
        if (peer != comm->rank)
            post_send(comm, from + begin[peer] * size, (begin[peer + 1] - begin[peer]) * size, peer, comm->tag,
                      messages, false);
    wait_messages(messages, call);
    reduce_parts(parts, out, mine, type, op);
}

// Every rank's elements [begin[j], begin[j + 1]) of `whole` go to all the others.
inline void gather_all(ncclComm_t comm, void* whole, const std::vector<size_t>& begin, ncclDataType_t type,
                       const char* call) {
    const size_t size = size_of(type);
    char* place = static_cast<char*>(whole);
    Messages messages;
    for (int peer = 0; peer < comm->size(); ++peer)
        if (peer != comm->rank)
            post_receive(comm, place + begin[peer] * size, (begin[peer + 1] - begin[peer]) * size, peer, comm->tag,
                         messages);
    for (int peer = 0; peer < comm->size(); ++peer)
        if (peer != comm->rank)
            post_send(comm, place + begin[comm->rank] * size, (begin[comm->rank + 1] - begin[comm->rank]) * size, peer,
                      comm->tag, messages, false);
    wait_messages(messages, call);
}

inline std::vector<size_t> even_cuts(size_t count, int parts) {
    std::vector<size_t> begin(parts + 1);
    for (int j = 0; j <= parts; ++j) begin[j] = count / parts * j + std::min<size_t>(j, count % parts);
    return begin;
}
inline std::vector<size_t> equal_parts(size_t each, int parts) {
    std::vector<size_t> begin(parts + 1);
    for (int j = 0; j <= parts; ++j) begin[j] = each * j;
    return begin;
}

}  // namespace standin

// ---------------------------------------------------------------------------------------------------------------------
// Communicators. Messages travel on MPI_COMM_WORLD under the communicator's own tags, which its root chooses.

constexpr int kFirstNcclTag = 1 << 16, kCommunicatorsPerRank = 256;

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    if (!id) return ncclInvalidArgument;
    int root = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &root);
    const int numbers[2] = {root, standin::nccl_state().communicators++ % kCommunicatorsPerRank};
    memset(id, 0, sizeof *id);
    memcpy(id->internal, numbers, sizeof numbers);
    return ncclSuccess;
}

// Collective over the communicator's ranks: they tell the id's maker who they are, and it tells them all.
inline ncclResult_t ncclCommInitRank(ncclComm_t* result, int ranks, ncclUniqueId id, int rank) {
    if (!result || ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    standin::nccl_state();
    int numbers[2], me = 0;
    memcpy(numbers, id.internal, sizeof numbers);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    const int tag = kFirstNcclTag + 2 * (numbers[0] * kCommunicatorsPerRank + numbers[1]), root = numbers[0];
    int* largest_tag = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest_tag, &found);
    if (found && tag + 1 > *largest_tag) return ncclInvalidUsage;

    auto* comm = new ncclComm;
    comm->rank = rank;
    comm->tag = tag;
    comm->world_ranks.assign(ranks, -1);
    auto wait_for = [&](MPI_Request request) {
        standin::Messages message{{request}, {root}, {}};
        standin::wait_messages(message, "ncclCommInitRank");
    };
    MPI_Request request;
    if (me == root) {
        comm->world_ranks[rank] = me;
        for (int i = 1; i < ranks; ++i) {
            int member[2];
            MPI_Irecv(member, 2, MPI_INT, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &request);
            wait_for(request);
            comm->world_ranks[member[0]] = member[1];
        }
        for (int i = 0; i < ranks; ++i) {
            if (i == rank) continue;
            MPI_Isend(comm->world_ranks.data(), ranks, MPI_INT, comm->world_ranks[i], tag + 1, MPI_COMM_WORLD,
                      &request);
            wait_for(request);
        }
    } else {
        int member[2] = {rank, me};
        MPI_Isend(member, 2, MPI_INT, root, tag, MPI_COMM_WORLD, &request);
        wait_for(request);
        MPI_Irecv(comm->world_ranks.data(), ranks, MPI_INT, root, tag + 1, MPI_COMM_WORLD, &request);
        wait_for(request);
    }
    *result = comm;
    return ncclSuccess;
}

inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclInvalidArgument;
    standin::wait([] { return standin::progress(), standin::nccl_state().buffered.empty(); },
                  [] { return std::string("ncclCommDestroy: messages that nobody received"); });
    delete comm;
    return ncclSuccess;
}
inline ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    if (!comm || !count) return ncclInvalidArgument;
    *count = comm->size();
    return ncclSuccess;
}
inline ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    if (!comm || !rank) return ncclInvalidArgument;
    *rank = comm->rank;
    return ncclSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Collectives. Counts are elements of `type`, as in NCCL.

// receive [count] = the sum of every rank's send [count]: a reduce-scatter, then an all-gather. May be in place.
inline ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
    if (!standin::valid(comm, send, receive, count, type)) return ncclInvalidArgument;
    const size_t size = standin::size_of(type);
    const standin::HostView from(send, count * size, true, stream);
    standin::HostView to(receive, count * size, false, stream);
    standin::random_delay();
    const auto begin = standin::even_cuts(count, comm->size());
    standin::scatter_reduce(comm, from.data, to.data + begin[comm->rank] * size, begin, type, op, "ncclAllReduce");
    standin::gather_all(comm, to.data, begin, type, "ncclAllReduce");
    to.write();
    return ncclSuccess;
}

// receive [count] = this rank's share of the sum of send [ranks * count]; may be its own place in send.
inline ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    if (!standin::valid(comm, send, receive, count, type)) return ncclInvalidArgument;
    const size_t bytes = count * standin::size_of(type);
    const standin::HostView from(send, bytes * size_t(comm->size()), true, stream);
    standin::HostView to(receive, bytes, false, stream);
    standin::random_delay();
    standin::scatter_reduce(comm, from.data, to.data, standin::equal_parts(count, comm->size()), type, op,
                            "ncclReduceScatter");
    to.write();
    return ncclSuccess;
}

// receive [ranks * count] = every rank's send [count], in rank order; send may be its own place in receive.
inline ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    if (!standin::valid(comm, send, receive, count, type)) return ncclInvalidArgument;
    const size_t bytes = count * standin::size_of(type);
    const standin::HostView from(send, bytes, true, stream);
    standin::HostView to(receive, bytes * size_t(comm->size()), false, stream);
    standin::random_delay();
    char* mine = to.data + size_t(comm->rank) * bytes;
    if (mine != from.data && bytes > 0) memmove(mine, from.data, bytes);
    standin::gather_all(comm, to.data, standin::equal_parts(count, comm->size()), type, "ncclAllGather");
    to.write();
    return ncclSuccess;
}

// receive [count] = send [count] of rank root.
inline ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    if (!standin::valid(comm, receive, receive, count, type) || root < 0 || root >= comm->size())
        return ncclInvalidArgument;
    const bool sends = comm->rank == root;
    if (sends && count > 0 && !send) return ncclInvalidArgument;
    const size_t bytes = count * standin::size_of(type);
    const standin::HostView from(sends ? send : nullptr, sends ? bytes : 0, sends, stream);
    standin::HostView to(receive, bytes, false, stream);
    standin::random_delay();
    standin::Messages messages;
    if (sends) {
        if (from.data != to.data && bytes > 0) memmove(to.data, from.data, bytes);
        for (int peer = 0; peer < comm->size(); ++peer)
            if (peer != root) standin::post_send(comm, to.data, bytes, peer, comm->tag, messages, false);
    } else {
        standin::post_receive(comm, to.data, bytes, root, comm->tag, messages);
    }
    standin::wait_messages(messages, "ncclBroadcast");
    to.write();
    return ncclSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Point-to-point messages

inline ncclResult_t ncclGroupStart() {
    ++standin::nccl_state().group_depth;
    return ncclSuccess;
}

// Hands the group's messages to its stream. They are posted at once, or, in rendezvous mode, when every earlier group
// of the stream is complete.
inline ncclResult_t ncclGroupEnd() {
    auto& nccl = standin::nccl_state();
    if (nccl.group_depth == 0) return ncclInvalidUsage;
    if (--nccl.group_depth > 0 || nccl.group.empty()) return ncclSuccess;
    standin::random_delay();
#ifdef PTDP_STAGED
    standin::Messages messages;
    std::list<standin::HostView> views;
    for (const auto& message : nccl.group) {
        views.emplace_back(message.data, message.bytes, message.send, nccl.group_stream);
        char* data = views.back().data;
        const int tag = message.comm->tag + 1;
        if (message.send)
            standin::post_send(message.comm, data, message.bytes, message.peer, tag, messages, false);
        else
            standin::post_receive(message.comm, data, message.bytes, message.peer, tag, messages);
    }
    standin::wait_messages(messages, "an exchange (ncclSend, ncclRecv)");
    auto view = views.begin();
    for (const auto& message : nccl.group) {
        if (!message.send) view->write();
        ++view;
    }
    nccl.group.clear();
    return ncclSuccess;
#else
    auto messages = std::make_shared<standin::Messages>();
    auto operation = std::make_shared<standin::Operation>();
    operation->start = [messages, group = std::move(nccl.group)] {
        standin::Messages copies;  // buffered sends: nobody waits for them
        const bool buffered = !standin::state().rendezvous;
        for (const auto& message : group) {
            if (!message.send)
                standin::post_receive(message.comm, message.data, message.bytes, message.peer, message.comm->tag + 1,
                                      *messages);
            else
                standin::post_send(message.comm, message.data, message.bytes, message.peer, message.comm->tag + 1,
                                   buffered ? copies : *messages, buffered);
        }
        if (!copies.requests.empty()) standin::nccl_state().buffered.push_back(std::move(copies));
    };
    operation->finished = [messages] { return messages->finished(); };
    operation->waits_for = [messages] {
        return "an exchange (ncclSend, ncclRecv) for rank(s) " + messages->unfinished_peers();
    };
    nccl.group.clear();
    nccl.group_stream->pending.push_back(operation);
    if (!standin::state().rendezvous) {
        operation->started = true;
        operation->start();
    }
    standin::progress();
    return ncclSuccess;
#endif
}

namespace standin {
inline ncclResult_t add_message(bool send, void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                cudaStream_t stream) {
    if (!valid(comm, data, data, count, type) || peer < 0 || peer >= comm->size() || !stream)
        return ncclInvalidArgument;
    NcclState& nccl = nccl_state();
    if (!nccl.group.empty() && nccl.group_stream != stream) return ncclInvalidUsage;  // one stream per group here
    ncclGroupStart();
    nccl.group_stream = stream;
    nccl.group.push_back({send, data, count * size_of(type), peer, comm});
    return ncclGroupEnd();
}
}  // namespace standin

inline ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return standin::add_message(true, const_cast<void*>(data), count, type, peer, comm, stream);
}
inline ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return standin::add_message(false, data, count, type, peer, comm, stream);
}

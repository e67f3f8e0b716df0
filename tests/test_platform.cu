// What the components take for granted: the stand-in's collectives, messages and GEMM, and the platform's own parts.
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>

#include "platform/data.h"
#include "platform/grid.h"
#include "platform/options.h"
#include "platform/picture.h"
#include "tests/harness.h"
#include "tests/model.h"

#ifndef __CUDACC__  // NCCL's are tested by NVIDIA; several ranks on one GPU it refuses

namespace {

// Value i that `rank` contributes: a small integer, so that sums, products, maxima and minima are exact in every type.
int contribution(ncclRedOp_t op, int rank, size_t i) {
    const int value = int((i * 7 + size_t(rank) * 3) % 5);
    return op == ncclProd ? 1 + (value == 0) : value + 1;  // a product of eight stays below 128
}

int reduced(ncclRedOp_t op, int ranks, size_t i) {
    int result = contribution(op, 0, i);
    for (int rank = 1; rank < ranks; ++rank) {
        const int x = contribution(op, rank, i);
        result = op == ncclSum    ? result + x
                 : op == ncclProd ? result * x
                 : op == ncclMax  ? std::max(result, x)
                                  : std::min(result, x);
    }
    return result;
}

// Every collective of `count` elements a rank, for a type and an operation. Wrong elements are counted.
template <class T>
void check_collectives(const Grid& grid, ncclDataType_t type, ncclRedOp_t op, size_t count, cudaStream_t stream) {
    const ncclComm_t comm = grid.data.comm;
    const int ranks = grid.world_size, rank = grid.world_rank;
    CAPTURE(int(type));
    CAPTURE(int(op));
    CAPTURE(count);
    std::vector<T> mine(count * ranks), out(count * ranks);
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = T(contribution(op, rank, i));
    auto wrong = [&](const std::vector<T>& values, size_t n, auto expected) {
        size_t bad = 0;
        for (size_t i = 0; i < n; ++i) bad += double(values[i]) != double(expected(i));
        return bad;
    };
    REQUIRE(ncclAllReduce(mine.data(), out.data(), count, type, op, comm, stream) == ncclSuccess);
    CHECK(wrong(out, count, [&](size_t i) { return reduced(op, ranks, i); }) == 0);
    out = mine;  // in place
    REQUIRE(ncclAllReduce(out.data(), out.data(), count, type, op, comm, stream) == ncclSuccess);
    CHECK(wrong(out, count, [&](size_t i) { return reduced(op, ranks, i); }) == 0);
    REQUIRE(ncclReduceScatter(mine.data(), out.data(), count, type, op, comm, stream) == ncclSuccess);
    CHECK(wrong(out, count, [&](size_t i) { return reduced(op, ranks, rank * count + i); }) == 0);
    REQUIRE(ncclAllGather(mine.data(), out.data(), count, type, comm, stream) == ncclSuccess);
    CHECK(wrong(out, count * ranks, [&](size_t i) { return contribution(op, int(i / count), i % count); }) == 0);
    for (int root = 0; root < ranks; ++root) {
        out.assign(out.size(), T(9));
        REQUIRE(ncclBroadcast(mine.data(), out.data(), count, type, root, comm, stream) == ncclSuccess);
        CHECK(wrong(out, count, [&](size_t i) { return contribution(op, root, i); }) == 0);
    }
}

}  // namespace

TEST_CASE("worker: collectives" * doctest::skip()) {
    int ranks = 0;
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    const auto grid = make_grid(1, ranks, 1);
    Device device;
    for (ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin})
        for (size_t count : {0, 1, 2, 7, 64, 1000, 5003}) {
            check_collectives<int8_t>(*grid, ncclInt8, op, count, device.stream);
            check_collectives<uint8_t>(*grid, ncclUint8, op, count, device.stream);
            check_collectives<int32_t>(*grid, ncclInt32, op, count, device.stream);
            check_collectives<int64_t>(*grid, ncclInt64, op, count, device.stream);
            check_collectives<__half>(*grid, ncclFloat16, op, count, device.stream);
            check_collectives<__nv_bfloat16>(*grid, ncclBfloat16, op, count, device.stream);
            check_collectives<float>(*grid, ncclFloat32, op, count, device.stream);
            check_collectives<double>(*grid, ncclFloat64, op, count, device.stream);
        }
    // A sum is bitwise the same on every rank and whichever part of a buffer an element lies in
    std::vector<float> x(3000), whole(3000), piece(7);
    for (size_t i = 0; i < x.size(); ++i)
        x[i] = float(philox(uint32_t(i), uint32_t(grid->world_rank), 0, 0, 1).word[0]) / 7;
    REQUIRE(ncclAllReduce(x.data(), whole.data(), x.size(), ncclFloat32, ncclSum, grid->data.comm, device.stream) ==
            ncclSuccess);
    REQUIRE(ncclAllReduce(x.data() + 1001, piece.data(), 7, ncclFloat32, ncclSum, grid->data.comm, device.stream) ==
            ncclSuccess);
    CHECK(std::memcmp(piece.data(), whole.data() + 1001, 7 * sizeof(float)) == 0);
    std::vector<float> first = whole;
    MPI_FINISH(MPI_Ibcast, first.data(), int(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
    CHECK(first == whole);
}

TEST_CASE("collectives: every type, operation, size and place, 2 to 8 ranks") {
    for (int ranks : {2, 3, 4, 5, 8}) {
        CAPTURE(ranks);
        const RunResult result = mpirun_self(ranks, "worker: collectives", {"OMP_NUM_THREADS=1"}, 120);
        CHECK_MESSAGE(result.status == 0, result.output);
    }
}

// Neighbours exchange messages of 4 bytes to 64 MB, several in one group and both ways at once.
TEST_CASE("worker: messages" * doctest::skip()) {
    int ranks = 0;
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    const auto grid = make_grid(1, 1, ranks);
    const ncclComm_t comm = grid->pipeline.comm;
    const int rank = grid->world_rank, next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    Device device;
    cudaStream_t stream = nullptr;
    cudaEvent_t arrived = nullptr;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaEventCreateWithFlags(&arrived, cudaEventDisableTiming));
    for (size_t count : {1, 2, 1000, 16384, 1 << 20, 16 << 20}) {
        CAPTURE(count);
        std::vector<int32_t> up(count), down(count), from_last(count), from_next(count);
        for (size_t i = 0; i < count; ++i) {
            up[i] = int32_t(i) + rank;
            down[i] = -int32_t(i) - rank;
        }
        NCCL_CHECK(ncclGroupStart());
        NCCL_CHECK(ncclSend(up.data(), count, ncclInt32, next, comm, stream));
        NCCL_CHECK(ncclRecv(from_last.data(), count, ncclInt32, last, comm, stream));
        NCCL_CHECK(ncclGroupEnd());
        NCCL_CHECK(ncclGroupStart());
        NCCL_CHECK(ncclRecv(from_next.data(), count, ncclInt32, next, comm, stream));
        NCCL_CHECK(ncclSend(down.data(), count, ncclInt32, last, comm, stream));
        NCCL_CHECK(ncclGroupEnd());
        CUDA_CHECK(cudaEventRecord(arrived, stream));
        // Collectives of another stream may run meanwhile, and the second group's end says the first's
        int one = 1;
        all_reduce(device, grid->model, &one, 1);
        CHECK(one == ranks);
        CUDA_CHECK(cudaEventSynchronize(arrived));
        size_t wrong = 0;
        for (size_t i = 0; i < count; ++i)
            wrong += (from_last[i] != int32_t(i) + last) + (from_next[i] != -int32_t(i) - next);
        CHECK(wrong == 0);
    }
    CUDA_CHECK(cudaEventDestroy(arrived));
    CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_CASE("messages of 4 bytes to 64 MB, buffered and in rendezvous mode") {
    for (int ranks : {2, 3})
        for (const char* rendezvous : {"0", "1"}) {
            CAPTURE(ranks);
            CAPTURE(rendezvous);
            const RunResult result = mpirun_self(
                ranks, "worker: messages", {"OMP_NUM_THREADS=1", std::string("PTDP_RENDEZVOUS=") + rendezvous}, 120);
            CHECK_MESSAGE(result.status == 0, result.output);
        }
}

// Rank 0 receives from rank 1, which is late, then from rank 2, which is not: an event behind both waits for both.
#ifndef PTDP_STAGED
TEST_CASE("the same through host memory, as a GPU build with COMM=mpi does it") {
    const std::string self = self_program();
    const RunResult result =
        run_command({self.substr(0, self.rfind('/')) + "/staged/test_platform", "-tc=collectives*,messages*"}, 300);
    CHECK_MESSAGE(result.status == 0, result.output);
    CHECK(result.output.find("2 passed") != std::string::npos);
}
#endif

TEST_CASE("worker: an event" * doctest::skip()) {
    const auto grid = make_grid(1, 1, 3);
    const ncclComm_t comm = grid->pipeline.comm;
    Device device;
    cudaEvent_t event = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    float values[2] = {0, 0}, mine = float(grid->world_rank);
    if (grid->world_rank == 0) {
        NCCL_CHECK(ncclRecv(&values[0], 1, ncclFloat32, 1, comm, device.stream));
        NCCL_CHECK(ncclRecv(&values[1], 1, ncclFloat32, 2, comm, device.stream));
        CUDA_CHECK(cudaEventRecord(event, device.stream));
        CUDA_CHECK(cudaEventSynchronize(event));
        CHECK(values[0] == 1);
        CHECK(values[1] == 2);
    } else {
        if (grid->world_rank == 1) usleep(300000);
        NCCL_CHECK(ncclSend(&mine, 1, ncclFloat32, 0, comm, device.stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    CUDA_CHECK(cudaEventDestroy(event));
}

TEST_CASE("an event is complete only behind everything before it on its stream") {
    for (const char* rendezvous : {"0", "1"}) {
        const RunResult result = mpirun_self(3, "worker: an event", {std::string("PTDP_RENDEZVOUS=") + rendezvous}, 20);
        CHECK_MESSAGE(result.status == 0, result.output);
    }
}

TEST_CASE("worker: a send without a receiver" * doctest::skip()) {
    const auto grid = make_grid(1, 1, 2);
    Device device;
    standin::state().comm_timeout = 1;
    float value = 1;
    if (grid->world_rank == 1) NCCL_CHECK(ncclRecv(&value, 1, ncclFloat32, 0, grid->pipeline.comm, device.stream));
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    MPI_FINISH(MPI_Ibarrier, MPI_COMM_WORLD);
}

TEST_CASE("a rank that waits for nobody's message says so after --comm-timeout") {
    const RunResult result = mpirun_self(2, "worker: a send without a receiver", {}, 20);
    CHECK(result.status != 0);
    CHECK(result.status != 124);
    CHECK_MESSAGE(result.output.find("rank 1 has waited 1 seconds without progress in an exchange (ncclSend, ncclRecv) "
                                     "for rank(s) 0") != std::string::npos,
                  result.output);
}

TEST_CASE("copies of buffered messages take over each other's memory, and nothing piles up") {
    auto& spares = standin::spare_copies();
    const std::vector<char> message(3000, 'x');
    for (int round = 0; round < 100; ++round) {
        std::vector<std::vector<char>> sent;
        for (size_t bytes : {1000, 3000, 2000}) sent.push_back(standin::copy_of(message.data(), bytes));
        if (round > 0) CHECK(spares.empty());
        for (std::vector<char>& copy : sent) {
            CHECK(std::string(copy.begin(), copy.end()) == std::string(copy.size(), 'x'));
            spares.push_back(std::move(copy));
        }
        REQUIRE(spares.size() == 3);
    }
    const char* largest = spares[1].data();
    CHECK(standin::copy_of(message.data(), 2500).data() == largest);
    spares.clear();
}

TEST_CASE("the stand-in refuses what NCCL and cuBLAS refuse") {
    Device device;
    ncclComm lone;
    lone.world_ranks = {0};
    float x[8] = {};
    CHECK(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, nullptr, device.stream) == ncclInvalidArgument);
    CHECK(ncclAllReduce(nullptr, x, 1, ncclFloat32, ncclSum, &lone, device.stream) == ncclInvalidArgument);
    CHECK(ncclAllGather(x, nullptr, 1, ncclFloat32, &lone, device.stream) == ncclInvalidArgument);
    CHECK(ncclReduceScatter(x, x, 1, ncclDataType_t(99), ncclSum, &lone, device.stream) == ncclInvalidArgument);
    CHECK(ncclBroadcast(x, x, 1, ncclFloat32, 1, &lone, device.stream) == ncclInvalidArgument);
    CHECK(ncclSend(x, 1, ncclFloat32, 1, &lone, device.stream) == ncclInvalidArgument);
    CHECK(ncclRecv(x, 1, ncclFloat32, -1, &lone, device.stream) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);

    const float one = 1, zero = 0;
    auto gemm_status = [&](cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, int lda, int ldb, int ldc,
                           const float* a = nullptr) {
        std::vector<float> matrix(4096);
        if (!a) a = matrix.data();
        return cublasGemmStridedBatchedEx(device.blas, ta, tb, m, n, k, &one, a, CUDA_R_32F, lda, 0, matrix.data(),
                                          CUDA_R_32F, ldb, 0, &zero, matrix.data(), CUDA_R_32F, ldc, 0, 1,
                                          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    };
    CHECK(gemm_status(CUBLAS_OP_N, CUBLAS_OP_N, 4, 5, 6, 4, 6, 4) == CUBLAS_STATUS_SUCCESS);
    CHECK(gemm_status(CUBLAS_OP_N, CUBLAS_OP_N, 4, 5, 6, 3, 6, 4) == CUBLAS_STATUS_INVALID_VALUE);  // lda < m
    CHECK(gemm_status(CUBLAS_OP_T, CUBLAS_OP_N, 4, 5, 6, 5, 6, 4) == CUBLAS_STATUS_INVALID_VALUE);  // lda < k
    CHECK(gemm_status(CUBLAS_OP_N, CUBLAS_OP_N, 4, 5, 6, 4, 5, 4) == CUBLAS_STATUS_INVALID_VALUE);  // ldb < k
    CHECK(gemm_status(CUBLAS_OP_N, CUBLAS_OP_T, 4, 5, 6, 4, 4, 4) == CUBLAS_STATUS_INVALID_VALUE);  // ldb < n
    CHECK(gemm_status(CUBLAS_OP_N, CUBLAS_OP_N, 4, 5, 6, 4, 6, 3) == CUBLAS_STATUS_INVALID_VALUE);  // ldc < m
    CHECK(gemm_status(CUBLAS_OP_N, CUBLAS_OP_N, -1, 5, 6, 4, 6, 4) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(gemm_status(CUBLAS_OP_N, CUBLAS_OP_N, 0, 5, 6, 1, 6, 1) == CUBLAS_STATUS_SUCCESS);
}

TEST_CASE("a GEMM's values do not depend on the number of threads") {
    TestDevice device;
    std::vector<std::array<int64_t, 4>> shapes = {{1, 1, 1, 1},      {3, 5, 7, 1},       {64, 64, 2048, 1},
                                                  {200, 96, 384, 1}, {16, 300, 1536, 1}, {31, 31, 8, 12},
                                                  {128, 128, 64, 3}};
    for (int64_t m : {15, 31, 32, 33, 47, 49, 65, 81, 97})
        for (int64_t n : {1, 2, 17, 33, 50})
            for (int64_t k : {5, 384, 1025, 2100}) shapes.push_back({m, n, k, 1});
    for (const auto& [m, n, k, batch] : shapes)
        for (bool ta : {false, true})
            for (bool tb : {false, true}) {
                CAPTURE(m);
                CAPTURE(n);
                CAPTURE(k);
                const auto a = device.random(m * k * batch, 1), b = device.random(k * n * batch, 2);
                std::vector<std::vector<float>> results;
                for (int threads : {1, 2, 3, 5, 8}) {
                    omp_set_num_threads(threads);
                    auto c = device.random(m * n * batch, 3);
                    gemm(device.device, m, n, k, {a.data, ta ? m : k, m * k, ta}, {b.data, tb ? k : n, k * n, tb},
                         c.data, n, 0.5f, 1.0f, m * n, batch);
                    results.push_back(device.floats(c));
                }
                omp_set_num_threads(1);
                for (const auto& result : results)
                    CHECK(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)) == 0);
            }
}

// The nearest value with `bits` of significand (an implicit one included) and exponents from `lowest` on; ties to even.
double nearest(double x, int bits, int lowest) {
    if (x == 0) return 0;
    int exponent = 0;
    std::frexp(x, &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent - 1, lowest) - (bits - 1));
    return std::nearbyint(x / unit) * unit;
}

TEST_CASE("bf16 and fp16: every value survives, and floats round to the nearest, ties to even") {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        __nv_bfloat16 b;
        b.bits = uint16_t(bits);
        __half h;
        const uint16_t half_bits = uint16_t(bits);
        std::memcpy(&h.value, &half_bits, sizeof h.value);
        const __nv_bfloat16 b_again = float(b);
        const __half h_again = float(h);
        const bool b_nan = (bits & 0x7fff) > 0x7f80, h_nan = (bits & 0x7fff) > 0x7c00;
        if (b_nan)
            REQUIRE((b_again.bits & 0x7fff) > 0x7f80);
        else
            REQUIRE(b_again.bits == b.bits);
        if (!h_nan) REQUIRE(std::memcmp(&h_again, &h, sizeof h) == 0);
    }
    std::mt19937 generator(7);
    for (int i = 0; i < 200000; ++i) {
        // Any mantissa, and one bit beyond the halfway point between two values of either type
        const double mantissa = 1 + (generator() & (i % 3 == 0   ? 0x7f8000u
                                                    : i % 3 == 1 ? 0x7ff000u
                                                                 : 0x7fffffu)) /
                                        8388608.0;
        const float x = float(std::ldexp(i % 2 ? mantissa : -mantissa, int(generator() % 36) - 20));
        REQUIRE(double(float(__nv_bfloat16(x))) == nearest(x, 8, -126));
        if (std::abs(x) < 65504) REQUIRE(double(float(__half(x))) == nearest(x, 11, -14));
    }
    CHECK(!options_detail::finite(float(__half(1e6f))));
    CHECK(!options_detail::finite(float(__nv_bfloat16(3.4e38f))));
}

// A product of T with C in T or fp32 against a double loop, with any number of threads.
template <class T>
void check_gemm16(TestDevice& device, int m, int n, int k, int batch, bool ta, bool tb, bool wide) {
    const double roundoff = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
    auto narrow = [](const std::vector<float>& values) { return std::vector<T>(values.begin(), values.end()); };
    const std::vector<T> a = narrow(device.floats(device.random(int64_t(m) * k * batch, 1))),
                         b = narrow(device.floats(device.random(int64_t(k) * n * batch, 2)));
    const std::vector<float> before = device.floats(device.random(int64_t(m) * n * batch, 3));
    std::vector<std::vector<float>> results;
    for (int threads : {1, 2, 5}) {
        omp_set_num_threads(threads);
        std::vector<float> c = before;
        std::vector<T> c16 = narrow(before);
        const float one = 1, keep = wide ? 1 : 0;
        const cudaDataType type = blas_type<T>();
        REQUIRE(cublasGemmStridedBatchedEx(
                    device.device.blas, tb ? CUBLAS_OP_T : CUBLAS_OP_N, ta ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one,
                    b.data(), type, tb ? k : n, int64_t(k) * n, a.data(), type, ta ? m : k, int64_t(m) * k, &keep,
                    wide ? static_cast<void*>(c.data()) : c16.data(), wide ? CUDA_R_32F : type, n, int64_t(m) * n,
                    batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
        if (!wide) c.assign(c16.begin(), c16.end());
        results.push_back(c);
    }
    omp_set_num_threads(1);
    for (const auto& result : results) CHECK(result == results[0]);
    for (int q = 0; q < batch; ++q)
        for (int i = 0; i < m; ++i)
            for (int j = 0; j < n; ++j) {
                const size_t at = (size_t(q) * m + i) * n + j;
                double sum = wide ? double(before[at]) : 0;
                for (int x = 0; x < k; ++x)
                    sum += double(float(a[size_t(q) * m * k + (ta ? size_t(x) * m + i : size_t(i) * k + x)])) *
                           double(float(b[size_t(q) * k * n + (tb ? size_t(j) * k + x : size_t(x) * n + j)]));
                // Products are exact in fp32; k sums of at most k in size, and one rounding when stored
                const double bound = (k + 1) * 0x1p-24 * (k + 1) + (wide ? 0 : roundoff * std::abs(sum));
                REQUIRE(std::abs(double(results[0][at]) - sum) <= bound);
            }
}

TEST_CASE("16-bit GEMMs against double loops, whatever the number of threads") {
    TestDevice device;
    for (const auto& [m, n, k, batch] : std::vector<std::array<int, 4>>{{1, 1, 1, 1},
                                                                        {3, 5, 7, 1},
                                                                        {33, 17, 64, 1},
                                                                        {64, 96, 200, 1},
                                                                        {47, 130, 33, 3},
                                                                        {65, 31, 129, 2},
                                                                        {128, 64, 1030, 1},
                                                                        {384, 48, 1536, 1},
                                                                        {97, 33, 2100, 1},
                                                                        {48, 192, 3072, 1}})
        for (bool ta : {false, true})
            for (bool tb : {false, true})
                for (bool wide : {false, true}) {
                    CAPTURE(m);
                    CAPTURE(n);
                    CAPTURE(k);
                    CAPTURE(ta);
                    CAPTURE(tb);
                    CAPTURE(wide);
                    check_gemm16<__nv_bfloat16>(device, m, n, k, batch, ta, tb, wide);
                    check_gemm16<__half>(device, m, n, k, batch, ta, tb, wide);
                }
}

#endif  // __CUDACC__

TEST_CASE("the order of samples is a permutation of every epoch") {
    for (int64_t n : {1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097})
        for (uint64_t epoch : {0, 1, 7}) {
            CAPTURE(n);
            std::vector<int> seen(n, 0);
            for (int64_t i = 0; i < n; ++i) {
                const int64_t image = permute(i, n, 1234, epoch);
                REQUIRE(image >= 0);
                REQUIRE(image < n);
                ++seen[image];
            }
            CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
        }
    int same = 0;
    for (int64_t i = 0; i < 1000; ++i) same += permute(i, 1000, 1234, 0) == permute(i, 1000, 1234, 1);
    CHECK(same < 20);
    for (int64_t i = 0; i < 1000; ++i) same += permute(i, 1000, 1234, 0) == permute(i, 1000, 1235, 0);
    CHECK(same < 40);
}

TEST_CASE("windows and splits of a file") {
    TempDir dir;
    std::string text;
    for (int i = 0; i < 10 * 7 + 3; ++i) text += char('0' + i % 10);
    write_file(dir.file("text"), text);
    Options o;
    o.seq_length = 7;
    o.split = "6,3,1";
    o.data_path = dir.file("text");
    const Dataset data = open_dataset(o);
    CHECK(o.vocab_size == 256);
    CHECK(data.windows == 10);  // the tail is dropped
    CHECK(data.training_windows() == 6);
    CHECK(data.validation_windows() == 3);
    CHECK(data.first_test == 9);
    for (int64_t i = 0; i < 10; ++i) {
        const std::vector<int32_t> window = data.window(i);
        REQUIRE(window.size() == 8);
        for (int64_t k = 0; k < 8; ++k) CHECK(window[k] == '0' + (7 * i + k) % 10);
    }
    // One token less, and the last window lacks its target
    write_file(dir.file("text"), text.substr(0, 70));
    CHECK(open_dataset(o).windows == 9);

    write_file(dir.file("tokens.bin"), std::string("\x01\x00\x00\x01\xff\x00\x02\x00", 8));
    o.data_path = dir.file("tokens.bin");
    o.seq_length = 3;
    o.split = "1,0,0";
    o.vocab_size = 257;
    CHECK(open_dataset(o).window(0) == std::vector<int32_t>{1, 256, 255, 2});
    o.vocab_size = 256;
    CHECK_THROWS_AS(open_dataset(o), UserError);
}

TEST_CASE("token files of Megatron-LM and llm.c, made by tests/golden/make_tokens.py, are read token for token") {
    for (const char* name : {"megatron-uint16.bin", "megatron-int32.bin", "llmc.bin"}) {
        CAPTURE(name);
        const TokenFile tokens = open_tokens("--data-path", std::string("tests/golden/") + name);
        CHECK(!tokens.text);
        REQUIRE(tokens.count == 300);
        int64_t wrong = 0;
        for (int64_t k = 0; k < 300; ++k) wrong += tokens.at(k) != (31 * k * k + 7 * k) % 50257;
        CHECK(wrong == 0);
    }
    // What is malformed is refused
    TempDir dir;
    const std::string bin = read_file("tests/golden/megatron-int32.bin"),
                      idx = read_file("tests/golden/megatron-int32.idx");
    write_file(dir.file("x.bin"), bin);
    auto refused = [&](const std::string& index) {
        write_file(dir.file("x.idx"), index);
        CHECK_THROWS_AS(open_tokens("--data-path", dir.file("x.bin")), UserError);
    };
    write_file(dir.file("x.idx"), idx);
    CHECK(open_tokens("--data-path", dir.file("x.bin")).count == 300);
    for (size_t size = 0; size < idx.size(); size += 5) refused(idx.substr(0, size));
    refused(idx + "x");
    for (size_t at : {0, 9, 17, 18, 26, 34, 40, 134}) {
        std::string bad = idx;
        bad[at] = char(bad[at] + 64);
        refused(bad);
    }
    write_file(dir.file("x.idx"), idx);
    write_file(dir.file("x.bin"), bin.substr(4));
    CHECK_THROWS_AS(open_tokens("--data-path", dir.file("x.bin")), UserError);
    const std::string llmc = read_file("tests/golden/llmc.bin");
    for (size_t size : {12, 100, 1023, 1024, 1600}) {
        write_file(dir.file("y.bin"), llmc.substr(0, size));
        CHECK_THROWS_AS(open_tokens("--data-path", dir.file("y.bin")), UserError);
    }
    // Negative and too large ids are named
    std::string negative(8, '\xff');
    write_file(dir.file("z.bin"), bin.substr(0, 1192) + negative);
    write_file(dir.file("z.idx"), idx);
    Options o;
    o.seq_length = 4;
    o.vocab_size = 50257;
    o.data_path = dir.file("z.bin");
    CHECK_THROWS_WITH_AS(open_dataset(o), doctest::Contains("token 298 is -1, not below --vocab-size 50257"),
                         UserError);
}

TEST_CASE("--valid-data-path: one file to train on, another to validate on") {
    TempDir dir;
    write_file(dir.file("train"), std::string(41, 'a'));
    write_file(dir.file("valid"), std::string(25, 'b'));
    Options o;
    o.seq_length = 8;
    o.data_path = dir.file("train");
    o.valid_data_path = dir.file("valid");
    const Dataset data = open_dataset(o);
    CHECK(data.training_windows() == 5);
    CHECK(data.validation_windows() == 3);
    CHECK(data.window(4) == std::vector<int32_t>(9, 'a'));
    CHECK(data.validation_window(2) == std::vector<int32_t>(9, 'b'));
    o.valid_data_path = "tests/golden/llmc.bin";
    CHECK_THROWS_AS(open_dataset(o), UserError);
}

TEST_CASE("--tokenizer-model: text is encoded with a SentencePiece model, and comes back") {
    TempDir dir;
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * i % 97) + " of the text, with words in it\n";
    write_file(dir.file("text"), text);
    for (const bool fallback : {false, true}) {
        const auto status = sentencepiece::SentencePieceTrainer::Train(
            "--input=" + dir.file("text") + " --model_prefix=" + dir.file("model") +
            " --vocab_size=330 --hard_vocab_limit=false --minloglevel=2 --add_dummy_prefix=false --model_type=bpe" +
            (fallback ? " --byte_fallback=true" : ""));
        REQUIRE_MESSAGE(status.ok(), status.ToString());
        Options o;
        o.seq_length = 8;
        o.data_path = dir.file("text");
        o.tokenizer_model = dir.file("model.model");
        const Dataset data = open_dataset(o);
        CHECK(o.vocab_size == data.tokenizer.model->GetPieceSize());
        CHECK(data.training.count < int64_t(text.size()) / 2);
        std::string back;
        for (int64_t i = 0; i < data.training.count; ++i) back += data.tokenizer.decode(int32_t(data.training.at(i)));
        std::string expected = text;
        if (data.tokenizer.newline < 0)
            expected.erase(std::remove(expected.begin(), expected.end(), '\n'), expected.end());
        CHECK(back == expected);
        CHECK((data.tokenizer.newline >= 0) == fallback);  // <0x0A>
        o.prompt = "the text";
        CHECK(!encode_prompt(data, o).empty());
    }
    Options o;
    o.data_path = o.tokenizer_model = dir.file("text");
    CHECK_THROWS_WITH_AS(open_dataset(o), doctest::Contains("is not a readable SentencePiece model"), UserError);
}

TEST_CASE("safetensors: what is written is read; what is malformed is refused") {
    TempDir dir;
    SafeTensorsWriter writer;
    writer.add("a", {2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6});
    writer.add("b", {1}, std::vector<double>{2.5});
    writer.write(dir.file("file"));
    const SafeTensorsFile file(dir.file("file"));
    CHECK(file.at("a").floats() == std::vector<float>{1, 2, 3, 4, 5, 6});
    CHECK(file.at("a").shape == std::vector<int64_t>{2, 3});
    CHECK(file.at("b").dtype == "F64");
    CHECK_THROWS(file.at("c"));
    CHECK_THROWS(file.at("b").floats());

    const std::string whole = read_file(dir.file("file"));
    int refused = 0;
    for (size_t size = 0; size < whole.size(); size += size < 64 ? 1 : 7) {
        write_file(dir.file("part"), whole.substr(0, size));
        try {
            SafeTensorsFile part(dir.file("part"));
        } catch (const std::exception&) {
            ++refused;
            continue;
        }
        FAIL("a truncated file was accepted");
    }
    CHECK(refused > 60);
    auto with_header = [&](const std::string& header, const std::string& bytes) {
        std::string contents(8, '\0');
        const uint64_t length = header.size();
        std::memcpy(contents.data(), &length, 8);
        write_file(dir.file("bad"), contents + header + bytes);
        return dir.file("bad");
    };
    const std::string four(4, '\0');
    CHECK_NOTHROW(SafeTensorsFile(with_header(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", four)));
    for (const char* header : {R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})",
                               R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})",
                               R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})",
                               R"({"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})",
                               R"({"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})",
                               R"({"x":{"dtype":"F32","shape":[1]}})", R"({"x":3})", R"([1])", R"({"x")",
                               R"({"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
                               R"({"x":{"dtype":"F32","shape":"1","data_offsets":[0,4]}})",
                               R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})"})
        CHECK_THROWS_MESSAGE(SafeTensorsFile(with_header(header, four)), header);
    std::string huge(8, '\xff');
    write_file(dir.file("bad"), huge + "{}");
    CHECK_THROWS(SafeTensorsFile(dir.file("bad")));
}

TEST_CASE("options: derived sizes, a config file, and the command line above it") {
    TempDir dir;
    write_file(dir.file("config"), "num-layers=8\nhidden-size=64\nnum-attention-heads=8\nmicro-batch-size=2\n");
    auto parse = [&](std::vector<const char*> words, int ranks) {
        words.insert(words.begin(), "train");
        std::string help;
        Options o = parse_options(int(words.size()), words.data(), &help);
        o.data_path = "x";
        validate(o, ranks);
        return o;
    };
    const std::string config = dir.file("config");
    const Options o = parse({"--config", config.c_str(), "--num-layers", "12", "--tp", "2", "--pp", "2",
                             "--num-layers-per-virtual-pipeline-stage", "2", "--global-batch-size", "16"},
                            8);
    CHECK(o.num_layers == 12);
    CHECK(o.hidden_size == 64);
    CHECK(o.virtual_pipeline_size == 3);
    CHECK(o.data_parallel_size == 2);
    CHECK(o.num_microbatches == 4);
    CHECK(o.schedule == "interleaved");
    CHECK(parse({}, 1).schedule == "1f1b");
    CHECK(parse({}, 3).global_batch_size == 24);
    write_file(dir.file("config"), "no-such-option=1\n");
    CHECK_THROWS_AS(parse({"--config", config.c_str()}, 1), UserError);
    CHECK_THROWS_AS(parse({"--num-layers", "many"}, 1), UserError);
}

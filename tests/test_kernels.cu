// Every kernel as a GPU would run it: the kernels' own tests, built so that each CUDA thread is a fiber
// (platform/cpu/fibers.h), at several block sizes and in several orders of threads and blocks, which must not matter.
#include <set>

#include "tests/harness.h"

namespace {

RunResult run_fibers(const char* program, const std::string& cases, int block, int seed) {
    const char* build = std::getenv("BUILD");
    std::vector<std::string> environment = {"PTDP_FIBER_SEED=" + std::to_string(seed), "OMP_NUM_THREADS=1"};
    if (block > 0) environment.push_back("PTDP_FIBER_BLOCK=" + std::to_string(block));
    return run_command(
        {std::string(build ? build : "build/cpu") + "/fibers/" + program, "--no-intro", "--test-case=" + cases}, 300,
        environment);
}

// What the program says of all results that it read from its device.
std::string results_of(const RunResult& result) {
    const size_t at = result.output.find("results ");
    return at == std::string::npos ? "" : result.output.substr(at, result.output.find('\n', at) - at);
}

}  // namespace

TEST_CASE("kernels are right at every block size, whatever the order of threads and blocks") {
    const std::vector<int> blocks = full_tests() ? std::vector<int>{1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 256, 1024}
                                                 : std::vector<int>{1, 32, 33, 256};
    for (const char* program : {"test_gpt", "test_data_parallel"})
        for (int block : blocks) {
            std::set<std::string> results;
            for (int seed = 1; seed <= (full_tests() ? 20 : 2); ++seed) {
                CAPTURE(program);
                CAPTURE(block);
                CAPTURE(seed);
                const RunResult result = run_fibers(program, "*", block, seed);
                REQUIRE_MESSAGE(result.status == 0, result.output);
                REQUIRE(!results_of(result).empty());
                results.insert(results_of(result));
            }
            CHECK(results.size() == 1);
        }
}

TEST_CASE("block_sum and block_max are right at every block size; kernels with faults are caught") {
    const RunResult sums = run_fibers("fiber_faults", "block_sum*", 0, 1);
    CHECK_MESSAGE(sums.status == 0, sums.output);
    const std::vector<std::pair<const char*, const char*>> faults = {
        {"a barrier", "some threads wait at a barrier that others do not reach"},
        {"a shuffle", "some lanes wait in a shuffle that others do not reach"},
        {"a mask", "a thread takes part in a shuffle whose mask leaves it out"},
        {"beyond an allocation", "access outside of device memory"},
        {"an off-by-one read", "access outside of device memory"},
        {"in the rest of an allocation's last line", "a kernel wrote outside of an allocation of 240 bytes"},
        {"before an allocation", "a kernel wrote outside of an allocation of 256 bytes"}};
    for (const auto& fault : faults) {
        const RunResult result = run_fibers("fiber_faults", std::string("fault: ") + fault.first, 0, 1);
        CAPTURE(result.output);
        CHECK(result.status == 3);
        CHECK_MESSAGE(result.output.find(fault.second) != std::string::npos, fault.second);
    }
    std::set<std::string> results;
    for (int seed = 1; seed <= 5; ++seed)
        results.insert(results_of(run_fibers("fiber_faults", "fault: a race", 0, seed)));
    CHECK(results.size() > 1);
    // What is right only with one thread, as the CPU build runs it, differs with more
    results.clear();
    for (int block : {1, 32})
        results.insert(results_of(run_fibers("fiber_faults", "fault: a missing reduction", block, 1)));
    CHECK(results.size() == 2);
    const RunResult poisoned = run_fibers("fiber_faults", "fault: shared memory nobody wrote", 0, 1);
    CHECK_MESSAGE(poisoned.status == 0, poisoned.output);
}

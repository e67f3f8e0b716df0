// Faults: whatever happens to a rank, and whenever, the job ends, says why, and loses nothing that was saved
// (docs/reliability.md); two hosts; a long run.
#include "platform/checkpoint.h"

#include <sys/resource.h>

#include <random>

#include "tests/bounds.h"
#include "tests/program.h"

namespace {

const Words kLayout = {"--tp", "2", "--pp", "2"};

// A run through all of a rank's life: start-up, training, a checkpoint every few iterations, exit.
struct Life {
    Run run;
    std::string saved = run.dir.file("saved"), out = run.dir.file("out"), log = run.dir.file("log");
    Words words(int iterations) const {
        return Words{train_program(), "--data-path", run.dir.file("text"), "--log-interval", "1"} + kSmall + kLayout +
               Words{"--train-iters", std::to_string(iterations), "--log-file", log,      "--save",
                     saved,           "--save-interval",          "3",          "--keep", "2"};
    }
    std::vector<pid_t> ranks() const { return ranks_of(saved); }
    bool saving() const {
        std::error_code error;
        for (const auto& entry : std::filesystem::directory_iterator(saved, error))
            if (entry.path().extension() == ".part") return true;
        return false;
    }
    // Waits until the job is in that phase.
    bool reach(const RunningJob& job, const std::string& phase) const {
        if (phase == "start-up") return job.until([&] { return ranks().size() == 4; });
        if (phase == "training") return job.until_prints("iteration     4/");
        if (phase == "checkpointing")
            return job.until_prints("iteration     4/") && job.until([&] { return saving(); });
        return job.until_prints("the paper against this run");
    }
    // What is left can be loaded, if there is anything.
    void check_checkpoints() const {
        if (checkpoint_detail::iterations_in(saved).empty()) return;
        const RunResult rest = run(1, kSmall + Words{"--train-iters", "0", "--load", saved});
        CHECK_MESSAGE(rest.status == 0, rest.output);
    }
};

const Words kPhases = {"start-up", "training", "checkpointing", "exit"};

}  // namespace

TEST_CASE(
    "a rank killed with SIGKILL in start-up, training, checkpointing or exit: the job ends, and leaves no process") {
    std::mt19937 random(3);
    std::map<std::string, int> kills;
    for (int round = 0; round < (full_tests() ? 15 : 2); ++round)
        for (const std::string& phase : kPhases) {
            CAPTURE(phase);
            Life life;
            RunningJob job(Words{"-np", "4"} + life.words(phase == "exit" ? 5 : 100000), life.out);
            CHECK(life.reach(job, phase));
            usleep(random() % (phase == "start-up" ? 100000 : 3000));
            const std::vector<pid_t> ranks = life.ranks();
            const bool late = ranks.empty();  // the job was over before
            if (!late) {
                kill(ranks[random() % ranks.size()], SIGKILL);
                ++kills[phase];
            }
            const double seconds = job.finish();
            CAPTURE(job.result.output);
            CHECK((late || phase == "exit" || job.result.status == 0) == (job.result.status == 0 || phase == "exit"));
            CHECK(job.result.status != 124);
            CHECK(seconds < 10);
            CHECK(job.until([&] { return life.ranks().empty(); }, 5));
            life.check_checkpoints();
        }
    for (const auto& [phase, count] : kills) std::printf("%d killed in %s\n", count, phase.c_str());
    for (const char* phase : {"start-up", "training", "checkpointing"}) CHECK(kills[phase] >= 1);
}

TEST_CASE("a rank stopped for two seconds and continued, in any phase: the run ends as if nothing had been") {
    Life quiet;
    {
        RunningJob job(Words{"-np", "4"} + quiet.words(8), quiet.out);
        job.finish();
        REQUIRE_MESSAGE(job.result.status == 0, job.result.output);
    }
    const std::vector<json> expected = quiet.run.lines_of("log", "train");
    REQUIRE(expected.size() == 8);
    for (const std::string& phase : kPhases) {
        CAPTURE(phase);
        Life life;
        RunningJob job(Words{"-np", "4"} + life.words(8), life.out);
        CHECK(life.reach(job, phase));
        const std::vector<pid_t> ranks = life.ranks();
        if (!ranks.empty()) kill(ranks.back(), SIGSTOP);
        usleep(2000000);
        if (!ranks.empty()) kill(ranks.back(), SIGCONT);
        job.finish();
        CHECK_MESSAGE(job.result.status == 0, job.result.output);
        const std::vector<json> lines = life.run.lines_of("log", "train");
        REQUIRE(lines.size() == 8);
        for (int i = 0; i < 8; ++i) {
            CHECK(lines[i]["loss"] == expected[i]["loss"]);
            CHECK(lines[i]["grad_norm"] == expected[i]["grad_norm"]);
        }
        CHECK(checkpoint_detail::iterations_in(life.saved) == std::vector<int64_t>{6, 8});
    }
}

TEST_CASE(
    "a rank silent for longer than --comm-timeout, in any phase: the others say what they wait for, the job ends") {
    for (const std::string& phase : kPhases) {
        CAPTURE(phase);
        Life life;
        Words words = life.words(phase == "exit" ? 5 : 100000) + Words{"--comm-timeout", "2"};
        Words arguments = Words{"-np", "4"} + words;
        if (phase == "start-up") {  // one that never comes to MPI_Init
            std::string command = "kill -STOP $$; exec";
            for (const std::string& word : words) command += " " + word;
            arguments = Words{"-np", "3"} + words + Words{":", "-np", "1", "sh", "-c", command};
        }
        RunningJob job(arguments, life.out, {"PTDP_COMM_TIMEOUT=2"});
        pid_t stopped = 0;
        if (phase != "start-up") {
            CHECK(life.reach(job, phase));
            const std::vector<pid_t> ranks = life.ranks();
            if (!ranks.empty()) kill(stopped = ranks.back(), SIGSTOP);
        }
        const double seconds = job.finish();
        if (stopped) kill(stopped, SIGKILL);
        CAPTURE(job.result.output);
        CHECK(seconds < 12);
        CHECK(job.result.status != 124);
        if (phase == "exit" && job.result.status == 0) continue;  // it had done all its work
        CHECK(job.result.status != 0);
        CHECK(contains(job.result.output, "has waited 2 seconds without progress in "));
        life.check_checkpoints();
    }
}

TEST_CASE("SIGTERM to mpirun ends all ranks; what was saved stays") {
    Life life;
    RunningJob job(Words{"-np", "4"} + life.words(100000), life.out);
    CHECK(job.until_prints("iteration 6 | checkpoint saved"));
    const std::vector<pid_t> ranks = life.ranks();
    REQUIRE(ranks.size() == 4);
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
        const pid_t pid = pid_t(std::atoi(entry.path().filename().c_str()));
        const std::string command = pid > 0 ? read_file(entry.path() / "cmdline") : "";
        if (command.rfind(mpirun_program(), 0) == 0 && contains(command, life.saved)) kill(pid, SIGTERM);
    }
    const double seconds = job.finish();
    CAPTURE(job.result.output);
    CHECK(job.result.status != 0);
    CHECK(seconds < 10);
    CHECK(job.until([&] { return life.ranks().empty(); }, 5));
    CHECK(!checkpoint_detail::iterations_in(life.saved).empty());
    life.check_checkpoints();
}

TEST_CASE("out of memory on one rank: it says so, and the job ends with status 1") {
#ifdef __SANITIZE_ADDRESS__
    return skip("out of memory: AddressSanitizer itself ends a program whose memory runs out");
#endif
    Run run;
    auto words = [&](const char* hidden, const char* iterations) {
        Words model = kSmall;
        *(std::find(model.begin(), model.end(), "--hidden-size") + 1) = hidden;
        return Words{train_program(), "--data-path", run.dir.file("text")} + model + kLayout +
               Words{"--train-iters", iterations, "--log-interval", "1"};
    };
    // What a rank maps whose model is next to nothing
    double base = 0;
    {
        RunningJob job(Words{"-np", "4"} + words("32", "300"), run.dir.file("base"));
        CHECK(job.until_prints("iteration     3/"));
        const std::string status = read_file("/proc/" + std::to_string(pids_in(job.output())[3]) + "/status");
        base = std::atof(status.c_str() + status.find("VmPeak:") + 7);
    }
    REQUIRE(base > 1000);
    // A rank of the large model needs 210 MB more
    for (int mb : {10, 40, 80, 120, 180}) {
        CAPTURE(mb);
        std::string command = "ulimit -v " + std::to_string(int64_t(base) + 1024 * mb) + "; exec";
        for (const std::string& word : words("1024", "3")) command += " " + word;
        RunningJob job(Words{"-np", "3"} + words("1024", "3") + Words{":", "-np", "1", "sh", "-c", command},
                       run.dir.file("out"));
        const double seconds = job.finish();
        CAPTURE(job.result.output);
        CHECK(job.result.status == 1);
        CHECK(seconds < 20);
        CHECK(contains(job.result.output, "rank 3 failed: "));
        CHECK(contains(job.result.output, "out of memory"));
    }
}

TEST_CASE(
    "a write limit reached by the trace, the dump, the log or a model for Hugging Face: status 1, the file, the "
    "reason") {
    struct Case {
        const char *flag, *file;
    };
    for (const Case& c : std::vector<Case>{{"--trace", "/x"},
                                           {"--dump", "/x/dump.safetensors"},
                                           {"--save-hf", "/x/model.safetensors"},
                                           {"--log-file", "/x"}}) {
        CAPTURE(c.flag);
        Run run;
        const std::string path = run.dir.file("x");
        RunningJob job(Words{"-np", "2", train_program(), "--data-path", run.dir.file("text"), "--train-iters", "500",
                             "--pp", "2", "--log-interval", "1", c.flag, path} +
                           kSmall,
                       run.dir.file("out"));
        CHECK(job.until_prints("iteration     3/"));
        const rlimit limit = {1000, 1000};
        CHECK(prlimit(pids_in(job.output())[0], RLIMIT_FSIZE, &limit, nullptr) == 0);
        const double seconds = job.finish();
        CAPTURE(job.result.output);
        CHECK(job.result.status == 1);
        CHECK(seconds < 10);
        CHECK(contains(job.result.output, run.dir.path.string() + c.file));
        CHECK(contains(job.result.output, "File too large"));
        if (std::string(c.flag) == "--log-file") {
            for (const json& line : run.log("x")) CHECK(line.contains("type"));  // no half line
            CHECK(run.log("x").size() >= 3);
        } else {
            CHECK(!std::filesystem::is_regular_file(run.dir.path.string() + c.file));  // no half file
        }
    }
}

TEST_CASE("a rank that fails names itself, the call and the place, and ends the job") {
    Run run;
    double seconds = 0;
    const RunResult result = harm_a_run(
        run, {"--tp", "2", "--pp", "2", "--log-file", run.dir.file("log")},
        [&](const std::vector<pid_t>& pids) {  // its log may not grow any more
            const rlimit limit = {1000, 1000};
            CHECK(prlimit(pids[0], RLIMIT_FSIZE, &limit, nullptr) == 0);
        },
        &seconds);
    CAPTURE(result.output);
    CHECK(result.status != 0);
    CHECK(result.status != 124);
    CHECK(seconds < 10);
    CHECK(contains(result.output, "rank 0 failed: write to --log-file " + run.dir.file("log") + " at "));
    CHECK(contains(result.output, "log.h:"));
    CHECK(contains(result.output, "File too large"));
}

// ---------------------------------------------------------------------------------------------------------------------
// Two hosts

TEST_CASE("two hosts: the main job's layout across two network namespaces") {
    // Two hosts with names and addresses of their own, joined by a cable; mpirun starts its proxies with a script in
    // place of ssh, which enters the namespaces that `unshare` made
    TempDir dir;
    const std::string names[] = {"ptdp-a", "ptdp-b"};
    write_file(dir.file("hosts"), R"(set -e
cd "$1"
for host in a b; do
    unshare --net --uts sh -c "hostname ptdp-$host; ip link set lo up; echo \$\$ >pid-$host.part; mv pid-$host.part pid-$host; exec sleep 300" >/dev/null 2>&1 &
done
for host in a b; do while [ ! -e pid-$host ]; do sleep 0.05; done; done
a=$(cat pid-a) b=$(cat pid-b)
ip link add ptdp-a netns $a type veth peer name ptdp-b netns $b
nsenter -t $a -n ip addr add 10.213.77.1/24 dev ptdp-a
nsenter -t $b -n ip addr add 10.213.77.2/24 dev ptdp-b
nsenter -t $a -n ip link set ptdp-a up
nsenter -t $b -n ip link set ptdp-b up
)");
    write_file(dir.file("enter"), R"(#!/bin/sh
# In place of ssh: enter [options] HOST COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in 10.213.77.1) pid=$(cat DIR/pid-a) ;; *) pid=$(cat DIR/pid-b) ;; esac
shift
exec nsenter -t "$pid" -n -u sh -c "$*"
)");
    std::string enter = read_file(dir.file("enter"));
    for (size_t at; (at = enter.find("DIR")) != std::string::npos;) enter.replace(at, 3, dir.path.string());
    write_file(dir.file("enter"), enter);
    std::filesystem::permissions(dir.file("enter"), std::filesystem::perms::owner_all);
    const RunResult made = run_command({"sh", dir.file("hosts"), dir.path.string()}, 20);
    auto kill_hosts = [&] {
        for (const char* host : {"pid-a", "pid-b"})
            if (const int pid = std::atoi(read_file(dir.file(host)).c_str()); pid > 1) kill(pid, SIGKILL);
    };
    if (made.status != 0) {
        kill_hosts();
        return skip("two hosts: network namespaces are not permitted or not there: " + made.output);
    }
    Run run;
    const Words words = kSmall + Words{"--tp", "2", "--pp", "2", "--vp", "2", "--train-iters", "5"};
    std::string command = "cd '" + std::filesystem::current_path().string() + "' && exec " + mpirun_program() +
                          " -launcher ssh -launcher-exec " + dir.file("enter") +
                          " -hosts 10.213.77.1,10.213.77.2 -ppn 4 -np 8 " +
                          std::filesystem::absolute(train_program()).string() + " --data-path " + run.dir.file("text");
    for (const std::string& word : words + Words{"--log-file", run.dir.file("hosts")}) command += " " + word;
    const RunResult result = run_command({dir.file("enter"), "10.213.77.1", command}, 60);
    kill_hosts();
    CAPTURE(result.output);
    REQUIRE(result.status == 0);
    for (const std::string& name : names) CHECK(contains(result.output, name));  // in the process grid
    REQUIRE(run(8, words + Words{"--log-file", run.dir.file("host")}).status == 0);
    const std::vector<json> lines = run.lines_of("hosts", "train"), expected = run.lines_of("host", "train");
    REQUIRE(lines.size() == 5);
    for (int i = 0; i < 5; ++i) CHECK(lines[i]["loss"] == expected[i]["loss"]);
}

// ---------------------------------------------------------------------------------------------------------------------
// A long run: make soak

TEST_CASE("soak: 2000 iterations, memory flat, losses finite, checkpoints in rotation" * doctest::skip()) {
    Run run;
    const std::string saved = run.dir.file("saved");
    write_file(run.dir.file("text"), some_text(200000));
    RunningJob job(Words{"-np",
                         "8",
                         train_program(),
                         "--data-path",
                         run.dir.file("text"),
                         "--tp",
                         "2",
                         "--pp",
                         "2",
                         "--vp",
                         "2",
                         "--use-distributed-optimizer",
                         "--train-iters",
                         "2000",
                         "--save",
                         saved,
                         "--save-interval",
                         "50",
                         "--keep",
                         "3",
                         "--log-file",
                         run.dir.file("log"),
                         "--log-interval",
                         "1"} +
                       kSmall,
                   run.dir.file("out"), {}, 1200);
    auto resident = [&] {  // MB of all ranks
        double sum = 0;
        for (pid_t pid : ranks_of(saved)) {
            const std::string status = read_file("/proc/" + std::to_string(pid) + "/status");
            const size_t at = status.find("VmRSS:");
            if (at != std::string::npos) sum += std::atof(status.c_str() + at + 6) / 1024;
        }
        return sum;
    };
    std::vector<double> memory;
    for (int i = 200; i < 2000; i += 200) {
        CHECK(job.until(
            [&] {
                return contains(job.output(),
                                "iteration " + std::string(i < 1000 ? 2 : 1, ' ') + std::to_string(i) + "/");
            },
            600));
        memory.push_back(resident());
        CHECK(checkpoint_detail::iterations_in(saved).size() <= 4);  // one may be about to go
    }
    job.finish();
    REQUIRE_MESSAGE(job.result.status == 0, job.result.output);
    std::printf("MB of 8 ranks after 200, 400, ... iterations:");
    for (double mb : memory) std::printf(" %.0f", mb);
    std::printf("\n");
    for (double mb : memory) CHECK(mb <= 1.01 * memory[0]);
    const std::vector<json> lines = run.lines_of("log", "train");
    REQUIRE(lines.size() == 2000);
    for (const json& line : lines) REQUIRE(line["loss"].is_number());  // null, if it is not finite
    CHECK(lines.back()["loss"].get<double>() < lines.front()["loss"].get<double>() - 1);
    CHECK(checkpoint_detail::iterations_in(saved) == std::vector<int64_t>{1900, 1950, 2000});
}

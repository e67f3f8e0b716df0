// Schedules as data: replays of all ranks on the host, with the streams and waits that the programs prescribe and with
// messages that block.
#include "pipeline.cu"

#include <set>

#include "tests/harness.h"

namespace {

// Every microbatch goes through every chunk once forward and once backward, backwards in microbatch order per chunk,
// and never backward before forward.
void check_complete(const Schedule& schedule) {
    for (const auto& ops : schedule.ranks) {
        REQUIRE(ops.size() == size_t(2 * schedule.m * schedule.v));
        std::set<std::pair<int, int>> forwarded, backwarded;
        std::vector<int> next(schedule.v, 0);
        for (const Op& op : ops) {
            const auto key = std::make_pair(op.microbatch, op.chunk);
            if (op.forward) {
                REQUIRE(forwarded.insert(key).second);
            } else {
                REQUIRE(forwarded.count(key) == 1);
                REQUIRE(backwarded.insert(key).second);
                REQUIRE(op.microbatch == next[op.chunk]++);
            }
        }
        REQUIRE(backwarded.size() == size_t(schedule.m * schedule.v));
    }
}

void check_replay(ScheduleKind kind, int p, int v, int m) {
    CAPTURE(p);
    CAPTURE(v);
    CAPTURE(m);
    const Schedule schedule = make_schedule(kind, p, v, m);
    check_complete(schedule);
    const Program program = compile(schedule);
    for (double backward : {1.0, 1.5, 2.0}) {
        CAPTURE(backward);
        const Replay replayed = replay(schedule, program, uniform_cost(1, backward));
        REQUIRE(replayed.deadlock == "");
        for (int rank = 0; rank < p; ++rank) {
            REQUIRE(replayed.ops[rank].size() == schedule.ranks[rank].size());
            REQUIRE(replayed.in_flight[rank] == in_flight_formula(kind, p, rank, v, m));
        }
        // Sums of multiples of 1/2 are exact
        const double ideal = m * v * (1 + backward);
        REQUIRE((replayed.makespan - ideal) * v * m == (p - 1) * ideal);
        // No operation starts before its input is made
        std::map<std::tuple<bool, int, int>, double> made;
        for (int rank = 0; rank < p; ++rank)
            for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
                const Op& op = schedule.ranks[rank][i];
                made[{op.forward, op.chunk * p + rank, op.microbatch}] = replayed.ops[rank][i].end;
            }
        for (int rank = 0; rank < p; ++rank)
            for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
                const Op& op = schedule.ranks[rank][i];
                const int stage = op.chunk * p + rank;
                const double start = replayed.ops[rank][i].start;
                if (op.forward && stage > 0) REQUIRE(made.at({true, stage - 1, op.microbatch}) <= start);
                if (!op.forward && stage < p * v - 1) REQUIRE(made.at({false, stage + 1, op.microbatch}) <= start);
                if (!op.forward) REQUIRE(made.at({true, stage, op.microbatch}) <= start);
            }
        // With messages that take time nothing deadlocks either
        REQUIRE(replay(schedule, program, uniform_cost(1, backward), 0.25).deadlock == "");
    }
}

}  // namespace

TEST_CASE("replay: GPipe and 1F1B for p = 1..8, m = 1..6p") {
    for (int p = 1; p <= 8; ++p)
        for (int m = 1; m <= 6 * p; ++m) {
            check_replay(ScheduleKind::gpipe, p, 1, m);
            check_replay(ScheduleKind::one_f_one_b, p, 1, m);
        }
}

TEST_CASE("replay: interleaved 1F1B for p = 2..8, v = 2..4, m = p..6p") {
    for (int p = 2; p <= 8; ++p)
        for (int v = 2; v <= 4; ++v)
            for (int m = p; m <= 6 * p; m += p) check_replay(ScheduleKind::interleaved, p, v, m);
}

TEST_CASE("1F1B and interleaved 1F1B are the paper's Figure 4") {
    auto text = [](ScheduleKind kind, int rank, int v, int m) {
        std::string list;
        for (const Op& op : schedule_ops(kind, 4, rank, v, m))
            list += std::string(list.empty() ? "" : " ") + (op.forward ? "F" : "B") +
                    std::to_string(op.microbatch + 1) + (v > 1 ? std::string(1, char('a' + op.chunk)) : "");
        return list;
    };
    CHECK(text(ScheduleKind::one_f_one_b, 0, 1, 8) == "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8");
    CHECK(text(ScheduleKind::one_f_one_b, 3, 1, 8) == "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8");
    CHECK(text(ScheduleKind::gpipe, 2, 1, 3) == "F1 F2 F3 B1 B2 B3");
    CHECK(text(ScheduleKind::interleaved, 3, 2, 8) ==
          "F1a F2a F3a F4a F1b B1b F2b B2b F3b B3b F4b B4b F5a B1a F6a B2a F7a B3a F8a B4a F5b B5b F6b B6b F7b B7b F8b "
          "B8b B5a B6a B7a B8a");
}

TEST_CASE("a list that waits for itself is noticed") {
    Schedule schedule = make_schedule(ScheduleKind::one_f_one_b, 2, 1, 2);
    std::swap(schedule.ranks[1][0], schedule.ranks[1][1]);  // backward before forward
    CHECK_THROWS_AS(compile(schedule), std::logic_error);
}

TEST_CASE("messages issued inline, one by one, deadlock when they block: the replay sees it") {
    // Every rank's exchanges in the order of its own list instead of the common order of ticks
    const Schedule schedule = make_schedule(ScheduleKind::one_f_one_b, 4, 1, 8);
    Program program = compile(schedule);
    for (auto& steps : program.ranks) {
        std::vector<Step> exchanges;
        for (const Step& step : steps)
            if (!step.is_op) exchanges.push_back(step);
        std::reverse(exchanges.begin(), exchanges.end());
        size_t next = 0;
        if (&steps == &program.ranks[1])
            for (Step& step : steps)
                if (!step.is_op) step.exchange = exchanges[next++].exchange;
    }
    CHECK(replay(schedule, program, uniform_cost(1, 2)).deadlock != "");
}

// Schedules as pictures (§2.2, Figures 3 and 4), drawn from the tables that `train` runs.
//
//   ./plan --draw-schedule --schedule interleaved --pp 4 --vp 2 --microbatches 8
//
// Prints the timeline of every device and the bubble that the replay of all ranks gives, beside the paper's formula.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>

#include "pipeline.cu"
#include "platform/options.h"
#include "platform/picture.h"

struct PlanOptions {
    bool draw_schedule = false;
    std::string schedule;        // default: interleaved if v > 1, else 1f1b
    int64_t p = 4, v = 1;        // pipeline ranks, model chunks per rank
    int64_t m = 8;               // microbatches
    double forward_time = 1;     // of a microbatch on one device: all its chunks
    double backward_time = 0;    // 0: twice the forward's
    std::string svg;             // file
    std::string color = "auto";  // auto, always or never
};

inline void add_options(CLI::App& app, PlanOptions& o) {
    app.option_defaults()->always_capture_default();
    app.add_flag("--draw-schedule", o.draw_schedule, "draw a pipeline schedule's timeline");
    app.add_option("--schedule", o.schedule, "gpipe, 1f1b or interleaved; default: interleaved if v > 1, else 1f1b");
    app.add_option("--pipeline-model-parallel-size,--pp", o.p, "p: ranks in the pipeline");
    app.add_option("--virtual-pipeline-size,--vp", o.v, "v: model chunks per rank");
    app.add_option("--microbatches", o.m, "m: microbatches per iteration");
    app.add_option("--forward-time", o.forward_time, "time of a microbatch's forward on one device");
    app.add_option("--backward-time", o.backward_time, "of its backward; 0: twice the forward's");
    app.add_option("--svg", o.svg, "also write the picture to this SVG file");
    app.add_option("--color", o.color, "auto (when the output is a terminal), always or never");
}

// Checks the options and fills in what follows from them. Throws UserError.
inline void validate(PlanOptions& o) {
    using namespace options_detail;
    in_range("--pipeline-model-parallel-size", o.p, 1, 256);
    in_range("--virtual-pipeline-size", o.v, 1, 64);
    in_range("--microbatches", o.m, 1, 4096);
    if (!(o.forward_time > 0 && o.forward_time < 1e9))
        throw UserError("--forward-time is " + std::to_string(o.forward_time) + ": it must be above 0");
    if (!(o.backward_time >= 0 && o.backward_time < 1e9))
        throw UserError("--backward-time is " + std::to_string(o.backward_time) + ": it must be 0 or above");
    if (o.backward_time == 0) o.backward_time = 2 * o.forward_time;
    if (!o.schedule.empty()) one_of("--schedule", o.schedule, kSchedules);
    one_of("--color", o.color, {"auto", "always", "never"});
    if (o.v > 1 && o.p == 1)
        throw UserError("--virtual-pipeline-size " + text(o.v) +
                        " needs a pipeline, but --pipeline-model-parallel-size is 1: use 2 or more");
    choose_schedule(o.schedule, o.v);
    if (o.v > 1 && o.m % o.p != 0)
        throw UserError("--microbatches " + text(o.m) + " is not a multiple of --pipeline-model-parallel-size " +
                        text(o.p) + ", as --schedule interleaved needs: nearest valid numbers are " +
                        nearest_multiples(o.m, o.p));
}

inline void draw_schedule(const PlanOptions& o) {
    const int p = int(o.p), v = int(o.v), m = int(o.m);
    const Schedule schedule = make_schedule(schedule_kind(o.schedule), p, v, m);
    const Replay replayed = replay(schedule, compile(schedule), uniform_cost(o.forward_time / v, o.backward_time / v));
    const std::vector<PictureRow> rows = picture_rows(schedule, replayed.ops);
    char title[256];
    std::snprintf(title, sizeof title, "%s: p = %d, v = %d, m = %d, t_f = %g, t_b = %g", o.schedule.c_str(), p, v, m,
                  o.forward_time, o.backward_time);
    if (!o.svg.empty()) {
        std::ofstream file(o.svg, std::ios::binary);
        file << draw_svg(rows, title, v > 1);
        file.close();
        if (!file) throw UserError("--svg " + o.svg + ": cannot write");
    }
    const bool colour = o.color == "always" || (o.color == "auto" && isatty(1));
    std::printf("%s\n%s", title, draw_text(rows, readable_scale(rows, v > 1), v > 1, colour).c_str());
    if (!colour)
        std::printf("(microbatch%s; '-' forward, '=' backward, '.' bubble)\n", v > 1 ? " and chunk, a, b, ..." : "");
    std::printf("bubble / ideal time: %.6f replayed, (p - 1) / (v m) = %.6f by the formula\n",
                bubble_of(schedule, replayed), bubble_formula(p, v, m));
    std::printf("chunk activations in flight, at most, per device:");
    for (int rank = 0; rank < p; ++rank) std::printf(" %d", replayed.in_flight[rank]);
    std::printf(" (each 1/%d of a device's layers)\n", v);
}

int main(int argc, char** argv) {
    PlanOptions options;
    CLI::App app{"Draws the schedules of pipeline parallelism (PTD-P, SC'21).", "plan"};
    add_options(app, options);
    try {
        app.parse(argc, argv);
        if (!options.draw_schedule) {
            if (argc > 1) throw UserError("nothing to do: give --draw-schedule");
            std::printf("%s", app.help().c_str());
            return 0;
        }
        validate(options);
        draw_schedule(options);
    } catch (const CLI::CallForHelp&) {
        std::printf("%s", app.help().c_str());
    } catch (const CLI::ParseError& error) {
        std::fprintf(stderr, "plan: %s (--help lists the options)\n", error.what());
        return 2;
    } catch (const UserError& error) {
        std::fprintf(stderr, "plan: %s\n", error.what());
        return 2;
    }
    return 0;
}

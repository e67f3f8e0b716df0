// Timelines as pictures: a row per device, time to the right, as in the paper's Figures 3 and 4. `plan` draws schedules
// with it, `train` the iteration it has measured.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

// One operation of a row: [start, end) in any unit of time.
struct PictureOp {
    bool forward = true;
    int microbatch = 0;  // counted from 1 in pictures, as in the paper
    int chunk = 0;
    double start = 0, end = 0;
};
using PictureRow = std::vector<PictureOp>;

// A chunk's letter follows the microbatch when there are several chunks: a, b, ... (A, B, ... in a backward).
inline std::string picture_label(const PictureOp& op, bool chunks) {
    std::string label = std::to_string(op.microbatch + 1);
    if (chunks) label += char((op.forward ? 'a' : 'A') + op.chunk % 26);
    return label;
}

inline double picture_end(const std::vector<PictureRow>& rows) {
    double end = 0;
    for (const PictureRow& row : rows)
        for (const PictureOp& op : row) end = std::max(end, op.end);
    return end;
}

// Text, `columns_per_unit` columns to a unit of time. Without colour a forward is filled with '-', a backward with '=',
// and '.' is a bubble; with colour forwards are blue and backwards green, later chunks lighter.
inline std::string draw_text(const std::vector<PictureRow>& rows, double columns_per_unit, bool chunks, bool colour) {
    const int width = int(std::lround(picture_end(rows) * columns_per_unit));
    const int forward_colours[] = {27, 75, 117, 153}, backward_colours[] = {28, 71, 114, 157};
    std::string text;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
        char name[32];
        std::snprintf(name, sizeof name, "device %-3zu", rank + 1);
        text += name;
        int column = 0;
        for (const PictureOp& op : rows[rank]) {
            const int begin = std::max(column, int(std::lround(op.start * columns_per_unit)));
            const int end = int(std::lround(op.end * columns_per_unit));
            if (end <= begin) continue;
            text += std::string(begin - column, colour ? ' ' : '.');
            std::string cell = picture_label(op, chunks);
            const int room = end - begin;
            if (int(cell.size()) > std::max(room - 1, 1)) cell.clear();  // no room for the label
            const char fill = colour ? ' ' : op.forward ? '-' : '=';
            if (cell.size() < size_t(room)) cell += std::string(room - cell.size(), fill);
            if (!colour && room > 1) cell.back() = ' ';
            if (colour) {
                const int shade = (op.forward ? forward_colours : backward_colours)[op.chunk % 4];
                const std::string last = room > 1 ? "\x1b[0m " : "\x1b[0m";
                if (room > 1) cell.pop_back();
                cell = "\x1b[48;5;" + std::to_string(shade) + "m\x1b[38;5;" + (op.chunk % 4 == 0 ? "231" : "16") + "m" +
                       cell + last;
            }
            text += cell;
            column = end;
        }
        text += std::string(std::max(0, width - column), colour ? ' ' : '.');
        text += '\n';
    }
    return text;
}

// The least columns per unit of time at which every operation has room for its label and a gap.
inline double readable_scale(const std::vector<PictureRow>& rows, bool chunks) {
    double scale = 0;
    for (const PictureRow& row : rows)
        for (const PictureOp& op : row)
            scale = std::max(scale, double(picture_label(op, chunks).size() + 1) / (op.end - op.start));
    return scale;
}

// The same as a scalable picture: one rectangle per operation with its microbatch in it.
inline std::string draw_svg(const std::vector<PictureRow>& rows, const std::string& title, bool chunks) {
    const double unit = 9.0 * readable_scale(rows, chunks), height = 26, left = 80, top = 34;
    const char* forward_colours[] = {"#2f6fde", "#8fb8f6", "#c3d9fb", "#e3eefe"};
    const char* backward_colours[] = {"#2e8b47", "#93cf9f", "#c3e6ca", "#e2f4e6"};
    char line[512];
    std::string svg;
    std::snprintf(line, sizeof line,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" "
                  "font-size=\"12\">\n",
                  left + picture_end(rows) * unit + 10, top + double(rows.size()) * height + 10);
    svg += line;
    svg += "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"8\" y=\"20\">" + title + "</text>\n";
    for (size_t rank = 0; rank < rows.size(); ++rank) {
        const double y = top + double(rank) * height;
        std::snprintf(line, sizeof line,
                      "<text x=\"8\" y=\"%.1f\">device %zu</text>\n<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" "
                      "height=\"%.1f\" fill=\"#dddddd\"/>\n",
                      y + 17, rank + 1, left, y + 1, picture_end(rows) * unit, height - 2);
        svg += line;
        for (const PictureOp& op : rows[rank]) {
            const int shade = op.chunk % 4;
            const double x = left + op.start * unit, width = (op.end - op.start) * unit;
            std::snprintf(line, sizeof line,
                          "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\" stroke=\"white\"/>"
                          "<text x=\"%.2f\" y=\"%.1f\" text-anchor=\"middle\" fill=\"%s\">%s</text>\n",
                          x, y + 1, width, height - 2, (op.forward ? forward_colours : backward_colours)[shade],
                          x + width / 2, y + 17, shade == 0 ? "white" : "black", picture_label(op, chunks).c_str());
            svg += line;
        }
    }
    return svg + "</svg>\n";
}

// ---------------------------------------------------------------------------------------------------------------------
// Plots: lines for what is predicted, dots for what was measured

struct PlotPoint {
    double x = 0, predicted = 0, measured = 0;
};
struct PlotSeries {
    std::string name;
    std::vector<PlotPoint> points;
};

// An SVG picture with labelled axes, x on a logarithmic scale to the base 2 and y from 0.
inline std::string plot_svg(const std::string& title, const std::string& x_label, const std::string& y_label,
                            const std::vector<PlotSeries>& series) {
    const double width = 640, height = 400, left = 60, right = 150, top = 40, bottom = 50;
    double least = 1e300, most = 0, highest = 0;
    for (const PlotSeries& one : series)
        for (const PlotPoint& point : one.points) {
            least = std::min(least, point.x);
            most = std::max(most, point.x);
            highest = std::max({highest, point.predicted, point.measured});
        }
    const double span = std::max(std::log2(most / least), 1e-9);
    auto x_of = [&](double x) { return left + (width - left - right) * std::log2(x / least) / span; };
    auto y_of = [&](double y) { return height - bottom - (height - top - bottom) * y / (1.05 * highest); };
    std::string svg;
    auto put = [&](const char* format, auto... values) {
        char text[512];
        std::snprintf(text, sizeof text, format, values...);
        svg += text;
    };
    put("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" "
        "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
        width, height);
    put("<text x=\"%.0f\" y=\"22\" font-size=\"14\">%s</text>\n", left, title.c_str());
    put("<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\">%s</text>\n", (left + width - right) / 2, height - 12,
        x_label.c_str());
    put("<text transform=\"translate(16,%.0f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
        (top + height - bottom) / 2, y_label.c_str());
    const double step = std::pow(10, std::floor(std::log10(highest))) /
                        (highest < 3 * std::pow(10, std::floor(std::log10(highest))) ? 4 : 1);
    for (double y = 0; y <= 1.05 * highest; y += step) {
        put("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", left, y_of(y), width - right,
            y_of(y));
        put("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", left - 6, y_of(y) + 4, y);
    }
    std::set<double> marks;
    for (const PlotSeries& one : series)
        for (const PlotPoint& point : one.points) marks.insert(point.x);
    double last = -1e300;
    for (double x : marks) {
        if (x_of(x) - last < 46) continue;  // labels would overlap
        last = x_of(x);
        put("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%g</text>\n", last, height - bottom + 18, x);
    }
    const char* colours[] = {"#1f5fb4", "#c0392b", "#2e8b57", "#8e44ad"};
    for (size_t i = 0; i < series.size(); ++i) {
        const char* colour = colours[i % 4];
        svg += "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" + std::string(colour) + "\" points=\"";
        for (const PlotPoint& point : series[i].points) put("%.1f,%.1f ", x_of(point.x), y_of(point.predicted));
        svg += "\"/>\n";
        for (const PlotPoint& point : series[i].points)
            put("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>\n", x_of(point.x), y_of(point.measured), colour);
        put("<text x=\"%.1f\" y=\"%.1f\" fill=\"%s\">%s</text>\n", width - right + 12, top + 20.0 * double(i + 1),
            colour, series[i].name.c_str());
    }
    return svg + "</svg>\n";
}

#include "plumb/schedule/render.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "plumb/core/error.h"

namespace plumb {
namespace {

constexpr std::size_t kMostDrawn = 200000;

double check_spans(const Schedule& schedule, const TimeLine& spans) {
  bool fits = spans.size() == schedule.rows.size();
  for (std::size_t rank = 0; fits && rank < spans.size(); ++rank)
    fits = spans[rank].size() == schedule.rows[rank].size();
  if (!fits) {
    throw Error(ErrorKind::InvalidArgument, "the time line does not belong to the schedule " + schedule.name, "",
                "give one span for every entry of every row");
  }
  double end = 0;
  for (const auto& row : spans) {
    for (const Span& span : row) {
      if (!std::isfinite(span.start) || !std::isfinite(span.end) || span.start < 0 || span.end < span.start) {
        throw Error(ErrorKind::InvalidArgument,
                    "the time line has a span from " + std::to_string(span.start) + " to " + std::to_string(span.end));
      }
      end = std::max(end, span.end);
    }
  }
  return end;
}

char letter_of(const Action& action) {
  switch (action.kind) {
    case ActionKind::Forward: return 'F';
    case ActionKind::BackwardInput: return 'I';
    case ActionKind::BackwardWeight: return 'W';
    case ActionKind::FullBackward: return 'B';
    default: return 'X';
  }
}

const char* color_of(const Action& action) {
  switch (action.kind) {
    case ActionKind::Forward: return "#7fb3e6";
    case ActionKind::BackwardInput: return "#f4a261";
    case ActionKind::BackwardWeight: return "#8fce9c";
    case ActionKind::FullBackward: return "#e5989b";
    default: return "#c3a6d8";
  }
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '&')
      result += "&amp;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

}  // namespace

std::string render_text(const Schedule& schedule, const TimeLine& spans, int columns) {
  double end = check_spans(schedule, spans);
  if (columns < 1 || columns > 10000) {
    throw Error(ErrorKind::InvalidArgument, "a time line cannot have " + std::to_string(columns) + " columns");
  }
  std::string text;
  std::size_t digits = std::to_string(schedule.rows.size()).size();
  for (std::size_t rank = 0; rank < spans.size(); ++rank) {
    std::vector<std::array<double, 5>> shares(static_cast<std::size_t>(columns), std::array<double, 5>{});
    constexpr std::string_view kLetters = "FIWBX";
    double busy = 0;
    for (std::size_t i = 0; i < spans[rank].size(); ++i) {
      if (!schedule.rows[rank][i].is_compute() || end <= 0) continue;
      const Span& span = spans[rank][i];
      busy += span.end - span.start;
      double from = span.start / end * columns, to = span.end / end * columns;
      std::size_t which = kLetters.find(letter_of(schedule.rows[rank][i]));
      for (int column = static_cast<int>(from); column < columns && column < to; ++column) {
        shares[column][which] += std::min(to, column + 1.0) - std::max(from, static_cast<double>(column));
      }
    }
    std::string name = std::to_string(rank);
    text += "rank " + std::string(digits - std::min(digits, name.size()), ' ') + name + " |";
    for (const auto& share : shares) {
      auto most = std::max_element(share.begin(), share.end());
      double idle = 1;
      for (double one : share) idle -= one;
      text += *most > 0 && *most >= idle - 1e-9 ? kLetters[static_cast<std::size_t>(most - share.begin())] : '.';
    }
    text += "| " + std::to_string(static_cast<int>(std::lround(end > 0 ? 100 * busy / end : 0))) + "%\n";
  }
  return text;
}

std::string render_svg(const Schedule& schedule, const TimeLine& spans, const SvgOptions& options) {
  double end = check_spans(schedule, spans);
  if (options.width < 1 || options.row_height < 1) {
    throw Error(ErrorKind::InvalidArgument, "a picture needs a width and a row height of at least one pixel");
  }
  if (schedule.num_actions() > kMostDrawn) {
    throw Error(ErrorKind::InvalidArgument,
                "a picture of " + std::to_string(schedule.num_actions()) + " actions is more than any viewer shows", "",
                "draw a smaller schedule, or use the text");
  }
  const int left = 60, top = 28, row = options.row_height;
  int height = top + row * schedule.num_ranks() + 8;
  double scale = end > 0 ? options.width / end : 0;
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + std::to_string(options.width + left + 8) +
                    "\" height=\"" + std::to_string(height) + "\" font-family=\"sans-serif\" font-size=\"10\">\n" +
                    "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"" + std::to_string(left) +
                    "\" y=\"18\" font-size=\"13\">" +
                    escaped((options.title.empty() ? schedule.name : options.title) + ", " + number(end)) + "</text>\n";
  for (std::size_t rank = 0; rank < spans.size(); ++rank) {
    int y = top + row * static_cast<int>(rank);
    svg += "<text x=\"4\" y=\"" + std::to_string(y + row / 2 + 4) + "\">rank " + std::to_string(rank) + "</text>\n";
    for (std::size_t i = 0; i < spans[rank].size(); ++i) {
      const Action& action = schedule.rows[rank][i];
      if (!action.is_compute()) continue;
      double x = left + spans[rank][i].start * scale, width = (spans[rank][i].end - spans[rank][i].start) * scale;
      std::string name = to_string(action);
      svg += "<g><title>" + name + ": " + number(spans[rank][i].start) + " to " + number(spans[rank][i].end) +
             "</title><rect x=\"" + number(x) + "\" y=\"" + std::to_string(y + 1) + "\" width=\"" + number(width) +
             "\" height=\"" + std::to_string(row - 2) + "\" fill=\"" + color_of(action) +
             "\" stroke=\"white\" stroke-width=\"0.5\"/>";
      if (width > 6.5 * static_cast<double>(name.size())) {
        svg += "<text x=\"" + number(x + width / 2) + "\" y=\"" + std::to_string(y + row / 2 + 4) +
               "\" text-anchor=\"middle\">" + name + "</text>";
      }
      svg += "</g>\n";
    }
  }
  return svg + "</svg>\n";
}

std::string render_chrome_trace(const Schedule& schedule, const TimeLine& spans, double microseconds) {
  check_spans(schedule, spans);
  nlohmann::json events = nlohmann::json::array();
  for (std::size_t rank = 0; rank < spans.size(); ++rank) {
    events.push_back({{"ph", "M"},
                      {"name", "thread_name"},
                      {"pid", 0},
                      {"tid", rank},
                      {"args", {{"name", "rank " + std::to_string(rank)}}}});
    for (std::size_t i = 0; i < spans[rank].size(); ++i) {
      const Action& action = schedule.rows[rank][i];
      if (action.is_idle()) continue;
      events.push_back({{"ph", "X"},
                        {"name", to_string(action)},
                        {"cat", std::string(to_string(action.kind))},
                        {"pid", 0},
                        {"tid", rank},
                        {"ts", spans[rank][i].start * microseconds},
                        {"dur", (spans[rank][i].end - spans[rank][i].start) * microseconds}});
    }
  }
  return nlohmann::json{{"traceEvents", std::move(events)}}.dump() + "\n";
}

}  // namespace plumb

#include "plumb/schedule/render.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {
namespace {

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
        throw Error(ErrorKind::InvalidArgument, str("the time line has a span from ", span.start, " to ", span.end));
      }
      end = std::max(end, span.end);
    }
  }
  return end;
}

char letter_of(const Action& action) {
  return action.kind == ActionKind::Overlap ? 'X' : to_string(action.kind).front();
}

}  // namespace

std::string render_text(const Schedule& schedule, const TimeLine& spans, int columns) {
  double end = check_spans(schedule, spans);
  if (columns < 1 || columns > 10000) {
    throw Error(ErrorKind::InvalidArgument, str("a time line cannot have ", columns, " columns"));
  }
  std::string text;
  std::size_t digits = std::to_string(schedule.rows.size()).size();
  for (std::size_t rank = 0; rank < spans.size(); ++rank) {
    std::vector<std::array<double, 5>> shares(columns, std::array<double, 5>{});
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
      auto most = std::ranges::max_element(share);
      double idle = 1;
      for (double one : share) idle -= one;
      text += *most > 0 && *most >= idle - 1e-9 ? kLetters[most - share.begin()] : '.';
    }
    text += str("| ", static_cast<int>(std::lround(end > 0 ? 100 * busy / end : 0)), "%\n");
  }
  return text;
}

std::string render_letters(const Schedule& schedule) {
  constexpr std::pair<char, const char*> kMeanings[] = {{'F', "forward"},
                                                        {'B', "backward"},
                                                        {'I', "input half of a backward"},
                                                        {'W', "weight half of a backward"},
                                                        {'X', "a forward and a backward at once"}};
  std::string text;
  for (const auto& [letter, meaning] : kMeanings) {
    const bool there = std::ranges::any_of(schedule.rows, [l = letter](const auto& row) {
      return std::ranges::any_of(row, [l](const Action& a) { return a.is_compute() && letter_of(a) == l; });
    });
    if (there) text += std::string(1, letter) + " " + meaning + ", ";
  }
  return text + ". idle; the share at the end: time at work\n";
}

}  // namespace plumb

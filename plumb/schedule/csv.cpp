// torch's CSV form of a time table.
#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/output_file.h"
#include "plumb/core/str.h"
#include "plumb/schedule/schedule.h"

namespace plumb {
namespace {

bool blank(std::string_view text) { return text.find_first_not_of(" \t\r") == std::string_view::npos; }

std::vector<Action> parse_row(std::string_view line, const std::string& where, int line_number, int rank) {
  std::vector<Action> row;
  for (int column = 1;; ++column) {
    auto comma = line.find(',');
    std::string_view cell = line.substr(0, comma);
    try {
      row.push_back(parse_action(cell));
    } catch (const Error& error) {
      throw Error(ErrorKind::BadFile, error.message(),
                  str(where.empty() ? "" : where + ", ", "line ", line_number, " (rank ", rank, "), column ", column),
                  error.remedy());
    }
    if (comma == std::string_view::npos) return row;
    line.remove_prefix(comma + 1);
  }
}

}  // namespace

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& row : schedule.rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (i) text += ',';
      text += to_string(row[i]);
    }
    text += '\n';
  }
  return text;
}

Schedule parse_csv(std::string_view text, const std::string& where) {
  Schedule schedule;
  std::size_t num_cells = 0;
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // the mark of UTF-8 that spreadsheets write
  for (int line_number = 1; !text.empty(); ++line_number) {
    auto end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    line = line.substr(0, line.find('#'));
    if (blank(line)) continue;
    schedule.rows.push_back(parse_row(line, where, line_number, schedule.num_ranks()));
    num_cells += schedule.rows.back().size();
  }
  if (schedule.rows.empty()) throw Error(ErrorKind::BadFile, "the schedule has no rows", where);
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto& row = schedule.rows[rank];
    for (std::size_t column = 0; column < row.size(); ++column) {
      int largest =
          std::max({row[column].stage, row[column].microbatch, row[column].other_stage, row[column].other_microbatch});
      // Every stage and every microbatch has at least one action: a number beyond is a slip, and must not size a table.
      if (largest >= 0 && static_cast<std::size_t>(largest) >= num_cells) {
        throw Error(ErrorKind::BadFile,
                    str("'", to_string(row[column]), "' names number ", largest, ", but the whole table has only ",
                        num_cells, " cells"),
                    str(where.empty() ? "" : where + ", ", "rank ", rank, ", column ", column + 1));
      }
      for (const Action& part : {row[column].first_part(), row[column].second_part()}) {
        if (part.is_compute()) schedule.num_microbatches = std::max(schedule.num_microbatches, part.microbatch + 1);
      }
    }
  }
  schedule.placement = infer_placement(schedule.rows);
  if (schedule.num_stages() == 0) throw Error(ErrorKind::BadFile, "the schedule computes nothing", where);
  return schedule;
}

Schedule read_csv(const std::string& path) { return parse_csv(read_file(path), path); }

void write_csv(const Schedule& schedule, const std::string& path) { write_file_atomically(path, to_csv(schedule)); }

}  // namespace plumb

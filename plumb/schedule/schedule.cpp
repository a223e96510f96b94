#include "plumb/schedule/schedule.h"

#include <algorithm>
#include <map>

#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/output_file.h"
#include "plumb/core/str.h"

namespace plumb {

StageEdges chain_edges(int num_stages) {
  StageEdges edges;
  for (int stage = 0; stage + 1 < num_stages; ++stage) edges.push_back({stage, stage + 1, true});
  return edges;
}

std::vector<int> Placement::stages_of(int rank) const {
  std::vector<int> stages;
  for (int stage = 0; stage < num_stages(); ++stage) {
    if (ranks[stage] == rank || (!reverse_ranks.empty() && reverse_ranks[stage] == rank)) stages.push_back(stage);
  }
  return stages;
}

namespace {

void check_counts(int num_ranks, int stages_per_rank) {
  if (num_ranks < 1 || stages_per_rank < 1) {
    throw Error(ErrorKind::InvalidArgument, str("a placement needs at least one rank and one stage a rank, not ",
                                                num_ranks, " and ", stages_per_rank));
  }
}

}  // namespace

Placement loop_placement(int num_ranks, int stages_per_rank) {
  check_counts(num_ranks, stages_per_rank);
  Placement placement;
  for (int stage = 0; stage < num_ranks * stages_per_rank; ++stage) placement.ranks.push_back(stage % num_ranks);
  return placement;
}

Placement v_placement(int num_ranks, int stages_per_rank) {
  check_counts(num_ranks, stages_per_rank);
  Placement placement;
  for (int pass = 0; pass < stages_per_rank; ++pass) {
    for (int i = 0; i < num_ranks; ++i) placement.ranks.push_back(pass % 2 == 0 ? i : num_ranks - 1 - i);
  }
  return placement;
}

std::size_t Schedule::num_actions() const {
  std::size_t count = 0;
  for (const auto& row : rows) {
    count +=
        static_cast<std::size_t>(std::ranges::count_if(row, [](const Action& action) { return !action.is_idle(); }));
  }
  return count;
}

bool Schedule::has_messages() const {
  return std::ranges::any_of(rows, [](const auto& row) {
    return std::ranges::any_of(row, [](const Action& action) { return action.is_message(); });
  });
}

std::vector<bool> backward_is_next(const std::vector<Action>& row) {
  std::vector<bool> next(row.size());
  std::map<int, int> waiting;  // forwards by microbatch
  for (std::size_t i = 0; i < row.size(); ++i) {
    const Action& action = row[i];
    const auto is = [&](std::size_t later, ActionKind kind) {
      return later < row.size() && row[later].kind == kind && row[later].stage == action.stage &&
             row[later].microbatch == action.microbatch;
    };
    if (action.kind == ActionKind::Forward) {
      const bool whole = is(i + 1, ActionKind::FullBackward) ||
                         (is(i + 1, ActionKind::BackwardInput) && is(i + 2, ActionKind::BackwardWeight));
      next[i] = whole && waiting.size() > waiting.count(action.microbatch);
      ++waiting[action.microbatch];
    } else if (action.is_compute() && action.kind != ActionKind::BackwardInput && --waiting[action.microbatch] == 0) {
      waiting.erase(action.microbatch);
    }
  }
  return next;
}

Schedule without_idle(Schedule schedule) {
  for (auto& row : schedule.rows) std::erase_if(row, [](const Action& action) { return action.is_idle(); });
  return schedule;
}

Placement infer_placement(const std::vector<std::vector<Action>>& rows) {
  struct Seen {
    int stage, microbatch, rank;
  };
  std::vector<Seen> forwards;
  int num_stages = 0;
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank) {
    for (const Action& action : rows[rank]) {
      if (!action.is_compute()) continue;
      for (const Action& part : {action.first_part(), action.second_part()}) {
        if (part.is_idle()) continue;
        num_stages = std::max(num_stages, part.stage + 1);
        if (part.kind == ActionKind::Forward) forwards.push_back({part.stage, part.microbatch, rank});
      }
    }
  }
  Placement placement;
  placement.ranks.assign(num_stages, -1);
  // The rank of a stage's first and last microbatch: they differ only in a bidirectional table.
  std::vector<Seen> first(placement.ranks.size(), {-1, -1, -1}), last = first;
  for (const Seen& seen : forwards) {
    if (first[seen.stage].rank < 0 || seen.microbatch < first[seen.stage].microbatch) first[seen.stage] = seen;
    if (last[seen.stage].rank < 0 || seen.microbatch > last[seen.stage].microbatch) last[seen.stage] = seen;
  }
  bool bidirectional = false;
  for (std::size_t stage = 0; stage < first.size(); ++stage) {
    placement.ranks[stage] = first[stage].rank;
    bidirectional |= first[stage].rank != last[stage].rank;
  }
  if (!bidirectional) return placement;
  Placement candidate = placement;
  candidate.reverse_from = -1;
  for (const Seen& seen : forwards) {
    if (seen.rank == placement.ranks[seen.stage]) continue;
    if (candidate.reverse_from < 0 || seen.microbatch < candidate.reverse_from) {
      candidate.reverse_from = seen.microbatch;
    }
  }
  for (const Seen& seen : last) candidate.reverse_ranks.push_back(seen.rank);
  for (const Seen& seen : forwards) {
    if (candidate.rank_of(seen.stage, seen.microbatch) != seen.rank) return placement;  // just misplaced actions
  }
  return candidate;
}

// torch's CSV form of a time table.
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

// Schedules as data. An action is a tuple (stage, kind, microbatch or None, None or (forward, backward)) as Python's
// _Action is, so that one may be given for the other.
#include "costs.h"
#include "module.h"
#include "plumb/analysis/adapters.h"
#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/lower.h"
#include "plumb/schedule/render.h"
#include "plumb/schedule/search.h"
#include "plumb/schedule/simulate.h"
#include "plumb/schedule/torch_lowering.h"

namespace plumb::python {
namespace {

using Row = std::vector<Action>;

ActionKind kind_of(const std::string& text) {
  for (int k = 0; k <= static_cast<int>(ActionKind::Overlap); ++k) {
    const auto kind = static_cast<ActionKind>(k);
    if (kind != ActionKind::Idle && to_string(kind) == text) return kind;
  }
  throw Error(ErrorKind::UnknownName, "there is no action of kind '" + text + "'");
}

Action to_action(py::handle h) {
  if (h.is_none()) return Action::idle();
  if (!PyTuple_Check(h.ptr()) || py::len(h) != 4) {
    throw Error(ErrorKind::InvalidArgument, py::repr(h).cast<std::string>() + " is no action of a schedule");
  }
  const auto tuple = py::reinterpret_borrow<py::tuple>(h);
  const auto kind = kind_of(tuple[1].cast<std::string>());
  if (kind == ActionKind::Overlap) {
    if (tuple[3].is_none() || py::len(tuple[3]) != 2) {
      throw Error(ErrorKind::InvalidArgument,
                  "an overlapped pair is a forward and a backward, not " + py::repr(h).cast<std::string>());
    }
    const py::sequence parts = tuple[3].cast<py::sequence>();
    const Action forward = to_action(parts[0]), backward = to_action(parts[1]);
    if (forward.kind != ActionKind::Forward ||
        (backward.kind != ActionKind::FullBackward && backward.kind != ActionKind::BackwardInput)) {
      throw Error(ErrorKind::InvalidArgument,
                  "an overlapped pair is a forward and a backward, not " + py::repr(h).cast<std::string>());
    }
    return Action::overlap(forward, backward);
  }
  const int stage = tuple[0].cast<int>(), microbatch = tuple[2].is_none() ? -1 : tuple[2].cast<int>();
  int other = -1;
  if (kind == ActionKind::SendForward || kind == ActionKind::RecvBackward) other = stage + 1;
  if (kind == ActionKind::SendBackward || kind == ActionKind::RecvForward) other = stage - 1;
  return {kind, ActionKind::Idle, stage, microbatch, other};
}

py::object to_tuple(const Action& action) {
  if (action.is_idle()) return py::none();
  if (action.kind == ActionKind::Overlap) {
    return py::make_tuple(-1, "OVERLAP_F_B", py::none(),
                          py::make_tuple(to_tuple(action.first_part()), to_tuple(action.second_part())));
  }
  py::object microbatch = action.microbatch < 0 ? py::object(py::none()) : py::object(py::int_(action.microbatch));
  return py::make_tuple(action.stage, std::string(to_string(action.kind)), microbatch, py::none());
}

Row to_row(const py::sequence& row) {
  Row out;
  for (py::handle h : row) out.push_back(to_action(h));
  return out;
}

py::list to_list(const Row& row) {
  py::list list;
  for (const Action& action : row) list.append(to_tuple(action));
  return list;
}

int largest(const std::vector<Row>& rows, std::int32_t Action::*first, std::int32_t Action::*second) {
  int most = -1;
  for (const Row& row : rows) {
    for (const Action& a : row) {
      most = std::max(most, static_cast<int>(a.*first));
      if (a.kind == ActionKind::Overlap) most = std::max(most, static_cast<int>(a.*second));
    }
  }
  return most;
}

Schedule from_rows(const std::string& name, const py::sequence& rows, int num_microbatches,
                   const std::vector<int>& ranks) {
  Schedule schedule;
  schedule.name = name;
  for (py::handle row : rows) schedule.rows.push_back(to_row(py::reinterpret_borrow<py::sequence>(row)));
  schedule.num_microbatches = num_microbatches > 0
                                  ? num_microbatches
                                  : largest(schedule.rows, &Action::microbatch, &Action::other_microbatch) + 1;
  if (ranks.empty()) {
    schedule.placement = infer_placement(schedule.rows);
  } else {
    schedule.placement.ranks = ranks;
  }
  return schedule;
}

py::dict to_dict(const Simulation& s) {
  py::dict d;
  d["makespan"] = s.makespan;
  d["bubble_rate"] = s.bubble_rate();
  d["zero_bubble_rate"] = s.zero_bubble_rate();
  d["bubble_time"] = s.bubble_time();
  d["zero_bubble_time"] = s.zero_bubble_time();
  d["peak_memory"] = s.peak_memory;
  d["busy"] = s.busy;
  return d;
}

void bind_schedule_table(py::module_& m) {
  py::class_<Schedule>(m, "Schedule", "A pipeline's time table: for every rank its actions, and where stages live.")
      .def_readwrite("name", &Schedule::name)
      .def_readonly("num_microbatches", &Schedule::num_microbatches)
      .def_property_readonly("num_ranks", &Schedule::num_ranks)
      .def_property_readonly("num_stages", &Schedule::num_stages)
      .def_property_readonly("has_messages", &Schedule::has_messages)
      .def_property_readonly("ranks", [](const Schedule& s) { return s.placement.ranks; })
      .def_property_readonly("bidirectional", [](const Schedule& s) { return !s.placement.reverse_ranks.empty(); })
      .def("rank_of",
           [](const Schedule& s, int stage, int microbatch) { return s.placement.rank_of(stage, microbatch); })
      .def("stages_of", [](const Schedule& s, int rank) { return s.placement.stages_of(rank); })
      .def_property_readonly("rows",
                             [](const Schedule& s) {
                               py::list rows;
                               for (const Row& row : s.rows) rows.append(to_list(row));
                               return rows;
                             })
      .def("csv", [](const Schedule& s) { return to_csv(s); })
      .def("without_idle", [](const Schedule& s) { return without_idle(s); })
      .def("with_idle_ticks", [](const Schedule& s) { return with_idle_ticks(s); })
      .def("forward_only", [](const Schedule& s) { return forward_only(s); })
      .def("merge_backwards", [](const Schedule& s) { return merge_backwards(s); })
      .def("add_send_recv", [](const Schedule& s) { return add_send_recv(s); })
      .def("simulate_send_recv", [](const Schedule& s) { return simulate_send_recv(s); })
      .def("defer_receives", [](const Schedule& s) { return defer_receives(s); })
      .def(
          "torch_lowering",
          [](const Schedule& s, int max_unsharded, bool reduce_grad, bool late_receives) {
            Schedule table = s;
            if (reduce_grad || max_unsharded > 0) {  // idle entries go, which otherwise take a turn
              for (Row& row : table.rows)
                row = with_surroundings(row, {.reduce_grad = reduce_grad, .max_unsharded = max_unsharded});
            }
            table = add_send_recv(table);
            return late_receives ? defer_receives(table) : table;
          },
          py::arg("max_unsharded") = 0, py::arg("reduce_grad") = true, py::arg("defer_receives") = false)
      .def("lower", [](const Schedule& s) { return lower_schedule(s); })
      // "ok", or a line for every problem.
      .def(
          "check",
          [](const Schedule& s, bool forward_only, bool blocking_receives) {
            CheckOptions options;
            options.forward_only = forward_only;
            options.blocking_receives = blocking_receives;
            return check_schedule(s, {}, options).text();
          },
          py::arg("forward_only") = false, py::arg("blocking_receives") = true)
      .def("simulate",
           [](const Schedule& s, const py::dict& costs) { return to_dict(simulate_schedule(s, to_costs(costs))); })
      // When every entry runs, beside the rows: (start, end).
      .def("spans",
           [](const Schedule& s, const py::dict& costs) {
             std::vector<std::vector<std::pair<double, double>>> spans;
             for (const auto& row : simulate_schedule(s, to_costs(costs)).spans) {
               spans.emplace_back();
               for (const Span& span : row) spans.back().emplace_back(span.start, span.end);
             }
             return spans;
           })
      .def("render_text",
           [](const Schedule& s, const py::dict& costs, int columns) {
             return render_text(s, simulate_schedule(s, to_costs(costs)).spans, columns);
           })
      .def("render_svg", [](const Schedule& s, const py::dict& costs) {
        return to_svg(TimelineChart{s.name, {timeline_of(s, simulate_schedule(s, to_costs(costs)))}});
      });
}

Register schedule_part([](py::module_& m) {
  bind_schedule_table(m);
  m.def("parse_action", [](const std::string& text) {
    const Action action = parse_action(text);
    const Action plain = to_action(to_tuple(action));
    if (action.is_message() && action.other_stage != plain.other_stage) {
      throw Error(ErrorKind::InvalidArgument, "'" + text + "' is a message to a stage that is no neighbour", "",
                  "leave messages out of the table; the run adds them");
    }
    return to_tuple(action);
  });
  m.def("schedule_names", &schedule_names);
  m.def("make_schedule", &make_schedule, py::arg("name"), py::arg("num_ranks"), py::arg("num_microbatches"),
        py::arg("stages_per_rank") = 0);
  m.def("schedule_traits", [](const std::string& name) {
    const auto& t = schedule_traits(name);
    py::dict d;
    d["name"] = t.name;
    d["summary"] = t.summary;
    d["v_shape"] = t.v_shape;
    d["bidirectional"] = t.bidirectional;
    d["min_stages_per_rank"] = t.min_stages_per_rank;
    d["max_stages_per_rank"] = t.max_stages_per_rank;
    d["splits_backward"] = t.splits_backward;
    return d;
  });
  m.def("schedule_from_rows", &from_rows, py::arg("name"), py::arg("rows"), py::arg("num_microbatches") = 0,
        py::arg("ranks") = std::vector<int>());
  m.def("parse_schedule_csv", &parse_csv, py::arg("text"), py::arg("where") = "");
  m.def("loop_placement", [](int ranks, int per_rank) { return loop_placement(ranks, per_rank).ranks; });
  m.def("v_placement", [](int ranks, int per_rank) { return v_placement(ranks, per_rank).ranks; });
  m.def("with_surroundings", [](const py::sequence& row, int max_unsharded, bool reduce_grad) {
    LowerOptions options;
    options.max_unsharded = max_unsharded;
    options.reduce_grad = reduce_grad;
    return to_list(with_surroundings(to_row(row), options));
  });
  m.def("search_schedule", [](int ranks, int microbatches, const py::dict& costs, double memory_limit, double effort) {
    SearchOptions options;
    if (memory_limit > 0) options.memory_limit = memory_limit;
    if (effort > 0) options.effort = effort;
    const auto given = to_costs(costs);
    py::gil_scoped_release free;
    return search_schedule(ranks, microbatches, given, options).schedule;
  });
});

}  // namespace
}  // namespace plumb::python

// Schedules as data. Python gets an action as a tuple (stage, kind, microbatch or None, None or (forward, backward)),
// and gives an _Action, which is such a tuple.
#include "costs.h"
#include "module.h"
#include "plumb/analysis/adapters.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/liveness.h"
#include "plumb/schedule/lower.h"
#include "plumb/schedule/search.h"
#include "plumb/schedule/simulate.h"

namespace plumb::python {
namespace {

// Action, or None for idle; of _Action's text.
Action to_action(py::handle h) { return h.is_none() ? Action::idle() : parse_action(py::str(h).cast<std::string>()); }

py::object to_tuple(const Action& action) {
  if (action.is_idle()) return py::none();
  if (action.kind == ActionKind::Overlap) {
    return py::make_tuple(-1, "OVERLAP_F_B", py::none(),
                          py::make_tuple(to_tuple(action.first_part()), to_tuple(action.second_part())));
  }
  py::object microbatch = action.microbatch < 0 ? py::object(py::none()) : py::object(py::int_(action.microbatch));
  return py::make_tuple(action.stage, std::string(to_string(action.kind)), microbatch, py::none());
}

std::vector<Action> to_row(const py::sequence& row) {
  std::vector<Action> actions;
  for (py::handle h : row) actions.push_back(to_action(h));
  return actions;
}

py::list to_list(const std::vector<Action>& row) {
  py::list list;
  for (const Action& action : row) list.append(to_tuple(action));
  return list;
}

Schedule from_rows(const std::string& name, const std::vector<py::sequence>& rows, int num_microbatches,
                   const std::vector<int>& ranks) {
  Schedule schedule;
  schedule.name = name;
  int last = -1;
  for (const py::sequence& row : rows) {
    for (const Action& action : schedule.rows.emplace_back(to_row(row)))
      last = std::max({last, action.microbatch, action.second_part().microbatch});
  }
  schedule.num_microbatches = num_microbatches > 0 ? num_microbatches : last + 1;
  schedule.placement = ranks.empty() ? infer_placement(schedule.rows) : Placement{ranks};
  return schedule;
}

py::dict to_dict(const Simulation& s) {
  return py::dict("makespan"_a = s.makespan, "bubble_rate"_a = s.bubble_rate(),
                  "zero_bubble_rate"_a = s.zero_bubble_rate(), "bubble_time"_a = s.bubble_time(),
                  "zero_bubble_time"_a = s.zero_bubble_time(), "peak_memory"_a = s.peak_memory, "busy"_a = s.busy);
}

void bind_schedule_table(py::module_& m) {
  py::class_<Schedule>(m, "Schedule", "A pipeline's time table: for every rank its actions, and where stages live.")
      .def_readwrite("name", &Schedule::name)
      .def_readonly("num_microbatches", &Schedule::num_microbatches)
      .def_property_readonly("num_ranks", &Schedule::num_ranks)
      .def_property_readonly("num_stages", &Schedule::num_stages)
      .def_property_readonly("ranks", [](const Schedule& s) { return s.placement.ranks; })
      .def(
          "stages_of", [](const Schedule& s, int rank) { return s.placement.stages_of(rank); }, py::arg("rank"))
      .def_property_readonly("bidirectional", [](const Schedule& s) { return !s.placement.reverse_ranks.empty(); })
      .def_property_readonly("rows",
                             [](const Schedule& s) {
                               std::vector<py::list> rows;
                               for (const auto& row : s.rows) rows.push_back(to_list(row));
                               return rows;
                             })
      .def("csv", [](const Schedule& s) { return to_csv(s); })
      .def("with_idle_ticks", &with_idle_ticks)
      // "ok", or a line for every problem.
      .def(
          "check",
          [](const Schedule& s, bool forward_only, bool blocking_receives) {
            return check_schedule(s, {}, {.forward_only = forward_only, .blocking_receives = blocking_receives}).text();
          },
          py::arg("forward_only") = false, py::arg("blocking_receives") = true)
      .def(
          "simulate",
          [](const Schedule& s, const py::dict& costs) { return to_dict(simulate_schedule(s, to_costs(costs))); },
          py::arg("costs"))
      // When every entry runs, beside the rows: (start, end).
      .def(
          "spans",
          [](const Schedule& s, const py::dict& costs) {
            std::vector<std::vector<std::pair<double, double>>> spans;
            for (const auto& row : simulate_schedule(s, to_costs(costs)).spans) {
              spans.emplace_back();
              for (const Span& span : row) spans.back().emplace_back(span.start, span.end);
            }
            return spans;
          },
          py::arg("costs"))
      .def(
          "render_svg",
          [](const Schedule& s, const py::dict& costs) {
            return to_svg(TimelineChart{s.name, {timeline_of(s, simulate_schedule(s, to_costs(costs)))}});
          },
          py::arg("costs"));
}

Register schedule_part([](py::module_& m) {
  bind_schedule_table(m);
  m.def(
      "parse_action",
      [](const std::string& text) {
        const Action action = parse_action(text);
        if (to_string(action).find_first_of("<>") != std::string::npos) {
          throw Error(ErrorKind::InvalidArgument, "'" + text + "' is a message to a stage that is no neighbor", "",
                      "leave messages out of the table; the run adds them");
        }
        return to_tuple(action);
      },
      py::arg("text"));
  m.def("schedule_names", &schedule_names);
  m.def("make_schedule", &make_schedule, py::arg("name"), py::arg("num_ranks"), py::arg("num_microbatches"),
        py::arg("stages_per_rank") = 0);
  m.def(
      "schedule_traits",
      [](const std::string& name) {
        const auto& t = schedule_traits(name);
        return py::dict("name"_a = t.name, "summary"_a = t.summary, "v_shape"_a = t.v_shape,
                        "bidirectional"_a = t.bidirectional, "min_stages_per_rank"_a = t.min_stages_per_rank,
                        "max_stages_per_rank"_a = t.max_stages_per_rank, "splits_backward"_a = t.splits_backward);
      },
      py::arg("name"));
  m.def("schedule_from_rows", &from_rows, py::arg("name"), py::arg("rows"), py::arg("num_microbatches") = 0,
        py::arg("ranks") = std::vector<int>());
  m.def("parse_schedule_csv", &parse_csv, py::arg("text"), py::arg("where") = "");
  m.def(
      "with_surroundings",
      [](const py::sequence& row, int max_unsharded, bool reduce_grad) {
        return to_list(with_surroundings(to_row(row), {.reduce_grad = reduce_grad, .max_unsharded = max_unsharded}));
      },
      py::arg("row"), py::arg("max_unsharded"), py::arg("reduce_grad"));
  m.def(
      "activation_lives",  // tuples (stage, microbatch, forward, release, slot), and the number of slots
      [](const Schedule& schedule, int rank, const std::vector<int>& stages, bool whole_microbatches) {
        const auto found = analyze_pipeline_activation_liveness(schedule, rank, stages, whole_microbatches);
        py::list lives;
        for (const auto& [at, life] : found.lives)
          lives.append(py::make_tuple(at.first, at.second, life.forward, life.release, life.slot));
        return py::make_tuple(lives, found.num_slots);
      },
      py::arg("schedule"), py::arg("rank"), py::arg("stages"), py::arg("whole_microbatches"));
  m.def(
      "search_schedule",
      [](int ranks, int microbatches, const py::dict& costs, double memory_limit) {
        SearchOptions options;
        if (memory_limit > 0) options.memory_limit = memory_limit;
        const auto given = to_costs(costs);
        py::gil_scoped_release free;
        return search_schedule(ranks, microbatches, given, options).schedule;
      },
      py::arg("ranks"), py::arg("microbatches"), py::arg("costs"), py::arg("memory_limit"));
});

}  // namespace
}  // namespace plumb::python

// A transform's report in Python: {"pass": ..., "entries": [{"kind": ..., "node": ..., ...}]}; empty fields are left
// out.
#pragma once

#include "convert.h"
#include "plumb/transforms/report.h"

namespace plumb::python {

inline py::dict to_python(const Report& report) {
  py::list entries;
  for (const ReportEntry& e : report.entries()) {
    py::dict entry("kind"_a = to_string(e.kind), "node"_a = readable(e.node));
    for (const auto& [name, text] : e.texts()) {
      if (!text.empty()) entry[name] = readable(text);
    }
    if (e.tau) entry["tau"] = *e.tau;
    if (e.asked) entry["asked"] = true;
    entries.append(entry);
  }
  return py::dict("pass"_a = report.pass(), "entries"_a = entries);
}

}  // namespace plumb::python

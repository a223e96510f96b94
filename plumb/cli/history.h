// plumb track --history: what a recorder wrote, as a page, a picture or a table. Shared with the page of one run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plumb/analysis/history_view.h"

namespace plumb::cli {

struct HistoryOptions {
  std::string history, compare;  // files; compare may be empty
  std::string formats = "e4m3fn,e5m2";
  std::string html, svg, out;
  int64_t step = 0;  // 0: the last
  bool json = false;
};

// "e4m3fn,e5m2"; UsageError names `option`.
std::vector<FPFormat> read_formats(const std::string& option, const std::string& text);

// A page of everything there is to see.
std::string history_page(const HistoryView& view, const std::string& title, const std::string& subtitle);

// A table's rows as JSON objects.
nlohmann::ordered_json json_of(const Table& table);

// Writes what the options ask for; without --html and --svg, or with -o or --json, what each format would do.
void show_history(const HistoryOptions& options);

}  // namespace plumb::cli

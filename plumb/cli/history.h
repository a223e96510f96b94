// plumb track --history: a recorder's history as a page, a picture or a table. Shared with the page of one run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plumb/analysis/history_view.h"

namespace plumb::cli {

struct HistoryOptions {
  std::string history;               // a file, or NAME=FILE
  std::vector<std::string> compare;  // more of them, drawn beside it
  // The formats of values and of gradients, and what else is asked for: "e4m3fn,e5m2".
  std::string fwd = "E4M3", bwd = "E5M2", formats;
  std::string html, svg, out;
  int64_t step = 0;  // 0: the last
  bool json = false;
};

// Sets the formats of roles and those asked for. UsageError names the option.
void read_formats(HistoryView& view, const HistoryOptions& options);

// Returns the sentence before a layer_table() that has rows.
std::string layers_conclusion(const Table& layers);

// Returns a page of everything there is to see.
std::string history_page(const HistoryView& view, const std::string& title, const std::string& subtitle);

// Returns a table's rows as JSON objects.
nlohmann::ordered_json json_of(const Table& table);

// Writes what the options ask for; without --html and --svg, or with -o or --json, the effect of each format.
void show_history(const HistoryOptions& options);

}  // namespace plumb::cli

// A page of results: one HTML file with everything in it, that opens from disk without network.
//
//   HtmlReport report("FP8 training", "byte-level GPT, 600 steps");
//   report.section("Losses").prose("The plain model **diverges** in FP8.").add(loss_chart).add(table);
//   report.write("demo/report.html");
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/analysis/graph_picture.h"
#include "plumb/analysis/history_view.h"
#include "plumb/analysis/line_chart.h"
#include "plumb/analysis/timeline_chart.h"
#include "plumb/core/table.h"

namespace plumb {

// A number that a page shows large.
struct Figure {
  std::string value;  // "2.10"
  std::string label;  // "loss, unit-scaled FP8"
  std::string note;   // small below; may be empty
};

// Everything given is escaped. Parts appear in the order they are added; parts before the first section stand on top.
class HtmlReport {
 public:
  explicit HtmlReport(std::string title, std::string subtitle = "");

  // Gives these runs their colors, in this order. Others get theirs where they first appear.
  HtmlReport& runs(const std::vector<std::string>& names);
  // For a page that is being written: a browser reloads it every `seconds`, unless somebody uses it.
  HtmlReport& reload_every(int seconds);
  HtmlReport& section(std::string title);
  // Adds paragraphs, parted by empty lines; lines that start with "- " are a list. **bold** and `code` are marked so.
  HtmlReport& prose(std::string_view text);
  // Adds a text as it is, in one width: a command, a log, a graph.
  HtmlReport& code(std::string_view text);
  HtmlReport& figures(const std::vector<Figure>& figures);
  // Adds a table. A click on a column's head sorts, a click on a row unfolds the rows below it; a run's name has its
  // color.
  HtmlReport& add(const Table& table);
  HtmlReport& add(const LineChart& chart);
  HtmlReport& add(const TimelineChart& chart);
  HtmlReport& add(const HistoryView& view);
  HtmlReport& add(const Graph& graph) { return add(picture_lines(graph)); }
  HtmlReport& add(const std::vector<PictureLine>& graph);

  std::string html() const;
  // Writes the page whole or not at all (write_file_atomically). Throws Error(CannotWrite).
  void write(const std::filesystem::path& path) const;

 private:
  HtmlReport& put(const std::string& html);
  std::string title_, subtitle_, body_;
  std::vector<std::string> sections_;
  int reload_ = 0;  // 0: never
  RunColors colors_;
};

}  // namespace plumb

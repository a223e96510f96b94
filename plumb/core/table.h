// A table for people: as aligned text for terminals here, as a sortable one on a page in analysis/html_report.h.
#pragma once

#include <string>
#include <vector>

namespace plumb {

struct Table {
  std::vector<std::string> header;             // may be empty: rows only
  std::vector<std::vector<std::string>> rows;  // shorter rows are filled with empty cells
  std::string caption = {};
  // A row a number, or empty. Rows of level 1 belong to the row of level 0 above them: indented as text, folded on a
  // page, sorted with it.
  std::vector<int> levels = {};

  // Columns whose cells are all empty or numbers (with a sign, a unit or a percent sign after them) align right.
  bool is_numeric(size_t column) const;
  size_t num_columns() const;
  int level(size_t row) const { return row < levels.size() ? levels[row] : 0; }
};

// Columns two blanks apart, a rule under the header, no blanks at line ends; a character is a column wide. Line breaks
// and other control characters in cells are shown as blanks.
std::string to_text(const Table& table);

// Returns a text for cells: "0.0312", "1.5e+06". `digits` are significant ones.
std::string short_number(double value, int digits = 4);
// Returns a share as "12.5%".
std::string percent(double share, int digits = 1);
// Return "12 ms" and "1.5 GiB".
std::string seconds_text(double seconds);
std::string bytes_text(double bytes, int digits = 4);

}  // namespace plumb

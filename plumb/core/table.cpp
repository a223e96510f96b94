#include "plumb/core/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace plumb {
namespace {

size_t width_of(const std::string& text) {
  // Bytes 10xxxxxx continue a character.
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return text;
}

bool looks_numeric(const std::string& text) {
  const char* begin = text.c_str();
  char* end = nullptr;
  std::strtod(begin, &end);
  if (end == begin) return false;
  // A unit may follow: "12.5 %", "3.1 ms", "4x"; a sentence may not.
  const std::string rest(end);
  return rest.size() <= 4 && rest.find_first_of("0123456789") == std::string::npos;
}

}  // namespace

size_t Table::num_columns() const {
  size_t columns = header.size();
  for (const auto& row : rows) columns = std::max(columns, row.size());
  return columns;
}

bool Table::is_numeric(size_t column) const {
  bool any = false;
  for (const auto& row : rows) {
    if (column >= row.size() || row[column].empty() || row[column] == "-") continue;
    if (!looks_numeric(row[column])) return false;
    any = true;
  }
  return any;
}

std::string to_text(const Table& table) {
  const size_t columns = table.num_columns();
  std::vector<size_t> widths(columns, 0);
  std::vector<bool> right(columns);
  for (size_t c = 0; c < columns; ++c) {
    right[c] = table.is_numeric(c);
    if (c < table.header.size()) widths[c] = width_of(table.header[c]);
    for (const auto& row : table.rows) {
      if (c < row.size()) widths[c] = std::max(widths[c], width_of(row[c]));
    }
  }
  // The first cell of what belongs to the row above is indented.
  auto first = [](const std::string& cell, int level) {
    return std::string(2 * static_cast<size_t>(level), ' ') + cell;
  };
  for (size_t r = 0; columns > 0 && r < table.rows.size(); ++r) {
    if (!table.rows[r].empty()) {
      widths[0] = std::max(widths[0], width_of(first(table.rows[r][0], table.level(r))));
    }
  }
  std::string text;
  auto line = [&](const std::vector<std::string>& cells, int level = 0) {
    std::string out;
    for (size_t c = 0; c < columns; ++c) {
      std::string cell = c < cells.size() ? one_line(cells[c]) : "";
      if (c == 0) cell = first(cell, level);
      const std::string blanks(widths[c] - width_of(cell), ' ');
      out += (c ? "  " : "") + (right[c] ? blanks + cell : cell + blanks);
    }
    out.erase(out.find_last_not_of(' ') + 1);
    text += out + "\n";
  };
  if (!table.caption.empty()) text += one_line(table.caption) + "\n";
  if (!table.header.empty()) {
    line(table.header);
    std::vector<std::string> rule;
    for (size_t width : widths) rule.push_back(std::string(width, '-'));
    line(rule);
  }
  for (size_t r = 0; r < table.rows.size(); ++r) line(table.rows[r], table.level(r));
  return text;
}

std::string short_number(double value, int digits) {
  if (std::isnan(value)) return "nan";  // printf knows its sign, which says nothing
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", std::clamp(digits, 1, 17), value);
  return text;
}

std::string percent(double share, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f%%", std::clamp(digits, 0, 9), share * 100);
  return text;
}

std::string seconds_text(double seconds) {
  return seconds >= 1      ? short_number(seconds) + " s"
         : seconds >= 1e-3 ? short_number(seconds * 1e3) + " ms"
                           : short_number(seconds * 1e6) + " us";
}

std::string bytes_text(double bytes, int digits) {
  return bytes >= 1e9 ? short_number(bytes / 1073741824.0, digits) + " GiB"
                      : short_number(bytes / 1048576.0, digits) + " MiB";
}

}  // namespace plumb

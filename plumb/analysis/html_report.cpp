#include "plumb/analysis/html_report.h"

#include <algorithm>

#include "plumb/analysis/page_assets.h"
#include "plumb/analysis/svg.h"
#include "plumb/core/output_file.h"

namespace plumb {
namespace {

using svg::escaped;

// **bold** and `code` of one piece of text; a mark without its partner stands as it is.
std::string marked(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t bold = text.find("**"), code = text.find('`');
    const size_t first = std::min(bold, code);
    if (first == std::string_view::npos) break;
    const std::string_view mark = first == code ? "`" : "**";
    const size_t begin = first + mark.size(), end = text.find(mark, begin);
    out += escaped(text.substr(0, first));
    if (end == std::string_view::npos || end == begin) {
      out += escaped(mark);
      text.remove_prefix(begin);
      continue;
    }
    const std::string inner = escaped(text.substr(begin, end - begin));
    out += first == code ? "<code>" + inner + "</code>" : "<strong>" + inner + "</strong>";
    text.remove_prefix(end + mark.size());
  }
  return out + escaped(text);
}

}  // namespace

HtmlReport::HtmlReport(std::string title, std::string subtitle)
    : title_(std::move(title)), subtitle_(std::move(subtitle)) {}

HtmlReport& HtmlReport::section(std::string title) {
  if (!sections_.empty()) body_ += "</section>\n";
  sections_.push_back(std::move(title));
  return put("<section id=\"section-" + std::to_string(sections_.size()) + "\">\n<h2>" + escaped(sections_.back()) +
             "</h2>\n");
}

HtmlReport& HtmlReport::prose(std::string_view text) {
  std::string paragraph;
  bool list = false;
  auto end_paragraph = [&] {
    if (!paragraph.empty()) body_ += (list ? "<li>" : "<p>") + marked(paragraph) + (list ? "</li>\n" : "</p>\n");
    paragraph.clear();
  };
  auto end_list = [&] {
    end_paragraph();
    if (list) body_ += "</ul>\n";
    list = false;
  };
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    while (!line.empty() && (line.front() == ' ' || line.front() == '\t')) line.remove_prefix(1);
    if (line.empty()) {
      end_list();
    } else if (line.starts_with("- ")) {
      end_paragraph();
      if (!list) body_ += "<ul>\n";
      list = true;
      paragraph = line.substr(2);
    } else {
      paragraph += (paragraph.empty() ? "" : " ") + std::string(line);
    }
  }
  end_list();
  return *this;
}

HtmlReport& HtmlReport::put(const std::string& html) {
  body_ += html;
  return *this;
}

HtmlReport& HtmlReport::code(std::string_view text) { return put("<pre>" + escaped(text) + "</pre>\n"); }

HtmlReport& HtmlReport::figures(const std::vector<Figure>& figures) {
  body_ += "<div class=\"figures\">\n";
  for (const Figure& f : figures) {
    body_ += "<div class=\"tile\"><div class=\"label\">" + escaped(f.label) + "</div><div class=\"value\">" +
             escaped(f.value) + "</div>";
    if (!f.note.empty()) body_ += "<div class=\"note\">" + escaped(f.note) + "</div>";
    body_ += "</div>\n";
  }
  return put("</div>\n");
}

HtmlReport& HtmlReport::runs(const std::vector<std::string>& names) {
  for (const std::string& name : names) colors_.of(name);
  return *this;
}

HtmlReport& HtmlReport::reload_every(int seconds) {
  reload_ = seconds;
  return *this;
}

HtmlReport& HtmlReport::add(const Table& table) {
  const size_t columns = table.num_columns();
  std::vector<const char*> kind(columns, "");
  for (size_t c = 0; c < columns; ++c) {
    // Sentences wrap, names do not.
    const bool long_text = std::ranges::any_of(table.rows, [&](const auto& row) {
      return c < row.size() && row[c].size() > 40 && row[c].find(' ') != std::string::npos;
    });
    kind[c] = table.is_numeric(c) ? " class=\"number\"" : long_text ? " class=\"long\"" : "";
  }
  body_ += "<div class=\"wide\"><table>\n";
  if (!table.caption.empty()) body_ += "<caption>" + escaped(table.caption) + "</caption>\n";
  if (!table.header.empty()) {
    body_ += "<thead><tr>";
    for (size_t c = 0; c < columns; ++c) {
      body_ += std::string("<th") + kind[c] + " scope=\"col\"><button type=\"button\">" +
               (c < table.header.size() ? escaped(table.header[c]) : "") + "</button></th>";
    }
    body_ += "</tr></thead>\n";
  }
  body_ += "<tbody>\n";
  for (size_t r = 0; r < table.rows.size(); ++r) {
    body_ += table.level(r) ? "<tr class=\"under\">" : "<tr>";
    for (size_t c = 0; c < columns; ++c) {
      const std::string text = c < table.rows[r].size() ? table.rows[r][c] : "";
      const bool run = colors_.knows(text);
      body_ += std::string("<td") + kind[c] + ">";
      if (run) body_ += "<span class=\"dot " + svg::series_class(colors_.of(text)) + "\"></span>";
      body_ += escaped(text) + "</td>";
    }
    body_ += "</tr>\n";
  }
  return put("</tbody></table></div>\n");
}

HtmlReport& HtmlReport::add(const LineChart& chart) { return put(to_html(chart, colors_)); }
HtmlReport& HtmlReport::add(const TimelineChart& chart) { return put(to_html(chart)); }
HtmlReport& HtmlReport::add(const HistoryView& view) { return put(to_html(view, colors_)); }
HtmlReport& HtmlReport::add(const std::vector<PictureLine>& graph) { return put(graph_html(graph)); }

std::string HtmlReport::html() const {
  std::string out =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      // Nothing is loaded from anywhere.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
      "script-src 'unsafe-inline'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
      escaped(title_) + "</title>\n<style>\n";
  out += page_style();
  out +=
      "</style>\n<script>document.documentElement.dataset.theme = matchMedia(\"(prefers-color-scheme:dark)\").matches "
      "? \"dark\" : \"light\";</script>\n</head>\n<body" +
      (reload_ > 0 ? " data-reload=\"" + std::to_string(reload_) + "\"" : "") +
      ">\n<header>\n<button id=\"theme\" type=\"button\" title=\"light or dark\">◐</button>\n<h1>" + escaped(title_) +
      "</h1>\n";
  if (!subtitle_.empty()) out += "<p class=\"subtitle\">" + escaped(subtitle_) + "</p>\n";
  if (sections_.size() > 1) {
    out += "<nav>";
    for (size_t i = 0; i < sections_.size(); ++i) {
      out += "<a href=\"#section-" + std::to_string(i + 1) + "\">" + escaped(sections_[i]) + "</a>";
    }
    out += "</nav>\n";
  }
  out += "</header>\n<main>\n" + body_ + (sections_.empty() ? "" : "</section>\n") +
         "</main>\n<div id=\"tip\" hidden></div>\n<script>\n";
  out += page_script();
  return out + "</script>\n</body>\n</html>\n";
}

void HtmlReport::write(const std::filesystem::path& path) const { write_file_atomically(path, html()); }

}  // namespace plumb

// The page of a diff.
#pragma once

#include "plumb/analysis/html_report.h"
#include "plumb/recording/diff.h"

namespace plumb {

// Shows the conclusion, the graph with what differs in color, and a table. `more` are paragraphs after the conclusion.
HtmlReport diff_page(const DiffReport& report, const std::string& more = "");

}  // namespace plumb

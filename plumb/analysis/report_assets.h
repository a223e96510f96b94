// The style and the script of a page.
#pragma once

#include <string_view>

namespace plumb {

std::string_view report_style();
// Draws nothing itself: hovering, hiding curves, sorting, filtering, histograms. When done it sets data-ready="1" on
// the body; an error anywhere later or earlier sets data-error to its message.
std::string_view report_script();
// Of history views; the script goes before the end of the page's own.
std::string_view history_style();
std::string_view history_script();
std::string_view report_script_end();

}  // namespace plumb

// The style and the script of a page.
#pragma once

#include <string_view>

namespace plumb {

std::string_view report_style();
// Draws nothing itself: hovering, hiding curves, sorting, filtering, histograms. When done it sets data-ready="1" on
// the body; an error anywhere later or earlier sets data-error to its message.
std::string_view report_script();

}  // namespace plumb

// The style and the scripts of pages and pictures: the files in plumb/analysis/page, as they were when plumb was built.
#pragma once

#include <string_view>

namespace plumb {

std::string_view page_style();
std::string_view page_script();
// Returns the style of pictures that stand alone: light or dark as the viewer prefers.
std::string_view picture_style();

}  // namespace plumb

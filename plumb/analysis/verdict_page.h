// The page of a verdict on number formats.
#pragma once

#include <string>

#include "plumb/analysis/html_report.h"
#include "plumb/transforms/verdict/verdict.h"

namespace plumb {

// A sentence that concludes, recipe x (backward, forward, verdict), the products in the way of each recipe, worst
// first, and the recipe to copy. `model`: its name, for the title; may be empty.
HtmlReport verdict_page(const VerdictReport& report, const std::string& model);

}  // namespace plumb

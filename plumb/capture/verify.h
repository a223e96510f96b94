// Compares a captured graph with a second capture on other input values, and its replay with eager.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "plumb/capture/capture.h"

namespace plumb {

// Returns from where on two captures differ, ", from aten::relu on", or "" where that cannot be said; nullopt if they
// are equal.
std::optional<std::string> difference_of(const Graph& graph, const Graph& other);

// Throws an Error of kind Capture if two captures differ, or if the graph's outputs, gradients or buffers are not bit
// for bit eager's on other values.
void verify_capture(const CaptureRequest& request, GraphModule& first,
                    const std::function<std::shared_ptr<GraphModule>(const CaptureRequest&)>& capture_again);

}  // namespace plumb

// Why tensors of a tracked graph are not near unit scale: where each one's scale comes from, and what the report of
// unit_scale says of that operator.
//
//   std::cout << plumb::to_text(plumb::scale_causes(plumb::scales_graph(*tracked), tracked->reports));
#pragma once

#include <string>
#include <vector>

#include "plumb/transforms/report.h"
#include "plumb/transforms/track/scales_graph.h"

namespace plumb {

// Tensors with one cause: operators of one kind, for one reason.
struct ScaleCause {
  bool gradients = false;      // the tensors are gradients, else values
  bool small = false;          // their standard deviations are below the limit, else above
  std::string target;          // "aten::mul.Tensor"; "a parameter" or "an input" for a value that comes with its scale
  std::string reason;          // why that operator changes scales
  double factor = 1;           // the change of scale at `nodes`, their geometric mean
  double least = 0, most = 0;  // standard deviations of the tensors
  std::vector<std::string> nodes;    // names of the values, full names of the parameters, where the change happens
  std::vector<std::string> tensors;  // named likewise: their scale is outside
};

// Explains every value that a gradient flows through, and every gradient, whose standard deviation is outside of
// [low, high], largest groups first. From such a tensor the walk goes to what it was computed from (a gradient: to the
// gradients of what uses the value), always to the tensor of the nearest scale, until one is within [1/2, 2]; the cause
// is the largest change away from 1 on the way. A product's result and gradients take over the scale of the other
// operand. Tensors of one element are not looked at. Linear time. Throws Error(InvalidArgument) unless 0 < low < high,
// Error(InvalidState) if no gradient was measured.
std::vector<ScaleCause> scale_causes(const ScalesGraph& graph, const std::vector<Report>& reports, double low = 0.25,
                                     double high = 4);

// A line for each cause.
std::string to_text(const std::vector<ScaleCause>& causes);

}  // namespace plumb

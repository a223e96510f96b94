// The scale of every tensor of a model and of its gradient, against what number formats can hold.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace plumb {

// Statistics of one tensor. Unknown ones stay NaN or empty and are not drawn.
struct ScaleStats {
  double mean_abs = NAN, std = NAN, abs_max = NAN, abs_min = NAN;
  int64_t numel = 0, nan_count = 0, inf_count = 0, zero_count = 0;
  // Shares of all elements (0..1) that the direction's format rounds to zero, holds with fewer digits, cannot reach.
  std::optional<double> underflow = {}, subnormal = {}, overflow = {};
  // (e, n): n elements with 2^e <= |x| < 2^(e+1), ascending; e = -127 holds zeros, 128 NaN and infinities.
  std::vector<std::pair<int, int64_t>> exponents = {};
};

struct ScaleRow {
  std::string name;         // the value's name in the graph
  std::string module_path;  // "layers.0.attn", "" for the root
  std::string op;           // "aten::linear"
  std::optional<ScaleStats> fwd = {}, bwd = {};
  // Rows of several variants with the same key are drawn in one row; empty: module path and name.
  std::string key = {};
};

// The absolute values a format holds: with all digits from min_normal to max, with fewer from min_subnormal.
struct FormatBand {
  std::string name;
  double min_subnormal = 0, min_normal = 0, max = 0;
};

struct ScaleVariant {
  std::string name;            // "before", "after unit scaling"
  std::vector<ScaleRow> rows;  // in graph order
};

struct ScaleChart {
  std::string title;
  std::vector<ScaleVariant> variants;
  std::optional<FormatBand> fwd_band = {}, bwd_band = {};
};

// Draws a row a tensor; on the left the forward values, on the right the gradients, in powers of two. A dot is the
// standard deviation, a stroke the mean absolute value, a bar holds 90 % of the elements (with exponents given), a thin
// line all except zeros. Throws Error(InvalidArgument) for more than 20,000 rows, or a band that is not 0 <
// min_subnormal <= min_normal < max.
std::string to_svg(const ScaleChart& chart);

}  // namespace plumb

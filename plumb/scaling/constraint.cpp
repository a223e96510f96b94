#include "plumb/scaling/constraint.h"

#include <cmath>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/core/table.h"

namespace plumb {
namespace {

struct Named {
  const char* name;
  size_t min_scales, max_scales;
  double (*fn)(std::span<const double>);
};

constexpr size_t kAny = static_cast<size_t>(-1);

double first(std::span<const double> s) { return s[0]; }
double second(std::span<const double> s) { return s[1]; }
double third(std::span<const double> s) { return s[2]; }

constexpr Named kNamed[] = {
    {"gmean", 1, kAny, gmean},
    {"hmean", 1, kAny, hmean},
    {"amean", 1, kAny, amean},
    {"to_output_scale", 1, kAny, first},
    {"to_grad_input_scale", 2, 2, second},
    {"to_left_grad_scale", 3, 3, second},
    {"to_right_grad_scale", 3, 3, third},
};

const Named& find(std::string_view name) {
  for (const auto& named : kNamed) {
    if (name == named.name) return named;
  }
  throw Error(ErrorKind::UnknownName, "There is no constraint named '" + std::string(name) + "'.", "",
              "one of " + join(kNamed, &Named::name) + ", no constraint, or a function of your own");
}

}  // namespace

double gmean(std::span<const double> scales) {
  double product = 1;
  for (double s : scales) product *= s;
  return std::pow(product, 1.0 / static_cast<double>(scales.size()));
}

double hmean(std::span<const double> scales) {
  double sum = 0;
  for (double s : scales) sum += 1 / s;
  return 1 / (sum / static_cast<double>(scales.size()));
}

double amean(std::span<const double> scales) {
  double sum = 0;
  for (double s : scales) sum += s;
  return sum / static_cast<double>(scales.size());
}

Constraint::Constraint(std::string_view name) {
  if (name.empty()) return;
  fn_ = find(name).fn;
  name_ = std::string(name);
}

std::vector<double> Constraint::apply(std::vector<double> scales) const {
  if (name_) return apply_constraint(*name_, std::move(scales));
  if (!fn_ || scales.empty()) return scales;
  const double scale = fn_(scales);
  if (!std::isfinite(scale)) {
    throw Error(ErrorKind::Numerics,
                str("the constraint's function returns ", scale, " for the scales ",
                    join(scales, [](double each) { return short_number(each); })),
                "", "return one finite scale, or a name: to_output_scale, gmean, hmean or amean");
  }
  scales.assign(scales.size(), scale);
  return scales;
}

std::vector<double> apply_constraint(std::optional<std::string_view> name, std::vector<double> scales) {
  if (!name || name->empty()) return scales;
  const Named& named = find(*name);
  if (scales.size() < named.min_scales || scales.size() > named.max_scales) {
    throw Error(ErrorKind::InvalidArgument,
                "Constraint '" + std::string(*name) + "' does not fit an operator with " +
                    std::to_string(scales.size()) + " constrained scales.",
                "", "to_output_scale, gmean, hmean or amean, which fit every operator");
  }
  scales.assign(scales.size(), named.fn(scales));
  return scales;
}

}  // namespace plumb

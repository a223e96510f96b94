#include "plumb/transforms/fold/factor_equations.h"

#include <cmath>

namespace plumb {
namespace {

// Logarithms are sums of a few dozen numbers near 1: what is left of equal ones.
constexpr double kRounding = 1e-9;

}  // namespace

LogFactor operator+(const LogFactor& a, const LogFactor& b) {
  LogFactor sum(a.number + b.number);
  auto i = a.terms.begin(), j = b.terms.begin();
  while (i != a.terms.end() || j != b.terms.end()) {
    if (j == b.terms.end() || (i != a.terms.end() && i->first < j->first)) {
      sum.terms.push_back(*i++);
    } else if (i == a.terms.end() || j->first < i->first) {
      sum.terms.push_back(*j++);
    } else {
      if (const double both = i->second + j->second; std::abs(both) > kRounding) sum.terms.emplace_back(i->first, both);
      ++i, ++j;
    }
  }
  return sum;
}

LogFactor operator*(const LogFactor& a, double multiple) {
  if (multiple == 0) return {};
  LogFactor product = a;
  product.number *= multiple;
  for (auto& term : product.terms) term.second *= multiple;
  return product;
}

LogFactor FactorEquations::add_unknown(int rank) {
  LogFactor factor;
  factor.terms.emplace_back(static_cast<int>(unknowns_.size()), 1.0);
  unknowns_.push_back({rank, std::nullopt});
  return factor;
}

// Decided unknowns are kept in terms of undecided ones, so that chains of them stay short. Every step leaves fewer
// decided ones, for none is in terms of itself.
LogFactor FactorEquations::resolve(const LogFactor& a) {
  LogFactor open = a;
  for (bool again = true; again;) {
    again = false;
    LogFactor next(open.number);
    for (const auto& [unknown, multiple] : open.terms) {
      const auto& known = unknowns_[static_cast<size_t>(unknown)].is;
      again = again || known.has_value();
      LogFactor term;
      term.terms.emplace_back(unknown, 1.0);
      next = next + (known ? *known : term) * multiple;
    }
    open = std::move(next);
  }
  if (a.terms.size() == 1 && a.number == 0 && a.terms[0].second == 1) {
    if (auto& known = unknowns_[static_cast<size_t>(a.terms[0].first)].is) known = open;
  }
  return open;
}

int FactorEquations::choose(const LogFactor& resolved) const {
  int best = -1;
  for (const auto& [unknown, multiple] : resolved.terms) {
    if (best < 0 || unknowns_[static_cast<size_t>(unknown)].rank >= unknowns_[static_cast<size_t>(best)].rank)
      best = unknown;
  }
  return best;
}

std::optional<int> FactorEquations::highest_rank(const LogFactor& a) {
  const int unknown = choose(resolve(a));
  if (unknown < 0) return std::nullopt;
  return unknowns_[static_cast<size_t>(unknown)].rank;
}

bool FactorEquations::equate(const LogFactor& a, const LogFactor& b) {
  LogFactor difference = resolve(a - b);
  const int unknown = choose(difference);
  if (unknown < 0) return std::abs(difference.number) < kRounding;
  double multiple = 0;
  std::erase_if(difference.terms, [&](const auto& term) {
    if (term.first == unknown) multiple = term.second;
    return term.first == unknown;
  });
  unknowns_[static_cast<size_t>(unknown)].is = difference * (-1 / multiple);
  return true;
}

}  // namespace plumb

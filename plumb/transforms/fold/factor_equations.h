// Linear equations between the logarithms of factors: products of factors that must be equal. Not for other rooms.
#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace plumb {

// The logarithm of a factor: a number plus multiples of unknowns.
struct LogFactor {
  double number = 0;
  std::vector<std::pair<int, double>> terms;  // (unknown, multiple), by unknown, no multiple is 0

  LogFactor() = default;
  LogFactor(double n) : number(n) {}  // NOLINT: implicit by design
};
LogFactor operator+(const LogFactor& a, const LogFactor& b);
LogFactor operator*(const LogFactor& a, double multiple);
inline LogFactor operator-(const LogFactor& a, const LogFactor& b) { return a + b * -1; }

class FactorEquations {
 public:
  // An equation decides, of two unknowns, the one of the higher rank, then the one made later.
  LogFactor add_unknown(int rank);

  // Returns whether `a` and `b` are equal from now on. False if what was equated before says otherwise: nothing changes
  // then, and resolve(a - b) is a number.
  bool equate(const LogFactor& a, const LogFactor& b);

  // Returns `a` in terms of unknowns that no equation has decided.
  LogFactor resolve(const LogFactor& a);
  // Returns the rank of its undecided unknown that would be decided first; nothing if it is a number.
  std::optional<int> highest_rank(const LogFactor& a);
  // Returns `a` with 0 for the remaining unknowns.
  double value(const LogFactor& a) { return resolve(a).number; }

 private:
  struct Unknown {
    int rank = 0;
    std::optional<LogFactor> is;  // once decided
  };
  int choose(const LogFactor& resolved) const;
  std::vector<Unknown> unknowns_;
};

}  // namespace plumb

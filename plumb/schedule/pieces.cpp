#include "plumb/schedule/pieces.h"

#include <algorithm>
#include <cmath>

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {
namespace schedule_internal {
namespace {

std::vector<double> prefix_sums(const std::vector<double>& values, const std::function<double(int)>& times) {
  std::vector<double> sums = {0};
  for (std::size_t i = 0; i < values.size(); ++i) sums.push_back(sums.back() + values[i] * times(static_cast<int>(i)));
  return sums;
}

void check_list(const std::vector<double>& values, std::size_t size, const char* what) {
  if (values.size() != size)
    throw Error(ErrorKind::InvalidArgument,
                str("the ", what, " costs have ", values.size(), " entries for ", size, " pieces"));
  for (const double value : values) {
    if (!std::isfinite(value) || value < 0)
      throw Error(ErrorKind::InvalidArgument, str("the ", what, " cost ", value, " of a piece cannot be"));
  }
}

}  // namespace

void check_pieces(const PieceCosts& pieces) {
  constexpr std::size_t kMost = 4096;  // the table of messages is quadratic
  const std::size_t size = pieces.resident.size();
  if (size == 0 || size > kMost || pieces.ways.empty())
    throw Error(ErrorKind::InvalidArgument, str("a model of ", size, " pieces cannot be planned"), "",
                str("1 to ", kMost, " pieces, with costs for at least one way of recomputation"));
  check_list(pieces.resident, size, "resident");
  if (!pieces.gradient.empty()) check_list(pieces.gradient, size, "gradient");
  for (const PieceCosts::Way& way : pieces.ways) {
    check_list(way.forward, size, "forward");
    check_list(way.input, size, "input backward");
    check_list(way.weight, size, "weight backward");
    check_list(way.full, size, "full backward");
    check_list(way.activation, size, "activation");
    if (!way.held.empty()) check_list(way.held, size, "held");
    for (const auto list : kWorking) {
      if (!(way.working.*list).empty()) check_list(way.working.*list, size, "working");
    }
  }
  check_list({pieces.latency, pieces.seconds_per_copied}, 2, "message");
  for (const PieceCosts::Value& value : pieces.values) {
    check_list({value.seconds, value.bytes}, 2, "message");
    if (value.from < 0 || value.last <= value.from || value.last >= pieces.size())
      throw Error(ErrorKind::InvalidArgument, str("a value goes from piece ", value.from, " to piece ", value.last));
  }
}

PieceSums::PieceSums(const PieceCosts& pieces, double link, const std::function<double(int)>& off)
    : size_(pieces.resident.size()), seconds_per_copied_(pieces.seconds_per_copied) {
  const auto same = [](int) { return 1.0; };
  for (const PieceCosts::Way& way : pieces.ways)
    ways_.push_back({prefix_sums(way.forward, off), prefix_sums(way.input, off), prefix_sums(way.weight, off),
                     prefix_sums(way.full, off), prefix_sums(way.activation, same),
                     prefix_sums(way.held.empty() ? way.activation : way.held, same), way.working});
  resident_ = prefix_sums(pieces.resident, same);
  gradient_ = prefix_sums(pieces.gradient.empty() ? std::vector<double>(size_, 0) : pieces.gradient, same);
  seconds_ = leaving(pieces, &PieceCosts::Value::seconds, link);
  bytes_ = leaving(pieces, &PieceCosts::Value::bytes, 1);
}

// A value from piece f, last used in l, leaves the stages [first, last) with first <= f < last <= l.
std::vector<double> PieceSums::leaving(const PieceCosts& pieces, double PieceCosts::Value::*of, double times) const {
  const std::size_t width = size_ + 1;
  std::vector<double> sums(width * width, 0);
  for (const PieceCosts::Value& value : pieces.values) {
    double* row = &sums[static_cast<std::size_t>(value.from) * width];
    row[value.from + 1] += value.*of * times;
    row[value.last + 1] -= value.*of * times;
  }
  for (std::size_t first = size_; first-- > 0;) {
    for (std::size_t last = 1; last <= size_; ++last) sums[first * width + last] += sums[first * width + last - 1];
  }
  for (std::size_t first = size_; first-- > 0;) {
    for (std::size_t last = 0; last <= size_; ++last) sums[first * width + last] += sums[(first + 1) * width + last];
  }
  for (double& sum : sums) sum = std::max(0.0, sum);  // differences of rounding
  return sums;
}

StageTimes PieceSums::times(const PieceStages& stages, const std::vector<int>& rank, int num_ranks,
                            double latency) const {
  StageTimes times;
  times.rank = rank;
  times.resident.assign(num_ranks, 0);
  const std::size_t count = stages.begins.size();
  Costs& costs = times.costs;
  for (auto* list : {&costs.forward, &costs.input, &costs.weight, &costs.full, &costs.communication, &costs.activation,
                     &costs.held_for_weight, &costs.gradient, &costs.values, &costs.copies}) {
    list->clear();
    list->reserve(count);
  }
  for (const auto list : kWorking) (costs.working.*list).clear();
  for (std::size_t s = 0; s < count; ++s) {
    const std::size_t first = stages.begins[s], last = s + 1 < count ? stages.begins[s + 1] : size_;
    const Way& way = ways_[stages.ways[s]];
    const auto sum = [&](const std::vector<double>& list) { return list[last] - list[first]; };
    costs.forward.push_back(sum(way.forward));
    costs.input.push_back(sum(way.input));
    costs.weight.push_back(sum(way.weight));
    costs.full.push_back(sum(way.full));
    costs.activation.push_back(sum(way.activation));
    costs.held_for_weight.push_back(costs.activation[s] > 0 ? sum(way.held) / costs.activation[s] : 1);
    costs.gradient.push_back(sum(gradient_));
    for (const auto list : kWorking) {
      const auto& of = way.working.*list;
      const auto at = [&](std::size_t i) { return of.begin() + static_cast<std::ptrdiff_t>(i); };
      (costs.working.*list).push_back(of.empty() ? 0 : *std::max_element(at(first), at(last)));
    }
    const std::size_t stage = first * (size_ + 1) + last;
    costs.communication.push_back(last == size_ ? 0 : latency + seconds_[stage]);
    costs.values.push_back(bytes_[stage]);
    costs.copies.push_back(bytes_[stage] * seconds_per_copied_);
    times.resident[rank[s]] += sum(resident_);
  }
  return times;
}

}  // namespace schedule_internal

StageCosts costs_of_stages(const PieceCosts& pieces, const PieceStages& stages) {
  schedule_internal::check_pieces(pieces);
  const auto& begins = stages.begins;
  const bool rises = !begins.empty() && begins[0] == 0 && begins.back() < pieces.size() &&
                     std::ranges::adjacent_find(begins, std::greater_equal<>()) == begins.end();
  const auto known = [&](int way) { return way >= 0 && way < static_cast<int>(pieces.ways.size()); };
  if (!rises || stages.ways.size() != begins.size() || !std::ranges::all_of(stages.ways, known))
    throw Error(ErrorKind::InvalidArgument, "the stages are no cut of these pieces", "",
                "stages begin at piece 0 and then at later and later ones");
  const schedule_internal::PieceSums sums(pieces, 1, [](int) { return 1.0; });
  std::vector<int> own_rank(begins.size());
  for (std::size_t s = 0; s < begins.size(); ++s) own_rank[s] = static_cast<int>(s);
  auto times = sums.times(stages, own_rank, static_cast<int>(begins.size()), pieces.latency);
  return {.costs = std::move(times.costs), .resident = std::move(times.resident)};
}

PieceStages balanced_stages(const PieceCosts& pieces, int num_stages) {
  const int size = pieces.size();
  if (num_stages < 1 || num_stages > size)
    throw Error(ErrorKind::InvalidArgument, str(size, " pieces cannot be cut into ", num_stages, " stages"), "",
                "fewer ranks, or fewer stages a rank");
  const PieceCosts::Way& way = pieces.ways.at(0);
  std::vector<double> sums = {0};
  for (int i = 0; i < size; ++i) sums.push_back(sums.back() + way.forward[i] + way.input[i] + way.weight[i]);
  std::vector<std::vector<double>> slowest(num_stages + 1, std::vector<double>(size + 1, schedule_internal::kForever));
  std::vector<std::vector<int>> from(num_stages + 1, std::vector<int>(size + 1, 0));
  slowest[0][0] = 0;
  for (int s = 1; s <= num_stages; ++s) {
    for (int last = s; last <= size; ++last) {
      for (int first = s - 1; first < last; ++first) {
        const double value = std::max(slowest[s - 1][first], sums[last] - sums[first]);
        if (value < slowest[s][last]) slowest[s][last] = value, from[s][last] = first;
      }
    }
  }
  PieceStages stages{std::vector<int>(num_stages), std::vector<int>(num_stages, 0)};
  for (int s = num_stages, last = size; s > 0; --s) stages.begins[s - 1] = last = from[s][last];
  return stages;
}

}  // namespace plumb

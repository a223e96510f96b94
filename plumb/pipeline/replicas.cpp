#include "plumb/pipeline/replicas.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/pipeline/describe.h"
#include "plumb/pipeline/shared_parameters.h"

namespace plumb {
namespace {

// Deals parameters out, largest first, each to the replica that has least.
void deal_out(const std::vector<std::int64_t>& sizes, int replicas, const std::function<void(size_t, int)>& give) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::int64_t> load(replicas, 0);
  for (size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += sizes[i];
    give(i, static_cast<int>(least - load.begin()));
  }
}

}  // namespace

ReplicaSums::ReplicaSums(ProcessGroup group, const std::string& description,
                         const std::map<int, std::vector<NamedTensor>>& parameters, std::map<int, std::set<int>> shared,
                         const RunPlan& plan)
    : transport_(std::move(group)) {
  std::string text = description;
  for (const auto& [stage, list] : parameters) {
    for (const auto& p : list) {
      text += "\nstage " + std::to_string(stage) + " " + p.name + " " + describe(p.tensor) + " " +
              std::to_string(content_hash(p.tensor));
    }
  }
  const auto texts = transport_.exchange(text);
  for (size_t r = 0; r < texts.size(); r++) {
    if (texts[r] == text) continue;
    size_t at = 0;
    while (at < text.size() && at < texts[r].size() && text[at] == texts[r][at]) at++;
    const size_t begin = text.rfind('\n', at) + 1;
    throw Error(ErrorKind::Communication,
                "replicas " + std::to_string(rank()) + " and " + std::to_string(r) +
                    " differ: " + text.substr(begin, text.find('\n', at) - begin) + " against " +
                    texts[r].substr(begin, texts[r].find('\n', at) - begin),
                "", "make every replica from the same model, weights and schedule");
  }
  for (const auto& run : plan.actions) {
    if (run.completes_gradients) parts_.push_back({run.action.stage, {}});
  }
  Part copies{-1, {}};
  for (const auto& [stage, list] : parameters) {
    auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& p) { return p.stage == stage; });
    for (size_t i = 0; i < list.size(); i++) {
      const bool is_copy = shared[stage].count(static_cast<int>(i)) > 0 || part == parts_.end();
      (is_copy ? copies : *part).members.push_back({stage, static_cast<int>(i), 0});
    }
  }
  parts_.push_back(std::move(copies));
  for (auto& part : parts_) {
    std::vector<std::int64_t> sizes;
    for (const auto& m : part.members) sizes.push_back(parameters.at(m.stage)[m.index].tensor.numel());
    deal_out(sizes, size(), [&](size_t i, int owner) { part.members[i].owner = owner; });
    to_owners_.push_back(add_messages(static_cast<int>(to_owners_.size()), 1));
  }
  from_owners_ = add_messages(static_cast<int>(parts_.size()), 2);
}

ReplicaSums::Way ReplicaSums::add_messages(int from, int phase) {
  Way way{std::vector<int>(size(), -1), std::vector<int>(size(), -1)};
  for (int peer = 0; peer < size(); peer++) {
    if (peer == rank()) continue;
    const PlannedMessage message{{MessageKind::Replicas, from, phase}, peer};
    way.sends[peer] = static_cast<int>(plan_.sends.size());
    way.receives[peer] = static_cast<int>(plan_.receives.size());
    plan_.sends.push_back(message);
    plan_.receives.push_back(message);
  }
  return way;
}

void ReplicaSums::begin_step(double rows, bool weighted) {
  rows_.assign(size(), 0);
  rows_[rank()] = rows;
  weighted_ = weighted;
  loss_ = at::Tensor();
  transport_.begin_step(plan_);
}

void ReplicaSums::send_part(size_t part, const std::function<at::Tensor(const Part::Member&)>& gradient) {
  std::vector<std::vector<MessageValue>> values(size());
  for (auto& v : values) v.push_back({at::scalar_tensor(rows_[rank()], at::kDouble)});
  for (const auto& m : parts_[part].members) {
    if (m.owner != rank()) values[m.owner].push_back({gradient(m)});
  }
  for (int peer = 0; peer < size(); peer++) {
    if (peer != rank()) transport_.send(to_owners_[part].sends[peer], values[peer]);
  }
}

void ReplicaSums::stage_done(int stage, const GradientKeeper& gradients) {
  for (size_t i = 0; i < parts_.size(); i++) {
    if (parts_[i].stage == stage) send_part(i, [&](const Part::Member& m) { return gradients.step_gradient(m.index); });
  }
}

at::Tensor ReplicaSums::add_up(const std::vector<at::Tensor>& by_replica) const {
  const double total = std::accumulate(rows_.begin(), rows_.end(), 0.0);
  at::Tensor sum;
  for (int r = 0; r < size(); r++) {
    if (!by_replica[r].defined()) continue;
    // Equal batches need no factor, and get none.
    const double factor = weighted_ ? rows_[r] * size() / total : 1;
    const at::Tensor part = factor == 1 ? by_replica[r] : by_replica[r] * factor;
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

void ReplicaSums::finish(const std::map<int, GradientKeeper*>& gradients, const at::Tensor& loss) {
  at::NoGradGuard no_grad;
  const std::string at_end = "the end of the step";
  auto own = [&](const Part::Member& m) { return gradients.at(m.stage)->step_gradient(m.index); };
  send_part(parts_.size() - 1, own);
  // [part][replica]: the gradients of the members this replica owns.
  std::vector<std::vector<std::vector<MessageValue>>> came(parts_.size());
  for (size_t i = 0; i < parts_.size(); i++) {
    came[i].resize(size());
    for (int peer = 0; peer < size(); peer++) {
      if (peer == rank()) continue;
      came[i][peer] = transport_.receive(to_owners_[i].receives[peer], at_end);
      rows_[peer] = came[i][peer].at(0).tensor.item<double>();
    }
  }
  std::vector<MessageValue> sums{{loss.defined() ? loss.to(at::kDouble) : loss}};
  for (size_t i = 0; i < parts_.size(); i++) {
    size_t k = 1;
    for (const auto& m : parts_[i].members) {
      if (m.owner != rank()) continue;
      std::vector<at::Tensor> by_replica(size());
      for (int r = 0; r < size(); r++) by_replica[r] = r == rank() ? own(m) : came[i][r].at(k).tensor;
      k++;
      sums.push_back({add_up(by_replica)});
      // The sum may be what another keeps: every replica gets memory of its own.
      gradients.at(m.stage)->set_step_gradient(m.index, sums.back().tensor);
    }
    came[i].clear();
  }
  for (int peer = 0; peer < size(); peer++) {
    if (peer != rank()) transport_.send(from_owners_.sends[peer], sums);
  }
  std::vector<at::Tensor> losses(size());
  losses[rank()] = loss;
  for (int peer = 0; peer < size(); peer++) {
    if (peer == rank()) continue;
    auto values = transport_.receive(from_owners_.receives[peer], at_end);
    losses[peer] = values.at(0).tensor;
    size_t k = 1;
    for (const auto& part : parts_) {
      for (const auto& m : part.members) {
        if (m.owner == peer) gradients.at(m.stage)->set_step_gradient(m.index, values.at(k++).tensor);
      }
    }
  }
  transport_.end_step();
  if (std::all_of(losses.begin(), losses.end(), [](const auto& l) { return l.defined(); })) {
    const double total = std::accumulate(rows_.begin(), rows_.end(), 0.0);
    double mean = 0;
    for (int r = 0; r < size(); r++) mean += losses[r].item<double>() * rows_[r] / total;
    loss_ = at::scalar_tensor(mean, loss.options());
  }
}

}  // namespace plumb

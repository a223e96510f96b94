#include "plumb/pipeline/runtime/replicas.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/runtime/shared_parameters.h"

namespace plumb {
namespace {

// Deals parameters out, largest first, each to the replica that has least.
void deal_out(const std::vector<std::int64_t>& sizes, int replicas, const std::function<void(size_t, int)>& give) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::int64_t> load(replicas, 0);
  for (size_t i : order) {
    const auto least = std::ranges::min_element(load);
    *least += sizes[i];
    give(i, static_cast<int>(least - load.begin()));
  }
}

// Values that came through the CPU go to the device that uses them.
at::Tensor on_device_of(const at::Tensor& of, const at::Tensor& value) {
  return value.defined() && of.defined() ? value.to(of.device()) : value;
}

}  // namespace

ReplicaSums::ReplicaSums(ProcessGroup group, const std::string& description,
                         const std::map<int, std::vector<NamedTensor>>& parameters, std::map<int, std::set<int>> shared,
                         const RunPlan& plan, const std::map<int, std::vector<NamedTensor>>& buffers)
    : transport_(std::move(group)) {
  std::string text = description;
  for (const auto& [stage, list] : parameters) {
    for (const auto& p : list) {
      // Each may have a device of its own.
      text += str("\nstage ", stage, " ", p.name, " ",
                  describe(p.tensor.sizes(), at::TensorOptions(p.tensor.scalar_type())), " ", content_hash(p.tensor));
    }
  }
  const auto texts = transport_.exchange(text);
  for (size_t r = 0; r < texts.size(); r++) {
    if (texts[r] == text) continue;
    size_t at = 0;
    while (at < text.size() && at < texts[r].size() && text[at] == texts[r][at]) at++;
    const size_t begin = text.rfind('\n', at) + 1;
    throw Error(ErrorKind::Communication,
                str("replicas ", rank(), " and ", r, " differ: ", text.substr(begin, text.find('\n', at) - begin),
                    " against ", texts[r].substr(begin, texts[r].find('\n', at) - begin)),
                "", "make every replica from the same model, weights and schedule");
  }
  transport_.connect_host(/*may_look=*/false);  // the rank computes meanwhile
  transport_.connect_device();
  for (int r = 0; r < size(); r++) {
    if (r != rank()) peers_.push_back(r);
  }
  for (const auto& run : plan.actions) {
    if (run.completes_gradients) parts_.push_back({run.action.stage, {}});
  }
  Part copies{-1, {}};
  for (const auto& [stage, list] : parameters) {
    auto part = std::ranges::find_if(parts_, [&](const Part& p) { return p.stage == stage; });
    for (size_t i = 0; i < list.size(); i++) {
      const bool is_copy = shared[stage].count(static_cast<int>(i)) > 0 || part == parts_.end();
      (is_copy ? copies : *part).members.push_back({stage, static_cast<int>(i), 0, list[i].tensor});
    }
  }
  for (const auto& [stage, list] : buffers) {
    for (size_t i = 0; i < list.size(); i++)
      copies.members.push_back({stage, static_cast<int>(i), 0, list[i].tensor, /*is_buffer=*/true});
  }
  parts_.push_back(std::move(copies));
  for (auto& part : parts_) {
    std::vector<std::int64_t> sizes;
    for (const auto& m : part.members) sizes.push_back(m.parameter.numel());
    deal_out(sizes, size(), [&](size_t i, int owner) { part.members[i].owner = owner; });
    const auto number = static_cast<int>(to_owners_.size());
    to_owners_.push_back(add_messages(number, 1));
    from_owners_.push_back(add_messages(number, 2));
  }
  thread_ = std::thread([this] { run(); });
}

ReplicaSums::~ReplicaSums() {
  if (!thread_.joinable()) return;
  transport_.interrupt();
  change([&] { given_up_ = closing_ = true; });
  thread_.join();
}

ReplicaSums::Way ReplicaSums::add_messages(int from, int phase) {
  Way way{std::vector<int>(size(), -1), std::vector<int>(size(), -1)};
  for (int peer : peers_) {
    const PlannedMessage message{{MessageKind::Replicas, from, phase}, peer};
    way.sends[peer] = static_cast<int>(plan_.sends.size());
    way.receives[peer] = static_cast<int>(plan_.receives.size());
    plan_.sends.push_back(message);
    plan_.receives.push_back(message);
    // Replica by replica, both ways at once.
    if (transport_.group().device()) plan_.order.push_back({{true, way.sends[peer]}, {false, way.receives[peer]}});
  }
  return way;
}

void ReplicaSums::begin_step(double rows, bool weighted) {
  rows_.assign(size(), 0);
  rows_[rank()] = rows;
  weighted_ = weighted;
  losses_.assign(size(), {});
  loss_ = at::Tensor();
  for (auto& part : parts_) {
    part.handed = part.summed = false;
    part.own.clear();
    part.sums.assign(part.members.size(), {});
  }
  transport_.begin_step(plan_);
  change([&] { under_way_ = true; });
}

void ReplicaSums::hand_over(Part& part, const std::map<int, const GradientAccumulator*>& gradients,
                            const std::map<int, Tensors>& buffers) {
  for (const auto& m : part.members) {
    part.own.push_back(m.is_buffer ? buffers.at(m.stage)[m.index] : gradients.at(m.stage)->step_gradient(m.index));
  }
  part.event.action = {.kind = ActionKind::ReduceGrad, .stage = part.stage};
  part.event.waiting = seconds_now();
  change([&] { part.handed = true; });
}

void ReplicaSums::change(const std::function<void()>& what) {
  {
    std::lock_guard<std::mutex> lock(lock_);
    what();
  }
  changed_.notify_all();
}

void ReplicaSums::stage_done(int stage, const GradientAccumulator& gradients) {
  for (auto& part : parts_) {
    if (part.stage == stage) hand_over(part, {{stage, &gradients}});
  }
}

void ReplicaSums::check() const {
  if (!failed_) return;
  std::lock_guard<std::mutex> lock(lock_);
  std::rethrow_exception(failure_);
}

bool ReplicaSums::summed(int stage) const {
  std::lock_guard<std::mutex> lock(lock_);
  return std::ranges::all_of(parts_, [&](const Part& p) { return p.stage != stage || p.summed; });
}

void ReplicaSums::finish(const std::map<int, GradientAccumulator*>& gradients, const at::Tensor& loss,
                         std::map<int, Tensors>& buffers) {
  losses_[rank()] = loss;
  hand_over(parts_.back(), {gradients.begin(), gradients.end()}, buffers);
  {
    std::unique_lock<std::mutex> lock(lock_);
    changed_.wait(lock, [&] { return !under_way_; });
  }
  check();
  at::NoGradGuard no_grad;
  for (auto& part : parts_) {
    for (size_t i = 0; i < part.members.size(); i++) {
      const auto& m = part.members[i];
      if (m.is_buffer) {
        buffers.at(m.stage)[m.index] = part.sums[i];
      } else {
        gradients.at(m.stage)->set_step_gradient(m.index, part.sums[i]);
      }
    }
    part.own.clear();
    part.sums.clear();
  }
  if (std::ranges::all_of(losses_, [](const auto& l) { return l.defined(); })) {
    const double total = std::accumulate(rows_.begin(), rows_.end(), 0.0);
    for (auto& theirs : losses_) theirs = on_device_of(loss, theirs);
    loss_ = tree_sum(losses_) / total;
  }
}

std::vector<TimelineEvent> ReplicaSums::timeline() const {
  std::vector<TimelineEvent> events;
  for (const auto& part : parts_) {
    if (part.stage >= 0) events.push_back(part.event);
  }
  return events;
}

void ReplicaSums::tell_failure(const std::string& reason) noexcept {
  // The thread first: what it waits for may never come.
  transport_.interrupt();
  {
    std::unique_lock<std::mutex> lock(lock_);
    given_up_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !under_way_; });
  }
  transport_.tell_failure(reason);
}

void ReplicaSums::run() {
  std::unique_lock<std::mutex> lock(lock_);
  while (true) {
    changed_.wait(lock, [&] { return under_way_ || closing_; });
    if (closing_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      sum_all();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure) {
      failure_ = failure;
      failed_ = true;
    }
    under_way_ = false;
    changed_.notify_all();
  }
}

void ReplicaSums::sum_all() {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parts_.size(); i++) {
    {
      std::unique_lock<std::mutex> lock(lock_);
      changed_.wait(lock, [&] { return parts_[i].handed || given_up_; });
      if (given_up_) throw Error(ErrorKind::Communication, "the step was given up");
    }
    parts_[i].event.start = seconds_now();
    sum_part(i);
    parts_[i].event.end = seconds_now();
    std::lock_guard<std::mutex> lock(lock_);
    parts_[i].summed = true;
  }
  transport_.end_step();
}

std::vector<AgreedValue> ReplicaSums::agreed(const Part& part, int owner, std::vector<AgreedValue> first) const {
  for (size_t i = 0; i < part.members.size(); i++) {
    if (part.members[i].owner == owner) first.push_back(agreed_gradient(part.members[i].parameter, part.own[i]));
  }
  return first;
}

void ReplicaSums::sum_part(size_t index) {
  using Comes = AgreedValue::Comes;
  const auto number = [](Comes comes) { return AgreedValue{comes, at::kDouble, std::vector<std::int64_t>{}}; };
  auto& part = parts_[index];
  const bool last = index + 1 == parts_.size();
  const std::string waiting = last ? "the end of the step" : to_string(part.event.action);
  std::vector<std::vector<MessageValue>> values(size());
  for (auto& v : values) v.push_back({at::scalar_tensor(rows_[rank()], at::kDouble)});
  for (size_t i = 0; i < part.members.size(); i++) {
    if (part.members[i].owner != rank()) values[part.members[i].owner].push_back({part.own[i]});
  }
  for (int peer : peers_) transport_.send(to_owners_[index].sends[peer], values[peer]);
  // By replica: the gradients of the members this replica owns.
  for (int peer : peers_) {
    values[peer] =
        transport_.receive(to_owners_[index].receives[peer], waiting, agreed(part, rank(), {number(Comes::Always)}))
            .values;
    rows_[peer] = values[peer].at(0).tensor.item<double>();
  }
  std::vector<MessageValue> sums;
  if (last) sums.push_back({losses_[rank()].defined() ? losses_[rank()].to(at::kDouble) : at::Tensor()});
  size_t k = 1;
  for (size_t i = 0; i < part.members.size(); i++) {
    if (part.members[i].owner != rank()) continue;
    std::vector<at::Tensor> by_replica(size());
    for (int r = 0; r < size(); r++)
      by_replica[r] = r == rank() ? part.own[i] : on_device_of(part.members[i].parameter, values[r].at(k).tensor);
    k++;
    part.sums[i] = add_up(part.members[i], by_replica);
    sums.push_back({part.sums[i]});
  }
  values.clear();
  for (int peer : peers_) transport_.send(from_owners_[index].sends[peer], sums);
  for (int peer : peers_) {
    std::vector<AgreedValue> first;
    if (last) first.push_back(number(Comes::Maybe));
    const auto theirs =
        transport_.receive(from_owners_[index].receives[peer], waiting, agreed(part, peer, std::move(first))).values;
    size_t at = 0;
    if (last) losses_[peer] = theirs.at(at++).tensor;
    for (size_t i = 0; i < part.members.size(); i++) {
      if (part.members[i].owner == peer) part.sums[i] = on_device_of(part.members[i].parameter, theirs.at(at++).tensor);
    }
  }
}

at::Tensor ReplicaSums::add_up(const Part::Member& member, const std::vector<at::Tensor>& by_replica) const {
  if (member.is_buffer) return member.parameter.is_floating_point() ? tree_sum(by_replica) : by_replica[0];
  const double total = std::accumulate(rows_.begin(), rows_.end(), 0.0);
  Tensors parts = by_replica;
  for (int r = 0; r < size(); r++) {
    // Equal batches need no factor, and get none.
    const double factor = weighted_ ? rows_[r] * size() / total : 1;
    if (parts[r].defined() && factor != 1) parts[r] = parts[r] * factor;
  }
  return tree_sum(std::move(parts));
}

}  // namespace plumb

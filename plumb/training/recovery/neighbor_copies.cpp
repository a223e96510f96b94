#include "plumb/training/recovery/neighbor_copies.h"

#include <ATen/ATen.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "plumb/core/error.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/training/recovery/state_copies.h"

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPiece = 1 << 18;
constexpr std::chrono::milliseconds kLongestPause{20};  // before a piece, without a bubble
constexpr const char* kAction = "copying the state to another host";

std::vector<int> hosts_of(const ProcessGroup& world, int own) {
  std::vector<int> hosts;
  for (const std::string& text : Transport(world).exchange(std::to_string(own)))
    hosts.push_back(static_cast<int>(std::strtol(text.c_str(), nullptr, 10)));
  return hosts;
}

// Returns for each rank the one that gets its copies: of the next host that has ranks, in turn. -1: there is one host.
std::vector<int> neighbors(const std::vector<int>& hosts) {
  std::vector<int> to;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    std::vector<int> others;  // ranks of the next host, by number around
    std::optional<int> next;
    for (const int host : hosts) {
      const auto after = [&](int h) { return h > hosts[rank] ? h : h + (1 << 24); };
      if (host != hosts[rank] && (!next || after(host) < after(*next))) next = host;
    }
    for (size_t other = 0; other < hosts.size(); ++other) {
      if (next && hosts[other] == *next) others.push_back(static_cast<int>(other));
    }
    const auto place =
        static_cast<size_t>(std::count(hosts.begin(), hosts.begin() + static_cast<int64_t>(rank), hosts[rank]));
    to.push_back(others.empty() ? -1 : others[place % others.size()]);
  }
  return to;
}

std::vector<int> all_ranks(const ProcessGroup& group) {
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<int>(r);
  return ranks;
}

}  // namespace

NeighborCopies::NeighborCopies(const ProcessGroup& world, int host, ProcessGroup busy, int64_t most)
    : world_(world), group_(make_subgroup(world, "neighbors", all_ranks(world))), busy_(std::move(busy)), most_(most) {
  const std::vector<int> to = neighbors(hosts_of(world, host));
  to_ = to[static_cast<size_t>(world.rank())];
  if (to_ < 0) return;
  for (size_t rank = 0; rank < to.size(); ++rank) {
    if (to[rank] == world.rank()) received_.push_back({.from = static_cast<int>(rank), .memory = {}});
  }
  memory_ = {own_[0], own_[1]};
  for (const Received& received : received_) memory_.insert(memory_.end(), {received.memory[0], received.memory[1]});
  transport_ = std::make_unique<Transport>(group_);
}

NeighborCopies::~NeighborCopies() {
  ends_ = true;
  if (!thread_.joinable()) return;
  if (!done_) transport_->interrupt();
  thread_.join();
}

std::optional<TrainEvent> NeighborCopies::send(int64_t edge, const at::Tensor& copy) {
  if (!has_neighbor() || given_up_) return std::nullopt;
  const bool done = done_;
  if (done && thread_.joinable()) thread_.join();
  const int64_t worst = largest_of_all(world_, !done ? 1 : problem_.empty() ? 0 : 2);
  if (worst == 2) {
    given_up_ = true;
    return event::LogProblem{"no more copies of the state are sent to other hosts" +
                             (problem_.empty() ? std::string(": another rank failed to") : ": " + problem_)};
  }
  if (worst == 1)
    return event::LogProblem{c10::str("the copies of step ", edge, " are not sent to other hosts: those of step ",
                                      edge_, " are still on their way (a larger --copies-to-neighbor?)")};
  std::optional<TrainEvent> told;
  if (edge_ >= 0) {
    complete_ = true;
    told = event::Copied{
        edge_,  world_.rank(), to_,
        bytes_, seconds_,      static_cast<double>(in_bubbles_) / static_cast<double>(std::max<int64_t>(pieces_, 1))};
  }
  slot_ = 1 - slot_;
  edge_ = edge;
  bytes_ = copy.numel();
  in_bubbles_ = pieces_ = 0;
  char* own = own_[slot_].grow(bytes_);
  const auto* from = static_cast<const char*>(copy.const_data_ptr());
  int64_t mark = 0;
  std::memcpy(&mark, from, sizeof mark);
  mark_of(own).store(0);
  std::memcpy(own + sizeof mark, from + sizeof mark, static_cast<size_t>(bytes_) - sizeof mark);
  mark_of(own).store(mark);
  sending_ = at::from_blob(own, {bytes_}, at::kByte);
  done_ = false;
  thread_ = std::thread([this] { transfer(); });
  return told;
}

void NeighborCopies::transfer() {
  ::setpriority(PRIO_PROCESS, 0, 10);  // this thread alone: the steps come first
  const auto begin = Clock::now();
  try {
    const std::vector<int64_t> sizes = exchange_sizes();
    std::vector<char*> into;
    std::vector<int64_t> marks(received_.size());
    for (Received& received : received_) {
      into.push_back(received.memory[slot_].grow(sizes[static_cast<size_t>(received.from)]));
      mark_of(into.back()).store(0);
    }
    // A step of messages for each piece: no more of it is in memory at once.
    for (int64_t at = 0; at < std::ranges::max(sizes); at += kPiece) exchange_piece(at, sizes, into, marks);
    for (size_t i = 0; i < into.size(); ++i) mark_of(into[i]).store(marks[i]);
  } catch (const std::exception& e) {
    problem_ = e.what();
  }
  seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();
  done_ = true;
}

// By rank.
std::vector<int64_t> NeighborCopies::exchange_sizes() {
  std::vector<int64_t> sizes;
  for (const std::string& text : transport_->exchange(std::to_string(bytes_), kAction)) {
    const int64_t size = std::strtoll(text.c_str(), nullptr, 10);
    if (size < static_cast<int64_t>(sizeof(int64_t)) || size > most_)
      throw Error(ErrorKind::Communication, c10::str("rank ", sizes.size(), " has ", size,
                                                     " bytes of state, where at most ", most_, " are expected"));
    sizes.push_back(size);
  }
  return sizes;
}

// Sends and receives the bytes from `at` on, of those that have so many.
void NeighborCopies::exchange_piece(int64_t at, const std::vector<int64_t>& sizes, const std::vector<char*>& into,
                                    std::vector<int64_t>& marks) {
  MessagePlan plan;
  const int me = group_.rank();
  if (at < bytes_) plan.sends.push_back({{MessageKind::Exchange, me, to_}, to_});
  for (const Received& received : received_) {
    if (at < sizes[static_cast<size_t>(received.from)])
      plan.receives.push_back({{MessageKind::Exchange, received.from, me}, received.from});
  }
  transport_->begin_step(plan);
  if (at < bytes_) {
    wait_for_bubble();
    ++pieces_;
    transport_->send(0, {{sending_.narrow(0, at, std::min(kPiece, bytes_ - at))}});
  }
  int index = 0;
  for (size_t i = 0; i < received_.size(); ++i) {
    const int64_t bytes = std::min(kPiece, sizes[static_cast<size_t>(received_[i].from)] - at);
    if (bytes <= 0) continue;
    const AgreedValues agreed{{{AgreedValue::Comes::Always, at::kByte, std::vector<int64_t>{bytes}}}};
    const auto message = transport_->receive(index++, kAction, agreed);
    const auto* from = static_cast<const char*>(message.values[0].tensor.const_data_ptr());
    const auto mark = static_cast<int64_t>(at == 0 ? sizeof(int64_t) : 0);
    if (at == 0) std::memcpy(&marks[i], from, sizeof marks[i]);
    std::memcpy(into[i] + at + mark, from + mark, static_cast<size_t>(bytes - mark));
  }
  transport_->end_step();
}

void NeighborCopies::wait_for_bubble() {
  const auto until = Clock::now() + kLongestPause;
  while (!busy_.is_waiting() && Clock::now() < until && !ends_)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  if (busy_.is_waiting()) ++in_bubbles_;
}

}  // namespace plumb

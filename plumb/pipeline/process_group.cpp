#include "plumb/pipeline/process_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "plumb/core/error.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/group_state.h"
#include "plumb/pipeline/listen.h"
#include "plumb/pipeline/within.h"

namespace plumb {
namespace {

std::string present_key(int rank) { return "plumb/present/" + std::to_string(rank); }

// "1, 3 and 4": who has not shown up in the store.
std::string missing_ranks(c10d::Store& store, int size) {
  std::vector<int> missing;
  for (int r = 0; r < size; r++) {
    if (!store.check({present_key(r)})) missing.push_back(r);
  }
  std::string text;
  for (size_t i = 0; i < missing.size(); i++) {
    text += (i == 0 ? "" : i + 1 == missing.size() ? " and " : ", ") + std::to_string(missing[i]);
  }
  return text;
}

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    throw Error(ErrorKind::InvalidArgument, "a time-out of " + std::to_string(timeout.count()) + " ms cannot be met");
  }
}

// Meets the other ranks in the store of rank 0.
std::shared_ptr<ProcessGroup::State> connected(std::shared_ptr<ProcessGroup::State> state) {
  const RankEnvironment& env = state->env;
  const GlooOptions& options = state->options;
  const std::string address = env.master_address + ":" + std::to_string(env.master_port);
  const std::string me = "rank " + std::to_string(env.rank) + " of " + std::to_string(env.world_size);
  const bool serves = env.rank == 0 && !env.launcher_serves_store;
  require_descriptors(me, (env.world_size + kDescriptorsBeside) * (serves ? 2 : 1));
  try {
    c10d::TCPStoreOptions store;
    store.port = static_cast<std::uint16_t>(env.master_port);
    store.isServer = serves;
    store.timeout = options.timeout;
    store.waitWorkers = false;
    int port = env.master_port;
    const int socket = !store.isServer             ? -1
                       : env.listening_socket >= 0 ? env.listening_socket
                                                   : listen_at(env.master_address, port);
    if (socket >= 0) store.masterListenFd = socket;
    state->store = c10::make_intrusive<c10d::TCPStore>(env.master_address, store);
  } catch (const std::exception& e) {
    throw Error(ErrorKind::Communication,
                me + (serves ? " cannot serve the store at " : " cannot reach the store of rank 0 at ") + address +
                    ": " + first_line(e.what()),
                "", "check that rank 0 runs, and MASTER_ADDR and MASTER_PORT");
  }
  if (!env.store_prefix.empty()) {
    state->store = c10::make_intrusive<c10d::PrefixStore>(env.store_prefix, state->store);
  }
  try {
    state->store->set(present_key(env.rank), std::vector<std::uint8_t>{1});
    std::vector<std::string> all;
    for (int r = 0; r < env.world_size; r++) all.push_back(present_key(r));
    state->store->wait(all, options.timeout);
  } catch (const std::exception& e) {
    std::string missing;
    try {
      missing = missing_ranks(*state->store, env.world_size);
    } catch (const std::exception&) {
      missing = "0 (its store is gone)";
    }
    throw Error(ErrorKind::Communication, me + " waited " + std::to_string(options.timeout.count()) + " ms at " +
                                              address + " for rank " + missing);
  }
  try {
    state->backend = make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("plumb/gloo", state->store), env.rank,
                                       env.world_size, env.master_address, options);
  } catch (const std::exception& e) {
    throw Error(ErrorKind::Communication, me + " cannot connect to its peers: " + first_line(e.what()), "",
                "on several hosts set GLOO_SOCKET_IFNAME to the network interface to use");
  }
  return state;
}

}  // namespace

ProcessGroup::ProcessGroup() : state_(std::make_shared<State>()) {}
ProcessGroup::ProcessGroup(std::shared_ptr<State> state) : state_(std::move(state)) {}
int ProcessGroup::rank() const { return state_->rank; }
int ProcessGroup::size() const { return state_->size; }
int ProcessGroup::world_rank(int rank) const {
  const auto& world = state_->world;
  return rank >= 0 && static_cast<size_t>(rank) < world.size() ? world[rank] : rank;
}
std::chrono::milliseconds ProcessGroup::timeout() const { return state_->timeout; }
void ProcessGroup::set_timeout(std::chrono::milliseconds timeout) {
  check_timeout(timeout);
  state_->timeout = timeout;
}

ProcessGroup make_gloo_group(const RankEnvironment& env, const GlooOptions& options) {
  check_timeout(options.timeout);
  if (env.rank < 0 || env.rank >= env.world_size) {
    throw Error(ErrorKind::InvalidArgument,
                "rank " + std::to_string(env.rank) + " of " + std::to_string(env.world_size) + " ranks does not exist");
  }
  auto state = std::make_shared<ProcessGroup::State>();
  state->rank = env.rank;
  state->size = env.world_size;
  state->timeout = options.timeout;
  state->env = env;
  state->options = options;
  if (env.world_size == 1) return ProcessGroup(state);
  // A store that is stopped takes connections, and answers nothing for ever.
  const auto limit = options.timeout + std::max(options.timeout / 2, std::chrono::milliseconds(2000));
  auto group = within(limit, [state] { return connected(state); });
  if (group) return ProcessGroup(std::move(*group));
  throw Error(ErrorKind::Communication,
              "rank " + std::to_string(env.rank) + " of " + std::to_string(env.world_size) + " waited " +
                  std::to_string(limit.count()) + " ms at " + env.master_address + ":" +
                  std::to_string(env.master_port) + " for rank 0, whose store does not answer",
              "", "look at rank 0 (stopped? overloaded?), or give a longer time-out");
}

ProcessGroup make_group_from_environment(const GlooOptions& options) {
  const auto env = discover_ranks();
  return env ? make_gloo_group(*env, options) : ProcessGroup();
}

ProcessGroup make_subgroup(const ProcessGroup& group, const std::string& name, const std::vector<int>& ranks) {
  auto& parent = group.state();
  auto state = std::make_shared<ProcessGroup::State>();
  state->rank = -1;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (ranks[i] < 0 || ranks[i] >= parent.size) {
      throw Error(ErrorKind::InvalidArgument, "subgroup '" + name + "' names rank " + std::to_string(ranks[i]) +
                                                  ", the group has " + std::to_string(parent.size));
    }
    if (ranks[i] == parent.rank) state->rank = static_cast<int>(i);
  }
  if (state->rank < 0) {
    throw Error(ErrorKind::InvalidArgument,
                "rank " + std::to_string(parent.rank) + " is not in the subgroup '" + name + "' it asks for");
  }
  state->size = static_cast<int>(ranks.size());
  for (int r : ranks) state->world.push_back(group.world_rank(r));
  state->timeout = parent.timeout;
  state->env = parent.env;
  state->options = parent.options;
  if (state->size == 1) return ProcessGroup(state);
  if (!parent.store) {
    throw Error(ErrorKind::InvalidArgument, "subgroup '" + name + "' needs the group's store, and it has none", "",
                "give use_group() the store");
  }
  require_descriptors("rank " + std::to_string(parent.rank) + " in subgroup '" + name + "'",
                      state->size + kDescriptorsBeside);
  state->store = c10::make_intrusive<c10d::PrefixStore>("plumb/subgroup/" + name, parent.store);
  try {
    state->backend =
        make_gloo_backend(state->store, state->rank, state->size, parent.env.master_address, parent.options);
  } catch (const std::exception& e) {
    throw Error(ErrorKind::Communication, "rank " + std::to_string(parent.rank) + " cannot connect subgroup '" + name +
                                              "': " + first_line(e.what()));
  }
  return ProcessGroup(state);
}

ReplicatedGroups divide_into_replicas(const ProcessGroup& group, int replicas) {
  if (replicas < 1 || group.size() % replicas != 0) {
    throw Error(ErrorKind::InvalidArgument, std::to_string(group.size()) + " ranks cannot be divided into " +
                                                std::to_string(replicas) + " replicas of a pipeline");
  }
  if (replicas == 1) return {group, {}};
  const int length = group.size() / replicas, mine = group.rank() / length, place = group.rank() % length;
  std::vector<int> pipeline, same;
  for (int r = 0; r < length; r++) pipeline.push_back(mine * length + r);
  for (int r = 0; r < replicas; r++) same.push_back(r * length + place);
  return {make_subgroup(group, "pipeline" + std::to_string(mine), pipeline),
          make_subgroup(group, "replicas" + std::to_string(place), same)};
}

ProcessGroup use_group(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
                       std::chrono::milliseconds timeout) {
  if (!group) throw Error(ErrorKind::InvalidArgument, "the process group is null");
  if (!store) store = group->getStore();
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& e) {
    throw Error(ErrorKind::Unsupported, "the process group has no backend for CPU tensors: " + first_line(e.what()), "",
                "make it with init_process_group(\"gloo\") or \"cpu:gloo,cuda:nccl\"");
  }
  return use_backend(std::move(backend), std::move(store), timeout);
}

ProcessGroup use_backend(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                         std::chrono::milliseconds timeout) {
  check_timeout(timeout);
  if (!backend) throw Error(ErrorKind::InvalidArgument, "the backend is null");
  auto state = std::make_shared<ProcessGroup::State>();
  state->rank = backend->getRank();
  state->size = backend->getSize();
  state->timeout = timeout;
  state->options.timeout = timeout;
  state->store = std::move(store);
  state->backend = std::move(backend);
  return ProcessGroup(state);
}

}  // namespace plumb

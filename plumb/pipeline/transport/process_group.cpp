#include "plumb/pipeline/transport/process_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/interruptible_wait.h"
#include "plumb/pipeline/transport/listen.h"
#include "plumb/pipeline/transport/no_sigpipe.h"

namespace plumb {

struct ProcessGroup::State {
  int rank = 0;
  int size = 1;
  std::vector<int> world;  // by rank: its number among all processes; empty: the same
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  RankEnvironment env;
  GlooOptions options;
  std::vector<std::shared_ptr<void>> until_closed;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
  // Values on `device` go through this one; null: all values are staged through `backend`.
  c10::intrusive_ptr<c10d::Backend> device_backend;
  c10::Device device = c10::kCPU;
  int tag_ranges = 0;                                                                 // handed out to transports
  std::shared_ptr<std::atomic<int>> waiting = std::make_shared<std::atomic<int>>(0);  // threads, for messages
  std::optional<std::string> failure;  // a peer is lost: no more messages
};

namespace {

std::string present_key(int rank) { return str("plumb/present/", rank); }
// "go" once all ranks are present, or "!" and why a rank does not come. Ranks that do not start count themselves.
constexpr const char* kStart = "plumb/start";
constexpr const char* kNotStarted = "plumb/not-started";

// Returns the ranks that have not shown up in the store: "1, 3 and 4".
std::string missing_ranks(c10d::Store& store, int size) {
  std::vector<int> missing;
  for (int r = 0; r < size; r++) {
    if (!store.check({present_key(r)})) missing.push_back(r);
  }
  std::string text;
  for (size_t i = 0; i < missing.size(); i++) {
    text += str(i == 0 ? "" : i + 1 == missing.size() ? " and " : ", ", missing[i]);
  }
  return text;
}

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) {
    throw Error(ErrorKind::InvalidArgument, str("a time-out of ", timeout.count(), " ms cannot be met"));
  }
}

std::map<c10::DeviceType, MakeDeviceBackend>& device_backends() {
  static auto& all = *new std::map<c10::DeviceType, MakeDeviceBackend>;
  return all;
}

// Gives a group that plumb makes the backend that is registered for the options' device, if there is one.
void add_device_backend(ProcessGroup::State& state) {
  const NoSigpipe inherited;
  if (!state.options.device || state.size == 1) return;
  const auto make = device_backends().find(state.options.device->type());
  if (make == device_backends().end()) return;
  const c10::Device device = *state.options.device;
  state.device_backend =
      connecting(str("rank ", state.rank, " cannot connect ", device.str(), " to its peers"), "", [&] {
        return make->second(c10::make_intrusive<c10d::PrefixStore>("plumb/device", state.store), state.rank, state.size,
                            device, state.timeout);
      });
  state.device = device;
}

bool serves_store(const RankEnvironment& env) { return env.rank == 0 && !env.launcher_serves_store; }
std::string address_of(const RankEnvironment& env) { return str(env.master_address, ":", env.master_port); }

// Returns the store in which the ranks meet: rank 0's or the launcher's.
c10::intrusive_ptr<c10d::Store> open_store(const RankEnvironment& env, std::chrono::milliseconds timeout) {
  const bool serves = serves_store(env);
  const auto what =
      str("rank ", env.rank, " of ", env.world_size,
          serves ? " cannot serve the store at " : " cannot reach the store of rank 0 at ", address_of(env));
  wait_for_host(what, env.master_address, timeout);
  c10::intrusive_ptr<c10d::Store> opened =
      connecting(what, "check that rank 0 runs, and MASTER_ADDR and MASTER_PORT", [&] {
        c10d::TCPStoreOptions store;
        store.port = static_cast<std::uint16_t>(env.master_port);
        store.isServer = serves;
        store.timeout = timeout;
        store.waitWorkers = false;
        int port = env.master_port;
        const int socket = !serves                     ? -1
                           : env.listening_socket >= 0 ? env.listening_socket
                                                       : listen_at(env.master_address, port);
        if (socket >= 0) store.masterListenFd = socket;
        return c10::make_intrusive<c10d::TCPStore>(env.master_address, store);
      });
  if (env.store_prefix.empty()) return opened;
  return c10::make_intrusive<c10d::PrefixStore>(env.store_prefix, opened);
}

// Meets the other ranks in the store of rank 0.
std::shared_ptr<ProcessGroup::State> connected(std::shared_ptr<ProcessGroup::State> state) {
  const NoSigpipe inherited;
  const RankEnvironment& env = state->env;
  const GlooOptions& options = state->options;
  const std::string me = str("rank ", env.rank, " of ", env.world_size);
  require_descriptors(me, (env.world_size + kDescriptorsBeside) * (serves_store(env) ? 2 : 1));
  state->store = open_store(env, options.timeout);
  std::string start;
  try {
    state->store->set(present_key(env.rank), as_bytes("1"));
    std::vector<std::string> all;
    for (int r = 0; r < env.world_size; r++) all.push_back(present_key(r));
    if (state->store->check(all)) state->store->set(kStart, as_bytes("go"));
    state->store->wait({kStart}, options.timeout);
    const auto bytes = state->store->get(kStart);
    start.assign(bytes.begin(), bytes.end());
    if (start.starts_with('!')) state->store->add(kNotStarted, 1);
  } catch (const std::exception& e) {
    std::string missing;
    try {
      missing = missing_ranks(*state->store, env.world_size);
    } catch (const std::exception&) {
      missing = "0 (its store is gone)";
    }
    throw Error(ErrorKind::Communication,
                str(me, " waited ", options.timeout.count(), " ms at ", address_of(env), " for rank ", missing));
  }
  if (start.starts_with('!'))
    throw Error(ErrorKind::Communication, str(me, " cannot start: ", start.substr(1)), "",
                "look at what that rank printed");
  state->backend =
      connecting(me + " cannot connect to its peers",
                 "on several hosts set GLOO_SOCKET_IFNAME to the network interface to use", [&] {
                   return make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("plumb/gloo", state->store),
                                            env.rank, env.world_size, env.master_address, options);
                 });
  add_device_backend(*state);
  return state;
}

// The device of a group's that is not the CPU and has a backend of its own.
void find_device_backend(c10d::ProcessGroup& group, ProcessGroup::State& state) {
  for (const c10::Device& device : group.getDeviceTypes()) {
    if (device.is_cpu() || device.is_meta() || !c10::impl::hasDeviceGuardImpl(device.type())) continue;
    const c10::impl::VirtualGuardImpl guard(device.type());
    if (guard.deviceCount() == 0) continue;
    c10::intrusive_ptr<c10d::Backend> backend;
    try {
      backend = group.getBackend(device.type());
    } catch (const std::exception&) {
      continue;  // named in the group's description, but never made
    }
    // Gloo serves torch's CUDA tensors by copies; staging them here keeps their checksums.
    if (!backend || backend == state.backend || backend->getBackendName() == "gloo") continue;
    state.device_backend = std::move(backend);
    state.device = guard.getDevice();
    return;
  }
}

// Returns the Gloo group beside a backend that has none for the CPU: one for all pipelines of the group.
c10::intrusive_ptr<c10d::Backend> gloo_beside(const c10::intrusive_ptr<c10d::Backend>& of,
                                              const c10::intrusive_ptr<c10d::Store>& store,
                                              std::chrono::milliseconds timeout) {
  struct Beside {
    c10::weak_intrusive_ptr<c10d::Backend> of;
    c10::intrusive_ptr<c10d::Backend> gloo;
  };
  static std::mutex lock;
  static auto& known = *new std::map<const c10d::Backend*, Beside>;
  const std::lock_guard<std::mutex> guard(lock);
  std::erase_if(known, [](const auto& entry) { return entry.second.of.expired(); });
  const auto it = known.find(of.get());
  if (it != known.end()) return it->second.gloo;
  GlooOptions options;
  options.timeout = timeout;
  auto gloo = connecting(str("rank ", of->getRank(), " cannot connect a Gloo group beside ", of->getBackendName()),
                         "make the group with \"cpu:gloo,cuda:nccl\", or set GLOO_SOCKET_IFNAME", [&] {
                           return make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("plumb/gloo", store),
                                                    of->getRank(), of->getSize(), "", options);
                         });
  known.emplace(of.get(), Beside{c10::weak_intrusive_ptr<c10d::Backend>(of), gloo});
  return gloo;
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
std::optional<c10::Device> ProcessGroup::device() const {
  return state_->device_backend ? std::optional(state_->device) : std::nullopt;
}
bool ProcessGroup::shares_memory() const { return state_->options.share_memory; }
const c10::intrusive_ptr<c10d::Backend>& ProcessGroup::backend() const { return state_->backend; }
const c10::intrusive_ptr<c10d::Backend>& ProcessGroup::device_backend() const { return state_->device_backend; }
const c10::intrusive_ptr<c10d::Store>& ProcessGroup::store() const { return state_->store; }
bool ProcessGroup::launcher_serves_store() const { return state_->env.launcher_serves_store; }
bool ProcessGroup::is_waiting() const { return state_->waiting->load(std::memory_order_relaxed) > 0; }
void ProcessGroup::count_waiting(int more) const { state_->waiting->fetch_add(more, std::memory_order_relaxed); }
int ProcessGroup::take_tag_range() const { return state_->tag_ranges++; }
const std::string* ProcessGroup::failure() const { return state_->failure ? &*state_->failure : nullptr; }
void ProcessGroup::set_failure(const std::string& why) const { state_->failure = why; }
void ProcessGroup::keep_until_closed(std::shared_ptr<void> buffers) const {
  state_->until_closed.push_back(std::move(buffers));
}
void ProcessGroup::set_timeout(std::chrono::milliseconds timeout) {
  check_timeout(timeout);
  state_->timeout = timeout;
}

ProcessGroup make_gloo_group(const RankEnvironment& env, const GlooOptions& options) {
  check_timeout(options.timeout);
  if (env.rank < 0 || env.rank >= env.world_size) {
    throw Error(ErrorKind::InvalidArgument, str("rank ", env.rank, " of ", env.world_size, " ranks does not exist"));
  }
  if (env.master_port < 0 || env.master_port > 65535) {
    throw Error(ErrorKind::InvalidArgument, str("there is no port ", env.master_port, " for the store of rank 0"), "",
                "set RankEnvironment::master_port from 0 to 65535");
  }
  auto state = std::make_shared<ProcessGroup::State>();
  state->rank = env.rank;
  state->size = env.world_size;
  state->timeout = options.timeout;
  state->env = env;
  state->options = options;
  if (env.world_size == 1) return ProcessGroup(state);
  // A stopped store takes connections, and never responds.
  const auto limit = options.timeout + std::max(options.timeout / 2, std::chrono::milliseconds(2000));
  auto group = within(limit, [state] { return connected(state); });
  if (group) return ProcessGroup(std::move(*group));
  throw Error(ErrorKind::Communication,
              str("rank ", env.rank, " of ", env.world_size, " waited ", limit.count(), " ms at ", env.master_address,
                  ":", env.master_port, " for rank 0, whose store does not answer"),
              "", "look at rank 0 (stopped? overloaded?), or give a longer time-out");
}

void tell_cannot_start(const RankEnvironment& env, const std::string& why) noexcept {
  if (env.world_size == 1 || env.starts_again || env.launcher == "plumb") return;
  constexpr std::chrono::seconds limit(10);
  try {
    within(limit, [env, why, limit] {
      const NoSigpipe inherited;
      const auto until = std::chrono::steady_clock::now() + limit;
      const auto store = open_store(env, limit);
      if (!store->check({kStart})) store->set(kStart, as_bytes(str("!rank ", env.rank, " failed: ", why)));
      store->add(kNotStarted, 1);
      while (serves_store(env) && store->add(kNotStarted, 0) < env.world_size &&
             std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return true;
    });
  } catch (const std::exception&) {  // the others wait for their time-out
  }
}

ProcessGroup make_group_from_environment(const GlooOptions& options) {
  const auto env = discover_ranks();
  return env ? make_gloo_group(*env, options) : ProcessGroup();
}

ProcessGroup make_subgroup(const ProcessGroup& group, const std::string& name, const std::vector<int>& ranks) {
  auto& parent = *group.state_;
  auto state = std::make_shared<ProcessGroup::State>();
  state->rank = -1;
  for (size_t i = 0; i < ranks.size(); i++) {
    if (ranks[i] < 0 || ranks[i] >= parent.size) {
      throw Error(ErrorKind::InvalidArgument,
                  str("subgroup '", name, "' names rank ", ranks[i], ", the group has ", parent.size));
    }
    if (ranks[i] == parent.rank) state->rank = static_cast<int>(i);
  }
  if (state->rank < 0) {
    throw Error(ErrorKind::InvalidArgument,
                str("rank ", parent.rank, " is not in the subgroup '", name, "' it asks for"));
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
  require_descriptors(str("rank ", parent.rank, " in subgroup '", name, "'"), state->size + kDescriptorsBeside);
  state->store = c10::make_intrusive<c10d::PrefixStore>("plumb/subgroup/" + name, parent.store);
  state->backend = connecting(str("rank ", parent.rank, " cannot connect subgroup '", name, "'"), "", [&] {
    return make_gloo_backend(state->store, state->rank, state->size, parent.env.master_address, parent.options);
  });
  add_device_backend(*state);
  return ProcessGroup(state);
}

void register_device_backend(c10::DeviceType type, MakeDeviceBackend make) {
  if (!make)
    throw Error(ErrorKind::InvalidArgument, "register_device_backend: the function is empty", "", "give it one");
  device_backends()[type] = std::move(make);
}

ReplicatedGroups divide_into_replicas(const ProcessGroup& group, int replicas) {
  if (replicas < 1 || group.size() % replicas != 0) {
    throw Error(ErrorKind::InvalidArgument,
                str(group.size(), " ranks cannot be divided into ", replicas, " replicas of a pipeline"));
  }
  if (replicas == 1) return {group, {}};
  const int length = group.size() / replicas, mine = group.rank() / length, place = group.rank() % length;
  std::vector<int> pipeline, same;
  for (int r = 0; r < length; r++) pipeline.push_back(mine * length + r);
  for (int r = 0; r < replicas; r++) same.push_back(r * length + place);
  return {make_subgroup(group, str("pipeline", mine), pipeline), make_subgroup(group, str("replicas", place), same)};
}

ProcessGroup use_group(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
                       std::chrono::milliseconds timeout) {
  if (!group) throw Error(ErrorKind::InvalidArgument, "the process group is null");
  if (!store) store = group->getStore();
  c10::intrusive_ptr<c10d::Backend> backend;
  std::string why;
  try {
    backend = group->getBackend(c10::DeviceType::CPU);
  } catch (const std::exception& e) {
    why = first_line(e.what());
  }
  ProcessGroup::State found;
  found.backend = backend;
  find_device_backend(*group, found);
  if (!backend && found.device_backend && store) backend = gloo_beside(found.device_backend, store, timeout);
  if (!backend) {
    throw Error(ErrorKind::Unsupported, "the process group has no backend for CPU tensors: " + why, "",
                "make it with init_process_group(\"gloo\") or \"cpu:gloo,cuda:nccl\"");
  }
  ProcessGroup made = use_backend(std::move(backend), std::move(store), timeout);
  made.state_->device_backend = std::move(found.device_backend);
  made.state_->device = found.device;
  return made;
}

// How many ranges of tags were handed out is kept as long as the backend lives, as ranks may let go of their pipelines
// at different times.
ProcessGroup share_group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<int> world,
                         std::chrono::milliseconds timeout) {
  const ProcessGroup fresh = use_group(std::move(group), nullptr, timeout);
  struct Known {
    c10::weak_intrusive_ptr<c10d::Backend> backend;
    std::weak_ptr<ProcessGroup::State> state;
    std::shared_ptr<int> tag_ranges;
  };
  static std::mutex lock;
  static auto& known = *new std::map<c10d::Backend*, Known>();
  const std::lock_guard<std::mutex> guard(lock);
  const auto& backend = fresh.backend();
  auto it = known.find(backend.get());
  if (it != known.end() && it->second.backend.expired()) {
    known.erase(it);
    it = known.end();
  }
  if (it == known.end()) {
    it = known.emplace(backend.get(), Known{c10::weak_intrusive_ptr<c10d::Backend>(backend), {}, nullptr}).first;
    it->second.tag_ranges = std::make_shared<int>(0);
  }
  auto state = it->second.state.lock();
  if (!state) {
    // The state's end writes down how many ranges it handed out. Buffers of a failed step stay with Gloo for good.
    auto count = it->second.tag_ranges;
    state = std::shared_ptr<ProcessGroup::State>(new ProcessGroup::State(*fresh.state_), [count](auto* s) {
      *count = s->tag_ranges;
      if (!s->failure) delete s;
    });
    state->tag_ranges = *count;
    state->world = std::move(world);
    it->second.state = state;
  }
  state->timeout = timeout;
  return ProcessGroup(state);
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

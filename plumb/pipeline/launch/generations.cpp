#include "plumb/pipeline/launch/generations.h"

#include <algorithm>
#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/listen.h"
#include "plumb/pipeline/transport/no_sigpipe.h"

namespace plumb {

struct LauncherStore {
  LauncherStore(const std::string& host, const c10d::TCPStoreOptions& options) : store(host, options) {}
  void set(const std::string& key, const std::string& text) { store.set(key, {text.begin(), text.end()}); }
  bool has(const std::string& key) { return store.check({key}); }
  // Waits until it is there.
  std::string get(const std::string& key) {
    store.wait({key}, std::chrono::hours(24));
    const auto bytes = store.get(key);
    return {bytes.begin(), bytes.end()};
  }
  c10d::TCPStore store;
};

namespace {

constexpr const char* kHost = "127.0.0.1";
constexpr const char* kEnd = "end";
constexpr const char* kEndedWell = "ended well";
constexpr const char* kInVain = "plumb/in-vain";

std::string generation_key(int number) { return str("plumb/generation/", number); }
std::string ready_key(int process) { return str("plumb/ready/", process); }
std::string left_key(int number) { return str("plumb/left/", number); }
std::string left_key(int number, int process) { return str(left_key(number), "/", process); }

}  // namespace

Generations::Generations(int processes) {
  // Each process's output, errors and connection. Without them the store would wait, or end the process.
  require_descriptors("the launcher", 3 * processes + kDescriptorsBeside + 2);
  const NoSigpipe inherited;  // by the store's threads
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listen_at(kHost, port_);
  options.port = static_cast<std::uint16_t>(port_);
  store_ = connecting(str("the launcher cannot serve the store at port ", port_), "",
                      [&] { return std::make_shared<LauncherStore>(kHost, options); });
}

void Generations::begin(const std::vector<int>& processes) {
  std::string text;
  for (const int p : processes) text += str(p, " ");
  store_->set(generation_key(++number_), text);
}

void Generations::end(bool well) { store_->set(generation_key(++number_), well ? kEndedWell : kEnd); }

bool Generations::anyone_left() const { return store_->has(left_key(number_)); }
bool Generations::has_left(int process) const { return store_->has(left_key(number_, process)); }
bool Generations::is_ready(int process) const { return store_->has(ready_key(process)); }
int Generations::in_vain() const {
  return store_->has(kInVain) ? static_cast<int>(std::strtol(store_->get(kInVain).c_str(), nullptr, 10)) : -1;
}

std::optional<Membership> Membership::from_environment(std::chrono::milliseconds timeout) {
  const auto process = process_variable("PLUMB_PROCESS");
  const auto env = discover_ranks();
  if (!process || !env) return std::nullopt;
  Membership me;
  me.process_ = std::atoi(process->c_str());
  me.env_ = *env;
  me.env_.launcher_serves_store = true;
  me.env_.listening_socket = -1;
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(env->master_port);
  options.waitWorkers = false;
  options.timeout = timeout;  // the launcher has served it since before it started this process
  me.store_ =
      connecting(str("process ", *process, " cannot reach the store of its launcher at port ", env->master_port), "",
                 [&] { return std::make_shared<LauncherStore>(env->master_address, options); });
  return me;
}

std::optional<RankEnvironment> Membership::next() {
  if (number_ < 0) store_->set(ready_key(process_), "1");
  while (true) {
    const std::string text = store_->get(generation_key(number_ + 1));
    ended_well_ = text == kEndedWell;
    if (ended_well_ || text == kEnd) return std::nullopt;
    ++number_;
    std::istringstream list(text);
    std::vector<int> members;
    for (int process; list >> process;) members.push_back(process);
    const auto place = std::ranges::find(members, process_);
    if (place == members.end()) continue;
    env_.rank = env_.local_rank = static_cast<int>(place - members.begin());
    env_.world_size = static_cast<int>(members.size());
    env_.store_prefix = str("plumb/group/", number_);
    return env_;
  }
}

void Membership::leave() {
  store_->set(left_key(number_, process_), "1");
  store_->set(left_key(number_), "1");
}

void Membership::fail_for_good() { store_->set(kInVain, std::to_string(process_)); }

bool Membership::is_first_to(const std::string& what) { return store_->store.add("plumb/first/" + what, 1) == 1; }

}  // namespace plumb

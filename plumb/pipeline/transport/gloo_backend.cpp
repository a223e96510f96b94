#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "plumb/core/system_remedy.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/listen.h"
#include "plumb/pipeline/transport/no_sigpipe.h"

namespace plumb {
namespace {

// Threads inherit the policy of the thread that starts them.
class BatchPolicy {
 public:
  explicit BatchPolicy(bool wanted) {
    policy_ = sched_getscheduler(0);
    if (!wanted || policy_ != SCHED_OTHER || sched_getparam(0, &before_) != 0) return;
    sched_param none{};
    changed_ = sched_setscheduler(0, SCHED_BATCH, &none) == 0;
  }
  ~BatchPolicy() {
    if (changed_) sched_setscheduler(0, policy_, &before_);
  }

 private:
  int policy_ = 0;
  sched_param before_{};
  bool changed_ = false;
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

std::shared_ptr<::gloo::transport::Device> make_device(const std::string& master, const GlooOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  if (!options.interface.empty()) {
    try {
      return Gloo::createDeviceForInterface(options.interface);
    } catch (const std::exception&) {
      return Gloo::createDeviceForHostname(options.interface);
    }
  }
  if (is_loopback(master)) return Gloo::createDeviceForHostname("127.0.0.1");
  if (auto name = process_variable("GLOO_SOCKET_IFNAME")) return Gloo::createDeviceForInterface(*name);
  const std::string own = master.empty() ? "" : address_towards(master);
  return own.empty() ? Gloo::createDefaultDevice() : Gloo::createDeviceForHostname(own);
}

}  // namespace

void require_descriptors(const std::string& who, int count) {
  std::vector<int> held;
  int reason = 0;
  while (reason == 0 && held.size() < static_cast<size_t>(count)) {
    const int fd = ::eventfd(0, EFD_CLOEXEC);
    if (fd >= 0) held.push_back(fd);
    if (fd < 0) reason = errno;
  }
  for (int fd : held) ::close(fd);
  if (reason == 0) return;
  throw Error(ErrorKind::ExecutionFailed,
              str(who, " cannot connect to its peers: ", std::strerror(reason), " (", held.size(), " can be opened, ",
                  count, " are needed)"),
              "", system_remedy(reason, ""));
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    const std::string& master_address, const GlooOptions& options) {
  const NoSigpipe inherited;
  BatchPolicy batch(options.batch_threads);
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices.push_back(make_device(master_address, options));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo);
}

std::string what_gloo_says(const std::exception& e) {
  std::string text = first_line(e.what());
  if (!text.empty() && text[0] == '[') {
    const auto end = text.find("] ");
    if (end != std::string::npos) text = text.substr(end + 2);
  }
  return text.substr(0, text.find(". This is typically"));
}

}  // namespace plumb

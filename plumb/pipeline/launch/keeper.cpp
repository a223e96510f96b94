#include "plumb/pipeline/launch/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/core/system_remedy.h"

namespace plumb {
namespace {

// A request is {Keep, process, descriptor}, {Drop, descriptor of the keeper's} or {List}. Replies: the descriptor that
// the keeper has now, or -1; nothing; the keeper's process and all of its descriptors.
enum KeeperRequest : std::int64_t { Keep = 1, Drop, List };
using Numbers = std::vector<std::int64_t>;
constexpr size_t kMostKept = 4096;  // numbers of a message, and memories

[[noreturn]] void keeper_fails(const std::string& what, int reason) {
  throw Error(ErrorKind::ExecutionFailed,
              "the copies of this host cannot be kept: " + what + ": " + std::strerror(reason), "",
              system_remedy(reason,
                            "train without --max-restarts; a lost rank then costs the steps since the last "
                            "checkpoint"));
}

// The same for all ranks of a launcher. Containers share names of sockets where they share a network.
std::pair<sockaddr_un, socklen_t> address_of(pid_t launcher) {
  std::array<char, 64> processes{};
  [[maybe_unused]] const auto length = ::readlink("/proc/self/ns/pid", processes.data(), processes.size() - 1);
  const std::string name = str("plumb/keeper/", processes.data(), "/", launcher);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

bool is_of_own_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

bool send_numbers(int socket, const Numbers& message) {
  return ::send(socket, message.data(), message.size() * sizeof message[0], MSG_NOSIGNAL) >= 0;
}

// Returns nothing if the other side is gone.
std::optional<Numbers> receive_numbers(int socket) {
  Numbers message(kMostKept + 1);
  const auto bytes = ::recv(socket, message.data(), message.size() * sizeof message[0], 0);
  if (bytes <= 0) return std::nullopt;
  message.resize(static_cast<size_t>(bytes) / sizeof message[0]);
  return message;
}

Numbers reply_to(const Numbers& request, std::map<std::int64_t, SharedMemory>& held) {
  if (request.size() == 3 && request[0] == Keep && held.size() < kMostKept) {
    try {
      SharedMemory memory({request[1], request[2]});
      const auto descriptor = memory.address().descriptor;
      held.emplace(descriptor, std::move(memory));
      return {descriptor};
    } catch (const Error&) {  // it names something else, or is gone
    }
  }
  if (request.size() == 2 && request[0] == Drop) return {static_cast<std::int64_t>(held.erase(request[1]))};
  if (request.size() != 1 || request[0] != List) return {-1};
  Numbers all{::getpid()};
  for (const auto& [descriptor, memory] : held) all.push_back(descriptor);
  return all;
}

// The keeper's life: until `launcher`, a descriptor of that process, is readable.
void keep_until_end(int listening, int launcher) {
  std::map<std::int64_t, SharedMemory> held;
  std::vector<Descriptor> clients;
  while (true) {
    std::vector<pollfd> polls{{launcher, POLLIN, 0}, {listening, POLLIN, 0}};
    for (const auto& client : clients) polls.push_back({client.get(), POLLIN, 0});
    if (::poll(polls.data(), polls.size(), -1) < 0 && errno != EINTR) return;
    if (polls[0].revents != 0) return;
    std::vector<Descriptor> left;
    for (size_t i = 0; i < clients.size(); i++) {
      if (polls[i + 2].revents != 0) {
        const auto request = receive_numbers(clients[i].get());
        if (!request || !send_numbers(clients[i].get(), reply_to(*request, held))) continue;
      }
      left.push_back(std::move(clients[i]));
    }
    clients = std::move(left);
    if (polls[1].revents == 0) continue;
    Descriptor client(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
    if (client.get() >= 0 && clients.size() < kMostKept && is_of_own_user(client.get()))
      clients.push_back(std::move(client));
  }
}

// A process of nobody's: it has the launcher's files, terminal and group no more.
[[noreturn]] void become_keeper(int listening, int launcher) {
  ::setsid();
  if (::fork() != 0) ::_exit(0);
  ::prctl(PR_SET_NAME, "plumb-keeper");
  for (int signal = 1; signal < NSIG; signal++) ::signal(signal, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const int nothing = ::open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3; fd++) ::dup2(nothing, fd);
  const long most = ::sysconf(_SC_OPEN_MAX);
  for (int fd = 3; fd < std::min(most, 65536L); fd++) {
    if (fd != listening && fd != launcher) ::close(fd);
  }
  [[maybe_unused]] const int moved = ::chdir("/");  // it holds no folder
  try {
    keep_until_end(listening, launcher);
  } catch (...) {
  }
  ::_exit(0);
}

// Starts the keeper unless another rank has.
void start_keeper(pid_t launcher) {
  const auto [address, length] = address_of(launcher);
  const Descriptor listening(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (listening.get() < 0) keeper_fails("no socket", errno);
  if (::bind(listening.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EADDRINUSE) return;
    keeper_fails("no name for its socket", errno);
  }
  const Descriptor end(static_cast<int>(::syscall(SYS_pidfd_open, launcher, 0)));
  if (end.get() < 0 || ::listen(listening.get(), 1024) != 0) keeper_fails("the launcher cannot be watched", errno);
  const pid_t child = ::fork();
  if (child < 0) keeper_fails("no process", errno);
  if (child == 0) become_keeper(listening.get(), end.get());
  ::waitpid(child, nullptr, 0);
}

}  // namespace

Keeper::Keeper(pid_t launcher) {
  const auto [address, length] = address_of(launcher);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (true) {
    socket_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (socket_.get() < 0) keeper_fails("no socket", errno);
    if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) break;
    if (std::chrono::steady_clock::now() > until) keeper_fails("its process does not answer", errno);
    start_keeper(launcher);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (!is_of_own_user(socket_.get())) keeper_fails("another user has its name", EPERM);
  const timeval patience{10, 0};
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
}

std::vector<std::int64_t> Keeper::ask(const Numbers& request) {
  if (!send_numbers(socket_.get(), request)) keeper_fails("its process is gone", errno);
  auto reply = receive_numbers(socket_.get());
  if (!reply) keeper_fails("its process is gone", errno != 0 ? errno : ECONNRESET);
  return *std::move(reply);
}

std::vector<SharedMemory> Keeper::memory() {
  const Numbers all = ask({List});
  if (all.empty()) keeper_fails("its process says nothing", EPROTO);
  old_.assign(all.begin() + 1, all.end());
  std::vector<SharedMemory> memory;
  for (const auto descriptor : old_) memory.emplace_back(SharedMemory::Address{all[0], descriptor});
  return memory;
}

void Keeper::keep(const SharedMemory& memory) {
  const auto [process, descriptor] = memory.address();
  const Numbers kept = ask({Keep, process, descriptor});
  if (kept.size() != 1 || kept[0] < 0) keeper_fails("its process cannot open this one's memory", EACCES);
}

void Keeper::drop_old() {
  for (const auto descriptor : std::exchange(old_, {})) ask({Drop, descriptor});
}

}  // namespace plumb

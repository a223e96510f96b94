#include "plumb/pipeline/transport/host_rings.h"

#include <ATen/ops/empty.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <fstream>
#include <new>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "plumb/core/cores.h"
#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/transport/message.h"

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using Word = std::uint32_t;

// A virtual machine takes up to 100 us to wake a thread; looking for twice as long costs at most as much again.
constexpr microseconds kLooking{200};
// How often a sleeper looks whether its peer lives.
constexpr milliseconds kNap{20};

// A number that another process reads or writes. Readers have the memory to read only.
std::atomic_ref<Word> shared(const Word& word) { return std::atomic_ref<Word>(const_cast<Word&>(word)); }

// Sleeps while the word is `value`, for kNap at most.
void sleep_while(const Word& word, Word value) {
  const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0);
}

void wake(const Word& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string link_text(const char* path) {
  char text[128];
  const ssize_t size = ::readlink(path, text, sizeof text);
  return size > 0 ? std::string(text, static_cast<size_t>(size)) : "";
}

void go_on_waiting(const std::string& lost, Clock::time_point until, const std::function<bool()>& interrupted) {
  if (!lost.empty()) throw std::runtime_error(lost);
  if (interrupted()) throw std::runtime_error("interrupted");
  if (Clock::now() >= until) throw std::runtime_error("timed out");
}

// Returns what processes that share memory and see each other have alike: a running kernel and namespaces. Processes
// whose networks differ are hosts of their own.
std::string host_text() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string processes = link_text("/proc/self/ns/pid"), network = link_text("/proc/self/ns/net");
  return boot.empty() || processes.empty() || network.empty() ? "" : boot + "/" + processes + "/" + network;
}

}  // namespace

struct HostRings::Head {
  std::uint64_t secret = 0;  // a part of the address: a memory with it is the one that was named
  Word closed = 0;
};

// A rank's numbers for one peer. Each has a cache line of its own.
struct HostRings::Lane {
  alignas(64) Word written = 0;  // bytes of messages to the peer, modulo 2^32
  Word start = 0;                // `written` when the ring began anew
  alignas(64) Word read = 0;     // bytes of the peer's messages that were read
  alignas(64) Word asleep = 0;   // 1: wake this rank after writing
};

// Rings begin at a page, of any size that Linux has.
std::int64_t HostRings::first_ring(int size) {
  constexpr std::int64_t kPage = 64 << 10;
  return (64 + size * static_cast<std::int64_t>(sizeof(Lane)) + kPage - 1) / kPage * kPage;
}
std::int64_t HostRings::memory_bytes(int size) { return first_ring(size) + size * kBytes; }

HostRings::HostRings(int rank, int size) : rank_(rank), size_(size) {
  static_assert(sizeof(Head) <= 64);
  own_ = memory_.reserve(memory_bytes(size));
  memory_.take(0, first_ring(size));
  new (own_) Head{std::random_device()() * std::uint64_t{1} << 32 | std::random_device()()};
  for (int peer = 0; peer < size; ++peer) new (&lane_for(peer)) Lane;
  peers_.resize(static_cast<size_t>(size));
}

HostRings::~HostRings() {
  shared(reinterpret_cast<Head*>(own_)->closed).store(1);
  for (int peer = 0; peer < size_; ++peer) wake(lane_for(peer).written);
}

HostRings::Lane& HostRings::lane_for(int peer) const {
  return *reinterpret_cast<Lane*>(own_ + 64 + peer * static_cast<std::int64_t>(sizeof(Lane)));
}
char* HostRings::ring_for(int peer) const { return own_ + first_ring(size_) + peer * kBytes; }
const HostRings::Lane& HostRings::lane_of(int peer) const {
  const auto* theirs = static_cast<const char*>(peers_[peer].lanes.const_data_ptr());
  return *reinterpret_cast<const Lane*>(theirs + 64 + rank_ * static_cast<std::int64_t>(sizeof(Lane)));
}
const char* HostRings::ring_of(int peer) const { return static_cast<const char*>(peers_[peer].ring.const_data_ptr()); }

std::string HostRings::address() const {
  const std::string host = host_text();
  if (host.empty()) return "";
  const auto [process, descriptor] = memory_.address();
  return str(host, " ", process, " ", descriptor, " ", reinterpret_cast<const Head*>(own_)->secret);
}

bool HostRings::open(int peer, const std::string& address) {
  std::istringstream in(address);
  std::string host;
  SharedMemory::Address where;
  std::uint64_t secret = 0;
  if (!(in >> host >> where.process >> where.descriptor >> secret) || host != host_text()) return false;
  try {
    Peer found;
    // First: if the memory that is then found has the secret, both are of one process.
    found.process = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, where.process, 0)));
    if (found.process.get() < 0) return false;
    const SharedMemory memory(where);
    if (memory.size() != memory_bytes(size_)) return false;
    found.lanes = memory.bytes(0, first_ring(size_));
    found.ring = memory.bytes(first_ring(size_) + rank_ * kBytes, kBytes);
    if (static_cast<const Head*>(found.lanes.const_data_ptr())->secret != secret) return false;
    peers_.at(peer) = std::move(found);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void HostRings::look_first(int processes) {
  if (processes > num_cores()) return;
  most_looking_ = kLooking;
  for (Peer& peer : peers_) peer.look_for = kLooking;
}

bool HostRings::has_written(int peer) const {
  return shared(lane_of(peer).written).load(std::memory_order_seq_cst) != lane_for(peer).read;
}

const char* HostRings::how_lost(int peer) const {
  const auto* head = static_cast<const Head*>(peers_[peer].lanes.const_data_ptr());
  pollfd process{peers_[peer].process.get(), POLLIN, 0};
  if (::poll(&process, 1, 0) > 0) return "its process has ended";
  return shared(head->closed).load() != 0 ? "it has closed its connection" : "";
}

bool HostRings::try_send(int peer, const at::Tensor& message) {
  const auto bytes = static_cast<Word>(message.nbytes());
  const auto taken = static_cast<Word>(taken_by(bytes));
  Lane& lane = lane_for(peer);
  const Word used = lane.written - shared(lane_of(peer).read).load(std::memory_order_acquire);
  if (used > kBytes || taken > kBytes - used) return false;
  // The peer reads `start` only where there is a message, and has read all there were.
  if (used == 0) shared(lane.start).store(lane.written, std::memory_order_relaxed);
  char* ring = ring_for(peer);
  // The header never crosses the end; the bytes may.
  const Word at = (lane.written - lane.start) % kBytes, first = (at + kHeader) % kBytes;
  if (std::int64_t& have = peers_[peer].taken; at + taken > have && have < kBytes) {
    const std::int64_t more = std::min(kBytes, std::max<std::int64_t>(at + taken, 2 * have)) - have;
    memory_.take(ring + have - own_, more);
    have += more;
  }
  std::memcpy(ring + at, &bytes, sizeof bytes);
  const auto until_end = std::min<Word>(bytes, kBytes - first);
  const auto* from = static_cast<const char*>(message.const_data_ptr());
  std::memcpy(ring + first, from, until_end);
  std::memcpy(ring, from + until_end, bytes - until_end);
  shared(lane.written).store(lane.written + taken, std::memory_order_seq_cst);
  if (shared(lane_of(peer).asleep).load(std::memory_order_seq_cst) != 0) wake(lane.written);
  return true;
}

void HostRings::send(int peer, const at::Tensor& message, milliseconds timeout,
                     const std::function<bool()>& interrupted) {
  const auto until = Clock::now() + timeout;
  while (!try_send(peer, message)) {
    go_on_waiting(how_lost(peer), until, interrupted);
    std::this_thread::sleep_for(microseconds(100));
  }
}

at::Tensor HostRings::take(int peer) {
  const Lane& theirs = lane_of(peer);
  Lane& lane = lane_for(peer);
  const Word written = shared(theirs.written).load(std::memory_order_acquire) - lane.read;
  if (written == 0) return {};
  const char* ring = ring_of(peer);
  const Word start = shared(theirs.start).load(std::memory_order_relaxed);
  const Word at = (lane.read - start) % kBytes / kHeader * kHeader, first = (at + kHeader) % kBytes;
  Word bytes = 0;
  std::memcpy(&bytes, ring + at, sizeof bytes);
  if (written > kBytes || written % kHeader != 0 || start % kHeader != 0 || bytes > kLongest ||
      bytes < sizeof(wire::Prologue) || taken_by(bytes) > written) {
    throw Error(ErrorKind::Communication, "the memory that its rank shares is no ring of messages", "",
                "run the same version of plumb on every rank");
  }
  auto message = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  auto* to = static_cast<char*>(message.data_ptr());
  const auto until_end = std::min<Word>(bytes, kBytes - first);
  std::memcpy(to, ring + first, until_end);
  std::memcpy(to + until_end, ring, bytes - until_end);
  shared(lane.read).store(lane.read + static_cast<Word>(taken_by(bytes)), std::memory_order_release);
  return message;
}

void HostRings::wait(int peer, milliseconds timeout, const std::function<bool()>& interrupted) {
  Peer& p = peers_[peer];
  const auto begin = Clock::now();
  for (auto until = begin + p.look_for; Clock::now() < until; relax()) {
    if (!has_written(peer)) continue;
    p.look_for = most_looking_;
    return;
  }
  p.look_for /= 2;
  Lane& lane = lane_for(peer);
  struct Asleep {
    Word& word;
    ~Asleep() { shared(word).store(0, std::memory_order_relaxed); }
  } asleep{lane.asleep};
  shared(lane.asleep).store(1, std::memory_order_seq_cst);
  while (!has_written(peer)) {
    sleep_while(lane_of(peer).written, lane.read);
    const std::string lost = how_lost(peer);  // before its last message is looked for
    if (!has_written(peer)) go_on_waiting(lost, begin + timeout, interrupted);
  }
  // Looking would have been enough.
  if (Clock::now() - begin < most_looking_) p.look_for = most_looking_;
}

}  // namespace plumb

#include "tests/device/strict_backend.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "plumb/pipeline/transport/process_group.h"
#include "tests/device/streams.h"

namespace plumb_test {
namespace {

using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct StrictWork final : c10d::Work {
  StrictWork() : Work(-1, c10d::OpType::UNKNOWN) {}
  void end(std::exception_ptr why = nullptr) { finish(std::move(why)); }

  // Without a time the stream waits and the host goes on, whatever becomes of the work.
  bool wait(milliseconds timeout) override {
    if (timeout != kNoTimeout) return Work::wait(timeout);
    if (isCompleted()) return true;
    enqueue(current_stream(device), [self = c10::intrusive_ptr<StrictWork>::unsafe_reclaim_from_nonowning(this)] {
      try {
        self->Work::wait(kNoTimeout);
      } catch (const std::exception&) {
        // exception() has the error.
      }
    });
    return true;
  }
  c10::DeviceIndex device = 0;
};

// Returns the least time of a transfer in milliseconds, for tests of overlapping work.
milliseconds time_of_link() {
  const char* wanted = std::getenv("PLUMB_TEST_LINK_MS");
  return milliseconds(wanted ? std::atoi(wanted) : 0);
}

class StrictBackend final : public c10d::Backend {
 public:
  StrictBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout)
      : Backend(rank, size), timeout_(timeout) {
    auto options = c10d::ProcessGroupGloo::Options::create(timeout);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    gloo_ = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("strict", store), rank,
                                                        size, options);
    thread_ = std::thread([this] { run(); });
  }
  ~StrictBackend() override {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      closing_ = true;
    }
    abort();
    thread_.join();
  }

  const std::string getBackendName() const override { return "strict"; }
  bool supportsCoalescing() const override { return true; }

  void startCoalescing() override {
    TORCH_CHECK(!group_, "strict: groups do not nest");
    group_.emplace();
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(group_ && !group_->transfers.empty(), "strict: a group without transfers");
    Group group = std::move(*group_);
    group_.reset();
    return post_group(std::move(group));
  }
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int) override { return add(true, tensors, to); }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int) override { return add(false, tensors, from); }

  // No memory is used any more after it.
  void abort() override {
    std::vector<WorkPtr> running;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (!broken_) broken_ = std::make_exception_ptr(std::runtime_error("the communicator was aborted"));
      running = running_;
    }
    changed_.notify_all();
    for (const auto& work : running) work->abort();
    std::unique_lock<std::mutex> lock(lock_);
    changed_.wait(lock, [&] { return queue_.empty() && !transferring_; });
  }

 private:
  // The poster of a transfer holds the memory.
  struct Transfer {
    bool sends;
    int peer;
    at::Tensor memory;
    std::unique_ptr<InTransfer> use;
  };
  struct Group {
    std::vector<Transfer> transfers;
    c10::intrusive_ptr<StrictWork> work = c10::make_intrusive<StrictWork>();
    std::shared_future<void> begin;  // when the stream that posted it has come so far
  };

  WorkPtr add(bool sends, const std::vector<at::Tensor>& tensors, int peer) {
    TORCH_CHECK(tensors.size() == 1, "strict: one tensor at a time");
    const at::Tensor& tensor = tensors[0];
    TORCH_CHECK(tensor.is_privateuseone(), "strict: no tensors of ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous() && tensor.numel() > 0, "strict: contiguous tensors with values only");
    TORCH_CHECK(peer >= 0 && peer < getSize() && peer != getRank(), "strict: no rank ", peer);
    const bool alone = !group_;
    if (alone) group_.emplace();
    const at::Tensor memory = memory_of(tensor);
    group_->work->device = tensor.device().index();
    group_->transfers.push_back(
        {sends, peer, memory, std::make_unique<InTransfer>(memory.const_data_ptr(), memory.nbytes(), !sends)});
    if (alone) return endCoalescing();
    return group_->work;
  }

  WorkPtr post_group(Group group) {
    const WorkPtr work = group.work;
    group.begin = marker(current_stream(group.work->device));
    {
      const std::lock_guard<std::mutex> guard(lock_);
      queue_.push_back(std::move(group));
    }
    changed_.notify_all();
    return work;
  }

  void run() {
    while (true) {
      Group group;
      std::exception_ptr broken;
      {
        std::unique_lock<std::mutex> lock(lock_);
        changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        group = std::move(queue_.front());
        queue_.pop_front();
        broken = broken_;
        transferring_ = true;
      }
      if (!broken) {
        try {
          while (group.begin.wait_for(milliseconds(1)) != std::future_status::ready) check_whole();
          transfer(group);
        } catch (const std::exception&) {
          broken = std::current_exception();
        }
      }
      {
        const std::lock_guard<std::mutex> guard(lock_);
        running_.clear();
        if (broken && !broken_) broken_ = broken;  // as a communicator: nothing after it
        if (broken) broken = broken_;
      }
      group.transfers.clear();
      group.work->end(broken);
      {
        const std::lock_guard<std::mutex> guard(lock_);
        transferring_ = false;
      }
      changed_.notify_all();
    }
  }

  void check_whole() {
    const std::lock_guard<std::mutex> guard(lock_);
    if (broken_) std::rethrow_exception(broken_);
  }

  WorkPtr post(bool sends, at::Tensor tensor, int peer, int tag) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    const std::lock_guard<std::mutex> guard(lock_);
    if (broken_) std::rethrow_exception(broken_);
    running_.push_back(sends ? gloo_->send(tensors, peer, tag) : gloo_->recv(tensors, peer, tag));
    return running_.back();
  }

  void wait(const WorkPtr& work) const { TORCH_CHECK(work->wait(timeout_), "the communicator was aborted"); }

  // A receiver says how many bytes it waits for; only then its sender sends.
  void transfer(const Group& group) {
    struct Running {
      const Transfer* transfer;
      int tag;
      at::Tensor ready;
      WorkPtr asked, moved;
    };
    std::vector<Running> all;
    for (const auto& t : group.transfers) {
      int& count = (t.sends ? sent_ : received_)[t.peer];
      Running r{
          &t, 2 * count++, at::full({1}, t.sends ? -1 : static_cast<int64_t>(t.memory.nbytes()), at::kLong), {}, {}};
      if (!t.sends) r.moved = post(false, t.memory, t.peer, r.tag + 1);
      r.asked = post(!t.sends, r.ready, t.peer, r.tag);
      all.push_back(std::move(r));
    }
    for (auto& r : all) {
      if (!r.transfer->sends) continue;
      wait(r.asked);
      const auto asked = r.ready.item<int64_t>();
      TORCH_CHECK(asked == static_cast<int64_t>(r.transfer->memory.nbytes()), "strict: rank ", r.transfer->peer,
                  " receives ", asked, " bytes where ", r.transfer->memory.nbytes(), " are sent");
      r.transfer->use->begin();
      const double begin = clock_now();
      std::this_thread::sleep_for(time_);
      r.moved = post(true, r.transfer->memory, r.transfer->peer, r.tag + 1);
      note_activity("transfer", begin, clock_now());
    }
    for (auto& r : all) {
      if (!r.transfer->sends) wait(r.asked);
      wait(r.moved);
    }
  }

  const milliseconds timeout_, time_ = time_of_link();
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::optional<Group> group_;          // that is being made
  std::map<int, int> sent_, received_;  // by peer
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Group> queue_;
  std::vector<WorkPtr> running_;
  std::exception_ptr broken_;
  bool closing_ = false, transferring_ = false;
  std::thread thread_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_strict_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                      milliseconds timeout) {
  return c10::make_intrusive<StrictBackend>(store, rank, size, timeout);
}

}  // namespace plumb_test

// Programs of plumb's get it for their groups on the test device where PLUMB_TEST_BACKEND says so. Elsewhere (Python's
// torch alone) the symbol is not there.
namespace plumb {
__attribute__((weak)) void register_device_backend(c10::DeviceType type, MakeDeviceBackend make);
}

namespace {

struct Register {
  Register() {
    const char* wanted = std::getenv("PLUMB_TEST_BACKEND");
    if (plumb::register_device_backend == nullptr || wanted == nullptr || wanted != std::string("strict")) return;
    plumb::register_device_backend(c10::DeviceType::PrivateUse1,
                                   [](const auto& store, int rank, int size, c10::Device, auto timeout) {
                                     return plumb_test::make_strict_backend(store, rank, size, timeout);
                                   });
  }
} at_load;

}  // namespace

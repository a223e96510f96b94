#include "plumb/pipeline/copy_ring.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/pipeline/group_state.h"

namespace plumb {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// What comes before the bytes.
struct Told {
  std::uint64_t magic = 0x31474e4952424c50;  // "PLBRING1"
  std::int64_t edge = 0, bytes = 0;
};

constexpr int kToldTag = 1, kBytesTag = 2;

at::Tensor byte_tensor(std::int64_t bytes) { return at::empty({bytes}, at::kByte); }

}  // namespace

struct CopyRing::Way {
  ProcessGroup group;
  int next = 0, before = 0;
  std::mutex lock;  // of the next two
  bool closing = false;
  std::vector<std::pair<at::Tensor, Work>> under_way;

  std::string name(int rank) const { return "rank " + std::to_string(group.world_rank(rank)); }

  Work post(bool sends, at::Tensor bytes, int tag) {
    std::lock_guard<std::mutex> guard(lock);
    if (closing) throw std::runtime_error("closed");
    std::vector<at::Tensor> tensors{bytes};
    auto& backend = *group.state().backend;
    const Work work = sends ? backend.send(tensors, next, tag) : backend.recv(tensors, before, tag);
    under_way.emplace_back(std::move(bytes), work);
    return work;
  }

  void wait(const Work& work) const {
    if (!work->wait(group.timeout())) throw std::runtime_error("closed");
  }

  // Sends this rank's, and answers what the one before sent.
  at::Tensor pass_on(std::int64_t edge, const at::Tensor& bytes) {
    if (group.size() == 1) return bytes;
    Told own;
    own.edge = edge;
    own.bytes = bytes.numel();
    const at::Tensor told = byte_tensor(sizeof own), theirs = byte_tensor(sizeof own);
    std::memcpy(told.data_ptr(), &own, sizeof own);
    at::Tensor taken;
    try {
      const Work sent_told = post(true, told, kToldTag), sent = post(true, bytes, kBytesTag);
      wait(post(false, theirs, kToldTag));
      Told said;
      std::memcpy(&said, theirs.const_data_ptr(), sizeof said);
      if (said.magic != own.magic || said.edge != edge || said.bytes < 0) {
        throw Error(ErrorKind::Communication,
                    name(group.rank()) + " expected the state of step " + std::to_string(edge) + " of " + name(before) +
                        " and got " +
                        (said.magic == own.magic ? "that of step " + std::to_string(said.edge)
                                                 : "something that is not plumb's, or of another version"),
                    "", "run the same version of plumb on every rank");
      }
      taken = byte_tensor(said.bytes);
      if (said.bytes > 0) wait(post(false, taken, kBytesTag));
      wait(sent_told);
      wait(sent);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& e) {
      throw Error(ErrorKind::Communication,
                  name(group.rank()) + " lost " + name(before) + " or " + name(next) +
                      " while they passed the state of step " + std::to_string(edge) + " on: " + what_gloo_says(e),
                  "", "look at what the other ranks printed");
    }
    std::lock_guard<std::mutex> guard(lock);
    under_way.clear();
    return taken;
  }
};

CopyRing::CopyRing(const ProcessGroup& group) : way_(std::make_shared<Way>()) {
  std::vector<int> all;
  for (int r = 0; r < group.size(); ++r) all.push_back(r);
  way_->group = make_subgroup(group, "copies", all);
  way_->next = (group.rank() + 1) % group.size();
  way_->before = (group.rank() + group.size() - 1) % group.size();
}

CopyRing::~CopyRing() {
  {
    std::lock_guard<std::mutex> guard(way_->lock);
    way_->closing = true;
    for (const auto& [bytes, work] : way_->under_way) {
      try {
        work->abort();
      } catch (const std::exception&) {
        // A backend that cannot: the wait ends with its time.
      }
    }
  }
  if (running_.valid()) running_.wait();
  // Gloo's threads may still write into these.
  if (!way_->under_way.empty())
    way_->group.state().until_closed.push_back(
        std::make_shared<std::vector<std::pair<at::Tensor, Work>>>(std::move(way_->under_way)));
}

void CopyRing::begin(std::int64_t edge, at::Tensor bytes) {
  running_ = std::async(std::launch::async, [way = way_, edge, bytes] { return way->pass_on(edge, bytes); });
}

at::Tensor CopyRing::finish() { return running_.valid() ? running_.get() : at::Tensor(); }

}  // namespace plumb

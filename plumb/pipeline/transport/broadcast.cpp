#include "plumb/pipeline/transport/broadcast.h"

#include <ATen/ATen.h>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/no_sigpipe.h"

namespace plumb {
namespace {

// The root's description of its tensor.
struct Announcement {
  std::uint32_t values_sum = 0;  // CRC-32 of the values
  char text[248] = {};           // its dtype and sizes
  std::uint32_t sum = 0;         // CRC-32 of what stands before it

  std::uint32_t sum_of() const { return crc32(this, offsetof(Announcement, sum)); }
};
static_assert(sizeof(Announcement) == 256);

class Broadcast {
 public:
  Broadcast(const ProcessGroup& group, int root) : group_(group), root_(root) {}

  void operator()(const at::Tensor& values) const {
    at::Tensor bytes = values.reshape({-1}).view(at::kByte);
    const std::string own = describe(values);
    Announcement said;
    if (group_.rank() == root_) {
      said.values_sum = crc32(bytes.const_data_ptr(), bytes.nbytes());
      std::strncpy(said.text, own.c_str(), sizeof said.text - 1);
      said.sum = said.sum_of();
    }
    send(at::from_blob(&said, {sizeof said}, at::kByte));
    if (said.sum != said.sum_of()) fail(" sent to all is damaged");
    said.text[sizeof said.text - 1] = 0;
    if (own.substr(0, sizeof said.text - 1) != said.text) {
      fail(std::string(" sends to all is ") + said.text + ", here it is " + own);
    }
    send(bytes);
    if (crc32(bytes.const_data_ptr(), bytes.nbytes()) != said.values_sum) fail(" sent to all is damaged");
  }

 private:
  void send(at::Tensor bytes) const {
    std::vector<at::Tensor> tensors{std::move(bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = root_;
    options.timeout = group_.timeout();
    const NoSigpipe guard;
    connecting(str(name(group_.rank()), " lost a peer while ", name(root_), " sent a tensor to all"),
               "look at what the other ranks printed",
               [&] { return group_.backend()->broadcast(tensors, options)->wait(); });
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorKind::Communication, name(group_.rank()) + ": the tensor that " + name(root_) + what, "",
                "make the same calls with the same model and the same version of plumb on every rank");
  }

  std::string name(int rank) const { return str("rank ", group_.world_rank(rank)); }

  const ProcessGroup& group_;
  const int root_;
};

}  // namespace

void broadcast(const ProcessGroup& group, const at::Tensor& tensor, int root) {
  if (root < 0 || root >= group.size()) {
    throw Error(ErrorKind::InvalidArgument,
                str("rank ", root, " cannot send a tensor to all: there are ", group.size(), " ranks"));
  }
  if (group.size() == 1) return;
  at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach(), whole = own.cpu().contiguous();
  Broadcast(group, root)(whole);
  if (!whole.is_same(own)) own.copy_(whole);
}

std::vector<std::int64_t> largest_of_all(const ProcessGroup& group, const std::vector<std::int64_t>& numbers) {
  if (group.size() == 1) return numbers;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors{at::tensor(numbers, at::kLong)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.timeout = group.timeout();
  const NoSigpipe guard;
  connecting(str("rank ", group.world_rank(group.rank()), " lost a peer while all told each other a number"),
             "look at what the other ranks printed",
             [&] { return group.backend()->allreduce(tensors, options)->wait(); });
  const auto* largest = tensors[0].const_data_ptr<std::int64_t>();
  return {largest, largest + numbers.size()};
}

}  // namespace plumb

#include "plumb/pipeline/broadcast.h"

#include "plumb/core/error.h"
#include "plumb/pipeline/group_state.h"

namespace plumb {

void broadcast(const ProcessGroup& group, const at::Tensor& tensor, int root) {
  if (root < 0 || root >= group.size()) {
    throw Error(ErrorKind::InvalidArgument, "rank " + std::to_string(root) +
                                                " cannot send a tensor to all: there are " +
                                                std::to_string(group.size()) + " ranks");
  }
  if (group.size() == 1 || tensor.numel() == 0) return;
  at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach(), whole = own.contiguous();
  std::vector<at::Tensor> bytes = {whole.reshape({-1}).view(at::kByte)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = group.timeout();
  try {
    group.state().backend->broadcast(bytes, options)->wait();
  } catch (const std::exception& e) {
    throw Error(ErrorKind::Communication,
                "rank " + std::to_string(group.rank()) + " lost a peer while rank " + std::to_string(root) +
                    " sent a tensor to all: " + e.what(),
                "", "look at what the other ranks printed");
  }
  if (whole.data_ptr() != own.data_ptr()) own.copy_(whole);
}

}  // namespace plumb

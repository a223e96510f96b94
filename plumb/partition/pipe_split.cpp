#include "plumb/partition/pipe_split.h"

#include <torch/library.h>

#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

void mark() {}

const RegisterOperators pipe_split_rows{{"plumb::", "pipe_split"}};
// CompositeExplicitAutograd also fills the entry for calls without any tensor, and survives decompositions.
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  m.def("pipe_split() -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(mark)));
}

}  // namespace

void pipe_split() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::pipe_split", "").typed<void()>();
  op.call();
}

bool is_pipe_split(const Node& node) { return node.is_op("plumb::pipe_split") || node.is_op("pippy::_pipe_split"); }

}  // namespace plumb

#include "plumb/partition/size_policy.h"

#include <functional>
#include <map>
#include <set>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/partition/pipe_split.h"

namespace plumb {
namespace {

// Whether a cut comes before an operator that takes `size` new bytes, with `before` bytes in the stages before and
// `here` in this one.
using Begins = std::function<bool(int64_t before, int64_t here, int64_t size)>;

const void* memory_of(const at::Tensor& tensor) { return tensor.numel() ? tensor.const_data_ptr() : nullptr; }

std::vector<std::string> cuts(const GraphModule& module, const Begins& begins) {
  std::vector<std::string> values;
  std::map<const Value*, at::Tensor> attributes;
  std::set<const void*> seen;
  int64_t before = 0, here = 0;
  for (const Node* node : module.graph().nodes()) {
    if (node->kind() == NodeKind::GetAttr) attributes[node->result()] = module.state().get(node->target()).tensor;
    if (node->kind() != NodeKind::CallFunction || node->num_results() == 0) continue;
    std::map<const void*, int64_t> fresh;
    for (const Value* input : node->inputs()) {
      const auto found = attributes.find(input);
      if (found == attributes.end() || seen.count(memory_of(found->second))) continue;
      fresh[memory_of(found->second)] = static_cast<int64_t>(found->second.nbytes());
    }
    int64_t size = 0;
    for (const auto& [memory, bytes] : fresh) {
      seen.insert(memory);
      size += bytes;
    }
    if (size && here && begins(before, here, size)) {
      values.push_back(node->result(0)->name());
      before += here;
      here = 0;
    }
    here += size;
  }
  return values;
}

}  // namespace

std::vector<std::string> cuts_of_equal_size(const GraphModule& module, int stages) {
  if (stages < 1) throw Error(ErrorKind::InvalidArgument, str("a model cannot be cut into ", stages, " stages"));
  std::map<const void*, int64_t> tensors;
  for (const Attr& attr : module.state()) tensors[memory_of(attr.tensor)] = static_cast<int64_t>(attr.tensor.nbytes());
  double total = 0;
  for (const auto& [memory, bytes] : tensors) total += static_cast<double>(bytes);
  int made = 1;
  return cuts(module, [&](int64_t before, int64_t here, int64_t size) {
    const double middle = static_cast<double>(before + here) + static_cast<double>(size) / 2;
    if (made >= stages || middle * stages < total * made) return false;
    ++made;
    return true;
  });
}

std::vector<std::string> cuts_at_size(const GraphModule& module, int64_t bytes) {
  return cuts(module, [bytes](int64_t, int64_t here, int64_t size) { return here + size > bytes; });
}

std::shared_ptr<GraphModule> mark_before(const GraphModule& module, const std::vector<std::string>& values) {
  auto copy =
      std::make_shared<GraphModule>(module.graph().clone(), module.state(), module.in_spec(), module.out_spec());
  copy->copy_mode(module);
  Graph& graph = copy->graph();
  for (Node* node : graph.nodes()) {
    if (is_pipe_split(*node)) graph.erase(node);
  }
  const Value* last = nullptr;
  for (const std::string& name : values) {
    const Value* value = graph.find_value(name);
    if (!value || !value->producer()->is_call())
      throw Error(ErrorKind::UnknownName, "the graph has no value %" + name + " to cut before", "", kPlanAgain);
    if (last && !last->producer()->is_before(value->producer())) {
      throw Error(ErrorKind::InvalidArgument,
                  "cuts are given in another order than the graph's: %" + name + " is not made after %" + last->name(),
                  "", kPlanAgain);
    }
    last = value;
    auto here = graph.inserting_before(value->producer());
    graph.call("plumb::pipe_split", {});
  }
  return copy;
}

std::vector<std::string> cut_values(const GraphModule& module, const Pipe& pipe) {
  std::map<std::string, int> stage_of;  // stage that makes a value, by name; -1: several stages, each for itself
  for (int s = 0; s < pipe.num_stages(); ++s) {
    for (const Node* node : pipe.stage(s)->graph().nodes()) {
      if (!node->is_call() || node->num_results() == 0) continue;
      const auto [it, fresh] = stage_of.emplace(node->result(0)->name(), s);
      if (!fresh) it->second = -1;
    }
  }
  std::vector<std::string> first(pipe.num_stages());
  std::set<const Node*> moving;  // views of a parameter go with their user, whichever side of a cut they are on
  for (const Node* node : module.graph().nodes()) {
    if (!node->is_call() || node->num_results() == 0) continue;
    if (node->result_aliases_input() && node->num_inputs() == 1) {
      const Node* source = node->input(0)->producer();
      if (source->kind() == NodeKind::GetAttr || moving.count(source) > 0) {
        moving.insert(node);
        continue;
      }
    }
    const auto found = stage_of.find(node->result(0)->name());
    if (found != stage_of.end() && found->second >= 0 && first[found->second].empty())
      first[found->second] = found->first;
  }
  first.erase(first.begin());
  return first;
}

int count_operators(const GraphModule& module) {
  int count = 0;
  for (const Node* node : module.graph().nodes()) count += node->is_call() && !is_pipe_split(*node) ? 1 : 0;
  return count;
}

void check_plan_fits(int operators, const GraphModule& module) {
  const int here = count_operators(module);
  if (operators == 0 || operators == here) return;
  throw Error(ErrorKind::StructureMismatch,
              str("the plan was made for a graph of ", operators, " operators, and this one has ", here), "",
              kPlanAgain);
}

}  // namespace plumb

// Tensors that a forward leaves outside of its outputs: in members of a C++ module's struct, which nobody can list.
#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/capture/session.h"

namespace plumb {

std::vector<std::pair<int, at::Tensor>> ValueTable::held_results() const {
  std::vector<std::pair<int, at::Tensor>> held;
  for (const auto& [impl, entry] : by_object_) {
    if ((*this)[entry.value].origin != RecordedValue::Result || (*this)[entry.value].dead) continue;
    if (auto alive = entry.keep.lock()) held.emplace_back(entry.value, at::Tensor(std::move(alive)));
  }
  std::ranges::sort(held, {}, [](const auto& result) { return result.first; });
  return held;
}

std::vector<at::Tensor> Session::take_left() {
  std::vector<at::Tensor> left;
  if (request.attributes_after) return left;  // this front end lists what holds tensors, and has put them back
  recorder.fed.clear();
  for (auto& [number, tensor] : recorder.values.held_results()) {
    const auto is_state = [&tensor = tensor](const Attr& attr) {
      return attr.tensor.defined() && attr.tensor.has_storage() && tensor.has_storage() &&
             attr.tensor.is_alias_of(tensor);
    };
    const auto is_written_back = [number = number](const auto& written) { return written.second == number; };
    if (std::ranges::any_of(recorder.attributes, is_state)) continue;
    if (std::ranges::any_of(recorder.write_backs, is_written_back)) continue;
    left.push_back(std::move(tensor));
  }
  if (attempt.skipped && !left.empty()) compute(left);
  return left;
}

void Session::compute(const std::vector<at::Tensor>& left) {
  module_state_.put_contents_back();
  module_state_.put_generators_back();
  const auto graph = build_graph(*this, std::vector<c10::IValue>(left.begin(), left.end()),
                                 TreeSpec::list(std::vector<TreeSpec>(left.size(), TreeSpec::leaf())), {});
  const at::NoGradGuard no_grad;
  const auto computed = graph->run(request.inputs);
  for (size_t i = 0; i < left.size(); ++i) left[i].variable_data().copy_(computed[i].toTensor());
}

}  // namespace plumb

// The names under which the tensors of two runs are compared.
#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "plumb/recording/diff.h"

namespace plumb {
namespace {

// The results of one operator in one module, of two runs.
struct Results {
  std::multiset<std::string> names_a, names_b;
  std::vector<size_t> left;  // places in the first run, without a twin yet
  bool as_many() const { return names_a.size() == names_b.size(); }
};

}  // namespace

std::vector<std::string> names_among(const std::vector<HistoryTensor>& tensors,
                                     const std::vector<HistoryTensor>& first) {
  std::map<std::pair<std::string, std::string>, Results> results;
  const auto of = [&](const HistoryTensor& tensor) -> Results& { return results[{tensor.operation, tensor.module}]; };
  std::map<std::string, size_t> given;  // parameters, buffers and inputs of the first run
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].is_computed())
      of(first[i]).names_a.insert(first[i].name), of(first[i]).left.push_back(i);
    else
      given.emplace(first[i].name, i);
  }
  for (const HistoryTensor& tensor : tensors)
    if (tensor.is_computed()) of(tensor).names_b.insert(tensor.name);

  std::vector<std::string> own, names;
  std::vector<std::optional<size_t>> twins;  // in the first run
  std::set<std::string> given_names;
  for (const HistoryTensor& tensor : tensors) {
    own.push_back(tensor.name), names.push_back(tensor.name), twins.emplace_back();
    if (!tensor.is_computed()) {
      if (const auto at = given.find(tensor.name); at != given.end()) twins.back() = at->second;
      continue;
    }
    Results& like = of(tensor);
    if (!like.as_many()) continue;
    const auto has_name = [&](size_t each) { return first[each].name == tensor.name; };
    const auto has_inputs = [&](size_t each) {
      const auto is_twin = [&](uint32_t mine, uint32_t other) { return mine < twins.size() && twins[mine] == other; };
      return !tensor.inputs.empty() && std::ranges::equal(tensor.inputs, first[each].inputs, is_twin);
    };
    const bool same_names = like.names_a == like.names_b;
    const auto end = like.left.end();
    auto twin = end;
    if (same_names) twin = std::ranges::find_if(like.left, [&](size_t t) { return has_name(t) && has_inputs(t); });
    if (twin == end) twin = std::ranges::find_if(like.left, has_inputs);
    if (twin == end && same_names) twin = std::ranges::find_if(like.left, has_name);
    if (twin == end) twin = like.left.begin();
    twins.back() = *twin;
    given_names.insert(names.back() = first[*twin].name);
    like.left.erase(twin);
  }
  // A name that stands for another result by now is no name for one without a twin.
  for (const HistoryTensor& tensor : tensors)
    if (tensor.is_computed() && !of(tensor).as_many() && given_names.contains(tensor.name)) return own;
  return names;
}

}  // namespace plumb

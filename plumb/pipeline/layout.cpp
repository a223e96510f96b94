#include "plumb/pipeline/layout.h"

#include <algorithm>
#include <map>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/wiring.h"

namespace plumb {
namespace {

// Returns every value's users, ascending.
std::map<ValueSource, std::vector<int>> users_of_values(const PipelineLayout& layout) {
  std::map<ValueSource, std::vector<int>> users;
  for (int s = 0; s < layout.num_stages(); s++) {
    for (const auto& source : layout.stages[s].inputs) {
      auto& list = users[source];
      if (list.empty() || list.back() != s) list.push_back(s);
    }
  }
  return users;
}

template <typename Bundles>
auto& bundle_for(Bundles& bundles, int stage) {
  for (auto& b : bundles) {
    if (b.stage == stage) return b;
  }
  return bundles.emplace_back(typename Bundles::value_type{stage, {}});
}

}  // namespace

PipelineLayout PipelineLayout::chain(int num_stages) {
  PipelineLayout layout;
  for (int s = 0; s < num_stages; s++) layout.stages.push_back({{{s - 1, 0}}, 1});
  return layout;
}

PipelineLayout PipelineLayout::dynamic_chain(int num_stages) {
  PipelineLayout layout = chain(num_stages);
  if (num_stages > 0) layout.stages[0].inputs.clear();
  layout.num_inputs = 0;
  layout.dynamic_outputs = true;
  return layout;
}

StageEdges PipelineLayout::edges() const {
  StageEdges edges;
  auto add = [&](int from, int to) {
    StageEdge edge{from, to};
    if (std::ranges::find(edges, edge) == edges.end()) edges.push_back(edge);
  };
  for (const auto& [source, users] : users_of_values(*this)) {
    if (source.stage < 0) continue;
    int before = source.stage;
    for (int user : users) {
      add(source.stage, user);
      if (before != source.stage) add(before, user);
      before = user;
    }
  }
  return edges;
}

std::string PipelineLayout::text() const {
  std::string out = str(num_inputs, " inputs\n", dynamic_outputs ? "dynamic outputs\n" : "");
  for (int s = 0; s < num_stages(); s++) {
    out += str("stage ", s, ":");
    for (const auto& in : stages[s].inputs) {
      out += in.stage < 0 ? " input" : str(" stage", in.stage);
      out += '.';
      out += std::to_string(in.index);
    }
    out += str(" -> ", stages[s].num_outputs);
    for (const int index : stages[s].as_they_are) out += str(" ", index, " as it is");
    out += "\n";
  }
  if (wire) out += "wire: " + wire.fwd + " " + wire.bwd + "\n";
  for (const auto& group : tied) {
    out += "tied:";
    for (const auto& copy : group.copies) out += str(" stage", copy.stage, ".", copy.name);
    out += "\n";
  }
  return out;
}

void PipelineLayout::check() const {
  if (stages.empty()) throw Error(ErrorKind::InvalidArgument, "the pipeline has no stages");
  plumb::check(wire);
  for (int s = 0; s < num_stages(); s++) {
    for (size_t i = 0; i < stages[s].inputs.size(); i++) {
      const auto& in = stages[s].inputs[i];
      const std::string what = str("input ", i, " of stage ", s);
      if (in.stage == ValueSource::kModelInput) {
        if (in.index < 0 || in.index >= num_inputs) {
          throw Error(ErrorKind::InvalidArgument,
                      str(what, " is the model's input ", in.index, ", the model has ", num_inputs));
        }
      } else if (in.stage < 0 || in.stage >= s) {
        throw Error(ErrorKind::InvalidArgument,
                    str(what, " comes from stage ", in.stage, ", which is not an earlier stage"));
      } else if (in.index < 0 || in.index >= stages[in.stage].num_outputs) {
        throw Error(ErrorKind::InvalidArgument, str(what, " is output ", in.index, " of stage ", in.stage,
                                                    ", which has ", stages[in.stage].num_outputs));
      }
    }
  }
  for (int s = 0; dynamic_outputs && s < num_stages(); s++) {
    if (stages[s].inputs != dynamic_chain(num_stages()).stages[s].inputs) {
      throw Error(ErrorKind::InvalidArgument,
                  str("stage ", s, " of a layout with dynamic outputs is no link of a chain"));
    }
  }
  for (const auto& group : tied) {
    for (const auto& copy : group.copies) {
      if (copy.stage < 0 || copy.stage >= num_stages()) {
        throw Error(ErrorKind::InvalidArgument,
                    str("tied parameter ", copy.name, " is in stage ", copy.stage, ", there are ", num_stages()));
      }
    }
  }
}

std::vector<StageWiring> connect_stages(const PipelineLayout& layout) {
  layout.check();
  std::vector<StageWiring> wiring(layout.stages.size());
  for (int s = 0; s < layout.num_stages(); s++) {
    auto& w = wiring[s];
    w.output_used.assign(layout.stages[s].num_outputs, false);
    for (const auto& in : layout.stages[s].inputs) {
      auto at = std::ranges::find(w.sources, in);
      w.source_of_input.push_back(static_cast<int>(at - w.sources.begin()));
      if (at == w.sources.end()) w.sources.push_back(in);
    }
  }
  const auto users = users_of_values(layout);
  auto source_index = [&](int stage, const ValueSource& value) {
    const auto& sources = wiring[stage].sources;
    return static_cast<int>(std::ranges::find(sources, value) - sources.begin());
  };
  for (int s = 0; s < layout.num_stages(); s++) {
    auto& w = wiring[s];
    for (int i = 0; i < static_cast<int>(w.sources.size()); i++) {
      const auto& value = w.sources[i];
      if (value.stage < 0) continue;
      auto& maker = wiring[value.stage];
      maker.output_used[value.index] = true;
      bundle_for(w.values_in, value.stage).indices.push_back(i);
      bundle_for(maker.values_out, s).indices.push_back(value.index);
      const auto& list = users.at(value);
      const auto at = std::ranges::find(list, s);
      const int to = at == list.begin() ? value.stage : *(at - 1);
      bundle_for(w.grads_out, to).indices.push_back(i);
      bundle_for(wiring[to].grads_in, s)
          .targets.push_back(to == value.stage ? StageWiring::GradBundle::Target{true, value.index}
                                               : StageWiring::GradBundle::Target{false, source_index(to, value)});
    }
  }
  auto ascending = [](const auto& a, const auto& b) { return a.stage < b.stage; };
  for (auto& w : wiring) {
    std::ranges::sort(w.values_out, ascending);
    std::ranges::sort(w.values_in, ascending);
    std::ranges::sort(w.grads_out, [](const auto& a, const auto& b) { return a.stage > b.stage; });
  }
  return wiring;
}

}  // namespace plumb

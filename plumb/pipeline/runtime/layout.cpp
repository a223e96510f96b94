#include "plumb/pipeline/runtime/layout.h"

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {
namespace {

// Returns the sizes, with -1 for a symbol.
std::vector<int64_t> sizes_made_for(const TensorMeta& meta) {
  std::vector<int64_t> sizes = meta.sizes;
  for (size_t i = 0; i < sizes.size() && i < meta.symbols.size(); ++i) {
    if (!meta.symbols[i].empty()) sizes[i] = -1;
  }
  return sizes;
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
      const auto index = static_cast<int64_t>(in.index);
      if (in.is_model_input()) {
        if (index < 0 || index >= num_inputs) {
          throw Error(ErrorKind::InvalidArgument,
                      str(what, " is the model's input ", index, ", the model has ", num_inputs));
        }
      } else if (in.stage < 0 || in.stage >= s) {
        throw Error(ErrorKind::InvalidArgument,
                    str(what, " comes from stage ", in.stage, ", which is not an earlier stage"));
      } else if (index < 0 || index >= stages[in.stage].num_outputs) {
        throw Error(ErrorKind::InvalidArgument, str(what, " is output ", index, " of stage ", in.stage, ", which has ",
                                                    stages[in.stage].num_outputs));
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

PipelineLayout make_layout(const PipeTable& table) {
  PipelineLayout layout;
  layout.num_inputs = static_cast<int>(table.num_inputs);
  layout.input_sizes.resize(table.num_inputs);
  layout.wire = table.wire;
  for (int s = 0; s < table.num_stages(); ++s) {
    const StageIO& io = table.stages[s];
    StageLayout stage;
    for (const StageInputPort& port : io.inputs) {
      stage.inputs.push_back(port.source);
      if (port.source.is_model_input() && port.meta) layout.input_sizes[port.source.index] = sizes_made_for(*port.meta);
    }
    stage.num_outputs = static_cast<int>(io.outputs.size());
    for (int i = 0; table.wire && i < stage.num_outputs; ++i) {
      if (!io.outputs[i].as_it_is.empty()) stage.as_they_are.insert(i);
    }
    layout.stages.push_back(std::move(stage));
  }
  for (const ReplicatedParam& parameter : table.replicated) {
    TiedParameter tied;
    for (const auto& [stage, name] : parameter) tied.copies.push_back({stage, name});
    layout.tied.push_back(std::move(tied));
  }
  return layout;
}

}  // namespace plumb

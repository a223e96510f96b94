#include "plumb/pipeline/graph_stage.h"

#include <set>

#include "plumb/core/error.h"

namespace plumb {

PipelineLayout make_layout(const PipeTable& table) {
  PipelineLayout layout;
  layout.num_inputs = static_cast<int>(table.num_inputs);
  for (const StageIO& io : table.stages) {
    StageLayout stage;
    for (const StageInputPort& port : io.inputs) {
      stage.inputs.push_back({port.source.is_pipeline_input() ? ValueSource::kModelInput : port.source.stage,
                              static_cast<int>(port.source.index)});
    }
    stage.num_outputs = static_cast<int>(io.outputs.size());
    layout.stages.push_back(std::move(stage));
  }
  for (const ReplicatedParam& parameter : table.replicated) {
    TiedParameter tied;
    for (const auto& [stage, name] : parameter) tied.copies.push_back({stage, name});
    layout.tied.push_back(std::move(tied));
  }
  return layout;
}

GraphStage::GraphStage(std::shared_ptr<GraphModule> module, StageIO io)
    : module_(std::move(module)), io_(std::move(io)) {}

Tensors GraphStage::forward(const Tensors& inputs) {
  if (inputs.size() != io_.inputs.size()) {
    throw Error(ErrorKind::InvalidArgument, "the stage takes " + std::to_string(io_.inputs.size()) + " inputs, got " +
                                                std::to_string(inputs.size()));
  }
  std::vector<c10::IValue> values;
  values.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const StageInputPort& port = io_.inputs[i];
    if (port.type != ValueType::Tensor) {
      values.push_back(inputs[i].defined() ? unpack_value(inputs[i], port.type) : c10::IValue());
    } else {
      // What the stage writes must be its own: a batch is cut into views, and a value may go to several stages.
      values.emplace_back(port.written && inputs[i].defined() ? inputs[i].clone() : inputs[i]);
    }
  }
  Tensors outputs;
  for (const c10::IValue& v : module_->run(std::move(values)))
    outputs.push_back(v.isTensor() ? v.toTensor() : pack_value(v));
  return outputs;
}

std::vector<NamedTensor> GraphStage::parameters() const {
  std::vector<NamedTensor> named;
  std::set<const c10::TensorImpl*> seen;
  for (const Attr& attr : module_->state()) {
    if (attr.kind == AttrKind::Parameter && seen.insert(attr.tensor.unsafeGetTensorImpl()).second) {
      named.push_back({attr.name, attr.tensor});
    }
  }
  return named;
}

std::map<int, std::shared_ptr<StageFunction>> stages_of_rank(const Pipe& pipe, const Schedule& schedule, int rank) {
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s = 0; s < pipe.num_stages(); ++s) {
    bool here = false;
    for (int mb = 0; mb < schedule.num_microbatches && !here; ++mb) here = schedule.placement.rank_of(s, mb) == rank;
    if (here)
      stages.emplace(s, std::make_shared<GraphStage>(pipe.stage(s), pipe.table().stages[static_cast<size_t>(s)]));
  }
  return stages;
}

}  // namespace plumb

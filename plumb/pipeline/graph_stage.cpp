#include "plumb/pipeline/graph_stage.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "plumb/core/error.h"

namespace plumb {

namespace {

// Many sizes come again in every epoch, some never: as many graphs as are cheap to keep.
constexpr size_t kKept = 64;

// Sizes that are symbols may be any: the graph itself follows them.
bool as_cut(const TensorMeta& meta, at::IntArrayRef sizes) {
  if (sizes.size() != meta.sizes.size()) return false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const bool symbol = i < meta.symbols.size() && !meta.symbols[i].empty();
    if (!symbol && sizes[i] != meta.sizes[i]) return false;
  }
  return true;
}

// -1 for a symbol.
std::vector<int64_t> sizes_made_for(const TensorMeta& meta) {
  std::vector<int64_t> sizes = meta.sizes;
  for (size_t i = 0; i < sizes.size() && i < meta.symbols.size(); ++i) {
    if (!meta.symbols[i].empty()) sizes[i] = -1;
  }
  return sizes;
}

}  // namespace

PipelineLayout make_layout(const PipeTable& table) {
  PipelineLayout layout;
  layout.num_inputs = static_cast<int>(table.num_inputs);
  layout.input_sizes.resize(table.num_inputs);
  for (int s = 0; s < table.num_stages(); ++s) {
    const StageIO& io = table.stages[static_cast<size_t>(s)];
    StageLayout stage;
    for (const StageInputPort& port : io.inputs) {
      const bool of_model = port.source.is_pipeline_input();
      stage.inputs.push_back(
          {of_model ? ValueSource::kModelInput : port.source.stage, static_cast<int>(port.source.index)});
      if (of_model && port.meta) layout.input_sizes[port.source.index] = sizes_made_for(*port.meta);
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

GraphStage::GraphStage(std::shared_ptr<GraphModule> module, StageIO io, std::shared_ptr<StageSpecializer> specializer,
                       int index)
    : module_(std::move(module)), io_(std::move(io)), specializer_(std::move(specializer)), index_(index) {}

ModelSizes GraphStage::known_sizes(const Tensors& inputs) const {
  ModelSizes known;
  bool other = false;
  for (size_t i = 0; i < std::min(inputs.size(), io_.inputs.size()); ++i) {
    const StageInputPort& port = io_.inputs[i];
    if (!port.source.is_pipeline_input() || !port.meta || !inputs[i].defined()) continue;
    known[port.source.index] = inputs[i].sizes().vec();
    other = other || !as_cut(*port.meta, inputs[i].sizes());
  }
  return other ? known : ModelSizes();
}

void GraphStage::raise_other_sizes(const ModelSizes& known) const {
  const auto text = [](const std::vector<int64_t>& sizes) {
    std::string list;
    for (int64_t size : sizes) list += (list.empty() ? "" : ", ") + std::to_string(size);
    return "[" + list + "]";
  };
  std::string came;
  for (const auto& [input, sizes] : known) {
    std::string what = "input " + std::to_string(input) + " is " + text(sizes);
    for (const StageInputPort& port : io_.inputs) {
      if (port.source.is_pipeline_input() && port.source.index == input && port.meta)
        what = "'" + port.name + "' was " + text(port.meta->sizes) + " and is " + text(sizes);
    }
    came += (came.empty() ? "" : ", ") + what;
  }
  throw Error(ErrorKind::TensorMismatch,
              "stage " + std::to_string(index_) + " was cut for other sizes of the model's inputs: " + came, "",
              "export the program with dynamic shapes; give a live module's stages a StageSpecializer "
              "(specialize_on_sizes); or give "
              "batches of the sizes it was cut for");
}

GraphModule& GraphStage::graph_for(const ModelSizes& known) {
  if (known.empty()) return *module_;
  auto it = others_.find(known);
  if (it == others_.end()) {
    if (!specializer_) raise_other_sizes(known);
    if (others_.size() >= kKept) others_.erase(others_.begin());
    it = others_.emplace(known, specializer_->stage(index_, known, *module_)).first;
  } else {
    StageSpecializer::share_state(*module_, *it->second);
  }
  return *it->second;
}

Tensors GraphStage::run_graph(GraphModule& graph, const Tensors& inputs) const {
  if (inputs.size() != io_.inputs.size()) {
    throw Error(ErrorKind::StructureMismatch, "the stage takes " + std::to_string(io_.inputs.size()) + " inputs, got " +
                                                  std::to_string(inputs.size()));
  }
  std::vector<c10::IValue> values;
  values.reserve(io_.inputs.size());
  for (size_t i = 0; i < io_.inputs.size(); ++i) {
    const StageInputPort& port = io_.inputs[i];
    if (port.type != ValueType::Tensor) {
      values.push_back(inputs[i].defined() ? unpack_value(inputs[i], port.type) : c10::IValue());
    } else {
      // What the stage writes must be its own: a batch is cut into views, and a value may go to several stages.
      values.emplace_back(port.written && inputs[i].defined() ? inputs[i].clone() : inputs[i]);
    }
  }
  Tensors outputs;
  for (const c10::IValue& v : graph.run(std::move(values)))
    outputs.push_back(v.isTensor() ? v.toTensor() : pack_value(v));
  return outputs;
}

Tensors GraphStage::forward(const Tensors& inputs) { return run_graph(graph_for(known_sizes(inputs)), inputs); }

Tensors GraphStage::run(const Tensors& inputs, const Microbatch& microbatch) {
  return run_graph(graph_for(microbatch.sizes), inputs);
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

std::map<int, std::shared_ptr<StageFunction>> stages_of_rank(const Pipe& pipe, const Schedule& schedule, int rank,
                                                             const std::shared_ptr<StageSpecializer>& specializer) {
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s = 0; s < pipe.num_stages(); ++s) {
    bool here = false;
    for (int mb = 0; mb < schedule.num_microbatches && !here; ++mb) here = schedule.placement.rank_of(s, mb) == rank;
    if (!here) continue;
    const StageIO& io = pipe.table().stages[static_cast<size_t>(s)];
    stages.emplace(s, std::make_shared<GraphStage>(pipe.stage(s), io, specializer, s));
  }
  return stages;
}

}  // namespace plumb

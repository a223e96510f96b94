#include "plumb/pipeline/runtime/graph_stage.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

#include "plumb/capture/captured_model.h"
#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/aliases.h"

namespace plumb {

namespace {

bool is_tensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

const StageIO& ports_of(const GraphModule* module, const PipeTable& table, int index) {
  if (module == nullptr) throw Error(ErrorKind::InvalidArgument, str("stage ", index, " has no graph: it is null"));
  if (index >= 0 && index < table.num_stages()) return table.stages[static_cast<size_t>(index)];
  throw Error(ErrorKind::InvalidArgument, str("the pipe's table has no stage ", index, ", it has ", table.num_stages()),
              "", "stages count from 0");
}

}  // namespace

LambdaStage::LambdaStage(Function function, std::vector<NamedTensor> parameters)
    : function_(std::move(function)), parameters_(std::move(parameters)) {
  if (!function_) throw Error(ErrorKind::InvalidArgument, "LambdaStage: the function is empty", "", "give it one");
}

GraphStage::GraphStage(std::shared_ptr<GraphModule> module, const PipeTable& table, int index,
                       std::shared_ptr<StageSpecializer> specializer, std::string remedy, bool variant)
    : module_(std::move(module)),
      io_(ports_of(module_.get(), table, index)),
      model_inputs_(table.model_inputs()),
      index_(index),
      specializer_(std::move(specializer)),
      remedy_(std::move(remedy)),
      variant_(variant) {
  if (remedy_.empty()) {
    remedy_ =
        "export the program with dynamic shapes; give a live module's stages a StageSpecializer (specialize_on_sizes); "
        "or give batches of the sizes it was cut for";
  }
}

ModelSizes GraphStage::known_sizes(const std::vector<c10::IValue>& inputs, ModelSizes known) const {
  for (size_t i = 0; i < std::min(inputs.size(), io_.inputs.size()); ++i) {
    const StageInputPort& port = io_.inputs[i];
    if (port.source.is_model_input() && port.meta && is_tensor(inputs[i]))
      known[port.source.index] = inputs[i].toTensor().sizes().vec();
  }
  const bool other = std::ranges::any_of(known, [&](const auto& entry) {
    const auto cut = model_inputs_.find(entry.first);
    return cut != model_inputs_.end() && !fits_cut(*cut->second.meta, entry.second);
  });
  return other ? known : ModelSizes();
}

std::pair<std::vector<c10::IValue>, ModelSizes> GraphStage::run_by_hand(std::vector<c10::IValue> inputs,
                                                                        ModelSizes told) {
  ModelSizes known = known_sizes(inputs, std::move(told));
  for (size_t i = 0; known.empty() && i < std::min(inputs.size(), io_.inputs.size()); ++i) {
    const StageInputPort& port = io_.inputs[i];
    if (port.source.is_model_input() || !port.meta || !is_tensor(inputs[i])) continue;
    const at::IntArrayRef sizes = inputs[i].toTensor().sizes();
    if (fits_cut(*port.meta, sizes)) continue;
    throw Error(ErrorKind::InvalidState,
                str("stage ", index_, ": '", port.name, "' came as ", c10::str(sizes), " where ",
                    c10::str(at::IntArrayRef(port.meta->sizes)),
                    " was cut, and the sizes of the model's inputs cannot be told from that"),
                "",
                "hand on what the stage before returned as it is (a detached tensor or a copy does not say where it "
                "comes from), or run the stages in a schedule");
  }
  if (!known.empty() && is_capturing()) {
    throw Error(
        ErrorKind::Unsupported,
        str("stage ", index_,
            " is captured or transformed, and called by hand with other sizes than it was cut for: the next stage "
            "would not know them"),
        "", "run the stages in a schedule, or cut the model for these sizes");
  }
  return {run_values(std::move(inputs), known), known};
}

void GraphStage::raise_other_sizes(const ModelSizes& known) const {
  std::string came;
  for (const auto& [input, sizes] : known) {
    const auto cut = model_inputs_.find(input);
    if (cut == model_inputs_.end() || fits_cut(*cut->second.meta, sizes)) continue;
    came += (came.empty() ? "'" : ", '") + cut->second.name + "' was " +
            c10::str(at::IntArrayRef(cut->second.meta->sizes)) + " and is " + c10::str(at::IntArrayRef(sizes));
  }
  throw Error(ErrorKind::TensorMismatch,
              str("stage ", index_, " was cut for other sizes of the model's inputs: ", came), "", remedy_);
}

std::shared_ptr<GraphModule> GraphStage::graph_for(const ModelSizes& known) {
  if (known.empty() && !variant_) return module_;
  const std::lock_guard lock(mutex_);
  if (const auto* graph = others_.find(known)) {
    share_state(*module_, **graph);
    return *graph;
  }
  if (!specializer_) raise_other_sizes(known);
  return others_.add(known, specializer_->stage(index_, known, *module_));
}

std::vector<c10::IValue> GraphStage::run_values(std::vector<c10::IValue> inputs, const ModelSizes& sizes) {
  if (inputs.size() != io_.inputs.size()) {
    throw Error(ErrorKind::StructureMismatch,
                str("the stage takes ", io_.inputs.size(), " inputs, got ", inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const StageInputPort& port = io_.inputs[i];
    if (port.type != ValueType::Tensor && inputs[i].isTensor()) {
      inputs[i] = is_tensor(inputs[i]) ? unpack_value(inputs[i].toTensor(), port.type) : c10::IValue();
    } else if (port.written && is_tensor(inputs[i])) {
      // The stage writes to a copy of its own: a batch is cut into views, and a value may go to several stages.
      inputs[i] = inputs[i].toTensor().clone();
    }
  }
  std::vector<c10::IValue> outputs = graph_for(sizes)->run(std::move(inputs));
  for (c10::IValue& v : outputs) {
    if (!v.isNone()) v = pack_value(v);
  }
  return outputs;
}

Tensors GraphStage::forward(const Tensors& inputs) {
  return run(inputs, {0, known_sizes({inputs.begin(), inputs.end()}, {})});
}

Tensors GraphStage::run(const Tensors& inputs, const Microbatch& microbatch) {
  Tensors outputs;
  for (const c10::IValue& v : run_values({inputs.begin(), inputs.end()}, microbatch.sizes))
    outputs.push_back(v.isTensor() ? v.toTensor() : pack_value(v));
  return outputs;
}

std::optional<at::Device> GraphStage::device() const {
  for (const Attr& attr : module_->state()) {
    if (attr.tensor.defined()) return attr.tensor.device();
  }
  for (const StageInputPort& port : io_.inputs) {
    if (port.meta) return port.meta->device;
  }
  return std::nullopt;
}

std::vector<NamedTensor> GraphStage::written_state() const {
  std::vector<NamedTensor> written;
  for (const Attr* attr : plumb::written_state(module_->graph(), module_->state())) {
    if (attr->kind != AttrKind::Constant) written.push_back({attr->name, attr->tensor});
  }
  return written;
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
  if (rank < 0 || rank >= schedule.num_ranks()) {
    throw Error(ErrorKind::InvalidArgument,
                str("the schedule '", schedule.name, "' has no rank ", rank, ", it is for ", schedule.num_ranks()), "",
                "ranks count from 0");
  }
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s : schedule.placement.stages_of(rank))
    stages.emplace(s, std::make_shared<GraphStage>(pipe.stage(s), pipe.table(), s, specializer));
  return stages;
}

}  // namespace plumb

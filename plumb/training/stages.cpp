#include "plumb/training/stages.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "plumb/graph/describe.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

bool is_float(const Value& value) { return value.is_tensor() && value.meta() && value.meta()->dtype == at::kFloat; }

Value* cast(Graph& graph, Value* value, at::ScalarType dtype) {
  Value* made = graph.call("aten::to.dtype", {value, static_cast<int64_t>(dtype)})->result();
  TensorMeta meta = *value->meta();
  meta.dtype = dtype;
  made->set_meta(std::move(meta));
  return made;
}

}  // namespace

std::shared_ptr<GraphModule> bf16_products(const GraphModule& module) {
  Graph graph = module.graph().clone();
  for (Node* node : graph.nodes()) {
    if (!node->facts().contraction || node->num_results() != 1) continue;
    Value* result = node->result();
    if (!is_float(*result)) continue;
    {
      const auto before = graph.inserting_before(node);
      for (size_t i = 0; i < node->num_inputs(); ++i) {
        if (is_float(*node->input(i))) node->set_input(i, cast(graph, node->input(i), at::kBFloat16));
      }
    }
    TensorMeta low = *result->meta();
    low.dtype = at::kBFloat16;
    result->set_meta(std::move(low));
    const auto after = graph.inserting_after(node);
    Value* full = cast(graph, result, at::kFloat);
    Node* const cast_back = full->producer();
    // The gradient is rounded to FP8 before it is cast, as around products of values.
    if (node->is_op("plumb::fp8_linear") || node->is_op("plumb::fp8_matmul")) {
      Node* rounding = graph.call("plumb::simulate_format", {full, "none", node->arg("bwd")});
      rounding->result()->set_meta(full->meta());
      full = rounding->result();
    }
    graph.replace_all_uses_with(result, full, cast_back);
  }
  auto cast = std::make_shared<GraphModule>(std::move(graph), module.state(), module.in_spec(), module.out_spec());
  cast->copy_mode(module);
  return cast;
}

at::Device device_of(const std::string& given, int local_rank) {
  try {
    at::Device device(given);
    if (!device.is_cpu() && !device.is_meta()) {
      const bool known = c10::impl::hasDeviceGuardImpl(device.type());
      const int count = known ? c10::impl::VirtualGuardImpl(device.type()).deviceCount() : 0;
      const std::string name = c10::DeviceTypeName(device.type());
      if (!known) throw std::runtime_error("this torch was built without " + name);
      if (count == 0) throw std::runtime_error("torch finds no " + name + " device on this machine");
      if (!device.has_index()) device.set_index(static_cast<c10::DeviceIndex>(local_rank % count));
    }
    if (device.is_meta()) throw std::runtime_error("it computes nothing");
    at::zeros({1}, at::device(device)).add_(1);
    return device;
  } catch (const std::exception& e) {
    throw UsageError("--device " + given + ": " + first_line(e.what()), "--device cpu, or a device of this machine");
  }
}

std::map<int, std::shared_ptr<StageFunction>> make_stages(
    const TrainOptions& o, const TrainJob& job, int rank,
    const std::function<std::shared_ptr<GraphModule>(const GraphModule&)>& change) {
  std::map<int, std::shared_ptr<StageFunction>> stages = stages_of_rank(*job.pipe, job.schedule, rank);
  for (auto& [index, stage] : stages) {
    auto module = job.pipe->stage(index);
    if (change) module = change(*module);
    if (o.autocast == "bf16") module = bf16_products(*module);
    stage = std::make_shared<GraphStage>(module, job.pipe->table(), index);
    stage->recompute = parse_recompute(job.plan ? job.plan->recompute[static_cast<size_t>(index)] : o.recompute);
  }
  return stages;
}

}  // namespace plumb

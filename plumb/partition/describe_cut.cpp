#include "plumb/partition/describe_cut.h"

#include <ATen/core/Tensor.h>

#include <unordered_set>

namespace plumb {

Balance describe_cut(const Pipe& pipe, const BalanceOptions& options) {
  Balance result;
  size_t first_op = 0;
  for (int s = 0; s < pipe.num_stages(); ++s) {
    const GraphModule& module = *pipe.stage(s);
    const GraphCost cost = estimate_cost(module);
    BalancedStage stage;
    stage.first_op = first_op;
    size_t index = 0;
    for (const Node* node : module.graph().nodes()) {
      const NodeCost& c = cost.nodes[index++];
      if (!node->is_call()) continue;
      if (stage.num_ops++ == 0) stage.first_node = node->num_results() ? node->result()->name() : node->target();
      stage.activation_bytes += c.output_bytes;
    }
    first_op += stage.num_ops;
    stage.forward = cost.forward();
    stage.backward = cost.backward();
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const Attr& attr : module.state()) {
      if (attr.kind == AttrKind::Parameter && seen.insert(attr.tensor.unsafeGetTensorImpl()).second)
        stage.parameter_bytes += static_cast<int64_t>(attr.tensor.nbytes());
    }
    int messages = 0;
    for (const StageInputPort& port : pipe.stage_inputs(s)) {
      if (port.source.is_model_input()) continue;
      stage.bytes_in += bytes_of(port.meta);
      ++messages;
    }
    for (const StageOutputPort& port : pipe.stage_outputs(s)) {
      // Each consumer gets a message of its own.
      stage.bytes_out += static_cast<int64_t>(port.consumers.size()) * bytes_of(port.meta);
      messages += static_cast<int>(port.consumers.size());
    }
    // Values forward, their gradients back.
    stage.communication = 2 * (messages * options.seconds_per_message +
                               static_cast<double>(stage.bytes_in + stage.bytes_out) / options.bytes_per_second);
    stage.memory = static_cast<int64_t>(static_cast<double>(stage.parameter_bytes) * options.bytes_per_parameter_byte) +
                   (pipe.num_stages() - s) * stage.activation_bytes;
    result.stages.push_back(std::move(stage));
  }
  return result;
}

}  // namespace plumb

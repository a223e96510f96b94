// Autocast regions become the casts that autocast would have made.
#include <ATen/autocast_mode.h>

#include "plumb/exported/graph_writer.h"
#include "plumb/exported/node_reader.h"

namespace plumb::pt2 {
namespace {

// Returns the dtype of the first tensor among a node's results.
std::optional<at::ScalarType> result_dtype(NodeReader& reader, const JsonDoc& doc, const Json& node,
                                           const Json& graph) {
  for (const Json& out : doc.array(doc.at(node, "outputs"))) {
    const auto [tag, value] = doc.tagged(out);
    const Json* tensor = tag == "as_tensor"                                          ? &value
                         : tag == "as_tensors" && value.is_array() && !value.empty() ? &value[0]
                                                                                     : nullptr;
    if (!tensor) continue;
    auto meta = reader.meta_of(graph, doc.string(doc.at(*tensor, "name")));
    return meta ? std::optional(meta->dtype) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

// An operator that autocast knows runs in one floating dtype, and the file states which: the result's. To the lower
// precision, to float32 and to the widest of the inputs are all "cast every floating input to that dtype" (float64
// stays, as in torch). An operator that autocast does not know runs as it is, unless it calls one that it knows.
void NodeReader::add_casts(const Json& node, const Json& graph, const c10::OperatorHandle& op, std::vector<Arg>& args,
                           const Region& region) {
  const auto& autocast = *region.autocast;
  const auto dtype = result_dtype(*this, doc_, node, graph);
  if (!dtype || !at::isFloatingType(*dtype)) return;
  if (!op.hasKernelForDispatchKey(at::autocast::get_autocast_dispatch_key_from_device_type(autocast.device))) {
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return;
    const auto plain = infer_types(op, args);
    if (!plain.empty() && plain[0] && plain[0]->dtype != *dtype) {
      doc_.fail(
          node,
          operator_name(op) + " casts inside of itself under autocast, which cannot be written as casts of its inputs",
          "run ExportedProgram.run_decompositions() before saving, or write the operator out");
    }
    return;
  }
  auto cast = [&](Arg& arg) {
    Value* value = arg.value();
    if (!value || !value->meta()) return;
    const TensorMeta& meta = *value->meta();
    if (!meta.is_floating_point() || meta.dtype == at::kDouble || meta.dtype == *dtype ||
        meta.device.type() != autocast.device)
      return;
    // torch keeps the cast of a weight until the region ends: its gradients then add up in the lower precision.
    const Node* producer = value->producer();
    const bool weight = producer->kind() == NodeKind::GetAttr && meta.requires_grad && meta.dtype == at::kFloat;
    const bool keep = autocast.cache && weight && *dtype == autocast.dtype;
    if (keep) {
      auto known = cast_weights_.find(value);
      if (known != cast_weights_.end()) {
        arg = Arg(known->second);
        return;
      }
    }
    Node* made = graph_.call("aten::to.dtype", {value, static_cast<int64_t>(*dtype)});
    set_origin(node, made, region);
    TensorMeta to = meta;
    to.dtype = *dtype;
    made->result()->set_meta(std::move(to));
    if (keep) cast_weights_.emplace(value, made->result());
    arg = Arg(made->result());
  };
  // On CUDA sums and softmaxes get a dtype instead of a cast, where the caller gave none.
  if (autocast.device == at::kCUDA && *dtype == at::kFloat) {
    if (auto index = op.schema().argumentIndexWithName("dtype"); index && args[static_cast<size_t>(*index)].is_none()) {
      args[static_cast<size_t>(*index)] = Arg(static_cast<int64_t>(at::kFloat));
      return;
    }
  }
  for (Arg& arg : args) {
    if (arg.is_value()) {
      cast(arg);
    } else if (arg.is_list()) {
      Arg::List items = arg.list();
      for (Arg& e : items) cast(e);
      arg = Arg(std::move(items));
    }
  }
}

}  // namespace plumb::pt2

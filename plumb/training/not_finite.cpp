#include "plumb/training/not_finite.h"

#include <ATen/ATen.h>

#include <filesystem>

#include "plumb/core/output_file.h"
#include "plumb/exported/tensor_file.h"
#include "plumb/transforms/track_scales.h"

namespace plumb {
namespace {

bool is_bad(const Metrics::Data& data) { return data.nan_count > 0 || data.inf_count > 0; }

std::string tell(const std::string& what, const ScaleNode& node, const Metrics::Data& data) {
  std::string text =
      what + " of " + (node.kind == NodeKind::CallFunction ? "%" + node.name + " (" + node.target + ")" : node.target);
  if (!node.module.empty()) text += " at " + node.module;
  if (!node.source.empty()) text += " (" + node.source + ")";
  return c10::str(text, ": ", data.nan_count, " nan, ", data.inf_count, " inf of ", data.numel);
}

std::string first_bad(const ScalesGraph& graph) {
  for (const ScaleNode& node : graph.nodes) {
    if (node.metrics && is_bad(node.metrics->fwd)) return tell("the value", node, node.metrics->fwd);
  }
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    if (node->metrics && node->metrics->bwd && is_bad(*node->metrics->bwd)) {
      return tell("the gradient", *node, *node->metrics->bwd);
    }
  }
  return "";
}

}  // namespace

NotFinite find_not_finite(const TrainOptions& o, const TrainJob& job, const Parts& parts) {
  const auto tracked = track_scales(job.program.module);
  for (size_t part = 0; part < parts.inputs.size(); ++part) {
    const auto outputs = tracked->run({parts.inputs[part].begin(), parts.inputs[part].end()});
    Tensors tensors;
    for (const c10::IValue& v : outputs) tensors.push_back(v.isTensor() ? v.toTensor() : at::Tensor());
    const at::Tensor loss = job.pipeline.loss ? job.pipeline.loss(tensors, parts.targets[part])
                                              : tensors.at(static_cast<size_t>(job.pipeline.loss_output));
    if (loss.requires_grad()) loss.backward();
    std::string where = first_bad(scales_graph(*tracked));
    if (where.empty() && !at::isfinite(loss.detach()).all().item<bool>())
      where = "the loss itself (--loss " + o.loss + ")";
    if (!where.empty()) return {part, where};
  }
  return {};
}

void dump_step(const TrainOptions& o, const TrainJob& job, const Parts& parts, int64_t step, const NotFinite& found,
               const std::string& what) {
  const std::filesystem::path folder = o.dump;
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);  // save_pt2 says what is wrong with it
  save_pt2(job.program, (folder / "model.pt2").string());
  const auto tuple = [](const Tensors& tensors) {
    return c10::ivalue::Tuple::create(std::vector<c10::IValue>(tensors.begin(), tensors.end()));
  };
  save_tensors(tuple(parts.inputs[found.part]), (folder / "inputs.pt").string());
  if (!parts.targets[found.part].empty()) {
    save_tensors(parts.targets[found.part][0], (folder / "targets.pt").string());
  }
  const nlohmann::json about = {
      {"step", step}, {"microbatch", found.part}, {"what", what}, {"first_not_finite", found.where}};
  write_file_atomically(folder / "step.json", about.dump(1) + "\n");
}

}  // namespace plumb

#include "plumb/training/step/not_finite.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "plumb/core/error.h"
#include "plumb/core/output_file.h"
#include "plumb/core/table.h"
#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/training/stages.h"
#include "plumb/transforms/module.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

struct NotFinite {
  size_t part = 0;       // index of the microbatch in the step
  std::string where;     // "the value of %gelu (aten::gelu) at layers.0 (model.py:12): 3 nan, 0 inf of 128"
  bool in_data = false;  // no step of the training made it
};

bool is_finite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

bool is_bad(const Metrics::Data& data) { return data.nan_count > 0 || data.inf_count > 0; }

std::string tell(const std::string& what, const ScaleNode& node, const Metrics::Data& data) {
  std::string text =
      what + " of " + (node.kind == NodeKind::CallFunction ? "%" + node.name + " (" + node.target + ")" : node.target);
  if (!node.module.empty()) text += " at " + node.module;
  if (!node.source.empty()) text += " (" + node.source + ")";
  return c10::str(text, ": ", data.nan_count, " nan, ", data.inf_count, " inf of ", data.numel);
}

// Returns the first value that is not finite and reaches an output through others that are not: what masks make
// infinite ends in a softmax. Infinities that are made of no other values (a mask that a buffer holds) are none. Null
// if there is none.
const ScaleNode* first_bad_value(const ScalesGraph& graph) {
  const size_t count = graph.nodes.size();
  std::vector<bool> bad(count), reaches(count);
  for (size_t i = 0; i < count; ++i) {
    const ScaleNode& node = graph.nodes[i];
    if (!node.metrics || !is_bad(node.metrics->fwd)) continue;
    const auto is_made = [&](size_t input) {
      return bad[input] || (graph.nodes[input].metrics && !is_bad(graph.nodes[input].metrics->fwd));
    };
    bad[i] = node.kind == NodeKind::Placeholder || node.is_parameter || node.metrics->fwd.nan_count > 0 ||
             std::ranges::any_of(node.inputs, is_made);
  }
  const ScaleNode* found = nullptr;
  for (size_t i = count; i-- > 0;) {
    const ScaleNode& node = graph.nodes[i];
    if (bad[i]) found = reaches[i] ? &node : found;
    if (node.kind == NodeKind::Output || (reaches[i] && (bad[i] || !node.metrics)))
      for (const size_t input : node.inputs) reaches[input] = true;
  }
  return found;
}

std::string first_bad_gradient(const ScalesGraph& graph) {
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    if (node->metrics && node->metrics->bwd && is_bad(*node->metrics->bwd)) {
      return tell("the gradient", *node, *node->metrics->bwd);
    }
  }
  return "";
}

// Returns the whole model as the stages compute it, with the rounding of --formats and --autocast.
std::shared_ptr<GraphModule> computed_model(const TrainOptions& o, const TrainJob& job) {
  std::shared_ptr<GraphModule> module = job.program.module;
  if (job.formats) {
    const auto rounded = derive(*module);
    apply_recipe(*rounded, *job.formats);
    module = rounded;
  }
  return o.autocast == "bf16" ? bf16_products(*module) : module;
}

// Runs the model in this process on one microbatch after the other, every value and gradient measured, until one has a
// NaN or an infinity: the first value in the graph's order, else the first gradient of a backward. `where` is empty if
// none is found (dropout draws other masks here).
NotFinite find_not_finite(const TrainOptions& o, const TrainJob& job, const Parts& parts,
                          const std::shared_ptr<GraphModule>& model) {
  const auto tracked = track_scales(model);
  for (size_t part = 0; part < parts.inputs.size(); ++part) {
    const auto outputs = tracked->run({parts.inputs[part].begin(), parts.inputs[part].end()});
    Tensors tensors;
    for (const c10::IValue& v : outputs) tensors.push_back(v.isTensor() ? v.toTensor() : at::Tensor());
    const at::Tensor loss = job.pipeline.loss(tensors, parts.targets[part]);
    if (loss.requires_grad()) loss.backward();
    const ScalesGraph graph = scales_graph(*tracked);
    if (const ScaleNode* node = first_bad_value(graph))
      return {part, tell("the value", *node, node->metrics->fwd), node->kind == NodeKind::Placeholder};
    if (!std::ranges::all_of(parts.targets[part], is_finite)) return {part, "a value of the targets", true};
    std::string where = first_bad_gradient(graph);
    if (where.empty() && !is_finite(loss.detach())) where = "the loss itself (--loss " + o.loss + ")";
    if (!where.empty()) return {part, where};
  }
  return {};
}

// Writes this model and that microbatch: model.pt2, inputs.pt, targets.pt, step.json.
void dump_step(const TrainOptions& o, const ExportedProgram& program, const Parts& parts, int64_t step,
               const NotFinite& found, const std::string& what) {
  const std::filesystem::path folder = o.dump;
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);  // save_pt2 says what is wrong with it
  save_pt2(program, (folder / "model.pt2").string());
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

}  // namespace

void stop_at_not_finite(const TrainOptions& o, const TrainJob& job, const TrainRanks& ranks, int64_t step,
                        const TrainStep::Numbers& numbers, const Parts& parts, const RunReports& reports) {
  std::string what = c10::str("the loss of step ", step, " is ", short_number(numbers.loss));
  const auto bad = std::ranges::find_if_not(numbers.squares, [](double s) { return std::isfinite(s); });
  if (std::isfinite(numbers.loss) && bad != numbers.squares.end()) {
    what = c10::str("the gradient of ", job.trained[bad - numbers.squares.begin()].name, " in step ", step,
                    " is not finite");
  }
  gather_state(*job.pipe, job.schedule, ranks.groups.pipeline);
  std::string where;
  std::string remedy = job.formats ? "plumb verdict, which says which products need a wider format, or a smaller --lr"
                                   : "a smaller --lr, or plumb track to see where numbers grow";
  if (ranks.is_first()) {
    take_trained(job);
    ExportedProgram computed = job.program;
    computed.module = computed_model(o, job);
    const NotFinite found = find_not_finite(o, job, parts, computed.module);
    where = found.where;
    if (found.in_data) remedy = "data without NaN and infinities";
    if (!o.dump.empty()) {
      try {
        dump_step(o, computed, parts, step, found, what);
        reports.emit(event::Dumped{o.dump, where});
        remedy += "; the step is in " + o.dump;
      } catch (const Error& e) {
        remedy += "; the step could not be kept: " + std::string(e.message());
      }
    } else {
      remedy += "; plumb train --dump FOLDER keeps the step";
    }
  }
  of_rank_0(ranks.world, 0);  // the others end after rank 0 has looked
  throw Error(ErrorKind::Numerics,
              what + ": training ended, its weights are not saved" + (where.empty() ? "" : "; first was " + where), "",
              remedy);
}

}  // namespace plumb

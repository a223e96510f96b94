// A stage's forward of one microbatch: its inputs, the function, and what is made of the results.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/mix_bits.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/runtime/stage_runner.h"
#include "plumb/tensors/deferred_checks.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/tensors/run_rows.h"

namespace plumb {
namespace {

// "[2, 5] is nan", of a tensor of these sizes.
std::string entry_text(int64_t at, at::IntArrayRef sizes, const at::Scalar& value) {
  std::string index;
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= 0; d--) {
    index = str(at % sizes[d], index.empty() ? "" : ", " + index);
    at /= sizes[d];
  }
  std::ostringstream text;
  text << "[" << index << "] is ";
  if (value.isFloatingPoint() && std::isnan(value.toDouble()))
    text << "nan";  // its sign says nothing
  else
    text << value;
  return text.str();
}

int64_t count_values(const Tensors& tensors) {
  int64_t count = 0;
  for (const auto& t : tensors) count += t.defined() ? t.numel() : 0;
  return count;
}

}  // namespace

std::string value_name(const char* what, size_t index, int stage, int m) {
  return str(what, index, " of stage ", stage, ", microbatch ", m);
}

void check_finite(const at::Tensor& t, const std::function<std::string()>& name) {
  if (!t.defined() || !(t.is_floating_point() || t.is_complex()) || t.numel() == 0) return;
  at::NoGradGuard no_grad;
  const auto finite = at::isfinite(t);
  const auto passed = finite.all();
  if (t.is_cpu() && passed.item<bool>()) return;
  // The place of the first one is found on the device, too: nothing keeps the tensor.
  const auto at = at::argmin(finite.reshape(-1).to(at::kByte)), value = t.reshape(-1).index_select(0, at.view(1));
  check_value(passed, [at, value, sizes = t.sizes().vec(), name = name()] {
    return Error(ErrorKind::Numerics, name + ": entry " + entry_text(at.item<int64_t>(), sizes, value.item()));
  });
}

std::uint64_t StageRunner::seed_of_step() const {
  return mix_seeds(*setup.options.seed, static_cast<std::uint64_t>(step_number));
}

std::uint64_t StageRunner::place_of_microbatch(int m) const {
  if (!first_rows.empty()) return static_cast<std::uint64_t>(first_rows[m]);
  return static_cast<std::uint64_t>(setup.options.replicas.rank()) * setup.schedule.num_microbatches + m;
}

void StageRunner::seed_generator(int stage, int m) const {
  if (!setup.options.seed) return;
  const std::uint64_t seed =
      mix_seeds(mix_seeds(seed_of_step(), place_of_microbatch(m)), static_cast<std::uint64_t>(stage));
  for (const at::Generator& generator : generators()) set_generator_seed(generator, seed);
}

std::vector<at::Generator> StageRunner::generators() const {
  std::vector<at::Generator> all{at::detail::getDefaultCPUGenerator()};
  for (const auto& [index, stage] : stages) {
    const auto device = stage.function->device();
    if (!device || device->is_cpu() || device->is_meta()) continue;
    const at::Generator& generator = at::globalContext().defaultGenerator(*device);
    if (std::ranges::find(all, generator) == all.end()) all.push_back(generator);
  }
  return all;
}

void StageRunner::start_recompute(LocalStage& stage, const Tensors& inputs,
                                  std::optional<CheapRecompute>& recompute) const {
  if (!training || stage.function->recompute != Recompute::Cheap || stage.recomputed.differing != 0) return;
  // Small results are kept: what a microbatch had none of, one of no more values has none of either.
  if (count_values(inputs) <= stage.nothing_to_recompute) return;
  recompute.emplace(/*check=*/!std::exchange(stage.recompute_checked, true));
}

void StageRunner::finish_recompute(LocalStage& stage, const Slot& slot,
                                   std::optional<CheapRecompute>& recompute) const {
  if (!recompute) return;
  recompute->finish();
  stage.recomputed = recompute->report();
  // The stage writes where autograd does not see it: from now on it keeps everything.
  if (stage.recomputed.differing > 0) stage.recomputed.by_operator.clear();
  if (stage.recomputed.by_operator.empty()) stage.nothing_to_recompute = count_values(slot.boundary->inputs());
  recompute.reset();
}

const Tensors* StageRunner::model_inputs(const Slot& slot, int m) const {
  if (!slot.model_inputs.empty()) return &slot.model_inputs;
  return batch.inputs == nullptr || batch.inputs->empty() ? nullptr : &(*batch.inputs)[m];
}

void StageRunner::complete_sizes(Slot& slot, int m) const {
  const Tensors* given = model_inputs(slot, m);
  if (given == nullptr) return;
  auto is_given = [&](size_t i) { return i < given->size() && (*given)[i].defined(); };
  const bool other = !slot.sizes.empty() || std::ranges::any_of(cut_inputs_, [&](const auto& cut) {
    return is_given(cut.first) && !fits_cut(*cut.second.meta, (*given)[cut.first].sizes());
  });
  for (const auto& [i, port] : cut_inputs_) {
    if (other && is_given(i)) slot.sizes[i] = (*given)[i].sizes().vec();
  }
}

void StageRunner::gather_inputs(LocalStage& stage, Slot& slot, int m, Tensors& values, std::vector<bool>& wants) {
  const auto& w = *stage.wiring;
  const Tensors* given = model_inputs(slot, m);
  values.reserve(slot.sources.size());
  wants.reserve(slot.sources.size());
  for (size_t i = 0; i < slot.sources.size(); i++) {
    auto& source = slot.sources[i];
    if (!setup.layout.dynamic_outputs && w.sources[i].stage < 0) {
      const auto index = static_cast<size_t>(w.sources[i].index);
      if (given == nullptr || given->size() <= index || !(*given)[index].defined()) {
        throw Error(ErrorKind::StructureMismatch,
                    str("stage ", stage.stage, " uses input ", index, " of the model, and rank ", setup.rank,
                        " was not given it"),
                    "", "give the input to step() on every rank whose stages use it");
      }
      const auto& input = (*given)[index];
      source = {input, input.requires_grad()};
    }
    values.push_back(moved_to(stage, source.tensor));
    wants.push_back(training && source.requires_grad);
  }
  slot.sources.clear();
}

// Returns whether a value that was handed over in memory has other users here.
bool StageRunner::shared_on_this_rank(const ValueSource& source, int m) const {
  if (setup.schedule.rows.empty() || setup.schedule.placement.rank_of(source.stage, m) != setup.rank) return false;
  return std::ranges::count_if(stages, [&](const auto& entry) {
           const auto& sources = entry.second.wiring->sources;
           return std::ranges::find(sources, source) != sources.end();
         }) > 1;
}

// Throws an Error if the stage wrote to a value that other stages of this rank use.
void StageRunner::check_writes(const LocalStage& stage, const Tensors& values, at::IntArrayRef versions, int m) const {
  for (size_t i = 0; !setup.layout.dynamic_outputs && i < values.size(); i++) {
    const auto& source = stage.wiring->sources[i];
    if (source.stage < 0 || !values[i].defined() || values[i].is_inference()) continue;
    if (static_cast<std::int64_t>(values[i]._version()) == versions[i] || !shared_on_this_rank(source, m)) continue;
    throw Error(ErrorKind::Unsupported,
                str("stage ", stage.stage, " writes in place to output ", source.index, " of stage ", source.stage,
                    ", which other stages of the same rank use too"),
                "", "clone the value before writing to it");
  }
}

void StageRunner::run_function(LocalStage& stage, Slot& slot, int m, std::optional<CheapRecompute>* recompute) {
  const auto& w = *stage.wiring;
  Tensors values;
  std::vector<bool> wants;
  gather_inputs(stage, slot, m, values, wants);
  if (recompute != nullptr) start_recompute(stage, values, *recompute);
  auto boundary = std::make_unique<InputBoundary>(values, wants);
  c10::SmallVector<std::int64_t, 8> versions;
  for (const auto& v : values) versions.push_back(v.defined() && !v.is_inference() ? v._version() : 0);
  Tensors in;
  if (setup.layout.dynamic_outputs) {
    in = boundary->inputs();
  } else {
    in.reserve(w.source_of_input.size());
    for (int source : w.source_of_input) in.push_back(boundary->inputs()[source]);
  }
  complete_sizes(slot, m);
  if (training && stage.buffers) stage.buffers->begin_microbatch(m);
  const int64_t rows = first_rows.empty() ? 0 : first_rows[static_cast<size_t>(m) + 1] - first_rows[m];
  {
    const RunningRows running({static_cast<int64_t>(place_of_microbatch(m)), rows});
    std::optional<NodeSeeds> seeds;
    if (setup.options.seed) seeds.emplace(seed_of_step(), generators());
    slot.results = stage.function->run(in, {m, slot.sizes});
  }
  // The last stage's outputs are nobody's inputs; a stage with a loss of its own returns that alone.
  const bool counted = !setup.layout.dynamic_outputs &&
                       (stage.stage != setup.last_stage() || setup.options.loss || setup.options.return_outputs);
  if (counted && static_cast<int>(slot.results.size()) != stage.num_outputs) {
    throw Error(ErrorKind::StructureMismatch, str("stage ", stage.stage, " returned ", slot.results.size(),
                                                  " values, its layout says ", stage.num_outputs));
  }
  check_writes(stage, values, versions, m);
  slot.boundary = std::move(boundary);
  slot.went_forward = true;
}

void StageRunner::check_results(const LocalStage& stage, Slot& slot, int m, bool hooked) {
  if (setup.options.check_numerics) {
    for (size_t k = 0; k < slot.results.size(); k++) {
      check_finite(slot.results[k], [&] { return value_name("output ", k, stage.stage, m); });
    }
  }
  if (stage.stage == setup.last_stage()) finish_model(m, slot, hooked);
}

void StageRunner::finish_model(int m, Slot& slot, bool hooked) {
  const Tensors& outputs = slot.results;
  const bool wanted = training || (setup.options.loss ? !batch.targets->empty() : false);
  if (wanted || slot.loss.defined()) {
    at::Tensor loss = slot.loss;
    if (loss.defined()) {
      // By a hook.
    } else if (setup.options.loss) {
      loss = setup.options.loss(outputs, batch.targets->empty() ? Tensors{} : (*batch.targets)[m]);
    } else if (setup.options.loss_output >= 0 && static_cast<size_t>(setup.options.loss_output) < outputs.size()) {
      loss = outputs[setup.options.loss_output];
    }
    if (!loss.defined() && hooked) return;  // a hook may go back from a loss that it alone knows
    const bool one = loss.defined() && loss.numel() == 1 && !loss.is_complex();
    if (!one || (training && !loss.requires_grad())) {
      throw Error(ErrorKind::TensorMismatch,
                  str("the loss of microbatch ", m, " is ", describe(loss),
                      one ? " and requires no gradient" : ", not one number"),
                  "",
                  one ? "train parameters that require gradients, outside of torch.no_grad() and inference_mode()"
                      : "give PipelineOptions::loss, or a model whose output loss_output is its loss");
    }
    if (setup.options.check_numerics) check_finite(loss, [&] { return str("the loss of microbatch ", m); });
    batch.losses[m] = loss.detach();
    if (training) slot.loss = loss;
  }
  if (setup.options.return_outputs || !training) {
    for (const auto& o : outputs) batch.outputs[m].push_back(o.defined() ? o.detach() : o);
  }
}

void StageRunner::keep_for_backward(const LocalStage& stage, Slot& slot) const {
  const Tensors results = std::move(slot.results);
  slot.results.clear();
  if (!training) {
    slot.boundary.reset();
    return;
  }
  slot.boundary->release_inputs();
  if (stage.stage == setup.last_stage()) return;  // only the loss goes backwards
  slot.outputs.resize(results.size());
  for (size_t k = 0; k < results.size(); k++) {
    const bool used = setup.layout.dynamic_outputs || stage.wiring->output_used[k];
    if (used && results[k].defined() && results[k].requires_grad()) slot.outputs[k] = backward_handle(results[k]);
  }
}

}  // namespace plumb

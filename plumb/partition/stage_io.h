// The inputs and outputs of a cut graph's stages, as data that is equal on every rank.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

struct FPFormat;

// The source of a value: output `index` of a stage, or input `index` (flat) of the whole graph.
struct ValueSource {
  static constexpr int kModelInput = -1;
  int stage = kModelInput;
  size_t index = 0;
  bool is_model_input() const { return stage == kModelInput; }
  auto operator<=>(const ValueSource&) const = default;
};

// One input of a stage; values come straight from the stage that makes them, however many stages lie between.
struct StageInputPort {
  ValueSource source;
  std::string name;  // the value's name in the whole graph
  ValueType type = ValueType::Tensor;
  std::optional<TensorMeta> meta;
  bool written = false;  // the stage writes this input's memory: give it memory of its own
  bool operator==(const StageInputPort&) const = default;
};

// Formats that values and their gradients have on their way between stages (wire.h). "" and "none": as they are.
struct WireFormats {
  std::string fwd, bwd;
  explicit operator bool() const { return !(fwd.empty() && bwd.empty()); }
  bool operator==(const WireFormats&) const = default;
};

struct PortUse {
  int stage;
  size_t input;  // position among that stage's inputs
  auto operator<=>(const PortUse&) const = default;
};

// One output of a stage. Consumers are later stages; for the last stage: flat outputs of the whole graph.
struct StageOutputPort {
  std::string name;
  ValueType type = ValueType::Tensor;
  std::optional<TensorMeta> meta;
  std::vector<PortUse> consumers;
  std::optional<size_t> pipeline_output;
  std::string as_it_is;  // why it is not rounded on the wire; "" where it is, if the table has formats for it
  bool operator==(const StageOutputPort&) const = default;
};

struct StageIO {
  std::vector<StageInputPort> inputs;  // the whole graph's first, then by producing stage and port
  std::vector<StageOutputPort> outputs;
  bool operator==(const StageIO&) const = default;
};

// A flat output of the whole graph: an output of the last stage (through which values of earlier stages pass), or a
// constant (None, a number).
struct PipelineOutput {
  std::optional<size_t> port;  // index of an output port of the last stage
  c10::IValue constant;
};

// A parameter held by several stages: stage -> its name there (tied weights may have two names). Its gradients have to
// be summed over the copies before the optimizer's step.
using ReplicatedParam = std::map<int, std::string>;

// The whole picture: what a rank has to know of the other stages. Who sends what to whom is derived from it
// (plumb/pipeline/runtime/run_plan.h). Of stages that were not cut from a graph it has the sources of inputs and the
// numbers of outputs.
struct PipeTable {
  std::vector<StageIO> stages;
  size_t num_inputs = 0;  // flat inputs of the whole graph
  std::vector<PipelineOutput> outputs;
  std::vector<ReplicatedParam> replicated;
  WireFormats wire;
  std::optional<size_t> loss_output;  // flat output that is the loss, if a loss spec was given
  // A linear chain: each stage sends all outputs to the next, in order. The number of outputs may vary between
  // microbatches. Stage 0 takes nothing: it gets the model's inputs by itself.
  bool dynamic_outputs = false;

  // Returns a table in which stage s takes what stage s - 1 gives; stage 0 takes the model's one input.
  static PipeTable chain(int num_stages);
  static PipeTable dynamic_chain(int num_stages);

  int num_stages() const { return static_cast<int>(stages.size()); }
  // Returns whether the value of this source is rounded on its way.
  bool crosses_rounded(const ValueSource& source) const {
    return wire && !source.is_model_input() &&
           (dynamic_outputs || stages[source.stage].outputs[source.index].as_it_is.empty());
  }
  // Return the format of a value between stages and of its gradient; null: as it is.
  const FPFormat* value_format(const ValueSource& value) const;
  const FPFormat* gradient_format(const ValueSource& value) const;
  // Returns the inputs of the whole graph with known sizes, by number.
  std::map<size_t, StageInputPort> model_inputs() const;
  // Throws Error(InvalidArgument) that names the stage and input.
  void check() const;
  // Returns what all ranks of a pipeline must have alike.
  std::string text() const;
  // Returns one line an input and output, for people.
  std::string to_string() const;
  // For sending; from_json throws Error(BadFile) that names what is wrong.
  std::string to_json() const;
  static PipeTable from_json(const std::string& text);
};

// Returns whether an input of these sizes fits what was cut. A size that is a symbol may be any.
bool fits_cut(const TensorMeta& meta, at::IntArrayRef sizes);

// Packs a value that is no tensor and crosses between stages (symbolic sizes, flags) as a 0-dim tensor on the CPU:
// int64, float64 or bool. Throws Error(Partition) for a value that has no such form.
at::Tensor pack_value(const c10::IValue& value);
c10::IValue unpack_value(const at::Tensor& tensor, ValueType type);

}  // namespace plumb

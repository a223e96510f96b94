#include "plumb/partition/stage_io.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
#include "plumb/core/str.h"
#include "plumb/graph/names.h"
#include "plumb/graph/summary.h"
#include "plumb/partition/wire.h"

// Text of those parts of a table that JSON does not know. The text that is read may come from anywhere.
namespace nlohmann {

template <class T>
struct adl_serializer<std::optional<T>> {
  static void to_json(json& j, const std::optional<T>& value) { j = value ? json(*value) : json(nullptr); }
  static void from_json(const json& j, std::optional<T>& value) {
    value = j.is_null() ? std::nullopt : std::optional(j.get<T>());
  }
};

template <>
struct adl_serializer<at::ScalarType> {
  static void to_json(json& j, at::ScalarType dtype) { j = plumb::short_name(dtype); }
  static void from_json(const json& j, at::ScalarType& dtype) {
    const auto named = plumb::dtype_from_short_name(j.get<std::string>());
    if (!named) throw plumb::Error(plumb::ErrorKind::BadFile, "a stage table names an unknown dtype " + j.dump());
    dtype = *named;
  }
};

template <>
struct adl_serializer<at::Device> {
  static void to_json(json& j, const at::Device& device) { j = device.str(); }
  static void from_json(const json& j, at::Device& device) {
    try {
      device = at::Device(j.get<std::string>());
    } catch (const c10::Error&) {
      throw plumb::Error(plumb::ErrorKind::BadFile, "a stage table names an unknown device " + j.dump());
    }
  }
};

template <>
struct adl_serializer<plumb::ValueType> {
  static void to_json(json& j, plumb::ValueType type) { j = static_cast<int>(type); }
  static void from_json(const json& j, plumb::ValueType& type) {
    const int number = j.get<int>();
    if (number < 0 || number > static_cast<int>(plumb::ValueType::Other))
      throw plumb::Error(plumb::ErrorKind::BadFile, "a stage table names an unknown type");
    type = static_cast<plumb::ValueType>(number);
  }
};

template <>
struct adl_serializer<c10::IValue> {
  static void to_json(json& j, const c10::IValue& v) {
    if (v.isNone()) {
      j = nullptr;
    } else if (v.isBool()) {
      j = v.toBool();
    } else if (v.isInt()) {
      j = v.toInt();
    } else if (v.isString()) {
      j = v.toStringRef();
    } else if (v.isDouble()) {
      // As text, because JSON has no NaN and infinities.
      j = {{"float", c10::str(v.toDouble())}, {"bits", std::bit_cast<int64_t>(v.toDouble())}};
    } else {
      throw plumb::Error(plumb::ErrorKind::Unsupported,
                         "the graph returns a constant " + std::string(v.tagKind()) + ", which cannot be sent", "",
                         "return tensors, numbers, strings or None");
    }
  }
  static void from_json(const json& j, c10::IValue& v) {
    v = j.is_null()             ? c10::IValue()
        : j.is_boolean()        ? c10::IValue(j.get<bool>())
        : j.is_number_integer() ? c10::IValue(j.get<int64_t>())
        : j.is_string()         ? c10::IValue(j.get<std::string>())
                                : c10::IValue(std::bit_cast<double>(j.at("bits").get<int64_t>()));
  }
};

}  // namespace nlohmann

namespace plumb {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TensorMeta, dtype, sizes, strides, device, requires_grad, symbols)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ValueSource, stage, index)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PortUse, stage, input)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StageInputPort, source, name, type, meta, written)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StageOutputPort, name, type, meta, consumers, pipeline_output, as_it_is)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StageIO, inputs, outputs)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WireFormats, fwd, bwd)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PipelineOutput, port, constant)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PipeTable, stages, num_inputs, outputs, replicated, wire, loss_output)

namespace {

using nlohmann::json;

std::string shown(const std::optional<TensorMeta>& meta, ValueType type) {
  if (meta) return type_text(*meta);
  switch (type) {
    case ValueType::Tensor: return "tensor";
    case ValueType::Int: return "int";
    case ValueType::Float: return "float";
    case ValueType::Bool: return "bool";
    case ValueType::Other: break;
  }
  return "other";
}

std::string replicated_text(const PipeTable& table) {
  std::string text;
  for (const ReplicatedParam& param : table.replicated) {
    text += "replicated";
    for (const auto& [stage, name] : param) text += str(" ", name, "@", stage);
    text += "\n";
  }
  return text;
}

// Every use and output points at a port that is there, and all that check() says.
void check_read(const PipeTable& table) {
  auto require = [](bool ok, const std::string& what) {
    if (!ok) throw Error(ErrorKind::BadFile, "a stage table is inconsistent: " + what);
  };
  try {
    table.check();
  } catch (const Error& e) {
    require(false, e.message());
  }
  for (int s = 0; s < table.num_stages(); ++s) {
    for (const StageOutputPort& out : table.stages[s].outputs) {
      for (const PortUse& use : out.consumers) {
        require(use.stage > s && use.stage < table.num_stages() && use.input < table.stages[use.stage].inputs.size(),
                "'" + out.name + "' goes to a port that is not there");
      }
    }
  }
  for (const PipelineOutput& out : table.outputs)
    require(!out.port || *out.port < table.stages.back().outputs.size(), "an output that is not there");
  require(!table.loss_output || *table.loss_output < table.outputs.size(), "the loss is no output");
}

}  // namespace

PipeTable PipeTable::chain(int num_stages) {
  PipeTable table;
  table.num_inputs = 1;
  for (int s = 0; s < num_stages; ++s) {
    StageIO& stage = table.stages.emplace_back();
    stage.inputs.push_back({{s - 1, 0}});
    stage.outputs.emplace_back();
  }
  return table;
}

PipeTable PipeTable::dynamic_chain(int num_stages) {
  PipeTable table = chain(num_stages);
  if (num_stages > 0) table.stages[0].inputs.clear();
  table.num_inputs = 0;
  table.dynamic_outputs = true;
  return table;
}

const FPFormat* PipeTable::value_format(const ValueSource& value) const {
  return crosses_rounded(value) ? wire_format(wire.fwd) : nullptr;
}

const FPFormat* PipeTable::gradient_format(const ValueSource& value) const {
  return crosses_rounded(value) ? wire_format(wire.bwd) : nullptr;
}

std::map<size_t, StageInputPort> PipeTable::model_inputs() const {
  std::map<size_t, StageInputPort> known;
  for (const StageIO& stage : stages) {
    for (const StageInputPort& in : stage.inputs) {
      if (in.source.is_model_input() && in.meta) known.emplace(in.source.index, in);
    }
  }
  return known;
}

void PipeTable::check() const {
  auto require = [](bool ok, const auto&... what) {
    if (!ok) throw Error(ErrorKind::InvalidArgument, str(what...));
  };
  require(!stages.empty(), "the pipeline has no stages");
  plumb::check(wire);
  for (int s = 0; s < num_stages(); ++s) {
    for (size_t i = 0; i < stages[s].inputs.size(); ++i) {
      const ValueSource& in = stages[s].inputs[i].source;
      const std::string what = str("input ", i, " of stage ", s);
      if (in.is_model_input()) {
        require(in.index < num_inputs, what, " is the model's input ", in.index, ", the model has ", num_inputs);
        continue;
      }
      require(in.stage >= 0 && in.stage < s, what, " comes from stage ", in.stage, ", which is not an earlier stage");
      const size_t made = stages[in.stage].outputs.size();
      require(in.index < made, what, " is output ", in.index, " of stage ", in.stage, ", which has ", made);
    }
    const auto& inputs = stages[s].inputs;
    const bool link = s == 0 ? inputs.empty() : inputs.size() == 1 && inputs[0].source == ValueSource{s - 1, 0};
    require(!dynamic_outputs || link, "stage ", s, " of a layout with dynamic outputs is no link of a chain");
  }
  for (const ReplicatedParam& param : replicated) {
    for (const auto& [stage, name] : param) {
      require(stage >= 0 && stage < num_stages(), "tied parameter ", name, " is in stage ", stage, ", there are ",
              num_stages());
    }
  }
}

std::string PipeTable::text() const {
  std::string out = str(num_inputs, " inputs\n", dynamic_outputs ? "dynamic outputs\n" : "");
  for (int s = 0; s < num_stages(); ++s) {
    out += str("stage ", s, ":");
    for (const StageInputPort& in : stages[s].inputs)
      out += str(in.source.is_model_input() ? " input" : str(" stage", in.source.stage), ".", in.source.index);
    out += str(" -> ", stages[s].outputs.size());
    for (size_t i = 0; wire && i < stages[s].outputs.size(); ++i)
      if (!stages[s].outputs[i].as_it_is.empty()) out += str(" ", i, " as it is");
    // Between equal layers only the names of these values tell where a rank has cut.
    for (const StageOutputPort& port : stages[s].outputs)
      if (!port.consumers.empty()) out += " " + port.name;
    out += "\n";
  }
  if (wire) out += "wire: " + wire.fwd + " " + wire.bwd + "\n";
  return out + replicated_text(*this);
}

std::string PipeTable::to_string() const {
  std::string text;
  for (size_t s = 0; s < stages.size(); ++s) {
    text += str("stage ", s, "\n");
    for (const StageInputPort& in : stages[s].inputs) {
      text += str("  in   %", in.name, ": ", shown(in.meta, in.type), " from ",
                  in.source.is_model_input() ? "input " : str("stage ", in.source.stage, " output "), in.source.index,
                  in.written ? " (written)" : "", "\n");
    }
    for (const StageOutputPort& out : stages[s].outputs) {
      text += "  out  %" + out.name + ": " + shown(out.meta, out.type);
      for (const PortUse& use : out.consumers) {
        text += str(&use == &out.consumers.front() ? " to stage " : ", ", use.stage);
      }
      if (wire && !out.consumers.empty() && out.as_it_is.empty())
        text += " as " + wire.fwd + ", its gradient as " + wire.bwd;
      if (out.pipeline_output) {
        text += str(loss_output == out.pipeline_output ? " is the loss," : " is", " output ", *out.pipeline_output);
      }
      text += "\n";
    }
  }
  return text + replicated_text(*this);
}

std::string PipeTable::to_json() const {
  json j = *this;
  j["version"] = 2;
  return j.dump();
}

PipeTable PipeTable::from_json(const std::string& text) {
  try {
    const json j = parse_json(text);
    if (j.at("version") != 2)
      throw Error(ErrorKind::BadFile, "a stage table of the unknown version " + j.at("version").dump());
    auto table = j.get<PipeTable>();
    check_read(table);
    return table;
  } catch (const json::exception& e) {
    throw Error(ErrorKind::BadFile, std::string("a stage table cannot be read: ") + e.what());
  }
}

bool fits_cut(const TensorMeta& meta, at::IntArrayRef sizes) {
  if (sizes.size() != meta.sizes.size()) return false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const bool symbol = i < meta.symbols.size() && !meta.symbols[i].empty();
    if (!symbol && sizes[i] != meta.sizes[i]) return false;
  }
  return true;
}

at::Tensor pack_value(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  if (value.isInt()) return at::scalar_tensor(value.toInt(), at::kLong);
  if (value.isBool()) return at::scalar_tensor(value.toBool(), at::kBool);
  if (value.isDouble()) return at::scalar_tensor(value.toDouble(), at::kDouble);
  throw Error(ErrorKind::Partition, "a " + std::string(value.tagKind()) + " cannot cross between pipeline stages", "",
              "move the cut so that its producer and users share a stage");
}

c10::IValue unpack_value(const at::Tensor& tensor, ValueType type) {
  switch (type) {
    case ValueType::Int: return tensor.item<int64_t>();
    case ValueType::Bool: return tensor.item<bool>();
    case ValueType::Float: return tensor.item<double>();
    default: return tensor;
  }
}

}  // namespace plumb

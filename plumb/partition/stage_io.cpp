#include "plumb/partition/stage_io.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
#include "plumb/graph/names.h"
#include "plumb/partition/wire.h"

namespace plumb {
namespace {

using nlohmann::json;

std::string shown(const std::optional<TensorMeta>& meta, ValueType type) {
  if (!meta) {
    switch (type) {
      case ValueType::Tensor: return "tensor";
      case ValueType::Int: return "int";
      case ValueType::Float: return "float";
      case ValueType::Bool: return "bool";
      case ValueType::Other: return "other";
    }
  }
  std::string text = short_name(meta->dtype) + "[";
  for (size_t i = 0; i < meta->sizes.size(); ++i) {
    if (i) text += ", ";
    const bool symbolic = i < meta->symbols.size() && !meta->symbols[i].empty();
    text += symbolic ? meta->symbols[i] : std::to_string(meta->sizes[i]);
  }
  return text + "]" + (meta->device.is_cpu() ? "" : "@" + meta->device.str());
}

json write(const std::optional<TensorMeta>& meta) {
  if (!meta) return nullptr;
  return {{"dtype", short_name(meta->dtype)}, {"sizes", meta->sizes},        {"strides", meta->strides},
          {"device", meta->device.str()},     {"grad", meta->requires_grad}, {"symbols", meta->symbols}};
}

std::optional<TensorMeta> read_meta(const json& j) {
  if (j.is_null()) return std::nullopt;
  TensorMeta meta;
  const auto dtype = dtype_from_short_name(j.at("dtype").get<std::string>());
  if (!dtype) throw Error(ErrorKind::BadFile, "a stage table names an unknown dtype " + j.at("dtype").dump());
  meta.dtype = *dtype;
  meta.sizes = j.at("sizes").get<std::vector<int64_t>>();
  meta.strides = j.at("strides").get<std::vector<int64_t>>();
  try {
    meta.device = at::Device(j.at("device").get<std::string>());
  } catch (const c10::Error&) {
    throw Error(ErrorKind::BadFile, "a stage table names an unknown device " + j.at("device").dump());
  }
  meta.requires_grad = j.at("grad").get<bool>();
  meta.symbols = j.at("symbols").get<std::vector<std::string>>();
  return meta;
}

json write(const c10::IValue& v) {
  if (v.isNone()) return nullptr;
  if (v.isBool()) return v.toBool();
  if (v.isInt()) return v.toInt();
  if (v.isString()) return v.toStringRef();
  // As text: JSON has no NaN and infinities.
  if (v.isDouble()) return {{"float", c10::str(v.toDouble())}, {"bits", std::bit_cast<int64_t>(v.toDouble())}};
  throw Error(ErrorKind::Unsupported,
              "the graph returns a constant " + std::string(v.tagKind()) + ", which cannot be sent", "",
              "return tensors, numbers, strings or None");
}

c10::IValue read_constant(const json& j) {
  if (j.is_null()) return {};
  if (j.is_boolean()) return j.get<bool>();
  if (j.is_number_integer()) return j.get<int64_t>();
  if (j.is_string()) return j.get<std::string>();
  return std::bit_cast<double>(j.at("bits").get<int64_t>());
}

ValueType read_type(const json& j) {
  const int type = j.get<int>();
  if (type < 0 || type > static_cast<int>(ValueType::Other))
    throw Error(ErrorKind::BadFile, "a stage table names an unknown type");
  return static_cast<ValueType>(type);
}

json write(const StageIO& io) {
  json inputs = json::array(), outputs = json::array();
  for (const StageInputPort& in : io.inputs) {
    inputs.push_back({{"stage", in.source.stage},
                      {"index", in.source.index},
                      {"name", in.name},
                      {"type", static_cast<int>(in.type)},
                      {"meta", write(in.meta)},
                      {"written", in.written}});
  }
  for (const StageOutputPort& out : io.outputs) {
    json uses = json::array();
    for (const PortUse& use : out.consumers) uses.push_back({use.stage, use.input});
    outputs.push_back({{"name", out.name},
                       {"type", static_cast<int>(out.type)},
                       {"meta", write(out.meta)},
                       {"consumers", uses},
                       {"output", out.pipeline_output ? json(*out.pipeline_output) : json(nullptr)}});
    if (!out.as_it_is.empty()) outputs.back()["as_it_is"] = out.as_it_is;
  }
  return {{"inputs", inputs}, {"outputs", outputs}};
}

StageIO read_io(const json& j) {
  StageIO io;
  for (const json& in : j.at("inputs")) {
    io.inputs.push_back({{in.at("stage").get<int>(), in.at("index").get<size_t>()},
                         in.at("name").get<std::string>(),
                         read_type(in.at("type")),
                         read_meta(in.at("meta")),
                         in.at("written").get<bool>()});
  }
  for (const json& out : j.at("outputs")) {
    StageOutputPort port{
        out.at("name").get<std::string>(), read_type(out.at("type")), read_meta(out.at("meta")), {}, {}, {}};
    port.as_it_is = out.value("as_it_is", std::string());
    for (const json& use : out.at("consumers"))
      port.consumers.push_back({use.at(0).get<int>(), use.at(1).get<size_t>()});
    if (!out.at("output").is_null()) port.pipeline_output = out.at("output").get<size_t>();
    io.outputs.push_back(std::move(port));
  }
  return io;
}

// Every source and use points at a port that is there.
void check(const PipeTable& table) {
  auto require = [](bool ok, const std::string& what) {
    if (!ok) throw Error(ErrorKind::BadFile, "a stage table is inconsistent: " + what);
  };
  for (int s = 0; s < table.num_stages(); ++s) {
    for (const StageInputPort& in : table.stages[s].inputs) {
      require(in.source.stage >= PortSource::kPipelineInput && in.source.stage < s,
              "an input of stage " + std::to_string(s) + " comes from stage " + std::to_string(in.source.stage));
      const size_t ports =
          in.source.is_pipeline_input() ? table.num_inputs : table.stages[in.source.stage].outputs.size();
      require(in.source.index < ports, "'" + in.name + "' comes from a port that is not there");
    }
    for (const StageOutputPort& out : table.stages[s].outputs) {
      for (const PortUse& use : out.consumers) {
        require(use.stage > s && use.stage < table.num_stages() && use.input < table.stages[use.stage].inputs.size(),
                "'" + out.name + "' goes to a port that is not there");
      }
    }
  }
  for (const PipelineOutput& out : table.outputs) {
    require(!out.port || (!table.stages.empty() && *out.port < table.stages.back().outputs.size()),
            "an output that is not there");
  }
  require(!table.loss_output || *table.loss_output < table.outputs.size(), "the loss is no output");
}

}  // namespace

std::string PipeTable::to_string() const {
  std::string text;
  for (size_t s = 0; s < stages.size(); ++s) {
    text += "stage " + std::to_string(s) + "\n";
    for (const StageInputPort& in : stages[s].inputs) {
      text += "  in   %" + in.name + ": " + shown(in.meta, in.type) + " from " +
              (in.source.is_pipeline_input() ? "input " : "stage " + std::to_string(in.source.stage) + " output ") +
              std::to_string(in.source.index) + (in.written ? " (written)" : "") + "\n";
    }
    for (const StageOutputPort& out : stages[s].outputs) {
      text += "  out  %" + out.name + ": " + shown(out.meta, out.type);
      for (const PortUse& use : out.consumers) {
        text += (&use == &out.consumers.front() ? " to stage " : ", ") + std::to_string(use.stage);
      }
      if (wire && !out.consumers.empty() && out.as_it_is.empty())
        text += " as " + wire.fwd + ", its gradient as " + wire.bwd;
      if (out.pipeline_output) {
        text += std::string(loss_output == out.pipeline_output ? " is the loss," : " is") + " output " +
                std::to_string(*out.pipeline_output);
      }
      text += "\n";
    }
  }
  for (const ReplicatedParam& param : replicated) {
    text += "replicated";
    for (const auto& [stage, name] : param) text += " " + name + "@" + std::to_string(stage);
    text += "\n";
  }
  return text;
}

std::string PipeTable::to_json() const {
  json j{{"version", 1},
         {"num_inputs", num_inputs},
         {"stages", json::array()},
         {"outputs", json::array()},
         {"replicated", json::array()}};
  for (const StageIO& io : stages) j["stages"].push_back(write(io));
  for (const PipelineOutput& out : outputs) {
    j["outputs"].push_back(out.port ? json{{"port", *out.port}} : json{{"constant", write(out.constant)}});
  }
  for (const ReplicatedParam& param : replicated) {
    json copies = json::array();
    for (const auto& [stage, name] : param) copies.push_back({stage, name});
    j["replicated"].push_back(copies);
  }
  if (wire) j["wire"] = {wire.fwd, wire.bwd};
  j["loss"] = loss_output ? json(*loss_output) : json(nullptr);
  return j.dump();
}

PipeTable PipeTable::from_json(const std::string& text) {
  try {
    const json j = parse_json(text);
    if (j.at("version") != 1)
      throw Error(ErrorKind::BadFile, "a stage table of the unknown version " + j.at("version").dump());
    PipeTable table;
    table.num_inputs = j.at("num_inputs").get<size_t>();
    for (const json& io : j.at("stages")) table.stages.push_back(read_io(io));
    for (const json& out : j.at("outputs")) {
      PipelineOutput output;
      if (out.contains("port")) {
        output.port = out.at("port").get<size_t>();
      } else {
        output.constant = read_constant(out.at("constant"));
      }
      table.outputs.push_back(std::move(output));
    }
    for (const json& param : j.at("replicated")) {
      ReplicatedParam copies;
      for (const json& copy : param) copies[copy.at(0).get<int>()] = copy.at(1).get<std::string>();
      table.replicated.push_back(std::move(copies));
    }
    if (j.contains("wire")) {
      table.wire = {j.at("wire").at(0).get<std::string>(), j.at("wire").at(1).get<std::string>()};
      plumb::check(table.wire);
    }
    if (!j.at("loss").is_null()) table.loss_output = j.at("loss").get<size_t>();
    check(table);
    return table;
  } catch (const json::exception& e) {
    throw Error(ErrorKind::BadFile, std::string("a stage table cannot be read: ") + e.what());
  }
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

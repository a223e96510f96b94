// Writes an archive: beside its place first, then renamed.
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/versions.h>
#include <torch/version.h>

#include "plumb/core/error.h"
#include "plumb/core/output_file.h"
#include "plumb/exported/exported.h"
#include "plumb/exported/graph_writer.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

constexpr const char* kModel = "model";

Json tree(const GraphModule& module, const ExportedProgram& program) {
  Json calls = Json::array();
  Json names = nullptr;
  if (!program.argument_names.empty()) names = program.argument_names;
  calls.push_back({{"fqn", ""},
                   {"signature",
                    {{"inputs", Json::array()},
                     {"outputs", Json::array()},
                     {"in_spec", module.in_spec().to_json()},
                     {"out_spec", module.out_spec().to_json()},
                     {"forward_arg_names", names}}}});
  for (const std::string& name : program.submodules) calls.push_back({{"fqn", name}, {"signature", nullptr}});
  return calls;
}

Json tags_of(const State& state) {
  Json tags = Json::object();
  for (const Attr& attr : state) {
    const auto data = parameter_data(attr.tensor);
    if (!data) continue;
    tags[attr.name]["type"] = to_string(data->type);
    if (data->scaling_depth) tags[attr.name]["depth"] = *data->scaling_depth;
    if (data->fan_in) tags[attr.name]["fan_in"] = *data->fan_in;
  }
  return tags;
}

Json program_json(const GraphModule& module, const ExportedProgram& program, pt2::GraphWriter& writer) {
  Json parts = writer.write();
  Json fields = Json::object();
  for (const auto& [type, names] : program.namedtuple_fields) fields[type] = {{"field_names", names}};
  Json ranges = Json::object();
  auto bound = [](const std::optional<int64_t>& b) { return b ? Json(*b) : Json(); };
  for (const auto& [name, range] : writer.ranges()) {
    ranges[name] = {{"min_val", bound(range.min)}, {"max_val", bound(range.max)}};
  }
  Json opsets = program.opset_versions;
  if (opsets.empty()) opsets = {{"aten", static_cast<int64_t>(caffe2::serialize::kMaxSupportedFileFormatVersion)}};
  return {{"graph_module",
           {{"graph", std::move(parts["graph"])},
            {"signature", std::move(parts["signature"])},
            {"module_call_graph", tree(module, program)},
            {"metadata", Json::object()},
            {"treespec_namedtuple_fields", std::move(fields)}}},
          {"opset_version", std::move(opsets)},
          {"range_constraints", std::move(ranges)},
          {"schema_version", {{"major", program.schema_major}, {"minor", program.schema_minor}}},
          {"verifiers", Json::array({"TRAINING"})},
          {"torch_version", TORCH_VERSION},
          {"guards_code", program.guards}};
}

void write_archive(const GraphModule& module, const ExportedProgram& program, const std::string& path) {
  module.lint();
  pt2::GraphWriter writer(module.graph(), module.state(), program);
  const std::string model = program_json(module, program, writer).dump();

  OutputFile file(path);
  try {
    caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t size) { return file.write(data, size); });
    auto record = [&](const std::string& name, const void* data, size_t size) {
      zip.writeRecord(name, data, size);
      file.check();
    };
    auto text = [&](const std::string& name, const std::string& data) { record(name, data.data(), data.size()); };
    const std::string base = kModel;
    zip.setMinVersion(6);
    text("data/weights/" + base + "_weights_config.json",
         pt2::write_stored(writer.weights(), "data/weights/", "weight_", record).dump());
    text("data/constants/" + base + "_constants_config.json",
         pt2::write_stored(writer.constants(), "data/constants/", "tensor_", record).dump());
    text("models/" + base + ".json", model);
    text("data/sample_inputs/" + base + ".pt", program.sample_inputs);
    if (const Json tags = tags_of(module.state()); !tags.empty()) {
      text(pt2::kTags, tags.dump());
      if (program.unit_scaled_layers) text(pt2::kUnitScaledLayers, "");
    }
    if (!program.pretrained.empty()) text(pt2::kPretrained, program.pretrained);
    if (const std::string& line = module.mode_read_at(); !line.empty())
      text(pt2::kMode, Json{{"training", module.is_training()}, {"read_at", line}}.dump());
    text("archive_format", "pt2");
    text("archive_version", "0");
    text("byteorder", "little");
    zip.writeEndOfFile();
  } catch (const c10::Error&) {
    file.check();
    throw;
  }
  file.commit();
}

}  // namespace

void save_pt2(const ExportedProgram& program, const std::string& path) {
  if (!program.module) throw Error(ErrorKind::InvalidArgument, "there is no module to save");
  try {
    write_archive(*program.module, program, path);
  } catch (const c10::Error& e) {
    throw Error(ErrorKind::CannotWrite, path + ": cannot be written: " + e.what_without_backtrace());
  } catch (const Json::exception& e) {
    throw Error(ErrorKind::Unsupported, path + ": cannot be written: " + e.what(), "",
                "names and strings must be UTF-8");
  }
}

void save_pt2(const GraphModule& module, const std::string& path) {
  ExportedProgram program;
  // Not owned: only for the length of this call.
  program.module = std::shared_ptr<GraphModule>(std::shared_ptr<void>(), const_cast<GraphModule*>(&module));
  save_pt2(program, path);
}

}  // namespace plumb

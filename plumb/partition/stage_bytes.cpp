// Format: "PLUMBSTG", u64 length of a JSON header, the header, then the tensors' bytes one after the other, each dense
// and row-major in its own index order (strides are in the header). Little endian, as every machine torch runs on.
#include "plumb/partition/stage_bytes.h"

#include <ATen/ATen.h>

#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
#include "plumb/core/str.h"
#include "plumb/graph/names.h"
#include "plumb/partition/move.h"
#include "plumb/partition/pipe.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

using nlohmann::json;
constexpr std::string_view kMagic = "PLUMBSTG";
static_assert(std::endian::native == std::endian::little);

// Tells errors of this file from those of the parts it reads, which do not say that they are about a stage.
struct BadStage : Error {
  explicit BadStage(const std::string& what)
      : Error(ErrorKind::BadFile, "these bytes are no pipeline stage: " + what) {}
};

[[noreturn]] void bad(const std::string& what) { throw BadStage(what); }

at::Tensor dense(const Attr& attr) {
  const at::Tensor& t = attr.tensor;
  if (!t.defined()) throw Error(ErrorKind::InvalidArgument, "'" + attr.name + "' cannot be sent: it has no tensor");
  if (t.layout() != at::kStrided || t.is_meta()) {
    throw Error(ErrorKind::Unsupported,
                "'" + attr.name + "' cannot be sent: " +
                    (t.is_meta() ? "it is on the meta device and has no data" : "it has no dense layout"));
  }
  return t.detach().cpu().contiguous();
}

AttrKind kind_of(const json& j) {
  const int kind = j.get<int>();
  if (kind < 0 || kind > static_cast<int>(AttrKind::Constant)) bad("an unknown kind of state");
  return static_cast<AttrKind>(kind);
}

// Takes `size` bytes from the front.
std::string_view take(std::string_view& bytes, uint64_t size, const char* what) {
  if (size > bytes.size()) bad(str(what, " is cut off: ", size, " bytes are promised, ", bytes.size(), " are there"));
  std::string_view front = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return front;
}

at::Tensor read_tensor(const json& entry, std::string_view& bytes) {
  const auto dtype = dtype_from_short_name(entry.at("dtype").get<std::string>());
  if (!dtype) bad("an unknown dtype " + entry.at("dtype").dump());
  const auto sizes = entry.at("sizes").get<std::vector<int64_t>>();
  uint64_t count = at::elementSize(*dtype);
  for (int64_t s : sizes) {
    if (s < 0 || __builtin_mul_overflow(count, static_cast<uint64_t>(s), &count)) bad("a tensor of impossible sizes");
  }
  const std::string_view data = take(bytes, count, "a tensor");
  at::Tensor tensor;
  const auto strides = entry.at("strides").get<std::vector<int64_t>>();
  const auto permuted = entry.at("order").get<std::vector<int64_t>>();
  at::Tensor row_major = at::empty(sizes, at::TensorOptions(*dtype));
  if (!data.empty()) std::memcpy(row_major.data_ptr(), data.data(), data.size());
  if (strides == row_major.strides().vec() || permuted.empty()) return row_major;
  // A dense tensor in another order of dimensions (channels last): the same strides again.
  if (permuted.size() != sizes.size()) bad("a tensor with an impossible order of dimensions");
  std::vector<bool> seen(sizes.size(), false);
  for (int64_t d : permuted) {
    if (d < 0 || d >= static_cast<int64_t>(sizes.size()) || seen[d])
      bad("a tensor with an impossible order of dimensions");
    seen[d] = true;
  }
  std::vector<int64_t> inverse(sizes.size());
  for (size_t i = 0; i < permuted.size(); ++i) inverse[permuted[i]] = static_cast<int64_t>(i);
  return row_major.permute(permuted).contiguous().permute(inverse);
}

// Dimensions from the outermost in memory to the innermost; empty if the tensor is not dense.
std::vector<int64_t> memory_order(const at::Tensor& t) {
  if (!t.is_non_overlapping_and_dense()) return {};
  std::vector<int64_t> order(t.dim());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return t.stride(a) > t.stride(b); });
  return order;
}

// Reads the tensors that the header describes, which are all of the bytes, under their names.
State read_state(const json& header, std::string_view bytes) {
  std::vector<at::Tensor> tensors;
  for (const json& entry : header.at("tensors")) {
    at::Tensor t = read_tensor(entry, bytes);
    if (entry.at("grad").get<bool>()) {
      if (!at::isFloatingType(t.scalar_type()) && !at::isComplexType(t.scalar_type()))
        bad("an integer tensor that requires a gradient");
      t = t.detach().set_requires_grad(true);
    }
    if (entry.contains("tag")) {
      ParameterData data{mup_type_from(entry["tag"].get<std::string>())};
      if (entry.contains("depth")) data.scaling_depth = entry["depth"].get<int64_t>();
      if (entry.contains("fan_in")) data.fan_in = entry["fan_in"].get<int64_t>();
      tag(t, data);
    }
    tensors.push_back(std::move(t));
  }
  if (!bytes.empty()) bad(str(bytes.size(), " bytes are left over"));
  State state;
  for (const json& entry : header.at("attrs")) {
    const size_t i = entry.at("tensor").get<size_t>();
    if (i >= tensors.size()) bad("a tensor that is not there");
    state.add({entry.at("name").get<std::string>(), kind_of(entry.at("kind")), tensors[i],
               entry.at("persistent").get<bool>()});
  }
  return state;
}

}  // namespace

std::string serialize_stage(const Pipe& pipe, int index) {
  const GraphModule& module = *pipe.stage(index);
  json header{{"version", 1},
              {"index", index},
              {"graph", to_string(module.graph())},
              {"training", module.is_training()},
              {"mode_read_at", module.mode_read_at()},
              {"in_spec", module.in_spec().to_json()},
              {"out_spec", module.out_spec().to_json()},
              {"table", pipe.table().to_json()},
              {"input_names", pipe.input_names()},
              {"whole_in_spec", pipe.in_spec().to_json()},
              {"whole_out_spec", pipe.out_spec().to_json()}};
  json attrs = json::array(), tensors = json::array();
  std::string data;
  std::unordered_map<const c10::TensorImpl*, size_t> known;
  for (const Attr& attr : module.state()) {
    const auto [it, fresh] = known.emplace(attr.tensor.unsafeGetTensorImpl(), tensors.size());
    attrs.push_back({{"name", attr.name},
                     {"kind", static_cast<int>(attr.kind)},
                     {"persistent", attr.persistent},
                     {"tensor", it->second}});
    if (!fresh) continue;
    const at::Tensor flat = dense(attr);
    tensors.push_back({{"dtype", short_name(flat.scalar_type())},
                       {"sizes", flat.sizes().vec()},
                       {"strides", attr.tensor.strides().vec()},
                       {"order", memory_order(attr.tensor)},
                       {"grad", attr.tensor.requires_grad()}});
    if (const auto data = parameter_data(attr.tensor)) {
      tensors.back()["tag"] = to_string(data->type);
      if (data->scaling_depth) tensors.back()["depth"] = *data->scaling_depth;
      if (data->fan_in) tensors.back()["fan_in"] = *data->fan_in;
    }
    if (flat.nbytes()) data.append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
  }
  header["attrs"] = std::move(attrs);
  header["tensors"] = std::move(tensors);
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::string bytes(kMagic);
  bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
  return bytes + text + data;
}

StagePackage deserialize_stage(std::string_view bytes) {
  if (take(bytes, kMagic.size(), "its beginning") != kMagic) bad("they begin otherwise");
  uint64_t length = 0;
  std::memcpy(&length, take(bytes, sizeof length, "its beginning").data(), sizeof length);
  const std::string_view text = take(bytes, length, "its header");
  try {
    const json header = parse_json(text);
    if (header.at("version") != 1) bad("unknown version " + header.at("version").dump());
    StagePackage package;
    package.index = header.at("index").get<int>();
    package.table = PipeTable::from_json(header.at("table").get<std::string>());
    if (package.index < 0 || package.index >= package.table.num_stages())
      bad(str("it is stage ", package.index, " of ", package.table.num_stages()));
    package.input_names = header.at("input_names").get<std::vector<std::string>>();
    if (package.input_names.size() != package.table.num_inputs) bad("its inputs' names do not fit its table");
    package.in_spec = TreeSpec::from_json(header.at("whole_in_spec").get<std::string>());
    package.out_spec = TreeSpec::from_json(header.at("whole_out_spec").get<std::string>());
    package.module =
        std::make_shared<GraphModule>(parse_graph(header.at("graph").get<std::string>()), read_state(header, bytes),
                                      TreeSpec::from_json(header.at("in_spec").get<std::string>()),
                                      TreeSpec::from_json(header.at("out_spec").get<std::string>()));
    package.module->lint();
    // The tensors came to the CPU: what was made on a device says so no longer.
    rewrite_devices(package.module->graph(), at::kCPU);
    for (StageInputPort& port : package.table.stages[package.index].inputs)
      if (port.meta) port.meta->device = at::kCPU;
    for (StageOutputPort& port : package.table.stages[package.index].outputs)
      if (port.meta) port.meta->device = at::kCPU;
    const StageIO& io = package.table.stages[package.index];
    if (io.inputs.size() != package.module->graph().placeholders().size() ||
        io.outputs.size() != package.module->graph().output_node()->args().size()) {
      bad("its graph does not fit its table");
    }
    package.module->set_made_in_training(header.at("training").get<bool>());
    package.module->set_mode_read_at(header.value("mode_read_at", ""));  // older bytes have none
    return package;
  } catch (const json::exception& e) {
    bad(std::string("its header cannot be read: ") + e.what());
  } catch (const BadStage&) {
    throw;
  } catch (const Error& e) {
    bad(e.what());
  } catch (const c10::Error& e) {
    bad(e.what_without_backtrace());
  } catch (const std::exception& e) {  // no memory for what it says it holds
    bad(e.what());
  }
}

}  // namespace plumb

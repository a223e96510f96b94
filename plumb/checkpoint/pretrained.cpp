#include "plumb/checkpoint/pretrained.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/core/error.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

std::vector<std::string> name_list(const JsonDoc& doc, const Json& j) {
  std::vector<std::string> names = doc.strings(j);
  if (names.empty()) doc.fail(j, "a conversion of nothing");
  return names;
}

std::shared_ptr<GraphModule> conversion_graph(const JsonDoc& doc, const Json& text) {
  try {
    Graph graph = parse_graph(doc.string(text));
    if (!graph.output_node()) doc.fail(text, "the graph has no output");
    const TreeSpec in = TreeSpec::positional_inputs(graph.placeholders().size());
    const TreeSpec out = TreeSpec::tuple(std::vector<TreeSpec>(graph.output_node()->args().size(), TreeSpec::leaf()));
    auto module = std::make_shared<GraphModule>(std::move(graph), State(), in, out);
    module->lint();
    return module;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::BadFile) throw;
    doc.fail(text, e.message(), e.remedy());
  }
}

// Reads what is wanted of a folder, each conversion once.
class Reader {
 public:
  Reader(const Pretrained& from, const TensorFolder& folder) : from_(from), folder_(folder) {
    for (const auto& conversion : from.conversions) {
      for (size_t i = 0; i < conversion.state.size(); ++i)
        places_.emplace(conversion.state[i], std::pair(&conversion, i));
    }
  }
  // Nothing if the folder has no tensor of that name.
  at::Tensor read(const std::string& name) {
    if (auto plain = from_.names.find(name); plain != from_.names.end()) return folder_.read(plain->second);
    const auto place = places_.find(name);
    if (place == places_.end()) return {};
    const auto& [conversion, index] = place->second;
    if (conversion != last_) {
      std::vector<at::Tensor> stored;
      for (const std::string& each : conversion->stored) stored.push_back(folder_.read(each));
      results_ = run_conversion(*conversion->load, conversion->stored, conversion->state, stored);
      last_ = conversion;
    }
    return results_[index];
  }

 private:
  const Pretrained& from_;
  const TensorFolder& folder_;
  std::unordered_map<std::string, std::pair<const Pretrained::Conversion*, size_t>> places_;
  const Pretrained::Conversion* last_ = nullptr;
  std::vector<at::Tensor> results_;
};

}  // namespace

at::Tensor value_for(const std::string& name, const at::Tensor& as, const at::Tensor& value) {
  if (value.sizes() != as.sizes() || value.is_floating_point() != as.is_floating_point()) {
    throw Error(ErrorKind::TensorMismatch,
                c10::str("'", name, "' is ", value.scalar_type(), value.sizes(), " in the folder, and ",
                         as.scalar_type(), as.sizes(), " in the program"),
                "", "import the program from this folder again");
  }
  at::NoGradGuard no_grad;
  at::Tensor own = value;
  if (value.scalar_type() != as.scalar_type() || value.strides() != as.strides() || value.storage_offset() != 0)
    own = at::empty_strided(as.sizes(), as.strides(), value.options().dtype(as.scalar_type())).copy_(value);
  return own.detach().set_requires_grad(as.requires_grad());
}

std::vector<at::Tensor> run_conversion(GraphModule& graph, const std::vector<std::string>& from,
                                       const std::vector<std::string>& to, const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  std::vector<c10::IValue> values;
  try {
    std::vector<c10::IValue> inputs;
    const auto placeholders = graph.graph().placeholders();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& meta = placeholders.at(i)->result()->meta();
      inputs.emplace_back(meta ? tensors[i].to(meta->dtype) : tensors[i]);
    }
    values = graph.run(std::move(inputs));
  } catch (const c10::Error& e) {
    throw Error(ErrorKind::BadFile,
                "'" + to[0] + "' cannot be made of '" + from[0] + "' and the like: " + e.what_without_backtrace());
  } catch (const Error& e) {
    throw Error(ErrorKind::BadFile, "'" + to[0] + "' cannot be made of '" + from[0] + "' and the like: " + e.message(),
                e.where(), e.remedy());
  }
  std::vector<at::Tensor> results;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) results.push_back(value.toTensor());
  }
  if (results.size() != to.size()) {
    throw Error(ErrorKind::BadFile,
                c10::str("the conversion of '", to[0], "' gives ", results.size(), " tensors instead of ", to.size()));
  }
  return results;
}

Pretrained Pretrained::parse(const std::string& json) {
  const JsonDoc doc("the program's record of its folder", json);
  Pretrained result;
  result.folder = doc.string(doc.at(doc.root(), "folder"));
  result.files = texts_from_json(doc, doc.at(doc.root(), "files"));
  for (const auto& [name, text] : result.files) {
    if (std::ranges::find(kKeptFiles, name) == kKeptFiles.end())
      doc.fail(doc.at(doc.root(), "files"), "'" + name + "' is no file that an imported program takes along");
  }
  result.names = texts_from_json(doc, doc.at(doc.root(), "names"));
  std::vector<std::pair<std::shared_ptr<GraphModule>, std::shared_ptr<GraphModule>>> graphs;
  for (const Json& pair : doc.array(doc.at(doc.root(), "graphs")))
    graphs.emplace_back(conversion_graph(doc, doc.at(pair, "load")), conversion_graph(doc, doc.at(pair, "save")));
  for (const Json& each : doc.array(doc.at(doc.root(), "conversions"))) {
    Conversion conversion{name_list(doc, doc.at(each, "state")), name_list(doc, doc.at(each, "stored"))};
    const int64_t index = doc.integer(doc.at(each, "graphs"));
    if (index < 0 || index >= static_cast<int64_t>(graphs.size())) doc.fail(each, "a graph that is not there");
    std::tie(conversion.load, conversion.save) = graphs[static_cast<size_t>(index)];
    if (conversion.load->graph().placeholders().size() != conversion.stored.size() ||
        conversion.save->graph().placeholders().size() != conversion.state.size())
      doc.fail(each, "its graphs take other numbers of tensors");
    result.conversions.push_back(std::move(conversion));
  }
  return result;
}

void refuse_unit_scaled(const TensorFolder& folder) {
  if (!folder.is_unit_scaled()) return;
  throw Error(ErrorKind::InvalidState,
              folder.path() + ": the folder's weights are unit-scaled, and mean something else in a plain model", "",
              "load them into the unit-scaled model, plumb.transforms.fold it, and save what that gives");
}

void load_weights(GraphModule& module, const Pretrained& from, const TensorFolder& folder) {
  refuse_unit_scaled(folder);
  Reader reader(from, folder);
  std::vector<std::pair<std::string, at::Tensor>> loaded;
  std::unordered_map<const at::TensorImpl*, at::Tensor> known;  // tied ones are read once
  for (const Attr& attr : module.state()) {
    if (!attr.tensor.defined() || !attr.tensor.is_meta()) continue;
    if (parameter_data(attr.tensor)) {
      throw Error(ErrorKind::InvalidState,
                  "'" + attr.name + "' is a unit-scaled weight: the folder's values mean another", "",
                  "load the weights into the program as it was imported, then transform it");
    }
    at::Tensor& value = known[attr.tensor.unsafeGetTensorImpl()];
    if (!value.defined()) {
      const at::Tensor stored = reader.read(attr.name);
      if (!stored.defined()) {
        throw Error(ErrorKind::UnknownName, "the folder has no tensor for '" + attr.name + "'", "",
                    "import the program from this folder again");
      }
      value = value_for(attr.name, attr.tensor, stored);
    }
    loaded.emplace_back(attr.name, value);
  }
  if (!loaded.empty()) module.set_state(loaded);
}

}  // namespace plumb

// Reads an archive: finds its parts, checks their versions, and builds the module.
#include <set>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/exported/exported.h"
#include "plumb/exported/json_doc.h"
#include "plumb/exported/node_reader.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/exported/weights.h"
#include "plumb/exported/zip_file.h"
#include "plumb/graph/aliases.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

using pt2::NodeReader;

constexpr int64_t kSchemaMajor = 8;

// Returns the name of the program to read: models/NAME.json.
std::string choose_model(const ZipFile& zip, const std::string& wanted) {
  std::vector<std::string> names;
  const std::string prefix = zip.top_folder() + "models/";
  for (const ZipEntry& entry : zip.entries()) {
    if (entry.name.starts_with(prefix) && entry.name.ends_with(".json"))
      names.push_back(entry.name.substr(prefix.size(), entry.name.size() - prefix.size() - 5));
  }
  if (names.empty())
    throw Error(ErrorKind::BadFile, zip.path() + ": holds no exported program", "", "save it with torch.export.save");
  if (wanted.empty() && names.size() == 1) return names[0];
  const std::string name = wanted.empty() ? "model" : wanted;
  if (std::find(names.begin(), names.end(), name) != names.end()) return name;
  throw Error(
      ErrorKind::BadFile, zip.path() + ": has no program '" + name + "'", "",
      "it has " + join(names) +
          ": name one (load_pt2's argument model), or torch.export.save it to a file of its own for the command");
}

void check_archive(const ZipFile& zip) {
  auto text = [&](const char* name) {
    const ZipEntry& entry = zip.get(name);
    return entry.size < 64 ? zip.read(entry) : std::string("(" + std::to_string(entry.size) + " bytes)");
  };
  if (!zip.find("archive_format")) {
    throw Error(ErrorKind::BadFile, zip.path() + ": is a zip archive, but no .pt2 file: it has no entry archive_format",
                "",
                zip.find("data.pkl") ? "this looks like a file of torch.save: export the model with torch.export.save"
                                     : "save it with torch.export.save");
  }
  if (auto format = text("archive_format"); format != "pt2")
    throw Error(ErrorKind::BadFile, zip.path() + ": is an archive of format '" + format + "', not pt2");
  if (auto version = text("archive_version"); version != "0")
    throw Error(ErrorKind::BadFile, zip.path() + ": has archive version '" + version + "', 0 is the one known");
  if (const ZipEntry* order = zip.find("byteorder"); order && text("byteorder") != "little")
    throw Error(ErrorKind::BadFile, zip.path() + ": was written on a big-endian machine");
}

class Loader {
 public:
  Loader(const ZipFile& zip, const JsonDoc& doc, std::string name, const LoadOptions& options)
      : zip_(zip),
        doc_(doc),
        name_(std::move(name)),
        options_(options),
        nodes_(doc_, graph_, program_, options.device) {}

  ExportedProgram load() {
    read_versions();
    const Json& module = doc_.at(doc_.root(), "graph_module");
    const Json& graph = doc_.at(module, "graph");
    const Json& signature = doc_.at(module, "signature");
    nodes_.check_operators(graph);
    read_ranges();
    read_state();
    read_calls(module);
    read_inputs(graph, signature);
    add_size_check();
    nodes_.read_nodes(graph, scope_, {});
    read_outputs(graph, signature);
    put_batch_norms_back();
    put_copies_in_place();
    drop_copies_onto_themselves();
    if (const ZipEntry* samples = zip_.find("data/sample_inputs/" + name_ + ".pt"))
      program_.sample_inputs = zip_.read(*samples);
    read_extras();
    program_.module = std::make_shared<GraphModule>(std::move(graph_), std::move(state_), in_spec_, out_spec_);
    program_.module->lint();
    read_mode();
    return std::move(program_);
  }

 private:
  void read_versions() {
    const Json& version = doc_.at(doc_.root(), "schema_version");
    program_.schema_major = doc_.integer(doc_.at(version, "major"));
    program_.schema_minor = doc_.integer(doc_.at(version, "minor"));
    if (program_.schema_major != kSchemaMajor) {
      doc_.fail(version,
                "schema version " + std::to_string(program_.schema_major) + "." +
                    std::to_string(program_.schema_minor) + ", 8.x is the one known",
                "export the model again with a torch release from 2.11 on");
    }
    if (const Json* torch = doc_.find(doc_.root(), "torch_version")) program_.torch_version = doc_.string(*torch);
    if (const Json* opsets = doc_.find(doc_.root(), "opset_version")) {
      for (auto it = doc_.object(*opsets).begin(); it != opsets->end(); ++it)
        program_.opset_versions[it.key()] = doc_.integer(*it);
    }
  }

  void read_ranges() {
    if (const Json* ranges = doc_.find(doc_.root(), "range_constraints")) {
      for (auto it = doc_.object(*ranges).begin(); it != ranges->end(); ++it) {
        if (!SymExpr::parse(it.key())) doc_.fail(*it, "'" + it.key() + "' is no size expression");
        SizeRange range;
        if (const Json* min = doc_.find(*it, "min_val")) range.min = doc_.integer(*min);
        if (const Json* max = doc_.find(*it, "max_val")) range.max = doc_.integer(*max);
        program_.ranges.emplace(it.key(), range);
      }
    }
    if (const Json* guards = doc_.find(doc_.root(), "guards_code")) program_.guards = doc_.strings(*guards);
  }

  void read_state() {
    weights_ =
        pt2::read_stored(zip_, "data/weights/" + name_ + "_weights_config.json", "data/weights/", options_.device);
    constants_ = pt2::read_stored(zip_, "data/constants/" + name_ + "_constants_config.json", "data/constants/",
                                  options_.device);
  }

  void read_calls(const Json& module) {
    const Json& calls = doc_.array(doc_.at(module, "module_call_graph"));
    bool root = false;
    for (const Json& call : calls) {
      const std::string& fqn = doc_.string(doc_.at(call, "fqn"));
      const Json* signature = doc_.find(call, "signature");
      if (!fqn.empty()) {
        program_.submodules.push_back(fqn);
        continue;
      }
      if (root || !signature) doc_.fail(call, "the program's own signature must be there once");
      root = true;
      for (auto [key, spec] : {std::pair{"in_spec", &in_spec_}, {"out_spec", &out_spec_}}) {
        const Json& text = doc_.at(*signature, key);
        try {
          *spec = TreeSpec::from_json(doc_.string(text));
        } catch (const Error& e) {
          doc_.fail(text, e.message());
        }
      }
      if (const Json* names = doc_.find(*signature, "forward_arg_names"))
        program_.argument_names = doc_.strings(*names);
    }
    if (!root) doc_.fail(calls, "the program's own signature is missing");
    if (const Json* fields = doc_.find(module, "treespec_namedtuple_fields")) {
      for (auto it = doc_.object(*fields).begin(); it != fields->end(); ++it)
        program_.namedtuple_fields[it.key()] = doc_.strings(doc_.at(*it, "field_names"));
    }
  }

  c10::IValue constant(const Json& j) const {
    const auto [tag, value] = doc_.tagged(j);
    if (tag == "as_none") return {};
    if (tag == "as_int") return doc_.integer(value);
    if (tag == "as_float") return doc_.number(value);
    if (tag == "as_bool") return doc_.boolean(value);
    if (tag == "as_string") return doc_.string(value);
    doc_.fail(j, "unknown kind of constant '" + tag + "'");
  }

  void add_attribute(const Json& at, const std::string& value_name, const std::string& name, AttrKind kind,
                     bool persistent, const Json& graph) {
    const bool constant = kind == AttrKind::Constant || !persistent;
    const pt2::StoredTensor* stored = (constant ? constants_ : weights_).find(name);
    if (!stored) stored = (constant ? weights_ : constants_).find(name);
    if (!stored) doc_.fail(at, "no tensor '" + name + "' is stored in the file");
    if (state_.contains(name)) doc_.fail(at, "'" + name + "' is given twice");
    const at::Tensor& tensor = stored->tensor;
    if (auto stated = nodes_.meta_of(graph, value_name);
        stated && (stated->dtype != tensor.scalar_type() || stated->sizes != tensor.sizes().vec()))
      doc_.fail(at, "the stored tensor '" + name + "' is of another dtype or shape than the graph says");
    state_.add({name, kind, tensor, persistent});
    TensorMeta meta = TensorMeta::of(tensor);
    // Its values come from elsewhere (see ExportedProgram::pretrained), to where the graph runs.
    if (tensor.is_meta() && zip_.find(pt2::kPretrained)) meta.device = at::kCPU;
    Node* node = graph_.get_attr(name, std::move(meta));
    nodes_.name_value(node->result(), value_name);
    NodeReader::bind(doc_, at, scope_, value_name, node->result());
    attributes_.emplace(name, node);
  }

  void read_inputs(const Json& graph, const Json& signature) {
    const Json& inputs = doc_.array(doc_.at(graph, "inputs"));
    const Json& specs = doc_.array(doc_.at(signature, "input_specs"));
    if (inputs.size() != specs.size())
      doc_.fail(specs, "the graph has " + std::to_string(inputs.size()) + " inputs, the signature " +
                           std::to_string(specs.size()));
    auto is_placeholder = [&](size_t i) {
      const auto [kind, spec] = doc_.tagged(specs[i]);
      return kind == "user_input" || kind == "constant_input";
    };
    // Placeholders come first in the IR; in the file weights do.
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (is_placeholder(i)) read_placeholder(inputs[i], specs[i], i, graph);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!is_placeholder(i)) read_attribute(inputs[i], specs[i], graph);
    }
    complete_state();
    check_constant_inputs();
  }

  void read_placeholder(const Json& input, const Json& of_input, size_t index, const Json& graph) {
    const auto [kind, spec] = doc_.tagged(of_input);
    const auto [tag, value] = doc_.tagged(input);
    const ValueType type = pt2::type_of_tag(tag);
    std::string name;
    Node* node = nullptr;
    if (tag == "as_tensor") {
      name = doc_.string(doc_.at(value, "name"));
      auto meta = nodes_.meta_of(graph, name);
      if (!meta) doc_.fail(input, "the type of '" + name + "' is missing");
      node = graph_.placeholder(name, std::move(meta));
    } else if (type != ValueType::Other && tag.starts_with("as_sym_")) {
      name = doc_.string(doc_.at(value, "as_name"));
      node = graph_.placeholder(name, std::nullopt, type);
    } else {
      const Json* given = kind == "constant_input" ? doc_.find(spec, "name") : nullptr;
      name = given ? doc_.string(*given) : "arg" + std::to_string(index);
      const c10::IValue only = constant(input);
      node = graph_.placeholder(name, std::nullopt, type);
      constant_inputs_.emplace(node->result()->name(), only);
    }
    nodes_.name_value(node->result(), name);
    if (node->result()->type() != ValueType::Tensor && !constant_inputs_.count(node->result()->name()))
      nodes_.note_expression(graph, node->result(), name);
    NodeReader::bind(doc_, input, scope_, name, node->result());
  }

  void read_attribute(const Json& input, const Json& of_input, const Json& graph) {
    const auto [kind, spec] = doc_.tagged(of_input);
    if (kind == "custom_obj") doc_.fail(of_input, "custom objects cannot be held in a graph");
    if (kind == "token") doc_.fail(of_input, "operators with effect tokens cannot be held in a graph");
    const auto [tag, value] = doc_.tagged(input);
    if (tag != "as_tensor") doc_.fail(input, "a tensor was expected");
    const std::string& name = doc_.string(doc_.at(value, "name"));
    const std::map<std::string, AttrKind> kinds = {
        {"parameter", AttrKind::Parameter}, {"buffer", AttrKind::Buffer}, {"tensor_constant", AttrKind::Constant}};
    const auto known = kinds.find(kind);
    if (known == kinds.end()) doc_.fail(of_input, "unknown kind of input '" + kind + "'");
    const bool persistent = known->second != AttrKind::Buffer || doc_.boolean(doc_.at(spec, "persistent"));
    add_attribute(of_input, name, doc_.string(doc_.at(spec, (kind + "_name").c_str())), known->second, persistent,
                  graph);
  }

  void complete_state() {
    // Further names of tied weights: no inputs of the graph, but part of the state.
    for (const auto& [name, stored] : weights_.by_name) {
      if (!state_.contains(name))
        state_.add({name, stored.is_parameter ? AttrKind::Parameter : AttrKind::Buffer, stored.tensor, true});
    }
    // Parameters and buffers as the file's state_dict mixes them, each kind in the graph's order: torch lists tied
    // names side by side, wherever their modules stand.
    std::map<AttrKind, std::vector<const Attr*>> of_kind;
    for (const Attr& attr : state_) {
      if (weights_.by_name.count(attr.name)) of_kind[attr.kind].push_back(&attr);
    }
    std::map<AttrKind, size_t> next;
    State ordered;
    for (const std::string& name : weights_.order) {
      const AttrKind kind = state_.get(name).kind;
      ordered.add(*of_kind[kind][next[kind]++]);
    }
    for (const Attr& attr : state_) {
      if (!ordered.contains(attr.name)) ordered.add(attr);
    }
    state_ = std::move(ordered);
  }

  // Nodes that hold inputs against the only values they may have.
  void check_constant_inputs() {
    for (const auto& [name, only] : constant_inputs_) {
      const char* op = only.isString() ? "plumb::check_input.str" : "plumb::check_input";
      graph_.call(op, {graph_.find_value(name), only, Arg(name)});
    }
  }

  // One node that holds the inputs' dynamic sizes against the program's symbols and ranges.
  void add_size_check() {
    Arg::List inputs;
    std::string sizes;
    std::set<std::string> symbols;
    for (Node* node : graph_.placeholders()) {
      const auto& meta = node->result()->meta();
      if (!meta || meta->symbols.empty()) continue;
      for (size_t dim = 0; dim < meta->symbols.size(); ++dim) {
        if (meta->symbols[dim].empty()) continue;
        sizes += "size " + std::to_string(inputs.size()) + " " + std::to_string(dim) + " " + node->result()->name() +
                 " " + meta->symbols[dim] + "\n";
        symbols.insert(meta->symbols[dim]);
      }
      inputs.emplace_back(node->result());
    }
    if (inputs.empty()) return;
    std::string spec;
    for (const auto& [name, range] : program_.ranges) {
      if (!symbols.count(name) || SymExpr::parse(name)->kind() != SymExpr::Kind::Symbol) continue;
      auto bound = [](const std::optional<int64_t>& b) { return b ? std::to_string(*b) : std::string("-"); };
      spec += "symbol " + name + " " + bound(range.min) + " " + bound(range.max) + "\n";
    }
    graph_.call("plumb::check_sizes", {Arg(std::move(inputs)), Arg(spec + sizes)});
  }

  void read_outputs(const Json& graph, const Json& signature) {
    const Json& outputs = doc_.array(doc_.at(graph, "outputs"));
    const Json& specs = doc_.array(doc_.at(signature, "output_specs"));
    if (outputs.size() != specs.size())
      doc_.fail(specs, "the graph has " + std::to_string(outputs.size()) + " outputs, the signature " +
                           std::to_string(specs.size()));
    // Mutations first, as torch does: a value that is also returned is returned as the thing it was written to.
    std::unordered_map<Value*, Value*> written;
    std::vector<Arg> results;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto [kind, spec] = doc_.tagged(specs[i]);
      Value* target = nullptr;
      if (kind == "buffer_mutation" || kind == "parameter_mutation") {
        const std::string& name =
            doc_.string(doc_.at(spec, kind == "buffer_mutation" ? "buffer_name" : "parameter_name"));
        auto it = attributes_.find(name);
        if (it == attributes_.end()) doc_.fail(specs[i], "'" + name + "' is written to, but is no input of the graph");
        target = it->second->result();
      } else if (kind == "user_input_mutation") {
        const std::string& name = doc_.string(doc_.at(spec, "user_input_name"));
        auto it = scope_.find(name);
        if (it == scope_.end() || !it->second.is_value() ||
            it->second.value()->producer()->kind() != NodeKind::Placeholder)
          doc_.fail(specs[i], "'" + name + "' is written to, but is no input of the graph");
        target = it->second.value();
      } else if (kind == "user_output" || kind == "loss_output") {
        continue;
      } else {
        doc_.fail(specs[i], "outputs of kind '" + kind + "' cannot be held in a graph",
                  "export the forward pass: gradients come from autograd");
      }
      const Arg value = nodes_.read_argument(outputs[i], scope_);
      if (!value.is_value() || !value.value()->is_tensor()) doc_.fail(outputs[i], "a tensor was expected");
      if (value.value() == target) continue;
      Node* copy = graph_.call("aten::copy_", {target, value});
      copy->result()->set_meta(target->meta());
      written.emplace(value.value(), copy->result());
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto kind = doc_.tagged(specs[i]).first;
      if (kind != "user_output" && kind != "loss_output") continue;
      Arg value = nodes_.read_argument(outputs[i], scope_);
      if (value.is_list()) doc_.fail(outputs[i], "an output is a tensor, a number, a string or None");
      if (auto it = written.find(value.value()); value.is_value() && it != written.end()) value = Arg(it->second);
      results.push_back(std::move(value));
    }
    graph_.output(std::move(results));
  }

  // Returns the node that writes a result into a running statistic at the end, if nothing else uses the two.
  static Node* writer_of(const Value* result, const Value* statistic) {
    const std::vector<Node*> readers = result->users(), users = statistic->users();
    if (readers.size() != 1 || users.size() != 2 || !readers[0]->is_op("aten::copy_")) return nullptr;
    const bool writes_it = readers[0]->input(0) == statistic && !readers[0]->result()->has_uses();
    return writes_it ? readers[0] : nullptr;
  }

  // run_decompositions() makes a functional batch norm of one that moves its running statistics. That one keeps them
  // for the backward pass and the program then writes to them, so nothing could differentiate it. The same kernel in
  // place has the same results.
  void put_batch_norms_back() {
    std::vector<Node*> norms;
    for (Node* node : graph_.nodes()) {
      if (node->is_op("aten::_native_batch_norm_legit_functional")) norms.push_back(node);
    }
    for (Node* node : norms) {
      if (node->result(1)->has_uses() || node->result(2)->has_uses()) continue;
      const Arg &mean = node->arg("running_mean"), &variance = node->arg("running_var");
      if (!mean.is_value() || !variance.is_value() || mean.value() == variance.value()) continue;
      Node* writers[] = {writer_of(node->result(3), mean.value()), writer_of(node->result(4), variance.value())};
      if (!writers[0] || !writers[1]) continue;
      const auto guard = graph_.inserting_before(node);
      std::vector<Arg> args(node->args().begin(), node->args().end());
      args.emplace_back(false);  // cudnn_enabled: the program's kernel is torch's own
      Node* norm = graph_.call("aten::batch_norm", std::move(args));
      norm->meta() = node->meta();
      norm->result()->set_meta(node->result(0)->meta());
      graph_.replace_all_uses_with(node->result(0), norm->result());
      const std::string name = node->result(0)->name();
      for (Node* writer : writers) graph_.erase(writer);
      graph_.erase(node);
      norm->result()->rename(name);
    }
  }

  // run_decompositions() makes a functional copy of an assignment to a part of a tensor, which nothing could
  // differentiate. A copy into a clone has the same values.
  void put_copies_in_place() {
    for (Node* node : graph_.nodes()) {
      if (!node->is_op("aten::copy") || !node->arg("self").is_value()) continue;
      const auto guard = graph_.inserting_before(node);
      Node* clone = graph_.call("aten::clone", {node->arg("self")});
      Node* copy = graph_.call("aten::copy_", {clone->result(), node->arg("src"), node->arg("non_blocking")});
      std::optional<TensorMeta> meta = node->input(0)->meta();
      if (meta && meta->strides.size() == meta->sizes.size())
        meta->strides = at::infer_dense_strides(meta->sizes, meta->strides);
      clone->meta() = node->meta();
      for (Node* made : {clone, copy}) made->result()->set_meta(meta);
      graph_.replace_node(node, copy);
    }
  }

  // torch.export ends `self.count += 1` with a copy of the buffer, written in place already, onto itself. No cut could
  // lie between the two writes.
  void drop_copies_onto_themselves() {
    for (Node* node : graph_.nodes()) {
      if (!node->is_op("aten::copy_")) continue;
      const Value* to = node->arg("self").value();
      Value* from = node->arg("src").value();
      const Value* same = from;  // null for a number
      while (same != nullptr && same != to) same = written_as(same);
      if (same == nullptr) continue;
      graph_.replace_all_uses_with(node->result(), from);
      graph_.erase(node);
    }
  }

  void read_extras() {
    if (const ZipEntry* entry = zip_.find(pt2::kPretrained)) program_.pretrained = zip_.read_text(*entry);
    program_.unit_scaled_layers = zip_.find(pt2::kUnitScaledLayers) != nullptr;
    const ZipEntry* entry = zip_.find(pt2::kTags);
    if (!entry) return;
    const JsonDoc tags(zip_.path() + "/" + pt2::kTags, zip_.read_text(*entry));
    for (auto it = tags.object(tags.root()).begin(); it != tags.root().end(); ++it) {
      const Attr* attr = state_.find(it.key());
      if (!attr || !attr->tensor.defined()) tags.fail(*it, "'" + it.key() + "' is no parameter of the program");
      try {
        ParameterData data{mup_type_from(tags.string(tags.at(*it, "type")))};
        if (const Json* depth = tags.find(*it, "depth")) data.scaling_depth = tags.integer(*depth);
        if (const Json* fan_in = tags.find(*it, "fan_in")) data.fan_in = tags.integer(*fan_in);
        tag(attr->tensor, data);
      } catch (const Error& e) {
        if (e.kind() == ErrorKind::BadFile) throw;
        tags.fail(*it, e.message());
      }
    }
  }

  // Files of older versions, and graphs whose forward does not read the mode, have no such entry.
  void read_mode() {
    const ZipEntry* entry = zip_.find(pt2::kMode);
    if (!entry) return;
    const JsonDoc mode(zip_.path() + "/" + pt2::kMode, zip_.read_text(*entry));
    program_.module->set_mode_read_at(mode.string(mode.at(mode.root(), "read_at")));
    program_.module->set_made_in_training(mode.boolean(mode.at(mode.root(), "training")));
  }

  const ZipFile& zip_;
  const JsonDoc& doc_;
  std::string name_;
  LoadOptions options_;
  Graph graph_;
  State state_;
  TreeSpec in_spec_, out_spec_;
  ExportedProgram program_;
  NodeReader nodes_;
  NodeReader::Scope scope_;
  std::unordered_map<std::string, Node*> attributes_;   // by the name in the state
  std::map<std::string, c10::IValue> constant_inputs_;  // by placeholder: the only value it may have
  pt2::StoredTensors weights_, constants_;
};

}  // namespace

ExportedProgram load_pt2(const std::string& path, const LoadOptions& options) {
  try {
    const ZipFile zip(path, options.max_memory_bytes);
    check_archive(zip);
    const std::string name = choose_model(zip, options.model);
    const std::string record = "models/" + name + ".json";
    const JsonDoc doc(path + "/" + record, zip.read_text(zip.get(record)));
    return Loader(zip, doc, name, options).load();
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::BadFile) throw;
    throw Error(ErrorKind::BadFile, path + ": " + e.message(), e.where(), e.remedy());
  } catch (const c10::Error& e) {
    throw Error(ErrorKind::BadFile, path + ": " + e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::BadFile, path + ": needs more memory than there is");
  } catch (const std::exception& e) {
    throw Error(ErrorKind::BadFile, path + ": " + e.what());
  }
}

}  // namespace plumb

#include "plumb/partition/stage_specializer.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/names.h"
#include "plumb/operators/dispatch_keys.h"
#include "plumb/partition/move.h"

namespace plumb {
namespace {

// `t` with other sizes: its first entries, or all of them again and again, so that indices stay valid ones. In memory
// the dimensions keep their order.
at::Tensor resized(const at::Tensor& t, const std::vector<int64_t>& sizes) {
  if (t.sizes() == at::IntArrayRef(sizes)) return t;
  const at::NoGradGuard no_grad;
  at::Tensor out = t.detach();
  for (int64_t d = 0; d < out.dim(); ++d) {
    const int64_t old = out.size(d), now = sizes[d];
    if (old == now) continue;
    if (old == 0) {
      std::vector<int64_t> shape = out.sizes().vec();
      shape[d] = now;
      out = at::zeros(shape, out.options());
      continue;
    }
    out =
        out.index_select(d, at::arange(now, at::TensorOptions().dtype(at::kLong).device(out.device())).remainder(old));
  }
  const auto strides = at::infer_dense_strides(out.sizes(), t.strides());
  return at::empty_strided(out.sizes(), strides, out.options()).copy_(out).set_requires_grad(t.requires_grad());
}

// Returns what two cuts for different sizes have in common: no sizes, and no names where those may differ.
template <class Port>
Port without_sizes(Port port, bool names) {
  if (!names) port.name.clear();
  if (port.meta)
    port.meta = TensorMeta{.dtype = port.meta->dtype, .sizes = std::vector<int64_t>(port.meta->sizes.size())};
  if constexpr (requires { port.as_it_is; }) port.as_it_is.clear();
  return port;
}

// Returns the model's inputs that stage `index` or a stage before it in the flow of values takes.
std::set<size_t> inputs_before(const PipeTable& table, int index) {
  std::set<size_t> found;
  std::vector<int> stages{index};
  std::set<int> seen;
  while (!stages.empty()) {
    const int s = stages.back();
    stages.pop_back();
    if (!seen.insert(s).second) continue;
    for (const StageInputPort& port : table.stages[s].inputs) {
      if (port.source.is_model_input()) {
        found.insert(port.source.index);
      } else {
        stages.push_back(port.source.stage);
      }
    }
  }
  return found;
}

// Returns the device that a stage was moved to since it was cut, if it was.
std::optional<at::Device> moved_to(const GraphModule& now, const StageIO& io) {
  size_t i = 0;
  for (const Node* in : now.graph().placeholders()) {
    const auto& meta = in->result()->meta();
    const auto& cut = io.inputs[i++].meta;
    if (meta && cut && meta->device != cut->device) return meta->device;
  }
  return std::nullopt;
}

}  // namespace

std::vector<int64_t> pack_sizes(const ModelSizes& sizes) {
  std::vector<int64_t> row;
  for (const auto& [input, own] : sizes) {
    row.push_back(static_cast<int64_t>(input));
    row.push_back(static_cast<int64_t>(own.size()));
    row.insert(row.end(), own.begin(), own.end());
  }
  return row;
}

ModelSizes unpack_sizes(at::IntArrayRef row) {
  const auto wrong = [] {
    throw Error(ErrorKind::StructureMismatch, "the sizes of the model's inputs that came with a microbatch are damaged",
                "", "run the same version of plumb on every rank");
  };
  const int64_t* at = row.begin();
  const int64_t* end = row.end();
  ModelSizes sizes;
  while (at != end) {
    if (end - at < 2 || at[0] < 0 || at[1] < 0 || at[1] > end - at - 2) wrong();
    const int64_t* first = at + 2;
    if (std::any_of(first, first + at[1], [](int64_t size) { return size < 0; })) wrong();
    sizes[at[0]] = std::vector<int64_t>(first, first + at[1]);
    at = first + at[1];
  }
  return sizes;
}

// Autocast on this thread: what captures depend on beside the model and its inputs.
struct StageSpecializer::Ambient {
  std::vector<std::tuple<at::DeviceType, bool, at::ScalarType>> autocast;

  Ambient() {
    for (const at::DeviceType d : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
      autocast.emplace_back(d, at::autocast::is_autocast_enabled(d), at::autocast::get_autocast_dtype(d));
  }
  void set() const {
    for (const auto& [device, on, dtype] : autocast) {
      at::autocast::set_autocast_enabled(device, on);
      at::autocast::set_autocast_dtype(device, dtype);
    }
  }
};

StageSpecializer::StageSpecializer(const Pipe& pipe, std::vector<c10::IValue> example, Cut cut, bool same_names)
    : table_(pipe.table()),
      input_names_(pipe.input_names()),
      example_(std::move(example)),
      cut_(std::move(cut)),
      same_names_(same_names),
      ambient_(std::make_unique<Ambient>()) {
  if (example_.size() != table_.num_inputs) {
    throw Error(ErrorKind::StructureMismatch,
                str("the pipe takes ", table_.num_inputs, " inputs, and the example has ", example_.size()));
  }
}

StageSpecializer::~StageSpecializer() = default;

std::string StageSpecializer::describe(const std::vector<c10::IValue>& inputs) const {
  std::string text;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor()) continue;
    text += (text.empty() ? "'" : ", '") + input_names_[i] + "' " + short_name(inputs[i].toTensor().scalar_type()) +
            c10::str(inputs[i].toTensor().sizes());
  }
  return text;
}

std::vector<c10::IValue> StageSpecializer::inputs_for(int index, const ModelSizes& known) const {
  const std::set<size_t> as_cut = inputs_before(table_, index);  // unless they are known to be otherwise
  // How sizes changed: by dimension and old size, and by old size alone.
  std::map<std::pair<size_t, int64_t>, int64_t> at_place;
  std::map<int64_t, int64_t> anywhere;
  for (const auto& [input, sizes] : known) {
    if (input >= example_.size() || !example_[input].isTensor()) continue;
    const auto old = example_[input].toTensor().sizes();
    if (old.size() != sizes.size()) {
      throw Error(ErrorKind::TensorMismatch,
                  "input '" + input_names_[input] + "' of the model came as " + c10::str(at::IntArrayRef(sizes)) +
                      " where " + c10::str(old) + " was cut: the number of dimensions may not change",
                  "", "cut the model with an input of that many dimensions");
    }
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (old[d] == sizes[d]) continue;
      at_place.emplace(std::pair{d, old[d]}, sizes[d]);
      anywhere.emplace(old[d], sizes[d]);
    }
  }
  std::vector<c10::IValue> inputs = example_;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor()) continue;
    const at::Tensor example = inputs[i].toTensor();
    std::vector<int64_t> sizes = example.sizes().vec();
    if (auto it = known.find(i); it != known.end()) {
      sizes = it->second;
    } else if (!as_cut.count(i)) {
      for (size_t d = 0; d < sizes.size(); ++d) {
        if (auto place = at_place.find({d, sizes[d]}); place != at_place.end()) {
          sizes[d] = place->second;
        } else if (auto any = anywhere.find(sizes[d]); any != anywhere.end()) {
          sizes[d] = any->second;
        }
      }
    }
    inputs[i] = resized(example, sizes);
  }
  return inputs;
}

void StageSpecializer::check(const Pipe& pipe) const {
  std::string what;
  if (pipe.num_stages() != table_.num_stages())
    what = str("into ", pipe.num_stages(), " stages instead of ", table_.num_stages());
  for (int s = 0; what.empty() && s < pipe.num_stages(); ++s) {
    const StageIO &cut = table_.stages[s], &now = pipe.table().stages[s];
    const auto compare = [&](const char* side, const auto& a, const auto& b) {
      for (size_t i = 0; what.empty() && i < std::max(a.size(), b.size()); ++i) {
        if (i < a.size() && i < b.size() && without_sizes(a[i], same_names_) == without_sizes(b[i], same_names_))
          continue;
        what = str("so that ", side, " ", i, " of stage ", s, " is ", i < b.size() ? "%" + b[i].name : "none",
                   " instead of ", i < a.size() ? "%" + a[i].name : "none");
      }
    };
    compare("input", cut.inputs, now.inputs);
    compare("output", cut.outputs, now.outputs);
  }
  if (what.empty()) return;
  throw Error(ErrorKind::Partition, "with these sizes the model is cut otherwise, " + what, "",
              "cut at modules or marks, which do not depend on sizes, or cut the model for these sizes");
}

const std::vector<StageSpecializer::Stage>& StageSpecializer::stages_for(std::vector<c10::IValue> inputs, int index) {
  std::vector<std::vector<int64_t>> sizes;
  for (const c10::IValue& v : inputs)
    sizes.push_back(v.isTensor() ? v.toTensor().sizes().vec() : std::vector<int64_t>());
  if (const auto* known = made_.find(sizes)) return *known;
  const std::string what = str("stage ", index, " needs a graph for ", describe(inputs));
  std::shared_ptr<Pipe> pipe;
  try {
    // The modes of the cut, no matter what runs around the stage: evaluation, a mixed region, recomputation.
    const c10::InferenceMode outside(false);
    const at::AutoGradMode grad(true);
    const c10::impl::ExcludeDispatchKeyGuard unnoticed(kRecomputeKey);
    struct Restore {
      Ambient before;
      ~Restore() { before.set(); }
    } const restore;
    ambient_->set();
    pipe = cut_(inputs);
    if (pipe) check(*pipe);
  } catch (const Error& e) {
    throw Error(e.kind(), what + ": " + e.message(), e.where(), e.remedy());
  } catch (const std::exception& e) {
    throw Error(ErrorKind::ExecutionFailed, what + ": " + e.what(), "",
                "give the model sizes that it takes, or cut it for these");
  }
  if (!pipe) {
    throw Error(ErrorKind::InvalidState, what + ", and the model it was cut from no longer exists", "",
                "keep the model as long as its stages are to take other sizes than they were cut for");
  }
  ++captures_;
  std::vector<Stage> made;
  for (int s = 0; s < pipe->num_stages(); ++s) {
    GraphModule& module = *pipe->stage(s);
    Stage stage{std::move(module.graph()), State(), module.in_spec(), module.out_spec()};
    for (const Attr& attr : module.state()) {
      Attr kept = attr;
      if (attr.kind != AttrKind::Constant) kept.tensor = at::Tensor();  // the whole model would live as long as this
      stage.state.add(std::move(kept));
    }
    made.push_back(std::move(stage));
  }
  return made_.add(std::move(sizes), std::move(made));
}

std::shared_ptr<GraphModule> StageSpecializer::stage(int index, const ModelSizes& known, const GraphModule& now) {
  if (index < 0 || index >= table_.num_stages()) {
    throw Error(ErrorKind::InvalidArgument, str("the pipe has no stage ", index));
  }
  const std::lock_guard lock(mutex_);
  const c10::InferenceMode outside(false);  // what is made here serves training too
  auto inputs = inputs_for(index, known);
  const std::string sizes = describe(inputs);
  const Stage& made = stages_for(std::move(inputs), index)[index];
  const auto device = moved_to(now, table_.stages[index]);
  State state;
  for (const Attr& attr : made.state) {
    Attr mine = attr;
    if (attr.kind == AttrKind::Constant) {
      if (device) mine.tensor = attr.tensor.to(*device);
    } else if (const Attr* own = now.state().find(attr.name)) {
      mine.tensor = own->tensor;
    } else {
      throw Error(ErrorKind::Partition,
                  str("for ", sizes, " stage ", index, " uses '", attr.name,
                      "', which it did not use for the sizes that it was cut for"),
                  "", "cut the model with inputs for which all its parameters are used");
    }
    state.add(std::move(mine));
  }
  auto module = std::make_shared<GraphModule>(made.graph.clone(), std::move(state), made.in_spec, made.out_spec);
  if (device) rewrite_devices(module->graph(), *device);
  module->copy_mode(now);
  return module;
}

namespace specializer_detail {

std::vector<bool> modes_of(const torch::nn::Module& model) {
  std::vector<bool> modes;
  for (const auto& m : model.modules()) modes.push_back(m->is_training());
  return modes;
}

namespace {

// A module's train() sets those below it too, which come after it.
void set_modes(torch::nn::Module& model, const std::vector<bool>& modes) {
  size_t i = 0;
  for (const auto& m : model.modules()) m->train(modes[i++]);
}

}  // namespace

WithModes::WithModes(torch::nn::Module& model, const std::vector<bool>& modes)
    : model_(model), before_(modes_of(model)) {
  if (before_.size() != modes.size()) {
    throw Error(ErrorKind::InvalidState,
                str("the model has ", before_.size(), " modules, and had ", modes.size(), " when it was cut"), "",
                "cut the model again after changing it");
  }
  if (before_ != modes) set_modes(model_, modes);
}

WithModes::~WithModes() {
  if (modes_of(model_) != before_) set_modes(model_, before_);
}

bool cuts_by_place(const SplitOptions& options) { return !options.cut_before.empty() || options.policy != nullptr; }

}  // namespace specializer_detail
}  // namespace plumb

// Broken copies of everything that plumb reads: each must end in an Error, or in something that holds what it promises.
//   fuzz_readers --seconds=60 tests/fuzz/corpus build-fuzz/programs
// Every folder of the corpus is named after a reader; `.pt2` files may lie in any folder given.
#include <ATen/ATen.h>

#include <cstring>

#include "plumb/analysis/graph_picture.h"
#include "plumb/checkpoint/checkpoint.h"
#include "plumb/checkpoint/checkpoint_writer.h"
#include "plumb/checkpoint/pretrained.h"
#include "plumb/checkpoint/safetensors.h"
#include "plumb/exported/exported.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/graph/graph_module.h"
#include "plumb/graph/pass.h"
#include "plumb/graph/tree_spec.h"
#include "plumb/partition/balance.h"
#include "plumb/partition/cost.h"
#include "plumb/partition/pipe.h"
#include "plumb/partition/split.h"
#include "plumb/partition/stage_bytes.h"
#include "plumb/pipeline/runtime/timeline.h"
#include "plumb/pipeline/transport/message.h"
#include "plumb/recording/history.h"
#include "plumb/recording/rules.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/pipeline_plan.h"
#include "plumb/schedule/schedule.h"
#include "plumb/training/options.h"
#include "plumb/transforms/formats/format_recipe.h"
#include "tests/fuzz/broken.h"
#include "tests/fuzz/driver.h"

namespace plumb::fuzz {
namespace {

struct Reader {
  std::string name;
  std::vector<std::string> seeds;
  std::function<void(const std::string& bytes, const std::string& file)> read;
  std::function<std::string(const std::string& seed, Random& random)> broken;
  std::string ending;  // suffix of the file's name
};

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

// --- what each reader promises ---

void read_graph(const std::string& text, const std::string&) {
  const Graph graph = parse_graph(text);
  lint(graph);
  const std::string printed = to_string(graph);
  require(to_string(parse_graph(printed)) == printed, "the text does not round-trip");
}

// Returns a state with a small tensor for every get_attr.
State small_state(const Graph& graph) {
  State state;
  for (const Node* node : graph.attributes()) {
    if (state.contains(node->target())) continue;
    const auto& meta = node->result()->meta();
    bool small = meta && meta->sizes.size() <= 4 && meta->is_floating_point();
    for (size_t i = 0; small && i < meta->sizes.size(); ++i) small = meta->sizes[i] >= 0 && meta->sizes[i] <= 16;
    const bool constant = node->target().starts_with("constant");
    at::Tensor tensor = at::ones(small ? meta->sizes : std::vector<int64_t>{4, 4});
    if (!constant) tensor.requires_grad_();
    state.add({node->target(), constant ? AttrKind::Constant : AttrKind::Parameter, tensor});
  }
  return state;
}

GraphModule module_of(const Graph& graph) {
  const size_t inputs = graph.placeholders().size();
  const size_t outputs = graph.output_node() ? graph.output_node()->args().size() : 0;
  return GraphModule(graph.clone(), small_state(graph), TreeSpec::positional_inputs(inputs),
                     TreeSpec::tuple(std::vector<TreeSpec>(outputs, TreeSpec::leaf())));
}

// Costs, pictures and a cut end in an Error or in a pipe that is the graph again.
void cut_graph(const std::string& text, const std::string&) {
  const GraphModule module = module_of(parse_graph(text));
  graph_svg(module.graph());
  graph_dot(module.graph());
  const GraphCost cost = estimate_cost(module);
  BalanceOptions options;
  options.stages = 2;
  const auto pipe = pipeline(module, balance(module, cost, options).options);
  pipe->merge()->lint();
}

// Every pass ends in an Error or in a graph without faults.
void run_passes_on(const std::string& text, const std::string&) {
  const Graph graph = parse_graph(text);
  for (const Pass* pass : all_passes()) {
    GraphModule module = module_of(graph);
    try {
      run_pass(*pass, module, {}, nullptr, true);
    } catch (const Error& e) {
      require(e.kind() != ErrorKind::Internal, e.what());
    }
  }
}

void read_pt2(const std::string&, const std::string& file) {
  ExportedProgram program = load_pt2(file);
  program.module->lint();
  const std::string text = to_string(program.module->graph());
  require(to_string(parse_graph(text)) == text, "the text does not round-trip");
  save_pt2(program, file + ".saved");
  std::filesystem::remove(file + ".saved");
}

void read_stage(const std::string& bytes, const std::string&) {
  const StagePackage package = deserialize_stage(bytes);
  package.module->lint();
  PipeTable::from_json(package.table.to_json());
}

void read_tree(const std::string& text, const std::string&) {
  const TreeSpec spec = TreeSpec::from_json(text);
  require(TreeSpec::from_json(spec.to_json()) == spec, "the tree does not round-trip");
  spec.to_string();
  std::vector<c10::IValue> leaves(spec.num_leaves(), c10::IValue(1));
  unflatten(spec, leaves);
}

void read_sizes(const std::string& text, const std::string&) {
  std::map<std::string, std::string> spelling;
  const auto e = SymExpr::parse(text, &spelling);
  if (!e) throw Error(ErrorKind::BadFile, "no expression");
  e->evaluate({{"s0", 3}, {"s1", -7}, {"s77", INT64_MAX}});
  const std::string infix = e->to_infix();
  const auto again = SymExpr::parse(infix);
  require(!again || again->to_infix() == infix, "the expression does not round-trip");
  e->to_sympy(spelling);
}

void read_history_bytes(const std::string& bytes, const std::string&) {
  const History history = parse_history(bytes);
  for (const HistoryStep& step : history.steps) {
    for (const HistoryRow& row : step.rows) require(row.tensor < history.tensors.size(), "a row of no tensor");
  }
  for (const HistoryEvent& event : history.events) {
    for (const auto& c : event.first) require(c.tensor < history.tensors.size(), "an event of no tensor");
  }
  merge_histories({history, history});
}

void read_csv(const std::string& text, const std::string&) {
  const std::string printed = to_csv(parse_csv(text));
  require(to_csv(parse_csv(printed)) == printed, "the table does not round-trip");
}

void read_plan_text(const std::string& text, const std::string&) {
  const PipelinePlan plan = parse_plan(text);
  require(parse_plan(to_json(plan)) == plan, "the plan does not round-trip");
}

void read_recipe_text(const std::string& text, const std::string&) {
  const FormatRecipe recipe = parse_recipe(text);
  require(parse_recipe(recipe.to_toml()) == recipe, "the recipe does not round-trip");
}

void read_options_text(const std::string& text, const std::string&) {
  TrainOptions options, again;
  read_toml(options, text, "options");
  read_toml(again, to_toml(options), "options");
  require(again == options, "the options do not round-trip");
}

// Every element; of a tensor that shows a few bytes many times (strides of 0) the first and the last.
void use(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 << 20) {
    tensor.clone();
    return;
  }
  at::Tensor first = tensor, last = tensor;
  while (first.dim() > 0) {
    first = first.select(0, 0);
    last = last.select(0, -1);
  }
  first.clone();
  last.clone();
}

void use(const c10::IValue& value) {
  if (value.isTensor()) {
    use(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& v : value.toTupleRef().elements()) use(v);
  } else if (value.isList()) {
    for (const c10::IValue& v : value.toListRef()) use(v);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) use(entry.value());
  }
}

void read_tensors(const std::string&, const std::string& file) { use(load_tensors(file)); }

void read_safetensors(const std::string&, const std::string& path) {
  const SafetensorsFile file(path);
  for (const SafetensorsEntry& entry : file.entries()) {
    require(file.read(entry.name).nbytes() == entry.bytes, "a tensor of other bytes than its entry");
  }
}

// The files beside checkpoint.json are whole.
std::string checkpoint_folder() { return work_file("run") + "/step-00000001"; }

void read_checkpoint(const std::string& bytes, const std::string&) {
  spill(checkpoint_folder() + "/checkpoint.json", bytes);
  const Checkpoint checkpoint = Checkpoint::open(checkpoint_folder());
  checkpoint.verify();
  for (const std::string& name : checkpoint.names()) checkpoint.read(name);
  for (const std::string& name : checkpoint.optimizer_names()) checkpoint.read_optimizer(name);
}

void read_message_bytes(const std::string& bytes, const std::string&) {
  const at::Tensor buffer = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(buffer.data_ptr(), bytes.data(), bytes.size());
  for (const MessageValue& v : wire::read_message(buffer).values) {
    if (v.tensor.defined()) use(v.tensor);
  }
}

// --- what to start from ---

std::shared_ptr<Pipe> small_pipe() {
  State state;
  for (const char* name : {"a.weight", "b.weight"}) {
    state.add({name, AttrKind::Parameter, at::ones({4, 4}).requires_grad_()});
  }
  state.add({"mask", AttrKind::Buffer, at::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)});
  GraphModule module(parse_graph(R"(graph {
    %x: f32[3, 4] = placeholder "x"
    %w = get_attr "a.weight"
    %y: f32[3, 4] = aten::linear(%x, %w) in "":"Net" "a":"Linear"
    plumb::pipe_split()
    %v = get_attr "b.weight"
    %z: f32[3, 4] = aten::linear(%y, %v)
    %m = get_attr "mask"
    %s = aten::sum(%m)
    %o = aten::add.Tensor(%z, %s)
    output(%o, nan)
  })"),
                     std::move(state), TreeSpec::positional_inputs(1), TreeSpec::tuple({{}, {}}));
  return pipeline(module);
}

std::string history_bytes() {
  const std::string file = work_file("seed.history");
  {
    HistoryWriter writer(file, false);
    writer.rules("[[rule]]\n");
    HistoryStep step{1, {}};
    HistoryRow row;
    row.tensor = writer.tensor({"fc.weight", "fc", "parameter", "float32", {4, 4}, 0});
    row.present = kAllStatistics;
    row.data.numel = 16;
    step.rows.push_back(row);
    writer.step(step);
    writer.scalars({1, {{"loss", 0.5}}});
    writer.event({1, 0, "std > 1", 2, {{0, false, 2.0}}});
  }
  const std::string bytes = slurp(file);
  std::filesystem::remove(file);
  return bytes;
}

std::string tensor_file(const std::string& ending, const c10::IValue& value) {
  const std::string file = work_file("seed" + ending);
  save_tensors(value, file);
  const std::string bytes = slurp(file);
  std::filesystem::remove(file);
  return bytes;
}

std::string safetensors_bytes(const NamedTensors& tensors) {
  const std::string file = work_file("seed.safetensors");
  write_safetensors(file, tensors);
  const std::string bytes = slurp(file);
  std::filesystem::remove(file);
  return bytes;
}

std::string checkpoint_text() {
  {
    CheckpointWriter writer(work_file("run"), 0, 1, "seed");
    const at::Tensor w = at::ones({2, 3});
    writer.save(1, {{{"a.weight", w}, {"b.weight", w}}, {{"exp_avg/a.weight", w}}}, {{"data", {1, 2}}});
  }
  return slurp(checkpoint_folder() + "/checkpoint.json");
}

c10::IValue tensors_in_a_dict() {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("w", at::ones({2, 3}));
  dict.insert("h", at::ones({3, 2}, at::kBFloat16).t());
  dict.insert("i", at::arange(4));
  return dict;
}

std::string message_bytes(const std::vector<MessageValue>& values, at::IntArrayRef sizes) {
  std::string bytes(static_cast<size_t>(wire::message_bytes(values, sizes.size())), '\0');
  wire::write_message(bytes.data(), {}, values, sizes);
  return bytes;
}

std::vector<std::string> tables() {
  std::vector<std::string> texts;
  for (const std::string& name : schedule_names()) texts.push_back(to_csv(make_schedule(name, 2, 4)));
  return texts;
}

std::vector<std::string> plans() {
  std::vector<std::string> texts;
  for (const char* name : {"1F1B", "ZBVZeroBubble", "Interleaved1F1B"}) {
    PipelinePlan plan{.schedule = make_schedule(name, 2, 4), .replicas = 2, .seconds = 0.5, .memory = {1e6, 2e6}};
    for (int stage = 1; stage < plan.num_stages(); ++stage) plan.cut.push_back("add_" + std::to_string(stage));
    plan.recompute.assign(static_cast<size_t>(plan.num_stages()), "cheap");
    texts.push_back(to_json(plan));
  }
  return texts;
}

std::string options_text() {
  TrainOptions options;
  options.file = "model.pt2", options.data = "tokens.bin", options.weight_decay = 0.1;
  options.at = {"layers.2", "layers.4:end"}, options.groups = {"*.bias: weight_decay=0, lr=0.1x"};
  return to_toml(options);
}

std::string pretrained_text() {
  const std::string graph = "graph {\n  %a: f32[3] = placeholder \"a\"\n  %b = aten::neg(%a)\n  output(%b)\n}\n";
  const json conversion = {{"state", {"experts"}}, {"stored", {"e.0"}}, {"graphs", 0}};
  return json{{"folder", "in"},
              {"files", {{"config.json", "{}"}}},
              {"names", {{"wte", "old.wte"}, {"head", "old.wte"}}},
              {"conversions", json::array({conversion})},
              {"graphs", json::array({{{"load", graph}, {"save", graph}}})}}
      .dump();
}

std::vector<Reader> all_readers() {
  const auto pipe = small_pipe();
  const std::string events =
      to_text({{0, parse_action("0F0"), 0.0, 1.5e-6, 1.0}, {1, parse_action("1B2"), 0.25, 0.5, 0.75}});
  return {
      {"pt2", {}, read_pt2, broken_archive, ".pt2"},
      {"graph_text", {to_string(pipe->merge()->graph())}, read_graph, broken_text},
      {"graph_passes", {to_string(pipe->merge()->graph())}, run_passes_on, broken_text},
      {"graph_cuts", {to_string(pipe->merge()->graph())}, cut_graph, broken_text},
      {"stage_bytes", {serialize_stage(*pipe, 0), serialize_stage(*pipe, 1)}, read_stage, broken_stage},
      {"tree", {pipe->in_spec().to_json(), pipe->out_spec().to_json()}, read_tree, broken_json},
      {"sizes", {}, read_sizes, broken_text},
      {"history", {history_bytes()}, read_history_bytes, broken_history},
      {"schedule", tables(), read_csv, broken_text},
      {"plan", plans(), read_plan_text, broken_json},
      {"recipe",
       {FormatRecipe{"mxfp4", "mxfp8e5m2-SR", "", true, 4096, {{"head", "none", "bf16"}, {"*.q", {}, "none"}}}
            .to_toml()},
       read_recipe_text,
       broken_text},
      {"options", {options_text()}, read_options_text, broken_text},
      {"pretrained",
       {pretrained_text()},
       [](const std::string& text, const std::string&) { Pretrained::parse(text); },
       broken_json},
      {"rules", {}, [](const std::string& text, const std::string&) { RecordRules::parse(text); }, broken_text},
      {"timeline", {events}, [](const std::string& text, const std::string&) { parse_timeline(text); }, broken_text},
      {"npy",
       {tensor_file(".npy", at::ones({2, 3})), tensor_file(".npy", at::arange(5))},
       read_tensors,
       broken_bytes,
       ".npy"},
      {"pt",
       {tensor_file(".pt", at::ones({2, 3})), tensor_file(".pt", tensors_in_a_dict())},
       read_tensors,
       broken_archive,
       ".pt"},
      {"safetensors",
       {safetensors_bytes({{"a.weight", at::ones({2, 3})}, {"b", at::arange(4)}, {"c", at::ones({2}, at::kBool)}})},
       read_safetensors,
       broken_safetensors,
       ".safetensors"},
      {"checkpoint", {checkpoint_text()}, read_checkpoint, broken_checkpoint},
      {"message",
       {message_bytes({{at::ones({2, 3}), true}, {}, {at::arange(4).to(at::kShort)}}, {0, 2, 3, 4}),
        message_bytes({{at::ones({4, 3}).t(), false}}, {})},
       read_message_bytes,
       broken_message},
  };
}

// Seeds of the folders: NAME/* for the reader of that name, the passes' graphs for cuts too, and every .pt2 file.
void add_files(std::vector<Reader>& readers, const std::vector<std::string>& folders) {
  std::vector<std::string> files;
  for (const std::string& folder : folders) {
    for (const auto& e : std::filesystem::recursive_directory_iterator(folder)) {
      if (e.is_regular_file()) files.push_back(e.path());
    }
  }
  std::sort(files.begin(), files.end());
  for (Reader& reader : readers) {
    for (const std::string& file : files) {
      const std::filesystem::path path(file);
      const bool cuts = reader.name == "graph_cuts" && path.parent_path().filename() == "graph_passes";
      const bool is_program = reader.name == "pt2" && path.extension() == ".pt2";
      if (path.parent_path().filename() != reader.name && !cuts && !is_program) continue;
      reader.seeds.push_back(slurp(file));
    }
  }
}

bool fuzz_reader(const Options& options, const Reader& reader) {
  const std::string file = work_file(reader.name + reader.ending);
  // Seeds are read as they are first. The corpus holds refused ones too, so they are counted only.
  size_t refused = 0;
  for (const std::string& seed : reader.seeds) {
    spill(file, seed);
    try {
      reader.read(seed, file);
    } catch (const Error&) {
      ++refused;
    }
  }
  std::printf("%zu of %zu seeds are read; ", reader.seeds.size() - refused, reader.seeds.size());
  return run(options, reader.name, file, [&](Random& random) {
    const std::string bytes = reader.broken(reader.seeds[below(random, reader.seeds.size())], random);
    spill(file, bytes);
    reader.read(bytes, file);
  });
}

}  // namespace
}  // namespace plumb::fuzz

int main(int argc, char** argv) {
  using namespace plumb::fuzz;
  const Options options = parse_options(argc, argv);
  std::vector<Reader> readers = all_readers();
  add_files(readers, options.folders);
  bool clean = true;
  for (const Reader& reader : readers) {
    if (!options.only.empty() && options.only != reader.name) continue;
    if (reader.seeds.empty()) {
      std::printf("%s: no file to start from\n", reader.name.c_str());
      clean = false;
    } else {
      clean = fuzz_reader(options, reader) && clean;
    }
  }
  std::filesystem::remove_all(work_file("run"));
  return clean ? 0 : 1;
}

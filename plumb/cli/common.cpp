#include "plumb/cli/common.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "plumb/cli/progress.h"
#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/output_file.h"
#include "plumb/partition/split.h"
#include "plumb/recording/module_diff.h"
#include "plumb/training/folder_weights.h"
#include "plumb/training/inputs.h"

namespace plumb::cli {
namespace {

std::shared_ptr<GraphModule> module_of_text(const std::string& path) {
  const std::string text = read_file(path);
  if (text.find('\0') != std::string::npos || text.find("graph") == std::string::npos) {
    throw Error(ErrorKind::BadFile, path + ": is neither a .pt2 file by its name nor a graph's text", "",
                "give a file that ends in .pt2, or a text as `plumb show` prints it");
  }
  Graph graph = prefixed(path + ": ", [&] { return parse_graph(text); });
  const Node* output = graph.output_node();
  if (output == nullptr) {
    throw Error(ErrorKind::BadFile, path + ": the graph has no output", "", "end it with a line output(...)");
  }
  const TreeSpec in = TreeSpec::positional_inputs(graph.placeholders().size());
  const TreeSpec out = TreeSpec::tuple(std::vector<TreeSpec>(output->args().size(), TreeSpec::leaf()));
  return std::make_shared<GraphModule>(std::move(graph), State(), in, out);
}

}  // namespace

std::vector<std::string>& own_arguments() {
  static std::vector<std::string> arguments;
  return arguments;
}

bool is_pt2(const std::string& path) { return path.ends_with(".pt2"); }

Loaded load(const std::string& path) {
  refuse_folder(path);
  if (is_pt2(path)) return {load_pt2(path)};
  Loaded text{.is_text = true};
  text.program.module = module_of_text(path);
  return text;
}

void check_same_kind(const Loaded& loaded, const std::string& path) {
  const bool to_stdout = path.empty() || path == "-";
  if (loaded.is_text && is_pt2(path)) {
    throw UsageError("-o " + path + ": a graph's text has no tensors to write to a .pt2 file",
                     "give -o a name like OUT.txt");
  }
  if (!loaded.is_text && !is_pt2(path)) {
    throw UsageError("-o " + (to_stdout ? "is missing" : path) + ": a .pt2 file is written to a .pt2 file",
                     "give -o a name that ends in .pt2");
  }
}

void save(const Loaded& loaded, const std::string& path) {
  check_same_kind(loaded, path);
  if (loaded.is_text) {
    write_text(to_string(loaded.module().graph()), path);
  } else {
    save_pt2(loaded.program, path);
  }
}

Loaded load_with_tensors(const std::string& path) {
  // By its name, before anything is read.
  if (!is_pt2(path) && std::filesystem::is_regular_file(path)) {
    throw UsageError("FILE " + path + ": a graph's text has no tensors to work on",
                     "give a .pt2 file of torch.export.save or plumb");
  }
  return load(path);
}

Loaded load_with_values(const std::string& path, const std::string& weights) {
  Loaded loaded = load_with_tensors(path);
  load_folder_weights(weights, loaded.program);
  return loaded;
}

void add_weights_option(CLI::App* sub, std::string& weights) {
  sub->add_option("--weights", weights,
                  "The folder with the safetensors of a program that plumb import made (default: the folder that was "
                  "imported)");
}

std::vector<std::string> files_of(const ModelOptions& options) {
  std::vector<std::string> files = options.inputs;
  files.push_back(options.file);
  if (!options.weights.empty()) files.push_back(options.weights);
  return files;
}

void add_model_options(CLI::App* sub, ModelOptions& options) {
  sub->add_option("FILE", options.file, "A .pt2 file")->required();
  sub->add_option("--input", options.inputs,
                  "[NAME=]FILE.pt or FILE.npy, or a number; one an input, in order if not named")
      ->allow_extra_args(false);
  add_weights_option(sub, options.weights);
}

Model open_model(const ModelOptions& options, Progress& progress) {
  progress.next("reading " + options.file);
  Model model{load_with_values(options.file, options.weights), {}};
  model.inputs = read_inputs(model.module(), options.inputs, "--input", false);
  return model;
}

CLI::Option* add_field(CLI::App* sub, const TrainField& field, FieldTexts& given) {
  const std::string name = field.name == "file" ? "FILE" : "--" + field.name;
  const auto initial = field_texts(TrainOptions(), field);
  const auto take = [&given, &field](const std::vector<std::string>& texts) { given[field.name] = texts; };
  if (field.is_flag()) {
    const bool on = initial[0] == "true";
    return sub->add_flag_callback(
        on ? "--no-" + field.name : name, [take, on] { take({on ? "false" : "true"}); }, field.help);
  }
  CLI::Option* option = sub->add_option_function<std::vector<std::string>>(name, take, field.help);
  const bool text = field.is_list() || std::holds_alternative<std::string TrainOptions::*>(field.member);
  option->allow_extra_args(false)->type_name(!field.choices.empty() ? "" : text ? "TEXT" : "NUMBER");
  if (!field.is_list()) option->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  if (!field.choices.empty()) option->check(CLI::IsMember(field.choices));
  if (field.check) option->check(field.check);
  if (!field.is_list() && !initial.empty() && !initial[0].empty()) option->default_str(initial[0]);
  return option;
}

void write_text(const std::string& text, const std::string& path) {
  if (path.empty() || path == "-") {
    std::fwrite(text.data(), 1, text.size(), stdout);
    if (!text.empty() && text.back() != '\n') std::fputc('\n', stdout);
    if (std::fflush(stdout) != 0) throw Error(ErrorKind::CannotWrite, "cannot write to stdout");
    return;
  }
  OutputFile file(path);
  file.write(text.data(), text.size());
  file.check();
  file.commit();
}

std::vector<std::string> output_names(const GraphModule& module) {
  std::vector<std::string> names;
  const TreeSpec& spec = module.out_spec();
  const auto args = module.graph().output_node()->args();
  if (!spec.is_leaf() && spec.type.find("ict") != std::string::npos && spec.children.size() == args.size()) {
    return spec.keys();
  }
  for (const Arg& arg : args) names.push_back(arg.is_value() ? arg.value()->name() : "constant");
  return names;
}

at::Tensor loss_or_sum(const GraphModule& module, const std::vector<c10::IValue>& outputs) {
  if (const auto loss = find_loss_by_name(module.out_spec())) {
    if (const at::Tensor named = sum_of_outputs({outputs.at(*loss)}); named.defined()) return named;
  }
  return sum_of_outputs(outputs);
}

at::Tensor backward_start(const GraphModule& module, const std::vector<c10::IValue>& outputs) {
  const at::Tensor start = loss_or_sum(module, outputs);
  if (!start.defined()) {
    throw Error(ErrorKind::InvalidArgument, "no output depends on a parameter that has a gradient", "",
                "leave --backward out, or export the model with parameters that require gradients");
  }
  return start;
}

std::string columns(Table table) {
  constexpr size_t kWidest = 60;
  for (auto& row : table.rows) {
    for (std::string& cell : row) {
      if (cell.size() <= kWidest) continue;
      size_t end = kWidest - 3;
      while (end > 0 && (cell[end] & 0xC0) == 0x80) --end;  // no half of a character of UTF-8
      cell.replace(end, std::string::npos, "...");
    }
  }
  return to_text(table);
}

std::string duration_text(double seconds) {
  if (seconds < 10) return short_number(std::round(seconds * 10) / 10) + " s";
  const auto whole = static_cast<int64_t>(std::llround(std::min(seconds, 1e15)));
  if (whole < 60) return std::to_string(whole) + " s";
  if (whole < 3600) return c10::str(whole / 60, " min ", whole % 60, " s");
  return c10::str(whole / 3600, " h ", whole / 60 % 60, " min");
}

void say_wrote(Progress& progress, const std::string& path) {
  if (!path.empty() && path != "-") progress.say("wrote " + path);
}

std::optional<int> terminal_width() {
  struct winsize size {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size.ws_col;
}

}  // namespace plumb::cli

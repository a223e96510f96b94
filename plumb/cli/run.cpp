// plumb run: one forward, and backward, of a `.pt2` file.

#include <CLI/CLI.hpp>
#include <chrono>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/core/table.h"
#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/graph/backward_errors.h"

namespace plumb::cli {
namespace {

struct RunArguments {
  ModelOptions model;
  std::string out;
  bool backward = false, json = false;
};

nlohmann::json describe(const std::string& name, const c10::IValue& value) {
  nlohmann::json j = {{"name", name}};
  if (!value.isTensor()) {
    std::stringstream text;
    text << value;
    j["value"] = text.str();
    return j;
  }
  const at::Tensor t = value.toTensor();
  if (!t.defined()) return j;
  j["type"] = type_text(t);
  j["sizes"] = t.sizes().vec();
  if (t.numel() == 0 || t.is_complex()) return j;
  const at::Tensor x = t.detach().to(at::kDouble);
  if (t.numel() == 1) {
    j["value"] = x.item<double>();
  } else {
    j["mean"] = x.mean().item<double>();
    j["std"] = x.std(false).item<double>();
    j["min"] = x.min().item<double>();
    j["max"] = x.max().item<double>();
  }
  return j;
}

std::string cell(const nlohmann::json& j, const char* key) {
  const auto it = j.find(key);
  if (it == j.end()) return "";
  return it->is_number() ? short_number(it->get<double>()) : it->is_string() ? it->get<std::string>() : it->dump();
}

std::string table(const nlohmann::json& entries) {
  Table all{{"name", "type", "value", "mean", "std", "min", "max"}, {}};
  for (const auto& e : entries) {
    auto& row = all.rows.emplace_back();
    for (const std::string& key : all.header) row.push_back(cell(e, key.c_str()));
  }
  return columns(std::move(all));
}

void run(const RunArguments& o) {
  if (!o.out.empty() && !is_tensor_file(o.out)) {
    throw UsageError("-o " + o.out + ": is no tensor file by its name", "-o OUT.pt or OUT.npy");
  }
  check_writable({{"-o", o.out}}, files_of(o.model));
  Progress progress(3, o.json);
  Model model = open_model(o.model, progress);
  GraphModule& module = model.module();
  std::vector<c10::IValue> inputs = std::move(model.inputs);
  progress.next("running " + o.model.file);
  const auto begin = std::chrono::steady_clock::now();
  at::AutoGradMode gradients(o.backward);
  std::vector<c10::IValue> outputs = module.run(std::move(inputs));
  if (o.backward) run_backward_of(module.graph(), [&] { backward_start(module, outputs).backward(); });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  nlohmann::json report = {{"seconds", seconds}, {"outputs", nlohmann::json::array()}};
  const std::vector<std::string> names = output_names(module);
  for (size_t i = 0; i < outputs.size(); ++i) report["outputs"].push_back(describe(names.at(i), outputs[i]));
  c10::Dict<std::string, at::Tensor> grads;
  if (o.backward) {
    report["gradients"] = nlohmann::json::array();
    for (const Attr& attr : module.state()) {
      if (attr.kind != AttrKind::Parameter || !attr.tensor.grad().defined()) continue;
      report["gradients"].push_back(describe(attr.name, attr.tensor.grad()));
      grads.insert(attr.name, attr.tensor.grad());
    }
  }
  if (!o.out.empty()) {
    progress.next("writing " + o.out);
    for (c10::IValue& v : outputs) {
      if (v.isTensor() && v.toTensor().defined()) v = v.toTensor().detach();
    }
    c10::IValue value = unflatten(module.out_spec(), outputs);
    if (o.backward) {
      c10::impl::GenericDict both(c10::StringType::get(), c10::AnyType::get());
      both.insert("outputs", value);
      both.insert("gradients", grads);
      value = both;
    }
    save_tensors(value, o.out);
    say_wrote(progress, o.out);
  }
  progress.finish();
  if (o.json) {
    write_text(report.dump(1), "");
  } else {
    write_text(table(report["outputs"]) + (o.backward ? "\ngradients\n" + table(report["gradients"]) : ""), "");
  }
}

}  // namespace

void add_run(CLI::App& app) {
  auto o = std::make_shared<RunArguments>();
  CLI::App* sub = app.add_subcommand("run", "Runs a .pt2 file on inputs");
  add_model_options(sub, o->model);
  sub->add_option("-o,--out", o->out,
                  "Save the outputs to a .pt or .npy file (with --backward: outputs and gradients)");
  sub->add_flag("--backward", o->backward, "Also backward, from the output named loss or the sum of all outputs");
  sub->add_flag("--json", o->json, "Print as JSON");
  sub->footer("Example:\n  plumb run model.pt2 --input x=batch.npy -o y.pt");
  sub->callback([o] { run(*o); });
}

}  // namespace plumb::cli

#include "plumb/graph/pass.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <limits>
#include <memory>
#include <ranges>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/output_file.h"
#include "plumb/core/text.h"

namespace plumb {
namespace {

// A function's static, so that registration from other files' initializers is safe.
std::map<std::string, std::unique_ptr<Pass>, std::less<>>& table() {
  static std::map<std::string, std::unique_ptr<Pass>, std::less<>> passes;
  return passes;
}

// Changes when the graph's text or a tensor of the state (another one, or written to) changes.
uint64_t fingerprint(const GraphModule& module) {
  uint64_t h = module.graph().hash();
  for (const Attr& attr : module.state()) {
    h = h * 31 + std::hash<std::string>()(attr.name);
    h = h * 31 + reinterpret_cast<uintptr_t>(attr.tensor.unsafeGetTensorImpl());
    if (attr.tensor.defined() && !attr.tensor.is_inference()) h = h * 31 + attr.tensor._version();
  }
  return h;
}

}  // namespace

RegisterPass::RegisterPass(Pass pass) {
  std::string name = pass.name;
  table()[name] = std::make_unique<Pass>(std::move(pass));
}

std::vector<const Pass*> all_passes() {
  std::vector<const Pass*> passes;
  for (const auto& [name, pass] : table()) passes.push_back(pass.get());
  return passes;
}

const Pass& find_pass(std::string_view name) {
  auto it = table().find(name == "raise" ? "fuse_patterns" : name);
  if (it != table().end()) return *it->second;
  throw Error(ErrorKind::UnknownName, "no pass '" + std::string(name) + "'", "",
              "one of: " + join(std::views::keys(table())));
}

bool run_checked(const std::string& name, const std::function<bool()>& run, GraphModule& module, bool check) {
  if (!run) throw Error(ErrorKind::InvalidArgument, "pass " + name + " has no function");
  lint(module.graph());  // what is broken before is no fault of the pass
  const uint64_t before = check ? fingerprint(module) : 0;
  const bool changed = run();
  try {
    check ? module.lint() : lint(module.graph());
  } catch (const Error& e) {
    throw Error(ErrorKind::Internal, "after pass " + name + ": " + e.message(), e.where());
  }
  if (!check) return changed;
  const bool differs = fingerprint(module) != before;
  if (differs && !changed) {
    throw Error(ErrorKind::Internal, "pass " + name + " returned 'unchanged' but the module changed");
  }
  if (!differs && changed) {
    throw Error(ErrorKind::Internal, "pass " + name + " returned 'changed' but the module is as before");
  }
  return changed;
}

namespace {

void check_option(const Pass& pass, const std::string& name) {
  if (std::ranges::find(pass.options, name, &PassOption::name) != pass.options.end()) return;
  throw Error(ErrorKind::UnknownName, "pass " + pass.name + " has no option '" + name + "'", "",
              pass.options.empty() ? "it has no options" : "one of: " + join(pass.options, &PassOption::name));
}

}  // namespace

bool run_pass(const Pass& pass, GraphModule& module, const PassOptions& options, std::vector<std::string>* report,
              bool check) {
  for (const auto& [name, value] : options) check_option(pass, name);
  std::function<bool()> run;
  if (pass.run) run = [&] { return pass.run(module, options, report); };
  return run_checked(pass.name, run, module, check);
}

PassStep parse_pass_step(const std::string& text) {
  std::vector<std::string> parts;
  for (const std::string& part : split_commas(text)) {
    // "c::d=e" is a part of a list, too: no option is named like an operator.
    const std::string name = part.substr(0, part.find('='));
    if (parts.size() > 1 && (name == part || name.find(':') != std::string::npos)) {
      parts.back() += "," + part;
    } else {
      parts.push_back(part);
    }
  }
  PassStep step{&find_pass(parts.empty() ? "" : parts[0]), {}};
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    const std::string name = parts[i].substr(0, equals);
    check_option(*step.pass, name);
    if (equals == std::string::npos) {
      throw Error(ErrorKind::InvalidArgument, "option '" + name + "' of pass " + step.pass->name + " has no value", "",
                  name + "=VALUE");
    }
    step.options[name] = parts[i].substr(equals + 1);
  }
  return step;
}

std::vector<PassResult> run_passes(const std::vector<PassStep>& steps, GraphModule& module,
                                   const RunPassesOptions& options) {
  size_t dumped = 0;
  auto dump = [&](const std::string& name) {
    if (options.dump.empty()) return;
    const std::string number = std::to_string(dumped++);
    write_file_atomically(
        std::filesystem::path(options.dump) / (std::string(number.size() < 2, '0') + number + "-" + name + ".txt"),
        to_string(module.graph()));
  };
  std::vector<PassResult> results;
  dump("input");
  for (const PassStep& step : steps) {
    if (!step.pass)
      throw Error(ErrorKind::InvalidArgument, "a step has no pass", "", "parse_pass_step() makes one of a pass's name");
    if (options.before) options.before(step);
    PassResult result{step.pass->name, false, 0, {}};
    const auto begin = std::chrono::steady_clock::now();
    result.changed = run_pass(*step.pass, module, step.options, &result.notes, options.check);
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    dump(step.pass->name);
    if (options.after) options.after(result);
    results.push_back(std::move(result));
  }
  return results;
}

bool flag_option(const PassOptions& options, std::string_view name, bool fallback) {
  auto it = options.find(std::string(name));
  if (it == options.end()) return fallback;
  if (it->second == "true" || it->second == "1" || it->second.empty()) return true;
  if (it->second == "false" || it->second == "0") return false;
  throw Error(ErrorKind::InvalidArgument, "option " + it->first + " is true or false, got '" + it->second + "'");
}

namespace {

template <class T>
T parsed(const PassOptions& options, std::string_view name, T fallback, T least, const char* what) {
  auto it = options.find(std::string(name));
  if (it == options.end()) return fallback;
  T v = 0;
  const char* end = it->second.data() + it->second.size();
  auto [stop, error] = std::from_chars(it->second.data(), end, v);
  if (error != std::errc() || stop != end || !(v >= least) || v > std::numeric_limits<T>::max())
    throw Error(ErrorKind::InvalidArgument, "option " + it->first + " is " + what + ", got '" + it->second + "'");
  return v;
}

}  // namespace

int64_t number_option(const PassOptions& options, std::string_view name, int64_t fallback) {
  return parsed<int64_t>(options, name, fallback, 0, "a number from 0");
}

double real_option(const PassOptions& options, std::string_view name, double fallback) {
  return parsed(options, name, fallback, std::numeric_limits<double>::lowest(), "a finite number");
}

bool is_used(const Node& node) {
  const auto results = node.results();
  return std::any_of(results.begin(), results.end(), [](const Value* r) { return r->has_uses(); });
}

}  // namespace plumb

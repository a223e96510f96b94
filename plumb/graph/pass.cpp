#include "plumb/graph/pass.h"

#include <memory>

#include "plumb/core/error.h"

namespace plumb {
namespace {

// A function's static, so that registration from other files' initialisers is safe.
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
  auto it = table().find(name);
  if (it != table().end()) return *it->second;
  std::string names;
  for (const auto& [known, pass] : table()) names += (names.empty() ? "" : ", ") + known;
  throw Error(ErrorKind::UnknownName, "no pass '" + std::string(name) + "'", "", "one of: " + names);
}

bool run_pass(const Pass& pass, GraphModule& module, const PassOptions& options, std::vector<std::string>* report,
              bool check) {
  for (const auto& [name, value] : options) {
    bool known = false;
    std::string names;
    for (const PassOption& option : pass.options) {
      known = known || option.name == name;
      names += (names.empty() ? "" : ", ") + option.name;
    }
    if (!known) {
      throw Error(ErrorKind::UnknownName, "pass " + pass.name + " has no option '" + name + "'", "",
                  names.empty() ? "it has no options" : "one of: " + names);
    }
  }
  const uint64_t before = check ? fingerprint(module) : 0;
  const bool changed = pass.run(module, options, report);
  if (check) {
    try {
      module.lint();
    } catch (const Error& e) {
      throw Error(ErrorKind::Internal, "after pass " + pass.name + ": " + e.message(), e.where());
    }
    const bool differs = fingerprint(module) != before;
    if (differs && !changed)
      throw Error(ErrorKind::Internal, "pass " + pass.name + " answered 'unchanged' but the module changed");
    if (!differs && changed)
      throw Error(ErrorKind::Internal, "pass " + pass.name + " answered 'changed' but the module is as before");
  }
  return changed;
}

}  // namespace plumb

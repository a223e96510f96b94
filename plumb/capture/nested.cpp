#include "plumb/capture/nested.h"

#include <algorithm>
#include <map>

#include "plumb/capture/session.h"

namespace plumb {
namespace {

// Returns the frames of a node of an inner graph as seen from outside: its paths count from the module that runs it.
std::shared_ptr<const ModuleStack> below(const std::shared_ptr<const ModuleStack>& outer,
                                         const std::shared_ptr<const ModuleStack>& inner) {
  if (!inner) return outer;
  ModuleStack frames = outer ? *outer : ModuleStack();
  const std::string prefix = frames.empty() ? "" : frames.back().path;
  for (const ModuleFrame& frame : *inner) {
    if (frame.path.empty()) continue;
    frames.push_back({prefix.empty() ? frame.path : prefix + "." + frame.path, frame.type});
  }
  return std::make_shared<const ModuleStack>(std::move(frames));
}

}  // namespace

PausedCapture::PausedCapture() : session_(Session::current()) {
  if (session_) session_->pause();
}

PausedCapture::~PausedCapture() {
  if (session_) session_->resume();
}

std::vector<c10::IValue> run_recorded(GraphModule& module, std::vector<c10::IValue> inputs) {
  Session* session = Session::current();
  if (!session) return module.run(std::move(inputs));
  const size_t begin = session->recorder.records.size();
  const auto outer = session->recorder.modules_now();
  auto outputs = module.run(std::move(inputs));

  std::vector<const Node*> calls;
  for (const Node* node : module.graph().nodes()) {
    if (node->kind() == NodeKind::CallFunction) calls.push_back(node);
  }
  // Calls are recorded in the graph's order; those whose results need no record are passed over.
  std::map<std::shared_ptr<const ModuleStack>, std::shared_ptr<const ModuleStack>> seen;
  auto next = calls.begin();
  for (size_t i = begin; i < session->recorder.records.size(); ++i) {
    Record& record = session->recorder.records[i];
    const auto last = next + std::min<std::ptrdiff_t>(calls.end() - next, 64);
    const auto found = std::find_if(
        next, last, [&](const Node* node) { return node->op().operator_name() == record.op.operator_name(); });
    if (found == last) continue;
    next = found + 1;
    const NodeMeta& meta = (*found)->meta();
    auto [it, fresh] = seen.try_emplace(meta.modules);
    if (fresh) it->second = below(outer, meta.modules);
    record.modules = it->second;
    if (meta.source) record.source = meta.source;
  }
  return outputs;
}

}  // namespace plumb

#include "plumb/transforms/track/scales_graph.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/table.h"
#include "plumb/graph/names.h"
#include "plumb/graph/node_kind.h"

namespace plumb {
namespace {

nlohmann::ordered_json number(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json();
}

nlohmann::ordered_json json_of(const Metrics::Data& d) {
  nlohmann::ordered_json out = {
      {"mean_abs", number(d.mean_abs)}, {"abs_mean", number(d.abs_mean)}, {"std", number(d.std)},
      {"abs_max", number(d.abs_max)},   {"abs_min", number(d.abs_min)},   {"numel", d.numel},
      {"nan_count", d.nan_count},       {"inf_count", d.inf_count},       {"zero_count", d.zero_count}};
  if (d.histogram) {
    // [exponent, count] of the bins that are not empty; exponent -127 holds zeros and subnormals, 128 infinities and
    // NaN.
    auto bins = nlohmann::ordered_json::array();
    for (int i = 0; i < 256; ++i) {
      if (d.histogram->counts[static_cast<size_t>(i)])
        bins.push_back({i - 127, d.histogram->counts[static_cast<size_t>(i)]});
    }
    out["exponents"] = std::move(bins);
  }
  return out;
}

bool same_scale(const Metrics::Data& a, const Metrics::Data& b, double rtol) {
  if (a.mean_abs == b.mean_abs) return true;
  return std::isfinite(a.mean_abs) && std::isfinite(b.mean_abs) &&
         std::fabs(a.mean_abs - b.mean_abs) <= rtol * std::max(std::fabs(a.mean_abs), std::fabs(b.mean_abs));
}

bool same_scale(const Metrics& a, const Metrics& b, double rtol) {
  if (a.bwd.has_value() != b.bwd.has_value()) return false;
  return same_scale(a.fwd, b.fwd, rtol) && (!a.bwd || same_scale(*a.bwd, *b.bwd, rtol));
}

// Returns a copy in which every input knows its place.
std::vector<ScaleNode> with_places(const ScalesGraph& graph) {
  std::vector<ScaleNode> nodes = graph.nodes;
  for (ScaleNode& node : nodes) {
    for (size_t k = node.places.size(); k < node.inputs.size(); ++k) node.places.push_back(k);
  }
  return nodes;
}

// Returns the nodes that are kept, renumbered.
ScalesGraph compact(std::vector<ScaleNode> nodes, const std::vector<bool>& keep) {
  std::vector<size_t> place(nodes.size());
  ScalesGraph result;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (!keep[i]) continue;
    place[i] = result.nodes.size();
    for (size_t& input : nodes[i].inputs) input = place[input];
    result.nodes.push_back(std::move(nodes[i]));
  }
  return result;
}

// Removes nodes for which stand_in(node) returns the node that stands for them (an index), or kNone for none.
constexpr size_t kKeep = SIZE_MAX, kNone = SIZE_MAX - 1;
template <class StandIn>
ScalesGraph prune_to_one(const ScalesGraph& graph, const StandIn& stand_in) {
  std::vector<ScaleNode> nodes = with_places(graph);
  std::vector<bool> keep(nodes.size(), true);
  std::vector<size_t> instead(nodes.size(), kKeep);
  for (size_t i = 0; i < nodes.size(); ++i) {
    // Inputs come earlier, so what stands for them is settled.
    std::vector<size_t> inputs, places;
    for (size_t k = 0; k < nodes[i].inputs.size(); ++k) {
      const size_t input = nodes[i].inputs[k];
      const size_t found = instead[input] == kKeep ? input : instead[input];
      if (found == kNone) continue;
      inputs.push_back(found);
      places.push_back(nodes[i].places[k]);
    }
    nodes[i].inputs = std::move(inputs);
    nodes[i].places = std::move(places);
    if (nodes[i].kind == NodeKind::Output) continue;
    instead[i] = stand_in(nodes, i);
    keep[i] = instead[i] == kKeep;
  }
  return compact(std::move(nodes), keep);
}

std::vector<size_t> float_inputs(const std::vector<ScaleNode>& nodes, size_t i) {
  std::vector<size_t> found;
  for (size_t input : nodes[i].inputs) {
    if (nodes[input].is_float_tensor) found.push_back(input);
  }
  return found;
}

}  // namespace

const ScaleNode* ScalesGraph::find(std::string_view name) const {
  for (const ScaleNode& node : nodes) {
    if (node.name == name) return &node;
  }
  return nullptr;
}

std::string ScalesGraph::to_text() const {
  Table table{{"name", "target", "std", "max", "grad std", "grad max", "inputs"}, {}};
  for (const auto& node : nodes) {
    std::vector<std::string> row = {node.name.substr(0, 40), node.target.substr(0, 40), "", "", "", "", ""};
    if (node.metrics) {
      const auto& [fwd, bwd] = *node.metrics;
      row[2] = short_number(fwd.std), row[3] = short_number(fwd.abs_max);
      if (bwd) row[4] = short_number(bwd->std), row[5] = short_number(bwd->abs_max);
    }
    row[6] = join(node.inputs, [&](size_t i) { return nodes[i].name; });
    table.rows.push_back(std::move(row));
  }
  return plumb::to_text(table);
}

std::string ScalesGraph::to_json() const {
  auto all = nlohmann::ordered_json::array();
  for (const auto& node : nodes) {
    nlohmann::ordered_json out = {
        {"name", node.name}, {"kind", std::string(to_string(node.kind))}, {"target", node.target}};
    auto inputs = nlohmann::ordered_json::array();
    for (size_t i : node.inputs) inputs.push_back(nodes[i].name);
    out["inputs"] = std::move(inputs);
    if (node.result_index) out["result_index"] = node.result_index;
    if (!node.module.empty()) out["module"] = node.module;
    if (!node.source.empty()) out["source"] = node.source;
    if (node.meta) out["sizes"] = node.meta->sizes, out["dtype"] = torch_name(node.meta->dtype);
    out["is_float_tensor"] = node.is_float_tensor;
    if (node.requires_grad) out["requires_grad"] = true;
    if (node.metrics) {
      out["fwd"] = json_of(node.metrics->fwd);
      if (node.metrics->bwd) out["bwd"] = json_of(*node.metrics->bwd);
    }
    all.push_back(std::move(out));
  }
  return nlohmann::ordered_json{{"nodes", std::move(all)}}.dump(1, ' ', false,
                                                                nlohmann::json::error_handler_t::replace);
}

ScalesGraph prune_non_float_tensors(const ScalesGraph& graph) {
  return prune_to_one(graph, [](const std::vector<ScaleNode>& nodes, size_t i) {
    if (nodes[i].is_float_tensor) return kKeep;
    const auto floats = float_inputs(nodes, i);
    return floats.size() == 1 ? floats[0] : kNone;
  });
}

ScalesGraph prune_same_scale_tensors(const ScalesGraph& graph, double rtol) {
  return prune_to_one(graph, [rtol](const std::vector<ScaleNode>& nodes, size_t i) {
    if (!nodes[i].is_float_tensor || !nodes[i].metrics) return kKeep;
    const auto floats = float_inputs(nodes, i);
    if (floats.size() != 1 || !nodes[floats[0]].metrics) return kKeep;
    return same_scale(*nodes[i].metrics, *nodes[floats[0]].metrics, rtol) ? floats[0] : kKeep;
  });
}

ScalesGraph prune_selected_nodes(const ScalesGraph& graph, const std::vector<std::string>& targets) {
  const std::unordered_set<std::string_view> wanted(targets.begin(), targets.end());
  return prune_selected_nodes(graph, [&wanted](const ScaleNode& node) {
    const std::string_view target = node.target;
    const bool operation = node.kind == NodeKind::CallFunction;
    return wanted.count(target) || (operation && wanted.count(target.substr(0, target.find('.'))));
  });
}

ScalesGraph prune_selected_nodes(const ScalesGraph& graph, const std::function<bool(const ScaleNode&)>& selected) {
  if (!selected) {
    throw Error(ErrorKind::InvalidArgument, "prune_selected_nodes: the function is empty", "",
                "give one that selects nodes, or a list of their names");
  }
  std::vector<ScaleNode> nodes = with_places(graph);
  std::vector<bool> keep(nodes.size(), true);
  for (size_t i = 0; i < nodes.size(); ++i) keep[i] = nodes[i].kind == NodeKind::Output || !selected(nodes[i]);
  // A kept node takes what it reaches over removed ones, each once. Every removed node is walked over once for each
  // kept user of the removed part it belongs to.
  std::vector<size_t> seen(nodes.size(), SIZE_MAX), open;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (!keep[i]) continue;
    std::vector<size_t> inputs, places;
    auto take = [&](size_t input, size_t k) {
      inputs.push_back(input);
      places.push_back(nodes[i].places[k]);
    };
    for (size_t k = 0; k < nodes[i].inputs.size(); ++k) {
      const size_t input = nodes[i].inputs[k];
      if (keep[input]) {
        take(input, k);
        continue;
      }
      open.assign(1, input);
      while (!open.empty()) {
        const size_t at = open.back();
        open.pop_back();
        if (seen[at] == i) continue;
        seen[at] = i;
        if (keep[at]) {
          take(at, k);
        } else {
          open.insert(open.end(), graph.nodes[at].inputs.rbegin(), graph.nodes[at].inputs.rend());
        }
      }
    }
    nodes[i].inputs = std::move(inputs);
    nodes[i].places = std::move(places);
  }
  return compact(std::move(nodes), keep);
}

}  // namespace plumb

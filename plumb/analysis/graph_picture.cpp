#include "plumb/analysis/graph_picture.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "plumb/analysis/svg.h"
#include "plumb/graph/describe.h"
#include "plumb/graph/summary.h"

namespace plumb {
namespace {

using svg::number;

constexpr double kRow = 26, kHead = 24, kPad = 7, kIndent = 12, kLane = 7, kTop = 8;
constexpr size_t kNone = SIZE_MAX, kDeepest = 24;

// A row of the picture: a line, or the head of a module's box.
struct Entry {
  const PictureLine* line = nullptr;  // null: a head
  size_t module = kNone;              // the innermost one that holds it; of a head: its own
  std::string title, hint;
  double y = 0;
  double height() const { return line ? kRow : kHead; }
};

struct ModuleBox {
  std::string name, path;
  size_t parent = kNone, depth = 0, head = 0, last = 0;  // entries
};

// From a line to all lines that use what it makes.
struct Wire {
  size_t from = 0;
  std::vector<size_t> to;
  size_t lane = kNone;  // none: all it goes to is the next line
};

struct Drawing {
  std::vector<Entry> entries;
  std::vector<ModuleBox> modules;
  std::vector<Wire> wires;
  double width = 0;  // width of the lines and boxes, without the lanes
  size_t lanes = 0;

  std::vector<size_t> around(size_t entry) const {
    std::vector<size_t> out;
    for (size_t m = entries[entry].module; m != kNone; m = modules[m].parent) out.push_back(m);
    return out;
  }
  // Modules that end between this line and the next.
  size_t closed_after(size_t entry) const {
    if (entry + 1 >= entries.size()) return around(entry).size();
    const auto next = around(entry + 1);
    size_t n = 0;
    for (size_t m : around(entry)) n += std::ranges::find(next, m) == next.end();
    return n;
  }
  double indent(size_t entry) const {
    const Entry& e = entries[entry];
    const size_t depth = e.module == kNone ? 0 : modules[e.module].depth + (e.line ? 1 : 0);
    return kIndent * static_cast<double>(depth);
  }
  double full_width() const { return width + 14 + kLane * static_cast<double>(lanes) + 8; }
  double height() const { return entries.empty() ? 2 * kTop : entries.back().y + kRow + kPad * 3 + kTop; }
};

// "f32[batch, 4]"
std::string meta_text(const std::optional<TensorMeta>& meta) {
  if (!meta) return "?";
  TensorMeta anywhere = *meta;
  anywhere.device = at::kCPU;  // no room for it in a box
  return type_text(anywhere);
}

std::vector<std::string> parts_of(const std::string& path) {
  std::vector<std::string> out;
  for (size_t at = 0; at < path.size();) {
    // Deeper than any model: a file may say anything.
    const size_t end = out.size() + 1 < kDeepest ? std::min(path.find('.', at), path.size()) : path.size();
    out.push_back(path.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

std::string title_of(const Node& node) {
  switch (node.kind()) {
    case NodeKind::Output: return "output";
    case NodeKind::CallFunction: {
      const std::string name(node.op_name());
      return name.starts_with("aten::") ? name.substr(6) : name;
    }
    default: return node.target();
  }
}

const char* edge_of(NodeKind kind) {
  switch (kind) {
    case NodeKind::Placeholder: return "#16a34a";
    case NodeKind::Output: return "#ea580c";
    default: return "#2563eb";
  }
}

// A module's box holds lines that follow each other; if the module is called again it has another box. A module of a
// single line has no box: the line says its name. Returns the entry of each line.
std::vector<size_t> add_entries(Drawing& d, const std::vector<PictureLine>& lines) {
  std::vector<size_t> places, open;
  auto path_of = [&](size_t i) { return i < lines.size() ? lines[i].module : std::string(); };
  for (size_t i = 0; i < lines.size(); ++i) {
    const PictureLine& line = lines[i];
    std::vector<std::string> parts = parts_of(line.module);
    std::string name;
    auto holds = [&](const std::string& path) { return path == line.module || path.starts_with(line.module + "."); };
    const bool alone = !parts.empty() && (i == 0 || !holds(path_of(i - 1))) && !holds(path_of(i + 1));
    if (alone) name = parts.back(), parts.pop_back();
    std::string path;
    size_t depth = 0;
    for (; depth < std::min(parts.size(), open.size()) && d.modules[open[depth]].name == parts[depth]; ++depth) {
    }
    open.resize(depth);
    for (; depth < parts.size(); ++depth) {
      const size_t parent = open.empty() ? kNone : open.back();
      path = parent == kNone ? parts[depth] : d.modules[parent].path + "." + parts[depth];
      open.push_back(d.modules.size());
      d.modules.push_back({parts[depth], path, parent, depth, d.entries.size(), 0});
      d.entries.push_back({nullptr, open.back(), parts[depth], path, 0});
    }
    places.push_back(d.entries.size());
    for (size_t m : open) d.modules[m].last = d.entries.size();
    d.entries.push_back({&line, open.empty() ? kNone : open.back(),
                         name.empty() ? line.title : name + ": " + line.title, line.hint, 0});
  }
  return places;
}

// The shortest first, each in the first lane that is free along its way.
void add_wires(Drawing& d, const std::vector<PictureLine>& lines, const std::vector<size_t>& places) {
  std::map<size_t, std::set<size_t>> uses;
  for (size_t i = 0; i < lines.size(); ++i) {
    for (const size_t from : lines[i].inputs) uses[places[from]].insert(places[i]);
  }
  for (const auto& [from, to] : uses) d.wires.push_back({from, {to.begin(), to.end()}});
  std::vector<Wire*> order;
  for (Wire& w : d.wires) {
    size_t next = w.from + 1;
    while (next < d.entries.size() && !d.entries[next].line) ++next;
    if (w.to.size() > 1 || w.to[0] != next) order.push_back(&w);
  }
  std::ranges::stable_sort(
      order, [](const Wire* a, const Wire* b) { return a->to.back() - a->from < b->to.back() - b->from; });
  std::vector<std::map<size_t, size_t>> lanes;  // where each is taken: from, to
  for (Wire* w : order) {
    const size_t end = w->to.back();
    for (w->lane = 0;; ++w->lane) {
      if (w->lane == lanes.size()) lanes.emplace_back();
      auto& lane = lanes[w->lane];
      const auto next = lane.lower_bound(w->from);
      const bool before = next == lane.begin() || std::prev(next)->second < w->from;
      if (before && (next == lane.end() || next->first > end)) {
        lane.emplace(w->from, end);
        break;
      }
    }
  }
  d.lanes = lanes.size();
}

Drawing drawing_of(const std::vector<PictureLine>& lines) {
  Drawing d;
  add_wires(d, lines, add_entries(d, lines));
  double y = kTop;
  d.width = 300;
  for (size_t i = 0; i < d.entries.size(); ++i) {
    Entry& e = d.entries[i];
    e.y = y;
    y += e.height() + kPad * static_cast<double>(i + 1 < d.entries.size() ? d.closed_after(i) : 0);
    const double text = svg::text_width(e.title, 12) + svg::text_width(e.line ? e.line->detail : "", 11) + 44;
    d.width = std::max(d.width, 2 * d.indent(i) + text);
  }
  return d;
}

// graph.js says the same, for boxes that are folded.
std::string wire_path(const Drawing& d, const Wire& w) {
  const Entry& from = d.entries[w.from];
  auto right = [&](size_t e) { return d.width - d.indent(e) - 4; };
  if (w.lane == kNone) {
    const double x = d.indent(w.to[0]) + 14;
    return "M" + number(x) + " " + number(from.y + kRow - 3) + "V" + number(d.entries[w.to[0]].y + 3);
  }
  const double lane = d.width + 14 + kLane * static_cast<double>(w.lane), start = from.y + kRow / 2;
  std::string path = "M" + number(right(w.from)) + " " + number(start) + "H" + number(lane) + "V" +
                     number(d.entries[w.to.back()].y + kRow / 2);
  for (size_t to : w.to) {
    const double y = d.entries[to].y + kRow / 2;
    path += "M" + number(lane) + " " + number(y) + "H" + number(right(to)) + "m4 -3l-4 3l4 3";
  }
  return path;
}

std::string body_of(const Drawing& d) {
  std::string out;
  for (size_t m = 0; m < d.modules.size(); ++m) {
    const ModuleBox& box = d.modules[m];
    const double x = kIndent * static_cast<double>(box.depth), top = d.entries[box.head].y;
    // Modules that end with it end inside of it.
    size_t inside = 0;
    for (size_t other : d.around(box.last)) inside += d.modules[other].depth > box.depth;
    const double bottom = d.entries[box.last].y + kRow + kPad * static_cast<double>(inside) + 3;
    out += svg::rect(c10::str(R"(class="module" fill="#f8fafc" stroke="#e2e8f0" rx="5" data-module=")", m, '"'), x, top,
                     d.width - 2 * x, bottom - top) +
           "\n";
  }
  for (const Wire& w : d.wires) {
    out += "<path class=\"wire\" fill=\"none\" stroke=\"#94a3b8\" d=\"" + wire_path(d, w) + "\"/>\n";
  }
  for (size_t i = 0; i < d.entries.size(); ++i) {
    const Entry& e = d.entries[i];
    const double x = d.indent(i);
    out += std::string("<g class=\"") + (e.line ? "node" : "module-head") + "\" transform=\"translate(" + number(x) +
           " " + number(e.y) + ")\"><title>" + svg::escaped(e.hint) + "</title>";
    if (!e.line) {
      out += svg::rect(R"(class="hit" fill="none" pointer-events="all")", 0, 0, d.width - 2 * x, kHead) +
             svg::text(8, 16, e.title, {"module-name", "start", 12, true, "#2563eb"}) + "</g>\n";
      continue;
    }
    out +=
        svg::rect("fill=\"" + e.line->ground + "\" stroke=\"#94a3b8\" rx=\"4\"", 4, 3, d.width - 2 * x - 8, kRow - 6) +
        "<path stroke-width=\"3\" stroke=\"" + e.line->edge + "\" d=\"M6 7v12\"/>" + svg::text(14, 17, e.title) +
        svg::text(14 + svg::text_width(e.title, 12) + 10, 17, e.line->detail, {"muted", "start", 11}) + "</g>\n";
  }
  return out;
}

}  // namespace

std::vector<PictureLine> picture_lines(const Graph& graph) {
  std::vector<PictureLine> lines;
  std::unordered_map<const Node*, size_t> places;
  std::set<const Node*> shown;  // parameters
  for (const Node* node : graph.nodes()) {
    if (node->kind() == NodeKind::GetAttr) continue;
    PictureLine line{.title = title_of(*node),
                     .hint = node->describe(),
                     .module = node->meta().module_path(),
                     .where = node->meta().where(),
                     .edge = edge_of(node->kind())};
    if (node->num_results() > 0) line.detail = meta_text(node->result(0)->meta());
    if (node->num_results() > 1) line.detail += " x" + std::to_string(node->num_results());
    if (!line.where.empty()) line.hint += "\n" + line.where;
    std::string own;
    for (const Value* v : node->inputs()) {
      const Node* from = v->producer();
      if (from->kind() != NodeKind::GetAttr) {
        line.inputs.push_back(places.at(from));
      } else if (shown.insert(from).second) {
        const std::string& full = from->target();
        own += (own.empty() ? "" : ", ") + full.substr(full.rfind('.') + 1);
        line.hint += "\n" + full;
      }
    }
    if (!own.empty()) line.detail += "  (" + own + ")";
    places[node] = lines.size();
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string graph_svg(const Graph& graph) {
  const auto lines = picture_lines(graph);
  const Drawing d = drawing_of(lines);
  return svg::picture(d.full_width(), d.height(), body_of(d), true);
}

std::string graph_html(const std::vector<PictureLine>& lines) {
  const Drawing d = drawing_of(lines);
  nlohmann::json data = {{"row", kRow},
                         {"head", kHead},
                         {"pad", kPad},
                         {"indent", kIndent},
                         {"lane", kLane},
                         {"top", kTop},
                         {"width", d.width},
                         {"entries", nlohmann::json::array()},
                         {"modules", nlohmann::json::array()},
                         {"wires", nlohmann::json::array()}};
  auto known = [](size_t i) { return i == kNone ? -1 : static_cast<int64_t>(i); };
  for (const Entry& e : d.entries) {
    data["entries"].push_back(
        {e.line != nullptr, known(e.module), e.hint + "\n" + e.title, e.line ? e.line->where : ""});
  }
  for (const ModuleBox& m : d.modules) data["modules"].push_back({known(m.parent), m.depth, m.head, m.last});
  for (const Wire& w : d.wires) data["wires"].push_back({w.from, w.to, known(w.lane)});
  return "<figure class=\"graph-view\">\n<div class=\"tools\"><input type=\"search\" placeholder=\"operator, module, "
         "shape\" aria-label=\"search\"> <button type=\"button\" class=\"more fold-all\">fold "
         "all</button> <button type=\"button\" class=\"more unfold-all\">unfold all</button> <span "
         "class=\"count\"></span></div>\n<div class=\"graph-scroll\">" +
         svg::picture(d.full_width(), d.height(), body_of(d), false) + "</div>\n" + svg::data_script(data) +
         "</figure>\n";
}

std::string conclusion(const Graph& graph) {
  std::map<std::string, int> operators;
  std::set<std::string> modules;
  int nodes = 0, parameters = 0;
  for (const Node* node : graph.nodes()) {
    parameters += node->kind() == NodeKind::GetAttr;
    if (node->kind() != NodeKind::CallFunction) continue;
    ++nodes, ++operators[std::string(node->op_name())];
    if (!node->meta().module_path().empty()) modules.insert(node->meta().module_path());
  }
  std::string out =
      c10::str(nodes, " operators in ", modules.size(), " modules, ", parameters, " parameters and buffers.");
  const auto most =
      std::ranges::max_element(operators, [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != operators.end()) {
    out += " The one used most is `" + most->first + "`, " + std::to_string(most->second) + " times.";
  }
  return out;
}

std::string graph_dot(const Graph& graph) {
  std::string dot = "digraph plumb {\n  node [shape=box, style=\"rounded\", fontname=monospace, fontsize=10];\n";
  std::unordered_map<const Node*, size_t> index;
  auto quote = [](const std::string& text) {
    std::string out = "\"";
    for (char c : text) out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out + "\"";
  };
  for (const Node* node : graph.nodes()) {
    const std::string id = "n" + std::to_string(index.size());
    std::string label = title_of(*node);
    if (node->num_results() > 0) label += " " + meta_text(node->result(0)->meta());
    dot += "  " + id + " [label=" + quote(label) + ", color=\"" + edge_of(node->kind()) +
           "\", tooltip=" + quote(node->meta().where()) + "];\n";
    for (const Value* v : node->inputs()) {
      dot += c10::str("  n", index.at(v->producer()), " -> ", id, " [label=", quote(v->name()), ", fontsize=8];\n");
    }
    index.emplace(node, index.size());
  }
  return dot + "}\n";
}

}  // namespace plumb

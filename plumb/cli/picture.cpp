#include "plumb/cli/picture.h"

#include <algorithm>
#include <cstdio>

#include "plumb/analysis/svg.h"
#include "plumb/cli/common.h"

namespace plumb::cli {
namespace {

constexpr int kHeight = 34, kLayerGap = 34, kGap = 14, kMargin = 20;

struct Box {
  const Node* node = nullptr;
  std::string title, detail, hint;
  std::vector<size_t> inputs;  // boxes, each once
  size_t layer = 0;
  double x = 0, width = 0;  // left edge
  double middle() const { return x + width / 2; }
  double top() const { return kMargin + static_cast<double>(layer) * (kHeight + kLayerGap); }
};

const char* color(NodeKind kind) {
  switch (kind) {
    case NodeKind::Placeholder: return "#cfe8cf";
    case NodeKind::GetAttr: return "#e6e6e6";
    case NodeKind::CallModule: return "#e3d4f0";
    case NodeKind::Output: return "#f6d5c3";
    default: return "#d3e3f5";
  }
}

std::string title_of(const Node& node) {
  switch (node.kind()) {
    case NodeKind::Output: return "output";
    case NodeKind::CallFunction: return std::string(node.op_name());
    default: return node.target();
  }
}

std::vector<Box> boxes_of(const Graph& graph) {
  std::vector<Box> boxes;
  std::unordered_map<const Node*, size_t> index;
  for (const Node* node : graph.nodes()) {
    Box box;
    box.node = node;
    box.title = title_of(*node);
    if (node->num_results() > 0) box.detail = type_text(node->result(0)->meta());
    if (node->num_results() > 1) box.detail += " x" + std::to_string(node->num_results());
    box.hint = node->describe() + (node->meta().where().empty() ? "" : "\n" + node->meta().where());
    for (const Value* v : node->inputs()) {
      const size_t from = index.at(v->producer());
      if (std::find(box.inputs.begin(), box.inputs.end(), from) == box.inputs.end()) box.inputs.push_back(from);
      box.layer = std::max(box.layer, boxes[from].layer + 1);
    }
    box.width = 7.0 * static_cast<double>(std::max(box.title.size(), box.detail.size())) + 16;
    index[node] = boxes.size();
    boxes.push_back(std::move(box));
  }
  // What depends on nothing stands right above its first user; nodes come after what they use, so from the last.
  std::vector<size_t> below(boxes.size(), 0);
  for (size_t i = boxes.size(); i-- > 0;) {
    Box& box = boxes[i];
    const bool input = box.node->kind() == NodeKind::Placeholder;
    if (box.inputs.empty() && !input && below[i] > 0) box.layer = below[i] - 1;
    for (size_t from : box.inputs) below[from] = below[from] == 0 ? box.layer : std::min(below[from], box.layer);
  }
  return boxes;
}

// Puts the boxes of each layer side by side, ordered by where what they use stands. Answers the picture's width.
double place(std::vector<Box>& boxes) {
  std::vector<std::vector<size_t>> layers;
  for (size_t i = 0; i < boxes.size(); ++i) {
    layers.resize(std::max(layers.size(), boxes[i].layer + 1));
    layers[boxes[i].layer].push_back(i);
  }
  std::vector<double> widths, wish(boxes.size(), 0);
  double widest = 0;
  for (const auto& layer : layers) {
    double width = 0;
    for (size_t i : layer) width += boxes[i].width + kGap;
    widths.push_back(width - kGap);
    widest = std::max(widest, widths.back());
  }
  for (size_t l = 0; l < layers.size(); ++l) {
    for (size_t i : layers[l]) {
      for (size_t from : boxes[i].inputs) wish[i] += boxes[from].middle() / static_cast<double>(boxes[i].inputs.size());
      if (boxes[i].inputs.empty()) wish[i] = widest;  // parameters to the right
    }
    std::stable_sort(layers[l].begin(), layers[l].end(), [&](size_t a, size_t b) { return wish[a] < wish[b]; });
    double x = kMargin + (widest - widths[l]) / 2;
    for (size_t i : layers[l]) {
      boxes[i].x = x;
      x += boxes[i].width + kGap;
    }
  }
  return widest + 2 * kMargin;
}

}  // namespace

std::string to_svg(const Graph& graph) {
  std::vector<Box> boxes = boxes_of(graph);
  const double width = place(boxes);
  double height = 2 * kMargin;
  for (const Box& box : boxes) height = std::max(height, box.top() + kHeight + kMargin);
  char line[512];
  std::snprintf(
      line, sizeof line,
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
      "font-family=\"monospace\" font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      width, height, width, height);
  std::string svg = line;
  for (const Box& box : boxes) {
    for (size_t i : box.inputs) {
      const Box& from = boxes[i];
      const double y0 = from.top() + kHeight, y1 = box.top(), bend = (y1 - y0) / 2;
      std::snprintf(line, sizeof line,
                    "<path d=\"M%.1f %.1fC%.1f %.1f %.1f %.1f %.1f %.1f\" fill=\"none\" stroke=\"#888\"/>\n",
                    from.middle(), y0, from.middle(), y0 + bend, box.middle(), y1 - bend, box.middle(), y1);
      svg += line;
    }
  }
  for (const Box& box : boxes) {
    std::snprintf(line, sizeof line,
                  "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" rx=\"5\" fill=\"%s\" stroke=\"#667\"/>",
                  box.x, box.top(), box.width, kHeight, color(box.node->kind()));
    svg += "<g><title>" + svg::escaped(box.hint) + "</title>" + line;
    std::snprintf(line, sizeof line, "<text text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">", box.middle(),
                  box.top() + 14);
    svg += line + svg::escaped(box.title) + "</text>";
    std::snprintf(line, sizeof line, "<text text-anchor=\"middle\" fill=\"#555\" x=\"%.1f\" y=\"%.1f\">", box.middle(),
                  box.top() + 28);
    svg += line + svg::escaped(box.detail) + "</text></g>\n";
  }
  return svg + "</svg>\n";
}

std::string to_dot(const Graph& graph) {
  std::string dot = "digraph plumb {\n  node [shape=box, style=\"rounded,filled\", fontname=monospace, fontsize=10];\n";
  std::unordered_map<const Node*, size_t> index;
  auto quote = [](const std::string& text) {
    std::string out = "\"";
    for (char c : text) out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out + "\"";
  };
  for (const Node* node : graph.nodes()) {
    const std::string id = "n" + std::to_string(index.size());
    std::string label = title_of(*node);
    if (node->num_results() > 0) label += " " + type_text(node->result(0)->meta());
    dot += "  " + id + " [label=" + quote(label) + ", fillcolor=\"" + color(node->kind()) +
           "\", tooltip=" + quote(node->meta().where()) + "];\n";
    for (const Value* v : node->inputs()) {
      dot += "  n" + std::to_string(index.at(v->producer())) + " -> " + id + " [label=" + quote(v->name()) +
             ", fontsize=8];\n";
    }
    index.emplace(node, index.size());
  }
  return dot + "}\n";
}

}  // namespace plumb::cli

// plumb show: a graph as text, table, picture or Graphviz.
#include <CLI/CLI.hpp>

#include "plumb/analysis/graph_picture.h"
#include "plumb/analysis/html_report.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/graph/node_kind.h"

namespace plumb::cli {
namespace {

struct ShowArguments {
  std::string file, as = "text", out, html;
  bool json = false;
};

struct Row {
  std::string node, kind, op, shape, module, source;
  std::vector<std::string> inputs;
};

std::vector<Row> rows_of(const Graph& graph) {
  std::vector<Row> rows;
  for (const Node* node : graph.nodes()) {
    Row row{"", std::string(to_string(node->kind())), node->target(), "", node->meta().module_path(), "", {}};
    for (const Value* v : node->results()) {
      row.node += (row.node.empty() ? "" : ", ") + v->name();
      const std::string shape = v->is_tensor() ? type_text(v->meta()) : v->type() == ValueType::Int ? "int" : "scalar";
      row.shape += (row.shape.empty() ? "" : ", ") + shape;
    }
    if (node->kind() == NodeKind::Output) row.node = row.op = "output";
    if (node->meta().source) {
      const std::string& file = node->meta().source->file;
      row.source = file.substr(file.rfind('/') + 1) + ":" + std::to_string(node->meta().source->line);
    }
    for (const Value* v : node->inputs()) row.inputs.push_back(v->name());
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string table(const Graph& graph) {
  std::vector<std::vector<std::string>> cells = {{"node", "op", "shape", "module", "source"}};
  for (const Row& r : rows_of(graph)) {
    cells.push_back({r.node, r.kind == "get_attr" ? "get_attr " + r.op : r.op, r.shape, r.module, r.source});
  }
  return columns(cells);
}

std::string json(const Graph& graph) {
  auto nodes = nlohmann::json::array();
  for (const Row& r : rows_of(graph)) {
    nodes.push_back({{"node", r.node},
                     {"kind", r.kind},
                     {"op", r.op},
                     {"shape", r.shape},
                     {"module", r.module},
                     {"source", r.source},
                     {"inputs", r.inputs}});
  }
  return nlohmann::json{{"nodes", nodes}}.dump(1) + "\n";
}

void show(const ShowArguments& o) {
  check_writable("-o", o.out);
  check_writable("--html", o.html);
  Progress progress(2, o.json);
  progress.next("reading " + o.file);
  const Loaded loaded = load(o.file);
  progress.next("showing " + o.file);
  const Graph& graph = loaded.module().graph();
  if (!o.html.empty()) {
    HtmlReport page("Graph of " + o.file);
    page.section("Graph")
        .prose(conclusion(graph) +
               " A click on a module folds it; the pointer shows where a line's values come from and go.")
        .add(graph);
    write_text(page.html(), o.html);
  }
  const std::string text = o.json              ? json(graph)
                           : o.as == "table"   ? table(graph)
                           : o.as == "picture" ? graph_svg(graph)
                           : o.as == "dot"     ? graph_dot(graph)
                                               : to_string(graph);
  progress.finish();
  // The page alone, unless the rest is asked for as well.
  if (o.html.empty() || o.json || !o.out.empty()) write_text(text, o.out);
  say_wrote(progress, o.html);
  say_wrote(progress, o.out);
}

}  // namespace

void add_show(CLI::App& app) {
  auto o = std::make_shared<ShowArguments>();
  CLI::App* sub = app.add_subcommand("show", "Shows a graph as text, table or picture");
  sub->add_option("FILE", o->file, "A .pt2 file or a graph's text")->required();
  sub->add_option("--as", o->as, "text, table, picture (SVG) or dot (Graphviz)")
      ->check(CLI::IsMember({"text", "table", "picture", "dot"}));
  sub->add_option("-o,--out", o->out, "Write to a file instead of stdout");
  sub->add_option("--html", o->html, "Write a page: the graph by module, to fold and to search");
  sub->add_flag("--json", o->json, "The table as JSON");
  sub->footer("Example:\n  plumb show model.pt2 --as picture -o model.svg");
  sub->callback([o] { show(*o); });
}

}  // namespace plumb::cli

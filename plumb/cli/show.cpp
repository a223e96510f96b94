// plumb show: a graph as text, table, picture or Graphviz.
#include <CLI/CLI.hpp>

#include "plumb/analysis/graph_picture.h"
#include "plumb/analysis/html_report.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/core/join.h"
#include "plumb/graph/node_kind.h"

namespace plumb::cli {
namespace {

struct ShowArguments {
  std::string file, as = "text", out, html;
  bool json = false;
};

std::string shape_of(const Value* value) {
  return value->is_tensor() ? type_text(value->meta()) : value->type() == ValueType::Int ? "int" : "scalar";
}

// A node a row: the keys of --json.
nlohmann::json rows_of(const Graph& graph) {
  auto rows = nlohmann::json::array();
  for (const Node* node : graph.nodes()) {
    std::string source;
    if (const auto& at = node->meta().source)
      source = c10::str(at->file.substr(at->file.rfind('/') + 1), ":", at->line);
    std::vector<std::string> inputs;
    for (const Value* v : node->inputs()) inputs.push_back(v->name());
    const bool output = node->kind() == NodeKind::Output;
    rows.push_back({{"node", output ? "output" : join(node->results(), &Value::name)},
                    {"kind", to_string(node->kind())},
                    {"op", output ? "output" : node->target()},
                    {"shape", join(node->results(), shape_of)},
                    {"module", node->meta().module_path()},
                    {"source", source},
                    {"inputs", inputs}});
  }
  return rows;
}

std::string table(const Graph& graph) {
  Table cells{{"node", "op", "shape", "module", "source"}, {}};
  for (const auto& row : rows_of(graph)) {
    std::vector<std::string> line;
    for (const std::string& key : cells.header) line.push_back(row[key]);
    if (row["kind"] == "get_attr") line[1] = "get_attr " + line[1];
    cells.rows.push_back(std::move(line));
  }
  return columns(std::move(cells));
}

void show(const ShowArguments& o) {
  check_writable({{"-o", o.out}, {"--html", o.html}}, {o.file});
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
  const std::string text = o.json              ? nlohmann::json{{"nodes", rows_of(graph)}}.dump(1) + "\n"
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

#include "plumb/graph/passes/functionalise.h"

#include <algorithm>
#include <string_view>

#include "plumb/graph/aliases.h"
#include "plumb/graph/copy_node.h"
#include "plumb/graph/node_set.h"
#include "plumb/graph/pass.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

using Memory = Aliases::Memory;

constexpr size_t kMaxViewDepth = 8;  // a view is made again from the root: bounds the work for one use
// A pure write through a view copies the whole memory: a table filled element by element is better filled in place.
constexpr uint32_t kMaxScatters = 64;
constexpr size_t kMaxViewResults = 16;  // largest number of results of a view (unbind, split, chunk)

// Views that can be made again on other memory. (reshape, contiguous and the like may copy: not among them.)
bool is_plain_view(const Node& node) { return node.facts().plain_view && node.num_results() <= kMaxViewResults; }

// Returns where a narrow begins and ends, counted from the beginning; nullopt if its arguments or the type of its input
// do not say so.
std::optional<std::pair<int64_t, int64_t>> narrowed(const Node& view) {
  const auto& meta = view.input(0)->meta();
  const Arg &start_arg = view.arg("start"), &length_arg = view.arg("length"), &dim_arg = view.arg("dim");
  for (const Arg* arg : {&start_arg, &length_arg, &dim_arg}) {
    if (!arg->is_constant() || !arg->constant().isInt()) return std::nullopt;
  }
  int64_t start = start_arg.constant().toInt(), dim = dim_arg.constant().toInt(), end = 0;
  if (start < 0) {
    if (!meta || !meta->symbols.empty()) return std::nullopt;
    const auto rank = static_cast<int64_t>(meta->sizes.size());
    if (dim < 0) dim += rank;
    if (dim < 0 || dim >= rank) return std::nullopt;
    start += meta->sizes[static_cast<size_t>(dim)];
  }
  if (start < 0 || __builtin_add_overflow(start, length_arg.constant().toInt(), &end)) return std::nullopt;
  return std::pair(start, end);
}

bool has_scatter(const Node& view) {
  if (view.target() == "aten::narrow") return narrowed(view).has_value();
  return view.target() == "aten::select.int" || view.target() == "aten::slice.Tensor" ||
         view.target() == "aten::diagonal";
}

// Returns the base with `piece` where the view looks: the inverse of the view.
Node* scatter(Graph& g, const Node& view, Value* base, Value* piece) {
  if (view.target() == "aten::select.int")
    return g.call("aten::select_scatter", {base, piece, view.arg("dim"), view.arg("index")});
  if (view.target() == "aten::diagonal") {
    return g.call("aten::diagonal_scatter", {base, piece, view.arg("offset"), view.arg("dim1"), view.arg("dim2")});
  }
  if (view.target() == "aten::narrow") {
    const auto [start, end] = narrowed(view).value();
    return g.call("aten::slice_scatter", {base, piece, view.arg("dim"), start, end});
  }
  return g.call("aten::slice_scatter",
                {base, piece, view.arg("dim"), view.arg("start"), view.arg("end"), view.arg("step")});
}

// Returns whether it takes what `in_place` takes, and writes to none of it. (dropout_ calls its input "self".)
bool takes_the_same(const c10::FunctionSchema& pure, const c10::FunctionSchema& in_place) {
  const auto &a = in_place.arguments(), &b = pure.arguments();
  return pure.returns().size() == 1 &&
         std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const auto& x, const auto& y) {
           return (x.name() == y.name() || &x == &a[0]) && *x.type() == *y.type() && y.alias_info() == nullptr;
         });
}

std::optional<c10::OperatorHandle> pure_twin(const Node& node, bool inexact) {
  if (node.is_random() && !inexact) return std::nullopt;
  const std::string_view in_place = node.op_name();
  if (!in_place.ends_with('_') || !operator_facts(in_place.substr(0, in_place.size() - 1)).in_place_alike)
    return std::nullopt;
  std::string name = node.target();
  name.erase(in_place.size() - 1, 1);
  // Operators that also begin with a number (2 ** x) say in the overload what is a tensor: pow_.Scalar,
  // pow.Tensor_Scalar.
  std::string other = name;
  if (const size_t dot = other.find('.'); dot != std::string::npos) other.insert(dot + 1, "Tensor_");
  for (const std::string& target : {name, other}) {
    auto op = try_find_operator(target);
    if (op && takes_the_same(op->schema(), node.schema())) return op;
  }
  return std::nullopt;
}

// Returns whether a pure operator gives its result the memory layout of its first argument, as operators of each
// element do for dense memory. (masked_fill is tagged as one and copies to rows.)
bool keeps_layout(const c10::OperatorHandle& pure, const TensorMeta& first) {
  return pure.hasTag(at::Tag::pointwise) && pure.schema().name() != "aten::masked_fill" && memory_order(first);
}

class Functionaliser {
 public:
  Functionaliser(Graph& graph, const State* state, std::vector<std::string>* report, bool inexact)
      : graph_(graph), aliases_(graph, state), flow_(graph, aliases_, state), report_(report), inexact_(inexact) {}

  bool run() {
    survey();
    if (std::none_of(areas_.begin(), areas_.end(), [](const auto& e) { return e.second.supported; })) return false;
    for (Node* node = graph_.first(); node; node = node->next()) visit(node);
    for (auto it = dead_.rbegin(); it != dead_.rend(); ++it) graph_.erase(*it);
    for (auto& [value, name] : names_) value->rename(name);
    erase_unused_views();
    return true;
  }

 private:
  // One written memory of the graph's own.
  struct Area {
    bool supported = true;
    const Node *first_write = nullptr, *last_write = nullptr;
    Value* root = nullptr;       // the one value that made the memory
    Value* current = nullptr;    // what the root is now
    uint32_t version = 0;        // writes turned so far
    uint32_t scatters = 0;       // writes through views
    std::vector<Node*> views;    // made before the last write
    std::vector<Value*> values;  // surveyed so far
  };
  // How a value comes from another one of its memory.
  struct Origin {
    Node* view = nullptr;     // null: the very same tensor (result of a write)
    Value* parent = nullptr;  // null: the root
  };

  Area* area(const Value* v) {
    if (!v->is_tensor()) return nullptr;
    // Values made by this pass belong to no area: only the originals are looked up.
    auto it = area_of_.find(v);
    return it == area_of_.end() ? nullptr : it->second;
  }

  void refuse(Area& a, const Node& node, const std::string& why) {
    if (a.supported && report_) report_->push_back(node.describe() + " stays as it is: " + why);
    a.supported = false;
  }

  // --- which memories can be turned ---
  void survey() {
    for (const Node* node : graph_.nodes()) {
      for (Memory m : aliases_.written(node)) {
        Area& a = areas_[m];
        if (!a.first_write) a.first_write = node;
        a.last_write = aliases_.last_write(m);
        if (aliases_.is_external(m)) refuse(a, *node, "it writes an input, parameter or buffer");
      }
    }
    for (Node* node = graph_.first(); node; node = node->next()) survey_node(node);
  }

  void survey_node(Node* node) {
    for (Value* r : node->results()) {
      auto found = areas_.find(aliases_.memory(r));
      if (found == areas_.end()) continue;
      Area& a = found->second;
      area_of_[r] = &a;
      if (!a.supported || a.last_write->is_before(node)) continue;  // nothing is written after it was made
      survey_value(a, node, r);
      a.values.push_back(r);
    }
    for (Memory m : aliases_.written(node)) {
      Area& a = areas_.at(m);
      if (a.supported) survey_write(a, node);
    }
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      Value* v = node->input(i);
      if (area(v)) last_user_[representative(v)] = node;
    }
  }

  void survey_value(Area& a, Node* node, Value* r) {
    Value* parent = nullptr;
    size_t inside = 0;
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      if (area(node->input(i)) == &a) parent = node->input(i), ++inside;
    }
    if (!a.root || begins_anew(a, node, r)) {
      a.root = a.current = r;
      a.views.clear();
      return;
    }
    if (inside == 0 || !node->result_aliases_input())
      return refuse(a, *node, "its memory may be that of %" + a.root->name() + " or not");
    if (!aliases_.written(node).empty()) {
      // A write's result is the tensor it wrote, its first argument; survey_write looks at the rest.
      if (!node->is_call() || !node->arg(0).is_value() || area(node->arg(0).value()) != &a) {
        return refuse(a, *node, "its result shares memory in a way that is not followed");
      }
      origins_[r] = {nullptr, node->arg(0).value()};
      return;
    }
    if (inside != 1 || !is_plain_view(*node) || node->input(0) != parent) {
      return refuse(a, *node, "its result may share the memory or not");
    }
    if (flow_.may_require_grad(parent) && !node->meta().grad_enabled)
      return refuse(a, *node, "a view made without gradients");
    origins_[r] = {node, parent};
    if (path(r).size() > kMaxViewDepth) return refuse(a, *node, "views of views too deep");
    if (r->result_index() == 0) a.views.push_back(node);
  }

  // Returns whether only `r` sees what is written: `node`, which may be a view or not (a flatten), is the last to use
  // any older value of this memory.
  bool begins_anew(const Area& a, const Node* node, const Value* r) const {
    if (!node->is_before(a.first_write) || is_plain_view(*node) || r->result_index() != 0) return false;
    const auto is_used_later = [&](const Value* v) {
      return std::any_of(v->uses().begin(), v->uses().end(), [&](const Use& use) { return node->is_before(use.user); });
    };
    return std::none_of(a.values.begin(), a.values.end(), is_used_later);
  }

  void survey_write(Area& a, Node* node) {
    if (!node->is_call() || aliases_.written(node).size() != 1)
      return refuse(a, *node, "it writes in a way that is not followed");
    const auto pure = pure_twin(*node, inexact_);
    const bool copy = node->target() == "aten::copy_";
    if (!copy && !pure) return refuse(a, *node, "it has no pure form with the same bits");
    Value* target = node->arg(0).is_value() ? node->arg(0).value() : nullptr;
    const auto written = node->written_inputs();
    if (!target || written.size() != 1 || written[0] != target || !a.root) {
      return refuse(a, *node, "it writes in a way that is not followed");
    }
    Value* rep = representative(target);
    if (rep != a.root && ++a.scatters > kMaxScatters)
      return refuse(a, *node, "the memory is written through too many views");
    for (const Node* view : path(rep)) {
      if (!has_scatter(*view))
        return refuse(a, *node, "it writes through " + view->describe() + ", which has no inverse");
    }
    if (!a.root->meta() || !rep->meta()) return refuse(a, *node, "the types of its values are not known");
    const auto views = path(rep);
    const bool scatters =
        std::any_of(views.begin(), views.end(), [](const Node* v) { return !v->is_op("aten::diagonal"); });
    if (at::isComplexType(rep->meta()->dtype) && node->meta().grad_enabled &&
        (scatters || (copy && rep == a.root && flow_.may_require_grad(rep)))) {
      return refuse(a, *node, "torch has no gradient of slice_scatter and select_scatter for complex values");
    }
    const bool whole = rep == a.root && pure && keeps_layout(*pure, *rep->meta());
    if (!a.root->meta()->is_contiguous() && !whole) return refuse(a, *node, "it writes memory that is not contiguous");
    if (!node->meta().grad_enabled && flow_.may_require_grad(target)) {
      return refuse(a, *node, "it writes without gradients what has some");
    }
    copy ? survey_copy(a, node, rep) : survey_types(a, node, rep);
  }

  // The pure form's dtype is the written tensor's only if no other argument promotes it.
  void survey_types(Area& a, Node* node, const Value* rep) {
    const auto& arguments = node->schema().arguments();
    for (size_t i = 1; i < node->args().size(); ++i) {
      const std::string& name = arguments[i].name();
      const bool index = name == "mask" || name == "index" || name == "indices";
      Arg::List one{node->arg(i)};
      const Arg::List& list = node->arg(i).is_list() ? node->arg(i).list() : one;
      for (const Arg& e : list) {
        if (!e.is_value() || !e.value()->is_tensor() || index) continue;
        if (!e.value()->meta() || e.value()->meta()->dtype != rep->meta()->dtype) {
          return refuse(a, *node, "%" + e.value()->name() + " is of another dtype");
        }
      }
    }
  }

  void survey_copy(Area& a, Node* node, const Value* rep) {
    const Value* source = node->arg("src").value();
    if (!source || !source->meta()) return refuse(a, *node, "the type of what it copies is not known");
    const TensorMeta &from = *source->meta(), &to = *rep->meta();
    if (from.device != to.device) return refuse(a, *node, "it copies from another device");
    if (!from.symbols.empty() || !to.symbols.empty())
      return refuse(a, *node, "it copies between sizes that may change");
    const bool cast = from.dtype != to.dtype, spread = from.sizes != to.sizes;
    if (cast && spread) return refuse(a, *node, "it casts and broadcasts at once");
    if (rep == a.root && to.sizes.empty() && flow_.may_require_grad(rep))
      return refuse(a, *node, "it overwrites a scalar with a history");
  }

  // --- following values ---
  // The value itself, for results of writes the value that was written.
  Value* representative(Value* v) {
    auto it = reps_.find(v);
    if (it != reps_.end()) return it->second;
    auto origin = origins_.find(v);
    // Parents were surveyed before their children: their entry is there, or they are their own.
    return reps_[v] = origin != origins_.end() && !origin->second.view ? representative(origin->second.parent) : v;
  }

  // Returns the views from the root to the value, in order. Bounded: survey refuses deep ones.
  std::vector<Node*> path(Value* v) {
    std::vector<Node*> views;
    for (v = representative(v); views.size() <= kMaxViewDepth;) {
      auto it = origins_.find(v);
      if (it == origins_.end()) break;
      views.push_back(it->second.view);
      v = representative(it->second.parent);
    }
    std::reverse(views.begin(), views.end());
    return views;
  }

  // --- rewriting ---
  void visit(Node* node) {
    if (made_.contains(node)) return;
    const bool is_write = !aliases_.written(node).empty();
    const size_t first = is_write && turns(node) ? 1 : 0;  // a write's own target is looked at in turn()
    for (size_t i = first; i < node->num_inputs(); ++i) {
      Value* v = node->input(i);
      Area* a = area(v);
      if (!a || !a->supported || a->version == 0) continue;
      if (Value* now = current(*a, v, node); now != v) node->set_input(i, now);
    }
    for (Value* r : node->results()) {
      if (Area* a = area(r); a && a->supported && r != a->root) made_at_[r] = {r, a->version};
    }
    if (first) turn(node);
  }

  bool turns(const Node* node) {
    auto it = areas_.find(aliases_.written(node)[0]);
    return it->second.supported;
  }

  // Returns the value that `v` is now: the root's newest value, or its view of it, made at `use` if there is no fresh
  // one.
  Value* current(Area& a, Value* v, Node* use) {
    Value* rep = representative(v);
    if (rep == a.root) return a.current;
    auto it = made_at_.find(rep);
    if (it != made_at_.end() && it->second.second == a.version) return it->second.first;
    if (origins_.find(rep) == origins_.end()) return v;  // made after the last write
    std::vector<Value*> chain = make_views(a, rep, use);
    made_at_[rep] = {chain.back(), a.version};
    return chain.back();
  }

  // Returns the path of views again, on the root's newest value; the values from the root to `rep`.
  std::vector<Value*> make_views(Area& a, Value* rep, Node* before) {
    std::vector<std::pair<Node*, size_t>> steps;
    for (Value* v = rep; v != a.root;) {
      const Origin& origin = origins_.at(v);
      steps.emplace_back(origin.view, v->result_index());
      v = representative(origin.parent);
    }
    auto here = graph_.inserting_before(before);
    std::vector<Value*> chain{a.current};
    for (auto it = steps.rbegin(); it != steps.rend(); ++it) {
      const Node& view = *it->first;
      Node* again = copy_node(graph_, view, [&](Value* v) { return v == view.input(0) ? chain.back() : v; });
      made_.insert(again);
      views_.push_back(again);
      chain.push_back(again->result(it->second));
    }
    return chain;
  }

  Value* adopt(Node* made, const Node& like, const std::optional<TensorMeta>& type) {
    made->meta() = like.meta();
    made->result()->set_meta(type);
    made_.insert(made);
    return made->result();
  }

  // The write becomes a pure operator, and the root a new value with its result in place.
  void turn(Node* node) {
    Value* target = node->arg(0).value();
    Area& a = *area(target);
    Value* rep = representative(target);
    const std::vector<Node*> views = path(rep);
    std::vector<Value*> chain = make_views(a, rep, node);
    auto here = graph_.inserting_before(node);
    Value* piece = nullptr;
    if (node->target() == "aten::copy_") {
      piece = copied(a, node, chain.back(), rep);
    } else {
      std::vector<Arg> args(node->args().begin(), node->args().end());
      args[0] = chain.back();
      piece = adopt(graph_.call(*pure_twin(*node, inexact_), std::move(args)), *node, rep->meta());
      names_.emplace_back(piece, node->result()->name());
    }
    for (size_t i = views.size(); i-- > 0;) {
      piece = adopt(scatter(graph_, *views[i], chain[i], piece), *node, chain[i]->meta());
    }
    a.current = piece;
    ++a.version;
    dead_.push_back(node);
    // Eager makes the written view's history anew at the write, any other view's where it is used next: the order in
    // which gradients are summed depends on it.
    if (rep != a.root && last_user_.at(rep) != node) current(a, rep, node);
  }

  // Returns what copy_ leaves in its target: cast or broadcast, and new memory if nothing scatters it.
  Value* copied(Area& a, Node* node, Value* target, const Value* rep) {
    Value* source = node->arg("src").value();
    const TensorMeta from = *source->meta(), to = *rep->meta();
    if (from.dtype != to.dtype) {
      source = adopt(graph_.call("aten::to.dtype", {source, static_cast<int64_t>(to.dtype)}), *node, std::nullopt);
    }
    if (from.sizes != to.sizes) {
      source = adopt(graph_.call("aten::expand", {source, c10::IValue(to.sizes)}), *node, std::nullopt);
    }
    if (rep != a.root) return source;
    if (!flow_.may_require_grad(rep)) {
      Node* twin = graph_.call("aten::clone", {source, static_cast<int64_t>(at::MemoryFormat::Contiguous)});
      return adopt(twin, *node, to);
    }
    // Gives the overwritten value's history zeros, as copy_ does.
    return adopt(graph_.call("aten::slice_scatter", {target, source}), *node, to);
  }

  void erase_unused_views() {
    std::vector<Node*> views;
    for (auto& [m, a] : areas_) {
      if (a.supported) views.insert(views.end(), a.views.begin(), a.views.end());
    }
    views.insert(views.end(), views_.begin(), views_.end());
    std::sort(views.begin(), views.end(), [](const Node* x, const Node* y) { return x != y && y->is_before(x); });
    for (Node* node : views) {
      if (!is_used(*node)) graph_.erase(node);
    }
  }

  Graph& graph_;
  Aliases aliases_;
  GradientFlow flow_;
  std::vector<std::string>* report_;
  bool inexact_;
  std::unordered_map<Memory, Area> areas_;
  std::unordered_map<const Value*, Area*> area_of_;
  std::unordered_map<const Value*, Origin> origins_;
  std::unordered_map<const Value*, Value*> reps_;
  std::unordered_map<const Value*, const Node*> last_user_;
  std::unordered_map<const Value*, std::pair<Value*, uint32_t>> made_at_;
  NodeSet made_;
  std::vector<Node*> views_, dead_;
  std::vector<std::pair<Value*, std::string>> names_;
};

const RegisterPass functionalise_pass({
    "functionalise",
    "Turns in-place operators and writes through views into pure ones where nothing else sees the memory.",
    {},
    [](GraphModule& module, const PassOptions&, std::vector<std::string>* report) {
      return functionalise(module, report);
    },
});

}  // namespace

bool functionalise(Graph& graph, const State* state, std::vector<std::string>* report, bool inexact) {
  bool changed = false;
  // A rewritten write may have been the reason why another value carries a gradient: repeat until nothing changes.
  while (true) {
    std::vector<std::string> notes;
    if (Functionaliser(graph, state, report ? &notes : nullptr, inexact).run()) {
      changed = true;
      continue;
    }
    if (report) report->insert(report->end(), notes.begin(), notes.end());
    return changed;
  }
}

bool functionalise(GraphModule& module, std::vector<std::string>* report, bool inexact) {
  return functionalise(module.graph(), &module.state(), report, inexact);
}

}  // namespace plumb

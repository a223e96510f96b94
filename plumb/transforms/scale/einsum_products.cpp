#include "plumb/transforms/scale/einsum_products.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plumb/operators/einsum_labels.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

using Labels = std::vector<std::string>;

bool stands_in(const Labels& labels, const std::string& label) {
  return std::ranges::find(labels, label) != labels.end();
}
Labels joined(Labels labels, const Labels& more) {
  labels.insert(labels.end(), more.begin(), more.end());
  return labels;
}

// Labels of a product: (batch, rows, summed) times (batch, summed, columns).
struct Product {
  Labels batch, rows, summed, columns;

  // Dimensions have to be joined or made, so that rows, sums and columns have one each.
  bool reshapes() const { return rows.size() != 1 || summed.size() != 1 || columns.size() != 1; }
};

// Returns nothing for an equation that takes a diagonal, sums over what one operand has alone, or sums over nothing.
std::optional<Product> product_of(const EinsumLabels& labels) {
  if (labels.operands.size() != 2) return std::nullopt;
  const Labels &left = labels.operands[0], &right = labels.operands[1];
  Product product;
  for (const std::string& label : labels.result) {
    const bool of_left = stands_in(left, label), of_right = stands_in(right, label);
    (of_left && of_right ? product.batch : of_left ? product.rows : product.columns).push_back(label);
  }
  std::ranges::copy_if(left, std::back_inserter(product.summed),
                       [&](const std::string& label) { return !stands_in(labels.result, label); });
  const auto is = [](const Labels& operand, const Labels& groups) {
    return operand.size() == groups.size() && std::ranges::is_permutation(operand, groups);
  };
  const Labels both = joined(product.batch, product.summed);
  if (product.summed.empty() || !is(left, joined(both, product.rows)) || !is(right, joined(both, product.columns)))
    return std::nullopt;
  return product;
}

// Returns whether a value is weights that a mask or a choice without a gradient has thinned out, as a mixture of
// experts combines them. Most are zero, and the others sum to one.
bool is_thinned_out(const Value* value, const NodeSet& differentiable) {
  const auto goes_on = [](const Node* node) {
    return node->is_op("aten::mul") || node->is_op("aten::sum") || is_passthrough(node);
  };
  for (const Node* node = value->producer(); goes_on(node);) {
    const Node* next = nullptr;
    for (const Value* input : node->inputs()) {
      if (differentiable.contains(input->producer())) {
        next = input->producer();
      } else if (node->is_op("aten::mul") && !source_attribute(input)) {
        return true;
      }
    }
    if (!next) return false;
    node = next;
  }
  return false;
}

class Spelling {
 public:
  Spelling(Graph& graph, Node* node) : graph_(graph), node_(node) {}

  // Returns the value with the dimensions of `from` in the order of `to`.
  Value* permuted(Value* value, const Labels& from, const Labels& to) {
    if (from == to) return value;
    TensorMeta type = *value->meta();
    std::vector<int64_t> order;
    for (const std::string& label : to) order.push_back(std::ranges::find(from, label) - from.begin());
    const auto pick = [&](auto& list) {
      const auto before = list;
      for (size_t i = 0; i < order.size() && !before.empty(); ++i) list[i] = before[static_cast<size_t>(order[i])];
    };
    pick(type.sizes), pick(type.strides), pick(type.symbols);
    return call("aten::permute", {value, c10::IValue(std::move(order))}, std::move(type));
  }

  // Returns the value in dense memory with other sizes.
  Value* reshaped(Value* value, std::vector<int64_t> sizes) {
    TensorMeta type = *value->meta();
    type.strides = contiguous_strides(type.sizes);
    value = call("aten::contiguous", {value}, type);
    type.strides = contiguous_strides(sizes);
    type.sizes = sizes;
    return call("aten::reshape", {value, c10::IValue(std::move(sizes))}, std::move(type));
  }

  Value* call(std::string_view op, std::vector<Arg> args, TensorMeta type) {
    Value* made = insert_call(graph_, node_, op, std::move(args), node_, node_->result())->result();
    made->set_meta(std::move(type));
    return made;
  }

 private:
  Graph& graph_;
  Node* node_;
};

std::vector<int64_t> sizes_by(const Labels& wanted, const Labels& labels, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> found;
  for (const std::string& label : wanted)
    found.push_back(sizes[static_cast<size_t>(std::ranges::find(labels, label) - labels.begin())]);
  return found;
}

bool spell(Graph& graph, Node* node, const State& state, NodeSet& differentiable) {
  const Arg &equation = node->arg("equation"), &tensors = node->arg("tensors");
  if (!equation.is_constant() || !tensors.is_list() || tensors.list().size() != 2) return false;
  std::vector<Value*> values;
  std::vector<size_t> dims;
  bool free = false;
  for (const Arg& tensor : tensors.list()) {
    if (!tensor.is_value() || !tensor.value()->meta() || !may_be_float(tensor.value(), state) ||
        !differentiable.contains(tensor.value()->producer()) || is_thinned_out(tensor.value(), differentiable))
      return false;
    values.push_back(tensor.value());
    dims.push_back(values.back()->meta()->sizes.size());
    free = free || !values.back()->meta()->symbols.empty();
  }
  const auto& type = node->result()->meta();
  const EinsumLabels labels = einsum_labels(equation.constant().toStringRef(), dims);
  const std::optional<Product> found = product_of(labels);
  const auto fits = [](const std::optional<TensorMeta>& meta, const Labels& of) {  // a file may say anything
    return meta && meta->sizes.size() == of.size() && meta->strides.size() == of.size();
  };
  if (!found || !fits(type, labels.result) || !fits(values[0]->meta(), labels.operands[0]) ||
      !fits(values[1]->meta(), labels.operands[1]) || (free && found->reshapes()))
    return false;
  const Labels &left = labels.operands[0], &right = labels.operands[1];
  const auto of_left = [&](const Labels& some) { return sizes_by(some, left, values[0]->meta()->sizes); };
  const auto of_right = [&](const Labels& some) { return sizes_by(some, right, values[1]->meta()->sizes); };
  if (of_left(found->summed) != of_right(found->summed)) return false;  // one of them is repeated

  Spelling spelling(graph, node);
  Value* one = spelling.permuted(values[0], left, joined(joined(found->batch, found->rows), found->summed));
  Value* other = spelling.permuted(values[1], right, joined(joined(found->batch, found->summed), found->columns));
  const int64_t rows = element_count(of_left(found->rows)), summed = element_count(of_left(found->summed)),
                columns = element_count(of_right(found->columns));
  const auto with = [](std::vector<int64_t> sizes, int64_t second_last, int64_t last) {
    sizes.insert(sizes.end(), {second_last, last});
    return sizes;
  };
  if (found->reshapes()) {
    one = spelling.reshaped(one, with(of_left(found->batch), rows, summed));
    other = spelling.reshaped(other, with(of_right(found->batch), summed, columns));
  }
  const Labels order = joined(joined(found->batch, found->rows), found->columns);
  TensorMeta made = *type;
  made.sizes = with(sizes_by(found->batch, labels.result, type->sizes), rows, columns);
  made.strides = contiguous_strides(made.sizes);
  if (!type->symbols.empty()) {
    for (size_t i = 0; i < order.size(); ++i)
      made.symbols[i] =
          type->symbols[static_cast<size_t>(std::ranges::find(labels.result, order[i]) - labels.result.begin())];
  }
  Value* result = spelling.call("aten::matmul", {one, other}, std::move(made));
  if (found->reshapes()) result = spelling.reshaped(result, sizes_by(order, labels.result, type->sizes));
  result = spelling.permuted(result, order, labels.result);
  graph.replace_node(node, result->producer());
  differentiable.insert(result->producer());
  return true;
}

}  // namespace

bool spell_einsums_as_products(Graph& graph, const State& state, const NodeSet& keep) {
  NodeSet differentiable = differentiable_nodes(graph, state);
  bool changed = false;
  for (Node* node : graph.nodes()) {
    if (node->is_op("aten::einsum") && !keep.contains(node)) changed |= spell(graph, node, state, differentiable);
  }
  return changed;
}

}  // namespace plumb

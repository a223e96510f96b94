#include "plumb/capture/stand_in.h"

#include <ATen/ATen.h>

#include <string_view>
#include <unordered_map>

namespace plumb::capture_detail {
namespace {

struct Product {
  size_t left, right;     // arguments
  int64_t right_dim = 0;  // dimension of the right one that is summed over; of the left one it is the last
};

const Product* find_product(const c10::FunctionSchema& schema) {
  static const std::unordered_map<std::string_view, Product> products = {
      {"aten::linear", {0, 1, -1}}, {"aten::matmul", {0, 1, -2}}, {"aten::mm", {0, 1, -2}},
      {"aten::bmm", {0, 1, -2}},    {"aten::addmm", {1, 2, -2}},  {"aten::baddbmm", {1, 2, -2}}};
  auto it = schema.overload_name().empty() ? products.find(schema.name()) : products.end();
  return it == products.end() ? nullptr : &it->second;
}

bool is_plain(const c10::IValue& v) {
  if (!v.isTensor() || !v.toTensor().defined()) return false;
  const at::Tensor& t = v.toTensor();
  return t.dim() >= 2 && t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized();
}

}  // namespace

bool stand_in(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Product* product = find_product(op.schema());
  if (!product) return false;
  const size_t count = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  if (!is_plain(given[product->left]) || !is_plain(given[product->right])) return false;
  const at::Tensor &left = given[product->left].toTensor(), &right = given[product->right].toTensor();
  if (left.size(-1) != right.size(product->right_dim)) return false;  // the call itself says what is wrong
  torch::jit::Stack empty(given.begin(), given.end());
  empty[product->left] = left.narrow(-1, 0, 0);
  empty[product->right] = right.narrow(product->right_dim, 0, 0);
  try {
    op.callBoxed(empty);
  } catch (const c10::Error&) {
    return false;
  }
  torch::jit::drop(*stack, count);
  stack->push_back(std::move(empty.back()));
  return true;
}

bool has_sizes_from_values(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

}  // namespace plumb::capture_detail

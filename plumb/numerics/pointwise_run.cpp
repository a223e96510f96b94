// The operator plumb::pointwise: blocks in cache, and its gradient.
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/core/vectorised.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/pointwise.h"

namespace plumb {
namespace {

using at::Tensor;
using Kind = PointwiseKind;
using Tensors = std::vector<Tensor>;

constexpr int64_t kBlock = 4096;  // elements: a block of every step of a chain fits the second-level cache

const PointwiseProgram& cached_program(std::string_view text) {
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  static std::shared_mutex mutex;
  static std::unordered_map<std::string, std::unique_ptr<const PointwiseProgram>, Hash, std::equal_to<>> programs;
  {
    std::shared_lock lock(mutex);
    if (auto it = programs.find(text); it != programs.end()) return *it->second;
  }
  auto program = std::make_unique<const PointwiseProgram>(PointwiseProgram::parse(text));
  std::unique_lock lock(mutex);
  return *programs.emplace(std::string(text), std::move(program)).first->second;
}

// ---- one step on tensors, as torch computes it

struct ScaleBoth : torch::autograd::Function<ScaleBoth> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, double f, double b) {
    context->saved_data["b"] = b;
    at::AutoDispatchBelowADInplaceOrView below;
    return at::mul(x, f);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    return {gradients[0] * context->saved_data["b"].toDouble(), {}, {}};
  }
};

Tensor apply_step(const PointwiseStep& step, const Tensor& a, const Tensor& b) {
  const bool number = step.b.kind == PointwiseArg::Number;
  const double n = step.b.number;
  switch (step.kind) {
    case Kind::Add: return number ? at::add(a, n) : at::add(a, b);
    case Kind::Sub: return number ? at::sub(a, n) : at::sub(a, b);
    case Kind::Mul: return number ? at::mul(a, n) : at::mul(a, b);
    case Kind::Div: return number ? at::div(a, n) : at::div(a, b);
    case Kind::Neg: return at::neg(a);
    case Kind::Relu: return at::relu(a);
    case Kind::Sigmoid: return at::sigmoid(a);
    case Kind::Tanh: return at::tanh(a);
    case Kind::Exp: return at::exp(a);
    case Kind::Sqrt: return at::sqrt(a);
    case Kind::Silu: return at::silu(a);
    case Kind::Gelu: return at::gelu(a);
    case Kind::GeluTanh: return at::gelu(a, "tanh");
    case Kind::Scale: return ScaleBoth::apply(a, step.forward, step.backward);
  }
  return a;
}

Tensor run_whole(const PointwiseProgram& program, at::TensorList inputs) {
  Tensors values;
  auto value = [&](const PointwiseArg& arg) {
    if (arg.kind == PointwiseArg::Input) return inputs[static_cast<size_t>(arg.index)];
    if (arg.kind == PointwiseArg::Step) return values[static_cast<size_t>(arg.index)];
    return Tensor();
  };
  for (const auto& step : program.steps) values.push_back(apply_step(step, value(step.a), value(step.b)));
  return values.back();
}

// ---- one step on a block: plain arithmetic here, the rest by torch's own kernels

// The loops hold one operation each: nothing may be contracted to a fused multiply-add.
template <class T>
PLUMB_VECTORISED void add_loop(const T* a, const T* b, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
}
template <class T>
PLUMB_VECTORISED void sub_loop(const T* a, const T* b, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] - b[i];
}
template <class T>
PLUMB_VECTORISED void mul_loop(const T* a, const T* b, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] * b[i];
}
template <class T>
PLUMB_VECTORISED void add_number(const T* a, T b, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] + b;
}
template <class T>
PLUMB_VECTORISED void mul_number(const T* a, T b, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] * b;
}
template <class T>
PLUMB_VECTORISED void neg_loop(const T* a, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = -a[i];
}

// The gradient of this argument is the step's own.
bool hands_on_gradient(const PointwiseStep& step, int side) {
  return step.kind == Kind::Add || (step.kind == Kind::Sub && side == 0) ||
         (step.kind == Kind::Scale && step.backward == 1);
}

class Blocks {
 public:
  Blocks(const PointwiseProgram& program, at::TensorList inputs)
      : program_(program), options_(inputs[0].options().requires_grad(false)), dtype_(inputs[0].scalar_type()) {
    for (const Tensor& input : inputs) inputs_.push_back(flat(input));
    for (size_t i = 0; i < program.steps.size(); ++i) values_.push_back(at::empty({kBlock}, options_));
  }

  static Tensor flat(const Tensor& x) { return x.as_strided({x.numel()}, {1}, x.storage_offset()); }

  // Elements [begin, begin + n); the last step goes to `out` if it is given.
  void forward(int64_t begin, int64_t n, const Tensor* out, bool all_steps) {
    begin_ = begin;
    n_ = n;
    runs_.assign(program_.steps.size(), Tensor());
    const size_t last = program_.steps.size() - 1;
    for (size_t i = 0; i <= last; ++i) {
      if (i == last && !out && !all_steps) break;
      const bool to_memory = i == last && out;
      if (const auto& step = program_.steps[i]; step.kind == Kind::Scale && step.forward == 1 && !to_memory) {
        runs_[i] = value(step.a);
        continue;
      }
      runs_[i] = to_memory ? out->narrow(0, begin, n) : room(values_[i]);
      step_forward(program_.steps[i], runs_[i]);
    }
  }

  // The gradients of the inputs where wanted, from the last step's; forward() came before, with all steps.
  void backward(const Tensor& gradient, const Tensors& wanted) {
    if (gradients_.empty()) {
      for (size_t i = 0; i < 2 * program_.steps.size(); ++i) gradients_.push_back(at::empty({kBlock}, options_));
    }
    Tensors incoming(program_.steps.size());
    incoming.back() = gradient;
    for (size_t i = program_.steps.size(); i-- > 0;) {
      const auto& step = program_.steps[i];
      const Tensor& g = incoming[i];
      if (!g.defined()) continue;
      for (int side = 0; side < 2; ++side) {
        const auto& arg = side == 0 ? step.a : step.b;
        Tensor to;
        if (arg.kind == PointwiseArg::Step && hands_on_gradient(step, side)) {
          incoming[static_cast<size_t>(arg.index)] = g;
          continue;
        }
        if (arg.kind == PointwiseArg::Step) {
          to = room(gradients_[2 * i + static_cast<size_t>(side)]);
          incoming[static_cast<size_t>(arg.index)] = to;
        } else if (arg.kind == PointwiseArg::Input && wanted[static_cast<size_t>(arg.index)].defined()) {
          to = wanted[static_cast<size_t>(arg.index)].narrow(0, begin_, n_);
        } else {
          continue;
        }
        step_backward(step, side, runs_[i], g, to);
      }
    }
  }

 private:
  Tensor room(const Tensor& scratch) const { return n_ == kBlock ? scratch : scratch.narrow(0, 0, n_); }

  Tensor value(const PointwiseArg& arg) const {
    if (arg.kind == PointwiseArg::Input) return inputs_[static_cast<size_t>(arg.index)].narrow(0, begin_, n_);
    return runs_[static_cast<size_t>(arg.index)];
  }

  template <class Body>
  void typed(const Body& body) const {
    if (dtype_ == at::kFloat)
      body(float());
    else
      body(double());
  }
  bool plain() const { return dtype_ == at::kFloat || dtype_ == at::kDouble; }

  template <class T>
  static const T* in(const Tensor& x) {
    return static_cast<const T*>(x.const_data_ptr());
  }
  template <class T>
  static T* out(const Tensor& x) {
    return static_cast<T*>(x.mutable_data_ptr());
  }

  void multiply(const Tensor& a, double b, Tensor& y) const {
    if (!plain()) {
      at::mul_out(y, a, at::native::wrapped_scalar_tensor(b));
      return;
    }
    typed([&](auto t) { mul_number(in<decltype(t)>(a), static_cast<decltype(t)>(b), out<decltype(t)>(y), n_); });
  }
  void multiply(const Tensor& a, const Tensor& b, Tensor& y) const {
    if (!plain()) {
      at::mul_out(y, a, b);
      return;
    }
    typed([&](auto t) { mul_loop(in<decltype(t)>(a), in<decltype(t)>(b), out<decltype(t)>(y), n_); });
  }
  void negate(const Tensor& a, Tensor& y) const {
    if (!plain()) {
      at::neg_out(y, a);
      return;
    }
    typed([&](auto t) { neg_loop(in<decltype(t)>(a), out<decltype(t)>(y), n_); });
  }
  void copy(const Tensor& a, Tensor& y) const {
    if (a.const_data_ptr() != y.const_data_ptr())
      std::memcpy(y.mutable_data_ptr(), a.const_data_ptr(), static_cast<size_t>(n_) * y.element_size());
  }

  void step_forward(const PointwiseStep& step, Tensor& y) const {
    const Tensor a = value(step.a);
    const bool number = step.b.kind == PointwiseArg::Number;
    const Tensor b = step.b.kind == PointwiseArg::None ? Tensor()
                     : number                          ? at::native::wrapped_scalar_tensor(step.b.number)
                                                       : value(step.b);
    switch (step.kind) {
      case Kind::Add:
        if (!plain()) {
          at::add_out(y, a, b);
        } else {
          typed([&](auto t) {
            using T = decltype(t);
            if (number)
              add_number(in<T>(a), static_cast<T>(step.b.number), out<T>(y), n_);
            else
              add_loop(in<T>(a), in<T>(b), out<T>(y), n_);
          });
        }
        return;
      case Kind::Sub:
        if (!plain() || number) {
          at::sub_out(y, a, b);
        } else {
          typed([&](auto t) { sub_loop(in<decltype(t)>(a), in<decltype(t)>(b), out<decltype(t)>(y), n_); });
        }
        return;
      case Kind::Mul: return number ? multiply(a, step.b.number, y) : multiply(a, b, y);
      case Kind::Div: at::div_out(y, a, b); return;
      case Kind::Neg: return negate(a, y);
      case Kind::Relu: at::relu_out(y, a); return;
      case Kind::Sigmoid: at::sigmoid_out(y, a); return;
      case Kind::Tanh: at::tanh_out(y, a); return;
      case Kind::Exp: at::exp_out(y, a); return;
      case Kind::Sqrt: at::sqrt_out(y, a); return;
      case Kind::Silu: at::silu_out(y, a); return;
      case Kind::Gelu: at::gelu_out(y, a); return;
      case Kind::GeluTanh: at::gelu_out(y, a, "tanh"); return;
      case Kind::Scale: return step.forward == 1 ? copy(a, y) : multiply(a, step.forward, y);
    }
  }

  // to = the gradient of the step's argument, as torch's derivatives.yaml has it; y is the step's result.
  void step_backward(const PointwiseStep& step, int side, const Tensor& y, const Tensor& g, Tensor& to) const {
    const bool number = step.b.kind == PointwiseArg::Number;
    switch (step.kind) {
      case Kind::Add: return copy(g, to);
      case Kind::Sub: return side == 0 ? copy(g, to) : negate(g, to);
      case Kind::Mul:
        if (number) return multiply(g, step.b.number, to);
        return multiply(g, value(side == 0 ? step.b : step.a), to);
      case Kind::Div: {
        const Tensor b = number ? at::native::wrapped_scalar_tensor(step.b.number) : value(step.b);
        if (side == 0)
          at::div_out(to, g, b);
        else
          at::mul_out(to, at::neg(g), at::div(at::div(value(step.a), b), b));
        return;
      }
      case Kind::Neg: return negate(g, to);
      case Kind::Relu: at::threshold_backward_out(to, g, y, 0); return;
      case Kind::Sigmoid: at::sigmoid_backward_out(to, g, y); return;
      case Kind::Tanh: at::tanh_backward_out(to, g, y); return;
      case Kind::Exp: return multiply(g, y, to);
      case Kind::Sqrt: at::div_out(to, g, at::mul(y, 2)); return;
      case Kind::Silu: at::silu_backward_out(to, g, value(step.a)); return;
      case Kind::Gelu: at::gelu_backward_out(to, g, value(step.a)); return;
      case Kind::GeluTanh: at::gelu_backward_out(to, g, value(step.a), "tanh"); return;
      case Kind::Scale: return step.backward == 1 ? copy(g, to) : multiply(g, step.backward, to);
    }
  }

  const PointwiseProgram& program_;
  const at::TensorOptions options_;
  const at::ScalarType dtype_;
  Tensors inputs_;
  Tensors values_, gradients_;  // scratch
  Tensors runs_;                // the steps' results of this block
  int64_t begin_ = 0, n_ = 0;
};

// In other layouts torch picks other kernels, whose last bits differ.
bool blockable(at::TensorList inputs) {
  for (const Tensor& x : inputs) {
    if (!x.is_cpu() || x.layout() != at::kStrided || x.is_neg() || !x.is_contiguous()) return false;
  }
  return true;
}

void check_inputs(const PointwiseProgram& program, at::TensorList inputs) {
  auto fail = [](const std::string& why) {
    throw Error(ErrorKind::InvalidArgument, "plumb::pointwise: " + why, "", "give what the program was made for");
  };
  if (static_cast<int64_t>(inputs.size()) != program.num_inputs || inputs.empty())
    fail("the program takes " + std::to_string(program.num_inputs) + " tensors, not " + std::to_string(inputs.size()));
  for (const Tensor& x : inputs) {
    if (!x.defined()) fail("a tensor is undefined");
    if (!at::isFloatingType(x.scalar_type())) fail(std::string("it does not take ") + c10::toString(x.scalar_type()));
    if (x.scalar_type() != inputs[0].scalar_type() || x.sym_sizes() != inputs[0].sym_sizes() ||
        x.device() != inputs[0].device())
      fail("the tensors differ in shape, dtype or device");
  }
}

// Elements in blocks on torch's threads, each with its own scratch room.
template <class Body>
void for_element_blocks(const PointwiseProgram& program, at::TensorList inputs, const Body& body) {
  const int64_t n = inputs[0].numel(), blocks = (n + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, 8, [&](int64_t first, int64_t last) {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    Blocks work(program, inputs);
    for (int64_t b = first; b < last; ++b) body(work, b * kBlock, std::min(kBlock, n - b * kBlock));
  });
}

Tensor pointwise_cpu(at::TensorList inputs, std::string_view text) {
  const auto& program = cached_program(text);
  check_inputs(program, inputs);
  if (!blockable(inputs)) return run_whole(program, inputs);
  Tensor result = fresh_like(inputs[0], inputs[0].scalar_type());
  const Tensor flat = Blocks::flat(result);
  for_element_blocks(program, inputs,
                     [&](Blocks& work, int64_t begin, int64_t n) { work.forward(begin, n, &flat, true); });
  return result;
}

Tensor pointwise_whole(at::TensorList inputs, std::string_view text) {
  const auto& program = cached_program(text);
  check_inputs(program, inputs);
  return run_whole(program, inputs);
}

Tensor pointwise_meta(at::TensorList inputs, std::string_view text) {
  check_inputs(cached_program(text), inputs);
  return at::empty_like(inputs[0]);
}

// Inputs whose gradient is the result's own: only sums stand between.
std::vector<bool> passes_through(const PointwiseProgram& program) {
  std::vector<bool> inputs(static_cast<size_t>(program.num_inputs)), steps(program.steps.size());
  std::vector<int> uses(inputs.size());
  steps.back() = true;
  for (size_t i = program.steps.size(); i-- > 0;) {
    const auto& step = program.steps[i];
    for (const auto* arg : {&step.a, &step.b}) {
      const bool same = steps[i] && hands_on_gradient(step, arg == &step.a ? 0 : 1);
      if (arg->kind == PointwiseArg::Step) steps[static_cast<size_t>(arg->index)] = same;
      if (arg->kind != PointwiseArg::Input) continue;
      const auto at = static_cast<size_t>(arg->index);
      inputs[at] = same && uses[at]++ == 0;
    }
  }
  return inputs;
}

// Every input is used once: what stands twice in a chain is given twice.
struct Pointwise : torch::autograd::Function<Pointwise> {
  static Tensor forward(torch::autograd::AutogradContext* context, at::TensorList inputs, std::string text) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("plumb::pointwise", "")
                               .typed<Tensor(at::TensorList, std::string_view)>();
    Tensor result = op.call(inputs, text);
    context->save_for_backward(inputs.vec());
    context->saved_data["program"] = std::move(text);
    return result;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const auto inputs = context->get_saved_variables();
    const auto& program = cached_program(context->saved_data["program"].toStringRef());
    Tensors results(inputs.size() + 1);
    if (!gradients[0].defined()) return results;
    Tensor g = gradients[0];
    if (at::GradMode::is_enabled() || !blockable(inputs)) {
      const bool again = at::GradMode::is_enabled();
      at::AutoGradMode grad(true);
      Tensors own, leaves;
      for (const Tensor& x : inputs) own.push_back(x.requires_grad() ? x.view_as(x) : x);
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (context->needs_input_grad(i)) leaves.push_back(own[i]);
      }
      auto found = torch::autograd::grad({run_whole(program, own)}, leaves, {g}, again, again);
      for (size_t i = 0, k = 0; i < inputs.size(); ++i) {
        if (context->needs_input_grad(i)) results[i] = found[k++];
      }
      return results;
    }
    g = g.contiguous();
    const auto through = passes_through(program);
    Tensors wanted(inputs.size());
    bool any = false;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!context->needs_input_grad(i)) continue;
      if (through[i]) {
        results[i] = g;
        continue;
      }
      results[i] = fresh_like(inputs[i], inputs[i].scalar_type());
      wanted[i] = Blocks::flat(results[i]);
      any = true;
    }
    if (!any) return results;
    const Tensor flat = Blocks::flat(g);
    for_element_blocks(program, inputs, [&](Blocks& work, int64_t begin, int64_t n) {
      work.forward(begin, n, nullptr, true);
      work.backward(flat.narrow(0, begin, n), wanted);
    });
    return results;
  }
};

Tensor pointwise_autograd(at::TensorList inputs, std::string_view text) {
  bool wanted = false;
  for (const Tensor& x : inputs) wanted |= x.defined() && x.requires_grad();
  if (wanted && at::GradMode::is_enabled()) {
    check_inputs(cached_program(text), inputs);
    return Pointwise::apply(inputs, std::string(text));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return ops::pointwise(inputs, text);
}

}  // namespace

at::Tensor ops::pointwise(at::TensorList inputs, std::string_view program) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("plumb::pointwise", "")
                             .typed<Tensor(at::TensorList, std::string_view)>();
  return op.call(inputs, program);
}

}  // namespace plumb

TORCH_LIBRARY_FRAGMENT(plumb, m) {
  m.def("pointwise(Tensor[] inputs, str program) -> Tensor", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(plumb, CompositeExplicitAutograd, m) { m.impl("pointwise", plumb::pointwise_whole); }
TORCH_LIBRARY_IMPL(plumb, CPU, m) { m.impl("pointwise", plumb::pointwise_cpu); }
TORCH_LIBRARY_IMPL(plumb, Meta, m) { m.impl("pointwise", plumb::pointwise_meta); }
TORCH_LIBRARY_IMPL(plumb, Autograd, m) { m.impl("pointwise", plumb::pointwise_autograd); }

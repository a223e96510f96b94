// A block of elements through all steps while it is in cache. Steps of one path work in one place: a result that goes
// to memory is made there, and a gradient where the input's gradient will be.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>

#include <algorithm>
#include <cstring>

#include "plumb/core/vectorized.h"
#include "plumb/numerics/carrier.h"
#include "plumb/pointwise/parts.h"

namespace plumb::pointwise_parts {
namespace {

using at::Tensor;
using Kind = PointwiseKind;

constexpr int64_t kUnit = 4096, kLargestBlock = 32768;  // elements
constexpr int64_t kCacheBytes = int64_t(3) << 18;       // bytes of a second-level cache, for all that a block touches
// Torch's gelu of floats is a library's, whose call costs as much as thousands of elements: blocks grow by this factor.
constexpr int64_t kCostlyCall = 8;

#if defined(__GNUC__) && !defined(__clang__)
#define PLUMB_INDEPENDENT _Pragma("GCC ivdep")
#else
#define PLUMB_INDEPENDENT
#endif

// y = of(in...). `of` is one operation, or a weighted sum, and nothing may be contracted to a fused multiply-add.
// Results may be written where an operand is: elements do not depend on each other.
template <class T, class Of, class... In>
PLUMB_VECTORIZED void loop(int64_t n, Of of, T* y, const In*... in) {
  PLUMB_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) y[i] = of(in[i]...);
}

Tensor flat(const Tensor& x) { return x.defined() ? x.as_strided({x.numel()}, {1}, x.storage_offset()) : x; }

// Destination of a step's result or gradient: a whole tensor, or scratch of one block.
struct Place {
  Tensor whole;
  int scratch = -1;
  bool defined() const { return whole.defined() || scratch >= 0; }
};

// Everything that is the same for all blocks.
struct Layout {
  const PointwiseProgram& program;
  at::TensorOptions options;
  Tensors inputs;                // flat; undefined where not saved
  std::vector<Place> values;     // places for results of the steps that run or were saved
  std::vector<bool> runs;        // in the forward direction
  std::vector<bool> stays;       // a result that is wanted where `values` says, the last one's or a saved one
  std::vector<bool> in_sum;      // a factor that its sum applies
  std::vector<Place> gradients;  // places for the steps' gradients
  Tensors wanted;                // flat gradients of inputs
  int scratch = 0;
  int64_t numel = 0, block = 0;

  Layout(const PointwiseProgram& program, const Tensor& like, at::TensorList given)
      : program(program),
        options(like.options().requires_grad(false)),
        values(program.steps.size()),
        runs(program.steps.size()),
        stays(program.steps.size()),
        in_sum(program.steps.size()),
        gradients(program.steps.size()),
        numel(like.numel()) {
    for (const Tensor& input : given) inputs.push_back(flat(input));
  }

  bool plain() const {
    const auto dtype = c10::typeMetaToScalarType(options.dtype());
    return dtype == at::kFloat || dtype == at::kDouble;
  }

  Place new_scratch() { return {Tensor(), scratch++}; }

  // Sums of scaled steps that nobody else needs are one loop.
  void find_sums(const std::vector<bool>& needed) {
    if (!plain()) return;
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const auto& step = program.steps[i];
      if (!runs[i] || step.kind != Kind::Add || step.b.kind == PointwiseArg::Number) continue;
      for (const auto* arg : {&step.a, &step.b}) {
        if (arg->kind != PointwiseArg::Step) continue;
        const auto j = static_cast<size_t>(arg->index);
        in_sum[j] = runs[j] && !needed[j] && program.steps[j].kind == Kind::Scale;
      }
    }
  }

  void choose_block() {
    int64_t tensors = scratch;
    for (const Tensor& x : inputs) tensors += x.defined();
    for (const Tensor& x : wanted) tensors += x.defined();
    for (const bool s : stays) tensors += s;
    const auto bytes = static_cast<int64_t>(options.dtype().itemsize()) * std::max<int64_t>(tensors + 1, 1);
    int64_t cache = kCacheBytes, largest = kLargestBlock;
    if (std::any_of(program.steps.begin(), program.steps.end(), [](const auto& s) { return s.kind == Kind::Gelu; })) {
      const int64_t share = (numel / at::get_num_threads() + kUnit) / kUnit * kUnit;  // elements per thread
      largest = std::clamp(share, kLargestBlock, kCostlyCall * kLargestBlock);
      cache *= kCostlyCall / 2;
    }
    // Torch cuts a large block among its threads: at whole vectors, as it does a whole tensor, or the functions whose
    // scalar forms have other bits would show it.
    const int64_t shared = kUnit * at::get_num_threads(), unit = shared <= largest ? shared : kUnit;
    block = std::clamp(cache / bytes / unit * unit, unit, largest / unit * unit);
  }
};

class Blocks {
 public:
  explicit Blocks(const Layout& layout) : layout_(layout), program_(layout.program), plain_(layout.plain()) {
    const int64_t n = std::min(layout.block, layout.numel);
    for (int i = 0; i < layout.scratch; ++i) scratch_.push_back(at::empty({n}, layout.options));
    double_ = layout.options.dtype() == at::kDouble;
  }

  void forward(int64_t begin, int64_t n) {
    begin_ = begin;
    n_ = n;
    runs_.assign(program_.steps.size(), Tensor());
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      const auto& step = program_.steps[i];
      const Place& place = layout_.values[i];
      if (!layout_.runs[i]) {
        if (place.whole.defined()) runs_[i] = room(place);  // saved
        continue;
      }
      if (layout_.in_sum[i] || (step.kind == Kind::Scale && step.forward == 1 && !layout_.stays[i])) {
        runs_[i] = value(step.a);
        continue;
      }
      runs_[i] = room(place);
      step_forward(step, runs_[i]);
    }
  }

  // From the last step's gradient; forward() came before.
  void backward(const Tensor& gradient, const PointwiseNeeds& needs) {
    Tensors incoming(program_.steps.size());
    incoming.back() = gradient.narrow(0, begin_, n_);
    for (size_t i = program_.steps.size(); i-- > 0;) {
      const auto& step = program_.steps[i];
      const Tensor& g = incoming[i];
      if (!g.defined()) continue;
      for (int side = 0; side < 2; ++side) {
        const auto& arg = side == 0 ? step.a : step.b;
        const auto at = static_cast<size_t>(arg.index);
        if (arg.kind == PointwiseArg::Step && needs.flows[at]) {
          if (passes_gradient_through(step, side)) {
            incoming[at] = g;
            continue;
          }
          incoming[at] = room(layout_.gradients[at]);
          step_backward(step, side, runs_[i], g, incoming[at]);
        } else if (arg.kind == PointwiseArg::Input && layout_.wanted[at].defined()) {
          Tensor to = layout_.wanted[at].narrow(0, begin_, n_);
          step_backward(step, side, runs_[i], g, to);
        }
      }
    }
  }

 private:
  Tensor room(const Place& place) const {
    if (place.whole.defined()) return place.whole.narrow(0, begin_, n_);
    const Tensor& scratch = scratch_[static_cast<size_t>(place.scratch)];
    return n_ == scratch.numel() ? scratch : scratch.narrow(0, 0, n_);
  }

  Tensor value(const PointwiseArg& arg) const {
    if (arg.kind == PointwiseArg::Input) return layout_.inputs[static_cast<size_t>(arg.index)].narrow(0, begin_, n_);
    return runs_[static_cast<size_t>(arg.index)];
  }

  // Returns the factor of this operand in a sum.
  double factor(const PointwiseArg& arg) const {
    if (arg.kind != PointwiseArg::Step || !layout_.in_sum[static_cast<size_t>(arg.index)]) return 1;
    return program_.steps[static_cast<size_t>(arg.index)].forward;
  }

  template <class Body>
  void typed(const Body& body) const {
    if (double_)
      body(double());
    else
      body(float());
  }

  // y = of(in...), element by element.
  template <class Of, class... In>
  void each(const Of& of, Tensor& y, const In&... in) const {
    typed([&](auto t) {
      using T = decltype(t);
      loop(n_, of, static_cast<T*>(y.mutable_data_ptr()), static_cast<const T*>(in.const_data_ptr())...);
    });
  }

  void multiply(const Tensor& a, double b, Tensor& y) const {
    if (!plain_) {
      at::mul_out(y, a, at::native::wrapped_scalar_tensor(b));
      return;
    }
    each([b](auto x) { return x * static_cast<decltype(x)>(b); }, y, a);
  }
  void multiply(const Tensor& a, const Tensor& b, Tensor& y) const {
    if (!plain_) {
      at::mul_out(y, a, b);
      return;
    }
    each([](auto x, auto z) { return x * z; }, y, a, b);
  }
  void negate(const Tensor& a, Tensor& y) const {
    if (!plain_) {
      at::neg_out(y, a);
      return;
    }
    each([](auto x) { return -x; }, y, a);
  }
  void copy(const Tensor& a, Tensor& y) const {
    if (a.const_data_ptr() != y.const_data_ptr())
      std::memcpy(y.mutable_data_ptr(), a.const_data_ptr(), static_cast<size_t>(n_) * y.element_size());
  }
  void sum(const PointwiseStep& step, const Tensor& a, const Tensor& b, Tensor& y) const {
    const double f = factor(step.a), g = factor(step.b);
    if (f == 1 && g == 1) return each([](auto x, auto z) { return x + z; }, y, a, b);
    each([f, g](auto x, auto z) { return x * static_cast<decltype(x)>(f) + z * static_cast<decltype(z)>(g); }, y, a, b);
  }

  void step_forward(const PointwiseStep& step, Tensor& y) const {
    const Tensor a = value(step.a);
    const bool number = step.b.kind == PointwiseArg::Number;
    const double n = step.b.number;
    const Tensor b = step.b.kind == PointwiseArg::None ? Tensor()
                     : number                          ? at::native::wrapped_scalar_tensor(n)
                                                       : value(step.b);
    switch (step.kind) {
      case Kind::Add:
        if (!plain_) {
          at::add_out(y, a, b);
        } else if (number) {
          each([n](auto x) { return x + static_cast<decltype(x)>(n); }, y, a);
        } else {
          sum(step, a, b, y);
        }
        return;
      case Kind::Sub:
        if (!plain_ || number) {
          at::sub_out(y, a, b);
        } else {
          each([](auto x, auto z) { return x - z; }, y, a, b);
        }
        return;
      case Kind::Mul: return number ? multiply(a, n, y) : multiply(a, b, y);
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

  const Layout& layout_;
  const PointwiseProgram& program_;
  const bool plain_;
  bool double_ = false;
  Tensors scratch_;
  Tensors runs_;  // the steps' results of this block
  int64_t begin_ = 0, n_ = 0;
};

// Elements in blocks on torch's threads, each with its own scratch room.
template <class Body>
void for_element_blocks(const Layout& layout, const Body& body) {
  const int64_t n = layout.numel, size = layout.block, blocks = (n + size - 1) / size;
  at::parallel_for(0, blocks, std::max<int64_t>(kLargestBlock / size, 1), [&](int64_t first, int64_t last) {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    Blocks work(layout);
    for (int64_t b = first; b < last; ++b) body(work, b * size, std::min(size, n - b * size));
  });
}

// Inputs whose gradient is the result's own: only sums stand between.
std::vector<bool> passes_through(const PointwiseProgram& program) {
  std::vector<bool> inputs(static_cast<size_t>(program.num_inputs)), steps(program.steps.size());
  steps.back() = true;
  for (size_t i = program.steps.size(); i-- > 0;) {
    const auto& step = program.steps[i];
    for (const auto* arg : {&step.a, &step.b}) {
      const bool same = steps[i] && passes_gradient_through(step, arg == &step.a ? 0 : 1);
      if (arg->kind == PointwiseArg::Step) steps[static_cast<size_t>(arg->index)] = same;
      if (arg->kind == PointwiseArg::Input) inputs[static_cast<size_t>(arg->index)] = same;
    }
  }
  return inputs;
}

}  // namespace

bool blockable(const Tensor& x) {
  return (x.is_cpu() || pointwise_kernels_for(x)) && x.layout() == at::kStrided && !x.is_neg() && x.is_contiguous();
}

Tensor run_in_blocks(const PointwiseProgram& program, at::TensorList inputs, const Tensors& kept) {
  Tensor result = fresh_like(inputs[0], inputs[0].scalar_type());
  if (const auto* own = pointwise_kernels_for(inputs[0])) {
    if (own->forward(program, inputs, result, kept)) return result;
    const Tensors steps = run_steps(program, inputs);
    for (size_t i = 0; i < steps.size(); ++i)
      if (kept[i].defined()) Tensor(kept[i]).copy_(steps[i]);
    return steps.back();
  }
  Layout layout(program, inputs[0], inputs);
  layout.values.back().whole = flat(result);
  layout.stays.back() = true;
  for (size_t i = program.steps.size(); i-- > 0;) {
    const auto& step = program.steps[i];
    layout.runs[i] = true;
    if (kept[i].defined()) {
      layout.values[i].whole = flat(kept[i]);
      layout.stays[i] = true;
    }
    const bool left = step.a.kind == PointwiseArg::Step, right = step.b.kind == PointwiseArg::Step;
    if (left) layout.values[static_cast<size_t>(step.a.index)] = layout.values[i];
    if (right) layout.values[static_cast<size_t>(step.b.index)] = left ? layout.new_scratch() : layout.values[i];
  }
  layout.find_sums(layout.stays);
  layout.choose_block();
  for_element_blocks(layout, [&](Blocks& work, int64_t begin, int64_t n) { work.forward(begin, n); });
  return result;
}

Tensors backward_in_blocks(const PointwiseProgram& program, const PointwiseNeeds& needs, const Tensor& gradient,
                           const Tensors& inputs, const Tensors& steps, const std::vector<bool>& wanted) {
  Tensors results(wanted.size());
  if (const auto* own = pointwise_kernels_for(gradient)) {
    for (size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i]) results[i] = fresh_like(gradient, gradient.scalar_type());
    if (own->backward(program, needs, gradient, inputs, steps, results)) return results;
    return backward_whole(program, needs, gradient, inputs, steps, wanted);
  }
  Layout layout(program, gradient, inputs);
  layout.wanted.resize(wanted.size());
  const auto through = passes_through(program);
  bool any = false;
  for (const auto& step : program.steps) {
    for (const auto* arg : {&step.a, &step.b}) {
      const auto at = static_cast<size_t>(arg->index);
      if (arg->kind != PointwiseArg::Input || !wanted[at]) continue;
      results[at] = through[at] ? gradient : fresh_like(gradient, gradient.scalar_type());
      if (through[at]) continue;
      layout.wanted[at] = flat(results[at]);
      any = true;
    }
  }
  if (!any) return results;
  auto place_of = [&](const PointwiseArg& arg) -> Place {
    const auto at = static_cast<size_t>(arg.index);
    if (arg.kind == PointwiseArg::Input) return {layout.wanted[at], -1};
    if (arg.kind == PointwiseArg::Step && needs.flows[at]) return layout.gradients[at];
    return {};
  };
  for (size_t i = 0; i < program.steps.size(); ++i) {
    if (needs.kept[i]) {
      layout.values[i].whole = flat(steps[i]);
      layout.stays[i] = true;
    }
    if (needs.again[i]) {
      layout.values[i] = layout.new_scratch();
      layout.runs[i] = true;
    }
    // A gradient that two arguments are computed from must outlast both; else it lies where it ends.
    const Place left = place_of(program.steps[i].a), right = place_of(program.steps[i].b);
    layout.gradients[i] = left.defined() && right.defined() ? layout.new_scratch() : left.defined() ? left : right;
  }
  layout.find_sums(needs.again);
  layout.choose_block();
  const Tensor g = flat(gradient);
  for_element_blocks(layout, [&](Blocks& work, int64_t begin, int64_t n) {
    work.forward(begin, n);
    work.backward(g, needs);
  });
  return results;
}

}  // namespace plumb::pointwise_parts

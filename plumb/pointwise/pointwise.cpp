#include "plumb/pointwise/pointwise.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>

#include "plumb/core/error.h"
#include "plumb/pointwise/parts.h"

namespace plumb {
namespace {

// In the order of PointwiseKind.
constexpr std::string_view kNames[] = {"add",  "sub", "mul",  "div",  "neg",  "relu",      "sigmoid",
                                       "tanh", "exp", "sqrt", "silu", "gelu", "gelu_tanh", "scale"};

[[noreturn]] void bad(std::string_view step, const std::string& why) {
  throw Error(ErrorKind::InvalidArgument, "plumb::pointwise: step '" + std::string(step) + "': " + why, "",
              "see plumb/pointwise/pointwise.h for the steps");
}

std::vector<std::string_view> words(std::string_view text, char separator) {
  std::vector<std::string_view> found;
  while (!text.empty()) {
    const size_t end = text.find(separator);
    if (end != 0) found.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return found;
}

template <class T>
T number(std::string_view step, std::string_view text) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) bad(step, "'" + std::string(text) + "' is no number");
  return value;
}

std::string exact(double value) {
  std::array<char, 40> text;
  auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

}  // namespace

PointwiseProgram PointwiseProgram::parse(std::string_view text) {
  PointwiseProgram program;
  std::vector<int> uses, input_uses;
  auto argument = [&](std::string_view step, std::string_view word) {
    PointwiseArg arg;
    if (word[0] != '#' && word[0] != '$') {
      arg.kind = PointwiseArg::Number;
      arg.number = number<double>(step, word);
      return arg;
    }
    arg.kind = word[0] == '#' ? PointwiseArg::Input : PointwiseArg::Step;
    arg.index = number<int64_t>(step, word.substr(1));
    if (arg.index < 0 || arg.index > 1000) bad(step, "'" + std::string(word) + "' is out of range");
    if (arg.kind == PointwiseArg::Input) {
      program.num_inputs = std::max(program.num_inputs, arg.index + 1);
      input_uses.resize(static_cast<size_t>(program.num_inputs));
      if (input_uses[static_cast<size_t>(arg.index)]++) bad(step, "'" + std::string(word) + "' is used twice");
    }
    if (arg.kind == PointwiseArg::Step) {
      if (static_cast<size_t>(arg.index) >= program.steps.size()) bad(step, "'" + std::string(word) + "' comes later");
      if (uses[static_cast<size_t>(arg.index)]++) bad(step, "'" + std::string(word) + "' is used twice");
    }
    return arg;
  };
  for (std::string_view step : words(text, ';')) {
    const auto parts = words(step, ' ');
    if (parts.size() < 2) bad(step, "it has no argument");
    PointwiseStep made;
    std::string_view wanted = parts[0];
    if (wanted.ends_with('!')) {
      made.keep = true;
      wanted.remove_suffix(1);
    }
    const auto known = std::ranges::find(kNames, wanted);
    if (known == std::end(kNames)) bad(step, "'" + std::string(wanted) + "' is not known");
    made.kind = static_cast<PointwiseKind>(known - kNames);
    const bool binary = made.kind <= PointwiseKind::Div, scale = made.kind == PointwiseKind::Scale;
    if (parts.size() != (scale ? 4u : binary ? 3u : 2u)) bad(step, "it has another number of arguments");
    made.a = argument(step, parts[1]);
    if (made.a.kind == PointwiseArg::Number) bad(step, "its first argument is a number");
    if (binary) made.b = argument(step, parts[2]);
    if (scale) made.forward = number<double>(step, parts[2]), made.backward = number<double>(step, parts[3]);
    program.steps.push_back(made);
    uses.push_back(0);
  }
  if (program.steps.empty()) bad(text, "there is none");
  for (size_t i = 0; i + 1 < uses.size(); ++i) {
    if (uses[i] == 0) bad(text, "step " + std::to_string(i) + " is not used");
  }
  return program;
}

std::string PointwiseProgram::to_string() const {
  std::string text;
  auto put = [&](const PointwiseArg& arg) {
    switch (arg.kind) {
      case PointwiseArg::None: return;
      case PointwiseArg::Input: text += " #" + std::to_string(arg.index); return;
      case PointwiseArg::Step: text += " $" + std::to_string(arg.index); return;
      case PointwiseArg::Number: text += " " + exact(arg.number); return;
    }
  };
  for (const PointwiseStep& step : steps) {
    if (!text.empty()) text += "; ";
    text += kNames[static_cast<size_t>(step.kind)];
    if (step.keep) text += "!";
    put(step.a);
    put(step.b);
    if (step.kind == PointwiseKind::Scale) text += " " + exact(step.forward) + " " + exact(step.backward);
  }
  return text;
}

PointwiseNeeds pointwise_needs(const PointwiseProgram& program, const std::vector<bool>& wanted) {
  const auto& steps = program.steps;
  PointwiseNeeds needs{std::vector<bool>(wanted.size()), std::vector<bool>(steps.size()),
                       std::vector<bool>(steps.size()), std::vector<bool>(steps.size())};
  auto& flows = needs.flows;
  auto has_gradient = [&](const PointwiseArg& arg) {
    if (arg.kind == PointwiseArg::Input) return bool(wanted[static_cast<size_t>(arg.index)]);
    return arg.kind == PointwiseArg::Step && flows[static_cast<size_t>(arg.index)];
  };
  std::vector<bool> asked(steps.size());
  auto need = [&](const PointwiseArg& arg) {
    if (arg.kind == PointwiseArg::Input) needs.inputs[static_cast<size_t>(arg.index)] = true;
    if (arg.kind == PointwiseArg::Step) asked[static_cast<size_t>(arg.index)] = true;
  };
  for (size_t i = 0; i < steps.size(); ++i) flows[i] = has_gradient(steps[i].a) || has_gradient(steps[i].b);
  for (size_t i = steps.size(); i-- > 0;) {
    const PointwiseStep& step = steps[i];
    const bool left = has_gradient(step.a), right = has_gradient(step.b);
    switch (step.kind) {
      case PointwiseKind::Mul:
        if (left) need(step.b);
        if (right) need(step.a);
        break;
      case PointwiseKind::Div:
        if (left || right) need(step.b);
        if (right) need(step.a);
        break;
      case PointwiseKind::Relu:
      case PointwiseKind::Sigmoid:
      case PointwiseKind::Tanh:
      case PointwiseKind::Exp:
      case PointwiseKind::Sqrt:
        if (left) asked[i] = true;
        break;
      case PointwiseKind::Silu:
      case PointwiseKind::Gelu:
      case PointwiseKind::GeluTanh:
        if (left) need(step.a);
        break;
      default: break;
    }
    if (!asked[i]) continue;
    if (i + 1 == steps.size() || step.keep) {
      needs.kept[i] = true;
    } else {
      needs.again[i] = true;
      need(step.a);
      need(step.b);
    }
  }
  return needs;
}

namespace {

auto& kernels_by_device() {
  static std::array<std::atomic<const pointwise_parts::PointwiseKernels*>, at::COMPILE_TIME_MAX_DEVICE_TYPES> kernels{};
  return kernels;
}

bool fits_one_kernel(const at::Tensor& like, at::TensorList tensors) {
  const bool wide = like.scalar_type() == at::kFloat || like.scalar_type() == at::kDouble;
  return (fuses_pointwise(like) || (like.is_cpu() && wide)) &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
           return pointwise_parts::blockable(t) && t.sizes() == like.sizes() && t.scalar_type() == like.scalar_type() &&
                  t.device() == like.device();
         });
}

}  // namespace

void pointwise_parts::register_pointwise_kernels(at::DeviceType kind, const PointwiseKernels* kernels) {
  kernels_by_device()[size_t(kind)] = kernels;
}

const pointwise_parts::PointwiseKernels* pointwise_parts::pointwise_kernels_for(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  const bool known = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  return known && x.numel() > 0 ? kernels_by_device()[size_t(x.device().type())].load() : nullptr;
}

bool fuses_pointwise(const at::Tensor& x) { return pointwise_parts::pointwise_kernels_for(x) != nullptr; }

at::Tensor fused_pointwise(const PointwiseProgram& program, at::TensorList inputs) {
  if (!fits_one_kernel(inputs[0], inputs)) return {};
  return pointwise_parts::run_in_blocks(program, inputs, std::vector<at::Tensor>(program.steps.size()));
}

std::vector<at::Tensor> fused_pointwise_backward(const PointwiseProgram& program, const at::Tensor& gradient,
                                                 at::TensorList inputs, const std::vector<bool>& wanted) {
  if (!fits_one_kernel(gradient, gradient) || !fits_one_kernel(gradient, inputs))
    return std::vector<at::Tensor>(inputs.size());
  return pointwise_parts::backward_in_blocks(program, pointwise_needs(program, wanted), gradient, inputs.vec(),
                                             std::vector<at::Tensor>(program.steps.size()), wanted);
}

PointwiseProgram scaled_step(PointwiseKind kind, double before, double after, double back) {
  using Arg = PointwiseArg;
  PointwiseProgram program;
  program.num_inputs = 1;
  program.steps.push_back({PointwiseKind::Scale, {Arg::Input, 0}, {}, before, back});
  program.steps.push_back({kind, {Arg::Step, 0}, {}});
  program.steps.push_back({PointwiseKind::Scale, {Arg::Step, 1}, {}, after, 1});
  return program;
}

}  // namespace plumb

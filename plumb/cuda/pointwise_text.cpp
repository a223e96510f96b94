#include "plumb/cuda/pointwise_text.h"

#include <array>
#include <cstdio>
#include <map>

#include "plumb/cuda/kernel_texts.h"

namespace plumb::cuda {
namespace {

using Kind = PointwiseKind;

// A number of a program as a float, exactly: torch hands numbers to a GPU's operators as floats.
std::string number_text(double value) {
  const float number = float(value);
  uint32_t bits = 0;
  static_assert(sizeof bits == sizeof number);
  __builtin_memcpy(&bits, &number, sizeof bits);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "from_bits(uint32_t(0x%08x))", bits);
  return text.data();
}

const char* function_of_kind(Kind kind) {
  switch (kind) {
    case Kind::Add: return "add";
    case Kind::Sub: return "sub";
    case Kind::Mul: return "mul";
    case Kind::Div: return "div";
    case Kind::Neg: return "neg";
    case Kind::Relu: return "relu";
    case Kind::Sigmoid: return "sigmoid";
    case Kind::Tanh: return "tanhf";
    case Kind::Exp: return "expf";
    case Kind::Sqrt: return "sqrtf";
    case Kind::Silu: return "silu";
    case Kind::Gelu: return "gelu";
    case Kind::GeluTanh: return "gelu_tanh";
    case Kind::Scale: return "mul";
  }
  return "";
}

// Writes the body of a kernel, a line for each value.
class KernelWriter {
 public:
  KernelWriter(const PointwiseProgram& program, kernel::Carrier carrier, int pack)
      : program_(program), type_(type_name(carrier)), pack_(std::to_string(pack)) {}

  std::string input(const std::string& name) {
    const std::string at = std::to_string(ins_++);
    loads_ += "      const Pack<C, N> in" + at + " = load_pack<C, N>(a.in[" + at + "], at, a.n);\n";
    body_ += "        const float " + name + " = value_of(in" + at + ".v[j]);\n";
    return name;
  }

  // A value as a tensor of the program's type would keep it.
  void define(const std::string& name, const std::string& value) {
    body_ += "        const float " + name + " = kept_as<C>(" + value + ");\n";
  }

  void output(const std::string& value) {
    const std::string at = std::to_string(outs_++);
    loads_ += "      Pack<C, N> out" + at + ";\n";
    body_ += "        out" + at + ".v[j] = narrow_to(C{}, " + value + ");\n";
    stores_ += "      store_pack<C, N>(a.out[" + at + "], at, a.n, out" + at + ");\n";
  }

  std::string argument(const PointwiseArg& arg) const {
    switch (arg.kind) {
      case PointwiseArg::Input: return "x" + std::to_string(arg.index);
      case PointwiseArg::Step: return "y" + std::to_string(arg.index);
      case PointwiseArg::Number: return number_text(arg.number);
      case PointwiseArg::None: break;
    }
    return "";
  }

  void run_step(size_t i) {
    const PointwiseStep& step = program_.steps[i];
    std::string call = function_of_kind(step.kind);
    if (step.kind == Kind::Div && step.b.kind == PointwiseArg::Number) call = "div_number";
    call += "(" + argument(step.a);
    if (step.kind == Kind::Scale) call += ", " + number_text(step.forward);
    if (step.b.kind != PointwiseArg::None) call += ", " + argument(step.b);
    define("y" + std::to_string(i), call + ")");
  }

  // Returns the gradient of a step's argument, as step_gradient() of the pointwise room has it; g is the result's.
  std::string gradient(size_t i, int side, const std::string& g) {
    const PointwiseStep& step = program_.steps[i];
    const std::string y = "y" + std::to_string(i), a = argument(step.a), b = argument(step.b);
    const bool number = step.b.kind == PointwiseArg::Number;
    auto of = [](const char* function, const std::string& left, const std::string& right) {
      return function + ("(" + left + ", " + right + ")");
    };
    switch (step.kind) {
      case Kind::Add: return g;
      case Kind::Sub: return side == 0 ? g : "neg(" + g + ")";
      case Kind::Mul: return of("mul", g, number || side == 0 ? b : a);
      case Kind::Div:
        if (number) return of("div_number", g, b);
        if (side == 0) return of("div", g, b);
        return of("mul", "neg(" + g + ")", "kept_as<C>(div(kept_as<C>(div(" + a + ", " + b + ")), " + b + "))");
      case Kind::Neg: return "neg(" + g + ")";
      case Kind::Relu: return of("relu_gradient", g, y);
      case Kind::Sigmoid: return of("sigmoid_gradient", g, y);
      case Kind::Tanh: return of("tanh_gradient", g, y);
      case Kind::Exp: return of("mul", g, y);
      case Kind::Sqrt: return of("div", g, "kept_as<C>(mul(" + y + ", 2.0f))");
      case Kind::Silu: return of("silu_gradient", g, a);
      case Kind::Gelu: return of("gelu_gradient", g, a);
      case Kind::GeluTanh: return of("gelu_tanh_gradient", g, a);
      case Kind::Scale: return step.backward == 1 ? g : of("mul", g, number_text(step.backward));
    }
    return g;
  }

  std::string text() const {
    return std::string("#include \"plumb/cuda/pointwise.cuh\"\nusing namespace plumb::cuda_kernel;\n") +
           "extern \"C\" __global__ void __launch_bounds__(kThreads) " + kEntry +
           "(const __grid_constant__ PointwiseArguments a) {\n  using C = " + type_ +
           ";\n  constexpr int N = " + pack_ +
           ";\n  PLUMB_PHASE(t) {\n    for (int64_t at = (block_index() * kThreads + t) * N; at < a.n; at += "
           "block_count() * kThreads * N) {\n" +
           loads_ + "      for (int j = 0; j < N; ++j) {\n" + body_ + "      }\n" + stores_ + "    }\n  }\n}\n";
  }

 private:
  const PointwiseProgram& program_;
  std::string type_, pack_, loads_, body_, stores_;
  int ins_ = 0, outs_ = 0;
};

}  // namespace

std::string forward_text(const PointwiseProgram& program, const std::vector<bool>& keep, kernel::Carrier carrier,
                         int pack) {
  KernelWriter writer(program, carrier, pack);
  for (int64_t i = 0; i < program.num_inputs; ++i) writer.input("x" + std::to_string(i));
  for (size_t i = 0; i < program.steps.size(); ++i) writer.run_step(i);
  writer.output("y" + std::to_string(program.steps.size() - 1));
  for (size_t i = 0; i < keep.size(); ++i)
    if (keep[i]) writer.output("y" + std::to_string(i));
  return writer.text();
}

std::string backward_text(const PointwiseProgram& program, const PointwiseNeeds& needs, const std::vector<bool>& wanted,
                          kernel::Carrier carrier, int pack) {
  KernelWriter writer(program, carrier, pack);
  const size_t count = program.steps.size();
  std::vector<std::string> incoming(count);
  std::map<size_t, std::string> results;
  incoming[count - 1] = writer.input("g");
  for (size_t i = 0; i < needs.inputs.size(); ++i)
    if (needs.inputs[i]) writer.input("x" + std::to_string(i));
  for (size_t i = 0; i < count; ++i)
    if (needs.kept[i]) writer.input("y" + std::to_string(i));
  for (size_t i = 0; i < count; ++i)
    if (needs.again[i]) writer.run_step(i);
  for (size_t i = count; i-- > 0;) {
    if (incoming[i].empty()) continue;
    for (int side = 0; side < 2; ++side) {
      const PointwiseArg& arg = side == 0 ? program.steps[i].a : program.steps[i].b;
      const auto at = size_t(arg.index);
      const bool input = arg.kind == PointwiseArg::Input && wanted[at];
      if (!input && !(arg.kind == PointwiseArg::Step && needs.flows[at])) continue;
      const std::string name = "g" + std::to_string(2 * i + size_t(side));
      writer.define(name, writer.gradient(i, side, incoming[i]));
      if (input)
        results[at] = name;
      else
        incoming[at] = name;
    }
  }
  for (const auto& [input, name] : results) writer.output(name);
  return writer.text();
}

}  // namespace plumb::cuda

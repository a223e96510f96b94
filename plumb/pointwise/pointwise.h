// Chains of pointwise operators as one: plumb::pointwise(Tensor[] inputs, str program) -> Tensor.
//
// A block of elements goes through all of the chain while it is in cache, forward and backward; between the steps
// nothing is written to memory. The forward pass keeps only what the gradient needs: nothing of a linear chain, else
// inputs and the steps marked with "!". Other steps' results that the gradient needs are computed again from these.
// Every step computes the bits that torch's own operator (or plumb's scaling) would on one thread; the number of
// threads changes nothing here.
//
//   program = step { ";" step }       the last step is the result; every other one is used exactly once, an input at
//                                     most once: what stands twice in a chain is given twice
//   step    = name [ "!" ] arg [ arg ] [ number ] [ number ]
//   arg     = "#" index of an input | "$" index of a step
//   add a b | sub a b | mul a b | div a b       b may be a number
//   neg a | relu a | sigmoid a | tanh a | exp a | sqrt a | silu a | gelu a | gelu_tanh a
//   scale a f b                                 times f; the gradient times b
//
// Inputs are floating-point tensors of one dtype, device and shape. The gradient of the gradient is that of the
// operators one by one.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

namespace plumb {

enum class PointwiseKind { Add, Sub, Mul, Div, Neg, Relu, Sigmoid, Tanh, Exp, Sqrt, Silu, Gelu, GeluTanh, Scale };

struct PointwiseArg {
  enum Kind { None, Input, Step, Number } kind = None;
  int64_t index = 0;
  double number = 0;
};

struct PointwiseStep {
  PointwiseKind kind = PointwiseKind::Add;
  PointwiseArg a, b;
  double forward = 1, backward = 1;  // factors of a Scale step
  bool keep = false;                 // where the gradient needs its result, that is saved
};

struct PointwiseProgram {
  std::vector<PointwiseStep> steps;
  int64_t num_inputs = 0;
  std::string to_string() const;
  // Throws Error(InvalidArgument), naming the step, for text outside of the grammar above.
  static PointwiseProgram parse(std::string_view text);
};

// The results of the forward pass that the gradient needs if these inputs' gradients are wanted.
struct PointwiseNeeds {
  std::vector<bool> inputs;  // saved
  std::vector<bool> kept;    // steps whose results are saved; the last step's result is there anyway
  std::vector<bool> again;   // steps to compute again, from what is saved
  std::vector<bool> flows;   // steps through which a wanted gradient goes
};
PointwiseNeeds pointwise_needs(const PointwiseProgram& program, const std::vector<bool>& wanted);

namespace ops {
// Throws Error(InvalidArgument) if program and inputs do not fit.
at::Tensor pointwise(at::TensorList inputs, std::string_view program);
}  // namespace ops

// Returns whether tensors like x have kernels that run a program at once (plumb/cuda), for operators other than
// plumb::pointwise.
bool fuses_pointwise(const at::Tensor& x);

// Returns the program's result, on the CPU in blocks that stay in cache (float32 and float64). Every step is rounded to
// the inputs' dtype, as operators one by one would. Undefined if there is no such kernel for the inputs' device or
// dtype, or the inputs are no dense tensors of one dtype and size in C order: the caller has operators of its own for
// these. Inputs must be nothing that autograd sees.
at::Tensor fused_pointwise(const PointwiseProgram& program, at::TensorList inputs);

// Returns the gradients of the inputs that are wanted, all undefined where there are no such kernels. Steps of the
// forward pass are computed again from the inputs.
std::vector<at::Tensor> fused_pointwise_backward(const PointwiseProgram& program, const at::Tensor& gradient,
                                                 at::TensorList inputs, const std::vector<bool>& wanted);

// Returns a step `kind` on input 0, times `before` on its way in and `after` on its way out; the gradient times `back`.
PointwiseProgram scaled_step(PointwiseKind kind, double before, double after, double back);

}  // namespace plumb

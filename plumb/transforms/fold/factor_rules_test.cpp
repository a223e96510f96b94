// Every operator of the table of factor rules against its own arithmetic.
#include "plumb/transforms/fold/factor_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "plumb/transforms/fold/fold.h"

namespace plumb {
namespace {

// Tensors that the calls below take.
const char* const kInputs = R"(
  %x: f64[4, 6] = placeholder "x"
  %y: f64[4, 6] = placeholder "y"
  %s: f64[6, 6] = placeholder "s"
  %a: f64[6] = placeholder "a"
  %b: f64[6] = placeholder "b"
  %p: f64[2, 4, 6] = placeholder "p"
  %q: f64[2, 6, 4] = placeholder "q"
  %g: f64[2, 4, 4] = placeholder "g"
  %v: f64[2, 6, 8] = placeholder "v"
  %i: f64[2, 6, 8, 8] = placeholder "i"
  %d: f64[2, 6, 4, 4, 4] = placeholder "d"
  %k: f64[6, 6, 3] = placeholder "k"
  %l: f64[6, 6, 3, 3] = placeholder "l"
  %o: f64[6, 6, 3, 3, 3] = placeholder "o"
  %f: f64[2, 8, 8, 2] = placeholder "f"
  %h: f64[2, 4, 4, 4, 3] = placeholder "h"
  %t4: f64[2, 8, 3, 3] = placeholder "t4"
  %col: f64[2, 8, 8] = placeholder "col"
  %u: f64[4, 4] = placeholder "u"
  %z: f64[4, 3] = placeholder "z"
  %w: f64[4, 2] = placeholder "w"
  %bl: f64[6, 6, 6] = placeholder "bl"
  %mean: f64[6] = placeholder "mean"
  %var: f64[6] = placeholder "var"
  %e: f64[] = placeholder "e"
  %n: i64[3] = placeholder "n"
  %j: i64[4, 6] = placeholder "j"
  %m: b8[4, 6] = placeholder "m"
)";

// Calls that take these arguments, by what stands between the names and the parentheses: "neg sum" for aten::neg(%x).
struct Calls {
  const char* arguments;
  const char* names;
  const char* results = "%r";
};

constexpr Calls kCalls[] = {
    {"(%x)",
     "argmax argmin argsort sign sgn signbit isnan isinf isfinite isneginf isposinf zeros_like ones_like empty_like "
     "rand_like randn_like argwhere nonzero count_nonzero logical_not neg negative positive abs absolute relu "
     "leaky_relu sum mean nansum nanmean amax amin max min median fliplr flipud tril triu "
     "diag diag_embed diagonal diagonal_copy std trace rot90 t_copy slice_copy.Tensor lift_fresh_copy diff "
     "real conj conj_physical resolve_conj resolve_neg fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 "
     "fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift square var sqrt rsqrt "
     "reciprocal linalg_norm linalg_vector_norm msort atleast_1d atleast_2d "
     "atleast_3d norm.Scalar"},
    {"(%a, 0)", "linalg_norm linalg_vector_norm norm.Scalar"},
    {"(%x, [1])", "frobenius_norm.dim"},
    {"(%x, \"fro\")", "linalg_matrix_norm.str_ord"},
    {"(%x, \"nuc\")", "linalg_matrix_norm.str_ord"},
    {"(%x, 2)", "repeat_interleave.self_int"},
    {"(%x, 0, [1])", "norm.ScalarOpt_dim linalg_vector_norm"},
    {"(%a, 3)", "linalg_norm linalg_vector_norm norm.Scalar"},
    {"(%x, 2.5)", "full_like"},
    {"(%c)", "real imag conj conj_physical view_as_real sgn"},
    {"(%f)", "view_as_complex"},
    {"(%x, [2, 3])", "new_zeros new_ones new_empty"},
    {"(%x, [2, 3], 1.5)", "new_full"},
    {"(%x, 0.5, False)", "dropout feature_dropout"},
    {"(%x, 0.5, False)", "native_dropout", "%r, %t"},
    {"(%x, 1)", "cumsum sym_size.int size.int sym_stride.int"},
    {"(%x, 1, 0)", "select_copy.int"},
    {"(%x, 1)", "max.dim min.dim cummax cummin median.dim mode", "%r, %t"},
    {"(%x)", "aminmax sort", "%r, %t"},
    {"(%x, 2)", "topk kthvalue", "%r, %t"},
    {"(%x)", "sym_numel numel"},
    {"(%x, %y)",
     "logical_and logical_or logical_xor add.Tensor sub.Tensor subtract.Tensor rsub.Tensor maximum minimum fmax fmin "
     "max.other min.other copy hypot eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor greater.Tensor "
     "less.Tensor greater_equal.Tensor less_equal.Tensor not_equal.Tensor clamp.Tensor clamp_min.Tensor "
     "clamp_max.Tensor mul.Tensor multiply.Tensor div.Tensor true_divide.Tensor divide.Tensor complex linalg_vecdot"},
    {"(%x, 2)", "add.Tensor sub.Tensor rsub.Scalar mul.Tensor div.Tensor eq.Scalar clamp clamp_min clamp_max"},
    {"(%x, 0)", "add.Tensor sub.Tensor clamp_min gt.Scalar"},
    {"(%x, 1, -1, %y)", "diff"},
    {"([%x, %y])", "cat concat concatenate stack hstack vstack dstack column_stack block_diag"},
    {"([%x, %a])", "block_diag"},
    {"([%x, %a])", "broadcast_tensors atleast_1d.Sequence atleast_2d.Sequence atleast_3d.Sequence", "[%r, %t]"},
    {"([%x, %e])", "broadcast_tensors", "[%r, %t]"},
    {"([%a, %b])", "meshgrid", "[%r, %t]"},
    {"(%x, %a)", "prelu mv copy"},
    {"(%x, 1, 0)", "roll"},
    {"(%x, [1])", "flip"},
    {"(%x, [2, 2])", "repeat tile"},
    {"(%x, 1, %j)", "gather"},
    {"(%x, %j, 1)", "take_along_dim"},
    {"(%x, [%n])", "index.Tensor"},
    {"(%x, 1, %n)", "index_select"},
    {"(%x, %n)", "take embedding"},
    {"(%x, %m)", "masked_select"},
    {"(%x, %m, 0.0)", "masked_fill.Scalar"},
    {"(%x, %m, 2.0)", "masked_fill.Scalar"},
    {"(%x, %m, %e)", "masked_fill.Tensor"},
    {"(%m, %x, %y)", "where.self"},
    {"(%m, %x, 2.0)", "where.ScalarOther"},
    {"(%x, %m, %y)", "masked_scatter"},
    {"(%x, [%n], %a)", "index_put"},
    {"(%x, 1, %j, %y)", "scatter.src scatter_add"},
    {"(%x, 1, %j, 2.0)", "scatter.value"},
    {"(%x, 1, %j, %y, reduce=\"multiply\")", "scatter.reduce"},
    {"(%x, 1, %n, %z)", "index_add index_copy"},
    {"(%x, 1, %n, 2.0)", "index_fill.int_Scalar"},
    {"(%x, %a, 0, 1)", "select_scatter"},
    {"(%x, %w, 1, 0, 2)", "slice_scatter"},
    {"(%s, %a)", "diagonal_scatter mv"},
    {"(%x, %y, 0.25)", "lerp.Scalar"},
    {"(%x, [6, 4])", "view_copy"},
    {"(%x, [3, 4], [1, 2])", "as_strided"},
    {"(%x, [4, 6])", "broadcast_to"},
    {"(%p, [4, 1])", "sum_to_size"},
    {"(%x, 1, 2, 2)", "unfold unfold_copy"},
    {"(%x, [1, 1])", "constant_pad_nd pad"},
    {"(%x, [1, 1], 2.0)", "constant_pad_nd"},
    {"(%v, [1, 1])", "reflection_pad1d replication_pad1d"},
    {"(%i, [1, 1, 1, 1])", "reflection_pad2d replication_pad2d"},
    {"(%d, [1, 1, 1, 1, 1, 1])", "reflection_pad3d replication_pad3d"},
    {"(%v, [2])", "avg_pool1d max_pool1d adaptive_avg_pool1d"},
    {"(%i, [2, 2])", "avg_pool2d max_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d"},
    {"(%d, [2, 2, 2])", "avg_pool3d max_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d"},
    {"(%v, [2])", "adaptive_max_pool1d max_pool1d_with_indices", "%r, %t"},
    {"(%i, [2, 2])", "adaptive_max_pool2d max_pool2d_with_indices", "%r, %t"},
    {"(%d, [2, 2, 2])", "adaptive_max_pool3d max_pool3d_with_indices", "%r, %t"},
    {"(%v, [16])", "upsample_nearest1d"},
    {"(%v, [16], False)", "upsample_linear1d"},
    {"(%i, [4, 12])", "upsample_nearest2d"},
    {"(%i, [4, 12], False)", "upsample_bilinear2d upsample_bicubic2d"},
    {"(%d, [8, 8, 8])", "upsample_nearest3d"},
    {"(%d, [8, 8, 8], False)", "upsample_trilinear3d"},
    {"(%i, %f, 0, 0, False)", "grid_sampler grid_sampler_2d"},
    {"(%d, %h, 0, 0, False)", "grid_sampler grid_sampler_3d"},
    {"(%i, [2, 2], [1, 1], [0, 0], [1, 1])", "im2col"},
    {"(%col, [3, 5], [2, 2], [1, 1], [0, 0], [1, 1])", "col2im"},
    {"(%i, 2)", "pixel_unshuffle channel_shuffle"},
    {"(%t4, 2)", "pixel_shuffle"},
    {"(%x, %s)", "matmul linalg_matmul mm linear"},
    {"(%x, %s, %a)", "linear"},
    {"(%a, %x, %s)", "addmm"},
    {"(%p, %q)", "bmm"},
    {"(%g, %p, %q)", "baddbmm"},
    {"(%u, %p, %q)", "addbmm"},
    {"(%a, %s, %b)", "addmv"},
    {"(%s, %a, %b)", "addr"},
    {"(%x, %y, %a)", "addcmul"},
    {"(%a, %b)", "dot vdot inner outer kron"},
    {"(\"ij,kj->ik\", [%x, %y])", "einsum"},
    {"(%x, %y, [1], [1])", "tensordot"},
    {"(%v, %k, %a)", "conv1d conv_transpose1d"},
    {"(%i, %l, %a)", "conv2d conv_transpose2d.input"},
    {"(%d, %o, %a)", "conv3d conv_transpose3d.input"},
    {"(%i, %l, %a, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)", "convolution"},
    {"(%i, %l, %a, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True)", "_convolution"},
    {"(%i, %l, %a, [1, 1], \"same\", [1, 1], 1)", "_convolution_mode"},
    {"(%x, %y, %bl, %a)", "bilinear"},
    {"(%x, 3)", "pow.Tensor_Scalar"},
    {"(%x, -0.5)", "pow.Tensor_Scalar"},
    {"(%x, [6], %a, %b)", "layer_norm"},
    {"(%x, [6], %a, %b, 1e-5)", "native_layer_norm", "%r, %t, %t2"},
    {"(%x, [6], %a)", "rms_norm"},
    {"(%i, 3, %a, %b)", "group_norm"},
    {"(%i, %a, %b, 2, 6, 64, 3, 1e-5)", "native_group_norm", "%r, %t, %t2"},
    {"(%i, %a, %b, None, None, True, 0.1, 1e-5, False)", "batch_norm instance_norm"},
    {"(%i, %a, %b, %mean, %var, False, 0.1, 1e-5, False)", "batch_norm instance_norm"},
    {"(%p, %p, %p)", "scaled_dot_product_attention"},
};

struct Call {
  std::string text, results;
};

std::vector<Call> every_call() {
  std::vector<Call> all;
  for (const Calls& calls : kCalls) {
    std::istringstream names(calls.names);
    for (std::string name; names >> name;) all.push_back({"aten::" + name + calls.arguments, calls.results});
  }
  return all;
}

// Returns the floating inputs that a call takes.
std::set<std::string> operands(const std::string& call) {
  std::set<std::string> found;
  std::istringstream lines(kInputs);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find('%'), end = line.find(": f64");
    if (end == std::string::npos) continue;
    const std::string name = line.substr(at, end - at);
    for (const char* after : {",", ")", "]"}) {
      if (call.find(name + after) != std::string::npos) found.insert(name);
    }
  }
  return found;
}

// Returns the call on values of which those in `scaled` are multiplied by 4 before.
std::string program(const Call& call, const std::set<std::string>& scaled) {
  std::string body = "  " + call.results + " = " + call.text + "\n";
  if (call.text.find("%c)") != std::string::npos) body = "  %c = aten::complex(%x, %y)\n" + body;
  std::string text = "graph {" + std::string(kInputs);
  for (const std::string& name : scaled) {
    text += "  " + name + "_4 = plumb::scale_fwd(" + name + ", 4.0)\n";
    for (const char* after : {",", ")", "]"}) {
      const std::string from = name + after, to = name + "_4" + after;
      for (size_t at = 0; (at = body.find(from, at)) != std::string::npos; at += to.size())
        body.replace(at, from.size(), to);
    }
  }
  std::string results = call.results;
  std::erase_if(results, [](char c) { return c == '[' || c == ']'; });
  return text + body + "  output(" + results + ")\n}";
}

std::vector<c10::IValue> inputs() {
  std::vector<c10::IValue> values;
  const Graph graph = parse_graph("graph {" + std::string(kInputs) + " output(%x) }");
  for (const Node* node : graph.placeholders()) {
    const TensorMeta& meta = *node->result()->meta();
    if (meta.dtype == at::kLong) {
      values.emplace_back(at::arange(meta.numel(), at::kLong).remainder(4).view(meta.sizes));
    } else if (meta.dtype == at::kBool) {
      values.emplace_back(at::rand(meta.sizes) < 0.5);
    } else if (node->target() == "f" || node->target() == "h") {  // places to sample at
      values.emplace_back(at::rand(meta.sizes, at::kDouble));
    } else {
      values.emplace_back(at::rand(meta.sizes, at::kDouble) + 0.25);  // no root of a negative number
    }
  }
  return values;
}

// fold() takes the factor 4 from the operand and puts it where the rule says that it goes.
void expect_holds(const Call& call, const std::set<std::string>& scaled, const std::vector<c10::IValue>& values) {
  Graph graph = parse_graph(program(call, scaled));
  const size_t outputs = graph.output_node()->args().size(), given = graph.placeholders().size();
  auto module = std::make_shared<GraphModule>(
      std::move(graph), State(), TreeSpec::positional_inputs(given),
      outputs == 1 ? TreeSpec::leaf() : TreeSpec::tuple(std::vector<TreeSpec>(outputs, TreeSpec::leaf())));
  std::vector<c10::IValue> wanted;
  try {
    at::manual_seed(1);
    wanted = module->run(values);
  } catch (const std::exception& e) {
    ADD_FAILURE() << call.text << " does not run: " << e.what();
    return;
  }
  // As in a captured graph, an index is known to be one.
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].isTensor()) module->graph().output_node()->input(i)->set_meta(TensorMeta::of(wanted[i].toTensor()));
  }
  at::manual_seed(1);
  const auto folded = fold(module);
  EXPECT_THAT(to_string(folded->graph()), testing::Not(testing::HasSubstr("scale_fwd"))) << call.text;
  const auto got = folded->run(values);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i].isTensor()) {
      EXPECT_TRUE(wanted[i] == got[i]) << call.text;
      continue;
    }
    const at::Tensor a = wanted[i].toTensor(), b = got[i].toTensor();
    std::string names;
    for (const std::string& name : scaled) names += name + " ";
    EXPECT_TRUE(a.sizes() == b.sizes() &&
                at::allclose(a.to(at::kComplexDouble), b.to(at::kComplexDouble), 1e-4, 1e-9, /*equal_nan=*/true))
        << call.text << " with 4 times " << names << "\n"
        << to_string(folded->graph());
  }
}

TEST(FactorRules, SayWhatTheArithmeticDoesOfEveryOperatorOfTheTable) {
  at::manual_seed(0);
  const auto values = inputs();
  const bool has_numel = c10::Dispatcher::singleton().findSchema({"aten::numel", ""}).has_value();  // not torch 2.11
  for (const Call& call : every_call()) {
    if (call.text.starts_with("aten::empty") || call.text.starts_with("aten::new_empty")) continue;  // any values
    if (call.text.starts_with("aten::numel(") && !has_numel) continue;
    const auto all = operands(call.text.find("%c)") == std::string::npos ? call.text : "(%x, %y)");
    expect_holds(call, all, values);
    for (const std::string& one : all) expect_holds(call, {one}, values);
  }
}

TEST(FactorRules, HaveACallAboveForEveryOperatorOfTheTable) {
  std::set<std::string> called;
  for (const Call& call : every_call()) {
    const std::string name = call.text.substr(6, call.text.find('(') - 6);
    called.insert(name);
    called.insert(name.substr(0, name.find('.')));
  }
  // Written in place, an assertion, a stream of metadata: no arithmetic of their own.
  for (const char* other : {"_assert_tensor_metadata", "copy_", "index_put_", "zero_"}) called.insert(other);
  for (const std::string_view name : factor_rule_names()) EXPECT_TRUE(called.contains(std::string(name))) << name;
}

}  // namespace
}  // namespace plumb

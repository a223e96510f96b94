#include "plumb/pointwise/pointwise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/core/error.h"

namespace plumb {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Case {
  const char* program;
  size_t inputs;
  std::function<at::Tensor(const Tensors&)> eager;
};

const std::vector<Case> kCases = {
    {"mul #0 2.5; add $0 #1", 2, [](const Tensors& x) { return x[0] * 2.5 + x[1]; }},
    {"sub #0 #1; neg $0; mul $1 #2; add $2 0.1", 3, [](const Tensors& x) { return -(x[0] - x[1]) * x[2] + 0.1; }},
    {"sub #0 1.5; div $0 #1; div $1 3", 2, [](const Tensors& x) { return (x[0] - 1.5) / x[1] / 3; }},
    {"sigmoid #0; mul #1 $0", 2, [](const Tensors& x) { return x[1] * at::sigmoid(x[0]); }},
    {"tanh #0; exp $0; sqrt $1; relu $2", 1,
     [](const Tensors& x) { return at::relu(at::sqrt(at::exp(at::tanh(x[0])))); }},
    {"silu #0; mul $0 #1; gelu $1; gelu_tanh $2", 2,
     [](const Tensors& x) { return at::gelu(at::gelu(at::silu(x[0]) * x[1]), "tanh"); }},
    {"add #0 #1; add $0 #2", 3, [](const Tensors& x) { return x[0] + x[1] + x[2]; }},
    {"mul #0 #1; mul #2 #3; sub $0 $1", 4, [](const Tensors& x) { return x[0] * x[1] - x[2] * x[3]; }},
    {"add! #0 #1; gelu $0; exp! $1; mul $2 #2", 3,
     [](const Tensors& x) { return at::exp(at::gelu(x[0] + x[1])) * x[2]; }},
    {"silu! #0; mul $0 #1; tanh! $1; div $2 #2", 3,
     [](const Tensors& x) { return at::tanh(at::silu(x[0]) * x[1]) / x[2]; }},
    {"mul #0 0.5; mul #1 3; add $0 $1; neg $2", 2, [](const Tensors& x) { return -(x[0] * 0.5 + x[1] * 3); }},
    {"neg #0; mul $0 2; exp #1; sub $1 $2; mul $3 #2; relu $4", 3,
     [](const Tensors& x) { return at::relu((-x[0] * 2 - at::exp(x[1])) * x[2]); }},
    {"sigmoid #0; mul #1 $0; sigmoid $1; sqrt $2; add #2 $3; exp $4", 3,
     [](const Tensors& x) { return at::exp(x[2] + at::sqrt(at::sigmoid(x[1] * at::sigmoid(x[0])))); }},
};

Tensors leaves(size_t count, at::IntArrayRef sizes, at::ScalarType dtype) {
  Tensors all;
  for (size_t i = 0; i < count; ++i) all.push_back(at::randn(sizes, at::kDouble).to(dtype).requires_grad_());
  return all;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(at::isnan(a), at::isnan(b)) && at::equal(at::nan_to_num(a), at::nan_to_num(b)) &&
         at::equal(at::signbit(a), at::signbit(b)) && a.strides() == b.strides();
}

TEST(Pointwise, ComputesTheBitsOfTheOperatorsOneByOne) {
  at::manual_seed(1);
  for (const Case& c : kCases) {
    for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{}, {0}, {7}, {4096}, {3, 5000}}) {
        const Tensors x = leaves(c.inputs, sizes, dtype);
        const at::Tensor fused = ops::pointwise(x, c.program), one_by_one = c.eager(x);
        EXPECT_TRUE(same_bits(fused.detach(), one_by_one.detach())) << c.program << " " << dtype;
        const at::Tensor g = at::randn(sizes).to(dtype);
        const auto a = torch::autograd::grad({fused}, x, {g}), b = torch::autograd::grad({one_by_one}, x, {g});
        for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << c.program << " " << dtype << i;
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(same_bits(ops::pointwise(x, c.program), one_by_one.detach()));
      }
    }
  }
}

TEST(Pointwise, TakesOtherLayoutsAndThreads) {
  at::manual_seed(2);
  const int threads = at::get_num_threads();
  for (const Case& c : kCases) {
    Tensors rows, columns, mixed;
    for (size_t i = 0; i < c.inputs; ++i) {
      rows.push_back(at::randn({200, 300}).requires_grad_());
      columns.push_back(at::randn({300, 200}).t().requires_grad_());
      mixed.push_back((i % 2 ? at::randn({200, 300}) : at::randn({300, 200}).t()).requires_grad_());
    }
    for (const Tensors& x : {rows, columns, mixed}) {
      auto both = [&](const at::Tensor& y) {
        at::manual_seed(4);
        Tensors all = torch::autograd::grad({y}, x, {at::randn_like(y)});
        all.push_back(y.detach());
        return all;
      };
      // With several threads torch cuts tensors elsewhere, and its vector and scalar functions differ in the last bit.
      at::set_num_threads(1);
      const Tensors one_by_one = both(c.eager(x));
      if (x[0].is_same(rows[0])) at::set_num_threads(3);
      const Tensors fused = both(ops::pointwise(x, c.program));
      for (size_t i = 0; i < fused.size(); ++i)
        EXPECT_TRUE(at::equal(at::nan_to_num(fused[i]), at::nan_to_num(one_by_one[i]))) << c.program << i;
    }
    at::set_num_threads(threads);
  }
}

TEST(Pointwise, GradientsHaveTheLayoutOfTheOperatorsOneByOne) {
  at::manual_seed(6);
  for (const Case& c : kCases) {
    const Tensors x = leaves(c.inputs, {40, 60}, at::kFloat), g = {at::randn({60, 40}).t()};
    const auto fused = torch::autograd::grad({ops::pointwise(x, c.program)}, x, g);
    const auto one_by_one = torch::autograd::grad({c.eager(x)}, x, g);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(same_bits(fused[i], one_by_one[i])) << c.program << i;
  }
}

TEST(Pointwise, KeepsOnlyWhatTheGradientNeeds) {
  auto needs = [](const char* text, std::vector<bool> wanted) {
    const PointwiseNeeds n = pointwise_needs(PointwiseProgram::parse(text), wanted);
    std::string all;
    for (const auto* flags : {&n.inputs, &n.kept, &n.again}) {
      for (const bool f : *flags) all += f ? '1' : '0';
      all += ' ';
    }
    return all;
  };
  EXPECT_EQ(needs("scale #0 0.3 1; scale #1 0.9 2; add $0 $1", {true, true}), "00 000 000 ") << "linear";
  EXPECT_EQ(needs("scale #0 1 3; gelu $0; scale $1 2 1", {true}), "1 000 100 ");
  EXPECT_EQ(needs("add! #0 #1; gelu $0", {true, true}), "00 10 00 ");
  EXPECT_EQ(needs("add #0 #1; gelu $0", {true, true}), "11 00 10 ");
  EXPECT_EQ(needs("mul #0 2; exp $0", {true}), "0 01 00 ") << "the result is there";
  EXPECT_EQ(needs("mul #0 #1", {true, false}), "01 0 0 ");
  EXPECT_EQ(needs("silu! #0; mul #1 $0", {true, false}), "11 00 00 ");
  EXPECT_EQ(needs("silu! #0; mul #1 $0", {false, true}), "00 10 00 ");
}

TEST(Pointwise, NoticesAWriteToWhatItSaved) {
  at::Tensor x = at::randn({5000}).requires_grad_();
  at::Tensor y = ops::pointwise({x}, "mul #0 2; exp $0");
  {
    const at::NoGradGuard no_grad;
    y.add_(1);
  }
  EXPECT_THROW(y.sum().backward(), c10::Error);
  at::Tensor z = ops::pointwise({x}, "mul #0 2; add $0 1");
  {
    const at::NoGradGuard no_grad;
    z.add_(1);
  }
  z.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({5000}, 2.0)));
}

TEST(Pointwise, ScalesForwardAndBackwardApart) {
  const at::Tensor x = at::randn({100}).requires_grad_();
  const at::Tensor y = ops::pointwise({x}, "scale #0 1 3; gelu $0; scale $1 2 1");
  EXPECT_TRUE(at::equal(y, at::gelu(x) * 2));
  const at::Tensor g = at::randn({100});
  EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {x}, {g})[0], at::gelu_backward(g, x) * 3));
}

TEST(Pointwise, GoesThroughLargeTensorsInBlocksOnAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    const at::Tensor x = at::randn({600001}).requires_grad_(), g = at::randn({600001});
    for (const char* program : {"scale #0 1 3; gelu $0; scale $1 2 1", "scale #0 1 3; tanh $0; scale $1 2 1"}) {
      const bool gelu = std::string_view(program).find("gelu") != std::string_view::npos;
      const at::Tensor y = ops::pointwise({x}, program), inner = gelu ? at::gelu(x) : at::tanh(x);
      EXPECT_TRUE(at::equal(y, inner * 2));
      const at::Tensor own = gelu ? at::gelu_backward(g, x) : at::tanh_backward(g, inner);
      EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {x}, {g})[0], own * 3));
    }
  }
  at::set_num_threads(before);
}

TEST(Pointwise, GivesGradientsOfThoseAskedForAlone) {
  at::Tensor a = at::randn({5000}).requires_grad_(), b = at::randn({5000});
  const at::Tensor y = ops::pointwise({a, b}, "mul #0 #1; mul $0 2");
  y.sum().backward();
  EXPECT_TRUE(at::equal(a.grad(), b * 2));
  EXPECT_FALSE(b.grad().defined());
}

TEST(Pointwise, GradientsOfGradientsAreThoseOfTheOperators) {
  at::manual_seed(3);
  for (const Case& c : kCases) {
    const Tensors x = leaves(c.inputs, {50}, at::kDouble);
    auto second = [&](const at::Tensor& y) {
      const auto first = torch::autograd::grad({y.sum()}, x, {}, std::nullopt, true);
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (const at::Tensor& g : first) sum = sum + (g * g).sum();
      return sum.requires_grad() ? torch::autograd::grad({sum}, x, {}, std::nullopt, false, true) : Tensors(x.size());
    };
    const auto a = second(ops::pointwise(x, c.program)), b = second(c.eager(x));
    for (size_t i = 0; i < x.size(); ++i) {
      const at::Tensor mine = a[i].defined() ? a[i] : at::zeros_like(x[i]);
      const at::Tensor other = b[i].defined() ? b[i] : at::zeros_like(x[i]);
      EXPECT_TRUE(at::allclose(at::nan_to_num(mine), at::nan_to_num(other))) << c.program;
    }
  }
}

TEST(Pointwise, ProgramsReadAndWrite) {
  for (const Case& c : kCases) EXPECT_EQ(PointwiseProgram::parse(c.program).to_string(), c.program);
  for (const char* wrong :
       {"", "add", "add #0", "add #0 #1 #2", "cos #0", "add $0 #0", "neg #0; neg #1; add $0 $0", "neg #0; neg #1",
        "mul #0 #0", "neg! #0 #1", "neg #x", "neg 1", "scale #0 1", "mul #0 abc", "neg #-1", "neg #99999"})
    EXPECT_THROW(PointwiseProgram::parse(wrong), Error) << wrong;
}

TEST(Pointwise, RefusesInputsThatDoNotFit) {
  const at::Tensor x = at::ones({3});
  EXPECT_THROW(ops::pointwise({x}, "add #0 #1"), Error);
  EXPECT_THROW(ops::pointwise({x, at::ones({4})}, "add #0 #1"), Error);
  EXPECT_THROW(ops::pointwise({x, at::ones({3}, at::kDouble)}, "add #0 #1"), Error);
  EXPECT_THROW(ops::pointwise({at::ones({3}, at::kLong)}, "neg #0"), Error);
  EXPECT_THROW(ops::pointwise({}, "neg #0"), Error);
}

}  // namespace
}  // namespace plumb

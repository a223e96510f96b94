// Kernels that are broken on purpose are turned off and named; right ones pass. Also on the test device, whose memory
// the checks may not read as the CPU's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/cuda/emulator_testing.h"
#include "plumb/cuda/kernel_texts.h"
#include "plumb/cuda/kernels.h"
#include "plumb/cuda/self_check.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/pointwise/parts.h"
#include "tests/test_device.h"

namespace plumb::cuda {
namespace {

using at::Tensor;
using ::testing::HasSubstr;

// The test device's tensors take the CUDA kernels, run by the emulator and checked, while one lives.
class SelfCheck : public ::testing::Test {
 protected:
  SelfCheck() {
    register_device_kernels(test_device().type(), &numerics_kernels());
    pointwise_parts::register_pointwise_kernels(test_device().type(), &pointwise_kernels());
    emulator.checks = true;
    c10::WarningUtils::set_warning_handler(&warnings);
  }
  ~SelfCheck() override {
    c10::WarningUtils::set_warning_handler(nullptr);
    pointwise_parts::register_pointwise_kernels(test_device().type(), nullptr);
    register_device_kernels(test_device().type(), nullptr);
    forget_verdicts();
  }

  // Every kind of kernel once, aligned and not. On the test device, which is slow, those of one dtype.
  std::vector<Tensor> results() {
    std::vector<Tensor> all;
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      if (dtype != at::kFloat && !test_device().is_cpu()) continue;
      for (const int64_t skipped : {0, 1}) {
        const Tensor x = there(at::linspace(-9, 9, 3 * 64 + skipped).to(dtype)).slice(0, skipped);
        for (const char* format : {"e4m3fn-RN", "E5M2-SR"}) {
          all.push_back(aten_kernels::quantise(x, FPFormat::parse(format), 7));
          all.push_back(aten_kernels::encode(x, FPFormat::parse(format), 7));
        }
        Tensor before, after;
        all.push_back(aten_kernels::quantise_and_gather(x, FPFormat::parse("E4M3-RN"), 7, true, &before, &after));
        all.push_back(at::cat({before.slice(0, 4), after.slice(0, 4)}));
        all.push_back(aten_kernels::decode(all[1], FPFormat::parse("e4m3fn"), dtype));
        for (const char* format : {"mxfp8", "nvfp4"})
          for (const int64_t length : {64, 24}) {
            const auto blocks = aten_kernels::round_blocks(x.view({-1, length}), FPFormat::parse(format), 7, true);
            all.insert(all.end(), {blocks.values, blocks.codes, blocks.scales});
          }
        const Tensor noise = at::empty_like(x);
        aten_kernels::keep(noise, 2, 0x7fffffff, 7);
        all.insert(all.end(), {noise, aten_kernels::hash(x)});
        const Tensor input = x.clone().requires_grad_();
        const Tensor y = ops::pointwise({input, x}, "silu #0; mul $0 #1");
        y.sum().backward();
        all.insert(all.end(), {y.detach(), input.grad()});
      }
    }
    for (Tensor& t : all) t = t.cpu();
    return all;
  }
  // What results() gives is right, with kernels or without.
  static void expect_close(const std::vector<Tensor>& found, const std::vector<Tensor>& wanted) {
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i].is_floating_point() && found[i].scalar_type() != at::kDouble)
        EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-2, 1e-2, true)) << i;
      else if (!found[i].is_floating_point())
        EXPECT_TRUE(at::equal(found[i], wanted[i])) << i;
    }
  }

  struct Warnings : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  } warnings;
  Emulator emulator;
};

TEST_F(SelfCheck, RightKernelsPassOnceEach) {
  emulated(emulator, [&] { results(); });
  EXPECT_THAT(warnings.texts, ::testing::IsEmpty());
  const auto verdicts = kernel_verdicts();
  EXPECT_GT(verdicts.size(), test_device().is_cpu() ? 40u : 13u);
  for (const KernelVerdict& verdict : verdicts) EXPECT_EQ(verdict.wrong, "") << verdict.kernel;
  const int before = emulator.started;
  results();
  EXPECT_EQ(kernel_verdicts().size(), verdicts.size());
  EXPECT_LT(emulator.started - before, before) << "a kernel is checked once";
}

TEST_F(SelfCheck, KernelsBrokenInThreeWaysAreOffAndTheirWorkIsDone) {
  emulated(emulator, [&] { results(); });
  emulator.checks = false;
  const std::vector<Tensor> wanted = results();
  emulator.checks = true;
  const auto never = [](const std::string&, const std::function<void()>&, void**) {};
  const auto fails = [](const std::string&, const std::function<void()>&, void**) {
    throw Error(ErrorKind::ExecutionFailed, "the CUDA driver's cuLaunchKernel: misaligned address");
  };
  // The arguments of every kernel begin with what it reads: one value of it is another.
  const auto damaged = [](const std::string&, const std::function<void()>& run, void** arguments) {
    auto** first = static_cast<unsigned char**>(arguments[0]);
    auto* bytes =
        reinterpret_cast<uintptr_t>(*first) < 1000000 ? first[1] : *first;  // a pointwise program begins with n
    for (int i = 96; i < 128; ++i) bytes[i] ^= 0x41;
    run();
    for (int i = 96; i < 128; ++i) bytes[i] ^= 0x41;
  };
  const std::pair<Emulator::Instead, const char*> ways[] = {
      {never, "instead of"}, {fails, "misaligned address"}, {damaged, "instead of"}};
  for (const auto& [way, why] : ways) {
    forget_verdicts();
    warnings.texts.clear();
    emulator.instead = way;
    expect_close(results(), wanted);
    int off = 0;
    for (const KernelVerdict& verdict : kernel_verdicts()) {
      off += !verdict.wrong.empty();
      EXPECT_THAT(verdict.wrong, HasSubstr(why)) << verdict.kernel;
    }
    EXPECT_EQ(off, int(kernel_verdicts().size()));
    EXPECT_EQ(warnings.texts.size(), size_t(off)) << "one warning each";
    ASSERT_FALSE(warnings.texts.empty());
    EXPECT_THAT(warnings.texts[0], HasSubstr("pass<float"));
    EXPECT_THAT(warnings.texts[0], HasSubstr(test_device().str()));
  }
  // Two kernels only ever run beside another one: that one is off.
  const std::pair<std::string, const char*> helpers[] = {{finish_text(), "pass<"},
                                                         {largest_text(kernel::kFloat32, 4), "blocks<"}};
  for (const auto& [helper, user] : helpers) {
    forget_verdicts();
    warnings.texts.clear();
    emulator.instead = [&text = helper](const std::string& started, const std::function<void()>& run, void**) {
      if (started != text) run();
    };
    expect_close(results(), wanted);
    EXPECT_THAT(warnings.texts, ::testing::Each(HasSubstr(user)));
    EXPECT_FALSE(warnings.texts.empty()) << user;
  }
}

}  // namespace
}  // namespace plumb::cuda

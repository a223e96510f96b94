#include "plumb/training/doctor.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <cstdlib>
#include <future>

#include "plumb/core/cores.h"
#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/core/table.h"
#include "plumb/cuda/self_check.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/cpu_kind.h"
#include "plumb/numerics/dropout_noise.h"
#include "plumb/numerics/kernels.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/quantise.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/transport/listen.h"
#include "plumb/pipeline/transport/process_group.h"
#include "plumb/pointwise/pointwise.h"

namespace plumb {
namespace {

using at::Tensor;

std::string joined_words(const std::vector<std::string>& words, const char* none) {
  return words.empty() ? none : join(words, {}, " ");
}

Finding threads() {
  const int cores = num_cores();
  Finding f{"threads", str(at::get_num_threads(), " of torch's on ", cores, " processors"), ""};
  if (at::get_num_threads() > cores)
    f.remedy = str("more threads than processors slow each other down: OMP_NUM_THREADS=", cores);
  const char* waits = std::getenv("OMP_WAIT_POLICY");
  f.found += std::string(", OMP_WAIT_POLICY ") + (waits ? waits : "is not set");
  return f;
}

// FP8 products of torch on this CPU.
Finding scaled_products() {
  Finding f{"FP8 products on the CPU", "torch's scaled_mm works", ""};
  try {
    const Tensor a = at::ones({32, 32}).to(at::kFloat8_e4m3fn), one = at::ones({});
    at::_scaled_mm(a, a.t(), one, one, {}, {}, at::kFloat);
  } catch (const std::exception&) {
    f.found = "this CPU, with these settings, has no scaled_mm; simulated FP8 works";
  }
  return f;
}

// Every kind of kernel, so that each is checked.
void use_every_kernel(c10::Device device) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    const Tensor x = at::linspace(-2, 2, 512, at::TensorOptions().device(device)).to(dtype).view({8, 64});
    for (const char* format : {"e4m3fn", "e5m2-SR", "mxfp8", "nvfp4"}) quantise(x, FPFormat::parse(format), 1);
    decode(encode(x, FPFormat::parse("e4m3fn"), 1), FPFormat::parse("e4m3fn"), dtype);
    ops::tensor_metrics(x, true);
    dropout_noise(x, 0.9, 1.0, 1);
    ops::pointwise({x, x}, "silu #0; mul $0 #1");
  }
}

void look_at_cuda(std::vector<Finding>& all) {
  if (!at::hasCUDA()) {
    all.push_back({"CUDA", "this torch has none, or sees no device: everything runs on the CPU", ""});
    return;
  }
  const int count = at::detail::getCUDAHooks().deviceCount();
  all.push_back({"CUDA", str(count, count == 1 ? " device" : " devices"), ""});
  for (int i = 0; i < count; ++i) {
    const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    try {
      use_every_kernel(device);
    } catch (const std::exception& e) {
      all.push_back({device.str(), std::string("an operator failed: ") + e.what(),
                     "PLUMB_CUDA_KERNELS=0 runs without plumb's kernels"});
    }
  }
  for (const cuda::KernelVerdict& verdict : cuda::kernel_verdicts()) {
    all.push_back({verdict.device, verdict.kernel + (verdict.wrong.empty() ? ": right" : " is off: " + verdict.wrong),
                   verdict.wrong.empty() ? "" : "torch's operators do its work; please report this line"});
  }
}

// Two ranks, threads of this process, meet over loopback.
Finding gloo() {
  Finding f{"Gloo", "two ranks met over loopback", ""};
  try {
    RankEnvironment env{.world_size = 2};
    env.master_port = 0;
    env.listening_socket = listen_at(env.master_address, env.master_port);
    const GlooOptions options{.timeout = std::chrono::seconds(10)};
    auto first = std::async(std::launch::async, [&] { return make_gloo_group(env, options); });
    RankEnvironment second = env;
    second.rank = 1, second.listening_socket = -1;
    make_gloo_group(second, options);
    first.get();
  } catch (const std::exception& e) {
    f.found = std::string("no group can be made: ") + e.what();
    f.remedy = "let this process listen on 127.0.0.1";
  }
  return f;
}

}  // namespace

std::vector<Finding> doctor() {
  const CpuKind& m = cpu_kind();
  std::vector<Finding> all = {
      {"CPU", (m.vendor.empty() ? "unknown maker" : m.vendor) + ": " + joined_words(m.instructions, "no vectors"), ""},
      {"torch",
       m.torch + ", ATen " + m.aten + (at::hasMKL() ? ", MKL" : ", no MKL") +
           (at::hasMKLDNN() ? ", oneDNN" : ", no oneDNN"),
       ""},
      {"plumb's kernels", std::string("for ") + kernel::kernels().level, ""},
      {"settings that choose kernels", joined_words(m.settings, "none"), ""},
      threads(),
      scaled_products()};
  look_at_cuda(all);
  all.push_back({"NCCL", at::hasCUDA() ? "of torch.distributed's groups, from Python" : "none without CUDA", ""});
  all.push_back(gloo());
  return all;
}

std::string to_text(const std::vector<Finding>& findings) {
  Table table;
  size_t wrong = 0;
  for (const Finding& f : findings) {
    table.rows.push_back({f.topic, f.found});
    if (f.remedy.empty()) continue;
    ++wrong;
    table.rows.push_back({"", "try: " + f.remedy});
  }
  return to_text(table) +
         (wrong == 0 ? "Nothing is wrong.\n" : str(wrong, wrong == 1 ? " finding" : " findings", " to look at.\n"));
}

}  // namespace plumb

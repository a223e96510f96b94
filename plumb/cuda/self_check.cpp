#include "plumb/cuda/self_check.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cmath>
#include <map>
#include <mutex>
#include <sstream>

#include "plumb/cuda/launch.h"

namespace plumb::cuda {
namespace {

using at::Tensor;

struct Verdicts {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, std::string> wrong;  // by device and text; "": right
  std::vector<KernelVerdict> in_order;
};

Verdicts& verdicts() {
  static Verdicts all;
  return all;
}

thread_local bool checking = false;

struct Checking {
  Checking() { checking = true; }
  ~Checking() { checking = false; }
};

std::vector<float> hard_floats(at::ScalarType dtype) {
  // The bits of dtype's own values below the sign.
  const int mantissa = dtype == at::kFloat ? 23 : dtype == at::kHalf ? 10 : 7;
  std::vector<float> values;
  for (uint32_t e = 0; e < 256; ++e) {
    for (const uint32_t kept : {0u, 1u, 2u, 3u}) {
      for (const int64_t apart : {-1, 0, 1}) {
        const uint32_t unit = 1u << (23 - mantissa);
        const int64_t tie = kept == 0 ? 0 : int64_t(1) << (23 - std::min<uint32_t>(kept, uint32_t(mantissa)));
        const auto fraction = uint32_t(tie + apart * int64_t(unit)) & 0x7fffff;
        for (const uint32_t sign : {0u, 0x80000000u}) values.push_back(std::bit_cast<float>(sign | e << 23 | fraction));
      }
    }
  }
  if (values.size() % 2 == 0) values.push_back(1);
  return values;
}

// A copy on the device, 16 bytes aligned or an element behind that.
Tensor placed(const Tensor& values, c10::Device device, bool aligned) {
  const int64_t n = values.numel(), skipped = aligned ? 0 : 1;
  const Tensor memory = at::empty({n + skipped}, values.options().device(device));
  return memory.narrow(0, skipped, n).copy_(values);
}

}  // namespace

std::string name_of(const std::string& text) {
  const size_t body = text.rfind("{\n  ");
  const size_t begin = body == std::string::npos ? 0 : body + 4;
  std::string name = text.substr(begin, text.find('(', begin) - begin);
  if (const size_t header = text.find("plumb/cuda/"); name.size() > 120 && header != std::string::npos)
    name = text.substr(header + 11, text.find('"', header) - header - 11);
  for (size_t at; (at = name.find("plumb::kernel::")) != std::string::npos;) name.erase(at, 15);
  return name;
}

bool is_off(c10::Device device, const std::string& text) {
  Verdicts& all = verdicts();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.wrong.find({device.str(), text});
  return found != all.wrong.end() && !found->second.empty();
}

void turn_off(c10::Device device, const std::string& text, const std::string& why) {
  Verdicts& all = verdicts();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::string& wrong = all.wrong[{device.str(), text}];
    if (!wrong.empty()) return;
    wrong = why;
    all.in_order.push_back({device.str(), name_of(text), why});
  }
  TORCH_WARN("plumb's CUDA kernel ", name_of(text), " is off on ", device.str(), ": ", why,
             ". torch's operators do the same, slower. 'plumb doctor' lists all kernels; please report this one.");
}

bool is_right(c10::Device device, const std::string& text, const std::function<std::string()>& check) {
  if (checking || !checks_kernels()) return true;
  Verdicts& all = verdicts();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (const auto found = all.wrong.find({device.str(), text}); found != all.wrong.end()) return found->second.empty();
  }
  std::string wrong;
  if (!was_right(device, text)) {
    const Checking guard;
    try {
      wrong = check();
    } catch (const std::exception& e) {
      wrong = std::string("it failed: ") + e.what();
    }
    if (wrong.empty()) note_right(device, text);
  }
  if (!wrong.empty()) {
    turn_off(device, text, wrong);
    return false;
  }
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.wrong.try_emplace({device.str(), text}).second) all.in_order.push_back({device.str(), name_of(text), ""});
  return true;
}

std::vector<KernelVerdict> kernel_verdicts() {
  const std::lock_guard<std::mutex> lock(verdicts().mutex);
  return verdicts().in_order;
}

void forget_verdicts() {
  const std::lock_guard<std::mutex> lock(verdicts().mutex);
  verdicts().wrong.clear();
  verdicts().in_order.clear();
}

Tensor hard_values(at::ScalarType dtype, c10::Device device, bool aligned) {
  return placed(at::tensor(hard_floats(dtype)).to(dtype), device, aligned);
}

Tensor plain_values(at::ScalarType dtype, c10::Device device, bool aligned, uint64_t seed) {
  constexpr int64_t n = 1027;
  // A Weyl sequence: the same everywhere, and torch's generators stay where they are.
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) {
    const double turns = double(i + 1) * (0.6180339887498949 + 0.01 * double(seed));
    values[size_t(i)] = float(8 * (turns - std::floor(turns)) - 4);
  }
  values[3 + seed % 7] = 0, values[20 + seed % 7] = NAN;
  return placed(at::tensor(values).to(dtype), device, aligned);
}

std::string difference(const Tensor& found, const Tensor& wanted, double bound) {
  const Tensor a = found.to(at::kCPU).contiguous(), b = wanted.to(at::kCPU).contiguous();
  const bool floats = at::isFloatingType(a.scalar_type());
  const auto bits = a.element_size() == 8   ? at::kLong
                    : a.element_size() == 4 ? at::kInt
                    : a.element_size() == 2 ? at::kShort
                                            : at::kByte;
  Tensor same = bound > 0 ? at::isclose(a, b, bound, bound) : a.view(bits) == b.view(bits);
  if (floats) same = same.logical_or(a.isnan().logical_and(b.isnan()));
  const Tensor wrong = same.logical_not().flatten().nonzero();
  if (wrong.numel() == 0) return "";
  const auto at = wrong[0][0].item<int64_t>();
  std::ostringstream text;
  text.precision(9);
  text << "value " << at << " is " << a.flatten()[at].to(at::kDouble).item<double>() << " instead of "
       << b.flatten()[at].to(at::kDouble).item<double>();
  return text.str();
}

}  // namespace plumb::cuda

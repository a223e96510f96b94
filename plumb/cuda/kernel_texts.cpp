#include "plumb/cuda/kernel_texts.h"

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/numerics/element.h"

namespace plumb::cuda {
namespace {

const char* bool_name(bool value) { return value ? "true" : "false"; }

std::string way_names(const kernel::RoundingSpec& rounding) {
  const char* way = "";
  switch (kernel::way_of<float>(rounding)) {
    case kernel::kNearestByAddition: way = "kNearestByAddition"; break;
    case kernel::kNearestByBits: way = "kNearestByBits"; break;
    case kernel::kByChance: way = "kByChance"; break;
    case kernel::kDown: way = "kDown"; break;
  }
  // Rounding toward zero has no simple form.
  return std::string(way) + ", " +
         bool_name(kernel::is_simple<float>(rounding) && kernel::way_of<float>(rounding) != kernel::kDown);
}

std::string kernel_text(const char* header, const std::string& parameters, const std::string& call) {
  return std::string("#include \"plumb/cuda/") + header +
         "\"\nusing namespace plumb::cuda_kernel;\nextern \"C\" __global__ void __launch_bounds__(kThreads) " + kEntry +
         "(" + parameters + ") {\n  " + call + ";\n}\n";
}

// Returns an instance of a template of `header` that takes its arguments as one struct.
std::string kernel_of(const char* header, const char* arguments, const char* name,
                      const std::vector<std::string>& instance) {
  return kernel_text(header, std::string("const __grid_constant__ ") + arguments + " a",
                     std::string(name) + "<" + join(instance) + ">(a)");
}

}  // namespace

const char* type_name(kernel::Carrier carrier) {
  switch (carrier) {
    case kernel::kFloat32: return "float";
    case kernel::kFloat16: return "plumb::kernel::Half";
    case kernel::kBFloat16: return "plumb::kernel::BHalf";
    default: throw Error(ErrorKind::Internal, "there is no CUDA kernel for float64");
  }
}

kernel::CodeSpec no_codes() { return {3, 7, 8, 0, 0, false, false}; }

std::string text_of(const PassKernel& k) {
  const bool finite = k.codes && k.codes->nan_code < 0 && k.codes->negative_zero;
  const char* output = !k.writes ? "kNoOutput" : !k.codes ? "kValues" : finite ? "kFiniteCodes" : "kCodes";
  return kernel_of(
      "pass.cuh", "PassArguments", "pass",
      {type_name(k.carrier), std::to_string(k.pack), k.writes || k.after ? way_names(k.rounding) : "kDown, false",
       output, bool_name(k.before), bool_name(k.after), bool_name(k.histogram)});
}

std::string finish_text() {
  return kernel_text("measure.cuh",
                     "const Gathered* blocks, int64_t count, const uint64_t* counts, int64_t numel, double* gathered, "
                     "double* metrics",
                     "finish_metrics(blocks, count, counts, numel, gathered, metrics)");
}

std::string keep_text(kernel::Carrier carrier, int pack) {
  return kernel_of("dropout.cuh", "KeepArguments", "keep", {type_name(carrier), std::to_string(pack)});
}

std::string hash_text(kernel::Carrier carrier) {
  return kernel_of("hash.cuh", "HashArguments", "hash", {carrier == kernel::kFloat32 ? "uint32_t" : "uint16_t"});
}

std::string decode_text(kernel::Carrier carrier, int pack) {
  return kernel_of("pass.cuh", "DecodeArguments", "decode", {type_name(carrier), std::to_string(pack)});
}

std::string largest_text(kernel::Carrier carrier, int pack) {
  return kernel_of("blocks.cuh", "LargestArguments", "largest", {type_name(carrier), std::to_string(pack)});
}

std::string blocks_text(kernel::Carrier carrier, const kernel::BlockSpec& block, int64_t length,
                        const kernel::RoundingSpec& rounding) {
  return kernel_of("blocks.cuh", "BlocksArguments", "round_blocks",
                   {type_name(carrier), std::to_string(block.size), bool_name(!block.power_of_two),
                    bool_name(length % block.size == 0), way_names(rounding)});
}

}  // namespace plumb::cuda

#include "plumb/training/usage.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/core/output_file.h"
#include "plumb/core/table.h"
#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/graph/summary.h"

namespace plumb {

bool is_tensor_file(const std::string& path) {
  return path.ends_with(".pt") || path.ends_with(".pth") || path.ends_with(".npy") || path.ends_with(".safetensors");
}

c10::IValue load_tensor_file(const std::string& path) {
  if (!path.ends_with(".safetensors")) return load_tensors(path);
  const SafetensorsFile file(path);
  if (file.entries().size() == 1) return file.read(file.entries()[0].name);
  c10::Dict<std::string, at::Tensor> all;
  for (const SafetensorsEntry& entry : file.entries()) all.insert(entry.name, file.read(entry.name));
  return all;
}

void check_writable(const std::vector<std::pair<std::string, std::string>>& outputs,
                    const std::vector<std::string>& inputs) {
  std::map<std::filesystem::path, std::string> options;
  for (const auto& named : outputs) {
    const std::string &option = named.first, &path = named.second;
    if (path.empty() || path == "-") continue;
    std::error_code missing;
    for (const std::string& input : inputs) {
      for (const std::string& file : {input, input.substr(input.find('=') + 1)}) {
        if (std::filesystem::equivalent(path, file, missing)) {
          throw UsageError(option + " " + path + ": is the same file as the input " + file + ", which would be lost",
                           option + " with the name of a new file");
        }
      }
    }
    const auto whole = std::filesystem::absolute(path, missing);
    const auto [it, fresh] = options.emplace(std::filesystem::weakly_canonical(whole, missing), option);
    if (!fresh) {
      throw UsageError(option + " " + path + ": is the same file as that of " + it->second + ", which would be lost",
                       option + " with another name");
    }
    prefixed(option + " ", [&] { const OutputFile probe(path); });
  }
}

double memory_of_process(c10::Device device) {
  if (!device.is_cpu()) {
    auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
    if (!allocator || !allocator->initialized()) return 0;
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<double>(allocator->getDeviceStats(device.index()).allocated_bytes[all].peak);
  }
  std::ifstream pages("/proc/self/statm");
  double all = 0, resident = 0;
  pages >> all >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
}

void refuse_folder(const std::string& file) {
  std::error_code failed;
  if (!std::filesystem::is_directory(file, failed)) return;
  throw Error(ErrorKind::BadFile, file + ": is a folder, and no program", "",
              "name a .pt2 file; plumb import FOLDER -o model.pt2 makes one of a folder of transformers");
}

std::string type_text(const std::optional<TensorMeta>& meta) { return meta ? type_text(*meta) : "?"; }

std::string rate_text(double rate) {
  if (!(rate >= 100 && rate < 1e15)) return short_number(rate);
  std::string text = std::to_string(std::llround(rate));
  for (size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

std::string type_text(const at::Tensor& tensor) { return type_text(TensorMeta::of(tensor)); }

}  // namespace plumb

// Wrong use of options, and the words that options' errors share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>

#include "plumb/core/prefixed.h"
#include "plumb/graph/meta.h"

namespace plumb {

// An option that cannot be used as it was given: the command ends with exit code 2. An InvalidArgument everywhere else.
class UsageError : public Error {
 public:
  // message names the option; fix says what to give instead.
  UsageError(const std::string& message, const std::string& fix)
      : Error(ErrorKind::InvalidArgument, message, "", fix) {}
};

// Runs what uses an option: its errors are wrong use of it, "OPTION: MESSAGE" with their remedy or, without one, `fix`.
template <class Function>
auto used_by(const std::string& option, const Function& use, const std::string& fix = "") {
  try {
    return use();
  } catch (const Error& e) {
    throw UsageError(option + ": " + e.message(), e.remedy().empty() ? fix : e.remedy());
  }
}

bool is_tensor_file(const std::string& path);  // .pt, .pth, .npy or .safetensors
// Reads what load_tensors() reads, and .safetensors files: their only tensor, or a dict of all.
c10::IValue load_tensor_file(const std::string& path);

// Called before work that takes long, with options and their paths ("" and "-": no file). Throws Error naming the
// option if no file can be written there. A UsageError if the file is one of `inputs` (FILE or NAME=FILE), or that of
// another of the options, under any name: it would be replaced.
void check_writable(const std::vector<std::pair<std::string, std::string>>& outputs,
                    const std::vector<std::string>& inputs = {});

// Throws Error(BadFile) for a folder in the place of a program's file.
void refuse_folder(const std::string& file);

// Returns "f32[2, 3]", with symbols where a dimension has one.
std::string type_text(const std::optional<TensorMeta>& meta);
// Returns the bytes of this process: on the CPU those of its memory that are in the machine's; on another device the
// most that torch's allocator had given out there at once. 0 if unknown.
double memory_of_process(c10::Device device);

std::string type_text(const at::Tensor& tensor);

// Returns a number of something a second: "91,720", or below 100 "3.25".
std::string rate_text(double rate);

}  // namespace plumb

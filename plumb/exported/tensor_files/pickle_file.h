// Tensors as torch.save writes them: a zip archive with a pickle in it. Only plain data is read, nothing is called.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <string_view>

namespace plumb {

// Reads a torch.save'd tensor, or dict (string or int keys), list or tuple of them with numbers, strings and None among
// them. Any other class in the pickle is refused by name. Throws Error (BadFile).
c10::IValue unpickle_file(const std::string& path);
// Reads the bytes of such an archive; `name` is for messages.
c10::IValue unpickle_archive(std::string_view bytes, const std::string& name);

}  // namespace plumb

#include "plumb/core/file.h"

#include <string>
#include <system_error>

#include "plumb/core/output_file.h"

namespace plumb {

void write_file_atomically(const std::filesystem::path& path, std::string_view contents) {
  std::error_code left_to_the_file;  // which names the path and the reason
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), left_to_the_file);
  OutputFile file(path.string());
  file.write(contents.data(), contents.size());
  file.commit();
}

}  // namespace plumb

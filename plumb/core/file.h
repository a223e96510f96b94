// Files written whole or not at all.
#pragma once

#include <filesystem>
#include <string_view>

namespace plumb {

// Writes beside `path` and renames: readers see the old file or the new one, never half of it, and a failed write
// leaves the old file as it was and nothing beside it. A path that is a symbolic link is written through. Folders that
// do not exist yet are made. Raises Error(InvalidArgument) that names the path and the system's reason.
void write_file_atomically(const std::filesystem::path& path, std::string_view contents);

}  // namespace plumb

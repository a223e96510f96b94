// Files written whole or not at all.
#pragma once

#include <filesystem>
#include <string_view>

namespace plumb {

// An OutputFile of these bytes: readers see the old file or the new one, never half of it, and a failed write leaves
// the old file as it was and nothing beside it. Folders that do not exist yet are made.
void write_file_atomically(const std::filesystem::path& path, std::string_view contents);

}  // namespace plumb

# Header-only, from the distribution (libtomlplusplus-dev).
find_path(TOMLPLUSPLUS_INCLUDE_DIR toml++/toml.h)
if(NOT TOMLPLUSPLUS_INCLUDE_DIR)
  message(FATAL_ERROR "toml++/toml.h is missing: install libtomlplusplus-dev (Debian), or set TOMLPLUSPLUS_INCLUDE_DIR to its folder.")
endif()
target_include_directories(plumb_recording SYSTEM PRIVATE "${TOMLPLUSPLUS_INCLUDE_DIR}")

# Highway is used by its headers alone, from the distribution (libhwy-dev).
find_path(HIGHWAY_INCLUDE_DIR hwy/highway.h)
if(NOT HIGHWAY_INCLUDE_DIR)
  message(FATAL_ERROR "hwy/highway.h is missing: install libhwy-dev (Debian), or set HIGHWAY_INCLUDE_DIR to its folder.")
endif()
target_include_directories(plumb_numerics SYSTEM PRIVATE "${HIGHWAY_INCLUDE_DIR}")

# One source, three CPU levels; never flags that change what arithmetic means (-ffast-math, flush to zero). Aligned loops
# keep their speed when code around them changes: by chance some lost a quarter.
set(_levels kernels_baseline kernels_avx2 kernels_avx512)
foreach(_level IN LISTS _levels)
  set(_file "${CMAKE_CURRENT_SOURCE_DIR}/plumb/numerics/${_level}.cpp")
  set(_options -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -falign-functions=64 -falign-loops=64)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
    if(_level STREQUAL kernels_baseline)
      list(APPEND _options -march=x86-64-v2)  # what torch asks of a CPU
    elseif(_level STREQUAL kernels_avx2)
      list(APPEND _options -mavx2 -mfma -mf16c -mbmi -mbmi2 -mtune=haswell)
    elseif(_level STREQUAL kernels_avx512)
      # All that Highway's functions ask for (1.3: conflict detection, too): others cannot be inlined.
      list(APPEND _options -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mbmi -mbmi2
           -mprefer-vector-width=512 -mtune=skylake-avx512)
      # GCC 12 warns of the undefined lanes in its own header (GCC bug 105593).
      list(APPEND _options -Wno-uninitialized $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    endif()
  endif()
  # A precompiled header must be read with the options it was made with.
  set_source_files_properties("${_file}" PROPERTIES COMPILE_OPTIONS "${_options}" SKIP_PRECOMPILE_HEADERS ON)
endforeach()
set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/plumb/numerics/kernels.cpp"
                            PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)

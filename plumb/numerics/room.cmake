# One source, three CPU levels; never flags that change what arithmetic means (-ffast-math, flush to zero).
set(_levels kernels_baseline kernels_avx2 kernels_avx512)
foreach(_level IN LISTS _levels)
  set(_file "${CMAKE_CURRENT_SOURCE_DIR}/plumb/numerics/${_level}.cpp")
  set(_options -O3 -fno-math-errno -fno-trapping-math)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
    if(_level STREQUAL kernels_avx2)
      list(APPEND _options -mavx2 -mfma -mf16c -mtune=haswell)
    elseif(_level STREQUAL kernels_avx512)
      list(APPEND _options -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c
           -mprefer-vector-width=512 -mtune=skylake-avx512)
      # GCC 12 warns of the undefined lanes in its own header (GCC bug 105593).
      list(APPEND _options -Wno-uninitialized -Wno-maybe-uninitialized)
    endif()
  endif()
  # A precompiled header must be read with the options it was made with.
  set_source_files_properties("${_file}" PROPERTIES COMPILE_OPTIONS "${_options}" SKIP_PRECOMPILE_HEADERS ON)
endforeach()
set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/plumb/numerics/kernels.cpp"
                            PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)

# The torch of a Python environment as the imported target `torch_wheel`.
#
# torch's own TorchConfig.cmake is not used: with a CUDA wheel it stops unless a CUDA toolkit of the same
# version is installed, although host code needs nothing beyond the headers and libraries in the wheel.
#
# In:  PLUMB_PYTHON, a Python interpreter that can import torch, or PLUMB_TORCH_DIR, torch's folder itself.
# Out: target torch_wheel, TORCH_WHEEL_DIR, TORCH_WHEEL_VERSION, TORCH_WHEEL_CUDA (ON/OFF)

if(TARGET torch_wheel)
  return()
endif()

if(PLUMB_TORCH_DIR)
  if(NOT EXISTS "${PLUMB_TORCH_DIR}/version.py")
    message(FATAL_ERROR "plumb: PLUMB_TORCH_DIR='${PLUMB_TORCH_DIR}' is no torch folder (it has no version.py).")
  endif()
  set(TORCH_WHEEL_DIR "${PLUMB_TORCH_DIR}")
  file(STRINGS "${PLUMB_TORCH_DIR}/version.py" _torch_line REGEX "^__version__ *=" LIMIT_COUNT 1)
  string(REGEX REPLACE "^[^'\"]*['\"]([^'\"]*)['\"].*$" "\\1" TORCH_WHEEL_VERSION "${_torch_line}")
else()
  if(NOT PLUMB_PYTHON)
    find_program(PLUMB_PYTHON NAMES python3 python)
  endif()
  # Asking torch itself takes seconds (it imports the package): find its folder and version without importing it.
  execute_process(
    COMMAND "${PLUMB_PYTHON}" -c "
import importlib.util, os, runpy
d = os.path.dirname(importlib.util.find_spec('torch').origin)
v = runpy.run_path(os.path.join(d, 'version.py'))
print(d, v['__version__'], sep=';', end='')"
    OUTPUT_VARIABLE _torch_found RESULT_VARIABLE _torch_rc ERROR_QUIET)
  if(NOT _torch_rc EQUAL 0)
    message(FATAL_ERROR "plumb needs torch 2.11 or newer: '${PLUMB_PYTHON}' has none. "
                        "Set PLUMB_PYTHON to a Python that can import torch.")
  endif()
  list(GET _torch_found 0 TORCH_WHEEL_DIR)
  list(GET _torch_found 1 TORCH_WHEEL_VERSION)
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+(\\.[0-9]+)?" _torch_number "${TORCH_WHEEL_VERSION}")
if(_torch_number VERSION_LESS 2.11)
  message(FATAL_ERROR "plumb needs torch 2.11 or newer; ${TORCH_WHEEL_DIR} is ${TORCH_WHEEL_VERSION}.")
endif()

set(TORCH_WHEEL_CUDA OFF)
if(EXISTS "${TORCH_WHEEL_DIR}/lib/libtorch_cuda.so")
  set(TORCH_WHEEL_CUDA ON)
endif()

# at::parallel_for is a header: without OpenMP it is a loop on one thread. The runtime is the one torch loads. libgomp
# has nothing of what clang's loops call: a second runtime in the process would count threads of its own.
file(GLOB _torch_openmp LIST_DIRECTORIES OFF "${TORCH_WHEEL_DIR}/lib/libgomp*.so*" "${TORCH_WHEEL_DIR}/lib/libiomp5.so")
list(APPEND _torch_openmp gomp)
list(GET _torch_openmp 0 _torch_openmp)
if(_torch_openmp MATCHES iomp5)
  set(_torch_openmp_flag "$<$<COMPILE_LANGUAGE:CXX>:-fopenmp>")
else()
  set(_torch_openmp_flag "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fopenmp>")
endif()

add_library(torch_wheel INTERFACE IMPORTED)
set_target_properties(torch_wheel PROPERTIES
  INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
    "${TORCH_WHEEL_DIR}/include;${TORCH_WHEEL_DIR}/include/torch/csrc/api/include"
  INTERFACE_INCLUDE_DIRECTORIES
    "${TORCH_WHEEL_DIR}/include;${TORCH_WHEEL_DIR}/include/torch/csrc/api/include"
  # c10d's headers hide Gloo unless told it is there, as it is in every Linux wheel.
  INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;_GLIBCXX_USE_CXX11_ABI=1"
  INTERFACE_COMPILE_OPTIONS "${_torch_openmp_flag}"
  # libtorch.so brings CUDA's libraries, though no symbol of it is needed. It comes behind the C++ library: that of torch
  # 2.11 has a std::filesystem of its own, which crashes.
  INTERFACE_LINK_LIBRARIES
    "${TORCH_WHEEL_DIR}/lib/libtorch_cpu.so;${TORCH_WHEEL_DIR}/lib/libc10.so;${_torch_openmp};stdc++;${TORCH_WHEEL_DIR}/lib/libtorch.so"
  # A CUDA wheel's libraries need others that only their own run paths find.
  INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed,--allow-shlib-undefined")

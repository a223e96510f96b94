# Installs the build PLUMB_BUILD into a fresh prefix, builds this project against it and runs it.
set(work "${PLUMB_BUILD}/consumer")
file(REMOVE_RECURSE "${work}")
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
  if(NOT rc EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${rc}:\n${out}")
  endif()
  message("${out}")
endfunction()

step("${CMAKE_COMMAND}" --install "${PLUMB_BUILD}" --prefix "${work}/prefix")

# Names that only plumb's own tests or files use are not installed.
file(GLOB_RECURSE headers RELATIVE "${work}/prefix/include" "${work}/prefix/include/*.h")
foreach(header IN LISTS headers)
  if(header MATCHES "test|_internal\\.h$")
    message(FATAL_ERROR "installed, but no public header: ${header}")
  endif()
endforeach()

find_program(CCACHE ccache)
set(launcher "")
if(CCACHE)
  set(launcher "-DCMAKE_CXX_COMPILER_LAUNCHER=${CCACHE}")
endif()
step("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${work}/build" "-DCMAKE_PREFIX_PATH=${work}/prefix" ${launcher})
step("${CMAKE_COMMAND}" --build "${work}/build")
step("${work}/build/consumer")

# A CUDA wheel needs no CUDA toolkit. Where torch is no such wheel: the same torch with a CUDA library beside the others.
file(STRINGS "${work}/prefix/lib/cmake/plumb/plumbConfig.cmake" torch REGEX "set\\(PLUMB_TORCH_DIR " LIMIT_COUNT 1)
string(REGEX REPLACE ".*\"(.*)\".*" "\\1" torch "${torch}")
if(NOT EXISTS "${torch}/lib/libtorch_cuda.so")
  set(cuda "${work}/cuda_torch")
  file(MAKE_DIRECTORY "${cuda}/lib")
  file(CREATE_LINK "${torch}/include" "${cuda}/include" SYMBOLIC)
  file(CREATE_LINK "${torch}/version.py" "${cuda}/version.py" SYMBOLIC)
  file(GLOB libraries "${torch}/lib/*")
  foreach(library IN LISTS libraries)
    get_filename_component(name "${library}" NAME)
    file(CREATE_LINK "${library}" "${cuda}/lib/${name}" SYMBOLIC)
  endforeach()
  file(WRITE "${cuda}/lib/libtorch_cuda.so" "")
  step("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${work}/cuda" "-DCMAKE_PREFIX_PATH=${work}/prefix"
       "-DPLUMB_TORCH_DIR=${cuda}" -DCONSUMER_SOURCE=small.cpp)
  step("${CMAKE_COMMAND}" --build "${work}/cuda")
  step("${work}/cuda/consumer")
endif()

# Another torch than the one plumb was built with is refused with what to do, not linked.
set(fake "${work}/fake_torch")
file(WRITE "${fake}/version.py" "__version__ = '2.99.0'\n")
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${work}/refused"
    "-DCMAKE_PREFIX_PATH=${work}/prefix" "-DPLUMB_TORCH_DIR=${fake}" RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
if(rc EQUAL 0 OR NOT out MATCHES "was built with torch")
  message(FATAL_ERROR "a different torch was not refused:\n${out}")
endif()

# A room is a folder plumb/NAME. Its sources are every *.cpp but *_test.cpp, in it and in its folders; its tests are the *_test.cpp, in one
# binary plumb_NAME_test. A room may add settings (options of single files) in plumb/NAME/room.cmake.

set(PLUMB_ROOMS "" CACHE INTERNAL "")

add_library(plumb_pch OBJECT "${CMAKE_CURRENT_SOURCE_DIR}/cmake/pch.cpp")
target_link_libraries(plumb_pch PUBLIC torch_wheel nlohmann_json::nlohmann_json)
target_include_directories(plumb_pch PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
target_precompile_headers(plumb_pch PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/cmake/pch.h")

# Tests and examples: -O0 compiles them in half the time of -O2, and no speed is measured in them.
add_library(plumb_test_pch OBJECT "${CMAKE_CURRENT_SOURCE_DIR}/cmake/pch.cpp")
target_link_libraries(plumb_test_pch PUBLIC torch_wheel nlohmann_json::nlohmann_json)
target_include_directories(plumb_test_pch PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
target_compile_options(plumb_test_pch PRIVATE -O0)
target_compile_definitions(plumb_test_pch PRIVATE GTEST_HAS_PTHREAD=1)
target_precompile_headers(plumb_test_pch PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/cmake/test_pch.h")

# -fPIC instead of an executable's -fPIE: a precompiled header is only used with the flags it was made with (fpie, -O0) and macros (GTest::gtest's own).
function(plumb_test_program NAME)
  target_compile_definitions(${NAME} PRIVATE GTEST_HAS_PTHREAD=1)
  target_compile_options(${NAME} PRIVATE -fPIC -O0)
  if(PLUMB_TESTS)  # without tests only examples are left, too few for a precompiled header to pay
    target_precompile_headers(${NAME} REUSE_FROM plumb_test_pch)
  endif()
  set_target_properties(${NAME} PROPERTIES POSITION_INDEPENDENT_CODE OFF
    BUILD_RPATH "${TORCH_WHEEL_DIR}/lib;${CMAKE_BINARY_DIR}")
endfunction()

# Reading torch's headers is most of a file's time: joined files read them once. The compiler takes a joined file for a
# header, about which the warning is. Files with options of their own stay apart (CMake sees to it).
function(plumb_join NAME)
  if(PLUMB_JOINED)
    target_compile_options(${NAME} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
    set_target_properties(${NAME} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 24)
  endif()
endfunction()

function(plumb_room NAME)
  cmake_parse_arguments(ROOM "NO_TORCH;COLD" "" "" ${ARGN})
  set(dir "${CMAKE_CURRENT_SOURCE_DIR}/plumb/${NAME}")
  file(GLOB sources CONFIGURE_DEPENDS "${dir}/*.cpp" "${dir}/*/*.cpp")
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  if(NOT sources)
    return()
  endif()
  add_library(plumb_${NAME} OBJECT ${sources})
  target_include_directories(plumb_${NAME} PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
  target_compile_options(plumb_${NAME} PRIVATE -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers)
  target_link_libraries(plumb_${NAME} PUBLIC nlohmann_json::nlohmann_json Threads::Threads)
  if(ROOM_COLD)  # -O1 compiles in three quarters of the time of -O2
    target_compile_options(plumb_${NAME} PRIVATE -O1)
  endif()
  if(NOT ROOM_NO_TORCH)
    target_link_libraries(plumb_${NAME} PUBLIC torch_wheel)
    target_precompile_headers(plumb_${NAME} REUSE_FROM plumb_pch)
  endif()
  plumb_join(plumb_${NAME})
  set(PLUMB_ROOMS "${PLUMB_ROOMS};${NAME}" CACHE INTERNAL "")
  if(EXISTS "${dir}/room.cmake")
    include("${dir}/room.cmake")
  endif()
endfunction()

function(plumb_library)
  set(objects "")
  foreach(room IN LISTS PLUMB_ROOMS)
    if(room)
      list(APPEND objects $<TARGET_OBJECTS:plumb_${room}>)
    endif()
  endforeach()
  add_library(plumb SHARED ${objects})
  add_library(plumb::plumb ALIAS plumb)
  target_include_directories(plumb PUBLIC
    $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(plumb PUBLIC cxx_std_20)
  target_link_libraries(plumb PUBLIC torch_wheel nlohmann_json::nlohmann_json PRIVATE Threads::Threads)
  set_target_properties(plumb PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}"
    BUILD_RPATH "${TORCH_WHEEL_DIR}/lib")
endfunction()

function(plumb_tests)
  find_package(GTest REQUIRED)
  find_library(RAPIDCHECK rapidcheck)
  # What tests of several rooms share: tests/*.cpp.
  file(GLOB shared CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/*.cpp")
  add_library(plumb_testing STATIC ${shared})
  target_link_libraries(plumb_testing PUBLIC plumb torch_wheel)
  plumb_test_program(plumb_testing)
  target_compile_definitions(plumb_testing PRIVATE PLUMB_BINARY_DIR="${CMAKE_BINARY_DIR}")
  target_link_libraries(plumb_testing PUBLIC ${CMAKE_DL_LIBS})
  # A device for tests, which a process loads that wants it (tests/test_device.h, python/tests/device.py).
  file(GLOB test_device CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/device/*.cpp")
  add_library(plumb_test_device MODULE ${test_device})
  target_link_libraries(plumb_test_device PRIVATE torch_wheel)
  # Its backend is over Gloo, as plumb/pipeline/transport/gloo_backend.cpp.
  target_include_directories(plumb_test_device PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}"
    "${CMAKE_CURRENT_SOURCE_DIR}/plumb/pipeline/transport/gloo_seam")
  plumb_test_program(plumb_test_device)
  set_target_properties(plumb_test_device PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
  add_dependencies(plumb_testing plumb_test_device)
  foreach(room IN LISTS PLUMB_ROOMS)
    if(NOT room)
      continue()
    endif()
    set(dir "${CMAKE_CURRENT_SOURCE_DIR}/plumb/${room}")
    file(GLOB tests CONFIGURE_DEPENDS "${dir}/*_test.cpp" "${dir}/*/*_test.cpp")
    if(NOT tests)
      continue()
    endif()
    add_executable(plumb_${room}_test ${tests})
    target_link_libraries(plumb_${room}_test PRIVATE plumb_testing plumb torch_wheel nlohmann_json::nlohmann_json
                          GTest::gmock GTest::gtest GTest::gtest_main Threads::Threads)
    if(RAPIDCHECK)
      target_link_libraries(plumb_${room}_test PRIVATE ${RAPIDCHECK})
    endif()
    plumb_test_program(plumb_${room}_test)
    plumb_join(plumb_${room}_test)
    target_compile_definitions(plumb_${room}_test PRIVATE
      PLUMB_SOURCE_DIR="${CMAKE_SOURCE_DIR}" PLUMB_BINARY_DIR="${CMAKE_BINARY_DIR}"
      PLUMB_TEST_PYTHON="${PLUMB_PYTHON}")
    set_target_properties(plumb_${room}_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
    add_test(NAME ${room} COMMAND plumb_${room}_test)
    # Properties are tried on the same random cases every time: another seed is for who looks for faults (HACKING.md).
    set_tests_properties(${room} PROPERTIES ENVIRONMENT "OMP_WAIT_POLICY=PASSIVE;RC_PARAMS=seed=1")
    # A small part of `make test-cpus`: suites that compare bits, with the kernels of an older CPU.
    if(room MATCHES "^(autograd|capture|recording|scaling)$")
      add_test(NAME ${room}_avx2 COMMAND plumb_${room}_test)
      set_tests_properties(${room}_avx2 PROPERTIES ENVIRONMENT
        "OMP_WAIT_POLICY=PASSIVE;RC_PARAMS=seed=1;ATEN_CPU_CAPABILITY=avx2;ONEDNN_MAX_CPU_ISA=AVX2;MKL_CBWR=AVX2")
    endif()
    # Once more on a device that is not the CPU (tests/test_device.h); left_out.txt says which tests are not, and why.
    file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/tests/device/left_out.txt" left REGEX "^${room} ")
    if(left)
      list(TRANSFORM left REPLACE "^${room} " "")
      list(JOIN left "" left)
      add_test(NAME ${room}_on_device COMMAND sh -c
        "PLUMB_TEST_DEVICE=\${PLUMB_TEST_DEVICE:-testdevice} exec '$<TARGET_FILE:plumb_${room}_test>'")
      set_tests_properties(${room}_on_device PROPERTIES LABELS device
        ENVIRONMENT "OMP_WAIT_POLICY=PASSIVE;RC_PARAMS=seed=1;GTEST_FILTER=${left}")
    endif()
    if(room STREQUAL pipeline)  # in two parts, of which the first mostly waits for processes that are lost
      set(waits "*Faults*:Strict.*:*ALiar*")
      add_test(NAME pipeline_waits COMMAND plumb_pipeline_test)
      set_tests_properties(pipeline_waits PROPERTIES COST 120 ENVIRONMENT "OMP_WAIT_POLICY=PASSIVE;GTEST_FILTER=${waits}")
      set_tests_properties(pipeline PROPERTIES COST 110 ENVIRONMENT
        "OMP_WAIT_POLICY=PASSIVE;RC_PARAMS=seed=1;GTEST_FILTER=-${waits}")
    endif()
  endforeach()
endfunction()

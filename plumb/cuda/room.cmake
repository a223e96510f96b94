# Kernels are files of their own, which tests compile for the host; they become strings of the library, with the headers
# that they include.
set(PLUMB_KERNEL_HEADERS "")
function(plumb_kernel_header NAME FILE)
  file(READ "${CMAKE_CURRENT_SOURCE_DIR}/${FILE}" text)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${FILE}")
  set(PLUMB_KERNEL_HEADERS "${PLUMB_KERNEL_HEADERS}    {\"${NAME}\", R\"plumb_text(${text})plumb_text\"},\n" PARENT_SCOPE)
endfunction()
plumb_kernel_header(cstdint plumb/cuda/nvrtc_base.h)
foreach(_file numerics/kernels.h numerics/element.h cuda/device.cuh cuda/measure.cuh cuda/pass.cuh cuda/blocks.cuh
        cuda/dropout.cuh cuda/hash.cuh cuda/pointwise.cuh)
  plumb_kernel_header(plumb/${_file} plumb/${_file})
endforeach()
configure_file("${CMAKE_CURRENT_SOURCE_DIR}/plumb/cuda/texts.cpp.in" "${CMAKE_BINARY_DIR}/plumb_kernel_texts.cpp" @ONLY)
target_sources(plumb_cuda PRIVATE "${CMAKE_BINARY_DIR}/plumb_kernel_texts.cpp")
target_link_libraries(plumb_cuda PUBLIC ${CMAKE_DL_LIBS})

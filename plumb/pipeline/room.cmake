# The wheel's c10d header of Gloo mentions names of Gloo, whose headers the wheel leaves out: one file sees our
# declarations of them.
set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/plumb/pipeline/transport/gloo_backend.cpp" PROPERTIES
  INCLUDE_DIRECTORIES "${CMAKE_CURRENT_SOURCE_DIR}/plumb/pipeline/transport/gloo_seam"
  SKIP_PRECOMPILE_HEADERS OFF)

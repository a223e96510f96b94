# The wheel's c10d header of Gloo mentions names of Gloo, whose headers the wheel leaves out: one file sees our
# declarations of them.
set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/plumb/pipeline/gloo_backend.cpp" PROPERTIES
  INCLUDE_DIRECTORIES "${CMAKE_CURRENT_SOURCE_DIR}/plumb/pipeline/gloo_seam"
  SKIP_PRECOMPILE_HEADERS OFF)

# In these files `Node` is autograd's, not the graph's.
foreach(_file IN ITEMS backward_checkpoints backward_graph backward_halves stage_backward)
  set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/plumb/pipeline/${_file}.cpp"
                              PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endforeach()

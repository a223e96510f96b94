# `cmake --install`: headers, library, command and the CMake package `plumb`. The component `wheel` holds what the
# Python package bundles beside its *.py files; its layout is relative to the package's folder (see setup.py).
include(CMakePackageConfigHelpers)
set(PLUMB_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/plumb")

# torch is looked for beside the package first (site-packages/torch), then where the build found it.
set(_torch_paths "$ORIGIN/../../torch/lib" "${TORCH_WHEEL_DIR}/lib")

set_target_properties(plumb PROPERTIES INSTALL_RPATH "${_torch_paths}")
install(TARGETS plumb EXPORT plumbTargets LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(TARGETS plumb LIBRARY DESTINATION lib COMPONENT wheel EXCLUDE_FROM_ALL)

install(DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}/plumb/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/plumb"
  FILES_MATCHING PATTERN "*.h"
  REGEX "test" EXCLUDE
  PATTERN "*_internal.h" EXCLUDE
  PATTERN "gloo_seam" EXCLUDE
  PATTERN "cli" EXCLUDE)

if(TARGET plumb_cli)
  set_target_properties(plumb_cli PROPERTIES
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};$ORIGIN/../lib;${_torch_paths}")
  install(TARGETS plumb_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  install(TARGETS plumb_cli RUNTIME DESTINATION bin COMPONENT wheel EXCLUDE_FROM_ALL)
endif()
if(TARGET plumb_python)
  set_target_properties(plumb_python PROPERTIES
    INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")
  install(TARGETS plumb_python LIBRARY DESTINATION . COMPONENT wheel EXCLUDE_FROM_ALL)
  install(FILES "${PLUMB_BUILT_PY}" "${CMAKE_CURRENT_SOURCE_DIR}/python/plumb/_C.pyi"
          DESTINATION . COMPONENT wheel EXCLUDE_FROM_ALL)
  # A wheel goes to other machines: it finds torch beside itself or in the process, never where it was built.
  install(CODE [[
    set(folder "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}")
    file(GLOB extension "${folder}/_C.*.so")
    file(RPATH_SET FILE "${extension}" NEW_RPATH "$ORIGIN/lib:$ORIGIN/../torch/lib")
    foreach(file IN ITEMS "${folder}/lib/libplumb.so" "${folder}/bin/plumb")
      if(EXISTS "${file}")
        file(RPATH_SET FILE "${file}" NEW_RPATH "$ORIGIN/../lib:$ORIGIN/../../torch/lib")
      endif()
    endforeach()
  ]] COMPONENT wheel EXCLUDE_FROM_ALL)
endif()

install(EXPORT plumbTargets NAMESPACE plumb:: DESTINATION "${PLUMB_CMAKE_DIR}")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/plumbConfig.cmake.in"
  "${CMAKE_CURRENT_BINARY_DIR}/plumbConfig.cmake" INSTALL_DESTINATION "${PLUMB_CMAKE_DIR}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/plumbConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/plumbConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/plumbConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/TorchWheel.cmake" DESTINATION "${PLUMB_CMAKE_DIR}")

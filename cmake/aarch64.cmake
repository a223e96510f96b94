# Tool chain for 64-bit ARM on another machine: Debian's cross compiler, and the libraries that tools/arm.sh has unpacked in
# PLUMB_ARM. ARM programs start as if they were this machine's (tools/arm.sh run), so no emulator is named here.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
find_program(PLUMB_ARM_COMPILER NAMES aarch64-linux-gnu-g++ aarch64-linux-gnu-g++-15 aarch64-linux-gnu-g++-14
             aarch64-linux-gnu-g++-13 aarch64-linux-gnu-g++-12 REQUIRED)
set(CMAKE_CXX_COMPILER "${PLUMB_ARM_COMPILER}")
set(PLUMB_ARM "${CMAKE_CURRENT_LIST_DIR}/../.arm" CACHE PATH "What tools/arm.sh has fetched")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES PLUMB_ARM)
# Headers without libraries are the distribution's: the cross compiler reads /usr/include, too.
set(CMAKE_FIND_ROOT_PATH "${PLUMB_ARM}/root")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)

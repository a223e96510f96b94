# Written by CMake: what plumb's library was built as, and with.
VERSION = "0.1.0"
TORCH = "2.13.0+cpu"

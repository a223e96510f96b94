// Links plumb and torch, and needs few headers of either.
#include <c10/core/DeviceType.h>
#include <plumb/core/error.h>

#include <cstdio>

int main() {
  try {
    throw plumb::Error(plumb::ErrorKind::InvalidArgument, c10::DeviceTypeName(c10::DeviceType::CPU, true));
  } catch (const plumb::Error& error) {
    std::printf("caught: %s\n", error.what());
  }
}

#pragma once

namespace plumb::cli {

// Ends the command with this code; what failed has been said.
struct ExitCode {
  int code;
};

}  // namespace plumb::cli

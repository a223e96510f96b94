// The subcommands share this: reading programs and inputs, wrong use, printing.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "plumb/exported/exported.h"

namespace plumb::cli {

// Wrong use of the command line: exit code 2. Everything else that fails is an Error: exit code 1.
class UsageError : public std::runtime_error {
 public:
  // message names the option; fix says what to give instead.
  UsageError(const std::string& message, const std::string& fix)
      : std::runtime_error(message + "\n  try: " + fix), message_(message) {}
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

// A `.pt2` file, or a graph as text (every other name). A text has no tensors: its module can be shown, cut and
// rewritten, not run.
struct Loaded {
  ExportedProgram program;
  bool is_text = false;
  GraphModule& module() const { return *program.module; }
};
bool is_pt2(const std::string& path);
bool is_tensor_file(const std::string& path);  // .pt, .pth or .npy
Loaded load(const std::string& path);
// `.pt2` or text, as `loaded` was. Throws UsageError if the ending of `path` says otherwise.
void save(const Loaded& loaded, const std::string& path);
void check_same_kind(const Loaded& loaded, const std::string& path);
// load() for commands that need tensors: throws UsageError for a text.
Loaded load_with_tensors(const std::string& path);

// Before work that takes long: throws Error naming the option if no file can be written to `path`. "" and "-" can.
void check_writable(const std::string& option, const std::string& path);
// Beside and renamed; "" and "-" are stdout.
void write_text(const std::string& text, const std::string& path);

// The outputs' flat names: the keys of a dict, else the names of the values.
std::vector<std::string> output_names(const GraphModule& module);
// The scalar that a backward starts from: the output named "loss", else the sum of every floating-point output that has
// a gradient.
at::Tensor backward_start(const GraphModule& module, const std::vector<c10::IValue>& outputs);

// "f32[2, 3]", with symbols where a dimension has one.
std::string type_text(const std::optional<TensorMeta>& meta);
std::string type_text(const at::Tensor& tensor);

// For CLI::Option::check: "" if the text is a whole number (a number) within the range, both ends included, else what
// is wrong in words: "0 is no whole number from 1 to 1024".
using NumberCheck = std::function<std::string(const std::string& text)>;
NumberCheck whole_number(int64_t least, int64_t most = std::numeric_limits<int>::max());
NumberCheck number_within(double least, double most);
std::string positive_number(const std::string& text);

// Says on stderr where a result went; nothing for "" and "-".
class Progress;
void say_wrote(Progress& progress, const std::string& path);

// How many columns a line of the terminal has that stdout is; none if it is no terminal.
std::optional<int> terminal_width();

// The text of a table whose first row is the header; cells longer than 60 are cut.
std::string columns(std::vector<std::vector<std::string>> rows);

// "40 s", "1 min 20 s", "3 h 5 min".
std::string duration_text(double seconds);

}  // namespace plumb::cli

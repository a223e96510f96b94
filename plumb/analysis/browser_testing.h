// A real browser for tests of pages.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "plumb/core/output_file.h"

namespace plumb {

namespace fs = std::filesystem;

inline std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A real browser opens pages.
class Browser : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "plumb_report_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    for (const char* each : {"chromium", "chromium-browser", "google-chrome"}) {
      if (program_.empty() && std::system(("command -v " + std::string(each) + " >/dev/null").c_str()) == 0)
        program_ = each;
    }
    ASSERT_FALSE(program_.empty()) << "no chromium here: run `make setup`";
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Returns the standard output of the browser with these options on the page; it must end by itself, well.
  std::string open(const std::string& page, const std::string& options) {
    write_file_atomically(folder_ / "page.html", page);
    const std::string quoted = "'" + (folder_ / "page.html").string() + "'";
    const int status = std::system(("cd '" + folder_.string() + "' && timeout 240 " + program_ +
                                    " --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
                                    " --virtual-time-budget=4000 --user-data-dir='" +
                                    folder_.string() + "/user' " + options + " file://" +
                                    quoted.substr(1, quoted.size() - 2) + " >out 2>log")
                                       .c_str());
    EXPECT_EQ(status, 0) << read(folder_ / "log");
    return read(folder_ / "out");
  }

  fs::path folder_;
  std::string program_;
};

inline std::string body_tag(const std::string& dom) {
  const size_t at = dom.find("<body");
  return at == std::string::npos ? "no body" : dom.substr(at, dom.find('>', at) + 1 - at);
}

}  // namespace plumb

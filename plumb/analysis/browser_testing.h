// A real browser for tests of pages.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "plumb/core/folder_testing.h"
#include "plumb/core/output_file.h"

namespace plumb {

namespace fs = std::filesystem;

using folder_testing::slurp;

// A real browser opens pages.
class Browser : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    for (const char* each : {"chromium", "chromium-browser", "google-chrome"}) {
      if (program_.empty() && std::system(("command -v " + std::string(each) + " >/dev/null").c_str()) == 0)
        program_ = each;
    }
    ASSERT_FALSE(program_.empty()) << "no chromium here: run `make setup`";
  }

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
    EXPECT_EQ(status, 0) << slurp(folder_ / "log");
    return slurp(folder_ / "out");
  }

  std::string program_;
};

inline std::string body_tag(const std::string& dom) {
  const size_t at = dom.find("<body");
  return at == std::string::npos ? "no body" : dom.substr(at, dom.find('>', at) + 1 - at);
}

}  // namespace plumb

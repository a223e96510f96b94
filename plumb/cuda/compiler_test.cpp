// NVRTC and what is kept of its work. Without NVRTC its tests are skipped: `pip install nvidia-cuda-nvrtc` brings it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "plumb/core/error.h"
#include "plumb/cuda/compiler.h"
#include "plumb/cuda/cubin_cache.h"
#include "plumb/cuda/kernel_texts.h"
#include "plumb/cuda/launch.h"
#include "plumb/cuda/pointwise_text.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/format.h"

namespace plumb::cuda {
namespace {

namespace fs = std::filesystem;

// A folder of the test's own.
struct Folder {
  std::string path = (fs::temp_directory_path() / "plumb_cubins_XXXXXX").string();
  Folder() { EXPECT_NE(mkdtemp(path.data()), nullptr); }
  ~Folder() { fs::remove_all(path); }
};

// Finds the compiler where torch is, or in the environment of the tests.
std::optional<Compiler> compiler_if_any() {
  try {
    return Compiler::open();
  } catch (const Error&) {
  }
  const fs::path environment = fs::path(PLUMB_TEST_PYTHON).parent_path().parent_path() / "lib";
  std::error_code none;
  for (const auto& entry : fs::recursive_directory_iterator(environment, none)) {
    if (!entry.path().filename().string().starts_with("libnvrtc.so.")) continue;
    setenv("PLUMB_NVRTC", entry.path().c_str(), 1);
    const Compiler found = Compiler::open();
    unsetenv("PLUMB_NVRTC");
    return found;
  }
  return std::nullopt;
}

std::vector<std::string> every_kind_of_kernel() {
  using kernel::Carrier;
  std::vector<std::string> texts{finish_text()};
  const auto code_spec = code_spec_of(FPFormat::parse("e4m3fn"));
  const auto program = PointwiseProgram::parse("silu #0; mul! $0 #1; gelu $1; sqrt! $2; div $3 #2");
  const std::vector<bool> all(3, true);
  // float16's kernels are bfloat16's but for the conversions: two of them show those.
  const auto half = rounding_spec(FPFormat::parse("E4M3-SR"), kernel::kFloat16);
  texts.push_back(text_of({.carrier = kernel::kFloat16, .pack = 8, .rounding = half}));
  texts.push_back(decode_text(kernel::kFloat16, 8));
  for (const Carrier carrier : {kernel::kFloat32, kernel::kBFloat16}) {
    const int pack = carrier == kernel::kFloat32 ? 4 : 8;
    for (const char* format : {"e4m3fn-RN", "e5m2-RN-inf", "E8M3-RN", "E4M3-SR", "e5m2-SR8-inf", "E4M3-RZ"}) {
      const auto rounding = rounding_spec(FPFormat::parse(format), carrier);
      texts.push_back(text_of({.carrier = carrier, .pack = pack, .rounding = rounding}));
      texts.push_back(text_of({.carrier = carrier, .pack = 1, .rounding = rounding, .codes = &code_spec}));
    }
    const auto rounding = rounding_spec(FPFormat::parse("E4M3-SR"), carrier);
    for (const bool histogram : {false, true}) {
      texts.push_back(
          text_of({.carrier = carrier, .pack = pack, .writes = false, .before = true, .histogram = histogram}));
      texts.push_back(text_of({.carrier = carrier,
                               .pack = pack,
                               .rounding = rounding,
                               .before = true,
                               .after = true,
                               .histogram = histogram}));
    }
    texts.push_back(decode_text(carrier, pack));
    texts.push_back(keep_text(carrier, pack));
    texts.push_back(hash_text(carrier));
    texts.push_back(largest_text(carrier, pack));
    for (const char* format : {"mxfp8", "nvfp4", "mxfp4-SR"}) {
      const FPFormat f = FPFormat::parse(format);
      for (const int64_t length : {64, 65})
        texts.push_back(
            blocks_text(carrier, block_spec(f, carrier), length, rounding_spec(f.element(), kernel::kFloat32)));
    }
    texts.push_back(forward_text(program, std::vector<bool>(5, true), carrier, pack));
    texts.push_back(backward_text(program, pointwise_needs(program, all), all, carrier, pack));
  }
  return texts;
}

TEST(Compiler, CompilesEveryKernelForThreeGenerations) {
  const auto compiler = compiler_if_any();
  if (!compiler) GTEST_SKIP() << "NVRTC is not installed: pip install nvidia-cuda-nvrtc";
  // As one program: reading the headers takes longer than most kernels.
  std::string all;
  int count = 0;
  for (const std::string& text : every_kind_of_kernel()) {
    const std::string n = std::to_string(count++);
    all += "#define entry entry_" + n + "\n" + text + "#undef entry\n";
  }
  for (const char* architecture : {"sm_80", "sm_90a", "sm_100"}) {
    ASSERT_TRUE(compiler->knows(architecture)) << compiler->version();
    const auto binary = compiler->compile(all, architecture);
    const std::string_view bytes(binary.data(), binary.size());
    EXPECT_EQ(bytes.substr(1, 3), "ELF");
    for (int i = 0; i < count; ++i)
      EXPECT_NE(bytes.find(".text.entry_" + std::to_string(i)), bytes.npos) << architecture << " " << i;
  }
}

TEST(Compiler, SaysWhatIsWrongWithAText) {
  const auto compiler = compiler_if_any();
  if (!compiler) GTEST_SKIP() << "NVRTC is not installed: pip install nvidia-cuda-nvrtc";
  try {
    compiler->compile("extern \"C\" __global__ void entry() { nothing(); }", "sm_90");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::ExecutionFailed);
    EXPECT_THAT(error.message(), ::testing::HasSubstr("nothing"));
  }
  EXPECT_FALSE(compiler->knows("sm_1"));
  EXPECT_FALSE(compiler->knows("gfx90a"));
}

TEST(Compiler, ThatIsNotThereIsNamedWithARemedy) {
  const char* before = std::getenv("PLUMB_NVRTC");
  const std::string kept = before ? before : "";
  setenv("PLUMB_NVRTC", "/nowhere/libnvrtc.so.13", 1);
  try {
    Compiler::open();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Unsupported);
    EXPECT_THAT(error.message(), ::testing::HasSubstr("/nowhere/libnvrtc.so.13"));
    EXPECT_THAT(error.remedy(), ::testing::HasSubstr("nvidia-cuda-nvrtc"));
  }
  kept.empty() ? unsetenv("PLUMB_NVRTC") : setenv("PLUMB_NVRTC", kept.c_str(), 1);
}

TEST(CubinCache, GivesBackWhatWasWritten) {
  Folder folder;
  const CubinCache cache(folder.path + "/a/b");
  const std::vector<char> binary(1000, 'x');
  EXPECT_FALSE(cache.read("key"));
  cache.write("key", binary);
  EXPECT_EQ(cache.read("key"), binary);
  EXPECT_FALSE(cache.read("another key"));
}

TEST(CubinCache, TrustsNoDamagedEntry) {
  Folder folder;
  const CubinCache cache(folder.path);
  const std::vector<char> binary(200, 'x');
  cache.write("key", binary);
  std::string whole;
  {
    std::ifstream in(cache.file("key"), std::ios::binary);
    whole.assign(std::istreambuf_iterator<char>(in), {});
  }
  const auto with = [&](const std::string& bytes) {
    std::ofstream(cache.file("key"), std::ios::binary | std::ios::trunc) << bytes;
    return cache.read("key").has_value();
  };
  EXPECT_TRUE(with(whole));
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = char(damaged[i] ^ 0x20);
    EXPECT_FALSE(with(damaged)) << "byte " << i;
    EXPECT_FALSE(with(whole.substr(0, i))) << "cut at " << i;
  }
  EXPECT_FALSE(with(whole + "more"));
  cache.write("key", binary);
  EXPECT_EQ(cache.read("key"), binary) << "written anew";
}

TEST(CubinCache, UsesNothingThatOthersMayWrite) {
  Folder folder;
  const CubinCache cache(folder.path);
  cache.write("key", {'a'});
  ASSERT_TRUE(cache.read("key"));
  chmod(cache.file("key").c_str(), 0666);
  EXPECT_FALSE(cache.read("key"));
  chmod(cache.file("key").c_str(), 0600);
  ASSERT_TRUE(cache.read("key"));
  chmod(folder.path.c_str(), 0777);
  EXPECT_FALSE(cache.read("key"));
  CubinCache("").write("key", {'a'});
  CubinCache("/proc/nothing").write("key", {'a'});
  EXPECT_FALSE(CubinCache("/proc/nothing").read("key"));
}

// Another user who may write to a folder above can put another folder in the place of the cache.
TEST(CubinCache, UsesNoFolderThatOthersMayReplace) {
  Folder folder;
  const std::string above = folder.path + "/a";
  const CubinCache cache(above + "/b/c");
  cache.write("key", {'a'});
  ASSERT_TRUE(cache.read("key"));
  for (const mode_t mode : {0777, 0775, 0702}) {
    chmod(above.c_str(), mode);
    EXPECT_FALSE(cache.read("key")) << mode;
  }
  chmod(above.c_str(), 01777);
  EXPECT_TRUE(cache.read("key")) << "as in /tmp, only its owner replaces an entry";
  chmod(above.c_str(), 0755);
  ASSERT_TRUE(cache.read("key"));
  if (geteuid() == 0) {
    ASSERT_EQ(chown(above.c_str(), 65534, 65534), 0);
    EXPECT_FALSE(cache.read("key")) << "another user's folder";
    ASSERT_EQ(chown(above.c_str(), 0, 0), 0);
  }
  // The folder that a link leads to is checked and opened.
  chmod(above.c_str(), 0777);
  fs::create_directory_symlink(above + "/b/c", folder.path + "/link");
  EXPECT_FALSE(CubinCache(folder.path + "/link").read("key"));
}

TEST(CubinCache, SparesTheCompiler) {
  const auto compiler = compiler_if_any();
  if (!compiler) GTEST_SKIP() << "NVRTC is not installed: pip install nvidia-cuda-nvrtc";
  Folder folder;
  const CubinCache cache(folder.path);
  const auto first = compiled(*compiler, cache, finish_text(), "sm_90");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 1);
  EXPECT_EQ(compiled(*compiler, cache, finish_text(), "sm_90"), first);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 1);
  compiled(*compiler, cache, finish_text(), "sm_80");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path), {}), 2);
}

}  // namespace
}  // namespace plumb::cuda

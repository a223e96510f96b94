// Broken `.pt2` files: the reader must end in a plumb::Error or in a module that prints, lints and can be saved.
#include "plumb/core/crc32.h"
#include "plumb/exported/exported.h"
#include "plumb/exported/zip_file.h"
#include "tests/fuzz/driver.h"

int main(int argc, char** argv) {
  using namespace plumb;
  fuzz::Options options = fuzz::parse_options(argc, argv, ".pt2 files to start from");
  struct Seed {
    std::string bytes;
    std::vector<std::pair<std::string, std::string>> entries;
  };
  std::vector<Seed> seeds;
  for (const std::string& path : options.files) {
    if (!path.ends_with(".pt2")) continue;
    Seed seed{fuzz::slurp(path), {}};
    ZipFile zip(path);
    for (const ZipEntry& e : zip.entries()) seed.entries.emplace_back(e.name, zip.read(e));
    seeds.push_back(std::move(seed));
  }
  const std::string work =
      std::filesystem::temp_directory_path() / ("plumb-fuzz-" + std::to_string(::getpid()) + ".pt2");
  const int result = fuzz::run(options, work, [&](fuzz::Random& random) {
    const Seed& seed = seeds[fuzz::below(random, seeds.size())];
    const std::string broken = fuzz::mutate_archive(seed.bytes, seed.entries, random, crc32);
    std::ofstream(work, std::ios::binary | std::ios::trunc)
        .write(broken.data(), static_cast<std::streamsize>(broken.size()));
    ExportedProgram program = load_pt2(work);
    program.module->lint();
    const std::string text = to_string(program.module->graph());
    if (to_string(parse_graph(text)) != text) throw std::runtime_error("the text does not round-trip");
    save_pt2(program, work + ".saved");
    return true;
  });
  if (result == 0) std::filesystem::remove(work);
  std::filesystem::remove(work + ".saved");
  return result;
}

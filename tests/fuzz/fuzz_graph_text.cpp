// Broken graph texts: the parser must end in a plumb::Error or in a graph whose text round-trips.
#include "plumb/exported/exported.h"
#include "plumb/graph/graph.h"
#include "tests/fuzz/driver.h"

int main(int argc, char** argv) {
  using namespace plumb;
  fuzz::Options options = fuzz::parse_options(argc, argv, ".pt2 files or graph texts to start from");
  std::vector<std::string> seeds;
  for (const std::string& path : options.files) {
    if (path.ends_with(".pt2")) seeds.push_back(to_string(load_pt2(path).module->graph()));
    if (path.ends_with(".txt")) seeds.push_back(fuzz::slurp(path));
  }
  if (seeds.empty()) {
    std::fprintf(stderr, "no .pt2 or .txt file among the arguments\n");
    return 2;
  }
  const std::string work =
      std::filesystem::temp_directory_path() / ("plumb-fuzz-" + std::to_string(::getpid()) + ".txt");
  const int result = fuzz::run(options, work, [&](fuzz::Random& random) {
    std::string text = seeds[fuzz::below(random, seeds.size())];
    // A whole line of another place is a likelier mistake than a flipped bit.
    if (fuzz::chance(random, 3)) {
      const size_t from = text.find('\n', fuzz::below(random, text.size())),
                   to = text.find('\n', fuzz::below(random, text.size()));
      if (from != text.npos && to != text.npos) text.insert(to, text.substr(from, text.find('\n', from + 1) - from));
    }
    fuzz::mutate_bytes(text, random);
    std::ofstream(work, std::ios::binary | std::ios::trunc) << text;
    const Graph graph = parse_graph(text);
    lint(graph);
    const std::string printed = to_string(graph);
    if (to_string(parse_graph(printed)) != printed) throw std::runtime_error("the text does not round-trip");
    return true;
  });
  if (result == 0) std::filesystem::remove(work);
  return result;
}

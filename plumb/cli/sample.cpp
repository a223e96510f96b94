// plumb eval and plumb sample: what a token model has learned.
#include <CLI/CLI.hpp>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/core/input_file.h"
#include "plumb/core/table.h"
#include "plumb/core/text.h"
#include "plumb/training/generate.h"
#include "plumb/training/step/evaluate.h"

namespace plumb::cli {
namespace {

struct SampleArguments {
  std::string file, weights, prompt, prompt_file;
  GenerateOptions options;
  bool json = false;
};

void sample(const SampleArguments& o) {
  Progress progress(1, o.json);
  progress.next("reading " + o.file);
  const Loaded loaded = load_with_values(o.file, o.weights);
  progress.finish();
  if (!o.prompt.empty() && !o.prompt_file.empty()) {
    throw UsageError("--prompt and --prompt-file: one of them is enough", "--prompt 'text'");
  }
  const std::string text = o.prompt_file.empty() ? o.prompt : read_file(o.prompt_file);
  std::vector<int64_t> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  if (o.json) {
    std::cout << nlohmann::json{{"prompt", tokens}, {"tokens", generate(loaded.module(), tokens, o.options)}}.dump()
              << "\n";
    return;
  }
  // Prints whole characters as they come; bytes that are no text as \xHH.
  std::string waiting;
  const auto print = [&](bool end) {
    while (!waiting.empty()) {
      const size_t length = utf8_length(waiting);
      if (length == 0 && waiting.size() < 4 && !end) return;  // perhaps its rest comes
      std::cout << printable(waiting.substr(0, std::max<size_t>(length, 1)));
      waiting.erase(0, std::max<size_t>(length, 1));
    }
  };
  waiting = text;
  print(true);
  generate(loaded.module(), tokens, o.options, [&](int64_t token) {
    if (token < 256) {
      waiting += static_cast<char>(token);
    } else {
      waiting += c10::str("<", token, ">");
    }
    print(false);
    std::cout << std::flush;
  });
  print(true);
  std::cout << std::endl;
}

struct EvalArguments {
  FieldTexts texts;
  bool json = false;
};

void evaluate(const EvalArguments& o) {
  Progress progress(2, o.json);
  const Evaluation found =
      evaluate_file(read_options("", o.texts), [&](const std::string& what) { progress.next(what); });
  progress.finish();
  const double perplexity = std::exp(found.loss);
  if (o.json) {
    std::cout << nlohmann::json{{"loss", found.loss}, {"perplexity", perplexity}, {"targets", found.targets}}.dump()
              << "\n";
  } else {
    std::cout << "loss " << short_number(found.loss, 6) << ", perplexity " << short_number(perplexity) << ", "
              << found.targets << " targets\n";
  }
}

}  // namespace

void add_eval(CLI::App& app) {
  auto o = std::make_shared<EvalArguments>();
  CLI::App* sub = app.add_subcommand("eval", "The loss and perplexity of a .pt2 file's model on data");
  for (const char* name : {"file", "data"}) add_field(sub, train_field(name), o->texts)->required();
  for (const char* name :
       {"weights", "data-pattern", "token-type", "targets", "mask", "loss", "ignore-index", "batch", "threads"})
    add_field(sub, train_field(name), o->texts);
  sub->add_flag("--json", o->json, "{loss, perplexity, targets}");
  sub->footer("Example:\n  plumb eval trained.pt2 --data held.bin");
  sub->callback([o] { evaluate(*o); });
}

void add_sample(CLI::App& app) {
  auto o = std::make_shared<SampleArguments>();
  CLI::App* sub = app.add_subcommand("sample", "Text that a token model's .pt2 file writes");
  sub->add_option("FILE", o->file, "A .pt2 file: ids, i64[batch, length], to logits")->required();
  add_weights_option(sub, o->weights);
  sub->add_option("--prompt", o->prompt, "The text to go on after, as bytes");
  sub->add_option("--prompt-file", o->prompt_file, "A file of it");
  sub->add_option("--tokens", o->options.tokens, "So many")->check(whole_number(1))->capture_default_str();
  sub->add_option("--temperature", o->options.temperature, "Below 1 likelier, above 1 rarer tokens; 0: the likeliest")
      ->check(number_within(0, 1e6))
      ->capture_default_str();
  sub->add_option("--top-k", o->options.top_k, "Draw from the likeliest so many; 0: from all")
      ->check(whole_number(0))
      ->capture_default_str();
  sub->add_option("--seed", o->options.seed, "The same seed writes the same")
      ->check(whole_number(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()))
      ->capture_default_str();
  sub->add_flag("--json", o->json, "{prompt, tokens}, as numbers");
  sub->footer("Example:\n  plumb sample trained.pt2 --prompt 'def ' --temperature 0.8 --top-k 40");
  sub->callback([o] { sample(*o); });
}

}  // namespace plumb::cli

// Every option of a training does what its help says: a table with a check of each, and none may be missing.
#include <fstream>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/core/input_file.h"
#include "plumb/schedule/generators.h"
#include "plumb/training/generate.h"
#include "plumb/training/options_testing.h"
#include "plumb/training/step/optimizer.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

using namespace testing_training;
using testing::ElementsAre;
using testing::HasSubstr;

Checks checks_of_data() {
  return {
      {"file",
       [](TrainingOptions& t) {
         save_pt2(*t.lm(), t.path("lm.pt2"));
         EXPECT_EQ(t.run(t.with("file", {t.path("lm.pt2")})).losses(), t.losses(t.options));
       }},
      {"data",
       [](TrainingOptions& t) {
         t.changes("data", t.path("held.bin"), 0);
         t.refuses(t.with("data", {""}), "--data is missing");
         save_tensors(at::arange(100).remainder(32), t.path("tokens.npy"));
         EXPECT_EQ(t.losses_with("data", t.path("tokens.npy")).size(), 6u) << "tokens of numpy";
       }},
      {"data-pattern",
       [](TrainingOptions& t) {
         fs::create_directories(t.folder / "texts" / "b");
         fs::copy(t.folder / "tokens.bin", t.folder / "texts" / "b" / "a.txt");
         std::ofstream(t.folder / "texts" / "other.md") << std::string(100, '\x01');
         TrainOptions o = t.with("data", {t.path("texts")});
         EXPECT_NE(t.losses(o), t.losses(t.options));
         set_field(o, train_field("data-pattern"), {"b/*.txt"});
         EXPECT_EQ(t.losses(o), t.losses(t.options)) << "a folder of one file is that file";
         o.data_pattern = "*.rst";
         t.refuses(o, "has no file that fits '*.rst'");
       }},
      {"token-type",
       [](TrainingOptions& t) {
         save_pt2(*t.lm(), t.path("lm.pt2"));
         std::ofstream wide(t.path("wide.bin"), std::ios::binary);
         for (const char c : read_file(t.path("tokens.bin"))) wide << c << '\0';
         wide.close();
         TrainOptions o = t.with("token-type", {"u16"});
         o.data = t.path("wide.bin");
         EXPECT_EQ(t.losses(o), t.losses(t.options));
       }},
      {"targets",
       [](TrainingOptions& t) {
         EXPECT_EQ(t.run(t.rows(), t.mlp()).losses().size(), 6u);
         t.refuses(t.with("targets", {t.path("y.pt")}), "--targets: raw tokens are their own targets");
       }},
      {"mask",
       [](TrainingOptions& t) {
         TrainOptions o = t.rows();
         const auto without = t.run(o, t.mlp()).losses();
         o.mask = t.path("mask.pt");
         EXPECT_NE(t.run(o, t.mlp()).losses(), without);
         o.mask = t.path("x.pt");
         EXPECT_THAT(message_of([&] { t.run(o, t.mlp()); }), HasSubstr("--mask: is f32[20, 4]"));
         o.loss = "cross_entropy", o.targets = t.path("classes.pt"), o.mask = t.path("all.pt");
         save_tensors(at::zeros({20}, at::kLong), o.targets);
         save_tensors(at::ones({20}, at::kBool), o.mask);
         o.checkpoints = t.path("masked");
         t.run(o, t.mlp());
         o.mask = "", o.steps = 8;
         EXPECT_THAT(message_of([&] { t.run(o, t.mlp()); }), HasSubstr("--data (names, sizes, types)"));
       }},
      {"loss", [](TrainingOptions& t) { t.refuses(t.with("loss", {"mse"}), "--loss mse: tokens have no numbers"); }},
      {"ignore-index",
       [](TrainingOptions& t) {
         EXPECT_NE(t.losses_with("ignore-index", "1"), t.losses(t.options));
         t.keeps("ignore-index", "77");
       }},
      {"shuffle", [](TrainingOptions& t) { t.changes("shuffle", "false", 0); }},
  };
}

Checks checks_of_optimizer() {
  return {
      {"optimizer",
       [](TrainingOptions& t) {
         t.changes("optimizer", "sgd", 1);
         t.changes("optimizer", "adam", 1);
       }},
      {"lr",
       [](TrainingOptions& t) {
         t.changes("lr", "0.02", 1);
         t.refuses(t.with("lr", {"1e39"}), "--lr 1e+39: float32 has no room for it");
       }},
      {"beta1", [](TrainingOptions& t) { t.changes("beta1", "0.5", 2); }},
      {"beta2", [](TrainingOptions& t) { t.changes("beta2", "0.9", 2); }},
      {"eps", [](TrainingOptions& t) { t.changes("eps", "0.1", 1); }},
      {"weight-decay",
       [](TrainingOptions& t) {
         t.changes("weight-decay", "0.5", 1);
         t.keeps("weight-decay", "0.01");
       }},
      {"momentum",
       [](TrainingOptions& t) {
         TrainOptions o = t.sgd();
         o.momentum = 0.9;
         t.changes(o, t.sgd(), 2);
       }},
      {"nesterov",
       [](TrainingOptions& t) {
         TrainOptions plain = t.sgd();
         plain.momentum = 0.9;
         TrainOptions o = plain;
         o.nesterov = true;
         t.changes(o, plain, 1);
         t.refuses(t.with("nesterov", {"true"}), "--nesterov: is of --optimizer sgd");
       }},
      {"group",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("group", {"*.bias: lr=0", "*: lr=2x, weight_decay=0.3"});
         const Told told = t.run(o, t.lm());
         EXPECT_EQ(told.events[1]["parameters"], nlohmann::json({"norm.bias", "head.bias"}));
         EXPECT_EQ(told.events[2]["parameters"], nlohmann::json({"wte.weight", "norm.weight", "head.weight"}));
         TrainOptions same = t.options;
         same.lr = 0.02;
         same.weight_decay = 0.3;
         const Told all = t.run(same, t.lm());
         const auto of = [](const Told& of, const char* name) { return of.module->state().get(name).tensor; };
         EXPECT_TRUE(at::equal(of(told, "head.bias"), t.lm()->state().get("head.bias").tensor)) << "rate 0";
         EXPECT_FALSE(at::equal(of(all, "head.bias"), of(told, "head.bias")));
         t.refuses(t.with("group", {"no.such: lr=1"}), "no parameter's name fits 'no.such'");
         t.refuses(t.with("group", {"*: lr=1", "head.*: lr=2"}), "fits 'head.*' that fits no group before");
         for (const char* bad : {"", "x", ": lr=1", "*: lr=fast", "*: lr=-1", "*: momentum=1", "*: weight_decay=2x"})
           t.refuses(t.with("group", {bad}), "--group " + std::string(bad));
       }},
      {"clip",
       [](TrainingOptions& t) {
         TrainOptions o = t.sgd();
         o.clip = 0.01;
         t.changes(o, t.sgd(), 1);
         o.clip = 1e6;
         EXPECT_EQ(t.losses(o), t.losses(t.sgd())) << "below the norm nothing is scaled";
       }},
      {"rate", [](TrainingOptions& t) { t.changes("rate", "cosine", 2); }},
      {"warmup",
       [](TrainingOptions& t) {
         EXPECT_THAT(t.run(t.with("warmup", {"4"}), t.lm()).of("lr"),
                     ElementsAre(0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01));
         t.refuses(t.with("warmup", {"7"}), "--warmup 7: more than --steps 6");
       }},
      {"decay-steps",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("decay-steps", {"4"});
         o.rate = "wsd";
         EXPECT_THAT(t.run(o, t.lm()).of("lr"), ElementsAre(0.01, 0.01, 0.01, 0.0075, 0.005, 0.0025));
       }},
      {"final-rate",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("final-rate", {"0.5"});
         o.rate = "linear";
         EXPECT_DOUBLE_EQ(t.run(o, t.lm()).of("lr").back(), 0.01 * (1 - 0.5 * 5 / 6));
       }},
  };
}

Checks checks_of_steps() {
  return {
      {"steps", [](TrainingOptions& t) { EXPECT_EQ(t.losses_with("steps", "2").size(), 2u); }},
      {"batch", [](TrainingOptions& t) { t.refuses(t.with("batch", {"5"}), "--batch 5: the file was exported"); }},
      {"microbatches",
       [](TrainingOptions& t) { EXPECT_EQ(t.run(t.with("microbatches", {"3"}), t.lm()).of("rows")[0], 6); }},
      {"accumulate",
       [](TrainingOptions& t) {
         const auto four = t.losses_with("microbatches", "4"), twice = t.losses_with("accumulate", "4");
         ASSERT_EQ(four.size(), twice.size());
         for (size_t i = 0; i < four.size(); ++i) EXPECT_NEAR(four[i], twice[i], 1e-5);
       }},
      {"autocast",
       [](TrainingOptions& t) {
         const auto full = t.losses(t.options), low = t.losses_with("autocast", "bf16");
         EXPECT_NE(full, low);
         for (size_t i = 0; i < full.size(); ++i) EXPECT_NEAR(full[i], low[i], 0.05);
       }},
      {"formats",
       [](TrainingOptions& t) {
         t.changes("formats", "mxfp4", 0);
         t.keeps("formats", "fp32");
         t.refuses(t.with("formats", {"fp9"}), "--formats: 'fp9' is no recipe");
         t.refuses(t.with("formats", {"unit-fp8"}), "--formats: the recipe is for a unit-scaled model");
         std::ofstream(t.folder / "r.toml") << "fwd = \"mxfp4\"\n[[product]]\nname = \"head\"\nfwd = \"none\"\n";
         t.keeps("formats", t.path("r.toml"));  // the only product
       }},
      {"verdict",
       [](TrainingOptions& t) {
         const TrainOptions o = t.with("verdict", {"fp32", "mxfp4"});
         const Told told = t.run(o, t.lm(0.2)), plain = t.run(t.options, t.lm(0.2));
         EXPECT_EQ(told.losses(), plain.losses()) << "no bit of the training changes";
         for (const Attr& attr : plain.module->state())
           EXPECT_TRUE(at::equal(attr.tensor, told.module->state().get(attr.name).tensor)) << attr.name;
         EXPECT_EQ(told.of("at_step"), std::vector<double>{4});
         for (const auto& event : told.events) {
           if (!event.contains("verdict")) continue;
           EXPECT_EQ(event["verdict"]["recipes"][0]["score"], 0);
           EXPECT_GT(event["verdict"]["recipes"][1]["score"], 0.05);
         }
         t.refuses(t.with("verdict", {"fp9"}), "--verdict: 'fp9' is no recipe");
       }},
      {"verdict-steps",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("verdict", {"bf16"});
         o.verdict_steps = 2;
         o.warmup = 4;
         EXPECT_EQ(t.run(o, t.lm()).of("at_step"), std::vector<double>{5});
         o.verdict_steps = 100;
         EXPECT_EQ(t.run(o, t.lm()).of("at_step"), std::vector<double>{6}) << "the last one";
       }},
      {"verdict-page",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("verdict-page", {t.path("v.html")});
         t.refuses(o, "--verdict-page: no verdict is asked for");
         o.verdict = {"mxfp4"};
         t.run(o, t.lm());
         EXPECT_THAT(read_file(t.path("v.html")), HasSubstr("mxfp4"));
       }},
      {"verdict-recipe",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("verdict-recipe", {t.path("v.toml")});
         t.refuses(o, "--verdict-recipe: no verdict is asked for");
         o.verdict = {"mxfp8"};
         t.run(o, t.lm());
         EXPECT_EQ(t.losses_with("formats", t.path("v.toml")), t.losses_with("formats", "mxfp8"));
       }},
      {"seed", [](TrainingOptions& t) { t.changes("seed", "4", 0); }},
      {"eval-data",
       [](TrainingOptions& t) {
         const Told told = t.run(t.with("eval-data", {t.path("held.bin")}), t.lm());
         EXPECT_EQ(told.of("eval"), std::vector<double>{6});
         EXPECT_EQ(told.of("eval_targets"), std::vector<double>{84}) << "12 windows, 7 targets each";
         EXPECT_EQ(told.losses(), t.losses(t.options)) << "evaluation changes nothing";
       }},
      {"eval-targets",
       [](TrainingOptions& t) {
         TrainOptions o = t.rows();
         o.eval_data = o.data;
         o.eval_targets = o.targets;
         EXPECT_EQ(t.run(o, t.mlp()).of("eval_targets"), std::vector<double>{40});
         t.refuses(t.with("eval-targets", {"y.pt"}), "--eval-data is missing");
       }},
      {"eval-every",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("eval-every", {"4"});
         t.refuses(o, "--eval-data is missing");
         o.eval_data = t.path("held.bin");
         EXPECT_THAT(t.run(o, t.lm()).of("eval"), ElementsAre(4, 6));
       }},
      {"eval-batches",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("eval-batches", {"2"});
         o.eval_data = t.path("held.bin");
         EXPECT_EQ(t.run(o, t.lm()).of("eval_targets"), std::vector<double>{28});
       }},
  };
}

// Options that take several processes are tested with the command (cli_test.cpp, train_test.cpp).
TEST_F(TrainingOptions, DoEachWhatTheHelpSays) {
  Checks all;
  for (auto part : {checks_of_data, checks_of_optimizer, checks_of_steps, checks_of_layout, checks_of_checkpoints,
                    checks_of_output})
    all.merge(part());
  for (const TrainField& field : train_fields()) {
    SCOPED_TRACE(field.name);
    EXPECT_FALSE(field.help.empty());
    ASSERT_TRUE(all.count(field.name)) << "--" << field.name << " has no test: add one here";
    all.at(field.name)(*this);
    all.erase(field.name);
  }
  EXPECT_TRUE(all.empty()) << all.begin()->first << " is no option";
}

TEST_F(TrainingOptions, AreTheSameInATomlFileAsPrintedBack) {
  TrainOptions o = options;
  o.groups = {"*.bias: lr=0.1x", "he said \"no\": weight_decay=0"};
  o.at = {"a", "b:end"};
  o.lr = 1.0 / 3;
  o.weight_decay = 0.1;
  o.nesterov = true;
  TrainOptions again;
  read_toml(again, to_toml(o), "run.toml");
  EXPECT_EQ(again, o);
  TrainOptions from_file;
  read_toml(from_file, to_toml(options), "run.toml");
  const Told by_file = run(from_file, lm(0.2)), by_hand = run(options, lm(0.2));
  EXPECT_EQ(by_file.losses(), by_hand.losses());
  for (const Attr& attr : by_hand.module->state())
    EXPECT_TRUE(at::equal(attr.tensor, by_file.module->state().get(attr.name).tensor)) << attr.name;
  o.weight_decay.reset();
  TrainOptions unset;
  read_toml(unset, to_toml(o), "run.toml");
  EXPECT_EQ(unset, o);
}

TEST_F(TrainingOptions, SayWhereATomlFileIsWrong) {
  const auto says = [&](const std::string& text) { return message_of([&] { read_toml(options, text, "run.toml"); }); };
  EXPECT_THAT(says("lr = 0.1\nstep = 5\n"), HasSubstr("run.toml:2: no option of a training is named 'step'"));
  EXPECT_THAT(says("\nsteps = 0"), HasSubstr("run.toml:2: --steps: 0 is no whole number of 1 or more"));
  EXPECT_THAT(says("steps = 1.5"), HasSubstr("--steps: 1.5 is no whole number"));
  EXPECT_THAT(says("shuffle = 1"), HasSubstr("'1' is neither true nor false"));
  EXPECT_THAT(says("loss = \"none\""), HasSubstr("--loss: 'none' is not known"));
  EXPECT_THAT(says("lr = [0.1]"), HasSubstr("--lr: is no text, number, true or false"));
  EXPECT_THAT(says("lr = 0.1\nlr"), HasSubstr("run.toml:2: is no TOML"));
  EXPECT_THAT(says("at = [\"a\", {b = 1}]"), HasSubstr("run.toml:1: --at: holds what is no text"));
  EXPECT_THAT(says("weight-decay = 0.1\nweight_decay = 0.2"), HasSubstr("run.toml:2: --weight-decay: is there twice"));
  EXPECT_THAT(says(std::string("steps = \"\x00\"", 12)), HasSubstr("run.toml:1: "));
}

TEST_F(TrainingOptions, OfAProgramAreCheckedAsThoseOfACommand) {
  const auto wrong = [&](auto TrainOptions::*member, auto value, const std::string& says) {
    TrainOptions o = options;
    o.*member = value;
    refuses(o, says);
    EXPECT_THAT(message_of([&] { check_training(o); }), HasSubstr(says));
  };
  wrong(&TrainOptions::optimizer, "Adam", "--optimizer: 'Adam' is not known");
  wrong(&TrainOptions::rate, "Cosine", "--rate: 'Cosine' is not known");
  wrong(&TrainOptions::token_type, "i64", "--token-type: 'i64' is not known");
  wrong(&TrainOptions::lr, NAN, "--lr: nan");
  wrong(&TrainOptions::clip, -1, "--clip: -1");
  wrong(&TrainOptions::weight_decay, NAN, "--weight-decay: nan");
  wrong(&TrainOptions::accumulate, 0, "--accumulate: 0");
}

TEST_F(TrainingOptions, APlansFileIsReadOnce) {
  PipelinePlan plan;
  plan.schedule = make_schedule("1F1B", 1, 2);
  plan.recompute = {"none"};
  std::ofstream(path("plan.json")) << to_json(plan);
  const TrainOptions read = checked(with("plan", {path("plan.json")}));
  fs::remove(path("plan.json"));
  EXPECT_EQ(run(read, lm()).losses(), run(with("microbatches", {"2"}), lm()).losses());
  TrainOptions other = read;
  other.plan = path("other.json");
  EXPECT_THAT(message_of([&] { checked(other); }), HasSubstr("other.json"));
}

TEST_F(TrainingOptions, ATrainerRunsOnce) {
  TrainParts parts;
  parts.module = lm();
  Trainer trainer(options, {.event = [](const TrainEvent&) {}}, std::move(parts));
  EXPECT_EQ(trainer.run().steps, 6);
  EXPECT_THAT(message_of([&] { trainer.run(); }), HasSubstr("this training has run"));
}

TEST_F(TrainingOptions, OfSamplingAreRefusedOutOfRange) {
  for (const GenerateOptions& o : {GenerateOptions{.tokens = -1}, GenerateOptions{.temperature = -1},
                                   GenerateOptions{.temperature = std::nan("")}, GenerateOptions{.top_k = -1}})
    EXPECT_THROW(generate(*lm(), {}, o), UsageError);
  EXPECT_EQ(generate(*lm(), {}, {.tokens = 3}).size(), 3u);
}

TEST_F(TrainingOptions, RatesAreTheFormulasOfTheHeader) {
  TrainOptions o;
  o.steps = 100;
  o.warmup = 10;
  o.final_rate = 0.1;
  for (const char* shape : {"constant", "linear", "cosine", "wsd"}) {
    o.rate = shape;
    EXPECT_EQ(rate_share(o, 1), 0.1) << shape;
    EXPECT_EQ(rate_share(o, 10), 1) << shape;
    EXPECT_EQ(rate_share(o, 11), 1) << shape;
    for (int64_t s = 11; s < 100; ++s) EXPECT_LE(rate_share(o, s + 1), rate_share(o, s)) << shape << s;
    EXPECT_GE(rate_share(o, 100), shape == std::string("constant") ? 1 : 0.1) << shape;
    EXPECT_LE(rate_share(o, 100), shape == std::string("constant") ? 1 : 0.15) << shape;
  }
  o.rate = "cosine";
  EXPECT_NEAR(rate_share(o, 56), 0.55, 1e-12) << "half way";
  o.rate = "wsd";
  EXPECT_EQ(rate_share(o, 81), 1);
  EXPECT_LT(rate_share(o, 82), 1);
}

}  // namespace
}  // namespace plumb

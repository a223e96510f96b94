// Every option of a training does what its help says: a table with a check of each, and none may be missing.
#include <fstream>
#include <map>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/core/input_file.h"
#include "plumb/training/dry_run.h"
#include "plumb/training/lasting.h"
#include "plumb/training/rates.h"
#include "plumb/training/training_for_test.h"

namespace plumb {
namespace {

using namespace testing_training;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Lt;

class TrainingOptions : public Training {
 public:
  std::vector<double> losses(const TrainOptions& o) const { return run(o, lm()).losses(); }
  std::vector<double> losses_with(const std::string& name, const std::string& text) const {
    return losses(with(name, {text}));
  }
  // Another value makes other losses, from this step on.
  void changes(const std::string& name, const std::string& text, size_t from) const {
    changes(with(name, {text}), options, from);
  }
  void changes(const TrainOptions& changed, const TrainOptions& base, size_t from) const {
    const auto before = losses(base), after = losses(changed);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(before[i] != after[i], i >= from) << i;
  }
  void keeps(const std::string& name, const std::string& text) const {
    EXPECT_EQ(losses_with(name, text), losses(options)) << name;
  }
  void refuses(const TrainOptions& o, const std::string& says) const {
    EXPECT_THAT(message_of([&] { run(o, lm()); }), HasSubstr(says));
  }
  void refuses_file(const TrainOptions& o, const std::string& says) const {
    EXPECT_THAT(message_of([&] { run(o); }), HasSubstr(says));
  }
  // lm() as plumb import writes it: without weights, which are in a folder.
  std::string imported() const {
    ExportedProgram program;
    program.module = lm();
    NamedTensors stored;
    nlohmann::json names;
    for (const Attr& attr : std::vector<Attr>(program.module->state().attrs())) {
      if (attr.kind != AttrKind::Parameter) continue;
      stored.emplace_back(attr.name, attr.tensor.detach());
      names[attr.name] = attr.name;
      const at::Tensor none = at::empty_like(attr.tensor, at::device(at::kMeta)).detach().set_requires_grad(true);
      program.module->set_state({{attr.name, none}});
    }
    fs::create_directories(folder / "weights");
    write_safetensors(path("weights/model.safetensors"), stored);
    const auto nothing = nlohmann::json::array();
    program.pretrained = nlohmann::json({{"folder", path("weights")},
                                         {"files", {{"config.json", "{}"}}},
                                         {"names", names},
                                         {"conversions", nothing},
                                         {"graphs", nothing}})
                             .dump();
    save_pt2(program, path("imported.pt2"));
    return path("imported.pt2");
  }
  TrainOptions sgd() const { return with("optimizer", {"sgd"}); }
};

using Check = std::function<void(TrainingOptions& t)>;

std::map<std::string, Check> checks_of_data() {
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

std::map<std::string, Check> checks_of_optimizer() {
  return {
      {"optimizer",
       [](TrainingOptions& t) {
         t.changes("optimizer", "sgd", 1);
         t.changes("optimizer", "adam", 1);
       }},
      {"lr", [](TrainingOptions& t) { t.changes("lr", "0.02", 1); }},
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

std::map<std::string, Check> checks_of_steps() {
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

// What takes several processes is tested with the command (cli_test.cpp, train_test.cpp).
std::map<std::string, Check> checks_of_layout() {
  return {
      {"stages", [](TrainingOptions& t) { t.refuses(t.with("stages", {"2"}), "the launcher started 1 processes"); }},
      {"data-parallel",
       [](TrainingOptions& t) { t.refuses(t.with("data-parallel", {"2"}), "the launcher started 1 processes"); }},
      {"gradient-groups",
       [](TrainingOptions& t) {
         TrainOptions one = t.with("microbatches", {"4"}), two = one, three = one;
         two.gradient_groups = 2;
         three.gradient_groups = 3;
         EXPECT_NE(t.losses(two), t.losses(one)) << "sums of another order";
         t.refuses(three, "gradient_groups is 3, but each replica has 4 microbatches");
         two.checkpoints = t.path("groups");
         const auto first = t.losses(two);
         two.steps = 9;
         two.gradient_groups = 0;
         std::vector<double> all = first;
         for (const double loss : t.losses(two)) all.push_back(loss);
         two.checkpoints.clear();
         EXPECT_NE(t.losses(two), all);
         two.gradient_groups = 2;
         EXPECT_EQ(t.losses(two), all) << "a run goes on with its groups";
       }},
      {"at", [](TrainingOptions& t) { t.refuses(t.with("at", {"norm"}), "--at: one process has no cuts"); }},
      {"transmit", [](TrainingOptions& t) { t.refuses(t.with("transmit", {"no.such"}), "--transmit no.such"); }},
      {"wire",
       [](TrainingOptions& t) {
         t.refuses(t.with("wire", {"e4m3fn"}), "--wire: takes two formats");
         t.refuses(t.with("wire", {"e4m3fn,e5m2"}), "--wire: in one process nothing goes from stage to stage");
       }},
      {"wire-exclude",
       [](TrainingOptions& t) { t.refuses(t.with("wire-exclude", {"x*"}), "no value that crosses between stages"); }},
      {"schedule",
       [](TrainingOptions& t) {
         t.keeps("schedule", "GPipe");
         t.refuses(t.with("schedule", {"nope"}), "--schedule nope");
       }},
      {"recompute", [](TrainingOptions& t) { t.keeps("recompute", "none"); }},
      {"device", [](TrainingOptions& t) { t.refuses(t.with("device", {"nowhere"}), "--device nowhere"); }},
      {"threads", [](TrainingOptions& t) { t.keeps("threads", "2"); }},
  };
}

// Stops and restarts are tested with the command, too.
std::map<std::string, Check> checks_of_checkpoints() {
  return {
      {"checkpoints",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("checkpoints", {t.path("run")});
         EXPECT_EQ(t.losses(o), t.losses(t.options));
         o.steps = 8;
         const Told more = t.run(o, t.lm());
         EXPECT_EQ(more.of("resumed"), std::vector<double>{6});
         EXPECT_EQ(more.losses().size(), 2u);
         o.checkpoints = t.path("other");
         const auto whole = t.losses(o);
         EXPECT_EQ(more.losses(), std::vector<double>(whole.begin() + 6, whole.end()));
       }},
      {"checkpoint-every",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("checkpoint-every", {"4"});
         t.refuses(o, "--checkpoint-every: nothing says where to");
         o.checkpoints = t.path("every");
         EXPECT_THAT(t.run(o, t.lm()).of("checkpoint"), ElementsAre(4, 6));
       }},
      {"keep-last",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("keep-last", {"1"});
         o.checkpoints = t.path("last");
         o.checkpoint_every = 2;
         t.losses(o);
         EXPECT_FALSE(fs::exists(t.folder / "last" / "step-00000004"));
         EXPECT_TRUE(fs::exists(t.folder / "last" / "step-00000006"));
       }},
      {"keep-every",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("keep-every", {"4"});
         o.checkpoints = t.path("kept");
         o.checkpoint_every = 2;
         o.keep_last = 1;
         t.losses(o);
         EXPECT_FALSE(fs::exists(t.folder / "kept" / "step-00000002"));
         EXPECT_TRUE(fs::exists(t.folder / "kept" / "step-00000004"));
       }},
      {"resume",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("resume", {"false"});
         o.checkpoints = t.path("again");
         EXPECT_EQ(t.losses(o), t.losses(t.options));
         EXPECT_EQ(t.losses(o), t.losses(t.options)) << "from the first step";
       }},
      {"max-restarts",
       [](TrainingOptions& t) {
         t.refuses(t.with("max-restarts", {"1"}), "--max-restarts: there are no checkpoints");
       }},
      {"spares",
       [](TrainingOptions& t) { t.refuses(t.with("spares", {"1"}), "--spares: no lost process is made up for"); }},
      {"recut",
       [](TrainingOptions& t) {
         t.refuses(t.with("recut", {"true"}), "--recut: no lost process is made up for");
         TrainOptions o = t.options;
         o.stages = 3, o.replicas = 2, o.microbatches = 4;
         EXPECT_EQ(fewer_processes(o, 5), 4);
         EXPECT_EQ(options_for(o, 4).stages, 2);
         EXPECT_EQ(options_for(o, 4).gradient_groups, 2) << "the sums stay what they were";
         EXPECT_EQ(fewer_processes(o, 1), 1);
         EXPECT_EQ(options_for(o, 1).microbatches, 8) << "of all replicas";
         EXPECT_EQ(options_for(o, 1).threads, threads_of(o));
         EXPECT_EQ(options_for(o, 6), o);
         o.stages = 1, o.replicas = 3;
         EXPECT_EQ(fewer_processes(o, 2), 0);
       }},
      {"patience", [](TrainingOptions& t) { t.keeps("patience", "5"); }},
      {"inject",
       [](TrainingOptions& t) {
         t.refuses(t.with("inject", {"raise rank 0 at 0B0 of step 3"}), "injected: raise rank 0 at 0B0 of step 3");
         t.keeps("inject", "raise rank 0 at 0B0 of step 7");
       }},
  };
}

std::map<std::string, Check> checks_of_output() {
  return {
      {"weights",
       [](TrainingOptions& t) {
         t.refuses(t.with("weights", {"x"}), "--weights x: the program was not imported from a folder");
         TrainOptions o = t.options;
         o.file = t.imported();
         const std::vector<double> losses = t.run(o).losses();
         fs::rename(t.folder / "weights", t.folder / "moved");
         t.refuses_file(o, "--weights is missing");
         o.weights = t.path("moved");
         o.save = t.path("out.pt2");
         EXPECT_EQ(t.run(o).losses(), losses);
         const auto saved = load_pt2(o.save);
         EXPECT_FALSE(saved.module->state().get("head.weight").tensor.is_meta());
         write_safetensors(t.path("moved/model.safetensors"), {{"wte", at::zeros({1})}});
         t.refuses_file(o, "has no tensor");
       }},
      {"save",
       [](TrainingOptions& t) {
         const Told told = t.run(t.with("save", {t.path("out.pt2")}), t.lm());
         const auto saved = load_pt2(t.path("out.pt2"));
         for (const Attr& attr : told.module->state())
           EXPECT_TRUE(at::equal(attr.tensor, saved.module->state().get(attr.name).tensor)) << attr.name;
         t.refuses(t.with("save", {"out.bin"}), "--save out.bin: is no .pt2 name");
       }},
      {"save-hf",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("save-hf", {t.path("out")});
         t.refuses(o, "--save-hf " + t.path("out") + ": the program was not imported from a folder");
         o.file = t.imported();
         const std::vector<double> losses = t.run(o).losses();
         EXPECT_EQ(losses, t.run(t.options, t.lm()).losses());
         EXPECT_EQ(TensorFolder(t.path("out")).names(), TensorFolder(t.path("weights")).names());
         EXPECT_EQ(read_file(t.path("out/config.json")), "{}");
         t.refuses_file(o, "is not empty");
       }},
      {"dump",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("dump", {t.path("dump")});
         o.optimizer = "sgd";
         o.lr = 1e30;
         EXPECT_THAT(message_of([&] { t.run(o, t.lm()); }), HasSubstr("first was the "));
         const auto dumped = load_pt2(t.path("dump/model.pt2"));
         const auto inputs = load_tensors(t.path("dump/inputs.pt")).toTuple()->elements();
         EXPECT_FALSE(at::isfinite((*dumped.module)(inputs.at(0).toTensor())).all().item<bool>())
             << "the file and its inputs show it again";
       }},
      {"record",
       [](TrainingOptions& t) { t.refuses(t.with("record", {"r.toml"}), "--record: nothing says where to"); }},
      {"history",
       [](TrainingOptions& t) {
         std::ofstream(t.folder / "rules.toml") << "every = 2\n[[rule]]\n";
         TrainOptions o = t.with("history", {t.path("run.history")});
         t.refuses(o, "--history: nothing says what to record");
         o.record = t.path("rules.toml");
         EXPECT_EQ(t.losses(o), t.losses(t.options));
         EXPECT_GT(fs::file_size(t.folder / "run.history"), 1000u);
       }},
      {"timeline",
       [](TrainingOptions& t) {
         t.keeps("timeline", t.path("step.svg"));
         EXPECT_THAT(read_file(t.path("step.svg")), HasSubstr("<svg"));
         t.refuses(t.with("timeline", {"step.png"}), "--timeline step.png");
       }},
      {"timeline-steps",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("timeline-steps", {"2"});
         o.timeline = t.path("step.json");
         t.losses(o);
         EXPECT_THAT(read_file(t.path("step.json")), AllOf(HasSubstr("step 5"), HasSubstr("step 6")));
       }},
      {"csv",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("csv", {t.path("run.csv")});
         o.eval_data = t.path("held.bin");
         t.losses(o);
         std::ifstream lines(t.path("run.csv"));
         std::string head, line, last;
         std::getline(lines, head);
         EXPECT_EQ(head, "step,loss,lr,norm,rows_per_second,tokens_per_second,memory,seconds,eval_loss");
         int count = 0;
         while (std::getline(lines, line)) last = line, ++count;
         EXPECT_EQ(count, 6);
         EXPECT_EQ(last.rfind("6,", 0), 0u) << last;
         EXPECT_NE(last.back(), ',') << "the evaluation at the end";
       }},
      {"tensorboard",
       [](TrainingOptions& t) {
         t.keeps("tensorboard", t.path("events"));
         std::string bytes;
         for (const auto& entry : fs::directory_iterator(t.folder / "events")) bytes += read_file(entry.path());
         EXPECT_THAT(bytes, AllOf(HasSubstr("brain.Event:2"), HasSubstr("gradient_norm")));
       }},
      {"page",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("page", {t.path("run.html")});
         o.eval_data = t.path("held.bin");
         t.losses(o);
         EXPECT_THAT(read_file(t.path("run.html")), AllOf(HasSubstr("Throughput"), HasSubstr("held-out data")));
       }},
      {"dry-run",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("dry-run", {"true"});
         o.schedule = "Interleaved1F1B";
         o.microbatches = 4;
         const TrainNeeds needs = measure_needs(o, prepare_job(o, {t.lm(), nullptr}, {}));
         ASSERT_EQ(needs.ranks.size(), 1u);
         EXPECT_EQ(needs.ranks[0].stages, (std::vector<int>{0, 1}));
         EXPECT_EQ(needs.ranks[0].parameters, 32 * 8 + 8 + 8 + 8 * 32 + 32);
         EXPECT_EQ(needs.ranks[0].resident, 4.0 * 4 * static_cast<double>(needs.ranks[0].parameters));
         EXPECT_GT(needs.ranks[0].peak, needs.ranks[0].resident);
         EXPECT_GT(needs.seconds, 0);
         EXPECT_EQ(needs.rows, 8);
       }},
      {"json", [](TrainingOptions& t) { t.keeps("json", "true"); }},  // the command's printing
  };
}

TEST_F(TrainingOptions, DoEachWhatTheHelpSays) {
  std::map<std::string, Check> all;
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
  EXPECT_THAT(says(std::string("steps = \"\x00\"", 12)), HasSubstr("run.toml:1: "));
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

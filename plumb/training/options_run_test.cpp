// The checks of options that say where a training runs and what it leaves behind.
#include <algorithm>
#include <fstream>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/core/input_file.h"
#include "plumb/recording/history.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/pipeline_plan.h"
#include "plumb/training/options_testing.h"
#include "plumb/training/plan/dry_run.h"
#include "plumb/training/recovery/audit.h"
#include "plumb/training/recovery/lasting.h"

namespace plumb::testing_training {

using testing::ElementsAre;
using testing::HasSubstr;

Checks checks_of_layout() {
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
         t.refuses(t.with("wire", {"e4m3fn,e5m2"}), "--wire: with one stage nothing goes from stage to stage");
       }},
      {"wire-exclude",
       [](TrainingOptions& t) { t.refuses(t.with("wire-exclude", {"x*"}), "--wire-exclude: every value goes from"); }},
      {"schedule",
       [](TrainingOptions& t) {
         t.keeps("schedule", "GPipe");
         t.refuses(t.with("schedule", {"nope"}), "--schedule nope");
       }},
      {"plan",
       [](TrainingOptions& t) {
         PipelinePlan plan;
         plan.schedule = make_schedule("GPipe", 1, static_cast<int>(t.options.microbatches));
         plan.recompute = {"none"};
         std::ofstream(t.path("plan.json")) << to_json(plan);
         t.keeps("plan", t.path("plan.json"));
         std::ofstream(t.path("none.json")) << "{}";
         t.refuses(t.with("plan", {t.path("none.json")}), "none.json");
         const FieldTexts both = {{"plan", {t.path("plan.json")}}, {"schedule", {"GPipe"}}};
         EXPECT_THAT(message_of([&] { read_options("", both); }), HasSubstr("--plan: says itself where to cut"));
       }},
      {"recompute", [](TrainingOptions& t) { t.keeps("recompute", "none"); }},
      {"device", [](TrainingOptions& t) { t.refuses(t.with("device", {"nowhere"}), "--device nowhere"); }},
      {"threads",
       [](TrainingOptions& t) {
         // Another number of threads may sum in another order (docs/training.md): the same number gives the same bits.
         const auto one = t.losses(t.options), two = t.losses_with("threads", "2");
         EXPECT_EQ(two, t.losses_with("threads", "2"));
         ASSERT_EQ(two.size(), one.size());
         for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(two[i], one[i], 1e-3);
       }},
  };
}

// Stops and restarts are tested with the command, too.
Checks checks_of_checkpoints() {
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
      {"copies-to-neighbor",
       [](TrainingOptions& t) {
         t.refuses(t.with("copies-to-neighbor", {"5"}), "--copies-to-neighbor: no lost process is made up for");
       }},
      {"audit-every",
       [](TrainingOptions& t) {
         t.refuses(t.with("audit-every", {"5"}), "--audit-every: nothing is audited");
         TrainOptions o = t.options;
         const Schedule table = make_schedule("1F1B", 2, 4);
         EXPECT_EQ(audit_period(o, table), 25) << "8 runs of a stage a step";
         o.audit_every = 5;
         EXPECT_EQ(audit_period(o, table), 5);
         o.stages = 2;
         const Schedule both_ways = make_schedule("DualPipe", 2, 4);
         for (int64_t step = 1; step <= 20; ++step) {
           const AuditChoice choice = audit_choice(o, both_ways, step);
           const auto& row = both_ways.rows[static_cast<size_t>(choice.rank)];
           EXPECT_TRUE(std::ranges::any_of(row,
                                           [&](const Action& action) {
                                             return action.first_part() ==
                                                    Action::forward(choice.stage, choice.microbatch);
                                           }))
               << "rank " << choice.rank << " does not compute microbatch " << choice.microbatch;
         }
       }},
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
      {"audit",
       [](TrainingOptions& t) {
         t.keeps("audit", "true");
         TrainOptions o = t.with("audit", {"true"});
         o.inject = {"rot rank 0 at 0B0 of step 3"};
         EXPECT_THAT(message_of([&] { t.run(o, t.lm()); }), HasSubstr("its memory changed after it was written"));
         o.stages = 2;
         t.refuses(o, "--audit: nobody makes up for a rank that is wrong");
       }},
      {"patience", [](TrainingOptions& t) { t.keeps("patience", "5"); }},
      {"inject",
       [](TrainingOptions& t) {
         t.refuses(t.with("inject", {"raise rank 0 at 0B0 of step 3"}), "injected: raise rank 0 at 0B0 of step 3");
         t.keeps("inject", "raise rank 0 at 0B0 of step 7");
       }},
  };
}

Checks checks_of_output() {
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
      {"hashes",
       [](TrainingOptions& t) {
         t.keeps("hashes", t.path("h.history"));
         const History found = read_history(t.path("h.history"));
         ASSERT_EQ(found.hashes.size(), 6u);
         EXPECT_EQ(found.hashes[5].step, 6);
       }},
      {"replay",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("replay", {"2"});
         t.refuses(o, "--replay: nothing says where to");
         o.hashes = t.path("again.history");
         EXPECT_EQ(t.run(o, t.lm()).losses().size(), 2u);
         const History found = read_history(o.hashes);
         ASSERT_EQ(found.hashes.size(), 2u);
         EXPECT_GT(found.hashes[1].hashes.size(), 2 * found.hashes[0].hashes.size()) << "whole";
         o.replay = 7;
         t.refuses(o, "--replay 7: more than --steps 6");
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
         t.refuses(t.with("tensorboard", {t.path("events")}), "events: holds the events of another run");
       }},
      {"page",
       [](TrainingOptions& t) {
         TrainOptions o = t.with("page", {t.path("run.html")});
         o.eval_data = t.path("held.bin");
         t.losses(o);
         EXPECT_THAT(read_file(t.path("run.html")), AllOf(HasSubstr("Throughput"), HasSubstr("held-out data")));
       }},
      {"options",
       [](TrainingOptions& t) {
         const TrainOptions o = t.with("options", {t.path("run.toml")});
         t.losses(o);
         TrainOptions again;
         read_toml(again, read_file(t.path("run.toml")), "run.toml");
         EXPECT_EQ(again, o);
       }},
      {"log-every", [](TrainingOptions& t) { t.keeps("log-every", "2"); }},  // the command's printing
      {"quiet", [](TrainingOptions& t) { t.keeps("quiet", "true"); }},
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

}  // namespace plumb::testing_training

// One check for every option of a training, by the option's name.
#pragma once

#include <functional>
#include <map>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/training/training_testing.h"

namespace plumb::testing_training {

class TrainingOptions : public Training {
 public:
  std::vector<double> losses(const TrainOptions& o) const { return run(o, lm()).losses(); }
  std::vector<double> losses_with(const std::string& name, const std::string& text) const {
    return losses(with(name, {text}));
  }
  // Expects another value to make other losses, from this step on.
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
    EXPECT_THAT(message_of([&] { run(o, lm()); }), testing::HasSubstr(says));
  }
  void refuses_file(const TrainOptions& o, const std::string& says) const {
    EXPECT_THAT(message_of([&] { run(o); }), testing::HasSubstr(says));
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

using Checks = std::map<std::string, std::function<void(TrainingOptions& t)>>;

Checks checks_of_layout();
Checks checks_of_checkpoints();
Checks checks_of_output();

}  // namespace plumb::testing_training

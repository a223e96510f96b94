// A DiffReport in words, as a table and as JSON.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "plumb/core/join.h"
#include "plumb/recording/diff.h"

namespace plumb {
namespace {

constexpr const char* kKinds[] = {"value", "gradient", "gradient_sum", "after_step", "optimizer_state"};

std::string title_of(const Difference& place, const HistoryTensor& tensor) {
  if (place.output) return c10::str("output ", *place.output, ", ", tensor.name, " against ", place.other_name);
  switch (place.kind) {
    case DiffKind::Value: return tensor.name;
    case DiffKind::Gradient: return "the gradient of " + tensor.name;
    case DiffKind::GradientSum: return "the summed gradient of " + tensor.name;
    case DiffKind::AfterStep: return tensor.name + " after the step";
    case DiffKind::OptimizerState: return "the optimizer's " + tensor.name;
  }
  return tensor.name;
}

// "aten::linear in layers.0.fc, model.py:12; stage 1, rank 2; microbatch 3, rows 12 to 15"
std::string place_of(const Difference& place, const HistoryTensor& tensor) {
  std::vector<std::string> parts;
  if (place.kind <= DiffKind::Gradient && !tensor.operation.empty())
    parts.push_back(tensor.operation + (tensor.module.empty() ? "" : " in " + tensor.module));
  if (!tensor.source.empty()) parts.push_back(tensor.source);
  if (place.stage >= 0) parts.push_back("stage " + std::to_string(place.stage));
  if (place.rank >= 0) parts.push_back("rank " + std::to_string(place.rank));
  if (place.microbatch >= 0) parts.push_back("microbatch " + std::to_string(place.microbatch));
  if (place.rows > 0) parts.push_back(c10::str("rows ", place.first_row, " to ", place.first_row + place.rows - 1));
  return join(parts);
}

std::string few(std::vector<std::string> names) {
  constexpr size_t kFew = 4;
  if (const size_t count = names.size(); count > kFew) {
    names.resize(kFew);
    names.push_back(c10::str("... (", count, ")"));
  }
  return join(names);
}

const char* name_of(DiffTensor::State state) {
  constexpr const char* names[] = {"", "equal", "first", "follows", "differs"};
  return names[static_cast<size_t>(state)];
}

}  // namespace

std::string DiffReport::conclusion() const {
  const std::string up_to = equal_to ? c10::str("Equal to step ", *equal_to, ".") : "";
  if (!first) {
    if (compared == 0) {
      return c10::str("Nothing was compared: they have no tensor in common",
                      not_comparable > 0 ? " of which the rows are the same." : ".");
    }
    if (!other_outputs.empty()) {
      return c10::str("Equal in the ", compared, " tensors that both have. Outputs that one lacks, or has another ",
                      "constant in: ", few(other_outputs), ".");
    }
    if (!lost_gradients.empty()) {
      return c10::str("Equal in the ", compared,
                      " tensors that both have. Parameters of which one has no gradient: ", few(lost_gradients), ".");
    }
    if (!equal()) {
      return c10::str("Equal in the ", compared, " tensors that both have; ", only_a.size(), " are only in ", a, ", ",
                      only_b.size(), " only in ", b, ".");
    }
    std::string text = (up_to.empty() ? "Equal." : up_to) + c10::str(" ", compared, " tensors were compared.");
    for (const auto& [steps, run] : {std::pair(steps_only_a, a), std::pair(steps_only_b, b)})
      if (steps > 0) text += c10::str(" ", steps, steps == 1 ? " step is" : " steps are", " only in ", run, ".");
    for (const auto& [names, run] : {std::pair(&only_a, a), std::pair(&only_b, b)})
      if (!names->empty()) text += c10::str(" Not compared, only in ", run, ": ", few(*names), ".");
    return text;
  }
  const HistoryTensor& tensor = tensors[first->tensor].tensor;
  std::string text = up_to + (up_to.empty() ? "" : " ");
  text += first->step ? c10::str("In step ", *first->step, " first differs: ") : std::string("First differs: ");
  text += title_of(*first, tensor);
  if (const std::string place = place_of(*first, tensor); !place.empty()) text += " (" + place + ")";
  if (first->distance) text += ": " + first->distance->to_string();
  if (!first->statistics.empty()) text += ": " + first->statistics;
  text += c10::str(". Of ", compared, " tensors ", differing, " differ");
  if (differing > 1) text += c10::str(", ", following, " of them follow from it");
  return text + ".";
}

bool DiffReport::by_name() const {
  const bool in_steps = equal_to || (first && first->step);
  return !in_steps && !tensors.empty() && tensors.front().tensor.operation == "state";
}

std::string DiffReport::torn() const {
  std::string text;
  for (const auto& [bytes, run] : {std::pair(torn_a, a), std::pair(torn_b, b)})
    if (bytes > 0) text += c10::str(text.empty() ? "" : ", ", "the last record of ", run, " (", bytes, " bytes)");
  return text;
}

std::string DiffReport::statement() const {
  const std::string left_out = torn();
  return basis_text() + (left_out.empty() ? "" : " Not written whole and left out: " + left_out + ".");
}

std::string DiffReport::basis_text() const {
  if (compared == 0 && not_comparable == 0) return "Names decide which tensors are compared.";
  if (compared > 0 && by_name()) return "Tensors were compared by their names.";
  const auto of_state = [](const DiffTensor& each) {
    return each.value == DiffTensor::State::NotCompared || kind_of(each.tensor, false) > DiffKind::GradientSum;
  };
  // A later stage's input is what another stage sent.
  if (first && first->step && first->kind == DiffKind::Value && first->stage <= 0 &&
      tensors[first->tensor].tensor.operation == "input")
    return "An input differs: the runs had other data in this step, or other rows in its microbatches. What follows "
           "from it says nothing of their arithmetic.";
  switch (basis) {
    case DiffBasis::SameRows:
      if (first && first->step && std::ranges::all_of(tensors, of_state))
        return "State after a step: equal if both runs had the same rows in every microbatch, the same groups of "
               "gradients and as many threads a process (--microbatches, --gradient-groups, --threads), whatever the "
               "stages, schedule and replicas.";
      return first && first->kind == DiffKind::GradientSum
                 ? "The same rows in every microbatch, and every microbatch's gradients are equal where they were "
                   "recorded: the sums were taken in other groups or another order, or went wrong."
                 : "The same rows in every microbatch: with as many threads a process every bit should be equal, "
                   "whatever the stages, schedule and replicas.";
    case DiffBasis::OtherRows:
      return "Other rows in a microbatch: values and their gradients are equal where kernels do not see the number of "
             "rows; gradients of parameters, and what follows from them, are summed in another order and were not "
             "compared bit for bit.";
    case DiffBasis::Distance:
      return "Another arithmetic: bits need not be equal, what counts is how far apart they are.";
  }
  return "";
}

Table DiffReport::table(size_t most) const {
  Table table{{"tensor", "operator", "module", "stage", "value", "gradient", "how far apart"}, {}};
  for (const DiffTensor& each : tensors) {
    using State = DiffTensor::State;
    if (each.value <= State::Equal && each.gradient <= State::Equal) continue;
    const bool is_first = each.value == State::First || each.gradient == State::First;
    if (table.rows.size() >= most && !is_first) continue;
    const HistoryTensor& t = each.tensor;
    std::string apart = each.distance ? each.distance->to_string() : "";
    if (is_first && first->distance) apart = first->distance->to_string();
    table.rows.push_back({t.name, t.operation, t.module, t.stage >= 0 ? std::to_string(t.stage) : "",
                          name_of(each.value), name_of(each.gradient), apart});
  }
  return table;
}

std::string DiffReport::to_text() const {
  std::string text = conclusion() + "\n" + statement() + "\n";
  if (not_comparable > 0)
    text += c10::str(not_comparable, " tensors cannot be compared, as the microbatches have other rows, or lack some, ",
                     "or other stages have a part of a gradient each.\n");
  if (!only_a.empty()) text += "Only in " + a + ": " + few(only_a) + "\n";
  if (!only_b.empty()) text += "Only in " + b + ": " + few(only_b) + "\n";
  if (first) text += "\n" + plumb::to_text(table());
  return text;
}

nlohmann::json DiffReport::to_json() const {
  nlohmann::json out = {{"a", a},
                        {"b", b},
                        {"equal", equal()},
                        {"conclusion", conclusion()},
                        {"statement", statement()},
                        {"compared", compared},
                        {"differing", differing},
                        {"following", following},
                        {"not_comparable", not_comparable},
                        {"only_a", only_a},
                        {"only_b", only_b},
                        {"other_outputs", other_outputs}};
  if (equal_to) out["equal_to"] = *equal_to;
  if (!first) return out;
  const HistoryTensor& t = tensors[first->tensor].tensor;
  nlohmann::json& f = out["first"];
  f = {{"tensor", t.name},    {"kind", kKinds[static_cast<size_t>(first->kind)]},
       {"module", t.module},  {"operator", t.operation},
       {"source", t.source},  {"stage", first->stage},
       {"rank", first->rank}, {"microbatch", first->microbatch},
       {"rows", first->rows}, {"first_row", first->first_row}};
  if (first->step) f["step"] = *first->step;
  if (first->output) f["output"] = *first->output;
  if (first->distance) {
    const TensorDistance& d = *first->distance;
    f["elements"] = d.elements, f["differing_elements"] = d.differing;
    if (!std::isnan(d.ulps)) f["ulps"] = d.ulps;
    if (std::isfinite(d.relative)) f["relative"] = d.relative;
  }
  return out;
}

std::string conclude_replays(const History& a, const History& b, const History& a_again, const History& b_again,
                             const DiffNames& names) {
  const DiffReport first = diff(a, a_again, {names.a, names.a + ", again"});
  const DiffReport second = diff(b, b_again, {names.b, names.b + ", again"});
  const DiffReport both = diff(a_again, b_again, names);
  for (const DiffReport* each : {&first, &second, &both}) {
    if (each->compared == 0) return "Nothing follows from " + each->a + " and " + each->b + ": " + each->conclusion();
  }
  if (first.first && second.first) {
    return "Neither run is reproduced: both differ when they are done again, so that numbers depend on something else "
           "(another machine or torch, threads, data). " +
           names.a + ": " + first.conclusion() + " " + names.b + ": " + second.conclusion();
  }
  if (!first.first && !second.first) {
    return both.first ? "Both runs are reproduced, so that the difference is in their programs, options or kernels. " +
                            both.conclusion()
                      : "Both runs are reproduced, and do not differ in what was done again.";
  }
  const std::string& wrong = first.first ? names.a : names.b;
  return wrong + " is not reproduced, and " + (first.first ? names.b : names.a) +
         (both.first ? " is; done again they still differ: " + both.conclusion()
                     : " is: done again both agree, so that a machine of " + wrong + " was wrong.") +
         " " + (first.first ? first : second).conclusion();
}

}  // namespace plumb

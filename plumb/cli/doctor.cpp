// plumb doctor: what plumb finds on this machine.
#include "plumb/training/doctor.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "plumb/cli/commands.h"

namespace plumb::cli {

void add_doctor(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("doctor",
                                     "Prints what plumb finds on this machine: CPU, torch, devices, kernels, "
                                     "processes. A report of a fault begins with it");
  auto json = std::make_shared<bool>(false);
  sub->add_flag("--json", *json, "Print as JSON");
  sub->footer("Example:\n  plumb doctor");
  sub->callback([json] {
    const std::vector<Finding> findings = doctor();
    if (!*json) {
      std::cout << "plumb " PLUMB_VERSION "\n" << to_text(findings);
      return;
    }
    nlohmann::json all = nlohmann::json::array();
    for (const Finding& f : findings) all.push_back({{"topic", f.topic}, {"found", f.found}, {"remedy", f.remedy}});
    std::cout << all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  });
}

}  // namespace plumb::cli

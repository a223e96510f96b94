#include "plumb/partition/wire.h"

#include <cmath>

#include "plumb/autograd/simulate_format.h"
#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/graph/summary.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/operators.h"

namespace plumb {
namespace {

const std::string& or_none(const std::string& format) {
  static const std::string none = "none";
  return wire_format(format) ? format : none;
}

bool has_code_of_negative_zero(const FPFormat& format) {
  return !std::isnan(decode_one(static_cast<uint8_t>(1 << (format.bits() - 1)), format));
}

}  // namespace

const FPFormat* wire_format(const std::string& text) {
  return text.empty() || text == "none" ? nullptr : &cached_format(text);
}

void check(const WireFormats& formats) {
  for (const std::string& text : {formats.fwd, formats.bwd}) {
    const FPFormat* format = wire_format(text);
    if (!format) continue;
    const char* remedy = "e4m3fn, e5m2 or another format of at most 8 bits, rounded to nearest; none: as it is";
    if (format->has_blocks() || format->bits() > 8)
      throw Error(ErrorKind::InvalidArgument, "the wire format " + text + " has no codes of one byte", "", remedy);
    if (format->rounding == Rounding::Stochastic)
      throw Error(ErrorKind::InvalidArgument,
                  "the wire format " + text + " rounds by chance: several processes would draw otherwise than one", "",
                  remedy);
  }
}

bool has_wire_codes(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

at::Tensor over_the_wire(const at::Tensor& value, const WireFormats& formats) {
  if (!value.defined() || !has_wire_codes(value.scalar_type())) return value;
  const at::Tensor rounded = ops::simulate_format(value, or_none(formats.fwd), or_none(formats.bwd));
  const FPFormat* fwd = wire_format(formats.fwd);
  return fwd && !has_code_of_negative_zero(*fwd) ? rounded + 0 : rounded;
}

Report wire_report(const PipeTable& table) {
  std::vector<ReportEntry> entries;
  int64_t plain = 0, sent = 0;
  for (int s = 0; s < table.num_stages(); ++s) {
    for (const StageOutputPort& port : table.stages[s].outputs) {
      if (port.consumers.empty()) continue;
      ReportEntry entry;
      entry.node = port.name;
      entry.from = port.meta ? type_text(*port.meta) : "";
      const std::string ways =
          str("from stage ", s, " to ", join(port.consumers, [](const PortUse& use) { return str(use.stage); }));
      // As many gradients come back as values go.
      const auto messages = static_cast<int64_t>(port.consumers.size());
      const int64_t numel = port.meta ? port.meta->numel() : 0;
      const int64_t bytes = port.meta ? numel * static_cast<int64_t>(c10::elementSize(port.meta->dtype)) : 0;
      const bool coded = table.wire && port.as_it_is.empty();
      const bool differentiable = coded || port.as_it_is.starts_with("excluded");
      auto on_wire = [&](const std::string& format) { return coded && wire_format(format) ? numel : bytes; };
      const int64_t there = on_wire(table.wire.fwd), back = differentiable ? on_wire(table.wire.bwd) : 0;
      plain += messages * bytes * (differentiable ? 2 : 1);
      sent += messages * (there + back);
      entry.kind = coded ? ReportKind::Quantised : ReportKind::LeftAlone;
      if (coded) entry.to = or_none(table.wire.fwd) + " forward, " + or_none(table.wire.bwd) + " backward";
      entry.reason = ways + (coded ? str(": ", there, " and ", back, " of ", bytes, " bytes")
                                   : str(": ", bytes, " bytes", port.as_it_is.empty() ? "" : "; " + port.as_it_is));
      entries.push_back(std::move(entry));
    }
  }
  Report report(str("wire (", sent, " of ", plain, " bytes a microbatch)"));
  for (auto& entry : entries) report.add(std::move(entry));
  return report;
}

}  // namespace plumb

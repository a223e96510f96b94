#include "plumb/exported/parameter_tags.h"

#include "plumb/core/error.h"
#include "plumb/graph/parameter_tag.h"

namespace plumb::pt2 {

Json tags_of(const State& state) {
  Json tags = Json::object();
  for (const Attr& attr : state) {
    const auto data = parameter_data(attr.tensor);
    if (!data) continue;
    tags[attr.name]["type"] = to_string(data->type);
    if (data->scaling_depth) tags[attr.name]["depth"] = *data->scaling_depth;
  }
  return tags;
}

void give_tags(const JsonDoc& tags, const State& state) {
  for (auto it = tags.object(tags.root()).begin(); it != tags.root().end(); ++it) {
    const Attr* attr = state.find(it.key());
    if (!attr || !attr->tensor.defined()) tags.fail(*it, "'" + it.key() + "' is no parameter of the program");
    try {
      ParameterData data{mup_type_from(tags.string(tags.at(*it, "type"))), std::nullopt};
      if (const Json* depth = tags.find(*it, "depth")) data.scaling_depth = tags.integer(*depth);
      tag(attr->tensor, data);
    } catch (const Error& e) {
      if (e.kind() == ErrorKind::BadFile) throw;
      tags.fail(*it, e.message());
    }
  }
}

}  // namespace plumb::pt2

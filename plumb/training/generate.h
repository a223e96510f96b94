// Text that a trained token model writes.
#pragma once

#include <functional>
#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

struct GenerateOptions {
  int64_t tokens = 200;
  double temperature = 1;  // logits are divided by it; 0: always the likeliest token
  int64_t top_k = 0;       // only the likeliest k are drawn from; 0: all
  int64_t seed = 0;
};

// Continues `prompt` (tokens; empty: token 0) by options.tokens tokens and returns these. The model: i64[batch, length]
// to logits [batch, length, classes], causal. It is run whole for every token, on the last `length` tokens, in the
// first row; token 0 fills the rest. `drawn` is called with each token. The same seed draws the same text. Throws
// UsageError for a model of another kind, a token it does not know, and numbers out of range.
std::vector<int64_t> generate(GraphModule& module, std::vector<int64_t> prompt, const GenerateOptions& options,
                              const std::function<void(int64_t token)>& drawn = {});

}  // namespace plumb

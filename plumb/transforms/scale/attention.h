// Tells attention from other softmaxes.
#pragma once

#include "plumb/graph/graph.h"

namespace plumb {

// A softmax is attention unless it is a router's: of logits that were chosen, or one whose results are chosen from or
// taken one by one.
bool is_attention(const Node* node);

// Returns whether a value is read by softmaxes alone, at once or behind masks, factors, casts and views: so many steps
// at most.
bool are_logits(const Value* value, int steps = 6);

}  // namespace plumb

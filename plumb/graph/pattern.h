// Patterns: small graphs that match pieces of larger ones. Shared by passes and tests.
//
//   Pattern p(R"(graph {
//     %x = placeholder "x"
//     %half: float = placeholder "half"
//     %s = aten::sigmoid(%x)
//     %y = aten::mul.Tensor(%x, %s)
//     output(%y)
//   })");
//   if (auto m = p.match(node)) ... m->at("x")
//
// A placeholder stands for anything, the same thing at every use: a tensor placeholder for a tensor value or a wrapped
// number, one of type `other` for a constant of any kind, one of another type for a number. Constants must be equal,
// numbers in value (2 and 2.0).
// These are not distinguished: the order of the arguments of mul and of add without alpha; mul.Tensor with a number and
// mul.Scalar (and the like); a value and its cast to its own type.
// The pattern's one output names the node where matching starts.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

struct Match {
  Node* root = nullptr;
  std::vector<Node*> nodes;                    // all that the pattern's nodes stand for, the root too, in graph order
  std::vector<Node*> casts;                    // dtype casts through which two values of a placeholder have one source
  std::unordered_map<std::string, Arg> bound;  // by the placeholder's name
  // Throws an Error if the pattern has no such placeholder.
  const Arg& at(std::string_view name) const;
};

// `to` and the like from a floating type to a floating type on the same device. False if the types are not known.
bool is_float_cast(const Node* node);
// Returns whether the cast changes nothing.
bool is_cast_to_same(const Node* node);

class Pattern {
 public:
  // Throws an Error if the text is no graph with one output that a node makes.
  explicit Pattern(std::string_view text);

  // The operator of the root without its overload: nodes of other operators need not be tried.
  std::string_view root_op() const { return root_->op_name(); }

  // Returns a match if the nodes that lead to `root` have the pattern's form. Does not check other uses or writes of
  // them. through_casts: casts between floating types may stand anywhere in between.
  std::optional<Match> match(Node* root, bool through_casts = false) const;

 private:
  Graph graph_;
  const Node* root_ = nullptr;
};

// Returns whether nothing but the match itself can see its inner values: no other use, all in one grad mode, no write
// into their memory or that of the match's inputs between its first and last node (the root itself may write an inner
// value). Looks at no more than `reach` nodes between the first and the last; a wider match is refused.
bool is_private(const Match& match, size_t reach = 256);

}  // namespace plumb

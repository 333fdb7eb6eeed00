// Stop strings in text that arrives in pieces: an Aho-Corasick automaton over the bytes of UTF-8.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace memserve {

// All stop strings of a request. Immutable; the finders of all its sequences share it.
//
// A node is a prefix of at least one stop string; node 0 is the empty one. Nodes are numbered level by level, so the
// children of a node lie next to each other, in the order of their bytes: [first_child, first_child + children).
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);

  size_t size() const { return nodes_.size(); }
  // The node after `byte`: the longest suffix of the text so far that is a prefix of a stop string. `steps` counts the
  // edges tried.
  uint32_t next(uint32_t node, uint8_t byte, uint64_t& steps) const;
  // Length in bytes of the suffix that a node stands for.
  uint32_t depth(uint32_t node) const { return nodes_[node].depth; }
  // Bytes of the longest stop string that ends there; 0: none ends there.
  uint32_t match(uint32_t node) const { return nodes_[node].match; }

 private:
  struct Node {
    uint32_t first_child = 0, children = 0;
    uint32_t fail = 0;  // the longest proper suffix of this node that is a node too
    uint32_t depth = 0, match = 0;
  };

  void grow(const std::vector<std::string>& sorted);
  void link();
  uint32_t child(uint32_t node, uint8_t byte) const;

  std::vector<Node> nodes_;
  std::vector<uint8_t> labels_;  // the byte that leads to a node
};

// Finds stop strings in the text of one sequence. Work per piece: O(its bytes), whatever the stop strings are.
class StopFinder {
 public:
  // `stops` must outlive the finder.
  explicit StopFinder(const StopStrings& stops) : stops_(stops) {}

  // The text that may be shown now; after a match the text before it, then nothing.
  std::string push(std::string_view text);
  // The held text, at the end of the sequence: nothing can complete a stop string now. Later text starts afresh.
  std::string finish();
  bool found() const { return found_; }
  uint64_t steps() const { return steps_; }

 private:
  std::string show(size_t held_bytes);

  const StopStrings& stops_;
  // The text pushed and not shown: text_[shown_:]. The shown part is erased once it is the larger one, so that each
  // byte is moved a bounded number of times.
  std::string text_;
  size_t shown_ = 0;
  uint32_t node_ = 0;
  bool found_ = false;
  uint64_t steps_ = 0;
};

}  // namespace memserve

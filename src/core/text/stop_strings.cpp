#include "text/stop_strings.h"

#include <algorithm>
#include <utility>

namespace memserve {

StopStrings::StopStrings(std::vector<std::string> stops) {
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  grow(stops);
  link();
}

// The stop strings that begin with a node are a range of the sorted ones. If the node is itself one, it comes first.
void StopStrings::grow(const std::vector<std::string>& sorted) {
  std::vector<std::pair<size_t, size_t>> ranges{{0, sorted.size()}};  // by node
  nodes_.emplace_back();
  labels_.push_back(0);
  for (size_t at = 0; at < nodes_.size(); ++at) {
    auto [first, last] = ranges[at];
    const uint32_t depth = nodes_[at].depth;
    nodes_[at].first_child = static_cast<uint32_t>(nodes_.size());
    if (first < last && sorted[first].size() == depth) {
      nodes_[at].match = depth;
      ++first;
    }
    while (first < last) {
      const char byte = sorted[first][depth];
      const auto differs = [&](const std::string& stop) { return stop[depth] != byte; };
      const size_t end = std::find_if(sorted.begin() + first, sorted.begin() + last, differs) - sorted.begin();
      nodes_.push_back({0, 0, 0, depth + 1, 0});
      labels_.push_back(static_cast<uint8_t>(byte));
      ranges.emplace_back(first, end);
      ++nodes_[at].children;
      first = end;
    }
  }
}

// Level by level: a node's fallback is shorter, so it is already linked.
void StopStrings::link() {
  uint64_t steps = 0;
  for (uint32_t at = 0; at < nodes_.size(); ++at) {
    const Node node = nodes_[at];
    for (uint32_t child = node.first_child; child < node.first_child + node.children; ++child) {
      if (at != 0) nodes_[child].fail = next(node.fail, labels_[child], steps);
      if (nodes_[child].match == 0) nodes_[child].match = nodes_[nodes_[child].fail].match;
    }
  }
}

uint32_t StopStrings::child(uint32_t node, uint8_t byte) const {
  const Node& parent = nodes_[node];
  const auto first = labels_.begin() + parent.first_child, last = first + parent.children;
  const auto found = std::lower_bound(first, last, byte);
  return found != last && *found == byte ? static_cast<uint32_t>(found - labels_.begin()) : 0;
}

uint32_t StopStrings::next(uint32_t node, uint8_t byte, uint64_t& steps) const {
  for (;; node = nodes_[node].fail) {
    ++steps;
    if (const uint32_t found = child(node, byte); found != 0 || node == 0) return found;
  }
}

std::string StopFinder::push(std::string_view text) {
  if (found_) return {};
  for (size_t at = 0; at < text.size(); ++at) {
    node_ = stops_.next(node_, static_cast<uint8_t>(text[at]), steps_);
    if (const uint32_t match = stops_.match(node_); match != 0) {
      text_.append(text.substr(0, at + 1));
      std::string before = show(match);
      found_ = true;
      text_ = {};
      return before;
    }
  }
  text_.append(text);
  return show(stops_.depth(node_));
}

std::string StopFinder::finish() {
  node_ = 0;
  return show(0);
}

std::string StopFinder::show(size_t held_bytes) {
  if (found_) return {};
  const size_t end = text_.size() - held_bytes;
  std::string shown = text_.substr(shown_, end - shown_);
  shown_ = end;
  if (shown_ > text_.size() / 2) {
    text_.erase(0, shown_);
    shown_ = 0;
  }
  return shown;
}

}  // namespace memserve

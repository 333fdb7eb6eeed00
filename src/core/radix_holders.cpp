// The global tree: nodes name the instances that hold them. A holder of a node holds every node above it.
#include <algorithm>

#include "radix_index.h"

namespace memserve {

namespace {

bool add_to(std::vector<uint32_t>& holders, uint32_t holder) {
  const auto at = std::ranges::lower_bound(holders, holder);
  if (at != holders.end() && *at == holder) return false;
  holders.insert(at, holder);
  return true;
}

bool remove_from(Node* node, uint32_t holder) {
  if (!node->holders) return false;
  const auto at = std::ranges::lower_bound(*node->holders, holder);
  if (at == node->holders->end() || *at != holder) return false;
  node->holders->erase(at);
  return true;
}

}  // namespace

void RadixIndex::hold(const NamespaceId& name, std::span<const int32_t> tokens, uint32_t holder) {
  const std::vector<int32_t> no_blocks(tokens.size() / block_tokens_, -1);
  if (no_blocks.empty()) return;
  const uint32_t pin = insert(name, tokens, no_blocks, no_blocks.size(), true).pin;
  for (Node* node = pinned_node(pin); node->parent; node = node->parent) {
    if (!node->holders) node->holders = std::make_unique<std::vector<uint32_t>>();
    if (!add_to(*node->holders, holder)) break;  // then the nodes above know the holder already
  }
  unpin(pin);
}

// Takes `holder` off `node` and all below; nodes that nobody holds any more go.
void RadixIndex::drop_from_holder(Node* node, uint32_t holder) {
  std::vector<Node*> order{node};
  for (size_t i = 0; i < order.size(); ++i) {
    if (!remove_from(order[i], holder)) {
      order[i] = nullptr;  // does not hold this one, so nothing below it either
      continue;
    }
    for (Node* child = order[i]->first_child; child; child = child->next_sibling) order.push_back(child);
  }
  Eviction gone;
  for (size_t i = order.size(); i-- > 0;) {
    Node* dead = order[i];
    if (dead && dead->holders->empty() && !dead->first_child && dead->locks == 0) drop_tail_hbm(dead, dead->hbm, gone);
  }
}

// `holder` keeps only the first `keep_blocks` blocks of `tokens` and nothing that extends them.
void RadixIndex::unhold(const NamespaceId& name, std::span<const int32_t> tokens, size_t keep_blocks,
                        uint32_t holder) {
  const size_t blocks = std::min(tokens.size() / block_tokens_, keep_blocks + 1);
  Position end = walk(name, tokens.first(blocks * block_tokens_));
  if (end.depth <= keep_blocks) return;
  Node* node = end.node;
  const auto kept_here = static_cast<uint32_t>(end.in_node - 1);  // `end` is one block behind the cut
  if (kept_here > 0) split(node, kept_here);
  drop_from_holder(node, holder);
}

void RadixIndex::remove_holder(uint32_t holder) {
  std::vector<Node*> tops;  // children of roots that the holder has; all its other nodes lie below them
  for (size_t i = 0; i < nodes_.size(); ++i) {
    Node& node = nodes_[i];
    if (node.id == 0 || !node.parent || !node.parent->root_of || !node.holders) continue;
    if (std::ranges::binary_search(*node.holders, holder)) tops.push_back(&node);
  }
  for (Node* node : tops) drop_from_holder(node, holder);
}

// (holder, cached blocks) for each holder of a prefix of `tokens`, by holder id.
std::vector<std::pair<uint32_t, size_t>> RadixIndex::match_holders(const NamespaceId& name,
                                                                   std::span<const int32_t> tokens) const {
  std::vector<std::pair<uint32_t, size_t>> found;
  const Position end = walk(name, tokens);
  size_t depth = end.depth;
  uint32_t upto = end.in_node;
  for (const Node* node = end.node; node && node->parent; node = node->parent, upto = node->size) {
    if (node->holders && upto > 0) {
      const size_t known = found.size();  // sorted: what deeper nodes gave
      for (const uint32_t holder : *node->holders) {
        const auto last = found.begin() + static_cast<ptrdiff_t>(known);
        if (!std::binary_search(found.begin(), last, std::pair{holder, size_t{0}},
                                [](const auto& a, const auto& b) { return a.first < b.first; })) {
          found.emplace_back(holder, depth);
        }
      }
      std::ranges::inplace_merge(found, found.begin() + static_cast<ptrdiff_t>(known));
    }
    depth -= upto;
  }
  return found;
}

}  // namespace memserve

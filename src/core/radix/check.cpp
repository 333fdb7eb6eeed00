// Verifies every invariant of index.h, the slow way.
#include <algorithm>
#include <unordered_map>

#include "errors.h"
#include "radix/index.h"

namespace memserve {

void RadixIndex::check_node(const Node& node, size_t (&in)[kTiers], size_t (&locked)[kTiers]) const {
  check((node.parent == nullptr) == (node.root_of != nullptr), "a node has neither parent nor namespace, or both");
  check(node.root_of ? node.size == 0 : node.size > 0, "only roots have an empty edge");
  check(node.hbm <= node.size, "a node's sizes are out of order");
  check(!node.root_of || node.first_child, "a root without children was kept");
  uint64_t locks = node.pins, holds[kTiers] = {node.ends[kHbm], node.ends[kDram]};
  for (const Node* child = node.first_child; child; child = child->next_sibling) {
    check(child->parent == &node && child->owner == node.owner, "a child has another parent, or owner");
    check(!child->next_sibling || child->next_sibling->prev_sibling == child, "siblings are linked wrongly");
    check(node.hbm == node.size || child->hbm == 0, "an HBM block below a DRAM block");
    check(find_child(&node, child->tokens()) == child, "a child is not found by its first block");
    locks += child->locks;
    for (int tier = 0; tier < kTiers; ++tier) holds[tier] += child->holds[tier];
  }
  check(locks == node.locks, "a node's locks are not the pins below it");
  for (int tier = 0; tier < kTiers; ++tier) {
    const uint32_t count = node.in_tier(tier);
    const bool is_free = node.locks == 0 && node.holds[tier] == 0;
    check(holds[tier] == node.holds[tier], "a node is not held as often as nodes below it");
    check(node.listed[tier] == (is_free && count > 0), "a node is listed wrongly");
    in[tier] += count;
    if (node.locks > 0) locked[tier] += count;
    if (!allocator_[tier]) continue;
    for (uint32_t i = 0; i < count; ++i) {
      const int32_t block = node.blocks()[(tier == kHbm ? 0 : node.hbm) + i];
      check(allocator_[tier]->ref_count(block) > 0, "the index names a free block");
      check(allocator_[tier]->is_idle(block) == (node.locks == 0), "a block's idle mark does not match its node");
    }
  }
}

void RadixIndex::check_list(const Owner& owner, int tier) const {
  std::unordered_map<const Node*, size_t> rank;  // 0 = newest
  const Node* newer = nullptr;
  for (const Node* node = owner.lists[tier].newest; node; newer = node, node = node->older[tier]) {
    check(node->owner == &owner, "a node is in the list of another owner");
    check(node->listed[tier] && node->newer[tier] == newer, "an LRU list is linked wrongly");
    check(rank.emplace(node, rank.size()).second, "an LRU list has a cycle");
    check(!newer || node->used[tier] <= newer->used[tier], "a node stands before one that was used later");
  }
  check(owner.lists[tier].oldest == newer, "an LRU list ends elsewhere");
  size_t listed = 0, held = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (node.id == 0 || node.owner != &owner) continue;
    listed += node.listed[tier];
    held += node.in_tier(tier);
  }
  check(listed == rank.size(), "a listed node is not in its list");
  check(held == owner.held[tier], "the block count of an owner is wrong");
  for (const auto& [node, at] : rank) {
    const auto parent = rank.find(node->parent);
    check(parent == rank.end() || parent->second < at, "a parent is older than its child");
  }
}

void RadixIndex::check_owners() const {
  size_t roots = 0;
  for (const auto& owner : owners_) {
    const auto known = owner_of_.find(owner.name);
    check(known != owner_of_.end() && known->second == &owner, "an owner is not known by its name");
    check(owner.roots > 0 && owner.used_at <= entered_ && &*owner.self == &owner, "an owner's books are wrong");
    roots += owner.roots;
    for (int tier = 0; tier < kTiers; ++tier) check_list(owner, tier);
  }
  check(roots == roots_.size() && owners_.size() == owner_of_.size(), "the number of roots or owners is wrong");
}

void RadixIndex::check_invariants() const {
  size_t in[kTiers] = {}, locked[kTiers] = {}, used = 0, edges = 0;
  std::vector<std::pair<Rows, uint32_t>> edges_rows;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (node.id == 0) continue;
    ++used;
    if (node.parent) edges_rows.emplace_back(node.rows, node.size);
    edges += node.parent != nullptr;
    check_node(node, in, locked);
  }
  for (int tier = 0; tier < kTiers; ++tier) {
    check(in[tier] == blocks_in_[tier], "the block count of a tier is wrong");
    check(locked[tier] == blocks_locked_[tier], "the locked block count of a tier is wrong");
  }
  check(used == nodes_in_use_ && edges == edges_, "the node or edge count is wrong");
  for (const auto& [name, root] : roots_) check(root->root_of && *root->root_of == name, "a root has another name");
  check_owners();
  rows_.check_invariants(edges_rows);
}

size_t RadixIndex::bytes() const {
  return nodes_.bytes() + buckets_.bytes() + rows_.bytes();
}

}  // namespace memserve

// What leaves the index: eviction by tier, deletion, clearing.
#include <algorithm>
#include <limits>

#include "errors.h"
#include "radix_index.h"

namespace memserve {

// Drops the index's reference on blocks of a tier; returns how many became free (all, without an allocator).
size_t RadixIndex::release_one(int tier, const int32_t* blocks, size_t count) {
  blocks_in_[tier] -= count;
  if (!allocator_[tier]) return count;
  allocator_[tier]->unmark_idle({blocks, count});
  return allocator_[tier]->release({blocks, count});
}

// The last `count` DRAM blocks of an unlocked node without children in DRAM.
size_t RadixIndex::drop_tail_dram(Node* node, uint32_t count, Eviction& out) {
  const int32_t* first = node->blocks() + node->size - count;
  for (uint32_t i = 0; i < count; ++i) out.changes.push_back({Eviction::kDroppedDram, first[i], 0});
  const size_t freed = release_one(kDram, first, count);
  shrink(node, node->size - count);
  if (node->in_tier(kDram) == 0) unlist(kDram, node);
  if (node->size == 0) remove_childless(node);
  return freed;
}

// Frees `count` DRAM blocks, oldest leaves first, block-exact; as `evict_hbm`, with nowhere to go.
size_t RadixIndex::evict_dram(size_t count, Eviction& out) {
  size_t freed = 0;
  while (freed < count && lists_[kDram].oldest) {
    Node* node = lists_[kDram].oldest;
    freed += drop_tail_dram(node, static_cast<uint32_t>(std::min<size_t>(count - freed, node->in_tier(kDram))), out);
  }
  return freed;
}

// Makes sure that DRAM has room for up to `count` blocks, dropping its oldest; returns for how many it has.
uint32_t RadixIndex::reserve_dram(uint32_t count, Eviction& out) {
  BlockAllocator* dram = allocator_[kDram];
  if (!dram) return 0;
  const auto free = static_cast<uint32_t>(dram->blocks_free());
  if (free < count) evict_dram(count - free, out);
  return std::min(count, static_cast<uint32_t>(dram->blocks_free()));
}

// The last `count` HBM blocks of a node with nothing behind them leave the index.
void RadixIndex::drop_tail_hbm(Node* node, uint32_t count, Eviction& out) {
  check(node->hbm == node->size && (count < node->size || !node->first_child), "HBM blocks with DRAM blocks below");
  const int32_t* first = node->blocks() + node->hbm - count;
  for (uint32_t i = 0; i < count; ++i) out.changes.push_back({Eviction::kDroppedHbm, first[i], 0});
  out.freed += release_one(kHbm, first, count);
  node->hbm -= count;
  shrink(node, node->size - count);
  if (node->hbm == 0) unlist(kHbm, node);
  if (node->size == 0) remove_childless(node);
}

// The last `count` HBM blocks of a node become its first DRAM blocks. DRAM must have room.
void RadixIndex::demote_tail(Node* node, uint32_t count, Eviction& out) {
  int32_t* first = node->blocks() + node->hbm - count;
  std::vector<int32_t> below(count);
  check(allocator_[kDram]->allocate(count, below.data()), "DRAM has no room for a demotion");
  for (uint32_t i = 0; i < count; ++i) out.changes.push_back({Eviction::kMoved, first[i], below[i]});
  out.freed += release_one(kHbm, first, count);
  std::ranges::copy(below, first);
  allocator_[kDram]->mark_idle({first, count});
  blocks_in_[kDram] += count;
  node->hbm -= count;
  if (node->hbm == 0) unlist(kHbm, node);
  unlist(kDram, node);
  list_before(kDram, node, nullptr);
}

// Frees `count` HBM blocks, oldest leaves first, block-exact. Contents move to DRAM where there is room (whose oldest
// are dropped for it); where there is none they are dropped. A block that somebody else references too leaves the
// index without becoming free. Returns the blocks freed: fewer than `count` only when nothing unpinned is left.
size_t RadixIndex::evict_hbm(size_t count, Eviction& out) {
  const size_t before = out.freed;
  while (out.freed - before < count && lists_[kHbm].oldest) {
    Node* node = lists_[kHbm].oldest;
    if (node->listed[kDram] && lists_[kDram].newest != node) {
      node = split(node, node->hbm);  // what goes down now must not make older DRAM blocks of the same edge new again
    }
    const auto wanted = static_cast<uint32_t>(std::min<size_t>(count - (out.freed - before), node->hbm));
    const uint32_t room = reserve_dram(wanted, out);
    if (room < wanted) {
      drop_unlocked_below(node, out);
      if (node->in_tier(kDram) > 0) drop_tail_dram(node, node->in_tier(kDram), out);
      drop_tail_hbm(node, wanted - room, out);  // the deeper ones: what stays must be a prefix
    } else {
      demote_tail(node, wanted, out);
    }
  }
  return out.freed - before;
}

// Removes, deepest first, every unlocked node below `node`.
void RadixIndex::drop_unlocked_below(Node* node, Eviction& out) {
  std::vector<Node*> order{node};
  for (size_t i = 0; i < order.size(); ++i) {
    for (Node* child = order[i]->first_child; child; child = child->next_sibling) {
      order.push_back(child);
    }
  }
  for (size_t i = order.size(); i-- > 1;) {
    Node* dead = order[i];
    if (dead->locks > 0) continue;
    if (dead->in_tier(kDram) > 0) {
      const uint32_t in_dram = dead->in_tier(kDram);
      const bool gone = dead->hbm == 0;
      drop_tail_dram(dead, in_dram, out);
      if (gone) continue;
    }
    drop_tail_hbm(dead, dead->hbm, out);
  }
}

// Removes what only `tokens` (whole blocks) leads to: every unpinned entry that extends `tokens`, then the blocks of
// `tokens` itself from its end upwards, as far as they are unpinned and lead nowhere else. Nothing, when `tokens` is
// not cached in full.
void RadixIndex::erase(const NamespaceId& name, std::span<const int32_t> tokens, Eviction& out) {
  Position end = walk(name, tokens);
  if (end.depth == 0 || end.depth < tokens.size() / block_tokens_) return;
  drop_unlocked_below(end.node, out);
  Node* node = end.node;
  while (node->parent && !node->first_child && node->locks == 0) {
    Node* parent = node->parent;
    const bool last = parent->root_of && parent->first_child == node && !node->next_sibling;
    const bool gone = node->hbm == 0;
    if (node->in_tier(kDram) > 0) drop_tail_dram(node, node->in_tier(kDram), out);
    if (!gone) drop_tail_hbm(node, node->hbm, out);
    if (last) return;  // the root went with its last child
    node = parent;
  }
}

// Drops everything that is not pinned, without demoting.
void RadixIndex::clear(Eviction& out) {
  evict_dram(std::numeric_limits<size_t>::max(), out);
  while (Node* node = lists_[kHbm].oldest) drop_tail_hbm(node, node->hbm, out);
}

}  // namespace memserve

// What leaves the index: eviction by tier, deletion, clearing.
#include <algorithm>

#include "errors.h"
#include "radix/index.h"

namespace memserve {

namespace {

constexpr uint64_t kDoublingsMax = 31;

}  // namespace

// The weight of an owner's blocks of a tier: they count double for each turnover since the owner used the index.
uint64_t RadixIndex::burden(const Owner& owner, int tier, size_t beside) const {
  const uint64_t turnover = allocator_[tier] ? static_cast<uint64_t>(allocator_[tier]->num_blocks()) : 0;
  const uint64_t turnovers = turnover ? (entered_ - owner.used_at) / turnover : 0;
  return uint64_t{owner.held[tier] + beside} << std::min(turnovers, kDoublingsMax);
}

uint64_t RadixIndex::burden_of(const NamespaceId& owner, int tier, size_t beside) const {
  const auto known = owner_of_.find(owner);
  return known == owner_of_.end() ? 0 : burden(*known->second, tier, beside);
}

// The heaviest owner with something to evict, ties go to the one whose last use is longest ago.
RadixIndex::Victim RadixIndex::next_victim(int tier) const {
  Victim found{nullptr, 0};
  uint64_t most = 0, limit = 0;  // the owner stays the heaviest down to `limit`
  for (const auto& owner : owners_) {
    if (!owner.lists[tier].oldest) continue;
    const uint64_t here = burden(owner, tier);
    if (here > most) {
      limit = most;  // a tie goes to the one before
      most = here;
      found.owner = const_cast<Owner*>(&owner);
    } else {
      limit = std::max(limit, here - 1);
    }
  }
  if (found.owner) found.blocks = found.owner->held[tier] - limit / (most / found.owner->held[tier]);
  return found;
}

size_t RadixIndex::evictable_blocks(int tier, size_t at_most) const {
  size_t blocks = 0;
  for (const auto& owner : owners_) {
    for (const Node* node = owner.lists[tier].oldest; node && blocks < at_most; node = node->newer[tier]) {
      blocks += node->in_tier(tier);
    }
  }
  return std::min(blocks, at_most);
}

// Drops the index's reference on blocks of a tier; returns how many became free (all, without an allocator).
size_t RadixIndex::release_one(Owner* owner, int tier, const int32_t* blocks, size_t count) {
  this->count(owner, tier, -static_cast<ptrdiff_t>(count));
  if (!allocator_[tier]) return count;
  allocator_[tier]->unmark_idle({blocks, count});
  return allocator_[tier]->release({blocks, count});
}

// The last `count` DRAM blocks of an unlocked node without children in DRAM.
size_t RadixIndex::drop_tail_dram(Node* node, uint32_t count, Eviction& out) {
  const int32_t* first = node->blocks() + node->size - count;
  for (uint32_t i = 0; i < count; ++i) out.changes.push_back({Eviction::kDroppedDram, first[i], 0});
  const size_t freed = release_one(node->owner, kDram, first, count);
  end_all_holds(node, out);
  shrink(node, node->size - count);
  if (node->in_tier(kDram) == 0) unlist(kDram, node);
  if (node->size == 0) remove_childless(node);
  return freed;
}

// Frees `count` DRAM blocks, the heaviest owner's oldest leaves first, block-exact; as `evict_hbm`, but without a lower
// tier.
size_t RadixIndex::evict_dram(size_t count, Eviction& out) {
  size_t freed = 0;
  while (freed < count) {
    const Victim victim = next_victim(kDram);
    if (!victim.owner) break;
    Node* node = victim.owner->lists[kDram].oldest;
    const size_t here = std::min<size_t>(victim.blocks, node->in_tier(kDram));
    freed += drop_tail_dram(node, static_cast<uint32_t>(std::min(count - freed, here)), out);
  }
  return freed;
}

// Makes room for up to `count` blocks in DRAM by dropping the oldest; returns for how many there is room.
uint32_t RadixIndex::reserve_dram(uint32_t count, Eviction& out) {
  BlockAllocator* dram = allocator_[kDram];
  if (!dram) return 0;
  const auto free = static_cast<uint32_t>(dram->blocks_free());
  if (free < count) evict_dram(count - free, out);
  return std::min(count, static_cast<uint32_t>(dram->blocks_free()));
}

// Drops the last `count` HBM blocks of a node with nothing behind them.
void RadixIndex::drop_tail_hbm(Node* node, uint32_t count, Eviction& out) {
  check(node->hbm == node->size && (count < node->size || !node->first_child), "HBM blocks with DRAM blocks below");
  const int32_t* first = node->blocks() + node->hbm - count;
  for (uint32_t i = 0; i < count; ++i) out.changes.push_back({Eviction::kDroppedHbm, first[i], 0});
  out.freed += release_one(node->owner, kHbm, first, count);
  end_all_holds(node, out);
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
  out.freed += release_one(node->owner, kHbm, first, count);
  std::ranges::copy(below, first);
  allocator_[kDram]->mark_idle({first, count});
  this->count(node->owner, kDram, count);
  node->hbm -= count;
  if (node->hbm == 0) unlist(kHbm, node);
  touch_in(kDram, node);
}

// Frees `count` HBM blocks, the heaviest owner's oldest leaves first, block-exact. Contents move to DRAM if there is
// room (made by the same rule), else they are dropped; before that, holds in DRAM on what goes on behind them end. A
// block with further references leaves the index without becoming free. Returns the number of blocks freed: fewer than
// `count` only if nothing is left that is neither pinned nor held, or blocks that are held in DRAM find no room there.
size_t RadixIndex::evict_hbm(size_t count, Eviction& out) {
  const size_t before = out.freed;
  while (out.freed - before < count) {
    const Victim victim = next_victim(kHbm);
    if (!victim.owner) break;
    Node* node = victim.owner->lists[kHbm].oldest;
    const bool is_newest = node->listed[kDram] ? victim.owner->lists[kDram].newest == node : node->used[kDram] == touched_;
    if (node->in_tier(kDram) > 0 && !is_newest) {
      node = split(node, node->hbm);  // demoted blocks must not make older DRAM blocks of this edge new again
    }
    const size_t here = std::min<size_t>(victim.blocks, node->hbm);
    auto wanted = static_cast<uint32_t>(std::min(count - (out.freed - before), here));
    // Demoted blocks make their owner heavier in DRAM, which may change the next choice.
    if (owners_.size() > 1 && blocks_in_[kDram] > 0 &&
        allocator_[kDram]->blocks_free() < static_cast<int32_t>(wanted)) {
      wanted = 1;
    }
    const bool is_dropped = demotes_held_only_ && node->holds[kDram] == 0;
    const uint32_t room = is_dropped ? 0 : reserve_dram(wanted, out);
    if (demotes_held_only_ && !is_dropped) {
      if (room == 0) break;  // a hold in DRAM must end first
      demote_tail(node, room, out);
    } else if (room < wanted && node->holds[kDram] > 0) {
      end_holds_below(node, out);  // then what they held in DRAM makes room there
    } else if (room < wanted) {
      drop_unlocked_below(node, out);
      if (node->in_tier(kDram) > 0) drop_tail_dram(node, node->in_tier(kDram), out);
      drop_tail_hbm(node, wanted - room, out);  // the deeper ones: what stays must be a prefix
    } else {
      demote_tail(node, wanted, out);
    }
  }
  return out.freed - before;
}

void RadixIndex::demote(const NamespaceId& name, std::span<const int32_t> tokens, Eviction& out) {
  const std::vector<Node*> path = sole_path(name, tokens, true);
  uint32_t wanted = 0;
  for (const Node* const node : path) wanted += node->hbm;
  if (wanted == 0) return;
  lock_path(path.front());  // the path must not make room for itself
  uint32_t room = reserve_dram(wanted, out);
  unlock_path(path.front());
  for (Node* const node : path) {
    const uint32_t count = std::min(room, node->hbm);
    if (count > 0) demote_tail(node, count, out);
    room -= count;
    if (node->hbm > 0) return;
  }
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
// `tokens` itself from its end upwards, as far as they are unpinned and lead nowhere else. Removes nothing if `tokens`
// is not cached in full.
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

// Drops everything that is not pinned, held or not, without demoting.
void RadixIndex::clear(Eviction& out) {
  std::vector<Node*> roots;
  for (const auto& [name, root] : roots_) roots.push_back(root);
  for (Node* const root : roots) drop_unlocked_below(root, out);
}

}  // namespace memserve

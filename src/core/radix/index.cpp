// The index's operations: walk, pin, insert, promote.
#include "radix/index.h"

#include <algorithm>

#include "errors.h"

namespace memserve {

// The blocks of the path that ends at `end`, in order: those in HBM, then those in DRAM.
void RadixIndex::path_blocks(const Position& end, std::vector<int32_t>& hbm, std::vector<int32_t>& dram) const {
  hbm.resize(end.depth);
  size_t at = end.depth, in_dram = 0;
  uint32_t upto = end.in_node;
  for (const Node* node = end.node; node && node->parent; node = node->parent, upto = node->size) {
    at -= upto;
    std::copy_n(node->blocks(), upto, hbm.begin() + static_cast<ptrdiff_t>(at));
    in_dram += upto - std::min(upto, node->hbm);
  }
  const auto first_dram = hbm.end() - static_cast<ptrdiff_t>(in_dram);
  dram.assign(first_dram, hbm.end());
  hbm.erase(first_dram, hbm.end());
}

// The node with the edge that ends exactly where the walk did; null at a root.
Node* RadixIndex::node_ending_at(const Position& end) {
  if (!end.node || end.depth == 0) return nullptr;
  return end.in_node < end.node->size ? split(end.node, end.in_node) : end.node;
}

uint32_t RadixIndex::pin_at(Node* node) {
  if (!node) return 0;
  lock_path(node);
  ++node->pins;
  return node->id;
}

uint32_t RadixIndex::pin(const NamespaceId& name, std::span<const int32_t> tokens, Position& end) {
  end = walk(name, tokens);
  Node* node = node_ending_at(end);
  if (node) end = {node, node->size, end.depth};
  return pin_at(node);
}

Node* RadixIndex::pinned_node(uint32_t pin) const {
  if (pin == 0 || pin > nodes_.size() || nodes_[pin - 1].id == 0 || nodes_[pin - 1].pins == 0) {
    throw InvariantViolation("pin " + std::to_string(pin) + " is not held (unpinned twice?)");
  }
  return const_cast<Node*>(&nodes_[pin - 1]);
}

void RadixIndex::unpin(uint32_t pin) {
  if (pin == 0) return;
  Node* node = pinned_node(pin);
  --node->pins;
  unlock_path(node);
}

uint32_t RadixIndex::hold(const NamespaceId& name, std::span<const int32_t> tokens) {
  const Position end = walk(name, tokens);
  if (end.depth == 0 || end.depth < tokens.size() / block_tokens_) return 0;
  Node* const last = node_ending_at(end);
  for (int tier = 0; tier < kTiers; ++tier) {
    ++last->ends[tier];
    for (Node* node = last; node; node = node->parent) {
      if (node->holds[tier]++ == 0) unlist(tier, node);
    }
  }
  return last->id;
}

bool RadixIndex::is_held(uint32_t hold, int tier) const {
  return hold != 0 && hold <= nodes_.size() && nodes_[hold - 1].id != 0 && nodes_[hold - 1].ends[tier] > 0;
}

void RadixIndex::unhold(uint32_t hold, int tier) {
  if (!is_held(hold, tier)) throw InvariantViolation("hold " + std::to_string(hold) + " is over");
  end_holds(&nodes_[hold - 1], tier, 1);
}

// What only `tokens` leads to, with the one path that may go on behind them, the deepest node first, as far as it is
// neither locked nor held. A held node's parents are held, and a locked one's locked.
std::vector<Node*> RadixIndex::sole_path(const NamespaceId& name, std::span<const int32_t> tokens, bool held_in_dram) {
  std::vector<Node*> path;
  const Position end = walk(name, tokens);
  if (end.depth == 0 || end.depth < tokens.size() / block_tokens_) return path;
  Node* leaf = end.node;
  while (leaf->first_child && !leaf->first_child->next_sibling) leaf = leaf->first_child;
  for (Node* node = leaf; node->parent; node = node->parent) {
    if (node->locks + node->holds[kHbm] + (held_in_dram ? 0 : node->holds[kDram]) > 0) break;
    const Node* const child = path.empty() ? nullptr : path.back();
    if (node->first_child != child || (child && child->next_sibling)) break;
    path.push_back(node);
  }
  return path;
}

size_t RadixIndex::make_oldest(const NamespaceId& name, std::span<const int32_t> tokens) {
  const std::vector<Node*> path = sole_path(name, tokens, false);
  size_t blocks = 0;
  for (const Node* const node : path) blocks += node->size;
  for (auto step = path.rbegin(); step != path.rend(); ++step) {
    Node* const node = *step;
    --aged_;
    for (const int tier : {kHbm, kDram}) {
      unlist(tier, node);
      node->used[tier] = aged_;
      if (node->in_tier(tier) > 0) list_between(tier, node, node->owner->lists[tier].oldest, nullptr);
    }
  }
  return blocks;
}

// Takes over the caller's HBM blocks where the node has the same tokens in DRAM. The node must be locked.
void RadixIndex::adopt(Node* node, uint32_t upto, const int32_t* blocks, Insertion& out) {
  if (upto <= node->hbm) return;
  int32_t* const first = node->blocks() + node->hbm;
  const uint32_t count = upto - node->hbm;
  out.adopted_dram.insert(out.adopted_dram.end(), first, first + count);
  if (allocator_[kDram]) allocator_[kDram]->release({first, count});
  std::copy_n(blocks + node->hbm, count, first);
  if (allocator_[kHbm]) allocator_[kHbm]->retain({first, count});
  node->hbm = upto;
  out.added += count;
  for (const int tier : {kHbm, kDram}) {
    const ptrdiff_t change = tier == kHbm ? ptrdiff_t{count} : -ptrdiff_t{count};
    this->count(node->owner, tier, change);
    blocks_locked_[tier] += change;
  }
}

// A new leaf, not yet locked or listed, with a reference on each of its blocks.
Node* RadixIndex::append(Node* parent, std::span<const int32_t> tokens, std::span<const int32_t> blocks,
                         size_t hbm_blocks) {
  Node* leaf = new_node();
  const auto size = static_cast<uint32_t>(blocks.size());
  store(leaf, blocks.data(), tokens.data(), size);
  leaf->hbm = static_cast<uint32_t>(hbm_blocks);
  leaf->owner = parent->owner;
  entered_ += size;
  for (const int tier : {kHbm, kDram}) {
    count(leaf->owner, tier, leaf->in_tier(tier));
    blocks_locked_[tier] += leaf->in_tier(tier);  // until `unlock_path` says otherwise
  }
  if (allocator_[kHbm]) allocator_[kHbm]->retain(blocks.first(hbm_blocks));
  if (allocator_[kDram]) allocator_[kDram]->retain(blocks.subspan(hbm_blocks));
  attach(parent, leaf);
  return leaf;
}

Insertion RadixIndex::insert(const NamespaceId& name, std::span<const int32_t> tokens,
                             std::span<const int32_t> blocks, size_t hbm_blocks, bool keep_pin,
                             const NamespaceId& owner) {
  Insertion out;
  const size_t wanted = std::min(tokens.size() / block_tokens_, blocks.size());
  hbm_blocks = std::min(hbm_blocks, wanted);
  if (wanted == 0) return out;
  for (const int tier : {kHbm, kDram}) {  // refuse bad ids before anything changes
    if (!allocator_[tier]) continue;
    const auto ids = tier == kHbm ? blocks.first(hbm_blocks) : blocks.subspan(hbm_blocks, wanted - hbm_blocks);
    for (const int32_t block : ids) allocator_[tier]->require_held(block, "insert");
  }
  root(name, owner);
  const Position end = walk(name, tokens.first(wanted * block_tokens_));
  Node* node = end.node;
  if (end.in_node < node->size && (end.depth < wanted || keep_pin)) node = split(node, end.in_node);
  lock_path(node);
  size_t below = end.depth;
  for (Node* step = node; step->parent; step = step->parent) {
    const auto upto = static_cast<uint32_t>(std::min<size_t>(step == end.node ? end.in_node : step->size, below));
    const size_t above = below - upto;
    adopt(step, static_cast<uint32_t>(std::clamp<size_t>(hbm_blocks, above, below) - above), &blocks[above], out);
    below = above;
  }
  if (end.depth < wanted) {
    const size_t hbm_new = hbm_blocks > end.depth ? hbm_blocks - end.depth : 0;
    Node* leaf = append(node, tokens.subspan(end.depth * block_tokens_),
                        blocks.subspan(end.depth, wanted - end.depth), hbm_new);
    out.added += leaf->size;
    leaf->locks = 1;  // joins the lock that this call holds on its parent's path
    node = leaf;
  }
  if (keep_pin) {
    ++node->pins;
    out.pin = node->id;
  } else {
    unlock_path(node);
  }
  return out;
}

// Moves the first DRAM blocks of a pinned path to the given HBM blocks; their one reference becomes the index's. If
// there are fewer than the path's DRAM blocks, the pin moves up to the last block that now lies in HBM.
Promotion RadixIndex::promote(uint32_t pin, std::span<const int32_t> hbm_blocks) {
  Node* const node = pinned_node(pin);
  std::vector<Node*> path;
  for (Node* step = node; step->parent; step = step->parent) path.push_back(step);
  Promotion out{pin, {}};
  size_t taken = 0;
  for (auto step = path.rbegin(); step != path.rend() && taken < hbm_blocks.size(); ++step) {
    const auto count = static_cast<uint32_t>(std::min<size_t>((*step)->size - (*step)->hbm, hbm_blocks.size() - taken));
    int32_t* const first = (*step)->blocks() + (*step)->hbm;
    out.left_dram.insert(out.left_dram.end(), first, first + count);
    std::copy_n(hbm_blocks.data() + taken, count, first);
    (*step)->hbm += count;
    taken += count;
  }
  check(taken == hbm_blocks.size(), "more blocks to promote than the path has in DRAM");
  for (const int tier : {kHbm, kDram}) {
    const ptrdiff_t change = tier == kHbm ? static_cast<ptrdiff_t>(taken) : -static_cast<ptrdiff_t>(taken);
    count(node->owner, tier, change);
    blocks_locked_[tier] += change;
  }
  if (allocator_[kDram]) allocator_[kDram]->release(out.left_dram);
  Node* last = nullptr;  // the deepest node of the path with a block in HBM
  for (Node* step : path) {
    if (step->hbm > 0) { last = step; break; }
  }
  if (last == node && node->hbm == node->size) return out;
  if (last && last->hbm < last->size) last = split(last, last->hbm);
  out.pin = pin_at(last);
  unpin(pin);
  return out;
}

}  // namespace memserve

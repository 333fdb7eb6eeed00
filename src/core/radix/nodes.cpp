// The tree's mechanics: nodes and their storage, children, LRU lists, locks.
#include <algorithm>
#include <bit>
#include <cstring>

#include "errors.h"
#include "radix/index.h"

namespace memserve {

namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kSalt1 = 0xa0761d6478bd642full;
constexpr uint64_t kSalt2 = 0xe7037ed1a0b428dbull;
constexpr size_t kBucketsPerEdge = 2;  // a wrong child in a bucket costs a cache miss, one more bucket eight bytes

}  // namespace

RadixIndex::RadixIndex(uint32_t block_tokens, BlockAllocator* hbm, BlockAllocator* dram, uint64_t hash_seed)
    : block_tokens_(block_tokens), allocator_{hbm, dram}, hash_seed_(hash_seed), rows_(block_tokens) {
  buckets_.append();
}

uint64_t RadixIndex::edge_hash(const Node* parent, const int32_t* block) const {
  uint64_t hash = hash_seed_ ^ mix(parent->id ^ kSalt2, kSalt1);
  uint32_t i = 0;
  for (; i + 4 <= block_tokens_; i += 4) {
    uint64_t words[2];
    std::memcpy(words, block + i, sizeof words);
    hash = mix(words[0] ^ kSalt1, words[1] ^ hash);
  }
  for (; i < block_tokens_; ++i) hash = mix(static_cast<uint32_t>(block[i]) ^ kSalt1, hash ^ kSalt2);
  return hash ^ hash >> 32;
}

Node* RadixIndex::new_node() {
  if (free_ids_.empty()) {
    nodes_.append();
    free_ids_.push_back(static_cast<uint32_t>(nodes_.size()));
  }
  const uint32_t id = free_ids_.back();
  free_ids_.pop_back();
  Node* node = &nodes_[id - 1];
  node->id = id;
  ++nodes_in_use_;
  return node;
}

void RadixIndex::free_node(Node* node) {
  const uint32_t id = node->id;
  *node = Node{};
  free_ids_.push_back(id);
  --nodes_in_use_;
}

Node* RadixIndex::root(const NamespaceId& name, const NamespaceId& owner) {
  const auto [slot, is_new] = roots_.try_emplace(name, nullptr);
  if (!is_new) return slot->second;
  Node* const root = slot->second = new_node();
  root->root_of = &slot->first;
  Owner*& known = owner_of_[owner];
  if (!known) {
    known = &owners_.emplace_back(owner);
    known->used_at = entered_;
    known->self = std::prev(owners_.end());
  }
  root->owner = known;
  ++known->roots;
  return root;
}

// A root without children; its owner is removed with its last root.
void RadixIndex::remove_root(Node* root) {
  Owner* const owner = root->owner;
  roots_.erase(NamespaceId(*root->root_of));
  free_node(root);
  if (--owner->roots > 0) return;
  owner_of_.erase(owner->name);
  owners_.erase(owner->self);
}

// `blocks` of a tier enter (or, below zero, leave) the index.
void RadixIndex::count(Owner* owner, int tier, ptrdiff_t blocks) {
  blocks_in_[tier] += blocks;
  owner->held[tier] += blocks;
}

// Linear hashing: with n buckets, 2^k <= n < 2^(k+1), each bucket from 2^k on was split from the one 2^k below it.
size_t RadixIndex::bucket_of(uint64_t hash) const {
  const size_t half = std::bit_floor(buckets_.size());
  const size_t bucket = hash & (2 * half - 1);
  return bucket < buckets_.size() ? bucket : bucket - half;
}

// Adds one bucket and moves its few children into it, so that growing never stops the world.
void RadixIndex::add_bucket() {
  const size_t added = buckets_.size();
  buckets_.append();
  Bucket& old = buckets_[added - std::bit_floor(added)];
  Node* node = old.head;
  for (old.set(nullptr); node;) {
    Node* const next = node->next_in_bucket;
    link_bucket(node);
    node = next;
  }
}

void RadixIndex::link_bucket(Node* child) {
  Bucket& bucket = buckets_[bucket_of(child->edge_hash)];
  child->next_in_bucket = bucket.head;
  bucket.set(child);
}

void RadixIndex::unlink_bucket(Node* child) {
  Bucket& bucket = buckets_[bucket_of(child->edge_hash)];
  if (bucket.head == child) return bucket.set(child->next_in_bucket);
  Node* before = bucket.head;
  while (before->next_in_bucket != child) before = before->next_in_bucket;
  before->next_in_bucket = child->next_in_bucket;
}

// The child's storage must be filled: its hash is that of its first block.
void RadixIndex::attach(Node* parent, Node* child) {
  for (++edges_; buckets_.size() < kBucketsPerEdge * edges_;) add_bucket();
  child->parent = parent;
  child->edge_hash = edge_hash(parent, child->tokens());
  link_bucket(child);
  child->prev_sibling = nullptr;
  child->next_sibling = parent->first_child;
  if (parent->first_child) parent->first_child->prev_sibling = child;
  parent->first_child = child;
}

void RadixIndex::detach(Node* child) {
  --edges_;
  unlink_bucket(child);
  (child->prev_sibling ? child->prev_sibling->next_sibling : child->parent->first_child) = child->next_sibling;
  if (child->next_sibling) child->next_sibling->prev_sibling = child->prev_sibling;
}

void RadixIndex::store(Node* node, const int32_t* blocks, const int32_t* tokens, uint32_t size) {
  node->rows = rows_.allocate(size);
  node->size = size;
  std::memcpy(node->rows.ids, blocks, size * sizeof(int32_t));
  std::memcpy(node->rows.tokens, tokens, size_t{size} * block_tokens_ * sizeof(int32_t));
}

// Cuts the edge down to `size` blocks.
void RadixIndex::shrink(Node* node, uint32_t size) {
  rows_.release(rows_.skip(node->rows, size), node->size - size);
  node->size = size;
}

// Cuts an edge in two, without moving it: a new upper node takes the first `at` blocks, `node` keeps the rest, its
// children and its pins.
Node* RadixIndex::split(Node* node, uint32_t at) {
  Node* upper = new_node();
  Node* parent = node->parent;
  detach(node);
  upper->rows = node->rows;
  upper->size = at;
  upper->hbm = std::min(node->hbm, at);
  upper->locks = node->locks;
  std::copy_n(node->holds, size_t{kTiers}, upper->holds);
  std::copy_n(node->used, size_t{kTiers}, upper->used);
  upper->owner = node->owner;
  node->hbm -= upper->hbm;
  node->rows = rows_.skip(node->rows, at);
  node->size -= at;
  attach(parent, upper);
  attach(upper, node);
  for (int tier = 0; tier < kTiers; ++tier) {
    if (!node->listed[tier]) continue;
    if (upper->in_tier(tier) > 0) list_before(tier, upper, node);
    if (node->in_tier(tier) == 0) unlist(tier, node);
  }
  return upper;
}

// Removes a node without children, pins and holds from the tree, and its root if that was the last child.
void RadixIndex::remove_childless(Node* node) {
  Node* parent = node->parent;
  for (int tier = 0; tier < kTiers; ++tier) unlist(tier, node);
  detach(node);
  free_node(node);
  if (parent->root_of && !parent->first_child) remove_root(parent);
}

// Inserts `node` between two neighbours of its owner's list; null is the list's end.
void RadixIndex::list_between(int tier, Node* node, Node* newer, Node* older) {
  List& list = node->owner->lists[tier];
  node->newer[tier] = newer;
  node->older[tier] = older;
  (newer ? newer->older[tier] : list.newest) = node;
  (older ? older->newer[tier] : list.oldest) = node;
  node->listed[tier] = true;
}

// Inserts `node` on the newer side of `older`; at the newest end if `older` is null.
void RadixIndex::list_before(int tier, Node* node, Node* older) {
  if (!older) older = node->owner->lists[tier].newest;
  list_between(tier, node, older ? older->newer[tier] : nullptr, older);
}

// Inserts `node` where its last use puts it, looked for from both ends: what was held for a time stands near one of them.
void RadixIndex::list_by_use(int tier, Node* node) {
  const List& list = node->owner->lists[tier];
  Node* older = list.newest;
  Node* newer = list.oldest;
  for (; older && older->used[tier] > node->used[tier]; older = older->older[tier], newer = newer->newer[tier]) {
    if (newer->used[tier] > node->used[tier]) return list_between(tier, node, newer, newer->older[tier]);
  }
  list_between(tier, node, older ? older->newer[tier] : list.oldest, older);
}

void RadixIndex::unlist(int tier, Node* node) {
  if (!node->listed[tier]) return;
  List& list = node->owner->lists[tier];
  (node->newer[tier] ? node->newer[tier]->older[tier] : list.newest) = node->older[tier];
  (node->older[tier] ? node->older[tier]->newer[tier] : list.oldest) = node->newer[tier];
  node->listed[tier] = false;
}

// Lists an unlocked node that is not held on a tier as the newest of it, if it has blocks there.
void RadixIndex::touch_in(int tier, Node* node) {
  unlist(tier, node);
  node->used[tier] = ++touched_;
  if (node->holds[tier] == 0 && node->in_tier(tier) > 0) list_before(tier, node, nullptr);
}

void RadixIndex::touch(Node* node) {
  for (int tier = 0; tier < kTiers; ++tier) touch_in(tier, node);
}

void RadixIndex::set_idle(Node* node, bool idle) {
  for (int tier = 0; tier < kTiers; ++tier) {
    const uint32_t count = node->in_tier(tier);
    blocks_locked_[tier] += idle ? -size_t{count} : size_t{count};
    if (!allocator_[tier] || count == 0) continue;
    const std::span<const int32_t> blocks(node->blocks() + (tier == kHbm ? 0 : node->hbm), count);
    if (idle) {
      allocator_[tier]->mark_idle(blocks);
    } else {
      allocator_[tier]->unmark_idle(blocks);
    }
  }
}

void RadixIndex::lock_path(Node* node) {
  for (; node; node = node->parent) {
    if (node->locks++ > 0) continue;
    for (int tier = 0; tier < kTiers; ++tier) unlist(tier, node);
    set_idle(node, false);
  }
}

// Deepest first: a parent is listed after, and so newer than, its child. The path's owner has used the index.
void RadixIndex::unlock_path(Node* node) {
  Owner* const owner = node->owner;
  owner->used_at = entered_;
  if (owner != &owners_.back()) owners_.splice(owners_.end(), owners_, owner->self);
  for (; node; node = node->parent) {
    if (--node->locks > 0) continue;
    set_idle(node, true);
    touch(node);
  }
}

// `count` of the holds on `tier` that end at `node` are over. As in `unlock_path`, a parent is listed after its child:
// it was used no earlier.
void RadixIndex::end_holds(Node* node, int tier, uint32_t count) {
  if (count == 0) return;
  node->ends[tier] -= count;
  for (; node; node = node->parent) {
    node->holds[tier] -= count;
    if (node->locks == 0 && node->holds[tier] == 0 && node->in_tier(tier) > 0) list_by_use(tier, node);
  }
}

// The end of the node's edge is to go, and with it all holds on a path to there.
void RadixIndex::end_all_holds(Node* node, Eviction& out) {
  if (node->ends[kHbm] + node->ends[kDram] == 0) return;
  out.ended_holds.push_back(node->id);
  for (int tier = 0; tier < kTiers; ++tier) end_holds(node, tier, node->ends[tier]);
}

// All holds that end in the node's subtree are over, deepest first.
void RadixIndex::end_holds_below(Node* node, Eviction& out) {
  std::vector<Node*> order{node};
  for (size_t i = 0; i < order.size(); ++i) {
    for (Node* child = order[i]->first_child; child; child = child->next_sibling) order.push_back(child);
  }
  for (auto step = order.rbegin(); step != order.rend(); ++step) end_all_holds(*step, out);
}

}  // namespace memserve

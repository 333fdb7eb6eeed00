// The tree's mechanics: nodes and their storage, children, LRU lists, locks.
#include <algorithm>
#include <cstring>

#include "errors.h"
#include "radix_index.h"

namespace memserve {

namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kSalt1 = 0xa0761d6478bd642full;
constexpr uint64_t kSalt2 = 0xe7037ed1a0b428dbull;
constexpr size_t kFirstBuckets = 1024;

}  // namespace

RadixIndex::RadixIndex(uint32_t block_tokens, BlockAllocator* hbm, BlockAllocator* dram, uint64_t hash_seed)
    : block_tokens_(block_tokens), allocator_{hbm, dram}, hash_seed_(hash_seed), buckets_(kFirstBuckets) {}

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

// How many of the first `blocks` blocks at `tokens` equal the node's edge.
uint32_t RadixIndex::equal_blocks(const Node* node, const int32_t* tokens, size_t blocks) const {
  const uint32_t common = static_cast<uint32_t>(std::min<size_t>(node->size, blocks));
  const size_t block_bytes = size_t{block_tokens_} * sizeof(int32_t);
  const auto* left = reinterpret_cast<const char*>(node->tokens());
  const auto* right = reinterpret_cast<const char*>(tokens);
  constexpr uint32_t kStride = 8;  // blocks compared at once; a stride that differs is looked at block by block
  // The edge is usually cold, and the hardware prefetcher stops at page ends: run ahead of the comparison.
  constexpr size_t kAheadBytes = 4096, kLineBytes = 64;
  const size_t edge_bytes = common * block_bytes;
  size_t fetched = 0;
  const auto fetch_to = [&](size_t end) {
    for (end = std::min(end, edge_bytes); fetched < end; fetched += kLineBytes) __builtin_prefetch(left + fetched);
  };
  uint32_t equal = 0;
  for (; equal + kStride <= common; equal += kStride) {
    fetch_to((equal + kStride) * block_bytes + kAheadBytes);
    if (std::memcmp(left + equal * block_bytes, right + equal * block_bytes, kStride * block_bytes) != 0) break;
  }
  while (equal < common && std::memcmp(left + equal * block_bytes, right + equal * block_bytes, block_bytes) == 0) {
    ++equal;
  }
  return equal;
}

Node* RadixIndex::new_node() {
  if (free_ids_.empty()) {
    nodes_.emplace_back();
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

Node* RadixIndex::root(const NamespaceId& name) {
  const auto [slot, is_new] = roots_.try_emplace(name, nullptr);
  if (is_new) {
    slot->second = new_node();
    slot->second->root_of = &slot->first;
  }
  return slot->second;
}

Node* RadixIndex::find_child(const Node* parent, const int32_t* block) const {
  const uint64_t hash = edge_hash(parent, block);
  const size_t block_bytes = size_t{block_tokens_} * sizeof(int32_t);
  for (Node* node = buckets_[hash & (buckets_.size() - 1)]; node; node = node->next_in_bucket) {
    if (node->edge_hash == hash && node->parent == parent && !std::memcmp(node->tokens(), block, block_bytes)) {
      return node;
    }
  }
  return nullptr;
}

void RadixIndex::link_bucket(Node* child) {
  Node*& bucket = buckets_[child->edge_hash & (buckets_.size() - 1)];
  child->next_in_bucket = bucket;
  bucket = child;
}

void RadixIndex::unlink_bucket(Node* child) {
  Node** link = &buckets_[child->edge_hash & (buckets_.size() - 1)];
  while (*link != child) link = &(*link)->next_in_bucket;
  *link = child->next_in_bucket;
}

void RadixIndex::grow_buckets() {
  std::vector<Node*> old = std::move(buckets_);
  buckets_.assign(old.size() * 2, nullptr);
  for (Node* node : old) {
    while (node) {
      Node* next = node->next_in_bucket;
      link_bucket(node);
      node = next;
    }
  }
}

// The child's storage must be filled: its first block decides where it is found.
void RadixIndex::attach(Node* parent, Node* child) {
  if (++edges_ > buckets_.size()) grow_buckets();
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

void RadixIndex::store(Node* node, uint32_t capacity, const int32_t* blocks, const int32_t* tokens, uint32_t size) {
  std::unique_ptr<int32_t[]> storage(new int32_t[size_t{capacity} * (1 + block_tokens_)]);
  std::memcpy(storage.get(), blocks, size * sizeof(int32_t));
  std::memcpy(storage.get() + capacity, tokens, size_t{size} * block_tokens_ * sizeof(int32_t));
  node->storage = std::move(storage);  // frees the old storage last: `blocks` and `tokens` may point into it
  node->capacity = capacity;
  node->size = size;
}

// Cuts the edge down to `size` blocks; memory goes back when half of it is unused.
void RadixIndex::shrink(Node* node, uint32_t size) {
  node->size = size;
  if (size > 0 && size <= node->capacity / 2) store(node, size, node->blocks(), node->tokens(), size);
}

// Cuts an edge in two: a new upper node takes the first `at` blocks, `node` keeps the rest, its children and its pins.
Node* RadixIndex::split(Node* node, uint32_t at) {
  Node* upper = new_node();
  Node* parent = node->parent;
  detach(node);
  store(upper, at, node->blocks(), node->tokens(), at);
  upper->hbm = std::min(node->hbm, at);
  upper->locks = node->locks;
  if (node->holders) upper->holders = std::make_unique<std::vector<uint32_t>>(*node->holders);
  const uint32_t rest = node->size - at;
  node->hbm -= upper->hbm;
  store(node, rest, node->blocks() + at, node->tokens() + size_t{at} * block_tokens_, rest);
  attach(parent, upper);
  attach(upper, node);
  for (int tier = 0; tier < kTiers; ++tier) {
    if (!node->listed[tier]) continue;
    if (upper->in_tier(tier) > 0) list_before(tier, upper, node);
    if (node->in_tier(tier) == 0) unlist(tier, node);
  }
  return upper;
}

// Takes a node without children and without pins out of the tree, and its root when that was the last.
void RadixIndex::remove_childless(Node* node) {
  Node* parent = node->parent;
  for (int tier = 0; tier < kTiers; ++tier) unlist(tier, node);
  detach(node);
  free_node(node);
  if (parent->root_of && !parent->first_child) {
    roots_.erase(NamespaceId(*parent->root_of));
    free_node(parent);
  }
}

// Puts `node` on the newer side of `older`; at the newest end when `older` is null.
void RadixIndex::list_before(int tier, Node* node, Node* older) {
  List& list = lists_[tier];
  if (!older) older = list.newest;
  Node* newer = older ? older->newer[tier] : nullptr;
  node->newer[tier] = newer;
  node->older[tier] = older;
  (newer ? newer->older[tier] : list.newest) = node;
  (older ? older->newer[tier] : list.oldest) = node;
  node->listed[tier] = true;
}

void RadixIndex::unlist(int tier, Node* node) {
  if (!node->listed[tier]) return;
  List& list = lists_[tier];
  (node->newer[tier] ? node->newer[tier]->older[tier] : list.newest) = node->older[tier];
  (node->older[tier] ? node->older[tier]->newer[tier] : list.oldest) = node->newer[tier];
  node->listed[tier] = false;
}

// Files an unlocked node as the newest of each tier that it has blocks in.
void RadixIndex::touch(Node* node) {
  for (int tier = 0; tier < kTiers; ++tier) {
    unlist(tier, node);
    if (node->in_tier(tier) > 0) list_before(tier, node, nullptr);
  }
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

// Deepest first: a parent is filed after, and so newer than, its child.
void RadixIndex::unlock_path(Node* node) {
  for (; node; node = node->parent) {
    if (--node->locks > 0) continue;
    set_idle(node, true);
    touch(node);
  }
}

}  // namespace memserve

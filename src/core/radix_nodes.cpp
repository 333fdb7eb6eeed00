// The tree's mechanics: nodes and their storage, children, LRU lists, locks.
#include <algorithm>
#include <bit>
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
constexpr size_t kBucketsPerEdge = 2;  // a wrong child in a bucket costs a cache miss, a bucket eight bytes
constexpr size_t kFetchFirstBytes = 1024, kFetchAheadBytes = 2048, kLineBytes = 64;

void fetch(const void* start, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(static_cast<const char*>(start) + at);
}

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

// How many of the first `blocks` blocks at `tokens` equal the node's edge.
uint32_t RadixIndex::equal_blocks(const Node* node, const int32_t* tokens, size_t blocks) const {
  const uint32_t common = static_cast<uint32_t>(std::min<size_t>(node->size, blocks));
  const size_t block_bytes = size_t{block_tokens_} * sizeof(int32_t);
  const auto* left = reinterpret_cast<const char*>(node->tokens());
  const auto* right = reinterpret_cast<const char*>(tokens);
  constexpr uint32_t kStride = 8;  // blocks compared at once; a stride that differs is looked at block by block
  // The edge is usually cold, and the hardware prefetcher stops at page ends: run ahead of the comparison.
  const size_t edge_bytes = common * block_bytes;
  size_t fetched = 0;
  const auto fetch_to = [&](size_t end) {
    for (end = std::min(end, edge_bytes); fetched < end; fetched += kLineBytes) __builtin_prefetch(left + fetched);
  };
  uint32_t equal = 0;
  for (; equal + kStride <= common; equal += kStride) {
    fetch_to((equal + kStride) * block_bytes + kFetchAheadBytes);
    if (std::memcmp(left + equal * block_bytes, right + equal * block_bytes, kStride * block_bytes) != 0) break;
  }
  while (equal < common && std::memcmp(left + equal * block_bytes, right + equal * block_bytes, block_bytes) == 0) {
    ++equal;
  }
  return equal;
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

Node* RadixIndex::root(const NamespaceId& name) {
  const auto [slot, is_new] = roots_.try_emplace(name, nullptr);
  if (is_new) {
    slot->second = new_node();
    slot->second->root_of = &slot->first;
  }
  return slot->second;
}

// The child that the hash of (parent, first block of an edge) points to. Its tokens are not compared yet, so it may be
// another one; they are on their way into the cache.
Node* RadixIndex::guess_child(const Node* parent, const int32_t* block) const {
  const uint64_t hash = edge_hash(parent, block);
  return guess_again(buckets_[bucket_of(hash)], parent, hash);
}

// The first such child from `from` on in its bucket.
Node* RadixIndex::guess_again(Node* from, const Node* parent, uint64_t hash) {
  while (from && (from->edge_hash != hash || from->parent != parent)) from = from->next_in_bucket;
  if (from) fetch(from->tokens(), kFetchFirstBytes);
  return from;
}

Node* RadixIndex::find_child(const Node* parent, const int32_t* block) const {
  Node* node = guess_child(parent, block);
  while (node && std::memcmp(node->tokens(), block, block_tokens_ * sizeof(int32_t)) != 0) {
    node = guess_again(node->next_in_bucket, parent, node->edge_hash);
  }
  return node;
}

// Linear hashing: with n buckets, 2^k <= n < 2^(k+1), those from 2^k on have split off the one 2^k below them.
size_t RadixIndex::bucket_of(uint64_t hash) const {
  const size_t half = std::bit_floor(buckets_.size());
  const size_t bucket = hash & (2 * half - 1);
  return bucket < buckets_.size() ? bucket : bucket - half;
}

// One bucket more, so that growing never stops the world: moves the few children whose bucket is the new one now.
void RadixIndex::add_bucket() {
  const size_t added = buckets_.size();
  Node*& head = buckets_.append();
  Node** link = &buckets_[added - std::bit_floor(added)];
  while (Node* const node = *link) {
    if (bucket_of(node->edge_hash) != added) {
      link = &node->next_in_bucket;
      continue;
    }
    *link = node->next_in_bucket;
    node->next_in_bucket = head;
    head = node;
  }
}

void RadixIndex::link_bucket(Node* child) {
  Node*& bucket = buckets_[bucket_of(child->edge_hash)];
  child->next_in_bucket = bucket;
  bucket = child;
}

void RadixIndex::unlink_bucket(Node* child) {
  Node** link = &buckets_[bucket_of(child->edge_hash)];
  while (*link != child) link = &(*link)->next_in_bucket;
  *link = child->next_in_bucket;
}

// The child's storage must be filled: its first block decides where it is found.
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
  if (node->holders) upper->holders = std::make_unique<std::vector<uint32_t>>(*node->holders);
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

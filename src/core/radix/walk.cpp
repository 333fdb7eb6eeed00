// The walk down the tree. In a large tree everything that it touches is cold, and every step depends on the one before:
// bucket, node, tokens. So the next edge is looked up while this edge is compared, one miss at a time.
#include <algorithm>
#include <cstring>

#include "radix/index.h"

namespace memserve {

namespace {

constexpr uint32_t kStride = 8;  // blocks compared at once; a stride that differs is compared block by block
constexpr size_t kChildrenMax = 64;  // a guess is not worth a long search
constexpr size_t kFetchFirstBytes = 1024, kFetchAheadBytes = 4096, kLineBytes = 64;

void fetch(const void* start, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(static_cast<const char*>(start) + at);
}

}  // namespace

// The look-up of the child of `parent` whose edge begins with `block`. Each `step` reads what the last one prefetched,
// and prefetches the next: the bucket, then its first node and that node's first tokens.
class RadixIndex::Lookahead {
 public:
  Lookahead(const RadixIndex& index, const Node* parent, const int32_t* block) : parent_(parent) {
    if (!block) return;
    hash_ = index.edge_hash(parent, block);
    bucket_ = &index.buckets_[index.bucket_of(hash_)];
    __builtin_prefetch(bucket_);
  }

  void step() {
    if (bucket_) {
      node_ = bucket_->head;
      if (node_) {
        __builtin_prefetch(node_);
        fetch(bucket_->tokens, kFetchFirstBytes);
      }
      bucket_ = nullptr;
    } else if (!found_) {
      found_ = true;
      node_ = guess_again(node_, parent_, hash_);
    }
  }

  // The child by its hash, or null. Its tokens are not compared yet, so it may be another one.
  Node* arrive() {
    while (!found_) step();
    return node_;
  }

 private:
  const Node* parent_;
  uint64_t hash_ = 0;
  const Bucket* bucket_ = nullptr;
  Node* node_ = nullptr;
  bool found_ = false;
};

// The first child with this hash in the bucket, from `from` on.
Node* RadixIndex::guess_again(Node* from, const Node* parent, uint64_t hash) {
  while (from && (from->edge_hash != hash || from->parent != parent)) from = from->next_in_bucket;
  return from;
}

// How many of the first `blocks` blocks at `tokens` equal the node's edge.
uint32_t RadixIndex::equal_blocks(const Node* node, const int32_t* tokens, size_t blocks, Lookahead& next) const {
  const uint32_t common = static_cast<uint32_t>(std::min<size_t>(node->size, blocks));
  const size_t block_bytes = size_t{block_tokens_} * sizeof(int32_t);
  const auto* left = reinterpret_cast<const char*>(node->tokens());
  const auto* right = reinterpret_cast<const char*>(tokens);
  // The hardware prefetcher stops at page ends: run ahead of the comparison.
  const size_t edge_bytes = common * block_bytes;
  size_t fetched = kFetchFirstBytes;
  const auto fetch_to = [&](size_t end) {
    for (end = std::min(end, edge_bytes); fetched < end; fetched += kLineBytes) __builtin_prefetch(left + fetched);
  };
  uint32_t equal = 0;
  for (; equal + kStride <= common; equal += kStride) {
    fetch_to((equal + kStride) * block_bytes + kFetchAheadBytes);
    if (std::memcmp(left + equal * block_bytes, right + equal * block_bytes, kStride * block_bytes) != 0) break;
    next.step();
  }
  while (equal < common && std::memcmp(left + equal * block_bytes, right + equal * block_bytes, block_bytes) == 0) {
    ++equal;
  }
  return equal;
}

Position RadixIndex::walk(const NamespaceId& name, std::span<const int32_t> tokens) const {
  const auto slot = roots_.find(name);
  if (slot == roots_.end()) return {nullptr, 0, 0};
  const size_t blocks = tokens.size() / block_tokens_;
  const auto from = [&](const Node* parent, size_t depth) {
    return Lookahead(*this, parent, depth < blocks ? tokens.data() + depth * block_tokens_ : nullptr);
  };
  Position at{slot->second, 0, 0};
  for (Node* child = from(at.node, 0).arrive(); child;) {
    Lookahead next = from(child, at.depth + child->size);
    const uint32_t equal = equal_blocks(child, tokens.data() + at.depth * block_tokens_, blocks - at.depth, next);
    if (equal == 0) {  // another edge with the same hash
      child = guess_again(child->next_in_bucket, at.node, child->edge_hash);
      continue;
    }
    at = {child, equal, at.depth + equal};
    if (equal < child->size) break;
    child = next.arrive();
  }
  return at;
}

std::span<const int32_t> RadixIndex::continuation(const NamespaceId& name, std::span<const int32_t> tokens,
                                                  size_t count) const {
  const Position at = walk(name, tokens);
  if (!at.node || at.depth != tokens.size() / block_tokens_) return {};
  const auto tail = tokens.subspan(at.depth * block_tokens_);
  const auto behind = [&](const Node* node, uint32_t from) -> std::span<const int32_t> {
    const std::span<const int32_t> rest(node->tokens() + size_t{from} * block_tokens_,
                                        size_t{node->size - from} * block_tokens_);
    if (rest.size() <= tail.size() || !std::equal(tail.begin(), tail.end(), rest.begin())) return {};
    return rest.subspan(tail.size(), std::min(count, rest.size() - tail.size()));
  };
  if (at.in_node < at.node->size) return behind(at.node, at.in_node);
  size_t looked_at = 0;
  for (const Node* child = at.node->first_child; child && looked_at < kChildrenMax; child = child->next_sibling) {
    if (const auto found = behind(child, 0); !found.empty()) return found;
    ++looked_at;
  }
  return {};
}

// The child whose edge begins with `block`, or null.
Node* RadixIndex::find_child(const Node* parent, const int32_t* block) const {
  Node* node = Lookahead(*this, parent, block).arrive();
  while (node && std::memcmp(node->tokens(), block, block_tokens_ * sizeof(int32_t)) != 0) {
    node = guess_again(node->next_in_bucket, parent, node->edge_hash);
  }
  return node;
}

}  // namespace memserve

// The table of entries: linear hashing, so that growing never stops the world.
#include "directory/directory.h"

#include <bit>

#include "errors.h"

namespace memserve {

namespace {

constexpr size_t kBucketsPerEntry = 2;  // a wrong entry in a bucket costs a cache miss, one more bucket four bytes
constexpr size_t kEntryAhead = 8, kBucketAhead = 16;

// Identities are hashes, but those of foreign senders need not be well distributed.
uint64_t mixed(Hash128 identity) { return identity.low + identity.high * 0x9e3779b97f4a7c15; }

bool same(Hash128 a, Hash128 b) { return a.low == b.low && a.high == b.high; }

}  // namespace

PrefixDirectory::PrefixDirectory() { buckets_.append(); }

// With n buckets, 2^k <= n < 2^(k+1), each bucket from 2^k on was split from the one 2^k below it.
size_t PrefixDirectory::bucket_of(Hash128 identity) const {
  const size_t half = std::bit_floor(buckets_.size());
  const size_t bucket = mixed(identity) & (2 * half - 1);
  return bucket < buckets_.size() ? bucket : bucket - half;
}

void PrefixDirectory::add_bucket() {
  const size_t added = buckets_.size();
  buckets_.append();
  uint32_t& old = buckets_[added - std::bit_floor(added)];
  for (uint32_t id = std::exchange(old, 0); id != 0;) {
    DirectoryEntry& moved = entry(id);
    const uint32_t next = moved.next;
    uint32_t& bucket = buckets_[bucket_of(moved.identity)];
    moved.next = std::exchange(bucket, id);
    id = next;
  }
}

uint32_t PrefixDirectory::lookup(Hash128 identity) const {
  uint32_t id = buckets_[bucket_of(identity)];
  while (id != 0 && !same(entry(id).identity, identity)) id = entry(id).next;
  return id;
}

uint32_t PrefixDirectory::find_or_add(Hash128 identity) {
  if (const uint32_t found = lookup(identity)) return found;
  if (free_ == 0) {
    check(entries_.size() < UINT32_MAX - 1, "directory: too many blocks");
    entries_.append();
    free_ = static_cast<uint32_t>(entries_.size());
  }
  const uint32_t id = free_;
  DirectoryEntry& fresh = entry(id);
  free_ = fresh.next;
  while (buckets_.size() < kBucketsPerEntry * (entries_in_use_ + 1)) add_bucket();
  ++entries_in_use_;
  fresh.identity = identity;
  fresh.next = std::exchange(buckets_[bucket_of(identity)], id);
  return id;
}

void PrefixDirectory::free_entry(uint32_t id) {
  DirectoryEntry& dead = entry(id);
  uint32_t* link = &buckets_[bucket_of(dead.identity)];
  while (*link != id) link = &entry(*link).next;
  *link = dead.next;
  dead.next = std::exchange(free_, id);
  --entries_in_use_;
}

// Called before block `i` of a run: memory latency exceeds the work on one block.
void PrefixDirectory::prefetch(const Identities& blocks, size_t i) const {
  if (i + kBucketAhead < blocks.count) __builtin_prefetch(&buckets_[bucket_of(blocks[i + kBucketAhead])]);
  if (i + kEntryAhead >= blocks.count) return;
  if (const uint32_t id = buckets_[bucket_of(blocks[i + kEntryAhead])]) __builtin_prefetch(&entry(id));
}

size_t PrefixDirectory::nbytes() const {
  size_t bytes = entries_.size() * sizeof(DirectoryEntry) + buckets_.size() * sizeof(uint32_t) + heap_bytes_;
  for (const Holder& holder : holders_) bytes += sizeof holder + holder.entries.nbytes();
  for (const auto& [number, promise] : promises_) {
    bytes += sizeof number + sizeof promise + promise.entries.capacity() * sizeof(uint32_t);
  }
  return bytes;
}

}  // namespace memserve

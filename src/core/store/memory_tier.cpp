#include "store/memory_tier.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "errors.h"

namespace memserve::store {

namespace {

bool equal(Hash128 a, Hash128 b) { return a.low == b.low && a.high == b.high; }

size_t default_entries(uint64_t arena_bytes, uint64_t block_bytes) {
  return std::max<size_t>(1024, 2 * (arena_bytes / block_bytes) + arena_bytes / (16 << 10));
}

}  // namespace

MemoryTier::MemoryTier(uint64_t arena_bytes, uint64_t block_bytes, const std::string& name, size_t entries,
                       const uint8_t* secret)
    : arena_bytes_(arena_bytes),
      block_bytes_(block_bytes),
      extents_(arena_bytes, block_bytes),
      entries_(entries ? entries : default_entries(arena_bytes, block_bytes)),
      places_(name.empty() ? 0 : SharedTable::buckets_for(entries_)) {
  if (secret) {
    std::memcpy(secret_, secret, sizeof secret_);
  } else if (getrandom(secret_, sizeof secret_, 0) != sizeof secret_) {
    throw std::system_error(errno, std::generic_category(), "no random bytes");
  }
  secret_[1] |= 1;
  if (name.empty()) return;
  const TierGeometry geometry{arena_bytes, block_bytes, extents_.unit_bytes(), SharedTable::buckets_for(entries_)};
  files_ = std::make_unique<TierFiles>(name, geometry);
  if (files_->adopted()) adopt();
}

std::optional<uint64_t> MemoryTier::allocate(uint64_t bytes) {
  const Need need{extents_.shape(bytes)};
  auto extent = extents_.take(need.shape);
  if (!extent && make_room(need)) extent = extents_.take(need.shape);
  if (!extent) {
    ++counters_.refused;
    return std::nullopt;
  }
  return records_[add(*extent)].extent.offset;
}

bool MemoryTier::allocate_blocks(size_t count, int32_t* out) {
  const Need need{{}, count};
  if (!fits(need) && !make_room(need)) {
    ++counters_.refused;
    return false;
  }
  for (size_t i = 0; i < count; ++i) {
    const Extent extent = *extents_.take_block();
    add(extent);
    out[i] = static_cast<int32_t>(extent.offset / block_bytes_);
  }
  return true;
}

void MemoryTier::retain_all(std::span<const uint64_t> offsets) {
  for (const uint64_t offset : offsets) held(offset, "retain");
  for (const uint64_t offset : offsets) {
    const uint32_t id = find_offset(offset);
    set_idle(id, false);
    ++records_[id].refs;
  }
}

void MemoryTier::release_all(std::span<const uint64_t> offsets) {
  for (size_t i = 0; i < offsets.size(); ++i) {
    const uint32_t id = find_offset(offsets[i]);
    if (id != kNone && !records_[id].limbo && records_[id].refs > records_[id].published) {
      --records_[id].refs;
      continue;
    }
    for (size_t k = 0; k < i; ++k) ++records_[find_offset(offsets[k])].refs;
    held(offsets[i], "release");
    throw InvariantViolation("cannot release the extent at " + std::to_string(offsets[i]) +
                             ": only the table refers to it (released twice?)");
  }
  std::vector<uint32_t> free;
  for (const uint64_t offset : offsets) {
    const uint32_t id = find_offset(offset);
    Record& record = records_[id];
    if (record.refs == 1 && record.published) set_idle(id, true);
    if (record.refs == 0 && !record.victim) {  // the same offset may come again
      record.victim = true;
      free.push_back(id);
    }
  }
  free_all(free);
}

uint32_t MemoryTier::ref_count(uint64_t offset) const {
  const uint32_t id = find_offset(offset);
  return id == kNone ? 0 : records_[id].refs;
}

bool MemoryTier::publish(Hash128 key, uint64_t offset, uint32_t length, uint32_t scope, uint64_t seal,
                         const std::string& name) {
  const uint32_t id = held(offset, "publish");
  Record& record = records_[id];
  // Clients may still read what was removed: its bytes stay.
  if (record.had_key) throw InvariantViolation("the extent at " + std::to_string(offset) + " has, or had, a key already");
  check(length + uint64_t{name.size()} <= extents_.bytes_of(record.extent), "a value and its name exceed their extent");
  if (has(key)) return false;
  if (by_key_.size() >= entries_) evict_one();
  record.key = key;
  record.length = length;
  record.scope = scope;
  record.seal = seal;
  record.name_bytes = static_cast<uint16_t>(name.size());
  record.published = record.had_key = record.verified = true;
  record.hit = record.on_disk = false;
  ++record.refs;
  enqueue(id);
  if (files_) {
    std::memcpy(files_->arena().data() + offset + length, name.data(), name.size());
  } else if (!name.empty()) {
    names_[id] = name;
  }
  by_key_.insert(hash_of(key), id);
  show(id);
  ++counters_.published;
  return true;
}

std::optional<Place> MemoryTier::find(Hash128 key, bool counts) {
  const uint32_t id = find_key(key);
  if (counts) ++(id == kNone ? counters_.misses : counters_.hits);
  if (id == kNone) return std::nullopt;
  Record& record = records_[id];
  set_idle(id, false);
  ++record.refs;
  if (counts) {
    record.hit = true;
    requeue(id);
  }
  return Place{record.extent.offset, record.length, record.scope, record.seal, record.verified, name_of(record)};
}

void MemoryTier::verify(Hash128 key) {
  const uint32_t id = find_key(key);
  if (id == kNone || records_[id].verified) return;
  records_[id].verified = true;
  show(id);
}

size_t MemoryTier::prefix(const Hash128* keys, size_t count) const {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < std::min(count, kAhead); ++i) by_key_.prefetch(hash_of(keys[i]));
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) by_key_.prefetch(hash_of(keys[i + kAhead]));
    if (!has(keys[i])) return i;
  }
  return count;
}

void MemoryTier::touch(std::span<const Hash128> keys, bool hit) {
  for (size_t i = keys.size(); i-- > 0;) {
    const uint32_t id = find_key(keys[i]);
    if (id == kNone) continue;
    records_[id].hit = records_[id].hit || hit;
    requeue(id);
  }
}

bool MemoryTier::remove(Hash128 key) {
  const uint32_t id = find_key(key);
  if (id == kNone) return false;
  std::vector<uint32_t> ids{id};
  unpublish(id);
  drop_table_references(ids);
  ++counters_.removed;
  return true;
}

void MemoryTier::purge() {
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < records_.size(); ++id) {
    if (!records_[id].published) continue;
    ids.push_back(id);
    unpublish(id);
    ++counters_.removed;
  }
  drop_table_references(ids);
}

const std::string& MemoryTier::open_client(uint64_t number) {
  clients_.open(number, files_->client_path(number), client_bytes_max());
  return clients_.path(number);
}

void MemoryTier::close_client(uint64_t number) {
  clients_.close(number);
  drain_limbo();
}

void MemoryTier::unlink() {
  clients_.close_all();
  if (files_) files_->unlink();
}

uint32_t MemoryTier::find_key(Hash128 key) const {
  return by_key_.find(hash_of(key), [&](uint32_t id) { return equal(records_[id].key, key); });
}

uint32_t MemoryTier::find_offset(uint64_t offset) const {
  return by_offset_.find(hash_of(offset), [&](uint32_t id) { return records_[id].extent.offset == offset; });
}

uint32_t MemoryTier::held(uint64_t offset, const char* verb) const {
  const uint32_t id = find_offset(offset);
  if (id != kNone && !records_[id].limbo) return id;
  throw InvariantViolation(std::string("cannot ") + verb + " the extent at " + std::to_string(offset) +
                           ": none that is held begins there (released twice, or never allocated)");
}

uint32_t MemoryTier::add(const Extent& extent) {
  uint32_t id;
  if (free_records_.empty()) {
    id = static_cast<uint32_t>(records_.size());
    records_.emplace_back();
  } else {
    id = free_records_.back();
    free_records_.pop_back();
  }
  Record& record = records_[id];
  record = Record{};
  record.used = true;
  record.extent = extent;
  record.refs = 1;
  by_offset_.insert(hash_of(extent.offset), id);
  return id;
}

// The extent is free from now on.
void MemoryTier::forget(uint32_t id) {
  Record& record = records_[id];
  names_.erase(id);
  by_offset_.erase(hash_of(record.extent.offset), id);
  extents_.give(record.extent);
  record = Record{};
  free_records_.push_back(id);
}

void MemoryTier::unpublish(uint32_t id) {
  Record& record = records_[id];
  set_idle(id, false);
  dequeue(id);
  by_key_.erase(hash_of(record.key), id);
  hide(id);
  record.published = false;
}

// Their keys are gone: the table's references go.
void MemoryTier::drop_table_references(std::vector<uint32_t>& ids) {
  std::erase_if(ids, [&](uint32_t id) { return --records_[id].refs > 0; });
  free_all(ids);
}

// Nothing refers to them. What clients still read is freed later.
void MemoryTier::free_all(const std::vector<uint32_t>& ids) {
  if (ids.empty()) return;
  const bool any_seen = std::any_of(ids.begin(), ids.end(), [&](uint32_t id) { return records_[id].seen; });
  if (any_seen) read_clients();
  for (const uint32_t id : ids) {
    Record& record = records_[id];
    record.victim = false;
    if (record.seen && pinned(record)) {
      record.limbo = true;
      limbo_.push_back(id);
    } else {
      forget(id);
    }
  }
}

void MemoryTier::enqueue(uint32_t id) {
  Record& record = records_[id];
  record.stamp = ++stamp_;
  record.before = last_;
  record.behind = kNone;
  (last_ == kNone ? first_ : records_[last_].behind) = id;
  last_ = id;
  ++queued_;
}

void MemoryTier::dequeue(uint32_t id) {
  Record& record = records_[id];
  (record.before == kNone ? first_ : records_[record.before].behind) = record.behind;
  (record.behind == kNone ? last_ : records_[record.behind].before) = record.before;
  --queued_;
}

void MemoryTier::set_idle(uint32_t id, bool idle) {
  Record& record = records_[id];
  if (record.idle == idle) return;
  record.idle = idle;
  const uint64_t bytes = extents_.bytes_of(record.extent);
  evictable_bytes_ += idle ? bytes : -bytes;
  evictable_blocks_ += idle ? is_block(record.extent) : -size_t{is_block(record.extent)};
}

std::string MemoryTier::name_of(const Record& record) const {
  if (record.name_bytes == 0) return {};
  if (files_) {
    const uint8_t* const at = files_->arena().data() + record.extent.offset + record.length;
    return std::string(reinterpret_cast<const char*>(at), record.name_bytes);
  }
  return names_.at(static_cast<uint32_t>(&record - records_.data()));
}

}  // namespace memserve::store

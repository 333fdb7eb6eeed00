// How a memory tier makes room. A victim takes its neighbours along where room has to be in one piece: those of its
// block, or of a run of the length that is wanted. A window of which one value is in use is left alone.
#include <algorithm>
#include <atomic>
#include <bit>

#include "errors.h"
#include "store/memory_tier.h"

namespace memserve::store {

namespace {

constexpr size_t kWindowsMax = 1024;  // that are looked at in vain before the answer is "no room"
constexpr size_t kPickyMax = 32;      // the same, as long as young neighbours are spared
constexpr int kRounds = 4;            // in which clients may take back what was about to go

}  // namespace

bool MemoryTier::fits(const Need& need) {
  return need.blocks ? need.blocks <= extents_.blocks_free() : extents_.has_room(need.shape);
}

bool MemoryTier::make_room(const Need& need) {
  if (need.blocks > extents_.blocks() || need.shape.units > extents_.units()) return false;
  if (!limbo_.empty()) drain_limbo();
  for (int round = 0; round < kRounds && !fits(need); ++round) {
    read_clients();
    std::vector<std::vector<uint32_t>> windows;
    if (!plan(need, windows)) return false;
    evict(windows);
  }
  return fits(need);
}

bool MemoryTier::plan(const Need& need, std::vector<std::vector<uint32_t>>& windows) {
  const uint64_t bytes = need.blocks ? need.blocks * block_bytes_ : extents_.bytes_of(need.shape);
  const uint64_t most = (extents_.units_free() + extents_.slabs()) * uint64_t{extents_.unit_bytes()} + evictable_bytes_;
  if (most < bytes) return false;
  size_t missing = need.blocks ? need.blocks - extents_.blocks_free() : 1;
  std::unordered_set<size_t> won;
  for (const bool picky : {true, false}) {
    if (missing > 0) plan_pass(need, picky, missing, windows, won);
  }
  if (missing == 0) return true;
  for (const auto& victims : windows) {
    for (const uint32_t victim : victims) records_[victim].victim = false;
  }
  return false;
}

// From the oldest on. `picky`: neighbours that are young, or were hit, are spared as long as there are others.
void MemoryTier::plan_pass(const Need& need, bool picky, size_t& missing, std::vector<std::vector<uint32_t>>& windows,
                           std::unordered_set<size_t>& won) {
  size_t in_vain = 0, steps = 2 * queued_;
  const uint64_t young = queued_ ? records_[first_].stamp + (stamp_ - records_[first_].stamp) / 2 : 0;
  for (uint32_t id = first_, next; id != kNone && steps > 0 && missing > 0; id = next, --steps) {
    Record& record = records_[id];
    next = record.behind;
    if (record.victim || !record.idle || pinned(record)) continue;
    if (record.hit) {
      requeue(id);
      record.hit = false;
      continue;
    }
    std::vector<uint32_t> victims;
    const bool goes = window(id, need, victims);
    const bool spared = picky && std::any_of(victims.begin(), victims.end(), [&](uint32_t victim) {
      return victim != id && (records_[victim].hit || records_[victim].stamp > young);
    });
    if (!goes || spared) {
      if (++in_vain >= (picky ? kPickyMax : kWindowsMax)) return;
      if (!picky) requeue(id);  // so that others come first the next time
      continue;
    }
    for (const uint32_t victim : victims) records_[victim].victim = true;
    missing -= std::min(missing, need.blocks ? blocks_won(victims, won) : 1);
    windows.push_back(std::move(victims));
  }
}

// How many blocks of these victims are free once all victims are gone; `won`: those that were counted before.
size_t MemoryTier::blocks_won(const std::vector<uint32_t>& victims, std::unordered_set<size_t>& won) const {
  const size_t all = extents_.units_per_block();
  size_t more = 0;
  for (const uint32_t id : victims) {
    const Extent& extent = records_[id].extent;
    const size_t first = extent.offset / extents_.unit_bytes(), end = first + std::max<size_t>(extent.units, 1);
    for (size_t block = first / all; block * all < end && block < extents_.blocks(); ++block) {
      std::vector<uint32_t> others;
      if (won.count(block) || !window_at(block * all, (block + 1) * all, others) || !others.empty()) continue;
      won.insert(block);
      ++more;
    }
  }
  return more;
}

// What has to go with this one. False: it can't be.
bool MemoryTier::window(uint32_t id, const Need& need, std::vector<uint32_t>& victims) const {
  const Record& record = records_[id];
  const size_t first = record.extent.offset / extents_.unit_bytes();
  const size_t end = first + std::max<size_t>(record.extent.units, 1), all = extents_.units_per_block();
  if (need.blocks) {
    for (size_t start = first / all * all; start < end && start + all <= extents_.blocks() * all; start += all) {
      victims.clear();
      if (window_at(start, start + all, victims)) return true;
    }
    return false;
  }
  const bool same_slab = record.extent.units == 0 && need.shape.units == 0 &&
                         record.extent.size_class == need.shape.size_class;
  const size_t units = std::max<size_t>(need.shape.units, 1);
  if (same_slab || record.extent.units >= units) {
    victims.push_back(id);
    return true;
  }
  // As far down as needed, and up for the rest.
  size_t low = first, high = end;
  for (Stretch next; low > 0 && high - low < units; low = next.first) {
    if (next = loose_at(low - 1, nullptr); next.empty()) break;
  }
  for (Stretch next; high < extents_.units() && high - low < units; high = next.end) {
    if (next = loose_at(high, nullptr); next.empty()) break;
  }
  return high - low >= units && window_at(low, high, victims);
}

// Appends what has to go so that units [first, end) are free. False: not all of it may.
bool MemoryTier::window_at(size_t first, size_t end, std::vector<uint32_t>& victims) const {
  for (size_t unit = first; unit < end;) {
    const Stretch next = loose_at(unit, &victims);
    if (next.empty()) return false;
    unit = next.end;
  }
  return true;
}

// What lies at a unit, if it is free or may go: then its values are appended to `victims`. Empty: it may not.
MemoryTier::Stretch MemoryTier::loose_at(size_t unit, std::vector<uint32_t>* victims) const {
  const auto taken = extents_.taken_at(unit);
  if (!taken) return {unit, unit + 1};
  size_t units = 1;
  const auto goes = [&](uint64_t offset) {
    const uint32_t id = find_offset(offset);
    const Record& record = records_[id];
    if (!record.idle || pinned(record)) return false;
    if (victims && !record.victim) victims->push_back(id);
    units = std::max<size_t>(record.extent.units, 1);
    return true;
  };
  const uint64_t offset = taken->first * uint64_t{extents_.unit_bytes()};
  if (!taken->slab) return goes(offset) ? Stretch{taken->first, taken->first + units} : Stretch{};
  for (uint64_t parts = taken->slab->used; parts != 0; parts &= parts - 1) {
    const auto part = static_cast<size_t>(std::countr_zero(parts));
    if (!goes(offset + part * Extents::class_bytes(taken->slab->size_class))) return {};
  }
  return {taken->first, taken->first + units};
}

void MemoryTier::evict(const std::vector<std::vector<uint32_t>>& windows) {
  for (const auto& victims : windows) {
    for (const uint32_t id : victims) {
      if (records_[id].place != Places::kNone) files_->table().retire(records_[id].place);
    }
  }
  read_clients();
  for (const auto& victims : windows) {
    const bool free = std::none_of(victims.begin(), victims.end(), [&](uint32_t id) { return pinned(records_[id]); });
    for (const uint32_t id : victims) {
      Record& record = records_[id];
      record.victim = false;
      if (!free) {
        if (record.place != Places::kNone) files_->table().write(record.place, shown_of(record));
        continue;
      }
      evicted_.push_back(record.key);
      ++counters_.evicted;
      unpublish(id);
      forget(id);
    }
  }
}

// The table is full, not the arena.
void MemoryTier::evict_one() {
  read_clients();
  for (size_t steps = 2 * queued_; steps > 0; --steps) {
    const uint32_t id = first_;
    const bool stays = pinned(records_[id]) || !records_[id].idle;
    if (!stays && !records_[id].hit) return evict({{id}});
    requeue(id);
    records_[id].hit = records_[id].hit && stays;
  }
}

// Which extents clients read now. Readers that look at an entry from here on see what was written before.
void MemoryTier::read_clients() {
  pins_.clear();
  if (clients_.count() == 0) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // A client pins no more than its share, or one value that is larger.
  const uint64_t share = client_bytes_max();
  uint64_t room = 0;
  const auto client = [&] { room = share; };
  const auto pin = [&](uint64_t offset) {
    const uint32_t id = find_offset(offset);
    if (id == kNone || (records_[id].length > room && room < share)) return;
    room -= std::min<uint64_t>(room, records_[id].length);
    pins_.insert(offset);
  };
  const auto hit = [&](uint64_t offset) {
    const uint32_t id = find_offset(offset);
    if (id == kNone || !records_[id].published) return;
    records_[id].hit = true;
    ++counters_.client_hits;
  };
  clients_.read(client, pin, hit);
}

void MemoryTier::drain_limbo() {
  read_clients();
  std::erase_if(limbo_, [&](uint32_t id) {
    if (pinned(records_[id])) return false;
    forget(id);
    return true;
  });
}

size_t MemoryTier::nbytes() const {
  return sizeof *this + extents_.nbytes() + places_.nbytes() + by_key_.nbytes() + by_offset_.nbytes() +
         records_.capacity() * sizeof(Record) + free_records_.capacity() * 4;
}

void MemoryTier::check_invariants() const {
  extents_.check_invariants();
  size_t used = 0, published = 0, queued = 0, blocks = 0, in_limbo = 0;
  uint64_t bytes = 0, taken = 0;
  std::unordered_map<uint64_t, int> slabs;
  for (uint32_t id = 0; id < records_.size(); ++id) {
    const Record& record = records_[id];
    if (!record.used) continue;
    ++used;
    in_limbo += record.limbo;
    check(find_offset(record.extent.offset) == id, "an extent is not found by its offset");
    check(!record.victim, "a victim was forgotten");
    check(record.limbo == (record.refs == 0), "an extent without a reference is not free");
    check(record.idle == (record.published && record.refs == 1), "values may be evicted that are in use, or the reverse");
    if (record.extent.units) taken += record.extent.units;
    else taken += slabs[record.extent.offset / extents_.unit_bytes()]++ == 0;
    if (record.published) {
      ++published;
      check(find_key(record.key) == id, "a value is not found by its key");
      check(record.length + uint64_t{record.name_bytes} <= extents_.bytes_of(record.extent), "a value exceeds its extent");
    } else {
      check(record.place == Places::kNone, "what is not published is shown");
    }
    if (record.place != Places::kNone) check(places_.used(record.place) && !places_.disk_alone(record.place), "a place is lent twice");
  }
  for (uint32_t id = first_, before = kNone; id != kNone; before = id, id = records_[id].behind) {
    check(records_[id].published && records_[id].before == before, "the queue is torn");
    ++queued;
    if (!records_[id].idle) continue;
    bytes += extents_.bytes_of(records_[id].extent);
    blocks += is_block(records_[id].extent);
  }
  check(used == by_offset_.size() && published == by_key_.size(), "records are counted wrongly");
  check(queued == queued_ && queued == published, "the queue is counted wrongly");
  check(bytes == evictable_bytes_ && blocks == evictable_blocks_, "what may be evicted is counted wrongly");
  check(in_limbo == limbo_.size(), "limbo is counted wrongly");
  check(taken + extents_.units_free() == extents_.units(), "units are taken that no extent has");
}

}  // namespace memserve::store

// What of a memory tier is shown to other processes, and what a new owner takes over from it.
#include "store/memory_tier.h"

namespace memserve::store {

Shown MemoryTier::shown_of(const Record& record) const {
  Shown shown;
  shown.key = record.key;
  shown.offset = record.extent.offset;
  shown.seal = record.seal;
  shown.length = record.length;
  shown.scope = record.scope;
  shown.units = record.extent.units;
  shown.name_bytes = record.name_bytes;
  shown.size_class = record.extent.size_class;
  shown.state = static_cast<uint8_t>(Shown::kInMemory | (record.on_disk ? Shown::kOnDisk : 0) |
                                     (record.verified ? Shown::kVerified : 0));
  return shown;
}

void MemoryTier::show(uint32_t id) {
  if (!files_) return;
  Record& record = records_[id];
  record.seen = true;
  if (record.place == Places::kNone) {
    record.place = places_.find_disk(files_->table(), record.key);
    record.on_disk = record.on_disk || record.place != Places::kNone;
    if (record.place == Places::kNone) record.place = places_.choose(files_->table(), record.key, true);
    if (record.place == Places::kNone) {
      ++counters_.hidden;
      return;
    }
    places_.take(record.place, false);
  }
  files_->table().write(record.place, shown_of(record));
}

// Its bytes can't be found from now on; that it is on disk still can.
void MemoryTier::hide(uint32_t id) {
  Record& record = records_[id];
  if (record.place == Places::kNone) return;
  if (record.on_disk) {
    Shown shown;
    shown.key = record.key;
    shown.state = Shown::kOnDisk;
    files_->table().write(record.place, shown);
    places_.take(record.place, true);
  } else {
    files_->table().clear(record.place);
    places_.give(record.place);
  }
  record.place = Places::kNone;
}

void MemoryTier::mark_on_disk(Hash128 key, bool here) {
  if (!files_) return;
  const SharedTable& table = files_->table();
  if (const uint32_t id = find_key(key); id != kNone) {
    if (records_[id].on_disk == here) return;
    records_[id].on_disk = here;
    if (records_[id].place != Places::kNone) table.write(records_[id].place, shown_of(records_[id]));
    return;
  }
  uint32_t place = places_.find_disk(table, key);
  if (!here) {
    if (place == Places::kNone) return;
    table.clear(place);
    places_.give(place);
    return;
  }
  if (place != Places::kNone) return;
  place = places_.choose(table, key, false);
  if (place == Places::kNone) return;
  Shown shown;
  shown.key = key;
  shown.state = Shown::kOnDisk;
  table.write(place, shown);
  places_.take(place, true);
}

void MemoryTier::adopt() {
  const SharedTable& table = files_->table();
  for (uint32_t place = 0; place < table.places(); ++place) {
    if (!adopt_one(place)) table.clear(place);
  }
  for (const std::string& path : files_->old_clients()) clients_.adopt(path);
}

bool MemoryTier::adopt_one(uint32_t place) {
  const auto shown = files_->table().recover(place);
  if (!shown || !(shown->state & Shown::kInMemory) || shown->name_bytes > kNameBytesMax || has(shown->key)) return false;
  const Extent extent{shown->offset, shown->units, shown->size_class};
  if (shown->offset >= arena_bytes_ || !extents_.claim(extent)) return false;
  if (shown->length + uint64_t{shown->name_bytes} > extents_.bytes_of(extent)) {
    extents_.give(extent);
    return false;
  }
  const uint32_t id = add(extent);
  Record& record = records_[id];
  record.key = shown->key;
  record.seal = shown->seal;
  record.length = shown->length;
  record.scope = shown->scope;
  record.name_bytes = shown->name_bytes;
  record.published = record.had_key = record.seen = true;
  record.place = place;
  places_.take(place, false);
  by_key_.insert(hash_of(record.key), id);
  files_->table().write(place, shown_of(record));
  enqueue(id);
  set_idle(id, true);
  ++counters_.adopted;
  return true;
}

}  // namespace memserve::store

#include "store/segment_log.h"

#include <algorithm>
#include <utility>

#include "errors.h"

namespace memserve::store {

namespace {

constexpr size_t kRemovalsMax = kInlineBytesMax / sizeof(Removal);  // in one page
constexpr unsigned kHitsMax = 7;
constexpr uint32_t kFailuresMax = 8;  // commands in a row

}  // namespace

SegmentLog::SegmentLog(const LogOptions& options, const uint8_t secret[16])
    : options_(options), checksum_(secret), segments_(options.segments) {
  std::memcpy(secret_, secret, sizeof secret_);
}

size_t SegmentLog::record_bytes_max() const { return (segment_pages() - 2 - footer_pages(1)) * kPage; }

bool SegmentLog::room_in_open(size_t pages, size_t entries) const {
  const Segment& segment = segments_[*open_];
  return segment.pages_used + pages + footer_pages(segment.footer.size() + entries) <= segment_pages();
}

std::optional<Ticket> SegmentLog::place(Hash128 key, uint32_t length, const std::string& name, uint32_t scope,
                                        uint64_t seal, uint32_t encoded_bytes) {
  check(encoded_bytes == 0 || takes_encoded(), "the superblock knows of no encoded payload");
  check(length <= record_bytes_max() && name.size() <= kNameBytesMax, "a record is too long for a segment");
  FooterEntry entry;
  entry.key = key;
  entry.seal = seal;
  entry.number = next_number_++;
  entry.length = length;
  entry.scope = scope;
  entry.units = encoded_bytes > 0 ? units_of(length, encoded_bytes) : 0;
  check(encoded_bytes == 0 || entry.units > 0, "an encoded payload takes no fewer pages");
  entry.name_bytes = static_cast<uint16_t>(name.size());
  const auto ticket = append(entry, record_pages(length, name.size(), entry.units), std::nullopt, true);
  if (ticket) counters_.payload_bytes += length;
  return ticket;
}

std::optional<Ticket> SegmentLog::place_moved(uint64_t command, const std::string& name) {
  const auto step = steps_.find(command);
  check(step != steps_.end() && step->second.kind == Step::Kind::move, "no such move is under way");
  const Entry from = step->second.entry;
  const Entry* const now = index_.find(from.key);
  if (!now || now->number != from.number) return std::nullopt;
  FooterEntry entry;
  entry.key = from.key;
  entry.seal = from.seal;
  entry.number = from.number;
  entry.length = from.length;
  entry.scope = from.scope;
  entry.units = from.units;
  entry.name_bytes = static_cast<uint16_t>(name.size());
  const auto ticket = append(entry, record_pages(from.length, name.size(), from.units), from, false);
  if (ticket) counters_.moved_bytes += from.length;
  return ticket;
}

std::optional<Ticket> SegmentLog::append(const FooterEntry& entry, size_t pages, std::optional<Entry> moved_from,
                                         bool reserve) {
  if (open_ && !room_in_open(pages, 1)) close_open();
  if (!started_ || reopening_) return std::nullopt;
  if (!open_) {
    // The last ready segment is kept for moves: without room for them no segment would ever become free again.
    if (ready_.size() < (reserve && options_.move_share > 0 ? 2u : 1u)) {
      tend();
      return std::nullopt;
    }
    open_next();
  }
  Segment& segment = segments_[*open_];
  Pending pending{*open_, segment.serial, entry, moved_from};
  pending.entry.page = segment.pages_used;
  // Entries stand in the footer from the start, to count for its size; a failed one is removed when the footer is
  // written.
  segment.footer.push_back(pending.entry);
  segment.pages_used += static_cast<uint32_t>(pages);
  ++segment.pending;
  const Ticket ticket{next_id_++, offset_of(*open_, pending.entry.page), static_cast<uint32_t>(pages)};
  pending_.emplace(ticket.id, std::move(pending));
  counters_.meta_bytes += kPage;
  tend();
  return ticket;
}

void SegmentLog::write_head(uint64_t ticket, const std::string& name, const uint8_t* payload, uint8_t* page,
                            size_t payload_bytes) const {
  const auto found = pending_.find(ticket);
  check(found != pending_.end(), "no such ticket is under way");
  const FooterEntry& entry = found->second.entry;
  check(name.size() == entry.name_bytes, "the name is not the one that was placed");
  RecordHead head;
  head.serial = found->second.serial;
  head.key = entry.key;
  head.seal = entry.seal;
  head.number = entry.number;
  head.length = entry.length;
  head.scope = entry.scope;
  head.page = entry.page;
  head.units = entry.units;
  head.name_bytes = entry.name_bytes;
  head.kind = entry.kind;
  head.check = checksum_.of_record(head, reinterpret_cast<const uint8_t*>(name.data()));
  std::memset(page, 0, kPage);
  std::memcpy(page, &head, sizeof head);
  std::memcpy(page + sizeof head, name.data(), name.size());
  if (!lies_in_head(entry.length, name.size())) return;
  check(payload_bytes == entry.length, "the payload is not as long as was placed");
  if (entry.length > 0) std::memcpy(page + sizeof head + name.size(), payload, entry.length);
}

std::optional<RecordHead> SegmentLog::read_head(const uint8_t* page) const {
  RecordHead head;
  std::memcpy(&head, page, sizeof head);
  if (head.magic != RecordHead::kMagic || head.name_bytes > kNameBytesMax) return std::nullopt;
  if (checksum_.of_record(head, page + sizeof head) != head.check) return std::nullopt;
  return head;
}

void SegmentLog::expect_encoded() {
  if (version_ == kVersionEncoded) return;
  version_ = kVersionEncoded;
  super_wanted_ += 2;  // both copies
  encoded_from_ = super_written_ + 2;
  tend();
}

void SegmentLog::finish_record(uint64_t ticket, bool written) {
  const auto found = pending_.find(ticket);
  check(found != pending_.end(), "no such ticket is under way");
  if (found->second.purged) {
    drop(ticket);
  } else if (!written) {
    drop_and_wipe(ticket);  // all of it may be on the disk nevertheless
  } else if (options_.sync == Sync::always) {
    unsynced_.push_back(ticket);
  } else {
    publish(ticket);
  }
  tend();
}

// The record is not on the disk, or no longer counts.
void SegmentLog::drop(uint64_t ticket) {
  const Pending pending = std::move(pending_.at(ticket));
  pending_.erase(ticket);
  Segment& segment = segments_[pending.segment];
  --segment.pending;
  std::erase_if(segment.footer, [&](const FooterEntry& entry) { return entry.page == pending.entry.page; });
  ended_.emplace_back(ticket, false);
}

// The head is wiped, so that no restart finds the record: what says that the key is gone may lie in an older segment,
// which may be written again before this one has its footer.
void SegmentLog::drop_and_wipe(uint64_t ticket) {
  const Pending& pending = pending_.at(ticket);
  const uint32_t segment = pending.segment, page = pending.entry.page;
  drop(ticket);
  ++segments_[segment].pending;
  write_page(segment, page, std::vector<uint8_t>(kPage));
}

void SegmentLog::publish(uint64_t ticket) {
  const Pending pending = pending_.at(ticket);
  const FooterEntry& entry = pending.entry;
  const Entry* const now = index_.find(entry.key);
  const bool gone = pending.moved_from && (!now || now->number != entry.number);
  const bool late = now && now->number > entry.number;
  if (pending.purged) return drop(ticket);
  if (pending.removed || gone || late) return drop_and_wipe(ticket);  // a later put, or a removal, came between
  pending_.erase(ticket);
  --segments_[pending.segment].pending;
  Entry record;
  record.key = entry.key;
  record.seal = entry.seal;
  record.number = entry.number;
  record.length = entry.length;
  record.scope = entry.scope;
  record.page = entry.page;
  record.units = entry.units;
  record.segment = static_cast<uint16_t>(pending.segment);
  record.name_bytes = entry.name_bytes;
  index_.insert(record);
  if (pending.moved_from) {
    ++counters_.records_moved;
  } else {
    ++counters_.records_written;
  }
  ended_.emplace_back(ticket, true);
}

std::optional<Found> SegmentLog::hold(Hash128 key, bool counts) {
  Entry* const entry = index_.find(key);
  if (!entry) return std::nullopt;
  if (counts && entry->hits < kHitsMax) ++entry->hits;
  ++segments_[entry->segment].pins;
  return look(key);
}

void SegmentLog::touch(std::span<const Hash128> keys) {
  for (const Hash128 key : keys) {
    Entry* const entry = index_.find(key);
    if (entry && entry->hits < kHitsMax) ++entry->hits;
  }
}

std::optional<Found> SegmentLog::look(Hash128 key) const {
  const Entry* const entry = index_.find(key);
  if (!entry) return std::nullopt;
  const uint64_t head = offset_of(entry->segment, entry->page);
  const bool inside = lies_in_head(entry->length, entry->name_bytes);
  const auto encoded_bytes = static_cast<uint32_t>(encoded_pages(entry->length, entry->units) * kPage);
  return Found{head + (inside ? sizeof(RecordHead) + entry->name_bytes : kPage), head, entry->length, encoded_bytes,
               entry->segment, entry->seal, entry->scope, entry->name_bytes};
}

void SegmentLog::let_go(uint32_t segment) {
  check(segment < segments_.size() && segments_[segment].pins > 0, "that segment is not held");
  --segments_[segment].pins;
  tend();
}

bool SegmentLog::has(Hash128 key) const { return index_.find(key) != nullptr; }

bool SegmentLog::remove(Hash128 key) {
  bool known = index_.erase(key);
  for (auto& [id, pending] : pending_) {
    if (pending.entry.key.low != key.low || pending.entry.key.high != key.high) continue;
    pending.removed = known = true;
  }
  if (!known) return false;
  removals_.push_back({key, next_number_++});
  tend();
  return true;
}

void SegmentLog::write_removals() {
  while (!removals_.empty() && !reopening_) {
    if (open_ && !room_in_open(1, std::min(removals_.size(), kRemovalsMax))) close_open();
    if (!open_) {
      if (ready_.empty()) return;  // they wait for a segment
      open_next();
    }
    Segment& segment = segments_[*open_];
    const size_t count = std::min(removals_.size(), kRemovalsMax);
    RecordHead head;
    head.serial = segment.serial;
    head.length = static_cast<uint32_t>(count * sizeof(Removal));
    head.page = segment.pages_used;
    head.kind = Kind::removed;
    std::vector<uint8_t> page(kPage);
    for (size_t i = 0; i < count; ++i) {
      FooterEntry entry;
      entry.key = removals_[i].key;
      entry.number = removals_[i].number;
      entry.page = head.page;
      entry.kind = Kind::removed;
      segment.footer.push_back(entry);
    }
    std::memcpy(page.data() + sizeof head, removals_.data(), head.length);
    head.seal = checksum_.of(page.data() + sizeof head, head.length);
    head.check = checksum_.of_record(head, page.data());
    std::memcpy(page.data(), &head, sizeof head);
    ++segment.pages_used;
    ++segment.pending;
    removals_.erase(removals_.begin(), removals_.begin() + static_cast<std::ptrdiff_t>(count));
    write_page(*open_, head.page, page);
    counters_.meta_bytes += kPage;
  }
}

void SegmentLog::purge() {
  index_.each([&](const Entry& entry) { evicted_.push_back(entry.key); });
  counters_.records_evicted += index_.size();
  index_.clear();
  removals_.clear();
  ++epoch_;
  ++super_wanted_;
  for (auto& [id, pending] : pending_) pending.purged = true;
  if (open_) close_open();
  outdated_ = 0;  // the new epoch says so of all of them
  for (Segment& segment : segments_) segment.outdated = false;
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    // Heads of the old epoch are rewritten.
    if (segments_[i].state == State::free || segments_[i].stale) continue;
    segments_[i].stale = true;
    stale_.push_back(i);
  }
  ready_.clear();
  closing_.clear();
  sealed_.clear();
  tend();
}

std::vector<std::pair<uint64_t, bool>> SegmentLog::take_ended() { return std::exchange(ended_, {}); }
std::vector<Hash128> SegmentLog::take_evicted() { return std::exchange(evicted_, {}); }
std::vector<Command> SegmentLog::take_commands() { return std::exchange(commands_, {}); }

size_t SegmentLog::segments_free() const {
  return static_cast<size_t>(std::count_if(segments_.begin(), segments_.end(), [](const Segment& segment) {
    return segment.state == State::free || segment.state == State::preparing || segment.state == State::ready;
  }));
}

bool SegmentLog::idle() const { return pending_.empty() && steps_.empty(); }
bool SegmentLog::removals_written() const {
  return removals_.empty() && outdated_ == 0 && std::none_of(steps_.begin(), steps_.end(), [](const auto& step) {
    return step.second.kind == Step::Kind::page;
  });
}
bool SegmentLog::broken() const { return failures_ >= kFailuresMax; }

size_t SegmentLog::nbytes() const {
  size_t bytes = index_.nbytes();
  for (const Segment& segment : segments_) {
    bytes += sizeof segment + segment.keys.capacity() * sizeof(Hash128) + segment.footer.capacity() * sizeof(FooterEntry);
  }
  return bytes;
}

}  // namespace memserve::store

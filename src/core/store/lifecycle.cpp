// The life of a segment: prepared, opened, closed, sealed, emptied, free.
#include <algorithm>
#include <utility>

#include "errors.h"
#include "store/segment_log.h"

namespace memserve::store {

uint64_t SegmentLog::command(Command::Kind kind, Step step, uint64_t offset, std::vector<uint8_t> data) {
  const uint64_t id = next_id_++;
  commands_.push_back({id, kind, offset, std::move(data), step.entry});
  steps_.emplace(id, std::move(step));
  return id;
}

void SegmentLog::format() {
  super_wanted_ = 2;  // both copies
  free_.clear();
  for (uint32_t i = 0; i < segments_.size(); ++i) free_.push_back(i);
  tend();
}

// Issues every command that has become possible.
void SegmentLog::tend() {
  finish_emptying();
  drop_stale();
  for (const uint32_t segment : closing_) close(segment);
  if (broken()) return;
  // One to open next, and one reserved for moves.
  const size_t wanted = options_.move_share > 0 ? 2 : 1;
  write_super();
  if (!started_) return;
  if (ready_.size() + free_.size() + preparing_ < wanted) empty_oldest();
  // One after the other, as they became free: until its head is new, a restart still finds what a segment held, and a
  // removal must not go before what it removed.
  if (!preparing_ && ready_.size() < wanted && !free_.empty()) {
    prepare(free_.front());
    free_.pop_front();
  }
  write_removals();
  sync_tickets();
}

void SegmentLog::prepare(uint32_t number) {
  Segment& segment = segments_[number];
  segment.state = State::preparing;
  segment.serial = next_serial_++;
  preparing_ = true;
  SegmentHead head;
  head.serial = segment.serial;
  head.epoch = epoch_;
  head.segment = number;
  checksum_.sign(head);
  std::vector<uint8_t> page(kPage);
  std::memcpy(page.data(), &head, sizeof head);
  counters_.meta_bytes += kPage;
  command(Command::Kind::write, {Step::Kind::head, number, {}, {}}, offset_of(number, 0), std::move(page));
}

void SegmentLog::open_next() {
  open_ = ready_.front();
  ready_.pop_front();
  segments_[*open_].state = State::open;
  segments_[*open_].pages_used = 1;
}

void SegmentLog::close_open() {
  if (!open_) return;
  const uint32_t number = *std::exchange(open_, std::nullopt);
  segments_[number].state = State::closing;
  closing_.push_back(number);
  close(number);
}

// Takes effect once every record has ended. Unless nothing is synced, the footer is written after its records are
// durable.
void SegmentLog::close(uint32_t number) {
  Segment& segment = segments_[number];
  if (segment.pending > 0 || segment.footer_under_way || broken()) return;
  segment.footer_under_way = true;
  if (options_.sync == Sync::none) {
    write_footer(number);
  } else {
    command(Command::Kind::sync, {Step::Kind::sync_data, number, {}, {}});
  }
}

// Its footer goes before anything is written behind what it lists: with one, a restart would look for nothing else.
// Synced whatever the policy is, or heads that a loss of power hid could lie among those that are written next.
void SegmentLog::reopen(uint32_t number) {
  segments_[number].state = State::reopening;
  reopening_ = number;
  const uint32_t last = static_cast<uint32_t>(segment_pages() - 1);
  command(Command::Kind::write, {Step::Kind::reopen, number, {}, {}}, offset_of(number, last), std::vector<uint8_t>(kPage));
}

void SegmentLog::end_reopening(bool done) {
  const uint32_t number = *std::exchange(reopening_, std::nullopt);
  if (segments_[number].stale) return;
  open_ = number;
  segments_[number].state = State::open;
  if (!done) close_open();  // the footer may be gone or not
}

void SegmentLog::write_footer(uint32_t number) {
  const Segment& segment = segments_[number];
  Trailer trailer;
  trailer.serial = segment.serial;
  trailer.entries = static_cast<uint32_t>(segment.footer.size());
  const size_t entry_bytes = segment.footer.size() * sizeof(FooterEntry);
  std::vector<uint8_t> footer(footer_pages(segment.footer.size()) * kPage);
  uint8_t* const entries = footer.data() + footer.size() - sizeof trailer - entry_bytes;
  if (entry_bytes > 0) std::memcpy(entries, segment.footer.data(), entry_bytes);
  trailer.entries_check = checksum_.of(entries, entry_bytes);
  checksum_.sign(trailer);
  std::memcpy(footer.data() + footer.size() - sizeof trailer, &trailer, sizeof trailer);
  counters_.meta_bytes += footer.size();
  const uint64_t offset = offset_of(number, 0) + options_.segment_bytes - footer.size();
  command(Command::Kind::write, {Step::Kind::footer, number, {}, {}}, offset, std::move(footer));
}

void SegmentLog::finish_command(uint64_t id, bool done) {
  const auto found = steps_.find(id);
  check(found != steps_.end(), "no such command is under way");
  const Step step = std::move(found->second);
  steps_.erase(found);
  std::erase_if(commands_, [&](const Command& command) { return command.id == id; });
  if (step.kind != Step::Kind::move) failures_ = done ? 0 : failures_ + 1;
  if (!done && step.kind != Step::Kind::move) {
    failed_command(step);
    tend();
    return;
  }
  Segment& segment = segments_[step.segment];
  switch (step.kind) {
    case Step::Kind::super:
      command(Command::Kind::sync, {Step::Kind::sync_super, 0, {}, {}});
      break;
    case Step::Kind::sync_super:
      super_under_way_ = false;
      started_ = started_ || super_written_ == super_wanted_;
      break;
    case Step::Kind::head:
      // Whatever the policy is: of two segments that begin a new life, a loss of power must not undo the first alone.
      if (!segment.stale) {
        command(Command::Kind::sync, {Step::Kind::sync_head, step.segment, {}, {}});
        break;
      }
      [[fallthrough]];
    case Step::Kind::sync_head:
      preparing_ = false;
      segment.state = State::ready;
      outdated_ -= std::exchange(segment.outdated, false);
      if (!segment.stale) ready_.push_back(step.segment);
      break;
    case Step::Kind::sync_data:
      write_footer(step.segment);
      break;
    case Step::Kind::footer:
      if (options_.sync != Sync::none && !segment.stale) {
        command(Command::Kind::sync, {Step::Kind::sync_footer, step.segment, {}, {}});
        break;
      }
      [[fallthrough]];
    case Step::Kind::sync_footer:
      seal(step.segment);
      break;
    case Step::Kind::publish:
      syncing_ = false;
      for (const uint64_t ticket : step.tickets) publish(ticket);
      break;
    case Step::Kind::page:
      --segment.pending;
      break;
    case Step::Kind::move:
      --segment.moves;
      segment.unsynced_moves = segment.unsynced_moves || (done && options_.sync == Sync::segment);
      break;
    case Step::Kind::sync_moves:
      segment.sync_under_way = segment.unsynced_moves = false;
      break;
    case Step::Kind::reopen:
      command(Command::Kind::sync, {Step::Kind::sync_reopen, step.segment, {}, {}});
      break;
    case Step::Kind::sync_reopen:
      end_reopening(true);
      break;
  }
  tend();
}

// Writes a page that lists removals; the segment waits for it.
void SegmentLog::write_page(uint32_t segment, uint32_t page, const std::vector<uint8_t>& data) {
  Step step{Step::Kind::page, segment, {}, {}};
  step.page = page;
  step.data = data;
  command(Command::Kind::write, std::move(step), offset_of(segment, page), data);
}

void SegmentLog::failed_command(const Step& step) {
  Segment& segment = segments_[step.segment];
  switch (step.kind) {
    case Step::Kind::head:
    case Step::Kind::sync_head:
      preparing_ = false;
      segment.state = State::ready;
      if (segment.stale) break;
      renew(segment);
      free_.push_front(step.segment);
      break;
    case Step::Kind::sync_data:
    case Step::Kind::footer:
    case Step::Kind::sync_footer:
      segment.footer_under_way = false;  // tried again
      break;
    case Step::Kind::publish:
      syncing_ = false;
      for (const uint64_t ticket : step.tickets) {
        pending_.at(ticket).purged ? drop(ticket) : drop_and_wipe(ticket);
      }
      break;
    case Step::Kind::page:
      if (broken()) {
        --segment.pending;
      } else {
        write_page(step.segment, step.page, step.data);
      }
      break;
    case Step::Kind::sync_moves:
      segment.sync_under_way = false;  // tried again
      break;
    case Step::Kind::reopen:
    case Step::Kind::sync_reopen:
      end_reopening(false);
      break;
    case Step::Kind::super:
    case Step::Kind::sync_super:
      super_under_way_ = false;
      super_wanted_ += version_ == kVersionEncoded ? 2 : 1;  // it may lie there or not: then both copies once more
      if (encoded_from_ > 0) encoded_from_ = super_written_ + 2;
      break;
    case Step::Kind::move:
      break;
  }
}

void SegmentLog::seal(uint32_t number) {
  Segment& segment = segments_[number];
  segment.footer_under_way = false;
  segment.state = State::sealed;
  for (const FooterEntry& entry : segment.footer) {
    if (entry.kind == Kind::value) segment.keys.push_back(entry.key);
  }
  segment.keys.shrink_to_fit();
  segment.footer = {};
  std::erase(closing_, number);
  if (!segment.stale) sealed_.insert({segment.serial, number});
}

// The oldest segment's records that were hit move away, the most wanted first; the others go with it.
void SegmentLog::empty_oldest() {
  if (emptying_ || sealed_.empty()) return;
  const auto [serial, number] = *sealed_.begin();
  // Strictly in order: a removal must not go before what it removes.
  for (const uint32_t closing : closing_) {
    if (segments_[closing].serial < serial) return;
  }
  sealed_.erase(sealed_.begin());
  emptying_ = number;
  Segment& segment = segments_[number];
  segment.state = State::emptying;
  std::vector<Entry> hit;
  for (const Hash128 key : segment.keys) {
    const Entry* const entry = index_.find(key);
    if (entry && entry->segment == number && entry->hits > 0) hit.push_back(*entry);
  }
  std::stable_sort(hit.begin(), hit.end(), [](const Entry& a, const Entry& b) { return a.hits > b.hits; });
  double pages_left = options_.move_share * static_cast<double>(segment_pages());
  for (const Entry& entry : hit) {
    const auto pages = static_cast<double>(record_pages(entry.length, entry.name_bytes, entry.units));
    if (pages > pages_left) continue;
    pages_left -= pages;
    ++segment.moves;
    command(Command::Kind::move, {Step::Kind::move, number, entry, {}},
            offset_of(number, entry.page));
  }
  finish_emptying();
}

void SegmentLog::finish_emptying() {
  if (!emptying_) return;
  const uint32_t number = *emptying_;
  Segment& segment = segments_[number];
  if (segment.moves > 0 || segment.sync_under_way) return;
  if (segment.unsynced_moves && !segment.stale) {
    // Copies are as durable as their originals before the originals go.
    if (broken()) return;
    segment.sync_under_way = true;
    command(Command::Kind::sync, {Step::Kind::sync_moves, number, {}, {}});
    return;
  }
  // From here on its records are no longer found; reads that hold the segment go on.
  for (const Hash128 key : std::exchange(segment.keys, {})) {
    const Entry* const entry = index_.find(key);
    if (!entry || entry->segment != number) continue;
    index_.erase(key);
    evicted_.push_back(key);
    ++counters_.records_evicted;
    outdated_ += !std::exchange(segment.outdated, true);
  }
  if (segment.pins > 0) return;
  emptying_.reset();
  if (!segment.stale) set_free(number);
}

// As if nothing had been in it; what lies on the disk stays until the head is written.
void SegmentLog::renew(Segment& segment) {
  const bool outdated = segment.outdated;
  segment = Segment{};
  segment.outdated = outdated;
}

void SegmentLog::set_free(uint32_t number) {
  renew(segments_[number]);
  free_.push_back(number);
}

void SegmentLog::drop_stale() {
  std::erase_if(stale_, [&](uint32_t number) {
    const Segment& segment = segments_[number];
    const bool held = segment.pending > 0 || segment.pins > 0 || segment.moves > 0 || segment.footer_under_way ||
                      segment.sync_under_way || segment.state == State::preparing || emptying_ == number ||
                      reopening_ == number;
    if (held) return false;
    set_free(number);
    return true;
  });
}

void SegmentLog::sync_tickets() {
  if (syncing_ || unsynced_.empty()) return;
  syncing_ = true;
  command(Command::Kind::sync, {Step::Kind::publish, 0, {}, std::exchange(unsynced_, {})});
}

// One copy at a time, synced whatever the policy is: the other one stays whole.
void SegmentLog::write_super() {
  if (super_under_way_ || super_written_ == super_wanted_) return;
  super_under_way_ = true;
  super_wanted_ = std::min(super_wanted_, super_written_ + 2);
  Superblock super;
  super.version = version_;
  super.segments = options_.segments;
  super.segment_bytes = options_.segment_bytes;
  super.written = ++super_written_;
  super.epoch = epoch_;
  std::memcpy(super.secret, secret_, sizeof secret_);
  Checksum(kNoSecret).sign(super);
  std::vector<uint8_t> page(kPage);
  std::memcpy(page.data(), &super, sizeof super);
  counters_.meta_bytes += kPage;
  command(Command::Kind::write, {Step::Kind::super, 0, {}, {}}, super_written_ % 2 * kPage, std::move(page));
}

}  // namespace memserve::store

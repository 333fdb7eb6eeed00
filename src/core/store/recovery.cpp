// Reads what an earlier life left: footers list what sealed segments hold; a segment without one is read page by page.
#include <algorithm>
#include <cstddef>
#include <utility>

#include "codec/kv_codec.h"
#include "errors.h"
#include "store/segment_log.h"
#include "transfer/seal_sums.h"

namespace memserve::store {

namespace {

constexpr size_t kWindowBytes = size_t{4} << 20;
constexpr size_t kTailBytes = 64 << 10;  // read at once with the trailer: the whole footer where records are large

// Bytes of the disk, read ahead in one direction. What cannot be read is zeros.
class Window {
 public:
  Window(Source& source, uint64_t begin, uint64_t end) : source_(source), end_(end), from_(begin), bytes_(0) {
    buffer_.resize(kWindowBytes);
  }

  // `kPage` bytes at `offset`, which is inside.
  const uint8_t* page(uint64_t offset) {
    if (offset < from_ || offset + kPage > from_ + bytes_) {
      from_ = offset;
      bytes_ = std::min<uint64_t>(kWindowBytes, end_ - offset);
      if (!source_.read(from_, buffer_.data(), bytes_)) {
        // A part of it may still be readable.
        for (size_t at = 0; at < bytes_; at += kPage) {
          if (source_.read(from_ + at, buffer_.data() + at, kPage)) continue;
          std::memset(buffer_.data() + at, 0, kPage);
          unread_ = true;
        }
      }
    }
    return buffer_.data() + (offset - from_);
  }
  bool unread() const { return unread_; }

 private:
  Source& source_;
  uint64_t end_, from_, bytes_;
  std::vector<uint8_t> buffer_;
  bool unread_ = false;
};

// Whether what lies at `offset` is the encoded payload of that record.
bool is_encoded(Window& window, uint64_t offset, const RecordHead& head) {
  const size_t pages = encoded_pages(head.length, head.units);
  std::vector<uint8_t> encoded(pages * kPage), payload(head.length);
  for (size_t page = 0; page < pages; ++page) {
    std::memcpy(encoded.data() + page * kPage, window.page(offset + page * kPage), kPage);
  }
  const auto decoded = codec::decode(encoded.data(), encoded.size(), payload.data(), payload.size());
  return decoded.encoded_bytes > 0 && decoded.seal == head.seal;
}

template <class T>
T load(const uint8_t* bytes) {
  T item;
  std::memcpy(&item, bytes, sizeof item);
  return item;
}

}  // namespace

std::optional<Superblock> SegmentLog::read_superblock(Source& source) {
  std::optional<Superblock> newest;
  std::vector<uint8_t> page(kPage);
  for (const uint64_t offset : {uint64_t{0}, uint64_t{kPage}}) {
    if (!source.read(offset, page.data(), kPage)) continue;
    const auto super = load<Superblock>(page.data());
    if (!Checksum(kNoSecret).holds(super) || super.version < kVersionPlain || super.version > kVersionEncoded) continue;
    if (!newest || newest->written < super.written) newest = super;
  }
  return newest;
}

uint32_t SegmentLog::superblock_version(Source& source) {
  uint32_t version = 0;
  std::vector<uint8_t> page(kPage);
  for (const uint64_t offset : {uint64_t{0}, uint64_t{kPage}}) {
    if (!source.read(offset, page.data(), kPage)) continue;
    const auto super = load<Superblock>(page.data());
    if (Checksum(kNoSecret).holds(super)) version = std::max(version, super.version);
  }
  return version;
}

void SegmentLog::recover(Source& source, const Superblock& super) {
  check(super.segments == options_.segments && super.segment_bytes == options_.segment_bytes,
        "a superblock of another size");
  super_written_ = super_wanted_ = super.written;
  epoch_ = super.epoch;
  version_ = super.version;
  // Numbers of this life exceed all that an earlier one gave, even those of which nothing is left.
  next_serial_ = (super.written + 1) << 32;
  next_number_ = (super.written + 1) << 40;
  std::vector<SegmentHead> heads(segments_.size());
  std::vector<uint8_t> page(kPage);
  for (uint32_t i = 0; i < heads.size(); ++i) {
    if (!source.read(offset_of(i, 0), page.data(), kPage)) continue;
    const auto head = load<SegmentHead>(page.data());
    if (!checksum_.holds(head) || head.segment != i) continue;
    heads[i] = head;
    // A purge whose superblock was lost: a head with the new epoch was written after it.
    epoch_ = std::max(epoch_, head.epoch);
  }
  std::vector<Scanned> scanned;
  for (uint32_t i = 0; i < heads.size(); ++i) {
    if (heads[i].serial == 0 || heads[i].epoch != epoch_) {
      free_.push_back(i);
      continue;
    }
    segments_[i].serial = heads[i].serial;
    if (read_footer(source, i)) {
      segments_[i].state = State::sealed;
      sealed_.insert({heads[i].serial, i});
      continue;
    }
    scanned.push_back(scan(source, i));
    counters_.records_torn += scanned.back().torn.size();
    for (const FooterEntry& entry : segments_[i].footer) recovered(entry, i);
  }
  for (const Removal& removal : std::exchange(removed_, {})) {
    const Entry* const entry = index_.find(removal.key);
    if (entry && entry->number < removal.number) index_.erase(removal.key);
  }
  counters_.records_recovered = index_.size();
  settle(source, scanned);
  ++super_wanted_;
  tend();
}

// What becomes of segments without a footer, and of the one that was written last: it is the one to go on in, because
// all that an earlier life wrote must go before what this one removes.
void SegmentLog::settle(Source& source, std::vector<Scanned>& scanned) {
  const Scanned* last = nullptr;
  const auto serial = [&](const Scanned& one) { return segments_[one.segment].serial; };
  for (Scanned& one : scanned) {
    Segment& segment = segments_[one.segment];
    if (one.pages_used == 1 && !one.unread) {
      set_free(one.segment);  // it was ready, and nothing was written
      continue;
    }
    std::erase_if(segment.footer, [&](const FooterEntry& entry) {
      if (entry.kind != Kind::value) return false;
      const Entry* const now = index_.find(entry.key);
      const bool counts = now && now->segment == one.segment && now->page == entry.page;
      if (!counts) one.torn.push_back(entry.page);
      return !counts;
    });
    segment.state = State::closing;
    closing_.push_back(one.segment);
    if (!last || serial(*last) < serial(one)) last = &one;
  }
  if (!sealed_.empty() && (!last || serial(*last) < sealed_.rbegin()->first)) {
    reopen_newest(source);
  } else if (last) {
    go_on_in(*last);
  }
}

// Heads that count no longer are wiped, or a later start could find what this life knows nothing of.
void SegmentLog::go_on_in(const Scanned& last) {
  Segment& segment = segments_[last.segment];
  if (last.unread || last.pages_used + footer_pages(segment.footer.size() + 1) >= segment_pages()) return;
  std::erase(closing_, last.segment);
  segment.state = State::open;
  segment.pages_used = last.pages_used;
  open_ = last.segment;
  for (const uint32_t page : last.torn) {
    ++segment.pending;
    write_page(last.segment, page, std::vector<uint8_t>(kPage));
  }
}

// If there is room, and what lies in it is what its footer says: without the footer, that is what counts.
void SegmentLog::reopen_newest(Source& source) {
  const auto newest = *sealed_.rbegin();
  Segment& segment = segments_[newest.second];
  if (!read_footer(source, newest.second, true)) return;
  const std::vector<FooterEntry> listed = std::exchange(segment.footer, {});
  const uint32_t pages_max = static_cast<uint32_t>(segment_pages() - segment_pages() / 8);
  if (!listed.empty() && listed.back().page >= pages_max) return;
  const Scanned scanned = scan(source, newest.second);
  const bool same = listed.size() == segment.footer.size() &&
                    std::memcmp(listed.data(), segment.footer.data(), listed.size() * sizeof(FooterEntry)) == 0;
  if (!same || scanned.unread || !scanned.torn.empty() || scanned.pages_used > pages_max) {
    segment.footer = {};
    return;
  }
  segment.pages_used = scanned.pages_used;
  segment.keys = {};
  sealed_.erase(newest);
  reopen(newest.second);
}

void SegmentLog::recovered(const FooterEntry& entry, uint32_t segment) {
  if (entry.kind == Kind::removed) {
    removed_.push_back({entry.key, entry.number});
    return;
  }
  const Entry* const now = index_.find(entry.key);
  // Of a record that was moved there are two copies for a while: the later one stays longer.
  const bool newer = !now || now->number < entry.number ||
                     (now->number == entry.number && segments_[now->segment].serial < segments_[segment].serial);
  if (!newer) return;
  Entry record;
  record.key = entry.key;
  record.seal = entry.seal;
  record.number = entry.number;
  record.length = entry.length;
  record.scope = entry.scope;
  record.page = entry.page;
  record.units = entry.units;
  record.segment = static_cast<uint16_t>(segment);
  record.name_bytes = entry.name_bytes;
  index_.insert(record);
}

// `keep`: its entries are kept, instead of the keys.
bool SegmentLog::read_footer(Source& source, uint32_t number, bool keep) {
  const uint64_t end = offset_of(number, 0) + options_.segment_bytes;
  const size_t tail_bytes = std::min<size_t>(kTailBytes, options_.segment_bytes);
  std::vector<uint8_t> tail(tail_bytes);
  if (!source.read(end - tail.size(), tail.data(), tail.size())) return false;
  const auto trailer = load<Trailer>(tail.data() + tail.size() - sizeof(Trailer));
  if (!checksum_.holds(trailer) || trailer.serial != segments_[number].serial) return false;
  const size_t entry_bytes = trailer.entries * sizeof(FooterEntry);
  const size_t footer_bytes = footer_pages(trailer.entries) * kPage;
  if (footer_bytes > options_.segment_bytes) return false;
  if (footer_bytes > tail.size()) {
    tail.resize(footer_bytes);
    if (!source.read(end - footer_bytes, tail.data(), footer_bytes)) return false;
  }
  const uint8_t* const entries = tail.data() + tail.size() - sizeof(Trailer) - entry_bytes;
  if (checksum_.of(entries, entry_bytes) != trailer.entries_check) return false;
  Segment& segment = segments_[number];
  for (size_t i = 0; i < trailer.entries; ++i) {
    const auto entry = load<FooterEntry>(entries + i * sizeof(FooterEntry));
    if (keep) {
      segment.footer.push_back(entry);
      continue;
    }
    recovered(entry, number);
    if (entry.kind == Kind::value) segment.keys.push_back(entry.key);
  }
  return true;
}

SegmentLog::Scanned SegmentLog::scan(Source& source, uint32_t number) {
  Segment& segment = segments_[number];
  Scanned scanned{number};
  const uint64_t begin = offset_of(number, 0);
  Window window(source, begin, begin + options_.segment_bytes);
  for (uint32_t at = 1; at < segment_pages();) {
    const uint8_t* const bytes = window.page(begin + at * uint64_t{kPage});
    const auto found = read_head(bytes);
    if (!found || found->serial != segment.serial || found->page != at) {
      ++at;
      continue;
    }
    const RecordHead& head = *found;
    FooterEntry entry;
    entry.number = head.number;
    entry.page = at;
    entry.kind = head.kind;
    const uint8_t* const inside = bytes + sizeof head + head.name_bytes;
    if (head.kind == Kind::removed) {
      if (head.length <= kInlineBytesMax && checksum_.of(inside, head.length) == head.seal) {
        for (size_t i = 0; i < head.length / sizeof(Removal); ++i) {
          const auto removal = load<Removal>(inside + i * sizeof(Removal));
          entry.key = removal.key;
          entry.number = removal.number;
          segment.footer.push_back(entry);
        }
      } else {
        scanned.torn.push_back(at);
      }
      scanned.pages_used = ++at;
      continue;
    }
    entry.key = head.key;
    entry.seal = head.seal;
    entry.length = head.length;
    entry.scope = head.scope;
    entry.units = head.units;
    entry.name_bytes = head.name_bytes;
    const size_t pages = record_pages(head.length, head.name_bytes, head.units);
    SealSums sums;
    if (head.units > 0) {
      const bool same = at + pages <= segment_pages() && is_encoded(window, begin + (at + 1) * uint64_t{kPage}, head);
      if (same) segment.footer.push_back(entry);
      if (!same) scanned.torn.push_back(at);
      at += static_cast<uint32_t>(pages);
      scanned.pages_used = at;
      continue;
    }
    if (lies_in_head(head.length, head.name_bytes)) {
      sums = seal_sums(inside, nullptr, 0, head.length);
    } else {
      for (size_t from = 0; from < head.length; from += kPage) {
        const uint8_t* const payload = window.page(begin + at * uint64_t{kPage} + kPage + from);
        sums += seal_sums(payload, nullptr, from, std::min<size_t>(kPage, head.length - from));
      }
    }
    if ((head.length > 0 ? sums.finish(head.length) : 0) == head.seal) {
      segment.footer.push_back(entry);
    } else {
      scanned.torn.push_back(at);
    }
    at += static_cast<uint32_t>(pages);
    scanned.pages_used = at;
  }
  scanned.unread = window.unread();
  return scanned;
}

}  // namespace memserve::store

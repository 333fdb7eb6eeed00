// Where records lie on one disk, and when a segment may be written again: bookkeeping alone, no IO. A host performs the
// commands and says what became of each, in any order; the simulator's disk tears, loses and reorders them.
//
//   free --prepare: head--> ready --> open --full--> closing: footer --> sealed --oldest--> emptying --> free
//
// A restart goes on in the segment that an earlier life wrote last: else each start would leave one that is half empty.
//
// A record is published, that is found, after its bytes are on the disk (`always`: and synced). Space comes back whole
// segments at a time, oldest first; records that were hit since they were written move to the open segment before, as
// far as `move_share` of a segment goes: the disk writes at most 1 / (1 - move_share) of what callers write, and heads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "store/format.h"
#include "store/record_index.h"

namespace memserve::store {

enum class Sync : uint8_t { none, segment, always };

struct LogOptions {
  uint32_t segments = 0;
  uint64_t segment_bytes = 0;  // whole pages
  double move_share = 0.25;
  Sync sync = Sync::segment;
};

// Where a record goes. The host writes `head(ticket)` at `offset` and, unless it is short, the payload right behind.
struct Ticket {
  uint64_t id = 0;
  uint64_t offset = 0;  // bytes from the start of the disk
  uint32_t pages = 0;   // the head's included
};

// What the host has to do.
struct Command {
  enum class Kind : uint8_t { write, sync, move };
  uint64_t id = 0;
  Kind kind = Kind::write;
  uint64_t offset = 0;
  std::vector<uint8_t> data;  // write: whole pages
  Entry entry;                // move: read this record, then `place_moved` it
};

// A record that was found. Its segment stays as it is until `let_go`.
struct Found {
  uint64_t offset = 0;  // of the payload, in bytes; in the head's page when short
  uint64_t head_offset = 0;
  uint32_t length = 0;
  uint32_t encoded_bytes = 0;  // whole pages that the encoded payload takes; 0: it is as it is
  uint32_t segment = 0;
  uint64_t seal = 0;
  uint32_t scope = 0;
  uint16_t name_bytes = 0;
};

// Reads one disk at a start (recovery.cpp).
class Source {
 public:
  virtual ~Source() = default;
  // False: those bytes cannot be read.
  virtual bool read(uint64_t offset, uint8_t* to, size_t bytes) = 0;
};

// Every record of this key with a lower number is gone.
struct Removal {
  Hash128 key;
  uint64_t number;
};
static_assert(sizeof(Removal) == 24);

struct Counters {
  uint64_t records_written = 0, payload_bytes = 0, moved_bytes = 0, meta_bytes = 0;
  uint64_t records_evicted = 0, records_moved = 0, records_recovered = 0, records_torn = 0;
};

class SegmentLog {
 public:
  SegmentLog(const LogOptions& options, const uint8_t secret[16]);

  // Reads back what an earlier life left. True: this disk is one of ours, with these options. Else nothing has changed.
  static std::optional<Superblock> read_superblock(Source& source);
  // The version that its superblock has, known or not; 0: there is none.
  static uint32_t superblock_version(Source& source);
  void recover(Source& source, const Superblock& super);
  // Formats an empty disk: writes the superblock, by commands.
  void format();

  // Room for a record, at the end of the open segment. Nothing: no segment is ready; the caller drops the record, or
  // waits until commands are done. `length` is at most `record_bytes_max()`. `encoded_bytes`: of the payload as it will
  // be written, 0: as it is; not before `takes_encoded()`.
  std::optional<Ticket> place(Hash128 key, uint32_t length, const std::string& name, uint32_t scope, uint64_t seal,
                              uint32_t encoded_bytes = 0);
  // Encoded payloads are to come: the superblock says so first.
  void expect_encoded();
  bool takes_encoded() const { return version_ == kVersionEncoded && super_written_ >= encoded_from_ && !super_under_way_; }
  // The same for a move, with what the host read; nothing: the record has gone meanwhile.
  std::optional<Ticket> place_moved(uint64_t command, const std::string& name);
  // The record's first page; `payload` is copied behind the head when it is short. `page` has kPage bytes.
  void write_head(uint64_t ticket, const std::string& name, const uint8_t* payload, uint8_t* page,
                  size_t payload_bytes) const;
  // Nothing: the page begins no record of this disk. The name follows the head.
  std::optional<RecordHead> read_head(const uint8_t* page) const;
  // The record's bytes are written, or have failed. The order of these calls is the order of completion.
  void finish_record(uint64_t ticket, bool written);

  std::optional<Found> hold(Hash128 key, bool counts = true);
  void let_go(uint32_t segment);
  // What is known of a record, which may be written over at any time: no hit, nothing is held.
  std::optional<Found> look(Hash128 key) const;
  // A hit of each of those that are here.
  void touch(std::span<const Hash128> keys);
  bool has(Hash128 key) const;
  bool remove(Hash128 key);
  // Removes every record.
  void purge();

  std::vector<Command> take_commands();
  void finish_command(uint64_t command, bool done);
  // A full open segment is closed by itself; this closes one that is not, so that a clean end leaves nothing to scan.
  void close_open();

  // Since the last call: tickets that have ended, and whether their record is found now; keys that are found no
  // longer because their segment was needed, or all was purged.
  std::vector<std::pair<uint64_t, bool>> take_ended();
  std::vector<Hash128> take_evicted();

  const RecordIndex& index() const { return index_; }
  const Counters& counters() const { return counters_; }
  const LogOptions& options() const { return options_; }
  const uint8_t* secret() const { return secret_; }
  uint64_t disk_bytes() const { return kHeadBytes + options_.segments * options_.segment_bytes; }
  size_t record_bytes_max() const;
  size_t segments_free() const;
  bool idle() const;    // nothing is under way
  // Of all keys, and of what was evicted: a restart finds none of it (after a loss of power it may, unless synced).
  bool removals_written() const;
  bool broken() const;  // the disk fails again and again: nothing more is written
  size_t nbytes() const;
  void check_invariants() const;

 private:
  enum class State : uint8_t { free, preparing, ready, open, closing, sealed, emptying, reopening };

  struct Segment {
    State state = State::free;
    uint64_t serial = 0;
    uint32_t pages_used = 0;                // the head's included
    uint32_t pending = 0;                   // tickets without an end
    uint32_t pins = 0;
    uint32_t moves = 0;                     // out of it, without an end
    bool stale = false;                     // purged: free as soon as nothing holds it
    bool footer_under_way = false;
    bool outdated = false;                  // emptied, and a restart would find what it held: its head is the old one
    bool unsynced_moves = false;            // what moved away lies nowhere else yet
    bool sync_under_way = false;
    std::vector<FooterEntry> footer;        // while it is open, closing or reopening
    std::vector<Hash128> keys;              // afterwards
  };

  struct Pending {
    uint32_t segment = 0;
    uint64_t serial = 0;
    FooterEntry entry;
    std::optional<Entry> moved_from;
    bool purged = false;   // nothing of its segment counts any more
    bool removed = false;  // its key was, while it was written
  };

  struct Step {  // a command that is under way
    enum class Kind : uint8_t { super, sync_super, head, sync_head, sync_data, footer, sync_footer, sync_moves, publish, page, move, reopen, sync_reopen };
    Kind kind = Kind::super;
    uint32_t segment = 0;
    Entry entry;                    // move
    std::vector<uint64_t> tickets;  // publish
    uint32_t page = 0;              // page
    std::vector<uint8_t> data = {};
  };

  uint64_t offset_of(uint32_t segment, uint32_t page) const {
    return kHeadBytes + segment * options_.segment_bytes + page * uint64_t{kPage};
  }
  size_t segment_pages() const { return options_.segment_bytes / kPage; }

  // segment_log.cpp: records
  std::optional<Ticket> append(const FooterEntry& entry, size_t pages, std::optional<Entry> moved_from, bool reserve);
  bool room_in_open(size_t pages, size_t entries) const;
  void publish(uint64_t ticket);
  void drop(uint64_t ticket);
  void drop_and_wipe(uint64_t ticket);
  void write_removals();

  // lifecycle.cpp: segments
  void tend();
  void open_next();
  void prepare(uint32_t segment);
  void close(uint32_t segment);
  void reopen(uint32_t segment);
  void end_reopening(bool done);
  void write_footer(uint32_t segment);
  void seal(uint32_t segment);
  void empty_oldest();
  void finish_emptying();
  static void renew(Segment& segment);
  void set_free(uint32_t segment);
  void drop_stale();
  void sync_tickets();
  void write_super();
  void write_page(uint32_t segment, uint32_t page, const std::vector<uint8_t>& data);
  void failed_command(const Step& step);
  uint64_t command(Command::Kind kind, Step step, uint64_t offset = 0, std::vector<uint8_t> data = {});

  // recovery.cpp
  struct Scanned {
    uint32_t segment = 0;
    uint32_t pages_used = 1;          // up to the end of the last record that was begun
    bool unread = false;              // some of it can't be read now, and perhaps later
    std::vector<uint32_t> torn = {};  // pages where a record begins that is not whole
  };

  bool read_footer(Source& source, uint32_t segment, bool keep = false);
  Scanned scan(Source& source, uint32_t segment);
  void recovered(const FooterEntry& entry, uint32_t segment);
  void settle(Source& source, std::vector<Scanned>& scanned);
  void go_on_in(const Scanned& last);
  void reopen_newest(Source& source);

  LogOptions options_;
  uint8_t secret_[16];
  Checksum checksum_;
  RecordIndex index_;
  Counters counters_;
  std::vector<Segment> segments_;
  std::optional<uint32_t> open_, emptying_, reopening_;
  std::deque<uint32_t> ready_, free_;
  std::vector<uint32_t> closing_, stale_;
  std::set<std::pair<uint64_t, uint32_t>> sealed_;  // by serial number, oldest first
  bool preparing_ = false;
  std::unordered_map<uint64_t, Pending> pending_;
  std::unordered_map<uint64_t, Step> steps_;
  std::vector<Command> commands_;
  std::vector<std::pair<uint64_t, bool>> ended_;
  std::vector<uint64_t> unsynced_;
  std::vector<Hash128> evicted_;
  std::vector<Removal> removals_;
  uint64_t next_id_ = 1, next_serial_ = 1, next_number_ = 1;
  uint64_t super_written_ = 0, super_wanted_ = 0, epoch_ = 1;
  uint32_t version_ = kVersionPlain;
  uint64_t encoded_from_ = 0;  // when so many superblocks are written, both copies have the version
  bool super_under_way_ = false, syncing_ = false;
  bool started_ = false;  // the superblock says that this life has begun: from then on segments are written
  uint32_t failures_ = 0;  // commands in a row
  uint32_t outdated_ = 0;  // segments
  std::vector<Removal> removed_;  // while it recovers
};

}  // namespace memserve::store

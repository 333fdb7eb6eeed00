#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>

#include "bind/keys.h"
#include "scheduling/sequence.h"
#include "store/frequency.h"
#include "store/segment_log.h"

namespace memserve {

namespace {

using namespace store;

constexpr size_t kRecordHeadBytes = sizeof(RecordHead);

std::string text_of(const nb::bytes& name) { return std::string(name.c_str(), name.size()); }

class FileSource : public Source {
 public:
  explicit FileSource(int fd) : fd_(fd) {}
  bool read(uint64_t offset, uint8_t* to, size_t bytes) override {
    while (bytes > 0) {
      const ssize_t got = pread(fd_, to, bytes, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      to += got;
      offset += static_cast<uint64_t>(got);
      bytes -= static_cast<size_t>(got);
    }
    return true;
  }

 private:
  int fd_;
};

// `read(offset, count)` gives bytes, or None.
class CallSource : public Source {
 public:
  explicit CallSource(nb::callable read) : read_(std::move(read)) {}
  bool read(uint64_t offset, uint8_t* to, size_t bytes) override {
    const nb::object got = read_(offset, bytes);
    if (got.is_none()) return false;
    const auto data = nb::cast<nb::bytes>(got);
    if (data.size() != bytes) return false;
    std::memcpy(to, data.data(), bytes);
    return true;
  }

 private:
  nb::callable read_;
};

std::optional<Superblock> read_super(nb::object source) {
  if (nb::isinstance<nb::int_>(source)) {
    FileSource file(nb::cast<int>(source));
    return SegmentLog::read_superblock(file);
  }
  CallSource call(nb::cast<nb::callable>(source));
  return SegmentLog::read_superblock(call);
}

uint32_t version_of(nb::object source) {
  if (nb::isinstance<nb::int_>(source)) {
    FileSource file(nb::cast<int>(source));
    return SegmentLog::superblock_version(file);
  }
  CallSource call(nb::cast<nb::callable>(source));
  return SegmentLog::superblock_version(call);
}

void make(SegmentLog* self, uint32_t segments, uint64_t segment_bytes, nb::bytes secret, double move_share, int sync) {
  if (segments < 4 || segments > UINT16_MAX) throw nb::value_error("a log needs 4 to 65535 segments");
  if (segment_bytes % kPage || segment_bytes < 8 * kPage || segment_bytes > uint64_t{1} << 31) {
    throw nb::value_error("a segment must be whole pages of 4 KiB, from 8 pages to 2 GiB");
  }
  if (!(move_share >= 0 && move_share <= 0.5)) throw nb::value_error("move_share must be from 0 to 0.5");
  if (sync < 0 || sync > 2) throw nb::value_error("sync must be 0, 1 or 2");
  new (self) SegmentLog({segments, segment_bytes, move_share, static_cast<Sync>(sync)},
                        static_cast<const uint8_t*>((key_of(secret), secret.data())));
}

void recover(SegmentLog& self, nb::object source) {
  const auto super = read_super(source);
  if (!super || super->segments != self.options().segments || super->segment_bytes != self.options().segment_bytes ||
      std::memcmp(super->secret, self.secret(), sizeof super->secret) != 0) {
    throw nb::value_error("that disk is another log's");
  }
  if (nb::isinstance<nb::int_>(source)) {
    FileSource file(nb::cast<int>(source));
    const nb::gil_scoped_release unlocked;
    self.recover(file, *super);
  } else {
    CallSource call(nb::cast<nb::callable>(source));
    self.recover(call, *super);
  }
}

std::optional<Ticket> place(SegmentLog& self, nb::bytes key, uint32_t length, nb::bytes name, uint32_t scope,
                            uint64_t seal, uint32_t encoded_bytes) {
  if (encoded_bytes > 0 && (units_of(length, encoded_bytes) == 0 || !self.takes_encoded())) {
    throw nb::value_error("an encoded payload takes fewer pages, and not before takes_encoded");
  }
  if (length > self.record_bytes_max()) throw nb::value_error("the record is longer than a segment takes");
  if (name.size() > kNameBytesMax) throw nb::value_error("a name must have at most 1,024 bytes");
  return self.place(key_of(key), length, text_of(name), scope, seal, encoded_bytes);
}

nb::bytes head_page(const SegmentLog& self, uint64_t ticket, nb::bytes name, nb::bytes payload) {
  std::vector<uint8_t> page(kPage);
  self.write_head(ticket, text_of(name), static_cast<const uint8_t*>(payload.data()), page.data(), payload.size());
  return nb::bytes(page.data(), page.size());
}

nb::object command_tuple(const Command& command) {
  if (command.kind == Command::Kind::move) {
    const Entry& entry = command.entry;
    return nb::make_tuple(command.id, static_cast<int>(command.kind), command.offset, bytes_of(entry.key));
  }
  return nb::make_tuple(command.id, static_cast<int>(command.kind), command.offset,
                        nb::bytes(command.data.data(), command.data.size()));
}

nb::list take_commands(SegmentLog& self) {
  nb::list commands;
  for (const Command& command : self.take_commands()) commands.append(command_tuple(command));
  return commands;
}

nb::bytes take_evicted(SegmentLog& self) {
  const std::vector<Hash128> evicted = self.take_evicted();
  return joined_keys(evicted.size(), [&](auto add) { std::for_each(evicted.begin(), evicted.end(), add); });
}

nb::dict counters(const SegmentLog& self) {
  const Counters& counters = self.counters();
  nb::dict all;
  all["records_written"] = counters.records_written;
  all["records_moved"] = counters.records_moved;
  all["records_evicted"] = counters.records_evicted;
  all["records_recovered"] = counters.records_recovered;
  all["records_torn"] = counters.records_torn;
  all["payload_bytes"] = counters.payload_bytes;
  all["moved_bytes"] = counters.moved_bytes;
  all["meta_bytes"] = counters.meta_bytes;
  return all;
}

// `(key, length, scope, name, seal, number)` of a record's first page; None: the page begins no record.
nb::object read_head(const SegmentLog& self, nb::bytes page) {
  if (page.size() < kPage) throw nb::value_error("a head must be a page of 4 KiB");
  const auto head = self.read_head(static_cast<const uint8_t*>(page.data()));
  if (!head) return nb::none();
  const char* const name = page.c_str() + sizeof(RecordHead);
  return nb::make_tuple(bytes_of(head->key), head->length, head->scope, nb::bytes(name, head->name_bytes), head->seal);
}

nb::bytes all_keys(const SegmentLog& self) {
  return joined_keys(self.index().size(), [&](auto add) { self.index().each([&](const Entry& entry) { add(entry.key); }); });
}

}  // namespace

void bind_segment_log(nb::module_& m) {
  nb::class_<Ticket>(m, "Ticket")
      .def_ro("id", &Ticket::id)
      .def_ro("offset", &Ticket::offset)
      .def_ro("pages", &Ticket::pages);
  nb::class_<Found>(m, "Found")
      .def_ro("offset", &Found::offset)
      .def_ro("head_offset", &Found::head_offset)
      .def_ro("length", &Found::length)
      .def_ro("encoded_bytes", &Found::encoded_bytes)
      .def_ro("segment", &Found::segment)
      .def_ro("seal", &Found::seal)
      .def_ro("scope", &Found::scope)
      .def_ro("name_bytes", &Found::name_bytes);
  nb::class_<SegmentLog>(m, "SegmentLog")
      .def_ro_static("HEAD_BYTES", &kRecordHeadBytes)
      .def_ro_static("FORMAT_VERSION", &kVersionEncoded)
      .def("__init__", &make, nb::arg("segments"), nb::arg("segment_bytes"), nb::arg("secret"),
           nb::arg("move_share") = 0.25, nb::arg("sync") = 1)
      .def_static("read_superblock", [](nb::object source) -> nb::object {
        const auto super = read_super(source);
        if (!super) return nb::none();
        return nb::make_tuple(super->segments, super->segment_bytes, nb::bytes(super->secret, sizeof super->secret));
      }, nb::arg("source"))
      .def_static("superblock_version", &version_of, nb::arg("source"))
      .def_static("saves_pages", [](uint32_t length, uint32_t encoded_bytes) {
        return units_of(length, encoded_bytes) > 0;
      }, nb::arg("length"), nb::arg("encoded_bytes"))
      .def("format", &SegmentLog::format)
      .def("expect_encoded", &SegmentLog::expect_encoded)
      .def_prop_ro("takes_encoded", &SegmentLog::takes_encoded)
      .def("recover", &recover, nb::arg("source"))
      .def("place", &place, nb::arg("key"), nb::arg("length"), nb::arg("name") = nb::bytes("", 0),
           nb::arg("scope") = 0, nb::arg("seal") = 0, nb::arg("encoded_bytes") = 0)
      .def("place_moved", [](SegmentLog& self, uint64_t command, nb::bytes name) {
        return self.place_moved(command, text_of(name));
      }, nb::arg("command"), nb::arg("name") = nb::bytes("", 0))
      .def("head", &head_page, nb::arg("ticket"), nb::arg("name") = nb::bytes("", 0),
           nb::arg("payload") = nb::bytes("", 0))
      .def("read_head", &read_head, nb::arg("page"))
      .def("finish_record", &SegmentLog::finish_record, nb::arg("ticket"), nb::arg("written"))
      .def("hold", [](SegmentLog& self, nb::bytes key, bool counts) { return self.hold(key_of(key), counts); },
           nb::arg("key"), nb::arg("counts") = true)
      .def("look", [](const SegmentLog& self, nb::bytes key) { return self.look(key_of(key)); }, nb::arg("key"))
      .def("touch", [](SegmentLog& self, nb::bytes keys) { self.touch(keys_of(keys)); }, nb::arg("keys"))
      .def("let_go", &SegmentLog::let_go, nb::arg("segment"))
      .def("__contains__", [](const SegmentLog& self, nb::bytes key) { return self.has(key_of(key)); })
      .def("__len__", [](const SegmentLog& self) { return self.index().size(); })
      .def("keys", &all_keys)
      .def("remove", [](SegmentLog& self, nb::bytes key) { return self.remove(key_of(key)); }, nb::arg("key"))
      .def("purge", &SegmentLog::purge)
      .def("take_commands", &take_commands)
      .def("finish_command", &SegmentLog::finish_command, nb::arg("command"), nb::arg("done"))
      .def("close_open", &SegmentLog::close_open)
      .def("take_ended", &SegmentLog::take_ended)
      .def("take_evicted", &take_evicted)
      .def("counters", &counters)
      .def("check_invariants", &SegmentLog::check_invariants)
      .def_prop_ro("record_bytes_max", &SegmentLog::record_bytes_max)
      .def_prop_ro("disk_bytes", &SegmentLog::disk_bytes)
      .def_prop_ro("segments_free", &SegmentLog::segments_free)
      .def_prop_ro("idle", &SegmentLog::idle)
      .def_prop_ro("removals_written", &SegmentLog::removals_written)
      .def_prop_ro("broken", &SegmentLog::broken)
      .def_prop_ro("nbytes", &SegmentLog::nbytes);
  nb::class_<Frequency>(m, "Frequency")
      .def(nb::init<size_t>(), nb::arg("keys"))
      .def("note", [](Frequency& self, nb::bytes key) { return self.note(key_of(key)); }, nb::arg("key"))
      .def_prop_ro("nbytes", &Frequency::nbytes);
}

}  // namespace memserve

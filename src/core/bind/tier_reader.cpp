#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/keys.h"
#include "scheduling/sequence.h"
#include "store/tier_reader.h"

namespace memserve {

namespace {

using namespace store;

std::string_view view_of(nb::handle name) {
  char* text = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(name.ptr(), &text, &size) != 0) throw nb::python_error();
  return {text, static_cast<size_t>(size)};
}

nb::object hold(TierReader& self, nb::bytes key, nb::bytes name) {
  const auto held = self.hold(key_of(key), view_of(name));
  if (!held) return nb::none();
  return nb::make_tuple(reinterpret_cast<uintptr_t>(held->data), held->length, held->pin);
}

void let_go(TierReader& self, uint32_t pin) {
  if (!self.let_go(pin)) throw nb::value_error("that pin holds nothing (let go of twice?)");
}

nb::bytes where(const TierReader& self, nb::bytes keys) {
  const auto all = keys_of(keys);
  nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(all.size())));
  if (!out.is_valid()) throw nb::python_error();
  self.where(all.data(), all.size(), reinterpret_cast<uint8_t*>(PyBytes_AsString(out.ptr())));
  return out;
}

size_t prefix(const TierReader& self, nb::bytes keys) {
  const auto all = keys_of(keys);
  return self.prefix(all.data(), all.size());
}

// Writable buffers of Python, for one call.
class Targets {
 public:
  explicit Targets(nb::list targets) : views_(targets.size()) {
    for (size_t i = 0; i < views_.size(); ++i) {
      if (PyObject_GetBuffer(nb::handle(targets[i]).ptr(), &views_[i], PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) {
        throw nb::python_error();
      }
      ++open_;
    }
  }
  ~Targets() {
    while (open_ > 0) PyBuffer_Release(&views_[--open_]);
  }
  Targets(const Targets&) = delete;
  Targets& operator=(const Targets&) = delete;
  const Py_buffer& operator[](size_t i) const { return views_[i]; }

 private:
  std::vector<Py_buffer> views_;
  size_t open_ = 0;
};

nb::list lengths(TierReader& self, nb::bytes keys, nb::list names) {
  const auto all = keys_of(keys);
  if (names.size() != all.size()) throw nb::value_error("keys and names differ in number");
  nb::list lengths;
  for (size_t i = 0; i < all.size(); ++i) lengths.append(self.length(all[i], view_of(names[i])));
  return lengths;
}

// What one call copies, and the objects that own its bytes meanwhile.
class Copies {
 public:
  Copies(nb::bytes keys, nb::list names, nb::list targets) : open_(targets), kept_(names) {
    const auto all = keys_of(keys);
    if (kept_.size() != all.size() || targets.size() != all.size()) {
      throw nb::value_error("keys, names and targets differ in number");
    }
    items_.reserve(all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      items_.push_back({all[i], view_of(nb::handle(kept_[i])), static_cast<uint8_t*>(open_[i].buf),
                        static_cast<size_t>(open_[i].len), -1});
    }
  }
  std::vector<TierReader::Copy>& items() { return items_; }
  nb::list lengths() const {
    nb::list lengths;
    for (const TierReader::Copy& item : items_) lengths.append(item.length);
    return lengths;
  }

 private:
  const Targets open_;
  const nb::tuple kept_;  // the list may change while others run
  std::vector<TierReader::Copy> items_;
};

nb::list copy(TierReader& self, nb::bytes keys, nb::list names, nb::list targets, int threads) {
  Copies copies(keys, names, targets);
  {
    const nb::gil_scoped_release unlocked;
    self.copy(copies.items(), threads);
  }
  return copies.lengths();
}

nb::object copy_all(TierReader& self, nb::bytes keys, nb::list names, nb::list targets, int threads) {
  Copies copies(keys, names, targets);
  bool done = false;
  {
    const nb::gil_scoped_release unlocked;
    done = self.copy_all(copies.items(), threads);
  }
  if (!done) return nb::none();
  return copies.lengths();
}

// The watcher is called with the moment's name.
void watch(TierReader& self, std::optional<std::function<void(const char*)>> watcher) {
  if (!watcher) {
    self.watch({});
    return;
  }
  self.watch([call = std::move(*watcher)](TierReader::Moment moment) {
    constexpr const char* kNames[] = {"seen", "pinned", "copied"};
    call(kNames[static_cast<size_t>(moment)]);
  });
}

}  // namespace

void bind_tier_reader(nb::module_& m) {
  nb::class_<TierReader>(m, "TierReader", "A client's side of a memory tier.")
      .def(nb::init<const std::string&, const std::string&, const std::string&>(), nb::arg("data_path"),
           nb::arg("index_path"), nb::arg("client_path"))
      .def("hold", &hold, nb::arg("key"), nb::arg("name") = nb::bytes("", 0))
      .def("let_go", &let_go, nb::arg("pin"))
      .def("where", &where, nb::arg("keys"))
      .def("prefix", &prefix, nb::arg("keys"))
      .def("lengths", &lengths, nb::arg("keys"), nb::arg("names"))
      .def("copy", &copy, nb::arg("keys"), nb::arg("names"), nb::arg("targets"), nb::arg("threads") = 1)
      .def("copy_all", &copy_all, nb::arg("keys"), nb::arg("names"), nb::arg("targets"), nb::arg("threads") = 1)
      .def("watch", &watch, nb::arg("watcher").none())
      .def_prop_ro("closed", &TierReader::closed)
      .def_prop_ro("held", &TierReader::held)
      .def_prop_ro("values_max", &TierReader::values_max)
      .def_prop_ro("bytes_max", &TierReader::bytes_max);
}

}  // namespace memserve

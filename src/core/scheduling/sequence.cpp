#include "scheduling/sequence.h"

#include <algorithm>
#include <limits>
#include <string>

namespace memserve {

namespace {

int32_t narrow(int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw nb::value_error(("integer " + std::to_string(value) + " does not fit in 32 bits").c_str());
  }
  return static_cast<int32_t>(value);
}

// Whether a buffer's format is a native signed integer of its item size.
bool is_signed_integer(const Py_buffer& buffer) {
  const char* format = buffer.format ? buffer.format : "B";
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  return (*format == 'i' || *format == 'l' || *format == 'q') && format[1] == '\0';
}

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  if (flags & PyBUF_WRITABLE) {
    PyErr_SetString(PyExc_BufferError, "BlockIds is immutable");
    view->obj = nullptr;
    return -1;
  }
  const std::span<const int32_t> ids = nb::inst_ptr<BlockIds>(self)->span();
  static const int32_t nothing = 0;
  const auto bytes = static_cast<Py_ssize_t>(ids.size_bytes());
  void* start = const_cast<int32_t*>(ids.empty() ? &nothing : ids.data());
  if (PyBuffer_FillInfo(view, self, start, bytes, 1, flags & ~PyBUF_FORMAT) != 0) return -1;
  // FillInfo describes bytes; the shape of int32 items is kept in `internal` until the buffer is released.
  auto* shape = new Py_ssize_t[2]{static_cast<Py_ssize_t>(ids.size()), sizeof(int32_t)};
  view->internal = shape;
  view->itemsize = sizeof(int32_t);
  if (flags & PyBUF_FORMAT) view->format = const_cast<char*>("i");
  if (flags & PyBUF_ND) view->shape = shape;
  if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) view->strides = shape + 1;
  return 0;
}

void release_buffer(PyObject*, Py_buffer* view) { delete[] static_cast<Py_ssize_t*>(view->internal); }

PyType_Slot block_ids_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
    {0, nullptr},
};

int32_t item_at(const BlockIds& ids, Py_ssize_t index) {
  const auto size = static_cast<Py_ssize_t>(ids.size());
  if (index < 0) index += size;
  if (index < 0 || index >= size) throw nb::index_error("BlockIds index out of range");
  return ids.span()[index];
}

BlockIds slice_of(const BlockIds& ids, const nb::slice& slice) {
  const auto [start, stop, step, length] = slice.compute(ids.size());
  (void)stop;
  std::vector<int32_t> picked(length);
  for (size_t i = 0; i < length; ++i) picked[i] = ids.span()[start + static_cast<Py_ssize_t>(i) * step];
  return BlockIds(std::move(picked));
}

bool equals(const BlockIds& ids, nb::handle other) {
  if (!nb::isinstance<BlockIds>(other) && !PySequence_Check(other.ptr())) return false;
  try {
    const IntSpan right(other);
    return std::ranges::equal(ids.span(), right.span());
  } catch (const nb::python_error&) {
    return false;  // holds something that is no int: not equal
  } catch (const nb::builtin_exception&) {
    return false;
  }
}

}  // namespace

IntSpan::IntSpan(nb::handle source) {
  if (nb::isinstance<BlockIds>(source)) {
    const std::span<const int32_t> ids = nb::inst_ptr<BlockIds>(source)->span();
    data_ = ids.data();
    size_ = ids.size();
    return;
  }
  if (PyObject_CheckBuffer(source.ptr()) && read_buffer(source)) return;
  read_sequence(source);
}

IntSpan::~IntSpan() {
  if (holds_buffer_) PyBuffer_Release(&buffer_);
}

bool IntSpan::read_buffer(nb::handle source) {
  if (PyObject_GetBuffer(source.ptr(), &buffer_, PyBUF_ND | PyBUF_FORMAT) != 0) {
    PyErr_Clear();  // not C-contiguous: read it item by item
    return false;
  }
  holds_buffer_ = true;
  const bool usable = buffer_.ndim == 1 && is_signed_integer(buffer_);
  if (!usable || (buffer_.itemsize != 4 && buffer_.itemsize != 8)) {
    PyBuffer_Release(&buffer_);
    holds_buffer_ = false;
    throw nb::type_error("expected a one-dimensional buffer of int32 or int64, or a sequence of int");
  }
  size_ = static_cast<size_t>(buffer_.len / buffer_.itemsize);
  if (buffer_.itemsize == 4) {
    data_ = static_cast<const int32_t*>(buffer_.buf);
    return true;
  }
  const auto* wide = static_cast<const int64_t*>(buffer_.buf);
  copy_.resize(size_);
  for (size_t i = 0; i < size_; ++i) copy_[i] = static_cast<int32_t>(wide[i]);
  for (size_t i = 0; i < size_; ++i) {
    if (copy_[i] != wide[i]) {
      PyBuffer_Release(&buffer_);
      holds_buffer_ = false;
      narrow(wide[i]);
    }
  }
  data_ = copy_.data();
  return true;
}

void IntSpan::read_item(PyObject* item) {
  const long long value = PyLong_AsLongLong(item);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  copy_.push_back(narrow(value));
}

// Lists of plain ints are read in place: that runs no code that could change the list.
bool IntSpan::read_list(nb::handle source) {
  if (!PyList_CheckExact(source.ptr())) return false;
  const Py_ssize_t size = PyList_Size(source.ptr());
  copy_.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* const item = PyList_GetItem(source.ptr(), i);
    if (!PyLong_CheckExact(item)) return false;
    read_item(item);
  }
  return true;
}

void IntSpan::read_sequence(nb::handle source) {
  if (!read_list(source)) {
    const nb::object list = nb::steal(PySequence_List(source.ptr()));
    if (!list.is_valid()) throw nb::python_error();
    copy_.clear();
    for (Py_ssize_t i = 0; i < PyList_Size(list.ptr()); ++i) read_item(PyList_GetItem(list.ptr(), i));
  }
  data_ = copy_.data();
  size_ = copy_.size();
}

nb::object list_from(std::span<const int32_t> ids) {
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(ids.size())));
  if (!list.is_valid()) throw nb::python_error();
  for (size_t i = 0; i < ids.size(); ++i) {
    PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(ids[i]));
  }
  return list;
}

void bind_sequences(nb::module_& m) {
  nb::class_<BlockIds>(m, "BlockIds", nb::type_slots(block_ids_slots),
                       "An immutable sequence of int32 block ids with a zero-copy buffer (``numpy.asarray``).")
      .def("__init__",
           [](BlockIds* self, nb::handle ids) {
             const IntSpan span(ids);
             new (self) BlockIds(std::vector<int32_t>(span.data(), span.data() + span.size()));
           },
           nb::arg("ids") = nb::tuple())
      .def("__len__", &BlockIds::size)
      .def("__getitem__", &item_at)
      .def("__getitem__", &slice_of)
      .def("__eq__", [](const BlockIds& self, nb::handle other) { return equals(self, other); },
           nb::arg("other").none())
      .def("__iter__", [](const BlockIds& self) { return nb::iter(list_from(self.span())); })
      .def("tolist", [](const BlockIds& self) { return list_from(self.span()); })
      .def("__repr__", [](const BlockIds& self) {
        return nb::str("BlockIds({})").format(list_from(self.span()));
      });
}

}  // namespace memserve

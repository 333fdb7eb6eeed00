// The scheduler's hot loops: one pass over all decoding sequences that only changes numbers.
#include "scheduling/sequence.h"

#include <structmember.h>

#include <cstddef>
#include <vector>

namespace memserve {

namespace {

// The head of every `instance.sequence.Sequence`. Plain fields: Python documents their meaning and invariants.
struct Row {
  PyObject_HEAD
  PyObject* phase;  // this and the next three: owned, null until set
  PyObject* out;
  PyObject* draw;
  PyObject* stops;
  long long prompt_tokens;
  long long computed;
  long long inflight;
  long long left;
  long long scheduled_step;
  long long writable_until;
};

PyTypeObject* row_type = nullptr;

PyMemberDef members[] = {
    {"phase", T_OBJECT_EX, offsetof(Row, phase), 0, nullptr},
    {"out", T_OBJECT_EX, offsetof(Row, out), 0, nullptr},
    {"draw", T_OBJECT_EX, offsetof(Row, draw), 0, nullptr},
    {"stops", T_OBJECT_EX, offsetof(Row, stops), 0, nullptr},
    {"prompt_tokens", T_LONGLONG, offsetof(Row, prompt_tokens), 0, nullptr},
    {"computed", T_LONGLONG, offsetof(Row, computed), 0, nullptr},
    {"inflight", T_LONGLONG, offsetof(Row, inflight), 0, nullptr},
    {"left", T_LONGLONG, offsetof(Row, left), 0, nullptr},
    {"scheduled_step", T_LONGLONG, offsetof(Row, scheduled_step), 0, nullptr},
    {"writable_until", T_LONGLONG, offsetof(Row, writable_until), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  const auto* row = reinterpret_cast<Row*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(row->phase);
  Py_VISIT(row->out);
  Py_VISIT(row->draw);
  Py_VISIT(row->stops);
  return 0;
}

int clear(PyObject* self) {
  auto* row = reinterpret_cast<Row*>(self);
  Py_CLEAR(row->phase);
  Py_CLEAR(row->out);
  Py_CLEAR(row->draw);
  Py_CLEAR(row->stops);
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyType_Slot type_slots[] = {
    {Py_tp_members, members},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {0, nullptr},
};

PyType_Spec type_spec = {"memserve._core.SequenceRow", sizeof(Row), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, type_slots};

PyObject* as_object(Row* row) { return reinterpret_cast<PyObject*>(row); }

nb::list new_list(size_t size) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(size));
  if (list == nullptr) throw nb::python_error();
  return nb::steal<nb::list>(list);
}

void append(PyObject* list, PyObject* item) {
  if (PyList_Append(list, item) != 0) throw nb::python_error();
}

// The rows of a list, borrowed. Call it after the last `new_list`, which may run the garbage collector and thereby any
// code. Nothing else here runs Python code.
std::vector<Row*> rows_of(const nb::list& sequences) {
  std::vector<Row*> rows(sequences.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    PyObject* const item = PyList_GetItem(sequences.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyObject_TypeCheck(item, row_type)) throw nb::type_error("expected a list of SequenceRow");
    Row* const row = rows[i] = reinterpret_cast<Row*>(item);
    const bool ready = row->out != nullptr && PyList_Check(row->out) && row->draw != nullptr &&
                       PyTuple_Check(row->draw) && row->stops != nullptr && PyFrozenSet_Check(row->stops);
    if (!ready) throw nb::type_error("a SequenceRow needs a list `out`, a tuple `draw` and a frozenset `stops`");
  }
  return rows;
}

// Whether a sequence that stops at `stops`, a set of ints, may end with `token`. Comparing ints runs no Python code.
bool may_stop(PyObject* stops, PyObject* token) {
  if (PySet_Size(stops) == 0) return false;
  if (!PyLong_CheckExact(token)) return true;
  const int found = PySet_Contains(stops, token);
  if (found < 0) throw nb::python_error();
  return found != 0;
}

nb::list out_of_room(const nb::list& sequences) {
  const nb::list found = new_list(0);
  for (Row* row : rows_of(sequences)) {
    if (row->computed >= row->writable_until) append(found.ptr(), as_object(row));
  }
  return found;
}

nb::tuple plan_decodes(const nb::list& sequences, long long step_id) {
  const size_t count = sequences.size();
  const nb::list starts = new_list(count), slots = new_list(count), draws = new_list(count), ended = new_list(0);
  const std::vector<Row*> rows = rows_of(sequences);
  for (const Row* row : rows) {
    if (PyTuple_Size(row->draw) != 1) throw nb::value_error("a decoding sequence must draw only for its own slot");
  }
  for (size_t i = 0; i < count; ++i) {
    Row* const row = rows[i];
    const auto place = static_cast<Py_ssize_t>(i);
    PyObject* const start = PyLong_FromLongLong(row->computed);
    if (start == nullptr) throw nb::python_error();
    PyList_SetItem(starts.ptr(), place, start);
    PyList_SetItem(slots.ptr(), place, Py_NewRef(PyTuple_GetItem(row->draw, 0)));
    PyList_SetItem(draws.ptr(), place, Py_NewRef(row->draw));
    row->computed += 1;
    row->inflight += 1;
    row->scheduled_step = step_id;
    row->left -= 1;
    if (row->left == 0) append(ended.ptr(), as_object(row));
  }
  return nb::make_tuple(starts, slots, draws, ended);
}

// Appends a token to each sequence that has not finished. Returns the places of all sequences that need more handling:
// it was their first token, it may stop them, or their phase is not `decoding`.
nb::list take_tokens(const nb::list& sequences, const nb::list& tokens, nb::handle decoding, nb::handle finished) {
  if (tokens.size() != sequences.size()) throw nb::value_error("one token for each sequence");
  const nb::list special = new_list(0);
  const std::vector<Row*> rows = rows_of(sequences);
  for (size_t i = 0; i < rows.size(); ++i) {
    Row* const row = rows[i];
    const auto place = static_cast<Py_ssize_t>(i);
    PyObject* const token = PyList_GetItem(tokens.ptr(), place);
    if (row->phase != finished.ptr()) {
      append(row->out, token);
      row->inflight -= 1;
    }
    const bool draws_on = row->phase == decoding.ptr() && PyList_Size(row->out) > 1 && !may_stop(row->stops, token);
    if (!draws_on) append(special.ptr(), nb::int_(place).ptr());
  }
  return special;
}

nb::tuple count_tokens(const nb::list& sequences) {
  long long all = 0, missing = 0;
  for (const Row* row : rows_of(sequences)) {
    const long long known = row->prompt_tokens + PyList_Size(row->out);
    all += known + row->inflight;
    missing += known - row->computed;
  }
  return nb::make_tuple(all, missing);
}

}  // namespace

void bind_rows(nb::module_& m) {
  const nb::object type = nb::steal(PyType_FromModuleAndSpec(m.ptr(), &type_spec, nullptr));
  if (!type.is_valid()) throw nb::python_error();
  m.attr("SequenceRow") = type;  // the module keeps it
  row_type = reinterpret_cast<PyTypeObject*>(type.ptr());
  m.def("out_of_room", &out_of_room, nb::arg("sequences"));
  m.def("plan_decodes", &plan_decodes, nb::arg("sequences"), nb::arg("step_id"));
  m.def("take_tokens", &take_tokens, nb::arg("sequences"), nb::arg("tokens"), nb::arg("decoding"),
        nb::arg("finished"));
  m.def("count_tokens", &count_tokens, nb::arg("sequences"));
}

}  // namespace memserve

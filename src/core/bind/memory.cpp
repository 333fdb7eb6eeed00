#include <nanobind/stl/string.h>

#include "pool/arena.h"
#include "pool/copy_engine.h"
#include "pool/lower_pages.h"
#include "scheduling/sequence.h"

namespace memserve {

namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Arena* arena = nb::inst_ptr<Arena>(self);
  return PyBuffer_FillInfo(view, self, arena->data(), static_cast<Py_ssize_t>(arena->nbytes()), 0, flags);
}

PyType_Slot arena_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {0, nullptr},
};

size_t positive(int64_t value, const char* message) {
  if (value < 1) throw nb::value_error(message);
  return static_cast<size_t>(value);
}

size_t block_offset(int32_t id, size_t block_bytes) {
  if (id < 0) throw nb::value_error("block ids must not be negative");
  return static_cast<size_t>(id) * block_bytes;
}

// `dst_ids` or `src_ids` None: that side is contiguous, with block i at i * block_bytes.
void copy_blocks(uintptr_t dst, uintptr_t src, int64_t block_bytes, nb::object src_ids, nb::object dst_ids,
                 int threads) {
  const size_t bytes = positive(block_bytes, "block_bytes must be positive");
  const nb::object some = src_ids.is_none() ? dst_ids : src_ids;
  if (some.is_none()) throw nb::value_error("give src_ids, dst_ids or both");
  const IntSpan from(some), to(dst_ids.is_none() ? some : dst_ids);
  if (from.size() != to.size()) throw nb::value_error("src_ids and dst_ids differ in length");
  std::vector<CopyPiece> pieces(from.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const size_t read_at = src_ids.is_none() ? i * bytes : block_offset(from.data()[i], bytes);
    const size_t write_at = dst_ids.is_none() ? i * bytes : block_offset(to.data()[i], bytes);
    pieces[i] = {reinterpret_cast<uint8_t*>(dst) + write_at, reinterpret_cast<const uint8_t*>(src) + read_at};
  }
  const nb::gil_scoped_release unlocked;
  copy_pieces(pieces, bytes, threads);
}

void copy_bytes(uintptr_t dst, uintptr_t src, int64_t count, int threads) {
  const CopyPiece piece{reinterpret_cast<uint8_t*>(dst), reinterpret_cast<const uint8_t*>(src)};
  const size_t bytes = positive(count, "count must be positive");
  const nb::gil_scoped_release unlocked;
  copy_pieces({&piece, 1}, bytes, threads);
}

template <class Enum, size_t count>
Enum named(const std::string& name, const char* const (&names)[count], const char* what) {
  for (size_t i = 0; i < count; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw nb::value_error((std::string("unknown ") + what + " " + name).c_str());
}

constexpr const char* kPageDtypes[] = {"float32", "bfloat16", "float16"};

template <bool is_down>
void convert_pages(const LowerPages& self, uintptr_t dst, uintptr_t src, nb::object from, nb::object to, int threads) {
  const IntSpan src_ids(from), dst_ids(to);
  if (src_ids.size() != dst_ids.size()) throw nb::value_error("src_ids and dst_ids differ in length");
  const size_t src_bytes = is_down ? self.page_bytes() : self.lower_page_bytes();
  const size_t dst_bytes = is_down ? self.lower_page_bytes() : self.page_bytes();
  std::vector<LowerPages::Piece> pieces(src_ids.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    pieces[i] = {reinterpret_cast<uint8_t*>(dst) + block_offset(dst_ids.data()[i], dst_bytes),
                 reinterpret_cast<const uint8_t*>(src) + block_offset(src_ids.data()[i], src_bytes)};
  }
  const nb::gil_scoped_release unlocked;
  is_down ? self.down(pieces, threads) : self.up(pieces, threads);
}

void bind_lower_pages(nb::module_& m) {
  nb::class_<LowerPages>(m, "LowerPages", "Converts pages of KV to codes of a byte or less, and back.")
      .def("__init__",
           [](LowerPages* self, int64_t kv_heads, int64_t head_dim_k, int64_t head_dim_v, int64_t block_tokens,
              const std::string& dtype, const std::string& lower_dtype) {
             const Scheme scheme = named<Scheme>(lower_dtype, kSchemeNames, "lower dtype");
             if (scheme == Scheme::as_computed) throw nb::value_error("unknown lower dtype auto");
             if (head_dim_v < 0) throw nb::value_error("head_dim_v must not be negative");  // of latents it is 0
             if (std::max(head_dim_k, head_dim_v) > kCodedDimMax) throw nb::value_error("a head is too large for codes");
             const CodedHead head = CodedHead::make(
                 scheme, static_cast<int>(positive(head_dim_k, "head_dim_k must be positive")),
                 static_cast<int>(head_dim_v),
                 static_cast<int>(positive(block_tokens, "block_tokens must be positive")));
             new (self) LowerPages(static_cast<int>(positive(kv_heads, "kv_heads must be positive")), head,
                                   named<PageDtype>(dtype, kPageDtypes, "dtype"), scheme);
           },
           nb::arg("kv_heads"), nb::arg("head_dim_k"), nb::arg("head_dim_v"), nb::arg("block_tokens"), nb::arg("dtype"),
           nb::arg("lower_dtype"))
      .def_prop_ro("page_bytes", &LowerPages::page_bytes)
      .def_prop_ro("lower_page_bytes", &LowerPages::lower_page_bytes)
      .def("down", &convert_pages<true>, nb::arg("dst_address"), nb::arg("src_address"), nb::arg("src_ids"),
           nb::arg("dst_ids"), nb::arg("threads") = 1)
      .def("up", &convert_pages<false>, nb::arg("dst_address"), nb::arg("src_address"), nb::arg("src_ids"),
           nb::arg("dst_ids"), nb::arg("threads") = 1);
}

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<Arena>(m, "Arena", nb::type_slots(arena_slots), "Zeroed anonymous memory on huge pages, touched lazily.")
      .def("__init__",
           [](Arena* self, int64_t bytes) { new (self) Arena(positive(bytes, "an arena needs at least one byte")); },
           nb::arg("nbytes"))
      .def_prop_ro("address", [](const Arena& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_prop_ro("nbytes", &Arena::nbytes);
  m.def("copy_blocks", &copy_blocks, nb::arg("dst_address"), nb::arg("src_address"), nb::arg("block_bytes"),
        nb::arg("src_ids").none(), nb::arg("dst_ids").none(), nb::arg("threads") = 1);
  m.def("copy_bytes", &copy_bytes, nb::arg("dst_address"), nb::arg("src_address"), nb::arg("count"),
        nb::arg("threads") = 1);
  bind_lower_pages(m);
}

}  // namespace memserve

// Integer sequences at the border to Python: BlockIds going out, IntSpan coming in.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <vector>

namespace memserve {

namespace nb = nanobind;

// An immutable run of int32 ids. A Python list of 256 ints costs microseconds to make; this does not.
class BlockIds {
 public:
  BlockIds() = default;
  explicit BlockIds(std::vector<int32_t> ids) : ids_(std::move(ids)) {}

  std::span<const int32_t> span() const { return ids_; }
  size_t size() const { return ids_.size(); }

 private:
  std::vector<int32_t> ids_;
};

// A read-only view of int32 values that Python holds. Zero-copy for BlockIds and for C-contiguous buffers of 4-byte
// integers (numpy int32, array('i')); 8-byte integers are narrowed (out of range: ValueError); any other sequence of
// int is read item by item. Lives on the stack for one call.
class IntSpan {
 public:
  explicit IntSpan(nb::handle source);
  ~IntSpan();
  IntSpan(const IntSpan&) = delete;
  IntSpan& operator=(const IntSpan&) = delete;

  const int32_t* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<const int32_t> span() const { return {data_, size_}; }

 private:
  bool read_buffer(nb::handle source);
  void read_sequence(nb::handle source);
  bool read_list(nb::handle source);
  void read_item(PyObject* item);

  const int32_t* data_ = nullptr;
  size_t size_ = 0;
  Py_buffer buffer_{};
  bool holds_buffer_ = false;
  std::vector<int32_t> copy_;
};

// A Python list of ints.
nb::object list_from(std::span<const int32_t> ids);

void bind_sequences(nb::module_& m);
void bind_allocator(nb::module_& m);
void bind_radix(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_identity(nb::module_& m);
void bind_shared_arena(nb::module_& m);
void bind_sealed_copy(nb::module_& m);
void bind_kv_codec(nb::module_& m);
void bind_directory(nb::module_& m);
void bind_shortlist(nb::module_& m);
void bind_cheapest(nb::module_& m);
void bind_curves(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_stop_strings(nb::module_& m);
void bind_json_shape(nb::module_& m);
void bind_segment_log(nb::module_& m);
void bind_memory_tier(nb::module_& m);
void bind_tier_reader(nb::module_& m);
void bind_disk_queue(nb::module_& m);

}  // namespace memserve

// Python faces of the kernels for quantised weights. Tensors are passed as addresses, as for the fused kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "quantised.h"

namespace nb = nanobind;
using namespace memserve::quantised;
using memserve::Dtype;

namespace {

using Address = std::uintptr_t;
using Size = std::ptrdiff_t;

template <class T = std::uint8_t>
const T* in(Address a) { return reinterpret_cast<const T*>(a); }
void* out(Address a) { return reinterpret_cast<void*>(a); }

[[noreturn]] void refuse(const std::string& why) { throw nb::value_error(why.c_str()); }

Format format_of(const std::string& name) {
  for (int i = 0; i < kFormats; ++i)
    if (name == kFormatNames[i]) return Format(i);
  refuse("quantised format '" + name + "' is unknown");
}

void check_sizes(const std::string& name, Size n, Size k) {
  const Size inputs = block_inputs(layout_of(format_of(name)));
  if (n < 1) refuse("n is " + std::to_string(n) + ": a weight has an output at least");
  if (k < 1 || k % inputs != 0)
    refuse("k is " + std::to_string(k) + ": " + name + " has blocks of " + std::to_string(inputs) + " inputs");
}

Size packed_bytes(const std::string& name, Size n, Size k) {
  check_sizes(name, n, k);
  return strips_of(n) * strip_bytes(layout_of(format_of(name)), k);
}

Size file_bytes(const std::string& name, Size n, Size k) {
  check_sizes(name, n, k);
  const Format format = format_of(name);
  return n * (k / block_inputs(layout_of(format))) * file_block_bytes(format);
}

void pack_blocks(const std::string& name, Address blocks, Address order, Size n, Size k, Address to) {
  check_sizes(name, n, k);
  if (file_block_bytes(format_of(name)) == 0) refuse(name + " is no format of a GGUF file: use quantised_pack_groups");
  nb::gil_scoped_release release;
  pack({in(blocks), order ? in<std::int64_t>(order) : nullptr, nullptr, nullptr, nullptr, n, k, format_of(name)},
       static_cast<std::uint8_t*>(out(to)));
}

void pack_groups(const std::string& name, Address values, Address scales, Address zeros, Size n, Size k, Address to) {
  check_sizes(name, n, k);
  if (file_block_bytes(format_of(name)) != 0) refuse(name + " is a format of a GGUF file: use quantised_pack");
  const bool singles = layout_of(format_of(name)).scale == Scale::single;
  if (singles == (zeros != 0)) refuse(name + (singles ? " has no zero points" : " has zero points"));
  nb::gil_scoped_release release;
  pack({in(values), nullptr, singles ? nullptr : in<std::uint16_t>(scales), in<std::uint16_t>(zeros),
        singles ? in<float>(scales) : nullptr, n, k, format_of(name)},
       static_cast<std::uint8_t*>(out(to)));
}

void cut_out(const std::string& name, Address from, Address outputs, Address blocks, Size k, Size n, Size count,
             Address to) {
  check_sizes(name, n, k);
  nb::gil_scoped_release release;
  cut({in(from), in<std::int64_t>(outputs), in<std::int64_t>(blocks), k, n, count, format_of(name)},
      static_cast<std::uint8_t*>(out(to)));
}

nb::tuple layout(const std::string& name) {
  constexpr const char *scales[] = {"half", "bfloat", "levels", "single"}, *minima[] = {"none", "half", "levels", "zero"};
  const Layout of = layout_of(format_of(name));
  std::vector<int> table;
  if (of.table == Table::nonlinear) table.assign(kNonlinear, kNonlinear + kTableSize);
  if (of.table == Table::float4) table.assign(kFloat4, kFloat4 + kTableSize);
  return nb::make_tuple(of.bits, scales[int(of.scale)], minima[int(of.minimum)], of.zero, of.groups, of.parts, table,
                        is_float(of));
}

Size inputs_of_block(const std::string& name) { return block_inputs(layout_of(format_of(name))); }

void linear(Address x, Size stride_x, Address w, Address bias, Address y, Size stride_y, Size rows, Size k, Size n,
            int format, int dtype_x, int dtype_y, int bits) {
  nb::gil_scoped_release release;
  const Linear op{in<void>(x), in(w), bias ? in<float>(bias) : nullptr, out(y), rows, k, n, stride_x, stride_y,
                  Format(format), bits > 8};
  if (bits == 0) run_exact(op, Dtype(dtype_x), Dtype(dtype_y));
  else run(op, Dtype(dtype_x), Dtype(dtype_y));
}

void gather(Address w, Address ids, Size count, Address y, Size k, int format, int dtype) {
  nb::gil_scoped_release release;
  run(Gather{in(w), in<std::int64_t>(ids), out(y), k, Format(format)}, Dtype(dtype), count);
}

std::vector<std::string> sets() {
  std::vector<std::string> names;
  for (int i = 0; i < kSets; ++i)
    if (supports_set(i)) names.emplace_back(kSetNames[i]);
  return names;
}

void force(const std::optional<std::string>& name) {
  if (!name) return force_set(-1);
  for (int i = 0; i < kSets; ++i)
    if (*name == kSetNames[i] && supports_set(i)) return force_set(i);
  refuse("the set of kernels '" + *name + "' is unknown or not supported by this processor");
}

}  // namespace

void bind_quantised(nb::module_& m) {
  m.attr("QUANTISED_STRIP") = kStrip;
  m.attr("QUANTISED_FORMATS") = nb::cast(std::vector<std::string>(kFormatNames, kFormatNames + kFormats));
  m.def("quantised_packed_bytes", &packed_bytes);
  m.def("quantised_file_bytes", &file_bytes);
  m.def("quantised_pack", &pack_blocks);
  m.def("quantised_pack_groups", &pack_groups);
  m.def("quantised_cut", &cut_out);
  m.def("quantised_layout", &layout);
  m.def("quantised_block_inputs", &inputs_of_block);
  m.def("quantised_linear", &linear);
  m.def("quantised_gather", &gather);
  m.def("quantised_set", [] { return std::string(kSetNames[set_in_use()]); });
  m.def("quantised_sets", &sets);
  m.def("force_quantised_set", &force, nb::arg("name").none());
}

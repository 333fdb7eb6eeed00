#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "scheduling/sequence.h"

namespace memserve {

namespace {

// The number of objects that a parser would build for a text.
struct JsonShape {
  uint64_t values = 0, containers = 0, depth = 0, name_bytes = 0;
};

// The closing quote of the string that begins before `at`, or `end`.
const char* end_of_string(const char* at, const char* end) {
  while (true) {
    at = static_cast<const char*>(std::memchr(at, '"', static_cast<size_t>(end - at)));
    if (at == nullptr) return end;
    const char* slash = at;
    while (slash[-1] == '\\') --slash;  // the opening quote stands before them: this ends
    if ((at - slash) % 2 == 0) return at;
    ++at;
  }
}

// Every value except the outermost and the first of a container follows a comma; every container begins with a bracket.
// So counting commas and brackets outside strings is enough, and gives an upper bound for any text.
JsonShape shape_of(const char* at, const char* end) {
  JsonShape shape;
  shape.values = 1;
  uint64_t depth = 0, string_bytes = 0;
  for (; at < end; ++at) {
    switch (*at) {
      case '"': {
        const char* const close = end_of_string(at + 1, end);
        string_bytes = static_cast<uint64_t>(close - at - 1);
        at = close;
        break;
      }
      case ':':
        shape.name_bytes = std::max(shape.name_bytes, string_bytes);
        break;
      case ',':
        ++shape.values;
        string_bytes = 0;
        break;
      case '[':
      case '{':
        ++shape.containers;
        ++shape.values;
        shape.depth = std::max(shape.depth, ++depth);
        string_bytes = 0;
        break;
      case ']':
      case '}':
        if (depth > 0) --depth;
        break;
    }
  }
  return shape;
}

constexpr size_t kShortBytes = 1 << 16;  // so quick that releasing the GIL would cost more than it gains

JsonShape json_shape(nb::bytes text) {
  const char* const data = text.c_str();
  const size_t bytes = text.size();
  if (bytes <= kShortBytes) return shape_of(data, data + bytes);
  const nb::gil_scoped_release unlocked;
  return shape_of(data, data + bytes);
}

const char* after_blanks(const char* at, const char* end) {
  while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
  return at;
}

// Appends the ids of a row of plain integers, `[1, 2]`, each less than 2^31. False: the text is anything else.
bool read_ids(const char* at, const char* end, std::vector<int32_t>& ids) {
  at = after_blanks(at, end);
  if (at == end || *at != '[') return false;
  do {
    at = after_blanks(at + 1, end);
    const char* const first = at;
    int64_t value = 0;
    for (; at < end && *at >= '0' && *at <= '9' && at - first < 10; ++at) value = 10 * value + (*at - '0');
    if (at == first || value > INT32_MAX || (*first == '0' && at - first > 1)) return false;
    ids.push_back(static_cast<int32_t>(value));
    at = after_blanks(at, end);
  } while (at < end && *at == ',');
  return at < end && *at == ']' && after_blanks(at + 1, end) == end;
}

nb::object json_token_ids(nb::bytes text) {
  const char* const data = text.c_str();
  const char* const end = data + text.size();
  std::vector<int32_t> ids;
  bool is_row = false;
  if (text.size() <= kShortBytes) {
    is_row = read_ids(data, end, ids);
  } else {
    const nb::gil_scoped_release unlocked;
    is_row = read_ids(data, end, ids);
  }
  if (!is_row) return nb::none();
  return nb::bytes(reinterpret_cast<const char*>(ids.data()), 4 * ids.size());
}

}  // namespace

void bind_json_shape(nb::module_& m) {
  nb::class_<JsonShape>(m, "JsonShape")
      .def_ro("values", &JsonShape::values)
      .def_ro("containers", &JsonShape::containers)
      .def_ro("depth", &JsonShape::depth)
      .def_ro("name_bytes", &JsonShape::name_bytes);
  m.def("json_shape", &json_shape, nb::arg("text"));
  m.def("json_token_ids", &json_token_ids, nb::arg("text"));
}

}  // namespace memserve

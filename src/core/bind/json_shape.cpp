#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
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

// A plain number of up to seven digits at `at`, where eight bytes can be read, and how many digits it has; 0: none is
// there, or a longer one. Digits are found, and added up, eight bytes at a time: a row of ids is most of a body.
struct Digits {
  uint64_t value;
  int count;
};

Digits seven_digits(const char* at) {
  uint64_t bytes;
  std::memcpy(&bytes, at, sizeof bytes);
  bytes ^= 0x3030303030303030;  // digits become 0 to 9
  const uint64_t others = ((bytes + 0x7676767676767676) | bytes) & 0x8080808080808080;
  const int count = others == 0 ? 0 : std::countr_zero(others) / 8;
  if (count == 0) return {0, 0};
  bytes <<= 64 - 8 * count;  // zeros go before the first digit, which is in the lowest byte
  bytes = bytes * 10 + (bytes >> 8);
  const uint64_t value = (((bytes & 0x000000FF000000FF) * 0x000F424000000064) +
                          (((bytes >> 16) & 0x000000FF000000FF) * 0x0000271000000001)) >>
                         32;
  return {value, count};
}

// Appends the ids of a row of plain integers, `[1, 2]`, each less than 2^31. Returns the closing bracket; null: what
// begins at `at` is anything else.
const char* read_ids(const char* at, const char* end, std::vector<int32_t>& ids) {
  do {
    if (++at < end && (*at < '0' || *at > '9')) at = after_blanks(at, end);
    const char* const first = at;
    auto [value, count] = end - at >= 8 ? seven_digits(at) : Digits{0, 0};
    at += count;
    if (count == 0) {
      for (; at < end && *at >= '0' && *at <= '9' && at - first < 10; ++at) value = 10 * value + (*at - '0');
    }
    if (at == first || value > INT32_MAX || (*first == '0' && at - first > 1)) return nullptr;
    ids.push_back(static_cast<int32_t>(value));
    if (at < end && *at != ',') at = after_blanks(at, end);
  } while (at < end && *at == ',');
  return at < end && *at == ']' ? at : nullptr;
}

// A row of ids in the outermost object, from its opening bracket to behind its closing one.
struct Row {
  const char *first = nullptr, *last = nullptr;
  std::vector<int32_t> ids;
};

// The one field `name`. False: it is no row of ids, or whether there is just one is not plain: a name has an escape.
bool find_ids(const char* at, const char* end, std::string_view name, Row& row) {
  int64_t depth = 0;
  for (; at < end; ++at) {
    if (*at == '"') {
      const char* const begin = at + 1;
      at = end_of_string(begin, end);
      if (depth != 1 || at == end) continue;
      const char* const colon = after_blanks(at + 1, end);
      if (colon == end || *colon != ':') continue;
      const std::string_view field(begin, static_cast<size_t>(at - begin));
      if (field.find('\\') != field.npos) return false;
      if (field != name) continue;
      const char* const value = after_blanks(colon + 1, end);
      if (row.first != nullptr || value == end || *value != '[') return false;
      row.ids.reserve(static_cast<size_t>(end - value) / 4);
      at = read_ids(value, end, row.ids);
      if (at == nullptr) return false;
      row.first = value;
      row.last = at + 1;
    } else if (*at == '[' || *at == '{') {
      ++depth;
    } else if (*at == ']' || *at == '}') {
      --depth;
    }
  }
  return row.first != nullptr;
}

nb::object json_cut_ids(nb::bytes text, std::string_view name) {
  const char* const data = text.c_str();
  const char* const end = data + text.size();
  Row row;
  bool is_found = false;
  if (text.size() <= kShortBytes) {
    is_found = find_ids(data, end, name, row);
  } else {
    const nb::gil_scoped_release unlocked;
    is_found = find_ids(data, end, name, row);
  }
  if (!is_found) return nb::none();
  std::string rest(data, row.first);
  rest.append("null").append(row.last, end);
  return nb::make_tuple(nb::bytes(rest.data(), rest.size()),
                        nb::bytes(reinterpret_cast<const char*>(row.ids.data()), 4 * row.ids.size()));
}

}  // namespace

void bind_json_shape(nb::module_& m) {
  nb::class_<JsonShape>(m, "JsonShape")
      .def_ro("values", &JsonShape::values)
      .def_ro("containers", &JsonShape::containers)
      .def_ro("depth", &JsonShape::depth)
      .def_ro("name_bytes", &JsonShape::name_bytes);
  m.def("json_shape", &json_shape, nb::arg("text"));
  m.def("json_cut_ids", &json_cut_ids, nb::arg("text"), nb::arg("name"));
}

}  // namespace memserve

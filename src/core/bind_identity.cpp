// Block identity: a keyed 128-bit hash chain over (namespace, tokens), the same on every process and machine.
//
//   identity[-1] = namespace
//   identity[i]  = SipHash-2-4-128(key, identity[i-1] || tokens of block i as little-endian int32)
#include <string>

#include "sequence.h"
#include "siphash.h"

namespace memserve {

namespace {

const uint8_t* sixteen(nb::bytes value, const char* what) {
  if (value.size() != 16) throw nb::value_error((std::string(what) + " must be 16 bytes").c_str());
  return reinterpret_cast<const uint8_t*>(value.c_str());
}

nb::bytes siphash(nb::bytes key, nb::bytes data) {
  const auto hash = siphash128(sixteen(key, "key"), reinterpret_cast<const uint8_t*>(data.c_str()), data.size());
  uint8_t out[16];
  store_le64(out, hash.low);
  store_le64(out + 8, hash.high);
  return nb::bytes(out, sizeof out);
}

// One link of the chain. The message is 16 + 4 * count bytes.
Hash128 link(const uint8_t* key, Hash128 parent, const int32_t* tokens, size_t count) {
  SipHash128 hash(load_le64(key), load_le64(key + 8));
  hash.word(parent.low);
  hash.word(parent.high);
  size_t i = 0;
  for (; i + 2 <= count; i += 2) {
    hash.word(static_cast<uint32_t>(tokens[i]) | static_cast<uint64_t>(static_cast<uint32_t>(tokens[i + 1])) << 32);
  }
  return hash.finish(i < count ? static_cast<uint32_t>(tokens[i]) : 0, 16 + 4 * count);
}

nb::bytes block_identities(nb::bytes key, nb::bytes name, nb::handle tokens, int64_t block_tokens) {
  if (block_tokens < 1) throw nb::value_error("block_tokens must be positive");
  const uint8_t* key_bytes = sixteen(key, "key");
  const uint8_t* parent_bytes = sixteen(name, "namespace");
  const IntSpan span(tokens);
  const size_t blocks = span.size() / static_cast<size_t>(block_tokens);
  nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks * 16)));
  if (!out.is_valid()) throw nb::python_error();
  auto* to = reinterpret_cast<uint8_t*>(PyBytes_AsString(out.ptr()));
  Hash128 parent{load_le64(parent_bytes), load_le64(parent_bytes + 8)};
  for (size_t i = 0; i < blocks; ++i, to += 16) {
    parent = link(key_bytes, parent, span.data() + i * static_cast<size_t>(block_tokens),
                  static_cast<size_t>(block_tokens));
    store_le64(to, parent.low);
    store_le64(to + 8, parent.high);
  }
  return out;
}

}  // namespace

void bind_identity(nb::module_& m) {
  m.def("siphash128", &siphash, nb::arg("key"), nb::arg("data"));
  m.def("block_identities", &block_identities, nb::arg("key"), nb::arg("namespace"), nb::arg("tokens"),
        nb::arg("block_tokens"));
}

}  // namespace memserve

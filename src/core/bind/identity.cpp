#include <nanobind/ndarray.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "identity/identity.h"
#include "scheduling/sequence.h"

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

nb::bytes block_identities(nb::bytes key, nb::bytes name, nb::handle tokens, int64_t block_tokens) {
  if (block_tokens < 1) throw nb::value_error("block_tokens must be positive");
  const uint8_t* key_bytes = sixteen(key, "key");
  const uint8_t* parent_bytes = sixteen(name, "namespace");
  const IntSpan span(tokens);
  const size_t blocks = span.size() / static_cast<size_t>(block_tokens);
  nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(blocks * kIdentityBytes)));
  if (!out.is_valid()) throw nb::python_error();
  auto* to = reinterpret_cast<uint8_t*>(PyBytes_AsString(out.ptr()));
  Hash128 parent = load_identity(parent_bytes);
  for (size_t i = 0; i < blocks; ++i, to += kIdentityBytes) {
    parent = next_identity(key_bytes, parent, span.data() + i * static_cast<size_t>(block_tokens),
                           static_cast<size_t>(block_tokens));
    store_identity(to, parent);
  }
  return out;
}

// Of each key: SipHash-2-4-128 over the scope's length, the scope and the key.
nb::bytes value_keys(nb::bytes secret, nb::bytes scope, nb::list keys) {
  const uint8_t* const secret_bytes = sixteen(secret, "secret");
  const size_t count = keys.size();
  nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kIdentityBytes)));
  if (!out.is_valid()) throw nb::python_error();
  auto* to = reinterpret_cast<uint8_t*>(PyBytes_AsString(out.ptr()));
  std::string message(8, '\0');
  store_le64(reinterpret_cast<uint8_t*>(message.data()), scope.size());
  message.append(scope.c_str(), scope.size());
  const size_t head = message.size();
  for (size_t i = 0; i < count; ++i, to += kIdentityBytes) {
    char* key = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(nb::handle(keys[i]).ptr(), &key, &size) != 0) throw nb::python_error();
    message.resize(head);
    message.append(key, static_cast<size_t>(size));
    store_identity(to, siphash128(secret_bytes, reinterpret_cast<const uint8_t*>(message.data()), message.size()));
  }
  return out;
}

// As unsigned, a negative id exceeds any vocabulary. The GIL stays: a prompt takes less time than passing it on.
bool fits_vocabulary(nb::handle tokens, uint32_t vocab_size) {
  const IntSpan span(tokens);
  uint32_t most = 0;
  for (const int32_t token : span.span()) most = std::max(most, static_cast<uint32_t>(token));
  return span.size() == 0 || most < vocab_size;
}

using Registers = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One batch for the sketch of router/placement/reuse_ceiling.py, which says what the numbers mean: (total, chance, new).
nb::tuple raise_registers(Registers registers, nb::bytes identities, size_t counted, double total, double chance) {
  const size_t size = registers.shape(0);
  if (!std::has_single_bit(size)) throw nb::value_error("the number of registers must be a power of two");
  if (identities.size() % kIdentityBytes != 0) throw nb::value_error("an identity has 16 bytes");
  const auto* at = reinterpret_cast<const uint8_t*>(identities.c_str());
  const size_t count = identities.size() / kIdentityBytes;
  const double before = total;
  double after = total;
  for (size_t place = 0; place < count; ++place, at += kIdentityBytes) {
    const Hash128 identity = load_identity(at);
    uint8_t& known = registers.data()[identity.high & (size - 1)];
    const int rank = 1 + std::countl_zero(static_cast<uint32_t>(identity.low >> 32));
    if (rank > known) {
      total += 1.0 / chance;
      chance -= (std::ldexp(1.0, -known) - std::ldexp(1.0, -rank)) / static_cast<double>(size);
      known = static_cast<uint8_t>(rank);
    }
    if (place < counted) after = total;
  }
  return nb::make_tuple(total, chance, after - before);
}

}  // namespace

void bind_identity(nb::module_& m) {
  m.def("siphash128", &siphash, nb::arg("key"), nb::arg("data"));
  m.def("block_identities", &block_identities, nb::arg("key"), nb::arg("namespace"), nb::arg("tokens"),
        nb::arg("block_tokens"));
  m.def("fits_vocabulary", &fits_vocabulary, nb::arg("tokens"), nb::arg("vocab_size"));
  m.def("raise_registers", &raise_registers, nb::arg("registers"), nb::arg("identities"), nb::arg("counted"),
        nb::arg("total"), nb::arg("chance"));
  m.def("value_keys", &value_keys, nb::arg("secret"), nb::arg("scope"), nb::arg("keys"));
}

}  // namespace memserve

// Errors of the native core and how they look in Python.
#pragma once
#include <stdexcept>
#include <string>

namespace memserve {

// The caller or the core broke an invariant: memserve.base.errors.InvariantError in Python.
struct InvariantViolation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(bool condition, const char* message) {
  if (!condition) [[unlikely]] throw InvariantViolation(message);
}

}  // namespace memserve

// A few threads for work that comes in many equal units.
#pragma once
#include <cstddef>
#include <functional>

namespace memserve {

// Calls `unit(i)` once for each i in [0, units), on at most `threads` threads (the caller is one; 16 at most); returns
// when all are done. `unit` must not throw.
void run_units(size_t units, int threads, const std::function<void(size_t)>& unit);

}  // namespace memserve

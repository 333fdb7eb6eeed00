// A run of fused operations over fixed buffers: one call, one team of threads, a barrier between operations.
#pragma once
#include <cstdint>
#include <variant>
#include <vector>

#include "fused.h"

namespace memserve::fused {

// A buffer: an address, or the n-th external tensor, whose address is set before the operations that read it run.
struct Place {
  void* address = nullptr;
  int external = -1;
};

enum class Count : int { tokens = 0, logits_rows = 1 };  // how many rows an operation has in this step

// One operation. The pointers inside `op` are filled from `places` when it runs, in the order of the struct's fields.
struct Step {
  std::variant<RmsNorm, Gated, Rotary, Linear> op;
  std::vector<Place> places;
  Dtype dtype;
  Count count;
};

class Program {
 public:
  void add(Step step) { steps_.push_back(std::move(step)); }
  int size() const { return static_cast<int>(steps_.size()); }

  // The sizes of the step that begins.
  void start(std::ptrdiff_t tokens, std::ptrdiff_t logits_rows) { counts_[0] = tokens, counts_[1] = logits_rows; }

  void set_external(int index, void* address);

  // Run the operations [begin, end). No Python state is touched.
  void run(int begin, int end);

 private:
  void* resolve(const Place& place) const { return place.external < 0 ? place.address : externals_[place.external]; }
  void run_share(const Kernels& kernels, const Step& step, std::ptrdiff_t part, std::ptrdiff_t parts) const;

  std::vector<Step> steps_;
  std::vector<void*> externals_;
  std::ptrdiff_t counts_[2] = {0, 0};
};

}  // namespace memserve::fused

// A run of fused operations over fixed buffers: one call, one team of threads, no fixed division of work.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <variant>
#include <vector>

#include "fused.h"
#include "collective.h"
#include "quantised.h"

namespace memserve::fused {

// A buffer: an address, or the n-th external tensor, whose address is set before the operations that read it run.
struct Place {
  void* address = nullptr;
  int external = -1;
};

enum class Count : int { tokens = 0, logits_rows = 1 };  // how many rows an operation has in this step

// y = the sum of x over the workers of a collective: dense rows of `width`.
struct Reduce {
  const void* x;
  void* y;
  std::ptrdiff_t width;
};

// A linear with a quantised weight: all rows become integers first, in memory of the program, then strips are multiplied.
struct QuantisedLinear {
  quantised::Quantise first;
  quantised::Product then;
  bool fine;
};

// One operation. The pointers inside `op` are filled from `places` when it runs, in the order of the struct's fields.
struct Step {
  std::variant<RmsNorm, Gated, Rotary, Linear, Reduce, QuantisedLinear> op;
  std::vector<Place> places;
  Dtype dtype;
  Count count;
};

struct Range {
  std::ptrdiff_t begin, end;
};

// The units of one operation, claimed by threads in grains. Each thread starts with an equal part and takes grains from
// others when its own are done, so a thread that the operating system has suspended delays the others by at most one
// grain. Grains lie at multiples of their size; where two parts meet inside one, each has its share of it.
class Units {
 public:
  void reset(std::ptrdiff_t count, std::ptrdiff_t grain, int parts);
  bool claim(int part, Range& range);
  void finish(std::ptrdiff_t units) { finished_.fetch_add(units, std::memory_order_release); }
  bool all_finished() const { return finished_.load(std::memory_order_acquire) == count_; }

 private:
  static constexpr int kPartsMax = 16;
  struct alignas(64) Part {
    std::atomic<std::ptrdiff_t> next{0};  // grain
    std::ptrdiff_t begin = 0, end = 0;
  };
  Part parts_[kPartsMax];
  alignas(64) std::atomic<std::ptrdiff_t> finished_{0};
  std::ptrdiff_t count_ = 0, grain_ = 1;
  int used_ = 1;
};

class Program {
 public:
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void add(Step step);
  int size() const { return static_cast<int>(steps_.size()); }

  // The sizes of the step that begins.
  void start(std::ptrdiff_t tokens, std::ptrdiff_t logits_rows);

  void set_external(int index, void* address);

  // From now on sums are taken over this collective. Before, made-up values stand in for the other workers'.
  void join(Collective* collective) { collective_ = collective; }

  // Run the operations [begin, end). No Python state is touched. Not `good`: other workers have not come, and what was
  // computed means nothing.
  Collective::Ending run(int begin, int end);

 private:
  void* resolve(const Place& place) const { return place.external < 0 ? place.address : externals_[place.external]; }
  void reset(int index, int parts);
  quantised::Activations integers(const Step& step, const QuantisedLinear& linear);
  void run_quantised(const Step& step, const QuantisedLinear& linear, bool first, Range range);
  void run_range(const Kernels& kernels, const Step& step, Range range);
  void reduce(const Step& step, const Reduce& op);
  template <class Run>
  void share(Units& units, int part, Run run_part);
  void work(const Kernels& kernels, int begin, int end, int part);

  std::vector<Step> steps_;
  std::deque<Units> units_;     // of steps_; a deque, because units cannot be moved
  std::deque<Units> prepared_;  // of steps_: rows that become integers before a quantised weight multiplies them
  std::ptrdiff_t inputs_max_ = 0;  // of quantised weights
  bool fine_ = false;  // some of their activations have two bytes
  std::vector<std::uint8_t> integers_;
  std::vector<void*> externals_;
  std::ptrdiff_t counts_[2] = {0, 0};
  Collective* collective_ = nullptr;
  Collective::Ending ending_ = Collective::Ending::good;  // written by the one thread that runs a Reduce
};

}  // namespace memserve::fused

// Which of several implementations is used: the best that this processor supports, or the one that a test asks for.
#pragma once
#include <atomic>
#include <string>
#include <utility>
#include <vector>

namespace memserve {

// `Path`: the functions of one instruction set, and its `name`.
template <class Path>
class IsaPaths {
 public:
  // Of the instruction sets that this processor supports, the best last.
  explicit IsaPaths(std::vector<Path> paths) : paths_(std::move(paths)), in_use_(&paths_.back()) {}

  const Path& in_use() const { return *in_use_.load(std::memory_order_relaxed); }

  // In their order.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Path& path : paths_) names.emplace_back(path.name);
    return names;
  }

  // Uses one of them from now on; "" = the best. Returns false if there is no such one.
  bool force(const std::string& name) {
    if (name.empty()) return use(paths_.back());
    for (const Path& path : paths_) {
      if (name == path.name) return use(path);
    }
    return false;
  }

 private:
  bool use(const Path& path) {
    in_use_ = &path;
    return true;
  }

  const std::vector<Path> paths_;
  std::atomic<const Path*> in_use_;
};

}  // namespace memserve

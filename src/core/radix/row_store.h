// Memory of the index's edges: one row a cached block, its id and its tokens.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool/arena.h"

namespace memserve {

// A run of neighbouring rows: row i has the id ids[i] and the tokens from tokens + i * block_tokens on.
struct Rows {
  int32_t* ids = nullptr;
  int32_t* tokens = nullptr;
  uint32_t chunk = 0;
};

// Allocates runs of rows and takes back any part of them. Ownership is exact to the row: an edge is cut in two, or its
// tail dropped, without copying or sharing. Free rows lie in maximal extents, listed by size.
//
//      chunk   [ tokens of row 0 | tokens of row 1 | ...           ids: 0 1 2 ... ]     2 MiB: one huge page
//      rows     uuuuuuuFFFFFFuuuuFFFFFFFFFFF      u = allocated; the first and last id of a free extent are its number
class RowStore {
 public:
  explicit RowStore(uint32_t block_tokens) : block_tokens_(block_tokens) {}

  // `count` > 0 rows with unspecified contents. Throws std::bad_alloc when there is no memory.
  Rows allocate(uint32_t count);
  // Takes back `count` rows: all or a part of what `allocate` gave.
  void release(const Rows& rows, uint32_t count);
  Rows skip(const Rows& rows, uint32_t count) const {
    return {rows.ids + count, rows.tokens + size_t{count} * block_tokens_, rows.chunk};
  }

  size_t bytes() const { return bytes_; }
  // The runs that their owners name and the free extents must cover every row exactly once.
  void check_invariants(const std::vector<std::pair<Rows, uint32_t>>& owned) const;

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr int kClasses = 128;

  struct Chunk {
    std::unique_ptr<Arena> memory;  // null: freed, the number is unused
    int32_t* tokens = nullptr;
    int32_t* ids = nullptr;
    uint32_t rows = 0;
    std::vector<bool> edge;  // the row is the first or the last of a free extent
  };
  struct Extent {
    uint32_t chunk, first, rows;
    uint32_t previous, next;  // of the same size class
  };

  uint32_t find(uint32_t count) const;
  uint32_t add_chunk(uint32_t rows_min);
  void drop_chunk(uint32_t chunk);
  uint32_t add_extent(uint32_t chunk, uint32_t first, uint32_t rows);
  Extent take_extent(uint32_t number);
  void set_edges(const Extent& extent, bool is_free);
  Rows rows_at(uint32_t chunk, uint32_t row) const;

  uint32_t block_tokens_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> chunks_unused_;  // numbers of freed chunks
  std::vector<Extent> extents_;          // rows = 0: the number is unused
  std::vector<uint32_t> extents_unused_;
  uint32_t of_class_[kClasses] = {};     // extent number + 1 of the newest of each class; 0 = none
  uint64_t has_class_[kClasses / 64] = {};
  uint32_t spare_ = kNone;               // a wholly free chunk, kept for the next edge
  size_t chunk_bytes_ = size_t{64} << 10;
  size_t bytes_ = 0;
};

}  // namespace memserve

#include "radix/row_store.h"

#include <algorithm>
#include <bit>

#include "errors.h"
#include "sanitize.h"

namespace memserve {

namespace {

constexpr size_t kChunkBytes = size_t{2} << 20;
constexpr int kLooksMax = 8;  // extents examined in the wanted size's own class: some may be too small

// Four classes for each power of two: every extent of a higher class is larger than any of a lower one.
int class_of(uint32_t rows) {
  if (rows < 4) return static_cast<int>(rows);
  const int shift = std::bit_width(rows) - 3;
  return (shift + 1) * 4 + static_cast<int>(rows >> shift & 3);
}

}  // namespace

Rows RowStore::rows_at(uint32_t chunk, uint32_t row) const {
  return skip({chunks_[chunk].ids, chunks_[chunk].tokens, chunk}, row);
}

Rows RowStore::allocate(uint32_t count) {
  uint32_t number = find(count);
  if (number == kNone) number = add_chunk(count);
  const Extent extent = take_extent(number);
  if (extent.chunk == spare_) spare_ = kNone;
  if (extent.rows > count) add_extent(extent.chunk, extent.first + count, extent.rows - count);
  const Rows rows = rows_at(extent.chunk, extent.first);
  ASAN_UNPOISON_MEMORY_REGION(rows.tokens, size_t{count} * block_tokens_ * sizeof(int32_t));
  return rows;
}

void RowStore::release(const Rows& rows, uint32_t count) {
  if (count == 0) return;
  ASAN_POISON_MEMORY_REGION(rows.tokens, size_t{count} * block_tokens_ * sizeof(int32_t));
  const Chunk& chunk = chunks_[rows.chunk];
  auto first = static_cast<uint32_t>(rows.ids - chunk.ids);
  uint32_t end = first + count;
  if (first > 0 && chunk.edge[first - 1]) first = take_extent(static_cast<uint32_t>(chunk.ids[first - 1])).first;
  if (end < chunk.rows && chunk.edge[end]) end += take_extent(static_cast<uint32_t>(chunk.ids[end])).rows;
  const uint32_t number = add_extent(rows.chunk, first, end - first);
  if (end - first < chunk.rows) return;
  if (spare_ == kNone) {
    spare_ = rows.chunk;
  } else {
    take_extent(number);
    drop_chunk(rows.chunk);
  }
}

// A free extent of at least `count` rows, not much larger if there is a choice; kNone: there is none.
uint32_t RowStore::find(uint32_t count) const {
  const int own = class_of(count);
  uint32_t number = of_class_[own] - 1;
  for (int looks = 0; looks < kLooksMax && number != kNone; ++looks, number = extents_[number].next) {
    if (extents_[number].rows >= count) return number;
  }
  for (int word = (own + 1) / 64, bit = (own + 1) % 64; word < kClasses / 64; ++word, bit = 0) {
    const uint64_t larger = has_class_[word] >> bit << bit;
    if (larger) return of_class_[word * 64 + std::countr_zero(larger)] - 1;
  }
  return kNone;
}

uint32_t RowStore::add_chunk(uint32_t rows_min) {
  const size_t row_bytes = (size_t{block_tokens_} + 1) * sizeof(int32_t);
  size_t bytes = chunk_bytes_;
  if (rows_min * row_bytes > bytes) bytes = (rows_min * row_bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  Chunk chunk;
  chunk.memory = std::make_unique<Arena>(bytes);
  chunk.rows = static_cast<uint32_t>(bytes / row_bytes);
  chunk.tokens = reinterpret_cast<int32_t*>(chunk.memory->data());
  chunk.ids = chunk.tokens + size_t{chunk.rows} * block_tokens_;
  chunk.edge.resize(chunk.rows);
  ASAN_POISON_MEMORY_REGION(chunk.tokens, size_t{chunk.rows} * block_tokens_ * sizeof(int32_t));
  bytes_ += bytes;
  chunk_bytes_ = std::min(chunk_bytes_ * 2, kChunkBytes);
  if (chunks_unused_.empty()) {
    chunks_unused_.push_back(static_cast<uint32_t>(chunks_.size()));
    chunks_.emplace_back();
  }
  const uint32_t number = chunks_unused_.back();
  chunks_unused_.pop_back();
  chunks_[number] = std::move(chunk);
  return add_extent(number, 0, chunks_[number].rows);
}

void RowStore::drop_chunk(uint32_t number) {
  Chunk& chunk = chunks_[number];
  bytes_ -= chunk.memory->nbytes();
  chunk = Chunk{};
  chunks_unused_.push_back(number);
}

uint32_t RowStore::add_extent(uint32_t chunk, uint32_t first, uint32_t rows) {
  if (extents_unused_.empty()) {
    extents_unused_.push_back(static_cast<uint32_t>(extents_.size()));
    extents_.emplace_back();
  }
  const uint32_t number = extents_unused_.back();
  extents_unused_.pop_back();
  const int of = class_of(rows);
  extents_[number] = {chunk, first, rows, kNone, of_class_[of] - 1};
  if (of_class_[of]) extents_[of_class_[of] - 1].previous = number;
  of_class_[of] = number + 1;
  has_class_[of / 64] |= uint64_t{1} << (of % 64);
  set_edges(extents_[number], true);
  chunks_[chunk].ids[first] = chunks_[chunk].ids[first + rows - 1] = static_cast<int32_t>(number);
  return number;
}

RowStore::Extent RowStore::take_extent(uint32_t number) {
  const Extent extent = extents_[number];
  const int of = class_of(extent.rows);
  if (extent.next != kNone) extents_[extent.next].previous = extent.previous;
  if (extent.previous != kNone) {
    extents_[extent.previous].next = extent.next;
  } else {
    of_class_[of] = extent.next + 1;  // kNone + 1 = 0
    if (of_class_[of] == 0) has_class_[of / 64] &= ~(uint64_t{1} << (of % 64));
  }
  set_edges(extent, false);
  extents_[number].rows = 0;
  extents_unused_.push_back(number);
  return extent;
}

void RowStore::set_edges(const Extent& extent, bool is_free) {
  std::vector<bool>& edge = chunks_[extent.chunk].edge;
  edge[extent.first] = edge[extent.first + extent.rows - 1] = is_free;
}

void RowStore::check_invariants(const std::vector<std::pair<Rows, uint32_t>>& owned) const {
  std::vector<std::vector<uint8_t>> owners(chunks_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) owners[i].resize(chunks_[i].rows);
  const auto own = [&](uint32_t chunk, size_t first, uint32_t count) {
    check(chunk < chunks_.size() && first + count <= chunks_[chunk].rows, "rows outside their chunk");
    for (size_t row = first; row < first + count; ++row) check(owners[chunk][row]++ == 0, "a row has two owners");
  };
  for (const auto& [rows, count] : owned) {
    const size_t first = static_cast<size_t>(rows.ids - chunks_[rows.chunk].ids);
    own(rows.chunk, first, count);
    check(rows.tokens == rows_at(rows.chunk, static_cast<uint32_t>(first)).tokens, "ids and tokens of other rows");
  }
  for (const Extent& extent : extents_) {
    if (extent.rows == 0) continue;
    own(extent.chunk, extent.first, extent.rows);
    const Chunk& chunk = chunks_[extent.chunk];
    const uint32_t end = extent.first + extent.rows;
    check(chunk.edge[extent.first] && chunk.edge[end - 1], "a free extent has no edges");
    check(end == chunk.rows || !chunk.edge[end], "two free extents lie side by side");
  }
  for (const auto& rows : owners) check(std::ranges::count(rows, 0) == 0, "a row is neither owned nor free");
}

}  // namespace memserve

// The query for every request: which instances have how much of this prompt?
#include <algorithm>

#include "directory/directory.h"

namespace memserve {

namespace {
constexpr size_t kBatch = 8;
}

// `next()` gives one identity after the other. While the entries of one batch are loaded from memory, the identities of
// the next are computed, and their buckets prefetched.
template <class Next>
std::span<const PrefixHeld> PrefixDirectory::walk(size_t blocks, Next next) {
  Hash128 batches[2][kBatch];
  const auto prepare = [&](size_t batch) {
    for (size_t i = batch * kBatch; i < std::min(blocks, (batch + 1) * kBatch); ++i) {
      batches[batch % 2][i % kBatch] = next();
      __builtin_prefetch(&buckets_[bucket_of(batches[batch % 2][i % kBatch])]);
    }
  };
  const auto ask = [&](size_t batch) {
    for (size_t i = batch * kBatch; i < std::min(blocks, (batch + 1) * kBatch); ++i) {
      const uint32_t id = buckets_[bucket_of(batches[batch % 2][i % kBatch])];
      if (id != 0) __builtin_prefetch(&entry(id));
    }
  };
  walk_.start((holders_.size() + 63) / 64);
  prepare(0);
  for (size_t batch = 0; batch * kBatch < blocks; ++batch) {
    ask(batch);
    prepare(batch + 1);
    for (size_t i = batch * kBatch; i < std::min(blocks, (batch + 1) * kBatch); ++i) {
      const uint32_t id = lookup(batches[batch % 2][i % kBatch]);
      if (!walk_.step(id ? &entry(id) : nullptr)) return walk_.finish();
    }
  }
  return walk_.finish();
}

std::span<const PrefixHeld> PrefixDirectory::match(const Identities& blocks) {
  return walk(blocks.count, [&blocks, i = size_t{0}]() mutable { return blocks[i++]; });
}

std::span<const PrefixHeld> PrefixDirectory::match(const Prompt& prompt) {
  Hash128 identity = prompt.name;
  const int32_t* tokens = prompt.tokens.data();
  return walk(prompt.tokens.size() / prompt.block_tokens, [&]() {
    identity = next_identity(prompt.key, identity, tokens, prompt.block_tokens);
    tokens += prompt.block_tokens;
    return identity;
  });
}

std::vector<uint8_t> PrefixDirectory::locate(const Identities& blocks, std::span<const uint32_t> holders) const {
  std::vector<uint8_t> places(blocks.count * holders.size(), 0);
  for (size_t i = 0; i < blocks.count; ++i) {
    prefetch(blocks, i);
    const uint32_t id = lookup(blocks[i]);
    if (id == 0) continue;
    for (size_t h = 0; h < holders.size(); ++h) {
      const HolderRecord* const record = entry(id).find(holders[h]);
      if (record && !record->speculative) places[i * holders.size() + h] = record->only_dram() ? 2 : 1;
    }
  }
  return places;
}

}  // namespace memserve

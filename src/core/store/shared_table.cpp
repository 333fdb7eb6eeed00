#include "store/shared_table.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "store/id_table.h"

namespace memserve::store {

namespace {

constexpr int kFirst = 5;   // places of a bucket that are taken without a look at the other one
constexpr int kTries = 64;  // an entry that is being written is whole again soon

bool equal(Hash128 a, Hash128 b) { return a.low == b.low && a.high == b.high; }

}  // namespace

SharedTable::SharedTable(uint8_t* start)
    : start_(start),
      buckets_(head().buckets),
      secret_{head().secret[0], head().secret[1]} {}

uint64_t SharedTable::check_of(const TableHead& head) {
  TableHead plain = head;
  plain.epoch = plain.check = 0;
  return siphash128(reinterpret_cast<const uint8_t*>(head.secret), reinterpret_cast<const uint8_t*>(&plain),
                    sizeof plain).low;
}

uint64_t SharedTable::check_of(const Shown& shown) const {
  return siphash128(reinterpret_cast<const uint8_t*>(secret_), reinterpret_cast<const uint8_t*>(&shown),
                    sizeof shown).low;
}

size_t SharedTable::bucket(Hash128 key, bool second) const {
  const uint64_t hash = second ? mix(key.high ^ secret_[1], key.low ^ 0x9e3779b97f4a7c15u)
                               : mix(key.low ^ secret_[0], key.high ^ 0xd1b54a32d192ed03u);
  return static_cast<size_t>(static_cast<unsigned __int128>(hash) * buckets_ >> 64);
}

std::optional<SharedTable::Seen> SharedTable::look(Hash128 key) const {
  const uint64_t wanted = tag_of(key);
  for (const bool second : {false, true}) {
    const size_t first = bucket(key, second) * kWays;
    for (size_t way = 0; way < kWays; ++way) {
      if (tag(first + way).load(std::memory_order_acquire) != wanted) continue;
      if (auto seen = look_at(first + way, key)) return seen;
    }
  }
  return std::nullopt;
}

std::optional<SharedTable::Seen> SharedTable::look_at(size_t place, Hash128 key) const {
  const SharedEntry& entry = this->entry(place);
  for (int i = 0; i < kTries; ++i) {
    Seen seen{place, entry.version.load(std::memory_order_acquire), {}};
    if (seen.version & 1) continue;
    uint64_t words[6];
    for (size_t w = 0; w < 6; ++w) words[w] = entry.words[w].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.version.load(std::memory_order_relaxed) != seen.version) continue;
    std::memcpy(&seen.shown, words, sizeof words);
    if (!equal(seen.shown.key, key) || seen.shown.state == 0) return std::nullopt;
    return seen;
  }
  return std::nullopt;
}

bool SharedTable::unchanged(const Seen& seen) const {
  return entry(seen.place).version.load(std::memory_order_acquire) == seen.version;
}

// Steps over some keys at a time, each of which asks for the lines that the next one reads.
void SharedTable::states(const Hash128* keys, size_t count, uint8_t* out) const {
  constexpr size_t kAtOnce = 64;
  constexpr uint8_t kNowhere = kWays;
  size_t buckets[kAtOnce];
  uint8_t ways[kAtOnce];
  const auto find_way = [&](size_t i) {
    const uint64_t wanted = tag_of(keys[i]);
    const Bucket& bucket = *at(buckets[i]);
    ways[i] = kNowhere;
    for (uint8_t way = 0; way < kWays; ++way) {
      if (bucket.tags[way].load(std::memory_order_acquire) == wanted) ways[i] = way;
    }
    if (ways[i] != kNowhere) __builtin_prefetch(&bucket.entries[ways[i]]);
    return ways[i] != kNowhere;
  };
  for (; count > 0; keys += kAtOnce, out += kAtOnce) {
    const size_t some = std::min(count, kAtOnce);
    for (size_t i = 0; i < some; ++i) __builtin_prefetch(at(buckets[i] = bucket(keys[i], false)));
    for (size_t i = 0; i < some; ++i) {
      if (!find_way(i)) __builtin_prefetch(at(buckets[i] = bucket(keys[i], true)));
    }
    for (size_t i = 0; i < some; ++i) {
      if (ways[i] == kNowhere) find_way(i);
    }
    for (size_t i = 0; i < some; ++i) {
      out[i] = 0;
      if (ways[i] == kNowhere) continue;
      auto seen = look_at(buckets[i] * kWays + ways[i], keys[i]);
      if (!seen) seen = look(keys[i]);  // another key with this tag, or it has moved
      if (seen) out[i] = seen->shown.state;
    }
    count -= some;
  }
}

void SharedTable::retire(size_t place) const {
  SharedEntry& entry = this->entry(place);
  entry.version.store(entry.version.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
}

void SharedTable::write(size_t place, const Shown& shown) const {
  retire(place);
  std::atomic_thread_fence(std::memory_order_release);  // the odd version is seen before any new word
  SharedEntry& entry = this->entry(place);
  uint64_t words[6];
  std::memcpy(words, &shown, sizeof words);
  for (size_t w = 0; w < 6; ++w) entry.words[w].store(words[w], std::memory_order_relaxed);
  entry.check.store(check_of(shown), std::memory_order_relaxed);
  entry.version.store(entry.version.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  tag(place).store(tag_of(shown.key), std::memory_order_release);
}

void SharedTable::clear(size_t place) const {
  tag(place).store(0, std::memory_order_release);
  retire(place);
  std::atomic_thread_fence(std::memory_order_release);
  SharedEntry& entry = this->entry(place);
  for (auto& word : entry.words) word.store(0, std::memory_order_relaxed);
  entry.check.store(0, std::memory_order_relaxed);
  entry.version.store(entry.version.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

std::optional<Shown> SharedTable::recover(size_t place) const {
  const SharedEntry& entry = this->entry(place);
  if (entry.version.load(std::memory_order_acquire) & 1) return std::nullopt;
  uint64_t words[6];
  for (size_t w = 0; w < 6; ++w) words[w] = entry.words[w].load(std::memory_order_relaxed);
  Shown shown;
  std::memcpy(&shown, words, sizeof words);
  if (shown.state == 0 || entry.check.load(std::memory_order_relaxed) != check_of(shown)) return std::nullopt;
  const size_t here = place / kWays;
  if (here != bucket(shown.key, false) && here != bucket(shown.key, true)) return std::nullopt;
  return shown;
}

uint32_t Places::choose(const SharedTable& table, Hash128 key, bool in_memory) const {
  const size_t first = table.bucket(key, false), second = table.bucket(key, true);
  // The first as long as it has room for some more: then readers find most keys in the first bucket they look at.
  const int taken = std::popcount(used_[first]);
  const size_t emptier = taken >= kFirst && std::popcount(used_[second]) < taken ? second : first;
  if (used_[emptier] != 0xff) {
    return static_cast<uint32_t>(emptier * kWays) + static_cast<uint32_t>(std::countr_one(used_[emptier]));
  }
  if (!in_memory) return kNone;
  for (const size_t bucket : {first, second}) {
    if (disk_[bucket]) return static_cast<uint32_t>(bucket * kWays) + static_cast<uint32_t>(std::countr_zero(disk_[bucket]));
  }
  return kNone;
}

uint32_t Places::find_disk(const SharedTable& table, Hash128 key) const {
  const uint64_t wanted = SharedTable::tag_of(key);
  for (const bool second : {false, true}) {
    const size_t bucket = table.bucket(key, second);
    for (uint8_t ways = disk_[bucket]; ways != 0; ways &= static_cast<uint8_t>(ways - 1)) {
      const size_t place = bucket * kWays + static_cast<size_t>(std::countr_zero(ways));
      if (table.tag(place).load(std::memory_order_relaxed) != wanted) continue;
      const auto shown = table.recover(place);
      if (shown && equal(shown->key, key)) return static_cast<uint32_t>(place);
    }
  }
  return kNone;
}

void Places::take(uint32_t place, bool disk_alone) {
  const auto bit = static_cast<uint8_t>(1u << place % kWays);
  count_ += !used(place);
  used_[place / kWays] |= bit;
  disk_[place / kWays] = static_cast<uint8_t>(disk_alone ? disk_[place / kWays] | bit : disk_[place / kWays] & ~bit);
}

void Places::give(uint32_t place) {
  const auto bit = static_cast<uint8_t>(1u << place % kWays);
  count_ -= used(place);
  used_[place / kWays] &= static_cast<uint8_t>(~bit);
  disk_[place / kWays] &= static_cast<uint8_t>(~bit);
}

}  // namespace memserve::store

// The prefix index: a radix tree over whole blocks of tokens, one root a namespace.
//
//      root of namespace N
//       |-- [ b0 b1 b2 b3 | b4 b5 ]     a node's edge is a run of whole blocks; `|` = node.hbm: blocks before it lie in
//       |        |                      HBM, blocks behind it in DRAM
//       |        `-- [ | b6 b7 ]        below a DRAM block there are only DRAM blocks
//       `-- [ c0 c1 | ]
//
// Invariants (check_invariants):
//   * Along any path from the root the tier never goes up: HBM blocks, then DRAM blocks. So eviction takes leaves of a
//     tier first, and what is left is always a usable prefix.
//   * node.locks = pins that end in the node's subtree. Locked nodes are in no LRU list and are never evicted.
//   * node.holds[tier] = holds on that tier that end in the node's subtree. A held node is evictable by count, and not in
//     the tier's LRU list: it waits until all of them are over. So what is not held goes first (a path that no recurrent
//     state stands behind, or that is not retained). Then it stands where its last use puts it, as if it had not been
//     held. Blocks that are held in DRAM alone leave HBM for DRAM.
//   * A pin is a use, and the only one: requests, forks, transfers and hand-overs all take blocks by it.
//   * A node without locks, and holds on a tier, is in its owner's LRU list of that tier if it has blocks there, and never
//     behind (older than) a child of its own in that list: the list's tail is always evictable. Paths are touched
//     deepest node first to keep it so. Along a list, from its newest node on, used[tier] never rises.
//   * Each root has one owner (a tenant); its namespaces (one per salt) share lists and counts. Eviction takes the
//     oldest leaf of the owner with the heaviest blocks: they count double for each time that as many blocks as a tier
//     has have entered the index since the owner used it. So a flood evicts its own blocks, and an absent owner loses
//     its blocks. Ties go to the owner whose last use is longest ago. A lone owner may hold everything.
//   * A child is found by the 64-bit hash of (parent, first block of its edge); tokens are always compared, so a hash
//     collision costs time and never gives wrong KV.
// Order comes from the lists alone. The counters (`entered_`, `touched_`, `aged_`) have 64 bits.
#pragma once
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool/allocator.h"
#include "radix/row_store.h"
#include "radix/slab.h"

namespace memserve {

enum Tier : int { kHbm = 0, kDram = 1, kTiers = 2 };

// 128 bits that name a namespace (tenant, model and weights, dtype, layout).
struct NamespaceId {
  uint64_t low, high;
  bool operator==(const NamespaceId&) const = default;
};

struct NamespaceHash {
  size_t operator()(const NamespaceId& id) const { return id.low ^ id.high * 0x9e3779b97f4a7c15ull; }
};

struct Node;

struct List {
  Node* newest = nullptr;
  Node* oldest = nullptr;
};

// A tenant, while it has blocks in the index.
struct Owner {
  NamespaceId name;
  size_t roots = 0;
  size_t held[kTiers] = {};  // blocks in the index, locked or not
  uint64_t used_at = 0;      // `entered_` at the last use
  List lists[kTiers];
  std::list<Owner>::iterator self;
};

// A walk reads only the first cache line.
struct alignas(64) Node {
  uint64_t edge_hash = 0;
  Node* parent = nullptr;
  Node* next_in_bucket = nullptr;
  Rows rows;           // the edge: `size` block ids and their tokens, owned by this node alone
  uint32_t size = 0;   // blocks on the edge; 0 only for a root
  uint32_t hbm = 0;    // blocks [0, hbm) lie in HBM, [hbm, size) in DRAM
  uint32_t id = 0;     // handle of the node; 0 = the node is not in use
  uint32_t locks = 0;  // pins that end in this subtree

  uint32_t pins = 0;   // pins that end at this node
  uint32_t holds[kTiers] = {};  // holds that end in this subtree
  uint32_t ends[kTiers] = {};   // holds that end at this node
  int64_t used[kTiers] = {};    // `touched_` when it last became the newest of the tier, `aged_` when the oldest
  bool listed[kTiers] = {};
  Node* first_child = nullptr;
  Node* next_sibling = nullptr;
  Node* prev_sibling = nullptr;
  Node* newer[kTiers] = {};
  Node* older[kTiers] = {};
  const NamespaceId* root_of = nullptr;
  Owner* owner = nullptr;

  int32_t* blocks() { return rows.ids; }
  const int32_t* blocks() const { return rows.ids; }
  const int32_t* tokens() const { return rows.tokens; }
  uint32_t in_tier(int tier) const { return tier == kHbm ? hbm : size - hbm; }
};

// Where a walk ended: `in_node` blocks of `node` match, `depth` blocks in all.
struct Position {
  Node* node;
  uint32_t in_node;
  size_t depth;
};

// What one call took out of the index or moved inside it, in order. References are already dropped.
struct Eviction {
  enum Kind : int32_t { kDroppedHbm, kDroppedDram, kMoved };  // moved: HBM block `from` goes to DRAM block `to`
  struct Change {
    Kind kind;
    int32_t from, to;
  };
  std::vector<Change> changes;
  std::vector<uint32_t> ended_holds;  // their path is not whole any more, or could not stay so
  size_t freed = 0;  // blocks of the asked tier that became free
};

struct Insertion {
  size_t added = 0;                   // blocks that the index took a reference on
  std::vector<int32_t> adopted_dram;  // DRAM blocks freed because the caller has the same tokens in HBM
  uint32_t pin = 0;
};

struct Promotion {
  uint32_t pin = 0;
  std::vector<int32_t> left_dram;  // DRAM blocks whose contents must be copied to the given HBM blocks, in order
};

class RadixIndex {
 public:
  RadixIndex(uint32_t block_tokens, BlockAllocator* hbm, BlockAllocator* dram, uint64_t hash_seed);
  RadixIndex(const RadixIndex&) = delete;
  RadixIndex& operator=(const RadixIndex&) = delete;

  uint32_t block_tokens() const { return block_tokens_; }
  size_t blocks_in(int tier) const { return blocks_in_[tier]; }
  size_t blocks_locked(int tier) const { return blocks_locked_[tier]; }
  size_t nodes() const { return nodes_in_use_; }
  // The weight of an owner's blocks with `beside` more that the index does not know. 0: it has nothing in the index.
  uint64_t burden_of(const NamespaceId& owner, int tier, size_t beside) const;
  size_t bytes() const;

  // Read-only.
  Position walk(const NamespaceId& name, std::span<const int32_t> tokens) const;
  // Up to `count` tokens that lie behind `tokens` in the tree, as far as one edge goes. Empty: not all of `tokens` are in
  // it, or nothing follows.
  std::span<const int32_t> continuation(const NamespaceId& name, std::span<const int32_t> tokens, size_t count) const;
  void path_blocks(const Position& end, std::vector<int32_t>& hbm, std::vector<int32_t>& dram) const;

  // Pins (0 = nothing pinned). A pin protects its node and all above.
  uint32_t pin(const NamespaceId& name, std::span<const int32_t> tokens, Position& end);
  void unpin(uint32_t pin);
  void retain_hbm(std::span<const int32_t> blocks) { if (allocator_[kHbm]) allocator_[kHbm]->retain(blocks); }
  Node* pinned_node(uint32_t pin) const;

  // Keeps the whole of a cached path out of the LRU lists of both tiers, at least until `unhold` or until it is erased
  // (which ends the hold). 0: not all of it is cached.
  uint32_t hold(const NamespaceId& name, std::span<const int32_t> tokens);
  void unhold(uint32_t hold, int tier);
  bool is_held(uint32_t hold, int tier) const;
  // What only `tokens` leads to, with the one path that may go on behind them, is the next of its owner to leave either
  // tier. Returns its blocks; 0 also where several paths go on behind them, or not all of them are cached.
  size_t make_oldest(const NamespaceId& name, std::span<const int32_t> tokens);
  // The same path leaves HBM for DRAM, as far as there is room; what is held in DRAM, too. That is a use of it.
  void demote(const NamespaceId& name, std::span<const int32_t> tokens, Eviction& out);

  // blocks[0, hbm_blocks) lie in HBM, the rest in DRAM. With `keep_pin` the deepest node stays pinned.
  // `owner` is used for a namespace with nothing in the index yet; others keep theirs.
  Insertion insert(const NamespaceId& name, std::span<const int32_t> tokens, std::span<const int32_t> blocks,
                   size_t hbm_blocks, bool keep_pin, const NamespaceId& owner = {});
  Promotion promote(uint32_t pin, std::span<const int32_t> hbm_blocks);
  bool evictable(int tier) const { return next_victim(tier).owner; }  // without what is held
  size_t evictable_blocks(int tier, size_t at_most) const;             // as far as they are counted, without what is held
  // From now on only blocks that are held in DRAM go there from HBM; others are dropped. Where the former find no room,
  // eviction from HBM ends early.
  void set_demotes_held_only() { demotes_held_only_ = true; }
  size_t evict_hbm(size_t count, Eviction& out);
  size_t evict_dram(size_t count, Eviction& out);
  void erase(const NamespaceId& name, std::span<const int32_t> tokens, Eviction& out);
  void clear(Eviction& out);

  void check_invariants() const;

 private:
  // The owner to take blocks from, null when nothing is evictable; and how many before choosing again.
  struct Victim {
    Owner* owner;
    size_t blocks;
  };

  // The head's tokens are stored beside it, so that a walk can prefetch them and the node at the same time.
  struct Bucket {
    Node* head = nullptr;
    const int32_t* tokens = nullptr;
    void set(Node* node) {
      head = node;
      tokens = node ? node->tokens() : nullptr;
    }
  };

  // nodes.cpp: storage, children, lists, locks
  Node* new_node();
  void free_node(Node* node);
  Node* root(const NamespaceId& name, const NamespaceId& owner);
  void remove_root(Node* root);
  void count(Owner* owner, int tier, ptrdiff_t blocks);
  class Lookahead;
  static Node* guess_again(Node* from, const Node* parent, uint64_t hash);
  Node* find_child(const Node* parent, const int32_t* block) const;
  void attach(Node* parent, Node* child);
  void detach(Node* child);
  void link_bucket(Node* child);
  void unlink_bucket(Node* child);
  size_t bucket_of(uint64_t hash) const;
  void add_bucket();
  void store(Node* node, const int32_t* blocks, const int32_t* tokens, uint32_t size);
  void shrink(Node* node, uint32_t size);
  Node* split(Node* node, uint32_t at);
  void remove_childless(Node* node);
  void touch_in(int tier, Node* node);
  void list_between(int tier, Node* node, Node* newer, Node* older);
  void list_before(int tier, Node* node, Node* older);
  void list_by_use(int tier, Node* node);
  void unlist(int tier, Node* node);
  void touch(Node* node);
  void lock_path(Node* node);
  void unlock_path(Node* node);
  void end_holds(Node* node, int tier, uint32_t count);
  void end_all_holds(Node* node, Eviction& out);
  void end_holds_below(Node* node, Eviction& out);
  void set_idle(Node* node, bool idle);
  uint64_t edge_hash(const Node* parent, const int32_t* block) const;
  uint32_t equal_blocks(const Node* node, const int32_t* tokens, size_t blocks, Lookahead& next) const;

  // index.cpp
  void adopt(Node* node, uint32_t upto, const int32_t* blocks, Insertion& out);
  Node* append(Node* parent, std::span<const int32_t> tokens, std::span<const int32_t> blocks, size_t hbm_blocks);
  uint32_t pin_at(Node* node);
  Node* node_ending_at(const Position& end);
  std::vector<Node*> sole_path(const NamespaceId& name, std::span<const int32_t> tokens, bool held_in_dram);

  // evict.cpp
  uint64_t burden(const Owner& owner, int tier, size_t beside = 0) const;
  Victim next_victim(int tier) const;
  size_t release_one(Owner* owner, int tier, const int32_t* blocks, size_t count);
  size_t drop_tail_dram(Node* node, uint32_t count, Eviction& out);
  void drop_tail_hbm(Node* node, uint32_t count, Eviction& out);
  void demote_tail(Node* node, uint32_t count, Eviction& out);
  uint32_t reserve_dram(uint32_t count, Eviction& out);
  void drop_unlocked_below(Node* node, Eviction& out);

  // check.cpp
  void check_node(const Node& node, size_t (&in)[kTiers], size_t (&locked)[kTiers]) const;
  void check_list(const Owner& owner, int tier) const;
  void check_owners() const;

  uint32_t block_tokens_;
  BlockAllocator* allocator_[kTiers];
  uint64_t hash_seed_;
  std::unordered_map<NamespaceId, Node*, NamespaceHash> roots_;
  RowStore rows_;
  Slab<Node> nodes_;                  // nodes_[id - 1]; never moves
  std::vector<uint32_t> free_ids_;
  Slab<Bucket> buckets_;              // of children, by `bucket_of` their edge's hash
  size_t edges_ = 0;
  size_t nodes_in_use_ = 0;
  size_t blocks_in_[kTiers] = {};
  size_t blocks_locked_[kTiers] = {};
  uint64_t entered_ = 0;              // blocks that ever entered
  int64_t touched_ = 0;               // up by one when a node becomes the newest of a tier
  int64_t aged_ = 0;                  // down by one when a node becomes the oldest of both
  bool demotes_held_only_ = false;
  std::list<Owner> owners_;           // by last use, longest ago first
  std::unordered_map<NamespaceId, Owner*, NamespaceHash> owner_of_;
};

}  // namespace memserve

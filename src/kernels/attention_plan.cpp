// Cuts a ragged batch into tiles that keep every thread busy until the end.
#include "attention.h"

namespace memserve {
namespace {

constexpr int kSplitTokensMin = 2 * kChunkTokens;  // a shorter part of a context is not worth a merge
constexpr int64_t kPanelOverheadRows = 8;          // reading and packing a panel costs about as much as 8 rows of work
// Work for one thread alone, in rows times panels times elements of K and V: it takes about 6 us; waking other threads
// and waiting for them costs half of that.
constexpr int64_t kAloneCost = 256 * 128;

int64_t cost(const Tile& t, int group) {
  const int64_t panels = padded(t.end_token - t.first_token, kPanelTokens) / kPanelTokens;
  return (int64_t(t.queries) * group + kPanelOverheadRows) * panels;
}

// All queries of a row for one kv head, `queries_max` at a time.
void add_tiles(std::vector<Tile>& tiles, const Batch& batch, int row, int kv_head, int queries_max, Reach reach) {
  for (int first = 0; first < batch.count(row); first += queries_max) {
    const int queries = std::min(queries_max, batch.count(row) - first);
    const int position = batch.first_position(row) + first;
    tiles.push_back({row, kv_head, first, queries, reach.oldest(position) / kPanelTokens * kPanelTokens,
                     std::min(position + queries, batch.contexts[row]), -1, -1,
                     batch.count(row) <= queries_max && !batch.shares_writes});
  }
}

// Replaces a tile that would keep one thread busy for too long by parts of its context.
void split_tile(Plan& plan, const Tile& whole, int64_t cost_max, int group) {
  const int tokens = whole.end_token - whole.first_token;
  const int64_t wanted = (cost(whole, group) + cost_max - 1) / cost_max;
  const int parts = int(std::min<int64_t>(wanted, tokens / kSplitTokensMin));
  if (parts < 2) return plan.tiles.push_back(whole);
  const int part_tokens = padded((tokens + parts - 1) / parts, kPanelTokens);
  Merge merge{whole, plan.partials, 0};
  for (int first = whole.first_token; first < whole.end_token; first += part_tokens, ++merge.parts) {
    Tile part = whole;
    part.first_token = first;
    part.end_token = std::min(first + part_tokens, whole.end_token);
    part.partial = plan.partials++;
    part.merge = int32_t(plan.merges.size());
    plan.tiles.push_back(part);
  }
  plan.merges.push_back(merge);
}

}  // namespace

Plan make_plan(const Batch& batch, int heads, Reach reach, int threads_max) {
  Plan plan{heads, reach, threads_max, threads_max};
  const int kv_heads = batch.layout.num_kv_heads, group = heads / kv_heads;
  const int queries_max = std::max(1, kTileRows / group);
  std::vector<Tile> wholes;
  for (int row = 0; row < batch.rows(); ++row) {
    if (batch.count(row) > queries_max || batch.shares_writes) plan.rows_written_first.push_back(row);
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) add_tiles(wholes, batch, row, kv_head, queries_max, reach);
  }
  int64_t total = 0;
  for (const Tile& tile : wholes) {
    total += cost(tile, group);
    plan.tile_rows_max = std::max(plan.tile_rows_max, tile.queries * group);
  }
  if (total * (batch.layout.head_dim_k + batch.layout.head_dim_v) < kAloneCost) plan.threads = 1;
  const int64_t cost_max = std::max<int64_t>(1, plan.threads > 1 ? total / (4 * plan.threads) : total);
  for (const Tile& tile : wholes) split_tile(plan, tile, cost_max, group);
  // Longest first: short tiles fill the gaps at the end.
  std::stable_sort(plan.tiles.begin(), plan.tiles.end(),
                   [group](const Tile& a, const Tile& b) { return cost(a, group) > cost(b, group); });
  return plan;
}

}  // namespace memserve

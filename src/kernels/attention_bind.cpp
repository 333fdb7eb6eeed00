// Python face of paged attention: PagedBatch and attend. All checks are here; the kernels check nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <deque>
#include <optional>
#include <string>
#include <tuple>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "attention.h"

namespace nb = nanobind;

namespace {

using memserve::AttendArgs;
using memserve::Batch;
using memserve::Dtype;
using memserve::PageLayout;
using memserve::Plan;
using memserve::Strided;

using Geometry = std::tuple<int, int, int, int, int, std::string, std::string>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Statistics = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Parts = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using PartStatistics = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Address = std::tuple<uintptr_t, int64_t, int64_t>;

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::string message;
  ((message += [](const auto& part) {
     if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) return std::to_string(part);
     else return std::string(part);
   }(parts)), ...);
  throw nb::value_error(message.c_str());
}

Dtype parse_dtype(const std::string& name) {
  if (name == "float32") return Dtype::float32;
  if (name == "bfloat16") return Dtype::bfloat16;
  require(name == "float16", "dtype is '", name, "', not float32, bfloat16 or float16");
  return Dtype::float16;
}

memserve::Scheme parse_scheme(const std::string& name) {
  for (int i = 0; i < memserve::kSchemes; ++i)
    if (name == memserve::kSchemeNames[i]) return memserve::Scheme(i);
  require(false, "kv_dtype is '", name, "', not auto, int8, fp8 or int4");
  return memserve::Scheme::as_computed;
}

PageLayout parse_layout(uintptr_t base, const Geometry& geometry, std::optional<int> page_heads, bool latent,
                        size_t block_stride) {
  const auto& [layers, kv_heads, dim_k, dim_v, block_tokens, dtype, kv_dtype] = geometry;
  require(layers > 0, "num_layers is ", layers, ", must be positive");
  require(kv_heads > 0, "num_kv_heads is ", kv_heads, ", must be positive");
  require(dim_k > 0 && dim_k % 8 == 0, "head_dim_k is ", dim_k, ", must be a positive multiple of 8");
  require(dim_v > 0 && dim_v % 8 == 0, "head_dim_v is ", dim_v, ", must be a positive multiple of 8");
  require(block_tokens > 0 && block_tokens % 16 == 0, "block_tokens is ", block_tokens,
          ", must be a positive multiple of 16");
  require(!page_heads || *page_heads >= kv_heads, "page_heads is ", page_heads.value_or(0), ", less than the ",
          kv_heads, " kv heads of the geometry");
  require(base != 0 && base % 4 == 0, "base is ", base, ", must be a non-zero address aligned to 4 bytes");
  const memserve::Scheme scheme = parse_scheme(kv_dtype);
  const int largest = std::max(dim_k, dim_v);
  require(scheme == memserve::Scheme::as_computed || largest <= memserve::kCodedDimMax, "a head of ", largest,
          " elements is too large for KV as ", kv_dtype);
  require(!latent || (kv_heads == 1 && dim_v <= dim_k && scheme == memserve::Scheme::as_computed),
          "latents are of one kv head, as computed, and their values part of their keys");
  const PageLayout layout{reinterpret_cast<char*>(base), layers, kv_heads, dim_k, dim_v, block_tokens, parse_dtype(dtype),
                          page_heads.value_or(kv_heads), scheme, latent, block_stride};
  require(block_stride == 0 || block_stride >= layout.page_bytes() * layers, "block_stride is ", block_stride,
          ", less than the pages of a block");
  return layout;
}

// One row of the batch: its counts are checked, its block ids copied.
void add_row(Batch& batch, const Table& tables, int row, int table_row, int64_t num_blocks) {
  const int slots = int(tables.shape(0)), width = int(tables.shape(1));
  const int count = batch.count(row), context = batch.contexts[row];
  require(table_row >= 0 && table_row < slots, "table_rows[", row, "] is ", table_row, ", but tables has ", slots,
          " rows");
  require(count >= 0, "q_starts falls from ", batch.q_starts[row], " to ", batch.q_starts[row + 1], " at row ", row);
  require(context >= (batch.behind ? 1 : count), "contexts[", row, "] is ", context, ", less than the row's ", count,
          " new tokens");
  const int64_t block_tokens = batch.layout.block_tokens, blocks = (context + block_tokens - 1) / block_tokens;
  require(blocks <= width, "contexts[", row, "] is ", context, ", but tables has room for ", width * block_tokens,
          " tokens");
  const int32_t* ids = tables.data() + int64_t(table_row) * width;
  for (int64_t i = 0; i < blocks; ++i)
    require(ids[i] >= 0 && ids[i] < num_blocks, "block id ", ids[i], " at tables[", table_row, ", ", i,
            "] is not in 0..", num_blocks - 1);
  batch.block_starts.push_back(int64_t(batch.blocks.size()));
  batch.blocks.insert(batch.blocks.end(), ids, ids + blocks);
}

// Whether a block that some row writes also belongs to another row (two requests that compute a prefix together).
bool shares_writes(const Batch& batch) {
  int32_t highest = -1;
  for (const int32_t id : batch.blocks) highest = std::max(highest, id);
  std::vector<uint8_t> users(size_t(highest) + 1, 0);
  for (const int32_t id : batch.blocks) users[id] = users[id] ? 2 : 1;
  for (int row = 0; row < batch.rows(); ++row) {
    if (batch.count(row) == 0) continue;
    const int first = batch.first_position(row) / batch.layout.block_tokens;
    for (int i = first; i <= (batch.contexts[row] - 1) / batch.layout.block_tokens; ++i)
      if (users[batch.row_blocks(row)[i]] > 1) return true;
  }
  return false;
}

Batch parse_batch(uintptr_t base, const Geometry& geometry, const Table& tables, const Ints& table_rows,
                  const Ints& q_starts, const Ints& contexts, std::optional<int64_t> num_blocks,
                  std::optional<int> page_heads, bool behind, bool latent, size_t block_stride) {
  Batch batch;
  batch.behind = behind;
  batch.layout = parse_layout(base, geometry, page_heads, latent, block_stride);
  const size_t rows = contexts.shape(0);
  require(table_rows.shape(0) == rows, "table_rows has ", table_rows.shape(0), " entries, contexts has ", rows);
  require(q_starts.shape(0) == rows + 1, "q_starts has ", q_starts.shape(0), " entries, contexts + 1 is ", rows + 1);
  require(q_starts.data()[0] == 0, "q_starts begins with ", q_starts.data()[0], ", must begin with 0");
  batch.q_starts.assign(q_starts.data(), q_starts.data() + rows + 1);
  batch.contexts.assign(contexts.data(), contexts.data() + rows);
  const int64_t limit = num_blocks.value_or(int64_t(1) << 31);
  for (size_t row = 0; row < rows; ++row) add_row(batch, tables, int(row), table_rows.data()[row], limit);
  batch.shares_writes = !behind && shares_writes(batch);
  return batch;
}

int threads_max() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

class PagedBatch {
 public:
  explicit PagedBatch(Batch batch) : batch_(std::move(batch)) {}

  const Batch& batch() const { return batch_; }
  int tokens() const { return batch_.q_starts.back(); }

  // Layers with the same heads and reach share a plan; a model has at most a few kinds of layers.
  const Plan& plan(int heads, memserve::Reach reach) {
    const int threads = threads_max();
    for (const Plan& plan : plans_)
      if (plan.heads == heads && plan.reach == reach && plan.threads_max == threads) return plan;
    plans_.push_back(memserve::make_plan(batch_, heads, reach, threads));
    return plans_.back();
  }

 private:
  Batch batch_;
  std::deque<Plan> plans_;  // a reference stays valid when one is added
};

Strided strided(const char* name, const Address& address, size_t element_bytes) {
  const auto& [pointer, token_stride, head_stride] = address;
  require(pointer != 0 && pointer % element_bytes == 0, name, "'s address is ", pointer,
          ", must be non-zero and aligned");
  return {reinterpret_cast<char*>(pointer), token_stride, head_stride};
}

void attend(PagedBatch& batch, int layer, int heads, const Address& q, const Address& k, const Address& v,
            const Address& out, float scale, int window, float softcap, const std::optional<Floats>& sinks,
            bool write, const std::optional<Statistics>& statistics, int chunk) {
  const PageLayout& layout = batch.batch().layout;
  require(layer >= 0 && layer < layout.num_layers, "layer is ", layer, ", must be in 0..", layout.num_layers - 1);
  require(heads > 0 && heads % layout.num_kv_heads == 0, "heads is ", heads, ", must be a positive multiple of the ",
          layout.num_kv_heads, " kv heads");
  require(std::isfinite(scale) && scale > 0, "scale is ", scale, ", must be positive");
  require(window >= 0, "window is ", window, ", must be 0 (unlimited) or positive");
  require(chunk >= 0, "chunk is ", chunk, ", must be 0 (unlimited) or positive");
  require(std::isfinite(softcap) && softcap >= 0, "softcap is ", softcap, ", must be 0 (off) or positive");
  if (sinks) require(sinks->shape(0) == size_t(heads), "sinks has ", sinks->shape(0), " entries for ", heads, " heads");
  if (batch.batch().behind) require(!write && window == 0 && chunk == 0, "queries behind the context are not written, and see all of it");
  if (statistics) {
    require(statistics->shape(0) >= size_t(batch.tokens()) && statistics->shape(1) == size_t(heads),
            "statistics is not [tokens, heads]");
    require(!sinks, "sinks are part of no context: merge them elsewhere");
  }
  if (batch.tokens() == 0) return;
  const size_t bytes = layout.element_bytes();
  AttendArgs args{layer, heads, strided("q", q, bytes), {}, {}, strided("out", out, statistics ? 4 : bytes), scale,
                  softcap, {window, chunk}, sinks ? sinks->data() : nullptr, write, statistics ? statistics->data() : nullptr};
  if (write) {
    args.k = strided("k", k, bytes);
    args.v = strided("v", v, bytes);
  }
  const Plan& plan = batch.plan(heads, {window, chunk});
  nb::gil_scoped_release unlocked;
  memserve::attend(batch.batch(), plan, args);
}

void merge_parts(const Parts& outputs, const PartStatistics& statistics, const Statistics& out) {
  const size_t parts = outputs.shape(0), rows = outputs.shape(1), dim = outputs.shape(2);
  require(parts > 0, "there is no part to merge");
  require(statistics.shape(0) == parts && statistics.shape(1) == rows, "statistics is not [parts, rows]");
  require(out.shape(0) == rows && out.shape(1) == dim, "out is not [rows, dim]");
  nb::gil_scoped_release unlocked;
  memserve::merge_parts(outputs.data(), statistics.data(), int(parts), int64_t(rows), int(dim), out.data());
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PagedBatch>(m, "PagedBatch", "One step's ragged batch: built once per step, used by every layer.")
      .def("__init__",
           [](PagedBatch* self, uintptr_t base, const Geometry& geometry, const Table& tables, const Ints& table_rows,
              const Ints& q_starts, const Ints& contexts, std::optional<int64_t> num_blocks,
              std::optional<int> page_heads, bool behind, bool latent, size_t block_stride) {
             new (self) PagedBatch(parse_batch(base, geometry, tables, table_rows, q_starts, contexts, num_blocks,
                                               page_heads, behind, latent, block_stride));
           },
           nb::arg("base"), nb::arg("geometry"), nb::arg("tables").noconvert(), nb::arg("table_rows").noconvert(),
           nb::arg("q_starts").noconvert(), nb::arg("contexts").noconvert(), nb::arg("num_blocks").none() = nb::none(),
           nb::arg("page_heads").none() = nb::none(), nb::arg("behind") = false, nb::arg("latent") = false,
           nb::arg("block_stride") = 0)
      .def_prop_ro("tokens", &PagedBatch::tokens)
      .def_prop_ro("rows", [](const PagedBatch& self) { return self.batch().rows(); });
  m.def("attend", &attend, nb::arg("batch"), nb::arg("layer"), nb::arg("heads"), nb::arg("q"), nb::arg("k"),
        nb::arg("v"), nb::arg("out"), nb::arg("scale"), nb::arg("window") = 0, nb::arg("softcap") = 0.0f,
        nb::arg("sinks").noconvert().none() = nb::none(), nb::arg("write") = true,
        nb::arg("statistics").noconvert().none() = nb::none(), nb::arg("chunk") = 0);
  m.def("merge_parts", &merge_parts, nb::arg("outputs").noconvert(), nb::arg("statistics").noconvert(),
        nb::arg("out").noconvert());
}

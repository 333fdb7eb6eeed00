nanobind_add_module(_core STABLE_ABI NB_STATIC NB_DOMAIN memserve
  src/core/bind/allocator.cpp
  src/core/bind/directory.cpp
  src/core/bind/disk_queue.cpp
  src/core/bind/identity.cpp
  src/core/bind/json_shape.cpp
  src/core/bind/kv_codec.cpp
  src/core/bind/memory.cpp
  src/core/bind/memory_tier.cpp
  src/core/bind/module.cpp
  src/core/bind/radix.cpp
  src/core/bind/sealed_copy.cpp
  src/core/bind/segment_log.cpp
  src/core/bind/shared_arena.cpp
  src/core/bind/stop_strings.cpp
  src/core/bind/tier_reader.cpp
  src/core/codec/kv_codec.cpp
  src/core/codec/tiers.cpp
  src/core/directory/check.cpp
  src/core/directory/directory.cpp
  src/core/directory/entry.cpp
  src/core/directory/holders.cpp
  src/core/directory/match.cpp
  src/core/directory/walk.cpp
  src/core/pool/allocator.cpp
  src/core/pool/arena.cpp
  src/core/pool/copy_engine.cpp
  src/core/pool/copy_pages.cpp
  src/core/pool/lower_pages.cpp
  src/core/pool/mapping.cpp
  src/core/pool/shared_arena.cpp
  src/core/pool/workers.cpp
  src/core/radix/check.cpp
  src/core/radix/evict.cpp
  src/core/radix/index.cpp
  src/core/radix/nodes.cpp
  src/core/radix/row_store.cpp
  src/core/radix/walk.cpp
  src/core/routing/cheapest.cpp
  src/core/routing/curves.cpp
  src/core/routing/shortlist.cpp
  src/core/scheduling/rows.cpp
  src/core/scheduling/sequence.cpp
  src/core/store/check.cpp
  src/core/store/client_area.cpp
  src/core/store/disk_queue.cpp
  src/core/store/disk_threads.cpp
  src/core/store/disk_uring.cpp
  src/core/store/extents.cpp
  src/core/store/lifecycle.cpp
  src/core/store/memory_tier.cpp
  src/core/store/record_index.cpp
  src/core/store/recovery.cpp
  src/core/store/segment_log.cpp
  src/core/store/shared_table.cpp
  src/core/store/tier_evict.cpp
  src/core/store/tier_files.cpp
  src/core/store/tier_reader.cpp
  src/core/store/tier_shown.cpp
  src/core/text/stop_strings.cpp
  src/core/transfer/seal_sums.cpp
  src/core/transfer/sealed_copy.cpp
)
# The same sums as in Python, to the last bit; and the same curves from each processor.
set_source_files_properties(src/core/routing/cheapest.cpp src/core/routing/curves.cpp
  PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-fno-math-errno")
# Codes as on every machine, and as in the tests' twin: a product is rounded before anything is added to it.
set_source_files_properties(src/core/pool/lower_pages.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-fno-trapping-math;-fno-math-errno")
# gcc 12's own AVX-512 header is what it warns of.
set_source_files_properties(src/core/transfer/seal_sums.cpp PROPERTIES COMPILE_OPTIONS -Wno-maybe-uninitialized)
set_source_files_properties(src/core/codec/tiers.cpp PROPERTIES COMPILE_OPTIONS "-Wno-maybe-uninitialized;-Wno-uninitialized")
target_compile_options(_core PRIVATE -Wall -Wextra $<$<CONFIG:Release>:-O3>)
target_include_directories(_core PRIVATE src/core)
# What most sources include is read once: a third of the time of each.
target_precompile_headers(_core PRIVATE <algorithm> <array> <atomic> <bit> <cstring> <memory> <optional> <span> <string>
  <unordered_map> <utility> <vector> <nanobind/nanobind.h> <nanobind/ndarray.h> <nanobind/stl/optional.h>
  <nanobind/stl/pair.h> <nanobind/stl/string.h> <nanobind/stl/vector.h>)
set_source_files_properties(src/core/codec/tiers.cpp src/core/pool/lower_pages.cpp src/core/routing/cheapest.cpp
  src/core/routing/curves.cpp src/core/transfer/seal_sums.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)  # other options than those it was read with
target_link_libraries(_core PRIVATE Threads::Threads)
install(TARGETS _core LIBRARY DESTINATION memserve)

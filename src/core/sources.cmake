nanobind_add_module(_core STABLE_ABI NB_STATIC
  src/core/module.cpp
  src/core/sequence.cpp
  src/core/allocator.cpp
  src/core/row_store.cpp
  src/core/radix_nodes.cpp
  src/core/radix_walk.cpp
  src/core/radix_index.cpp
  src/core/radix_evict.cpp
  src/core/radix_holders.cpp
  src/core/radix_check.cpp
  src/core/bind_allocator.cpp
  src/core/bind_radix.cpp
  src/core/bind_memory.cpp
  src/core/arena.cpp
  src/core/copy_engine.cpp
  src/core/workers.cpp
  src/core/shared_arena.cpp
  src/core/bind_shared_arena.cpp
  src/core/seal_sums.cpp
  src/core/sealed_copy.cpp
  src/core/bind_sealed_copy.cpp
  src/core/bind_identity.cpp
  src/core/directory.cpp
  src/core/directory_entry.cpp
  src/core/directory_walk.cpp
  src/core/directory_match.cpp
  src/core/directory_holders.cpp
  src/core/directory_check.cpp
  src/core/bind_directory.cpp
  src/core/shortlist.cpp
  src/core/cheapest.cpp
  src/core/rows.cpp
  src/core/stop_strings.cpp
  src/core/bind_stop_strings.cpp
  src/core/bind_json_shape.cpp
)
# The same sums as in Python, to the last bit.
set_source_files_properties(src/core/cheapest.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-fno-math-errno")
# gcc 12's own AVX-512 header is what it warns of.
set_source_files_properties(src/core/seal_sums.cpp PROPERTIES COMPILE_OPTIONS -Wno-maybe-uninitialized)
target_compile_options(_core PRIVATE -Wall -Wextra $<$<CONFIG:Release>:-O3>)
target_link_libraries(_core PRIVATE Threads::Threads)
install(TARGETS _core LIBRARY DESTINATION memserve)

nanobind_add_module(_core STABLE_ABI NB_STATIC
  src/core/module.cpp
)
target_link_libraries(_core PRIVATE Threads::Threads)
install(TARGETS _core LIBRARY DESTINATION memserve)

nanobind_add_module(_kernels STABLE_ABI NB_STATIC
  src/kernels/module.cpp
)
target_link_libraries(_kernels PRIVATE Threads::Threads)
install(TARGETS _kernels LIBRARY DESTINATION memserve)

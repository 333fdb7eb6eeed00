#include <nanobind/nanobind.h>

NB_MODULE(_kernels, m) { m.doc() = "memserve native kernels"; }

# One module. ISA sources are compiled once per instruction set into a namespace MEMSERVE_ISA; isa.h picks at run time.
set(MEMSERVE_ISA_SOURCES
  src/kernels/attention_codes_kernels.cpp
  src/kernels/attention_kernels.cpp
  src/kernels/float8_kernels.cpp
  src/kernels/fused_kernels.cpp
  src/kernels/quantised_fill_kernels.cpp
  src/kernels/quantised_kernels.cpp
  src/kernels/quantised_numbers_kernels.cpp
  src/kernels/recurrent_kernels.cpp
  src/kernels/sampling_kernels.cpp
)
nanobind_add_module(_kernels STABLE_ABI NB_STATIC NB_DOMAIN memserve
  src/kernels/module.cpp
  src/kernels/attention.cpp
  src/kernels/attention_bind.cpp
  src/kernels/attention_plan.cpp
  src/kernels/fused.cpp
  src/kernels/fused_bind.cpp
  src/kernels/fused_program.cpp
  src/kernels/collective.cpp
  src/kernels/collective_bind.cpp
  src/kernels/quantised.cpp
  src/kernels/quantised_bind.cpp
  src/kernels/quantised_pack.cpp
  src/kernels/recurrent.cpp
  src/kernels/recurrent_bind.cpp
  src/kernels/sampling_bind.cpp
)
# Packing is a start's longest work, and the module's other sources are compiled for size.
set_source_files_properties(src/kernels/quantised_pack.cpp PROPERTIES COMPILE_OPTIONS -O3)
find_package(OpenMP)
if(OpenMP_CXX_FOUND)
  # torch ships a libgomp of the same SONAME: one process has one runtime and one team of threads.
  target_link_libraries(_kernels PRIVATE OpenMP::OpenMP_CXX)
endif()
target_link_libraries(_kernels PRIVATE Threads::Threads)

function(memserve_add_isa name sources)
  add_library(_kernels_${name} OBJECT ${sources})
  set_target_properties(_kernels_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  target_compile_definitions(_kernels_${name} PRIVATE MEMSERVE_ISA=${name})
  target_compile_options(_kernels_${name} PRIVATE -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math ${ARGN})
  target_sources(_kernels PRIVATE $<TARGET_OBJECTS:_kernels_${name}>)
endfunction()

include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mavx512bf16 MEMSERVE_HAS_AVX512BF16)
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" OR NOT MEMSERVE_HAS_AVX512BF16)
  memserve_add_isa(portable "${MEMSERVE_ISA_SOURCES}")
else()
  set(MEMSERVE_AVX2 -mavx2 -mfma -mf16c)
  set(MEMSERVE_AVX512 ${MEMSERVE_AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  # Those that take longest come first, so that no core is left without work at the end.
  # Dot products of bytes (VNNI) came in other years than bfloat16: kernels that need them are sets of their own.
  memserve_add_isa(avx512_vnni src/kernels/quantised_kernels.cpp ${MEMSERVE_AVX512} -mavx512vnni)
  memserve_add_isa(avx2_vnni src/kernels/quantised_kernels.cpp ${MEMSERVE_AVX2} -mavxvnni)
  memserve_add_isa(avx512 "${MEMSERVE_ISA_SOURCES}" ${MEMSERVE_AVX512})
  memserve_add_isa(avx2 "${MEMSERVE_ISA_SOURCES}" ${MEMSERVE_AVX2})
  # Only processors older than AVX2 run it: it is compiled in half of the time.
  memserve_add_isa(portable "${MEMSERVE_ISA_SOURCES}" -O1)
  memserve_add_isa(avx512_bf16_vnni src/kernels/attention_codes_kernels.cpp ${MEMSERVE_AVX512} -mavx512bf16
                   -mavx512vnni)
  memserve_add_isa(avx512_bf16_vbmi src/kernels/float8_kernels.cpp ${MEMSERVE_AVX512} -mavx512bf16 -mavx512vbmi)
  list(REMOVE_ITEM MEMSERVE_ISA_SOURCES src/kernels/attention_codes_kernels.cpp src/kernels/float8_kernels.cpp
       src/kernels/quantised_kernels.cpp src/kernels/quantised_numbers_kernels.cpp src/kernels/recurrent_kernels.cpp)
  memserve_add_isa(avx512_bf16 "${MEMSERVE_ISA_SOURCES}" ${MEMSERVE_AVX512} -mavx512bf16)
  target_compile_definitions(_kernels PRIVATE MEMSERVE_X86_ISAS)
  check_cxx_compiler_flag(-mamx-bf16 MEMSERVE_HAS_AMX)
  if(MEMSERVE_HAS_AMX)
    # Matrix units compute linears, and attention of many queries; everything else is avx512_bf16's.
    memserve_add_isa(amx "src/kernels/attention_kernels.cpp;src/kernels/fused_kernels.cpp" ${MEMSERVE_AVX512}
                     -mavx512bf16 -mamx-tile -mamx-bf16)
    target_compile_definitions(_kernels PRIVATE MEMSERVE_AMX)
  endif()
endif()
install(TARGETS _kernels LIBRARY DESTINATION memserve)

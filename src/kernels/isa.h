// Which instruction set the kernels use: chosen once by the processor's features, lowered by tests.
//
// Every kernel source that profits is compiled once per entry (see sources.cmake), into a namespace of that name.
#pragma once

#if defined(MEMSERVE_X86_ISAS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>

namespace memserve {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };

inline constexpr int kIsaCount = 5;
inline constexpr const char* kIsaNames[kIsaCount] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(MEMSERVE_X86_ISAS)
// Whether the processor has matrix units for bf16 and the operating system grants them to this process.
inline bool grants_amx() {
#if defined(MEMSERVE_AMX)
  constexpr unsigned kLeafFeatures = 7, kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(kLeafFeatures, 0, &a, &b, &c, &d) || !(d & kBf16) || !(d & kTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(MEMSERVE_X86_ISAS)
// Dot products of bytes in vectors of 32 bytes (gcc 12 has no name for this feature).
inline bool has_avx_vnni() {
  constexpr unsigned kLeafFeatures = 7, kAvxVnni = 1u << 4;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(kLeafFeatures, 1, &a, &b, &c, &d) && (a & kAvxVnni);
}
#endif

// The widest instruction set that was compiled in and that this processor and operating system support.
inline Isa best_isa() {
#if defined(MEMSERVE_X86_ISAS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return grants_amx() ? Isa::amx : Isa::avx512_bf16;
  if (avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::portable;
}

inline std::atomic<Isa>& isa_in_use() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

inline Isa current_isa() { return isa_in_use().load(std::memory_order_relaxed); }

}  // namespace memserve

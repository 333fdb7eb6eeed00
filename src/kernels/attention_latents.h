// Pages of latents: of each token one key for all heads, whose first elements are its value too.
//
//   page   K [head_dim_k, block]      a panel of keys is read as it lies; one of values is its first head_dim_v rows,
//                                     turned, kLanes by kLanes in registers: all rows of a tile share the work
#pragma once

#include "attention_tile.h"

namespace memserve::MEMSERVE_ISA {
namespace {

// Swaps element (i, j + Step) with (i + Step, j) wherever neither i nor j has the bit Step.
template <int Step, int... I>
inline void swap_squares(VecF (&rows)[kLanes], std::integer_sequence<int, I...>) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Step) continue;
    const VecF a = rows[i], b = rows[i + Step];
    rows[i] = __builtin_shufflevector(a, b, (I & Step ? kLanes + I - Step : I)...);
    rows[i + Step] = __builtin_shufflevector(a, b, (I & Step ? kLanes + I : I + Step)...);
  }
}

inline void turn(VecF (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  swap_squares<1>(rows, lanes);
  swap_squares<2>(rows, lanes);
  if constexpr (kLanes > 4) swap_squares<4>(rows, lanes);
  if constexpr (kLanes > 8) swap_squares<8>(rows, lanes);
}

// Units [0, count) of a channel, at most kLanes; what is behind them is zeros.
inline VecF load_units(Floats, const float* from, int) { return load(from); }

template <class T>
inline VecF load_units(Floats, const T* from, int) {
  alignas(64) float wide[kLanes];
  widen(from, wide, kLanes);
  return load(wide);
}

#if defined(__AVX512BF16__)
inline VecF load_units(Pairs, const BFloat16* from, int count) {
  return (VecF)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
}
#endif

template <class Format, class T>
class LatentPanels : public PlainPanels<Format, T> {
  using Unit = typename Format::Unit;
  static constexpr int kUnitTokens = Format::kUnitTokens;

 public:
  using PlainPanels<Format, T>::PlainPanels;

  // See PlainPanels.
  const Unit* values(int token, int lowest, int end, Unit* panel, int stride) const {
    const int piece = this->pages_.piece();
    for (int at = 0; at < kPanelTokens; at += piece) {
      Unit* rows = panel + int64_t(at / kUnitTokens) * stride;
      // A piece behind the context has no block.
      if (token + at < end) turn_piece(this->pages_.key(token + at), piece, rows, stride);
      hide_tokens(rows, piece, lowest - token - at, end - token - at, stride);
    }
    return panel;
  }

 private:
  void turn_piece(const T* keys, int tokens, Unit* to, int stride) const {
    const int dim = this->layout_.head_dim_v, block_tokens = this->layout_.block_tokens, units = tokens / kUnitTokens;
    for (int unit = 0; unit < units; unit += kLanes) {
      const int count = units - unit < kLanes ? units - unit : kLanes;
      for (int channel = 0; channel < dim; channel += kLanes) {
        VecF square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const T* from = keys + int64_t(channel + i) * block_tokens + unit * kUnitTokens;
          square[i] = channel + i < dim ? load_units(Format{}, from, count) : VecF{};
        }
        turn(square);
        for (int i = 0; i < count; ++i) std::memcpy(to + int64_t(unit + i) * stride + channel, &square[i], sizeof(VecF));
      }
    }
  }

  // Tokens outside [first, end) become zeros: the unused part of a block may hold anything.
  void hide_tokens(Unit* rows, int tokens, int first, int end, int stride) const {
    if (first <= 0 && end >= tokens) return;
    const auto is_hidden = [=](int at) { return at < first || at >= end; };
    for (int at = 0; at < tokens; at += kUnitTokens) {
      Unit* row = rows + int64_t(at / kUnitTokens) * stride;
      if (is_hidden(at) && is_hidden(at + kUnitTokens - 1)) {
        std::memset(row, 0, this->layout_.head_dim_v * sizeof(Unit));
        continue;
      }
      if constexpr (kUnitTokens == 2) {
        const uint32_t mask = is_hidden(at) ? 0xffff0000 : is_hidden(at + 1) ? 0x0000ffff : ~0u;
        if (mask != ~0u)
          for (int d = 0; d < this->layout_.head_dim_v; ++d) row[d] &= mask;
      }
    }
  }
};

}  // namespace
}  // namespace memserve::MEMSERVE_ISA

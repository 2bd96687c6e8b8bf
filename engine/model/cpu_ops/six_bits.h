// Linear layers with 6-bit weights, as GGUF files of the type Q6_K hold them, and 8-bit activations.
//
// A weight is (number - CENTRE) * step * scale: a number of six bits, a step of eight per output and HALF inputs, a
// scale per output and MANY blocks. Activations are rounded as few_bits.h does. Within a block all products are summed as
// integers, exactly; the blocks' sums are then weighted and added in order, so that a row's result does not depend on how
// many rows there are.
//
// Of products of HALF inputs a lane of 16 bits adds up eight, which fit just so: 8 * 32 * 127 = 32512. AVX2 multiplies
// numbers without a sign, 0 to 63, whose sums do not fit. But a sum of 16 bits that overflows leaves out a multiple of
// 2^16 and nothing else, and once 32 times the sum of the activations is taken away it is one that fits. The lanes begin
// with that, and HALF inputs are added up before they have to be widened, which the step does.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "few_bits.h"
#include "panels.h"

namespace six_bits {

using few_bits::AHEAD;
using few_bits::BLOCK;
#if defined(__AVX2__)
using few_bits::multiply_quad;
#endif

constexpr int64_t HALF = BLOCK / 2;               // Inputs that share a step.
constexpr int64_t MANY = 8;                       // Blocks that share a scale.
constexpr int32_t CENTRE = 32;                    // The number of a weight of zero.
constexpr int64_t TRIPLE = 3 * 32;                // Bytes of the numbers of two quads.
constexpr int64_t NUMBERS = BLOCK / 8 * TRIPLE;   // Bytes of a panel's numbers,
constexpr int64_t BYTES = NUMBERS + 2 * PANEL;    // and of its steps behind them.

// What belongs to a block of activations: its scale, and for each half of it -CENTRE times the sums of its numbers, those of
// the first two and those of the last two of all fours.
struct Factors {
  float scale;
  int16_t centres[2][2];
};

// Rounds up to BLOCK numbers; see few_bits.h.
inline Factors round_block(const float* row, int64_t size, int8_t* out) {
  Factors own;
  own.scale = few_bits::round_block(row, size, out).scale;
#if defined(__AVX2__)
  const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(out));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(CENTRE), numbers);
  const __m256i fours = _mm256_add_epi16(pairs, _mm256_shuffle_epi32(pairs, 0x4E));
  const __m256i eights = _mm256_add_epi16(fours, _mm256_shuffle_epi32(fours, 0xB1));
  const __m256i turned = _mm256_sub_epi16(_mm256_setzero_si256(), eights);
  const int32_t both[] = {_mm256_extract_epi32(turned, 0), _mm256_extract_epi32(turned, 4)};
  std::memcpy(own.centres, both, sizeof(both));
#else
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t pair = 0; pair < 2; ++pair) {
      int32_t sum = 0;
      for (int64_t i = half * HALF + 2 * pair; i < (half + 1) * HALF; i += 4) sum += out[i] + out[i + 1];
      own.centres[half][pair] = static_cast<int16_t>(-CENTRE * sum);
    }
#endif
  return own;
}

// Adds one block's share to sums [M, PANEL]: M rows of activations times the weights of a panel.
//   weights: [QUADS / 2, 3, PANEL / 2, 4], the numbers of two quads: the low six bits of three bytes are a quad's numbers
//   for the first outputs, for those of eight on, and the next quad's for the first; the high two of all three are the
//   next quad's for those of eight on, the lowest bits first; then int8 [2, PANEL], the steps of each half, of outputs
//   0 to 3, 8 to 11, 4 to 7 and 12 to 15; rows: BLOCK numbers each, `stride` apart; factors: one each, `stride` bytes
//   apart.
template <int M>
__attribute__((always_inline)) inline void block(const uint8_t* weights, const int8_t* rows, const uint8_t* factors,
                                                 int64_t stride, float* sums) {
#if defined(__AVX2__)
  const __m256i low_six = _mm256_set1_epi8(0x3f), high_two = _mm256_set1_epi8(static_cast<char>(0xc0));
  __m256i totals[M][2];
#pragma GCC unroll 2
  for (int64_t half = 0; half < 2; ++half) {
    const auto* ahead = reinterpret_cast<const char*>(weights + half * BYTES / 2) + AHEAD * BYTES;
    for (int64_t line = 0; line < BYTES / 2; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
    __m256i products[M][2];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      int32_t centres;
      std::memcpy(&centres, factors + m * stride + offsetof(Factors, centres) + half * sizeof(centres), sizeof(centres));
      products[m][0] = products[m][1] = _mm256_set1_epi32(centres);
    }
#pragma GCC unroll 1
    for (int64_t two = 2 * half; two < 2 * half + 2; ++two) {
      const auto* source = reinterpret_cast<const __m256i*>(weights + two * TRIPLE);
      const int8_t* inputs = rows + two * 8;
      const auto low = [&](int64_t i) { return _mm256_and_si256(_mm256_loadu_si256(source + i), low_six); };
      const auto high = [&](int64_t i) { return _mm256_and_si256(_mm256_loadu_si256(source + i), high_two); };
      multiply_quad<M>(low(0), low(1), inputs, stride, products);
      // Shifting by 16 bits moves bits from byte to byte, but never into the six that are next.
      __m256i last = _mm256_or_si256(_mm256_srli_epi16(high(0), 2), high(1));
      last = _mm256_srli_epi16(_mm256_or_si256(_mm256_srli_epi16(last, 2), high(2)), 2);
      multiply_quad<M>(low(2), last, inputs + 4, stride, products);
    }
    const auto* packed = reinterpret_cast<const __m128i*>(weights + NUMBERS) + half;
    const __m256i steps = _mm256_cvtepi8_epi16(_mm_loadu_si128(packed));
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const __m256i step = part == 0 ? _mm256_unpacklo_epi16(steps, steps) : _mm256_unpackhi_epi16(steps, steps);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const __m256i sum = _mm256_madd_epi16(products[m][part], step);
        totals[m][part] = half == 0 ? sum : _mm256_add_epi32(totals[m][part], sum);
      }
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    float own;
    std::memcpy(&own, factors + m * stride, sizeof(own));
    const __m256 scale = _mm256_set1_ps(own);
    for (int part = 0; part < 2; ++part) {
      float* sum = sums + m * PANEL + part * 8;
      _mm256_storeu_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[m][part]), scale, _mm256_loadu_ps(sum)));
    }
  }
#else
  const auto* steps = reinterpret_cast<const int8_t*>(weights + NUMBERS);
  for (int m = 0; m < M; ++m) {
    float scale;
    std::memcpy(&scale, factors + m * stride, sizeof(scale));
    for (int64_t n = 0; n < PANEL; ++n) {
      const int64_t place = (n & 3) | (n & 4) << 1 | (n & 8) >> 1;
      int32_t total = 0;
      for (int64_t i = 0; i < BLOCK; ++i) {
        const uint8_t* triple = weights + i / 8 * TRIPLE + n % 8 * 4 + i % 4;
        const int64_t which = i / 4 % 2 * 2 + n / 8;
        const int32_t number = which < 3 ? triple[which * 32] & 63
                                         : triple[0] >> 6 | triple[32] >> 6 << 2 | triple[64] >> 6 << 4;
        total += (number - CENTRE) * rows[m * stride + i] * steps[i / HALF * PANEL + place];
      }
      sums[m * PANEL + n] = std::fma(static_cast<float>(total), scale, sums[m * PANEL + n]);
    }
  }
#endif
}

// sums [rows, PANEL] += shares [rows, PANEL] * scales, which are float16 [PANEL].
template <int ROWS>
void add_weighted(const float* shares, const uint16_t* scales, float* sums) {
#if defined(__AVX2__)
  for (int64_t n = 0; n < PANEL; n += 8) {
    const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + n)));
    for (int64_t i = n; i < ROWS * PANEL; i += PANEL)
      _mm256_storeu_ps(sums + i, _mm256_fmadd_ps(_mm256_loadu_ps(shares + i), scale, _mm256_loadu_ps(sums + i)));
  }
#else
  for (int64_t i = 0; i < ROWS * PANEL; ++i) sums[i] = std::fma(shares[i], few_bits::widen(scales[i % PANEL]), sums[i]);
#endif
}

// The weights of a layer.
//   numbers: [panels, blocks, BYTES], with the steps; scales: float16 [panels, blocks / MANY, PANEL].
struct Matrix : few_bits::BlockRows<Factors, round_block> {
  using Number = uint8_t;

  const uint8_t* numbers;
  const uint16_t* scales;

  // sums [M + N, PANEL]: rounded rows times a panel's weights, which are read once; M rows, then N more.
  template <int M, int N>
  void multiply(int64_t panel, const uint8_t* rows, float* sums) const {
    const int64_t stride = row_bytes();
    const uint8_t* weights = numbers + panel * blocks * BYTES;
    const uint16_t* scale = scales + panel * (blocks / MANY) * PANEL;
    const auto* row = reinterpret_cast<const int8_t*>(rows);
    const uint8_t* factors = rows + blocks * BLOCK;
    clear<M + N>(sums);
    for (int64_t i = 0; i < blocks; i += MANY) {
      float shares[(M + N) * PANEL];
      clear<M + N>(shares);
      for (int64_t k = 0; k < MANY; ++k) {
        block<M>(weights, row, factors, stride, shares);
        if constexpr (N > 0) block<N>(weights, row + M * stride, factors + M * stride, stride, shares + M * PANEL);
        weights += BYTES;
        row += BLOCK;
        factors += sizeof(Factors);
      }
      add_weighted<M + N>(shares, scale, sums);
      scale += PANEL;
    }
  }
};

}  // namespace six_bits

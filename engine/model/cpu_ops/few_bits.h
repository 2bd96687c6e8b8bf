// Linear layers with 4-bit or 5-bit weights, as GGUF files hold them, and 8-bit activations.
//
// A weight is number * scale + least, with a scale and a least value per output and BLOCK inputs. Activations are
// rounded to 8 bits with a scale per row and BLOCK inputs. Within a block all products are summed as integers,
// exactly: 4-bit numbers times 8-bit ones are small enough that 16-bit lanes hold the sums of a block, 5-bit ones that
// they hold those of half a block, so that AVX2 multiplies twice as many at a time as int8.h does. The blocks' sums are
// then weighted and added in order, so that a row's result does not depend on how many rows there are.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "panels.h"

namespace few_bits {

constexpr int64_t BLOCK = 32;  // Inputs that share a scale.
constexpr int64_t QUADS = BLOCK / 4;
constexpr int64_t LOW_BYTES = BLOCK * PANEL / 2;  // Of the low four bits of a panel's numbers.
constexpr float LARGEST = 127.0f;
constexpr int64_t AHEAD = 12;  // Blocks fetched ahead, so that arithmetic does not wait for memory.

// What the sums of a block of activations are weighted with: its scale, and the scale times the sum of its numbers.
struct Factors {
  float scale, sum;
};

// Rounds up to BLOCK numbers to 8 bits and fills up with zeros. A block with values that are not finite has a scale
// that is not a number.
inline Factors round_block(const float* row, int64_t size, int8_t* out) {
  int32_t peak_bits = 0;
  for (int64_t k = 0; k < size; ++k) peak_bits = std::max(peak_bits, std::bit_cast<int32_t>(row[k]) & 0x7fffffff);
  const float peak = std::bit_cast<float>(peak_bits);
  const bool is_zero = peak < 1e-30f;
  if (is_zero || !std::isfinite(peak)) {
    std::memset(out, 0, BLOCK);
    const float scale = is_zero ? 0.0f : std::bit_cast<float>(0x7fc00000);
    return {scale, scale};
  }
  const float factor = LARGEST / peak;
  int32_t sum = 0;
  int64_t i = 0;
#if defined(__AVX2__)
  if (size == BLOCK) {
    __m256i numbers[4];
    for (int part = 0; part < 4; ++part)
      numbers[part] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + part * 8), _mm256_set1_ps(factor)));
    const __m256i low = _mm256_packs_epi32(numbers[0], numbers[1]), high = _mm256_packs_epi32(numbers[2], numbers[3]);
    // Packing works within halves of a register; the permutation puts their quarters in line.
    const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), packed);
    const __m256i sums = _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    sum = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
    i = BLOCK;
  }
#endif
  for (; i < size; ++i) {
    const auto number = static_cast<int32_t>(std::nearbyint(row[i] * factor));
    out[i] = static_cast<int8_t>(number);
    sum += number;
  }
  std::fill(out + size, out + BLOCK, int8_t{0});
  const float scale = peak / LARGEST;
  return {scale, scale * static_cast<float>(sum)};
}

// Rows of activations in rounded blocks: blocks * BLOCK numbers, and behind them what belongs to each block.
template <typename Own, Own (*round_one)(const float*, int64_t, int8_t*)>
struct BlockRows {
  static constexpr int64_t INPUTS = BLOCK;

  int64_t blocks;

  int64_t row_bytes() const { return blocks * (BLOCK + sizeof(Own)); }

  void round(const float* row, int64_t size, uint8_t* out) const {
    auto* target = reinterpret_cast<int8_t*>(out);
    for (int64_t i = 0; i < blocks; ++i) {
      const Own own = round_one(row + i * BLOCK, std::min(BLOCK, size - i * BLOCK), target + i * BLOCK);
      std::memcpy(out + blocks * BLOCK + i * sizeof(own), &own, sizeof(own));
    }
  }

  // What the sums of a rounded row are to be multiplied by.
  static float factor(const uint8_t*) { return 1.0f; }
};

inline float widen(uint16_t half) { return static_cast<float>(c10::Half(half, c10::Half::from_bits())); }

template <int BITS>
constexpr int64_t BYTES = BLOCK * PANEL * BITS / 8;  // Of a panel's numbers.

// The fifth bits of a block's numbers lie behind the others, those of QUADS / 2 quads together.
constexpr int64_t FIFTHS = PANEL / 2 * 4;

#if defined(__AVX2__)
// Adds to products [M][2] those of four inputs: their numbers, of eight outputs in `low` and of the next in `high`, times
// four numbers of each of M rows, `stride` bytes apart.
template <int M>
__attribute__((always_inline)) inline void multiply_quad(__m256i low, __m256i high, const int8_t* rows, int64_t stride,
                                                         __m256i (&products)[M][2]) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    __m256i product, four;
    // In assembly because compilers interleave the rows and then run out of registers.
    asm("vpbroadcastd %6, %3\n\t"
        "vpmaddubsw %3, %4, %2\n\t"
        "vpmaddubsw %3, %5, %3\n\t"
        "vpaddw %2, %0, %0\n\t"
        "vpaddw %3, %1, %1"
        : "+x"(products[m][0]), "+x"(products[m][1]), "=&x"(product), "=&x"(four)
        : "x"(low), "x"(high), "m"(*reinterpret_cast<const int32_t*>(rows + m * stride)));
  }
}
#endif

// Adds one block's share to sums [M, PANEL]: M rows of activations times the weights of a panel.
//   weights: [QUADS, PANEL / 2, 4], a number's low bits in the low half of a byte and those of eight outputs on in the
//   high one; then, with five bits, [2, PANEL / 2, 4], bit 2 * (quad % 4) of each byte the number's fifth, the next one
//   that of eight outputs on; scales: float16 [2, PANEL], scales and least values; rows: BLOCK numbers each, `stride`
//   apart; factors: one each, `stride` bytes apart.
template <int BITS, int M>
__attribute__((always_inline)) inline void block(const uint8_t* weights, const uint16_t* scales, const int8_t* rows,
                                                 const uint8_t* factors, int64_t stride, float* sums) {
#if defined(__AVX2__)
  constexpr int64_t RUN = BITS == 4 ? QUADS : QUADS / 2;  // Quads of which 16 bits hold the sums.
  const __m256i low_half = _mm256_set1_epi8(0x0f), fifth = _mm256_set1_epi8(0x10), ones = _mm256_set1_epi16(1);
  _mm_prefetch(reinterpret_cast<const char*>(scales + AHEAD * 2 * PANEL), _MM_HINT_T0);
  __m256i totals[M][2];
#pragma GCC unroll 2
  for (int64_t begin = 0; begin < QUADS; begin += RUN) {
    __m256i products[M][2] = {};
    __m256i fifths;
    if constexpr (BITS == 5) {
      const uint8_t* source = weights + LOW_BYTES + begin / RUN * FIFTHS;
      if (begin == 0) _mm_prefetch(reinterpret_cast<const char*>(source) + AHEAD * BYTES<BITS>, _MM_HINT_T0);
      fifths = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    }
#pragma GCC unroll 1
    for (int64_t pair = begin; pair < begin + RUN; pair += 2) {
      const auto* source = reinterpret_cast<const __m256i*>(weights) + pair;
      _mm_prefetch(reinterpret_cast<const char*>(source) + AHEAD * BYTES<BITS>, _MM_HINT_T0);
#pragma GCC unroll 2
      for (int64_t quad = 0; quad < 2; ++quad) {
        const __m256i both = _mm256_loadu_si256(source + quad);
        __m256i low = _mm256_and_si256(both, low_half), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half);
        if constexpr (BITS == 5) {
          // Shifting by 16 bits moves bits from byte to byte, but never into the two that are next.
          low = _mm256_or_si256(low, _mm256_and_si256(_mm256_slli_epi16(fifths, 4), fifth));
          high = _mm256_or_si256(high, _mm256_and_si256(_mm256_slli_epi16(fifths, 3), fifth));
          fifths = _mm256_srli_epi16(fifths, 2);
        }
        multiply_quad<M>(low, high, rows + (pair + quad) * 4, stride, products);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
      for (int half = 0; half < 2; ++half) {
        const __m256i sum = _mm256_madd_epi16(products[m][half], ones);
        totals[m][half] = begin == 0 ? sum : _mm256_add_epi32(totals[m][half], sum);
      }
  }
  __m256 scale[2], least[2];
  for (int half = 0; half < 2; ++half) {
    scale[half] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + half * 8)));
    least[half] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + PANEL + half * 8)));
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    Factors own;
    std::memcpy(&own, factors + m * stride, sizeof(own));
    for (int half = 0; half < 2; ++half) {
      float* sum = sums + m * PANEL + half * 8;
      const __m256 weight = _mm256_mul_ps(scale[half], _mm256_set1_ps(own.scale));
      const __m256 first = _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[m][half]), weight, _mm256_loadu_ps(sum));
      _mm256_storeu_ps(sum, _mm256_fmadd_ps(least[half], _mm256_set1_ps(own.sum), first));
    }
  }
#else
  int32_t products[M][PANEL] = {};
  for (int64_t quad = 0; quad < QUADS; ++quad)
    for (int m = 0; m < M; ++m)
      for (int64_t n = 0; n < PANEL; ++n)
        for (int64_t i = 0; i < 4; ++i) {
          const int64_t place = n % (PANEL / 2) * 4 + i, high = n / (PANEL / 2);
          int32_t number = weights[quad * (PANEL / 2) * 4 + place] >> (4 * high) & 15;
          if constexpr (BITS == 5)
            number |= (weights[LOW_BYTES + quad / 4 * FIFTHS + place] >> (quad % 4 * 2 + high) & 1) << 4;
          products[m][n] += number * rows[m * stride + quad * 4 + i];
        }
  for (int m = 0; m < M; ++m) {
    Factors own;
    std::memcpy(&own, factors + m * stride, sizeof(own));
    for (int64_t n = 0; n < PANEL; ++n) {
      float& sum = sums[m * PANEL + n];
      sum = std::fma(static_cast<float>(products[m][n]), widen(scales[n]) * own.scale, sum);
      sum = std::fma(widen(scales[PANEL + n]), own.sum, sum);
    }
  }
#endif
}

// The weights of a layer.
//   numbers: [panels, blocks, BYTES]; scales: float16 [panels, blocks, 2, PANEL].
template <int BITS>
struct Matrix : BlockRows<Factors, round_block> {
  using Number = uint8_t;

  const uint8_t* numbers;
  const uint16_t* scales;

  // sums [M + N, PANEL]: rounded rows times a panel's weights, which are read once; M rows, then N more.
  template <int M, int N>
  void multiply(int64_t panel, const uint8_t* rows, float* sums) const {
    const int64_t stride = row_bytes();
    const uint8_t* weights = numbers + panel * blocks * BYTES<BITS>;
    const uint16_t* scale = scales + panel * blocks * 2 * PANEL;
    const auto* row = reinterpret_cast<const int8_t*>(rows);
    const uint8_t* factors = rows + blocks * BLOCK;
    clear<M + N>(sums);
    for (int64_t i = 0; i < blocks; ++i) {
      block<BITS, M>(weights, scale, row, factors, stride, sums);
      if constexpr (N > 0)
        block<BITS, N>(weights, scale, row + M * stride, factors + M * stride, stride, sums + M * PANEL);
      weights += BYTES<BITS>;
      scale += 2 * PANEL;
      row += BLOCK;
      factors += sizeof(Factors);
    }
  }
};

}  // namespace few_bits

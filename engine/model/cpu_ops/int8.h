// Linear layers with 8-bit weights and 16-bit activations, in exact integer arithmetic.
//
// Weights have one scale per output and BLOCK inputs; a row of activations has one scale. Within a block all
// products are summed as integers, exactly; the blocks' sums are then weighted and added in order. A row's result
// therefore does not depend on how many rows there are. Sixteen bits of activation cost no more than eight here:
// AVX2 multiplies pairs of 16-bit numbers into 32-bit sums without saturation, and a decoding step waits for
// weights anyway.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "panels.h"

namespace int8 {

constexpr int64_t BLOCK = 64;  // Inputs that share a scale.
constexpr int64_t PAIRS = BLOCK / 2;
constexpr float LARGEST = 32767.0f;
constexpr int64_t AHEAD = 3;  // Blocks fetched ahead, so that arithmetic does not wait for memory.

// Rounds a row to 16 bits and fills up with zeros; returns the scale. A row with values that are not finite has a
// scale that is not a number.
inline float quantise(const float* row, int64_t size, int64_t padded, int16_t* out) {
  int32_t peak_bits = 0;
  for (int64_t i = 0; i < size; ++i) peak_bits = std::max(peak_bits, std::bit_cast<int32_t>(row[i]) & 0x7fffffff);
  const float peak = std::bit_cast<float>(peak_bits);
  const bool is_zero = peak < 1e-30f;
  if (is_zero || !std::isfinite(peak)) {
    std::memset(out, 0, padded * sizeof(int16_t));
    return is_zero ? 0.0f : std::bit_cast<float>(0x7fc00000);
  }
  const float factor = LARGEST / peak;
  int64_t i = 0;
#if defined(__AVX2__)
  const __m256 factors = _mm256_set1_ps(factor);
  for (; i + 16 <= size; i += 16) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + i), factors));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + i + 8), factors));
    // Packing works within halves of a register; the permutation puts their quarters in line.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), packed);
  }
#endif
  for (; i < size; ++i) out[i] = static_cast<int16_t>(std::nearbyint(row[i] * factor));
  std::fill(out + size, out + padded, int16_t{0});
  return peak / LARGEST;
}

inline float widen(uint16_t bfloat16) { return std::bit_cast<float>(static_cast<uint32_t>(bfloat16) << 16); }

// Adds one block's share to sums [M, PANEL]: M rows of activations times the weights of a panel.
//   weights: [PAIRS, PANEL, 2]; scales: bfloat16 [PANEL]; rows: BLOCK numbers each, `stride` apart.
template <int M>
void block(const int8_t* weights, const uint16_t* scales, const int16_t* rows, int64_t stride, float* sums) {
#if defined(__AVX2__)
  __m256i products[M][2] = {};
  for (int64_t pair = 0; pair < PAIRS; ++pair) {
    const auto* source = reinterpret_cast<const __m128i*>(weights + pair * PANEL * 2);
    if (pair % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(source) + AHEAD * BLOCK * PANEL, _MM_HINT_T0);
    const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(source));
    const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(source + 1));
    for (int m = 0; m < M; ++m) {
      int32_t two;
      std::memcpy(&two, rows + m * stride + pair * 2, sizeof(two));
      const __m256i both = _mm256_set1_epi32(two);
      // In assembly because compilers interleave the rows and then run out of registers.
      asm("vpaddd %1, %0, %0" : "+x"(products[m][0]) : "x"(_mm256_madd_epi16(low, both)));
      asm("vpaddd %1, %0, %0" : "+x"(products[m][1]) : "x"(_mm256_madd_epi16(high, both)));
    }
  }
  for (int half = 0; half < 2; ++half) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + half * 8));
    const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
    for (int m = 0; m < M; ++m) {
      float* sum = sums + m * PANEL + half * 8;
      const __m256 product = _mm256_cvtepi32_ps(products[m][half]);
      _mm256_storeu_ps(sum, _mm256_fmadd_ps(product, scale, _mm256_loadu_ps(sum)));
    }
  }
#else
  int32_t products[M][PANEL] = {};
  for (int64_t pair = 0; pair < PAIRS; ++pair)
    for (int m = 0; m < M; ++m)
      for (int64_t n = 0; n < PANEL; ++n)
        for (int64_t i = 0; i < 2; ++i)
          products[m][n] += weights[(pair * PANEL + n) * 2 + i] * rows[m * stride + pair * 2 + i];
  for (int m = 0; m < M; ++m)
    for (int64_t n = 0; n < PANEL; ++n)
      sums[m * PANEL + n] = std::fma(static_cast<float>(products[m][n]), widen(scales[n]), sums[m * PANEL + n]);
#endif
}

// The weights of a layer.
//   numbers: [panels, blocks, PAIRS, PANEL, 2]; scales: bfloat16 [panels, blocks, PANEL].
struct Matrix {
  using Number = int8_t;
  static constexpr int64_t INPUTS = BLOCK;

  int64_t blocks;
  const int8_t* numbers;
  const uint16_t* scales;

  // A rounded row: its scale, and blocks * BLOCK numbers.
  int64_t row_bytes() const { return sizeof(float) + blocks * BLOCK * sizeof(int16_t); }

  void round(const float* row, int64_t size, uint8_t* out) const {
    const float scale = quantise(row, size, blocks * BLOCK, reinterpret_cast<int16_t*>(out + sizeof(float)));
    std::memcpy(out, &scale, sizeof(float));
  }

  // What the sums of a rounded row are to be multiplied by.
  static float factor(const uint8_t* row) {
    float scale;
    std::memcpy(&scale, row, sizeof(float));
    return scale;
  }

  // sums [M + N, PANEL]: rounded rows times a panel's weights, which are read once; M rows, then N more.
  template <int M, int N>
  void multiply(int64_t panel, const uint8_t* rows, float* sums) const {
    const int64_t stride = row_bytes() / sizeof(int16_t);
    const int8_t* weights = numbers + panel * blocks * BLOCK * PANEL;
    const uint16_t* scale = scales + panel * blocks * PANEL;
    const auto* row = reinterpret_cast<const int16_t*>(rows + sizeof(float));
    clear<M + N>(sums);
    for (int64_t i = 0; i < blocks; ++i) {
      block<M>(weights, scale, row, stride, sums);
      if constexpr (N > 0) block<N>(weights, scale, row + M * stride, stride, sums + M * PANEL);
      weights += BLOCK * PANEL;
      scale += PANEL;
      row += BLOCK;
    }
  }
};

}  // namespace int8

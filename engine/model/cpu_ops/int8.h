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

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace int8 {

constexpr int64_t BLOCK = 64;    // Inputs that share a scale.
constexpr int64_t PANEL = 16;    // Outputs that lie together.
constexpr int64_t GROUP = 6;     // Rows at a time: as many as sixteen registers hold.
constexpr int64_t ROWS = 2 * GROUP;  // Rows that share one reading of the weights.
constexpr int64_t PAIRS = BLOCK / 2;
constexpr float LARGEST = 32767.0f;
constexpr int64_t AHEAD = 3 * BLOCK * PANEL;  // Weights fetched ahead, so that arithmetic does not wait for memory.

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
    if (pair % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(source) + AHEAD, _MM_HINT_T0);
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

// sums [M + N, PANEL]: rows of activations times a panel's weights, which are read once; M rows, then N more.
//   weights: [blocks, PAIRS, PANEL, 2]; scales: bfloat16 [blocks, PANEL]; rows: blocks * BLOCK numbers each.
template <int M, int N = 0>
void panel(const int8_t* weights, const uint16_t* scales, const int16_t* rows, int64_t blocks, float* sums) {
  const int64_t stride = blocks * BLOCK;
  std::fill(sums, sums + (M + N) * PANEL, 0.0f);
  for (int64_t i = 0; i < blocks; ++i) {
    block<M>(weights, scales, rows, stride, sums);
    if constexpr (N > 0) block<N>(weights, scales, rows + M * stride, stride, sums + M * PANEL);
    weights += BLOCK * PANEL;
    scales += PANEL;
    rows += BLOCK;
  }
}

inline void panel_rows(int64_t count, const int8_t* weights, const uint16_t* scales, const int16_t* rows,
                       int64_t blocks, float* sums) {
  switch (count) {
    case 1: return panel<1>(weights, scales, rows, blocks, sums);
    case 2: return panel<2>(weights, scales, rows, blocks, sums);
    case 3: return panel<3>(weights, scales, rows, blocks, sums);
    case 4: return panel<4>(weights, scales, rows, blocks, sums);
    case 5: return panel<5>(weights, scales, rows, blocks, sums);
    case 6: return panel<6>(weights, scales, rows, blocks, sums);
    case 7: return panel<4, 3>(weights, scales, rows, blocks, sums);
    case 8: return panel<4, 4>(weights, scales, rows, blocks, sums);
    case 9: return panel<5, 4>(weights, scales, rows, blocks, sums);
    case 10: return panel<5, 5>(weights, scales, rows, blocks, sums);
    case 11: return panel<6, 5>(weights, scales, rows, blocks, sums);
    default: return panel<GROUP, GROUP>(weights, scales, rows, blocks, sums);
  }
}

}  // namespace int8

// What the kinds of packed weights have in common: outputs lie together in panels, and rows of activations share one
// reading of the weights.

#pragma once

#include <cstdint>

#include "lanes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int64_t PANEL = 16;        // Outputs that lie together.
constexpr int64_t GROUP = 6;         // Rows at a time: as many as sixteen registers hold.
constexpr int64_t ROWS = 2 * GROUP;  // Rows that share one reading of the weights.

// sums [M, PANEL] = 0. With `fill` compilers store it in one instruction that takes long to begin.
template <int M>
void clear(float* sums) {
  Lanes zeros{};
#if defined(__AVX2__)
  asm("" : "+x"(zeros));
#endif
  for (int64_t i = 0; i < M * PANEL; i += WIDTH) store(sums + i, zeros);
}

// sums [count, PANEL]: up to ROWS rounded rows times a panel of the matrix.
template <typename Matrix>
void multiply_rows(const Matrix& matrix, int64_t panel, int64_t count, const uint8_t* rows, float* sums) {
  switch (count) {
    case 1: return matrix.template multiply<1, 0>(panel, rows, sums);
    case 2: return matrix.template multiply<2, 0>(panel, rows, sums);
    case 3: return matrix.template multiply<3, 0>(panel, rows, sums);
    case 4: return matrix.template multiply<4, 0>(panel, rows, sums);
    case 5: return matrix.template multiply<5, 0>(panel, rows, sums);
    case 6: return matrix.template multiply<6, 0>(panel, rows, sums);
    case 7: return matrix.template multiply<4, 3>(panel, rows, sums);
    case 8: return matrix.template multiply<4, 4>(panel, rows, sums);
    case 9: return matrix.template multiply<5, 4>(panel, rows, sums);
    case 10: return matrix.template multiply<5, 5>(panel, rows, sums);
    case 11: return matrix.template multiply<6, 5>(panel, rows, sums);
    default: return matrix.template multiply<GROUP, GROUP>(panel, rows, sums);
  }
}

// What lies between the matrix products of a layer: norms, gated activations, rotary positions.

#pragma once

#include <cmath>
#include <cstdint>

#include "attention.h"

namespace {

// x / sqrt(mean(x^2) + eps) * weight (RMSNorm, Zhang and Sennrich 2019); the lanes' sums are added in a fixed order.
inline void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* __restrict out) {
  Lanes sums = {};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) sums += load(x + i) * load(x + i);
  float total = add_lanes(sums);
  for (; i < size; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  for (int64_t k = 0; k < size; ++k) out[k] = x[k] * factor * weight[k];
}

inline float silu(float x) {
  const float e = exp_nonpositive(-std::fabs(x));
  return x * ((x < 0.0f ? e : 1.0f) / (1.0f + e));
}

inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanh_by_exp(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// out = activation(gate) * up; a row holds the gate, then up.
template <float (*activation)(float)>
void gate_row(const float* row, int64_t size, float* __restrict out) {
  for (int64_t i = 0; i < size; ++i) out[i] = activation(row[i]) * row[size + i];
}

// Rotary positions (Su et al. 2021) as Llama has them: dimension d turns with d + half.
inline void rotate_head(const float* x, const float* cosine, const float* sine, int64_t dim, float* __restrict out) {
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; ++d) {
    out[d] = x[d] * cosine[d] - x[d + half] * sine[d];
    out[d + half] = x[d + half] * cosine[d + half] + x[d] * sine[d + half];
  }
}

}  // namespace

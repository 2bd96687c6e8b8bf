// Finds the few steps that the weights of a block lie on, if they do: what 4-bit weights were before they became plain.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace steps {

constexpr int64_t BLOCK = 32;                    // Weights that share a scale and a least value.
constexpr int LARGEST = 15;                      // The largest number.
constexpr float FARTHEST = 1.0f / 16;            // How far from its step a weight may lie, in steps.
constexpr float ROUNDED_BY = 1.0f / (1 << 11);   // Share of itself by which float16 may have moved a weight.

// A weight is about number * scale + least.
struct Found {
  float scale, least;
};

// Numbers 0 .. count of weights from `bottom` in steps of `step`; how far the farthest lies from its step.
inline float place(const float* weights, float bottom, float step, uint8_t* numbers) {
  const float inverse = 1 / step;
  float farthest = 0;
  for (int64_t i = 0; i < BLOCK; ++i) {
    const float number = std::nearbyint((weights[i] - bottom) * inverse);
    numbers[i] = static_cast<uint8_t>(static_cast<int32_t>(number));
    farthest = std::max(farthest, std::fabs(weights[i] - bottom - number * step));
  }
  return farthest;
}

// Scale and least value by least squares, which the rounding of weights averages out of.
inline Found fit(const float* weights, const uint8_t* numbers) {
  float sum = 0, total = 0;
  for (int64_t i = 0; i < BLOCK; ++i) {
    sum += numbers[i];
    total += weights[i];
  }
  const float centre = sum / BLOCK, middle = total / BLOCK;
  float spread = 0, together = 0;
  for (int64_t i = 0; i < BLOCK; ++i) {
    const float around = numbers[i] - centre;
    spread += around * around;
    together += around * (weights[i] - middle);
  }
  // As it will be held, so that the least value makes up for its rounding.
  const auto scale = static_cast<float>(static_cast<c10::Half>(spread > 0 ? together / spread : 0.0f));
  return {scale, middle - scale * centre};
}

// The numbers of a block; false if it does not lie on up to sixteen steps of one size. A block need not use all steps:
// there may be any number of them between its ends.
inline bool find(const float* weights, uint8_t* numbers, Found& found) {
  float bottom = weights[0], top = weights[0];
  for (int64_t i = 1; i < BLOCK; ++i) {
    bottom = std::min(bottom, weights[i]);
    top = std::max(top, weights[i]);
  }
  if (!(top - bottom < INFINITY)) return false;
  if (bottom == top) {
    std::fill(numbers, numbers + BLOCK, uint8_t{0});
    found = {0.0f, bottom};
    return true;
  }
  // A weight's, the lowest one's, and the steps' own.
  const float slack = 3 * ROUNDED_BY * std::max(-bottom, top);
  for (int count = LARGEST; count > 0; --count) {
    const float step = (top - bottom) / count;
    if (place(weights, bottom, step, numbers) > std::min(slack, FARTHEST * step)) continue;
    found = fit(weights, numbers);
    return true;
  }
  return false;
}

}  // namespace steps

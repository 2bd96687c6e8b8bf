// Finds the few steps that the weights of a block lie on, if they do: what 4-bit weights were before they became plain.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

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

inline float held(float number) { return static_cast<float>(static_cast<c10::Half>(number)); }

// Scale and least value by least squares, which the rounding of weights averages out of, as float16 holds them.
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
  const float scale = held(spread > 0 ? together / spread : 0.0f);
  // With the scale as it is held, so that the least value makes up for its rounding.
  return {scale, held(middle - scale * centre)};
}

// Numbers in larger steps where they have a divisor in common: the finest steps that fit need not be the file's own, and
// float16 has few digits for very small ones.
inline void reduce(uint8_t* numbers) {
  int divisor = 0;
  for (int64_t i = 0; i < BLOCK; ++i) divisor = std::gcd(divisor, static_cast<int>(numbers[i]));
  if (divisor > 1)
    for (int64_t i = 0; i < BLOCK; ++i) numbers[i] = static_cast<uint8_t>(numbers[i] / divisor);
}

// Whether every weight is where its number puts it, up to the rounding of float16.
inline bool holds(const float* weights, const uint8_t* numbers, const Found& found, float slack) {
  float farthest = 0;
  for (int64_t i = 0; i < BLOCK; ++i)
    farthest = std::max(farthest, std::fabs(weights[i] - (numbers[i] * found.scale + found.least)));
  return farthest <= slack && std::isfinite(found.scale) && std::isfinite(found.least);
}

// The numbers of a block; false if it does not lie on up to sixteen steps of one size, which float16 can hold. A block
// need not use all steps: there may be any number of them between its ends.
inline bool find(const float* weights, uint8_t* numbers, Found& found) {
  float bottom = weights[0], top = weights[0], sum = 0;
  for (int64_t i = 0; i < BLOCK; ++i) {
    bottom = std::min(bottom, weights[i]);
    top = std::max(top, weights[i]);
    sum += weights[i];
  }
  if (!std::isfinite(sum)) return false;
  // A weight's rounding, the lowest one's, and the steps' own.
  const float slack = 3 * ROUNDED_BY * std::max(-bottom, top);
  std::fill(numbers, numbers + BLOCK, uint8_t{0});
  bool lies = bottom == top;
  for (int count = LARGEST; count > 0 && !lies; --count) {
    const float step = (top - bottom) / static_cast<float>(count);
    lies = place(weights, bottom, step, numbers) <= std::min(slack, FARTHEST * step);
  }
  if (!lies) return false;
  reduce(numbers);
  found = fit(weights, numbers);
  return holds(weights, numbers, found, slack);
}

}  // namespace steps

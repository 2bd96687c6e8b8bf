// Finds the few steps that the weights of a block lie on, if they do: what weights of few bits were before they became
// plain.

#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "lanes.h"

namespace steps {

constexpr int64_t BLOCK = 32;                   // Weights that share a scale and a least value.
constexpr float FARTHEST = 1.0f / 16;           // How far from its step a weight may lie, in steps.
constexpr float ROUNDED_BY = 1.0f / (1 << 11);  // Share of itself by which float16 may have moved a weight.

// A weight is about number * scale + least.
struct Found {
  float scale, least;
};

inline float held(float number) { return static_cast<float>(static_cast<c10::Half>(number)); }

// The largest of a block's numbers, which are not negative. Integers: compilers keep floats in order.
inline float farthest_of(const float* distances) {
  int32_t bits = 0;
  for (int64_t i = 0; i < BLOCK; ++i) bits = std::max(bits, std::bit_cast<int32_t>(distances[i]));
  return std::bit_cast<float>(bits);
}

inline float sum_of(const float* numbers) {
  Lanes sums = load(numbers);
  for (int64_t i = WIDTH; i < BLOCK; i += WIDTH) sums += load(numbers + i);
  return add_lanes(sums);
}

// Numbers 0 .. count of weights from `bottom` in steps of `step`; how far the farthest lies from its step.
inline float place(const float* weights, float bottom, float step, float* numbers) {
  const float inverse = 1 / step;
  float distances[BLOCK];
  for (int64_t i = 0; i < BLOCK; ++i) {
    numbers[i] = std::nearbyint((weights[i] - bottom) * inverse);
    distances[i] = std::fabs(weights[i] - bottom - numbers[i] * step);
  }
  return farthest_of(distances);
}

// Scale and least value by least squares, which the rounding of weights averages out of, as float16 holds them.
inline Found fit(const float* weights, const float* numbers) {
  const float centre = sum_of(numbers) / BLOCK, middle = sum_of(weights) / BLOCK;
  float spread[BLOCK], together[BLOCK];
  for (int64_t i = 0; i < BLOCK; ++i) {
    const float around = numbers[i] - centre;
    spread[i] = around * around;
    together[i] = around * (weights[i] - middle);
  }
  const float all = sum_of(spread), scale = held(all > 0 ? sum_of(together) / all : 0.0f);
  // With the scale as it is held, so that the least value makes up for its rounding.
  return {scale, held(middle - scale * centre)};
}

// Numbers in larger steps where they have a divisor in common: the finest steps that fit need not be the file's own, and
// float16 has few digits for very small ones.
inline void reduce(float* numbers) {
  int divisor = 0;
  for (int64_t i = 0; i < BLOCK && divisor != 1; ++i) divisor = std::gcd(divisor, static_cast<int>(numbers[i]));
  if (divisor > 1)
    for (int64_t i = 0; i < BLOCK; ++i) numbers[i] /= static_cast<float>(divisor);
}

// Whether every weight is where its number puts it, up to the rounding of float16.
inline bool holds(const float* weights, const float* numbers, const Found& found, float slack) {
  float distances[BLOCK];
  for (int64_t i = 0; i < BLOCK; ++i)
    distances[i] = std::fabs(weights[i] - (numbers[i] * found.scale + found.least));
  return farthest_of(distances) <= slack && std::isfinite(found.scale) && std::isfinite(found.least);
}

// The numbers of a block, 0 .. largest; false if it does not lie on steps of one size, which float16 can hold. A block
// need not use all steps: there may be any number of them between its ends.
inline bool find(const float* weights, uint8_t* target, Found& found, int largest) {
  if (!std::isfinite(sum_of(weights))) return false;
  Lanes lowest = load(weights), highest = lowest;
  for (int64_t i = WIDTH; i < BLOCK; i += WIDTH) {
    const Lanes some = load(weights + i);
    lowest = some < lowest ? some : lowest;
    highest = some > highest ? some : highest;
  }
  float bottom = lowest[0], top = highest[0];
  for (int64_t k = 1; k < WIDTH; ++k) {
    bottom = std::min(bottom, lowest[k]);
    top = std::max(top, highest[k]);
  }
  // A weight's rounding, the lowest one's, and the steps' own.
  const float slack = 3 * ROUNDED_BY * std::max(-bottom, top);
  float numbers[BLOCK] = {};
  bool lies = bottom == top;
  for (int count = largest; count > 0 && !lies; --count) {
    const float step = (top - bottom) / static_cast<float>(count);
    lies = place(weights, bottom, step, numbers) <= std::min(slack, FARTHEST * step);
  }
  if (!lies) return false;
  reduce(numbers);
  found = fit(weights, numbers);
  for (int64_t i = 0; i < BLOCK; ++i) target[i] = static_cast<uint8_t>(static_cast<int32_t>(numbers[i]));
  return holds(weights, numbers, found, slack);
}

}  // namespace steps

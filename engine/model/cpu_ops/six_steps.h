// Finds the numbers, steps and scales of 6-bit weights that have become plain: those of GGUF's Q6_K.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "lanes.h"
#include "steps.h"

namespace six_steps {

constexpr int64_t HALF = 16;          // Weights that share a step.
constexpr int64_t HALVES = 16;        // Steps that share a scale.
constexpr int64_t MANY = HALF * HALVES;
constexpr int FARTHEST = 32;          // The farthest that a number lies from that of zero.
constexpr int LARGEST_STEP = 128;
constexpr float SUBNORMAL = 1.0f / (1 << 24);  // What float16 may move two very small weights by, together.
constexpr float NEAR = 1.0f / 8;      // How far from an integer a quotient of steps may be.

// A weight is about number * step * scale; numbers are stored CENTRE higher.
struct Found {
  float scale;
  int8_t steps[HALVES];
};

// Whether weights are where numbers put them, but for what float16 rounds them, and what they were measured with, by.
inline bool holds(const float* weights, const float* numbers, float step) {
  int32_t outside = 0;
  for (int64_t i = 0; i < HALF; ++i) {
    const float slack = 2.5f * steps::ROUNDED_BY * std::fabs(weights[i]) + SUBNORMAL;
    outside += std::fabs(weights[i] - numbers[i] * step) > std::min(slack, steps::FARTHEST * std::fabs(step));
  }
  return outside == 0;
}

// The largest step that weights lie on multiples of, no farther than FARTHEST from zero; 0 for zeros, and less if there is
// none. Numbers may have either sign.
inline float find_step(const float* weights, float* numbers) {
  float peak = 0;
  for (int64_t i = 0; i < HALF; ++i) peak = std::max(peak, std::fabs(weights[i]));
  std::fill(numbers, numbers + HALF, 0.0f);
  if (peak == 0) return 0;
  for (int count = FARTHEST; count > 0; --count) {
    const float step = peak / static_cast<float>(count), inverse = 1 / step;
    for (int64_t i = 0; i < HALF; ++i) numbers[i] = std::nearbyint(weights[i] * inverse);
    if (!holds(weights, numbers, step)) continue;
    int divisor = 0;
    for (int64_t i = 0; i < HALF && divisor != 1; ++i) divisor = std::gcd(divisor, static_cast<int>(numbers[i]));
    if (divisor > 1)
      for (int64_t i = 0; i < HALF; ++i) numbers[i] /= static_cast<float>(divisor);
    const Lanes first = load(numbers), second = load(numbers + WIDTH);
    const Lanes together = first * load(weights) + second * load(weights + WIDTH);
    // By least squares, which the rounding of weights averages out of.
    return add_lanes(together) / add_lanes(first * first + second * second);
  }
  return -1;
}

// Writes numbers as they are with a step of the file, `step` scales or a divisor of it, since the file's own may have been
// finer than it had to be; false if there is none that eight bits hold. The scale may have either sign.
inline bool settle(const float* weights, const float* numbers, int step, float scale, uint8_t* target, int8_t& held) {
  int divisor = 1;
  while (step > LARGEST_STEP * divisor || step % divisor != 0)
    if (++divisor > FARTHEST) return false;
  float scaled[HALF], lowest = 0, highest = 0;
  for (int64_t i = 0; i < HALF; ++i) {
    scaled[i] = std::copysign(numbers[i] * static_cast<float>(divisor), numbers[i] * scale);
    lowest = std::min(lowest, scaled[i]);
    highest = std::max(highest, scaled[i]);
  }
  const int own = step / divisor;
  if (own > 0 && !holds(weights, scaled, static_cast<float>(own) * scale)) return false;
  // A number of 32 and a step of 128 there are with one sign only.
  const bool is_turned = own == LARGEST_STEP || highest == FARTHEST;
  if ((is_turned ? -lowest : highest) >= FARTHEST || std::max(-lowest, highest) > FARTHEST) return false;
  for (int64_t i = 0; i < HALF; ++i)
    target[i] = static_cast<uint8_t>(FARTHEST + static_cast<int>(is_turned ? -scaled[i] : scaled[i]));
  held = static_cast<int8_t>(is_turned ? -own : own);
  return true;
}

// The scale that all steps are multiples of, about `scale`, as float16 holds it, and the multiples; false if they are not.
inline bool divide(const float* found, float& scale, int* multiples) {
  float together = 0, squares = 0;
  for (int64_t i = 0; i < HALVES; ++i) {
    const float quotient = found[i] / scale, whole = std::nearbyint(quotient);
    if (std::fabs(quotient - whole) > NEAR || whole > LARGEST_STEP * FARTHEST || (whole == 0) != (found[i] == 0)) return false;
    multiples[i] = static_cast<int>(whole);
    together += whole * found[i];
    squares += whole * whole;
  }
  scale = steps::held(together / squares);
  return scale > 0 && std::isfinite(scale);
}

// Does this for all HALVES, with the scale in `found`.
inline bool settle_all(const float* weights, const float* numbers, const int* multiples, uint8_t* target, Found& found) {
  for (int64_t i = 0; i < HALVES; ++i) {
    const int64_t begin = i * HALF;
    if (!settle(weights + begin, numbers + begin, multiples[i], found.scale, target + begin, found.steps[i])) return false;
  }
  return true;
}

// Whether weights are what numbers, steps and this scale make, as they are or rounded by float16.
inline bool makes(const float* weights, const uint8_t* numbers, const int8_t* found, float scale) {
  int32_t others = 0;
  for (int64_t i = 0; i < MANY; ++i) {
    // Not rounded: a number and a step have 13 bits together, a scale 11.
    const float made = static_cast<float>((numbers[i] - FARTHEST) * found[i / HALF]) * scale;
    others += made != weights[i] && steps::held(made) != weights[i];
  }
  return others == 0;
}

// Corrects the scale where a neighbour of it makes the weights exactly; whether one does.
inline bool make_exact(const float* weights, const uint8_t* numbers, Found& found) {
  const auto bits = static_cast<c10::Half>(found.scale).x;
  for (const int away : {0, 1, -1}) {
    const c10::Half scale(static_cast<uint16_t>(bits + away), c10::Half::from_bits());
    if (!makes(weights, numbers, found.steps, static_cast<float>(scale))) continue;
    found.scale = static_cast<float>(scale);
    return true;
  }
  return false;
}

// The numbers, steps and scale of MANY weights; false if they are not of this kind. Steps that are equal, or few, lie on
// multiples of several scales: those of the file make the weights exactly, others nearly.
inline bool find(const float* weights, uint8_t* target, Found& found) {
  float numbers[MANY], sizes[HALVES];
  for (int64_t i = 0; i < MANY; ++i)
    if (!std::isfinite(weights[i])) return false;
  for (int64_t i = 0; i < HALVES; ++i)
    if ((sizes[i] = find_step(weights + i * HALF, numbers + i * HALF)) < 0) return false;
  int64_t order[HALVES];
  std::iota(order, order + HALVES, 0);
  std::sort(order, order + HALVES, [&](int64_t a, int64_t b) { return sizes[a] > sizes[b]; });
  if (sizes[order[0]] == 0) {
    std::fill(target, target + MANY, uint8_t{FARTHEST});
    found = {};
    return true;
  }
  // The largest step is -128 scales in files that llama.cpp has written, unless what was found is a multiple of it.
  bool is_near = false;
  uint8_t near_numbers[MANY];
  Found near_found;
  for (const int64_t base : order)
    for (int size = LARGEST_STEP; size > 0 && sizes[base] > 0; --size) {
      int multiples[HALVES];
      float scale = sizes[base] / static_cast<float>(size);
      if (!divide(sizes, scale, multiples)) continue;
      for (const float sign : {1.0f, -1.0f}) {
        found.scale = sign * scale;
        if (!settle_all(weights, numbers, multiples, target, found)) continue;
        if (make_exact(weights, target, found)) return true;
        if (!is_near) {
          std::copy(target, target + MANY, near_numbers);
          near_found = found;
          is_near = true;
        }
      }
    }
  if (is_near) {
    std::copy(near_numbers, near_numbers + MANY, target);
    found = near_found;
  }
  return is_near;
}

}  // namespace six_steps

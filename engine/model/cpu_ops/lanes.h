// Eight numbers at a time: floats to compute with, and the types that caches hold, which are widened as they are read.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

typedef float Lanes __attribute__((vector_size(32)));
constexpr int64_t WIDTH = 8;

inline Lanes load(const float* source) {
  Lanes lanes;
  std::memcpy(&lanes, source, sizeof(lanes));
  return lanes;
}

inline Lanes load(const c10::Half* source) {
#ifdef __F16C__
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
  Lanes lanes;
  for (int64_t i = 0; i < WIDTH; ++i) lanes[i] = static_cast<float>(source[i]);
  return lanes;
#endif
}

inline Lanes load(const c10::BFloat16* source) {
#ifdef __AVX2__
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
  Lanes lanes;
  for (int64_t i = 0; i < WIDTH; ++i) lanes[i] = static_cast<float>(source[i]);
  return lanes;
#endif
}

inline void store(float* target, Lanes lanes) { std::memcpy(target, &lanes, sizeof(lanes)); }

// Has a cache line brought near that is read soon.
inline void prefetch([[maybe_unused]] const void* place) {
#ifdef __AVX__
  _mm_prefetch(static_cast<const char*>(place), _MM_HINT_T0);
#endif
}

inline float add_lanes(Lanes x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

// target[i] = source[i], exactly.
template <typename Number>
void widen(const Number* source, int64_t size, float* target) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(target + i, load(source + i));
  for (; i < size; ++i) target[i] = static_cast<float>(source[i]);
}

constexpr float largest(c10::Half) { return 65504.0f; }
constexpr float largest(c10::BFloat16) { return std::bit_cast<float>(0x7F7F0000); }

// A finite number that a type has no room for becomes the largest that it has; what is infinite or not a number stays
// so.
inline float saturated(float x, float limit) {
  return std::fabs(x) > limit && std::fabs(x) <= std::numeric_limits<float>::max() ? std::copysign(limit, x) : x;
}

// target[i] = source[i], rounded to nearest, ties to even, and saturated.
inline void narrow(const float* source, int64_t size, float* target) {
  std::memcpy(target, source, size * sizeof(float));
}

template <typename Number>
void narrow(const float* source, int64_t size, Number* target) {
  for (int64_t i = 0; i < size; ++i) target[i] = static_cast<Number>(saturated(source[i], largest(Number())));
}

#ifdef __F16C__
inline void narrow(const float* source, int64_t size, c10::Half* target) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    float kept[WIDTH];
    for (int64_t j = 0; j < WIDTH; ++j) kept[j] = saturated(source[i + j], largest(c10::Half()));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), _mm256_cvtps_ph(load(kept), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < size; ++i) target[i] = static_cast<c10::Half>(saturated(source[i], largest(c10::Half())));
}
#endif

// target[d * stride + i] = sources[i][d] for WIDTH values of i and those of d from .. size.
template <typename Number>
void transpose_rest(const Number* const* sources, int64_t from, int64_t size, Number* target, int64_t stride) {
  for (int64_t d = from; d < size; ++d)
    for (int64_t i = 0; i < WIDTH; ++i) target[d * stride + i] = sources[i][d];
}

// The same for all d, in registers where there are any.
inline void transpose(const float* const* sources, int64_t size, float* target, int64_t stride) {
  int64_t begin = 0;
#ifdef __AVX__
  for (; begin + WIDTH <= size; begin += WIDTH) {
    __m256 rows[WIDTH], pairs[WIDTH];
    for (int64_t i = 0; i < WIDTH; ++i) rows[i] = _mm256_loadu_ps(sources[i] + begin);
    for (int64_t i = 0; i < WIDTH; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int64_t i = 0; i < WIDTH; i += 4) {
      rows[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      rows[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
      rows[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      rows[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
    float* place = target + begin * stride;
    for (int64_t d = 0; d < WIDTH / 2; ++d) {
      _mm256_storeu_ps(place + d * stride, _mm256_permute2f128_ps(rows[d], rows[d + 4], 0x20));
      _mm256_storeu_ps(place + (d + 4) * stride, _mm256_permute2f128_ps(rows[d], rows[d + 4], 0x31));
    }
  }
#endif
  transpose_rest(sources, begin, size, target, stride);
}

// Numbers of 16 bits, whatever they mean: twice as many at a time, and the two halves of a register never meet.
template <typename Number>
void transpose(const Number* const* sources, int64_t size, Number* target, int64_t stride) {
  static_assert(sizeof(Number) == 2);
  int64_t begin = 0;
#ifdef __AVX2__
  for (; begin + 2 * WIDTH <= size; begin += 2 * WIDTH) {
    __m256i rows[WIDTH], pairs[WIDTH];
    for (int64_t i = 0; i < WIDTH; ++i)
      rows[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sources[i] + begin));
    for (int64_t i = 0; i < WIDTH; i += 2) {
      pairs[i] = _mm256_unpacklo_epi16(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_epi16(rows[i], rows[i + 1]);
    }
    for (int64_t i = 0; i < WIDTH; i += 4)
      for (int64_t half = 0; half < 2; ++half) {
        rows[i + 2 * half] = _mm256_unpacklo_epi32(pairs[i + half], pairs[i + half + 2]);
        rows[i + 2 * half + 1] = _mm256_unpackhi_epi32(pairs[i + half], pairs[i + half + 2]);
      }
    const auto put = [&](int64_t d, __m256i both) {
      auto* place = target + (begin + d) * stride;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(place), _mm256_castsi256_si128(both));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(place + WIDTH * stride), _mm256_extracti128_si256(both, 1));
    };
    for (int64_t pair = 0; pair < WIDTH / 2; ++pair) {
      put(2 * pair, _mm256_unpacklo_epi64(rows[pair], rows[pair + 4]));
      put(2 * pair + 1, _mm256_unpackhi_epi64(rows[pair], rows[pair + 4]));
    }
  }
#endif
  transpose_rest(sources, begin, size, target, stride);
}

}  // namespace

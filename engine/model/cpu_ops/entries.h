// Entries of a row of logits, picked eight at a time.

#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"
#include "room.h"

namespace {
namespace sampling {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// What an entry is counted as: (x - highest) / temperature. As it comes, the entry itself.
struct Scale {
  float highest = 0.0f, temperature = 1.0f;

  template <typename Number>
  Number of(Number x) const {
    return (x - highest) / temperature;
  }
};

typedef int32_t Indices __attribute__((vector_size(32)));

inline Indices indices_from(int64_t first) {
  const Indices lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  return lanes + static_cast<int32_t>(first);
}

// Bit k is set where the k-th of what a comparison said is.
inline unsigned bits_of(Indices said) {
#ifdef __AVX__
  return _mm256_movemask_ps(reinterpret_cast<__m256>(said));
#else
  unsigned found = 0;
  for (int64_t k = 0; k < WIDTH; ++k) found |= static_cast<unsigned>(said[k] != 0) << k;
  return found;
#endif
}

// The scaled entries that are left: those above `least`, and of those that equal it the ones up to the index `last`.
struct Cut {
  float least = NEVER;
  int32_t last = -1;

  bool keeps(float scaled, int32_t index) const { return scaled > least || (scaled == least && index <= last); }

  // Bit k is set where x[k] is kept.
  unsigned kept(Lanes x, Indices indices) const { return bits_of((x > least) | ((x == least) & (indices <= last))); }
};

// For each set of eight bits where its first, second, ... lies.
constexpr auto PLACES = [] {
  std::array<std::array<uint8_t, WIDTH>, 256> places{};
  for (unsigned found = 0; found < 256; ++found) {
    int64_t count = 0;
    for (unsigned k = 0; k < WIDTH; ++k)
      if (found >> k & 1) places[found][count++] = static_cast<uint8_t>(k);
  }
  return places;
}();

// Where entries are put one behind the other. Writes up to eight at a time, so there must be room behind the last.
struct Writer {
  float* scaled;
  int32_t* indices;

  void add(float x, int32_t index) {
    *scaled++ = x;
    *indices++ = index;
  }

  // Those whose bit in `found` is set. There is no branch in it that a processor could guess wrong.
  void add(Lanes x, Indices own, unsigned found) {
#ifdef __AVX2__
    const __m256i places =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(PLACES[found].data())));
    _mm256_storeu_ps(scaled, _mm256_permutevar8x32_ps(reinterpret_cast<__m256>(x), places));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(indices),
                        _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(own), places));
    scaled += std::popcount(found);
    indices += std::popcount(found);
#else
    for (; found != 0; found &= found - 1) add(x[std::countr_zero(found)], own[std::countr_zero(found)]);
#endif
  }
};

// Some entries of a row, scaled, with their indices, in order.
class Entries {
 public:
  // To put so many in; whatever was there is gone.
  Writer begin(int64_t size) {
    count_ = 0;
    return {scaled_.with(size + WIDTH), indices_.with(size + WIDTH)};
  }

  // That is all.
  void end(const Writer& writer) { count_ = writer.scaled - scaled_.with(0); }

  int64_t count() const { return count_; }
  const float* scaled() const { return scaled_.with(0); }
  const int32_t* indices() const { return indices_.with(0); }

  // Calls function(scaled, index) where above < scaled <= most.
  template <typename Function>
  void for_between(float above, float most, const Function& function) const {
    const float* x = scaled();
    int64_t i = 0;
    for (; i + WIDTH <= count_; i += WIDTH) {
      const Lanes lanes = load(x + i);
      for (unsigned found = bits_of((lanes > above) & (lanes <= most)); found != 0; found &= found - 1) {
        const int64_t place = i + std::countr_zero(found);
        function(x[place], indices()[place]);
      }
    }
    for (; i < count_; ++i)
      if (x[i] > above && x[i] <= most) function(x[i], indices()[i]);
  }

 private:
  mutable Room<float> scaled_;
  mutable Room<int32_t> indices_;
  int64_t count_ = 0;
};

// What a thread works in. Not inline: looking up what belongs to a thread is a call, and would be made in every loop.
struct Desk {
  Entries entries, piece;

  [[gnu::noinline]] static Desk& own() {
    thread_local Desk desk;
    return desk;
  }
};

// Puts in what `cut` leaves of scaled entries with their indices.
inline void put_kept(const float* scaled, const int32_t* indices, int64_t count, const Cut& cut, Writer& writer) {
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    Indices own;
    std::memcpy(&own, indices + i, sizeof(own));
    writer.add(load(scaled + i), own, cut.kept(load(scaled + i), own));
  }
  for (; i < count; ++i)
    if (cut.keeps(scaled[i], indices[i])) writer.add(scaled[i], indices[i]);
}

// The same for [begin, end) of a row.
inline void put_kept(const float* row, int64_t begin, int64_t end, const Scale& scale, const Cut& cut, Writer& writer) {
  int64_t i = begin;
  for (; i + WIDTH <= end; i += WIDTH) {
    const Lanes x = scale.of(load(row + i));
    if (const unsigned found = cut.kept(x, indices_from(i)); found != 0) writer.add(x, indices_from(i), found);
  }
  for (; i < end; ++i) {
    const float x = scale.of(row[i]);
    if (cut.keeps(x, static_cast<int32_t>(i))) writer.add(x, static_cast<int32_t>(i));
  }
}

}  // namespace sampling
}  // namespace

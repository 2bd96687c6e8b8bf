// Choosing tokens: the likeliest of a row of logits, or the one that comes out ahead under Gumbel noise, which is computed
// only where it can decide. The noise is that of engine/sampling/noise.py.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "truncation.h"

namespace {
namespace sampling {

// The first in [begin, end) that is not a number; `end` if there is none.
inline int64_t first_other(const float* row, int64_t begin, int64_t end) {
  int64_t i = begin;
  Indices others = {};
  for (; i + WIDTH <= end; i += WIDTH) others |= load(row + i) != load(row + i);
  if (bits_of(others) != 0) i = begin;
  return std::find_if(row + i, row + end, [](float x) { return x != x; }) - row;
}

// What argmax says: the first of the highest entries, where what is not a number is above all.
inline int64_t likeliest(const float* row, int64_t size) {
  constexpr int64_t PIECE = 128 * WIDTH;
  float peak = NEVER;
  int64_t first = 0;
  for (int64_t begin = 0; begin < size; begin += PIECE) {
    const int64_t end = std::min(begin + PIECE, size);
    if (const int64_t other = first_other(row, begin, end); other < end) return other;
    const float highest = highest_of(row + begin, end - begin);
    if (highest > peak) {
      peak = highest;
      first = begin;
    }
  }
  return std::find(row + first, row + size, peak) - row;
}

// Of each sequence of SplitMix64 the n-th number belongs to token n.
constexpr uint64_t STEP = 0x9E3779B97F4A7C15u, FIRST_FACTOR = 0xBF58476D1CE4E5B9u, SECOND_FACTOR = 0x94D049BB133111EBu;

// The number's upper 52 bits for a token of the sequence that starts at `start`.
inline uint64_t mixed(uint64_t start, int64_t token) {
  uint64_t state = start + static_cast<uint64_t>(token + 1) * STEP;
  state = (state ^ (state >> 30)) * FIRST_FACTOR;
  state = (state ^ (state >> 27)) * SECOND_FACTOR;
  return (state ^ (state >> 31)) >> 12;
}

inline double gumbel(uint64_t bits) {
  const double uniform = std::bit_cast<double>(bits | 0x3FF0000000000000u) - (1.0 - 0x1p-53);
  return -std::log(-std::log(uniform));
}

// No noise is larger: -log(-log(u)) <= -log(1 - u), and the exponent of 1 - u bounds that.
inline double at_most(uint64_t bits) {
  const uint64_t rest = (bits ^ 0xFFFFFFFFFFFFFu) | 1;
  return (std::countl_zero(rest) - 10) * 0.6931471805599454;
}

#ifdef __AVX2__
inline __m256i times(__m256i x, uint64_t factor) {
  const __m256i lower = _mm256_set1_epi64x(static_cast<int64_t>(factor));
  const __m256i upper = _mm256_set1_epi64x(static_cast<int64_t>(factor >> 32));
  const __m256i crossed =
      _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), lower), _mm256_mul_epu32(x, upper));
  return _mm256_add_epi64(_mm256_mul_epu32(x, lower), _mm256_slli_epi64(crossed, 32));
}

// The upper halves of the numbers of four tokens, in the upper halves of the result.
inline __m256i upper_halves(uint64_t start, __m256i tokens) {
  const __m256i first = _mm256_set1_epi64x(static_cast<int64_t>(start + STEP));
  __m256i state = _mm256_add_epi64(first, times(tokens, STEP));
  state = times(_mm256_xor_si256(state, _mm256_srli_epi64(state, 30)), FIRST_FACTOR);
  state = times(_mm256_xor_si256(state, _mm256_srli_epi64(state, 27)), SECOND_FACTOR);
  return _mm256_xor_si256(state, _mm256_srli_epi64(state, 31));
}
#endif

// The highest so far of entries + noise, highest first and the lowest token among equals. While there are fewer, the rest is
// token 0 with a score of minus infinity.
class Highest {
 public:
  // ids: whose noise each entry gets; none where that is its number.
  Highest(uint64_t start, int64_t count, int64_t* tokens, double* scores, const int64_t* ids)
      : start_(start), count_(count), tokens_(tokens), scores_(scores), ids_(ids) {
    std::fill(tokens, tokens + count, 0);
    std::fill(scores, scores + count, static_cast<double>(NEVER));
  }

  // Entries that come behind all before them.
  void add(const Entries& entries) {
    int64_t i = 0;
#ifdef __AVX2__
    for (; i + WIDTH <= entries.count(); i += WIDTH)
      for (unsigned found = may_win(entries.scaled() + i, entries.indices() + i); found != 0; found &= found - 1) {
        const int64_t place = i + std::countr_zero(found);
        add(entries.scaled()[place], entries.indices()[place]);
      }
#endif
    for (; i < entries.count(); ++i) add(entries.scaled()[i], entries.indices()[i]);
  }

 private:
  void add(float entry, int64_t token) {
    const uint64_t bits = mixed(start_, ids_ ? ids_[token] : token);
    if (entry + at_most(bits) < scores_[count_ - 1]) return;
    const double score = entry + gumbel(bits);
    if (!(score > scores_[count_ - 1])) return;
    int64_t place = count_ - 1;
    for (; place > 0 && score > scores_[place - 1]; --place) {
      scores_[place] = scores_[place - 1];
      tokens_[place] = tokens_[place - 1];
    }
    scores_[place] = score;
    tokens_[place] = token;
  }

#ifdef __AVX2__
  // Bit k is set where the k-th entry may come to be among the highest. For that its noise has to be at least what it lacks:
  // lack <= -log(-log(u)) <= -log(1 - u), so 1 - u <= e^-lack. Where 1 - u > 2^-n with n <= lack / log(2) - 1 it is
  // twice as much, and rounding of a float cannot matter.
  unsigned may_win(const float* entries, const int32_t* tokens) const {
    const Lanes lack = static_cast<float>(scores_[count_ - 1]) - load(entries);
    const __m256 n = reinterpret_cast<__m256>(lack * 1.44269504088896341f - 1.0f);
    const __m256 bounded = _mm256_min_ps(_mm256_max_ps(n, _mm256_setzero_ps()), _mm256_set1_ps(31.0f));
    // 2^(31 - n), as bits of a float.
    const __m256i exponent = _mm256_sub_epi32(_mm256_set1_epi32(127 + 31), _mm256_cvttps_epi32(bounded));
    const __m256 most = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    // 31 bits of 1 - u, in whole numbers.
    const __m256i rest = _mm256_srli_epi32(_mm256_xor_si256(upper_bits(tokens), _mm256_set1_epi32(-1)), 1);
    return _mm256_movemask_ps(_mm256_cmp_ps(_mm256_cvtepi32_ps(rest), most, _CMP_LE_OQ));
  }

  // The upper 32 bits of the numbers of eight tokens.
  __m256i upper_bits(const int32_t* tokens) const {
    __m256 halves[2];
    for (int64_t half = 0; half < 2; ++half) {
      const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tokens + 4 * half));
      const __m256i wide = ids_ ? _mm256_i32gather_epi64(reinterpret_cast<const long long*>(ids_), own, 8)
                                : _mm256_cvtepi32_epi64(own);
      halves[half] = _mm256_castsi256_ps(upper_halves(start_, wide));
    }
    const __m256i mixed_up = _mm256_castps_si256(_mm256_shuffle_ps(halves[0], halves[1], 0xDD));
    return _mm256_permute4x64_epi64(mixed_up, 0xD8);
  }
#endif

  uint64_t start_;
  int64_t count_;
  int64_t* tokens_;
  double* scores_;
  const int64_t* ids_;
};

// Shows `highest` all that is kept of a row.
inline void add_kept(const float* row, int64_t size, const Kept& kept, Entries& piece, Highest& highest) {
  constexpr int64_t PIECE = 512 * WIDTH;
  const int64_t count = kept.entries ? kept.entries->count() : size;
  for (int64_t begin = 0; begin < count; begin += PIECE) {
    const int64_t end = std::min(begin + PIECE, count);
    Writer writer = piece.begin(PIECE);
    if (kept.entries)
      put_kept(kept.entries->scaled() + begin, kept.entries->indices() + begin, end - begin, kept.cut, writer);
    else
      put_kept(row, begin, end, kept.scale, kept.cut, writer);
    piece.end(writer);
    highest.add(piece);
  }
}

// The `count` highest of row + noise; see Highest.
inline void top(const float* row, int64_t size, uint64_t start, int64_t count, int64_t* tokens, double* scores,
                const int64_t* ids) {
  Highest highest(start, count, tokens, scores, ids);
  add_kept(row, size, {{}, {}, nullptr}, Desk::own().piece, highest);
}

// The token of a row: the likeliest, or with a temperature the one of those that truncation leaves that comes out ahead
// under the noise that begins at `start`.
inline int64_t choose(const float* row, int64_t size, const Truncation& options, uint64_t start) {
  if (options.temperature == 0.0) return likeliest(row, size);
  Desk& desk = Desk::own();
  int64_t token;
  double score;
  Highest highest(start, 1, &token, &score, nullptr);
  add_kept(row, size, kept_of(row, size, options, desk.entries), desk.piece, highest);
  return token;
}

}  // namespace sampling
}  // namespace

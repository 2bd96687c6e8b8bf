// Choosing tokens: truncation of a row of logits, and its argmax under Gumbel noise that is computed only where it
// can decide. Formulas and noise are those of engine/sampling; see logits.py and noise.py there.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "attention.h"

namespace sampling {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Options of a row; temperature 0 leaves the row as it is.
struct Truncation {
  double temperature, top_k, top_p, min_p;
};

// The k-th highest of the row.
inline float kth_highest(const float* row, int64_t size, int64_t k, std::vector<float>& scratch) {
  if (k > 2048) {
    scratch.assign(row, row + size);
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<>());
    return scratch[k - 1];
  }
  // A heap of the k highest so far, the lowest of them on top: hardly any token gets in.
  scratch.assign(row, row + k);
  std::make_heap(scratch.begin(), scratch.end(), std::greater<>());
  for (int64_t i = k; i < size; ++i) {
    if (row[i] <= scratch.front()) continue;
    std::pop_heap(scratch.begin(), scratch.end(), std::greater<>());
    scratch.back() = row[i];
    std::push_heap(scratch.begin(), scratch.end(), std::greater<>());
  }
  return scratch.front();
}

// The highest entry.
inline float highest_of(const float* row, int64_t size) {
  float peak = NEVER;
  int64_t i = 0;
  if (size >= WIDTH) {
    Lanes peaks = load(row);
    for (i = WIDTH; i + WIDTH <= size; i += WIDTH) {
      const Lanes entries = load(row + i);
      peaks = entries > peaks ? entries : peaks;
    }
    for (int64_t k = 0; k < WIDTH; ++k) peak = std::max(peak, peaks[k]);
  }
  for (; i < size; ++i) peak = std::max(peak, row[i]);
  return peak;
}

// Calls function(index) for the entries above a limit, in order. Most of a row is below and passed over in eights.
template <typename Function>
void for_above(const float* row, int64_t size, float limit, const Function& function) {
  int64_t i = 0;
#ifdef __AVX__
  const __m256 limits = _mm256_set1_ps(limit);
  for (; i + WIDTH <= size; i += WIDTH) {
    const __m256 above = _mm256_cmp_ps(_mm256_loadu_ps(row + i), limits, _CMP_GT_OQ);
    auto found = static_cast<unsigned>(_mm256_movemask_ps(above));
    if (found == 0xFF)
      for (int64_t k = 0; k < WIDTH; ++k) function(i + k);
    else
      for (; found != 0; found &= found - 1) function(i + std::countr_zero(found));
  }
#endif
  for (; i < size; ++i)
    if (row[i] > limit) function(i);
}

// The sum of e^x over a row.
inline double mass_of(const float* row, int64_t size) {
  constexpr int64_t PIECE = 64 * WIDTH;
  double sums[WIDTH] = {};
  for (int64_t begin = 0; begin < size; begin += PIECE) {
    float masses[PIECE];
    const int64_t count = std::min(PIECE, size - begin);
    for (int64_t i = 0; i < count; ++i) masses[i] = exp_nonpositive(row[begin + i]);
    std::fill(masses + count, masses + PIECE, 0.0f);
    for (int64_t i = 0; i < PIECE; i += WIDTH)
      for (int64_t k = 0; k < WIDTH; ++k) sums[k] += masses[i + k];
  }
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

// Buckets of equal width in log probability settle which few tokens have to be sorted.
constexpr int64_t BUCKETS = 2048, PER_NAT = 16;

inline int64_t bucket_of(float logit) {
  return std::min<int64_t>(BUCKETS - 1, static_cast<int64_t>(std::min(-logit, 1e4f) * PER_NAT));
}

// Keeps the smallest set of most likely tokens whose mass reaches `wanted`, the lowest ids among equals, if all of it is
// above a limit, which lies between two buckets; otherwise it changes nothing and returns false.
inline bool keep_above(float* row, int64_t size, double wanted, float limit, std::vector<int64_t>& tokens) {
  double masses[BUCKETS] = {};
  tokens.clear();
  for_above(row, size, limit, [&](int64_t token) {
    masses[bucket_of(row[token])] += exp_nonpositive(row[token]);
    tokens.push_back(token);
  });
  double before = 0.0;
  int64_t border = 0;
  while (border < BUCKETS - 1 && before + masses[border] < wanted) before += masses[border++];
  if (limit != NEVER && border >= bucket_of(limit)) return false;
  std::vector<int64_t> candidates;
  for (int64_t token : tokens) {
    const int64_t bucket = bucket_of(row[token]);
    if (bucket == border) candidates.push_back(token);
    if (bucket > border) row[token] = NEVER;
  }
  std::sort(candidates.begin(), candidates.end(),
            [&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
  size_t kept = 0;
  while (kept < candidates.size() && before < wanted) before += exp_nonpositive(row[candidates[kept++]]);
  for (; kept < candidates.size(); ++kept) row[candidates[kept]] = NEVER;
  for (int64_t i = 0; i < size; ++i) row[i] = row[i] > limit ? row[i] : NEVER;
  return true;
}

// Keeps the smallest set of most likely tokens whose mass reaches top_p. The highest entry of the row is 0.
inline void keep_mass(float* row, int64_t size, double top_p) {
  const double wanted = top_p * mass_of(row, size);
  std::vector<int64_t> tokens;
  // What lies far below is seldom wanted, and is most of a row.
  for (const float limit : {-12.0f, NEVER})
    if (keep_above(row, size, wanted, limit, tokens)) return;
}

inline void truncate(float* row, int64_t size, const Truncation& options, std::vector<float>& scratch) {
  if (options.temperature == 0.0) return;
  const float highest = highest_of(row, size);
  const float temperature = static_cast<float>(options.temperature);
  for (int64_t i = 0; i < size; ++i) row[i] = (row[i] - highest) / temperature;
  const auto top_k = static_cast<int64_t>(options.top_k);
  if (top_k > 0 && top_k < size) {
    const float last = kth_highest(row, size, top_k, scratch);
    for (int64_t i = 0; i < size; ++i) row[i] = row[i] < last ? NEVER : row[i];
  }
  if (options.top_p < 1.0) keep_mass(row, size, options.top_p);
  if (options.min_p > 0.0) {
    const float least = static_cast<float>(std::log(options.min_p));
    for (int64_t i = 0; i < size; ++i) row[i] = row[i] < least ? NEVER : row[i];
  }
}

// SplitMix64's number for a token of the sequence that starts at `start`.
inline uint64_t mixed(uint64_t start, int64_t token) {
  uint64_t state = start + static_cast<uint64_t>(token + 1) * 0x9E3779B97F4A7C15u;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
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

// The `count` highest of row + noise, highest first and the lowest token among equals. Where fewer can be chosen the
// rest is token 0 with a score of minus infinity.
// ids: whose noise each entry gets; none where that is its number.
inline void top(const float* row, int64_t size, uint64_t start, int64_t count, int64_t* tokens, double* scores,
                const int64_t* ids) {
  std::fill(tokens, tokens + count, 0);
  std::fill(scores, scores + count, static_cast<double>(NEVER));
  for_above(row, size, NEVER, [&](int64_t token) {
    const uint64_t bits = mixed(start, ids ? ids[token] : token);
    if (row[token] + at_most(bits) < scores[count - 1]) return;
    const double score = row[token] + gumbel(bits);
    if (!(score > scores[count - 1])) return;
    int64_t place = count - 1;
    for (; place > 0 && score > scores[place - 1]; --place) {
      scores[place] = scores[place - 1];
      tokens[place] = tokens[place - 1];
    }
    scores[place] = score;
    tokens[place] = token;
  });
}

}  // namespace sampling

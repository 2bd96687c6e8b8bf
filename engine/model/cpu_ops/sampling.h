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

// Keeps the smallest set of most likely tokens whose mass reaches top_p, the lowest ids among equals. The highest
// entry of the row is 0.
inline void keep_mass(float* row, int64_t size, double top_p, std::vector<float>& probabilities) {
  // Buckets of equal width in log probability settle which few tokens have to be sorted.
  constexpr int64_t BUCKETS = 2048, PER_NAT = 16;
  const auto bucket_of = [](float logit) {
    return std::min<int64_t>(BUCKETS - 1, static_cast<int64_t>(std::min(-logit, 1e4f) * PER_NAT));
  };
  probabilities.resize(size);
  for (int64_t i = 0; i < size; ++i) probabilities[i] = exp_nonpositive(row[i]);
  double masses[BUCKETS] = {}, total = 0.0;
  for (int64_t i = 0; i < size; ++i)
    if (row[i] != NEVER) masses[bucket_of(row[i])] += probabilities[i];
  for (double mass : masses) total += mass;
  const double wanted = top_p * total;
  double before = 0.0;
  int64_t border = 0;
  while (border < BUCKETS - 1 && before + masses[border] < wanted) before += masses[border++];
  std::vector<int64_t> candidates;
  for (int64_t i = 0; i < size; ++i)
    if (row[i] != NEVER && bucket_of(row[i]) == border) candidates.push_back(i);
  std::sort(candidates.begin(), candidates.end(),
            [&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
  size_t kept = 0;
  while (kept < candidates.size() && before < wanted) before += probabilities[candidates[kept++]];
  for (int64_t i = 0; i < size; ++i)
    if (row[i] != NEVER && bucket_of(row[i]) > border) row[i] = NEVER;
  for (; kept < candidates.size(); ++kept) row[candidates[kept]] = NEVER;
}

inline void truncate(float* row, int64_t size, const Truncation& options, std::vector<float>& scratch) {
  if (options.temperature == 0.0) return;
  const float highest = *std::max_element(row, row + size);
  const float temperature = static_cast<float>(options.temperature);
  for (int64_t i = 0; i < size; ++i) row[i] = (row[i] - highest) / temperature;
  const auto top_k = static_cast<int64_t>(options.top_k);
  if (top_k > 0 && top_k < size) {
    const float last = kth_highest(row, size, top_k, scratch);
    for (int64_t i = 0; i < size; ++i) row[i] = row[i] < last ? NEVER : row[i];
  }
  if (options.top_p < 1.0) keep_mass(row, size, options.top_p, scratch);
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
  for (int64_t token = 0; token < size; ++token) {
    if (row[token] == NEVER) continue;
    const uint64_t bits = mixed(start, ids ? ids[token] : token);
    if (row[token] + at_most(bits) < scores[count - 1]) continue;
    const double score = row[token] + gumbel(bits);
    if (!(score > scores[count - 1])) continue;
    int64_t place = count - 1;
    for (; place > 0 && score > scores[place - 1]; --place) {
      scores[place] = scores[place - 1];
      tokens[place] = tokens[place - 1];
    }
    scores[place] = score;
    tokens[place] = token;
  }
}

}  // namespace sampling

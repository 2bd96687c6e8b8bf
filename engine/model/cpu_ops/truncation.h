// What temperature, top_k, top_p and min_p leave of a row of logits. Formulas are those of engine/sampling/logits.py.
// A row is read two or three times and never sorted: each option leaves the entries from some limit on.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "attention.h"
#include "entries.h"

namespace {
namespace sampling {

// Options of a row; temperature 0 leaves the row as it is.
struct Truncation {
  double temperature, top_k, top_p, min_p;
};

// The highest entry; what is not a number is none.
inline float highest_of(const float* row, int64_t size) {
  constexpr int64_t CHAINS = 4;
  Lanes peaks[CHAINS];
  std::fill(peaks, peaks + CHAINS, NEVER - Lanes{});
  int64_t i = 0;
  for (; i + CHAINS * WIDTH <= size; i += CHAINS * WIDTH)
    for (int64_t n = 0; n < CHAINS; ++n) {
      const Lanes entries = load(row + i + n * WIDTH);
      peaks[n] = entries > peaks[n] ? entries : peaks[n];
    }
  float peak = NEVER;
  for (const Lanes& lanes : peaks)
    for (int64_t k = 0; k < WIDTH; ++k) peak = std::max(peak, lanes[k]);
  for (; i < size; ++i) peak = std::max(peak, row[i]);
  return peak;
}

// The k-th highest of the row.
inline float kth_highest(const float* row, int64_t size, int64_t k) {
  std::vector<float> highest(row, row + (k > 2048 ? size : k));
  if (k > 2048) {
    std::nth_element(highest.begin(), highest.begin() + (k - 1), highest.end(), std::greater<>());
    return highest[k - 1];
  }
  // A heap of the k highest so far, the lowest of them on top: hardly any token gets in.
  std::make_heap(highest.begin(), highest.end(), std::greater<>());
  const auto show = [&](float entry) {
    if (entry <= highest.front()) return;
    std::pop_heap(highest.begin(), highest.end(), std::greater<>());
    highest.back() = entry;
    std::push_heap(highest.begin(), highest.end(), std::greater<>());
  };
  int64_t i = k;
  for (; i + WIDTH <= size; i += WIDTH)
    for (unsigned found = Cut{highest.front()}.kept(load(row + i), Indices{}); found != 0; found &= found - 1)
      show(row[i + std::countr_zero(found)]);
  for (; i < size; ++i) show(row[i]);
  return highest.front();
}

// Masses of entries in buckets of equal width in log probability, so that only the tokens of one have to be sorted.
struct Buckets {
  static constexpr int64_t COUNT = 1536;

  float per_nat;  // A power of 2, so that borders are exact.
  float limit;    // What is above it has a place; the last bucket is for all that is further down.
  double masses[COUNT] = {};

  int32_t of(float scaled) const {
    return static_cast<int32_t>(std::min(-scaled * per_nat, static_cast<float>(COUNT - 1)));
  }
  float begin(int32_t bucket) const { return -static_cast<float>(bucket) / per_nat; }
  float end(int32_t bucket) const { return bucket == COUNT - 1 ? limit : begin(bucket + 1); }
};

// What truncation leaves of a row.
struct Kept {
  Scale scale;
  Cut cut;
  const Entries* entries;  // Where all of that is, and more; null if that is the row alone.
};

// The sum of e^x over the scaled entries that are kept so far. Those above buckets.limit are added to the buckets and are
// the entries.
inline double fill(const float* row, int64_t size, const Kept& kept, Buckets& buckets, Entries& entries) {
  constexpr int64_t PIECE = 64 * WIDTH;
  const float floor = kept.cut.least;
  const Cut cut = buckets.limit > floor ? Cut{buckets.limit} : kept.cut;
  double sums[WIDTH] = {};
  Writer writer = entries.begin(size);
  for (int64_t begin = 0; begin < size; begin += PIECE) {
    float scaled[PIECE], masses[PIECE];
    const int64_t count = std::min(PIECE, size - begin);
    for (int64_t i = 0; i < count; ++i) scaled[i] = kept.scale.of(row[begin + i]);
    std::fill(scaled + count, scaled + PIECE, NEVER);
    for (int64_t i = 0; i < PIECE; ++i) masses[i] = exp_nonpositive(scaled[i] < floor ? NEVER : scaled[i]);
    for (int64_t i = 0; i < PIECE; i += WIDTH)
      for (int64_t k = 0; k < WIDTH; ++k) sums[k] += masses[i + k];
    for (int64_t i = 0; i < PIECE; i += WIDTH) {
      const Indices indices = indices_from(begin + i);
      const unsigned found = cut.kept(load(scaled + i), indices);
      if (found != 0) writer.add(load(scaled + i), indices, found);
    }
  }
  entries.end(writer);
  float masses[PIECE];
  int32_t places[PIECE];
  for (int64_t begin = 0; begin < entries.count(); begin += PIECE) {
    const int64_t count = std::min(PIECE, entries.count() - begin);
    const float* scaled = entries.scaled() + begin;
    for (int64_t i = 0; i < count; ++i) masses[i] = exp_nonpositive(scaled[i]);
    for (int64_t i = 0; i < count; ++i) places[i] = buckets.of(scaled[i]);
    for (int64_t i = 0; i < count; ++i) buckets.masses[places[i]] += masses[i];
  }
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

// Keeps the smallest set of most likely tokens whose mass reaches top_p, the lowest ids among equals, if it has its place in
// the buckets; otherwise returns false.
inline bool keep_mass(const float* row, int64_t size, double top_p, Buckets& buckets, Entries& entries, Kept& kept) {
  const double wanted = top_p * fill(row, size, kept, buckets, entries);
  kept.entries = &entries;
  double before = 0.0;
  int32_t border = 0;
  while (border < Buckets::COUNT && before + buckets.masses[border] < wanted) before += buckets.masses[border++];
  if (border == Buckets::COUNT) return false;
  std::vector<std::pair<float, int32_t>> candidates;
  entries.for_between(buckets.end(border), buckets.begin(border),
                      [&](float scaled, int32_t index) { candidates.emplace_back(scaled, index); });
  std::sort(candidates.begin(), candidates.end(),
            [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  kept.cut = {-NEVER, -1};
  for (auto next = candidates.begin(); next != candidates.end() && before < wanted; ++next) {
    before += exp_nonpositive(next->first);
    kept.cut = {next->first, next->second};
  }
  return true;
}

// options.temperature is not 0. entries: room to work in, and what Kept refers to.
inline Kept kept_of(const float* row, int64_t size, const Truncation& options, Entries& entries) {
  constexpr int32_t ALL = std::numeric_limits<int32_t>::max();
  Kept kept{{highest_of(row, size), static_cast<float>(options.temperature)}, {}, nullptr};
  const auto top_k = static_cast<int64_t>(options.top_k);
  // What is scaled is in the same order.
  if (top_k > 0 && top_k < size)
    if (const float last = kept.scale.of(kth_highest(row, size, top_k)); last > NEVER) kept.cut = {last, ALL};
  if (options.top_p < 1.0) {
    // What lies far below the likeliest token is seldom wanted, and is most of a row.
    Buckets near{128.0f, -12.0f};
    if (!keep_mass(row, size, options.top_p, near, entries, kept)) {
      Buckets all{16.0f, NEVER};
      keep_mass(row, size, options.top_p, all, entries, kept);
    }
  }
  if (options.min_p > 0.0) {
    const float least = static_cast<float>(std::log(options.min_p));
    if (least > kept.cut.least) kept.cut = {least, ALL};
  }
  return kept;
}

// out: what is left of the row, scaled, and minus infinity for the rest; may be the row.
inline void truncate(const float* row, int64_t size, const Truncation& options, float* out) {
  if (options.temperature == 0.0) {
    if (out != row) std::copy(row, row + size, out);
    return;
  }
  const Kept kept = kept_of(row, size, options, Desk::own().entries);
  const auto write = [&](int64_t begin, int64_t end, float least) {
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      const float x = kept.scale.of(row[i]);
      out[i] = x < least ? NEVER : x;
    }
  };
  const int64_t behind = std::min<int64_t>(kept.cut.last, size - 1) + 1;
  write(0, behind, kept.cut.least);
  write(behind, size, std::nextafter(kept.cut.least, -NEVER));
}

}  // namespace sampling
}  // namespace

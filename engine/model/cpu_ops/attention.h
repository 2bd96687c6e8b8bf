// Attention of rows that each attend to a sequence of their own order, made so that a row's result does not
// depend on what shares its batch.
//
// The order of every sum is fixed by the row's own sequence: products over the head's dimensions one after
// the other; tiles that begin at multiples of TILE in the sequence, each with a softmax of its own and its values in
// sequence order; then the tiles one after the other, each weighted by its peak (Dao et al. 2022). Rows are worked on
// together only where that leaves each row's own order as it is: lanes are different keys, or different dimensions of
// the output, and sums over lanes are of one fixed shape. Tiles may be worked on by different threads, if they
// are joined in order.
//
// Keys and values may be of 16 bits. They are widened, which is exact, as they are read, or once for a tile where many
// queries read it; sums are of floats, and in the same order.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lanes.h"
#include "room.h"

namespace {

constexpr int64_t TILE = 64;        // Keys per softmax step; part of the result's definition.
constexpr int64_t ROW_BLOCK = 16;   // Rows that share the transposed keys of a tile.
constexpr int64_t TOGETHER = 4;     // Queries that share one reading of keys or values.

// Memory that is read soon, to be brought near bit by bit beside the arithmetic: asked for all at once, it would have
// the arithmetic wait. Slots lie apart, so that no processor guesses by itself what comes next.
class Ahead {
 public:
  void clear() { num_rows_ = row_ = line_ = 0; }

  template <typename Number>
  void add(const Number* row, int64_t size) {
    rows_[num_rows_] = reinterpret_cast<const char*>(row);
    lines_[num_rows_++] = (size * sizeof(Number) + LINE - 1) / LINE;
  }

  // Asks for the next `count` lines of what was added.
  void ask(int64_t count) {
#ifdef __AVX__
    for (; count > 0 && row_ < num_rows_; --count) {
      _mm_prefetch(rows_[row_] + line_ * LINE, _MM_HINT_T1);
      if (++line_ == lines_[row_]) line_ = 0, ++row_;
    }
#endif
  }

  int64_t num_lines() const {
    int64_t sum = 0;
    for (int64_t i = 0; i < num_rows_; ++i) sum += lines_[i];
    return sum;
  }

 private:
  static constexpr int64_t LINE = 64;  // Bytes.
  const char* rows_[2 * TILE];
  int64_t lines_[2 * TILE];
  int64_t num_rows_ = 0, row_ = 0, line_ = 0;
};

// e^x by Cephes' polynomial (Moshier), with 2^n put in as exponent bits. x is at most 0 or not-a-number, which stays one.
inline float exp_nonpositive(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;  // Rounds to an integer in the low bits.
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = (std::bit_cast<uint32_t>(shifted) << 23) + (uint32_t{127} << 23);
  return x < -87.0f ? 0.0f : p * std::bit_cast<float>(bits);
}

inline float tanh_by_exp(float x) {
  const float e = exp_nonpositive(-2.0f * std::fabs(x));
  return std::copysign((1.0f - e) / (1.0f + e), x);
}

struct Options {
  float scale;
  int64_t window;  // 0: none.
  float softcap;   // 0: none.
  const float* sinks;
};

struct Shape {
  int64_t num_heads, num_kv_heads, key_dim, value_dim, group;
};

struct Span {
  int64_t begin, end, num_committed, num_slots;
  const int64_t* context;  // Cache slots in sequence order, draft nodes last.
};

// One row's view of its sequence: entries [first, count) in the row's own order.
struct Row {
  int64_t first, count;
};

// What a query has seen so far: the highest score, and relative to it the sum of the weights and of the weighted values.
struct Seen {
  float peak = -std::numeric_limits<float>::infinity(), sum = 0.0f;
};

struct Query {
  const float* query;
  float* out;  // The weighted values' sum, zeros at first.
  int64_t head;
  Seen seen;
  float before, after;  // What that is multiplied by, and what the next tile is, when it is joined.
};

// The scores of Q queries against N registers of keys; each is one chain of sums over the dimensions.
template <int Q, int N, typename Number>
void dots(const Query* queries, const Number* keys, int64_t key_dim, float* scores) {
  Lanes sums[Q][N] = {};
  for (int64_t d = 0; d < key_dim; ++d)
    for (int n = 0; n < N; ++n) {
      const Lanes several = load(keys + d * TILE + n * WIDTH);
      for (int q = 0; q < Q; ++q) sums[q][n] += queries[q].query[d] * several;
    }
  for (int q = 0; q < Q; ++q)
    for (int n = 0; n < N; ++n) store(scores + q * TILE + n * WIDTH, sums[q][n]);
}

// The same for a tile's first `used` keys, and perhaps for some behind them. N: registers of keys at a time, so that
// chains are many enough not to wait for each other.
template <int Q, int N, typename Number, typename Function>
void all_dots(const Query* queries, const Number* keys, int64_t used, int64_t key_dim, float* scores,
              const Function& before_each) {
  for (int64_t key = 0; key < used; key += N * WIDTH) {
    before_each();
    dots<Q, N>(queries, keys + key, key_dim, scores + key);
  }
}

// What scores are taken relative to: their highest, if there is any.
inline float base_of(float peak) { return peak == -std::numeric_limits<float>::infinity() ? 0.0f : peak; }

// Two sums, of which one factor is 1: written so that no compiler has a choice how to round.
template <typename Number>
Number joined(Number seen, Number next, float before, float after) {
  return before == 1.0f ? next * after + seen : seen * before + next;
}

// Joins what was seen with what is behind it. Returns the factors for the sums of both, one of which is 1.
inline std::pair<float, float> join(Seen& seen, const Seen& next) {
  const float peak = std::max(seen.peak, next.peak), base = base_of(peak);
  const float before = exp_nonpositive(seen.peak - base), after = exp_nonpositive(next.peak - base);
  seen = {peak, joined(seen.sum, next.sum, before, after)};
  return {before, after};
}

// For Q queries joins out with the sum of weights * values, in order; lanes are dimensions. A query's weights lie TILE
// behind those of the one before.
template <int Q, int N, typename Number>
void add_values(const Query* queries, const float* weights, const Number* const* values, int64_t from, int64_t to,
                int64_t offset) {
  Lanes sums[Q][N] = {};
  for (int64_t key = from; key < to; ++key)
    for (int n = 0; n < N; ++n) {
      const Lanes value = load(values[key] + offset + n * WIDTH);
      for (int q = 0; q < Q; ++q) sums[q][n] += weights[q * TILE + key] * value;
    }
  for (int q = 0; q < Q; ++q)
    for (int n = 0; n < N; ++n) {
      float* out = queries[q].out + offset + n * WIDTH;
      store(out, joined(load(out), sums[q][n], queries[q].before, queries[q].after));
    }
}

// N: registers of dimensions at a time, so that sums are many enough not to wait for each other.
template <int Q, int N, typename Number>
void add_all_values(const Query* queries, const float* weights, const Number* const* values, int64_t from, int64_t to,
                    int64_t value_dim) {
  int64_t d = 0;
  for (; d + N * WIDTH <= value_dim; d += N * WIDTH) add_values<Q, N>(queries, weights, values, from, to, d);
  for (; d + WIDTH <= value_dim; d += WIDTH) add_values<Q, 1>(queries, weights, values, from, to, d);
  for (; d < value_dim; ++d)
    for (int q = 0; q < Q; ++q) {
      float sum = 0.0f;
      for (int64_t key = from; key < to; ++key) sum += weights[q * TILE + key] * static_cast<float>(values[key][d]);
      queries[q].out[d] = joined(queries[q].out[d], sum, queries[q].before, queries[q].after);
    }
}

// The highest of scores from .. to, of which those that are not numbers do not count.
inline float highest(const float* scores, int64_t from, int64_t to) {
  float peak = -std::numeric_limits<float>::infinity();
  if (from == 0 && to == TILE) {  // The common case, in lanes: which order they are compared in does not show.
    Lanes peaks = Lanes{} + peak;
    for (int64_t i = 0; i < TILE; i += WIDTH) {
      const Lanes next = load(scores + i);
      peaks = next > peaks ? next : peaks;
    }
    for (int64_t i = 0; i < WIDTH; ++i) peak = peaks[i] > peak ? peaks[i] : peak;
    return peak;
  }
  for (int64_t i = from; i < to; ++i) peak = scores[i] > peak ? scores[i] : peak;
  return peak;
}

// Turns a tile's scores into weights, in place, and joins the tile with what the query has seen.
void softmax_step(float* scores, int64_t from, int64_t to, const Options& options, Query& query) {
  for (int64_t i = 0; i < TILE; ++i) scores[i] *= options.scale;
  if (options.softcap != 0.0f)
    for (int64_t i = 0; i < TILE; ++i) scores[i] = tanh_by_exp(scores[i] / options.softcap) * options.softcap;
  const float peak = highest(scores, from, to), base = base_of(peak);
  for (int64_t i = 0; i < TILE; ++i) scores[i] = exp_nonpositive(scores[i] - base);
  for (int64_t i = 0; i < from; ++i) scores[i] = 0.0f;
  for (int64_t i = to; i < TILE; ++i) scores[i] = 0.0f;
  Lanes sums = load(scores);
  for (int64_t i = WIDTH; i < TILE; i += WIDTH) sums += load(scores + i);
  std::tie(query.before, query.after) = join(query.seen, {peak, add_lanes(sums)});
}

// What a thread works in. It stays from job to job: a job is so short that getting memory, and filling it, would show.
template <typename Number>
struct Desk {
  Room<Number> keys;
  Room<float> wide_keys, wide_values, scores;
};

// Number: what keys and values are in the cache.
template <typename Number>
class Worker {
 public:
  Worker(const Shape& shape, const Options& options, const Number* keys, const Number* values, Desk<Number>& desk)
      : shape_(shape), options_(options), keys_(keys), values_(values),
        tile_keys_(desk.keys.with(shape.key_dim * TILE)), scores_(desk.scores.with(ROW_BLOCK * shape.group * TILE)) {
    if constexpr (!std::is_same_v<Number, float>) {
      wide_keys_ = desk.wide_keys.with(shape.key_dim * TILE);
      wide_values_ = desk.wide_values.with(shape.value_dim * TILE);
    }
  }

  // Attends rows of one sequence to key/value heads [first_head, end_head), to the tiles [first_tile, end_tile) of those
  // that they see. Queries: by key/value head, then by row, `group` of each. Heads take turns tile by tile, since a token's keys of all heads lie side by side in memory, and
  // memory is fastest when it is read from end to end.
  void attend(const Span& span, const std::vector<Row>& rows, const int64_t* ancestors, Query* queries,
              int64_t first_head, int64_t end_head, int64_t first_tile, int64_t end_tile) {
    int64_t first = rows[0].first, count = 0;
    for (const Row& row : rows) {
      first = std::min(first, row.first);
      count = std::max(count, row.count);
    }
    // Behind the committed tokens each node of a draft tree has a sequence of its own; those of a chain see what
    // tokens of a text do.
    const bool has_tree = span.num_slots > span.num_committed && !is_line(ancestors, rows.size());
    const int64_t shared = has_tree ? span.num_committed / TILE * TILE : count;
    const int64_t begin = std::max(first / TILE, first_tile) * TILE, end = std::min(count, end_tile * TILE);
    for (int64_t base = begin; base < end; base += TILE) {
      if (base < shared) {
        const int64_t length = std::min(TILE, count - base);
        look_ahead(span.context + base + TILE, std::min(TILE, count - base - length), first_head, end_head,
                   rows.size() * shape_.group);
        for (int64_t head = first_head; head < end_head; ++head) {
          fetch(span.context + base, length, head);
          step(rows.data(), rows.size(), &queries[(head - first_head) * rows.size() * shape_.group], base);
        }
        continue;
      }
      for (size_t r = 0; r < rows.size(); ++r) {
        if (rows[r].count <= base) continue;
        int64_t slots[TILE];
        const int64_t length = own_slots(span, rows[r], ancestors[r], base, slots);
        for (int64_t head = first_head; head < end_head; ++head) {
          fetch(slots, length, head);
          step(&rows[r], 1, &queries[((head - first_head) * rows.size() + r) * shape_.group], base);
        }
      }
    }
  }

  // Joins what a query has seen with what another one, of the same head and row, has seen behind it.
  void add(const Query& next, Query& query) const {
    const auto [before, after] = join(query.seen, next.seen);
    int64_t d = 0;
    for (; d + WIDTH <= shape_.value_dim; d += WIDTH)
      store(query.out + d, joined(load(query.out + d), load(next.out + d), before, after));
    for (; d < shape_.value_dim; ++d) query.out[d] = joined(query.out[d], next.out[d], before, after);
  }

  void finish(Query& query) const {
    float rescale = 1.0f;
    if (options_.sinks != nullptr) {
      const float sink = options_.sinks[query.head], peak = sink > query.seen.peak ? sink : query.seen.peak;
      rescale = exp_nonpositive(query.seen.peak - peak);
      query.seen.sum = query.seen.sum * rescale + exp_nonpositive(sink - peak);
    }
    const float factor = rescale / query.seen.sum;
    for (int64_t d = 0; d < shape_.value_dim; ++d) query.out[d] *= factor;
  }

 private:
  // Whether all rows' ancestors are the first nodes of a draft, and none left out.
  static bool is_line(const int64_t* ancestors, size_t count) {
    return std::all_of(ancestors, ancestors + count, [](uint64_t word) { return (word & (word + 1)) == 0; });
  }

  // The slots of a row's entries base .. base + TILE: committed tokens, then the node's ancestors and itself.
  static int64_t own_slots(const Span& span, const Row& row, int64_t ancestors, int64_t base, int64_t* slots) {
    const int64_t length = std::min(TILE, row.count - base);
    const int64_t committed = std::min(row.count, span.num_committed);
    uint64_t word = static_cast<uint64_t>(ancestors);
    int64_t entry = committed;
    for (int64_t i = base; i < std::min(base + length, committed); ++i) slots[i - base] = span.context[i];
    for (; word != 0; word &= word - 1, ++entry)
      if (entry >= base && entry < base + length)
        slots[entry - base] = span.context[span.num_committed + std::countr_zero(word)];
    return length;
  }

  // Plans to bring the keys and values of a tile near, while that before it is worked on.
  void look_ahead(const int64_t* slots, int64_t length, int64_t first_head, int64_t end_head, int64_t num_queries) {
    const int64_t heads = end_head - first_head;
    ahead_.clear();
    for (int64_t i = 0; i < length; ++i) {
      const int64_t head = slots[i] * shape_.num_kv_heads + first_head;
      ahead_.add(keys_ + head * shape_.key_dim, heads * shape_.key_dim);
      ahead_.add(values_ + head * shape_.value_dim, heads * shape_.value_dim);
    }
    // Per head: where keys are turned around, where scores are computed, where values are added.
    const int64_t rest = num_queries % TOGETHER;
    const int64_t dots = num_queries / TOGETHER * 4 + (rest == 0 ? 0 : rest == 1 ? 1 : 2);
    const int64_t moments = heads * (TILE / WIDTH + dots + num_queries);
    lines_at_a_time_ = ahead_.num_lines() / moments + 1;
  }

  // Transposes a tile's keys, [key_dim, TILE], and notes where its values are.
  void fetch(const int64_t* slots, int64_t length, int64_t kv_head) {
    const int64_t key_dim = shape_.key_dim;
    for (int64_t i = 0; i < length; ++i)
      tile_values_[i] = values_ + (slots[i] * shape_.num_kv_heads + kv_head) * shape_.value_dim;
    for (int64_t begin = 0; begin < length; begin += WIDTH) {
      ahead_.ask(lines_at_a_time_);
      const Number* keys[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i)  // Behind the end any key will do: its scores are not used.
        keys[i] = keys_ + (slots[std::min(begin + i, length - 1)] * shape_.num_kv_heads + kv_head) * key_dim;
      transpose(keys, key_dim, tile_keys_ + begin, TILE);
    }
  }

  void step(const Row* rows, int64_t num_rows, Query* queries, int64_t base) {
    int64_t used = 0;
    for (int64_t r = 0; r < num_rows; ++r) used = std::max(used, std::min(TILE, rows[r].count - base));
    if constexpr (!std::is_same_v<Number, float>) {
      if (num_rows * shape_.group > TOGETHER) {
        const float* values[TILE];
        widen_tile(used, values);
        return step_on(wide_keys_, values, rows, num_rows, queries, base, used);
      }
    }
    step_on(tile_keys_, tile_values_, rows, num_rows, queries, base, used);
  }

  // Floats of the tile's first keys and values, for all queries that read them.
  void widen_tile(int64_t used, const float** values) {
    for (int64_t d = 0; d < shape_.key_dim; ++d) widen(&tile_keys_[d * TILE], TILE, &wide_keys_[d * TILE]);
    for (int64_t i = 0; i < used; ++i) {
      float* row = &wide_values_[i * shape_.value_dim];
      widen(tile_values_[i], shape_.value_dim, row);
      values[i] = row;
    }
  }

  // keys: [key_dim, TILE], of which `used` are read by somebody.
  template <typename Wide>
  void step_on(const Wide* tile_keys, const Wide* const* values, const Row* rows, int64_t num_rows, Query* queries,
               int64_t base, int64_t used) {
    const int64_t num_queries = num_rows * shape_.group;
    const auto ask = [&] { ahead_.ask(lines_at_a_time_); };
    for (int64_t q = 0; q < num_queries; q += TOGETHER) {
      float* scores = scores_ + q * TILE;
      switch (num_queries - q) {
        case 1: all_dots<1, 8>(queries + q, tile_keys, used, shape_.key_dim, scores, ask); break;
        case 2: all_dots<2, 4>(queries + q, tile_keys, used, shape_.key_dim, scores, ask); break;
        case 3: all_dots<3, 4>(queries + q, tile_keys, used, shape_.key_dim, scores, ask); break;
        default: all_dots<4, 2>(queries + q, tile_keys, used, shape_.key_dim, scores, ask);
      }
    }
    int64_t count = 1;
    for (int64_t q = 0; q < num_queries; q += count) {
      const Part part = part_of(rows[q / shape_.group], base);
      count = 1;
      while (count < TOGETHER && q + count < num_queries && part_of(rows[(q + count) / shape_.group], base) == part)
        ++count;
      if (part.from >= part.to) continue;
      for (int64_t i = q; i < q + count; ++i) {
        softmax_step(scores_ + i * TILE, part.from, part.to, options_, queries[i]);
        ask();
      }
      const float* weights = scores_ + q * TILE;
      const int64_t dim = shape_.value_dim;
      switch (count) {
        case 1: add_all_values<1, 8>(queries + q, weights, values, part.from, part.to, dim); break;
        case 2: add_all_values<2, 4>(queries + q, weights, values, part.from, part.to, dim); break;
        case 3: add_all_values<3, 4>(queries + q, weights, values, part.from, part.to, dim); break;
        default: add_all_values<4, 2>(queries + q, weights, values, part.from, part.to, dim);
      }
    }
  }

  // The entries of a tile that a row sees.
  struct Part {
    int64_t from, to;
    bool operator==(const Part&) const = default;
  };

  static Part part_of(const Row& row, int64_t base) {
    return {std::max<int64_t>(row.first - base, 0), std::min(row.count - base, TILE)};
  }

  const Shape& shape_;
  const Options& options_;
  const Number* keys_;
  const Number* values_;
  Number* tile_keys_;
  float *wide_keys_ = nullptr, *wide_values_ = nullptr, *scores_;
  const Number* tile_values_[TILE];
  Ahead ahead_;
  int64_t lines_at_a_time_ = 0;
};

}  // namespace

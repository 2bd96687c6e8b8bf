// Attention of rows that each attend to a sequence of their own order, made so that a row's result does not
// depend on what shares its batch.
//
// The order of every sum is fixed by the row's own sequence: products over the head's dimensions one after
// the other, the softmax in tiles that begin at multiples of TILE in the sequence, values in sequence
// order. Rows are worked on together only where that leaves each row's own order as it is: lanes are
// different keys, or different dimensions of the output, and sums over lanes are of one fixed shape.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t TILE = 64;        // Keys per softmax step; part of the result's definition.
constexpr int64_t GROUP = 16;       // Keys per register block; no part of it.
constexpr int64_t ROW_BLOCK = 16;   // Rows that share the transposed keys of a tile.

typedef float Lanes __attribute__((vector_size(32)));
constexpr int64_t WIDTH = 8;

inline Lanes load(const float* source) {
  Lanes lanes;
  std::memcpy(&lanes, source, sizeof(lanes));
  return lanes;
}

inline void store(float* target, Lanes lanes) { std::memcpy(target, &lanes, sizeof(lanes)); }

// target[d * stride + i] = sources[i][d] for WIDTH values of i and of d.
inline void transpose(const float* const* sources, float* target, int64_t stride) {
#ifdef __AVX__
  __m256 rows[WIDTH], pairs[WIDTH];
  for (int64_t i = 0; i < WIDTH; ++i) rows[i] = _mm256_loadu_ps(sources[i]);
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
  for (int64_t d = 0; d < WIDTH / 2; ++d) {
    _mm256_storeu_ps(target + d * stride, _mm256_permute2f128_ps(rows[d], rows[d + 4], 0x20));
    _mm256_storeu_ps(target + (d + 4) * stride, _mm256_permute2f128_ps(rows[d], rows[d + 4], 0x31));
  }
#else
  for (int64_t d = 0; d < WIDTH; ++d)
    for (int64_t i = 0; i < WIDTH; ++i) target[d * stride + i] = sources[i][d];
#endif
}

// Memory that is read soon, to be brought near bit by bit beside the arithmetic: asked for all at once, it would have
// the arithmetic wait. Slots lie apart, so that no processor guesses by itself what comes next.
class Ahead {
 public:
  void clear() { num_rows_ = row_ = line_ = 0; }

  void add(const float* row, int64_t size) {
    rows_[num_rows_] = reinterpret_cast<const char*>(row);
    lines_[num_rows_++] = (size * sizeof(float) + LINE - 1) / LINE;
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

inline float add_lanes(Lanes x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

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
  const int32_t bits = (std::bit_cast<int32_t>(shifted) << 23) + (127 << 23);
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

struct Query {
  const float* query;
  float* out;
  int64_t head;
  float peak, sum, rescale;
};

// The scores of N queries against GROUP keys; each is one chain of sums over the dimensions.
template <int N>
void dots(const Query* queries, const float* keys, int64_t key_dim, float* scores) {
  Lanes sums[N][2] = {};
  for (int64_t d = 0; d < key_dim; ++d) {
    const Lanes low = load(keys + d * TILE), high = load(keys + d * TILE + WIDTH);
    for (int n = 0; n < N; ++n) {
      const float q = queries[n].query[d];
      sums[n][0] += q * low;
      sums[n][1] += q * high;
    }
  }
  for (int n = 0; n < N; ++n) {
    store(scores + n * TILE, sums[n][0]);
    store(scores + n * TILE + WIDTH, sums[n][1]);
  }
}

// out = out * rescale + sum of weights * values, in order; lanes are dimensions.
template <int N>
void add_values(float* out, float rescale, const float* weights, const float* const* values, int64_t from,
                int64_t to, int64_t offset) {
  Lanes sums[N];
  for (int n = 0; n < N; ++n) sums[n] = load(out + offset + n * WIDTH) * rescale;
  for (int64_t key = from; key < to; ++key) {
    const float* value = values[key] + offset;
    for (int n = 0; n < N; ++n) sums[n] += weights[key] * load(value + n * WIDTH);
  }
  for (int n = 0; n < N; ++n) store(out + offset + n * WIDTH, sums[n]);
}

void add_all_values(float* out, float rescale, const float* weights, const float* const* values, int64_t from,
                    int64_t to, int64_t value_dim) {
  int64_t d = 0;
  for (; d + 8 * WIDTH <= value_dim; d += 8 * WIDTH)
    add_values<8>(out, rescale, weights, values, from, to, d);
  for (; d + WIDTH <= value_dim; d += WIDTH) add_values<1>(out, rescale, weights, values, from, to, d);
  for (; d < value_dim; ++d) {
    float sum = out[d] * rescale;
    for (int64_t key = from; key < to; ++key) sum += weights[key] * values[key][d];
    out[d] = sum;
  }
}

// Turns a tile's scores into weights, in place, and brings the row's running maximum and sum up to date.
void softmax_step(float* scores, int64_t from, int64_t to, const Options& options, Query& query) {
  for (int64_t i = 0; i < TILE; ++i) scores[i] *= options.scale;
  if (options.softcap != 0.0f)
    for (int64_t i = 0; i < TILE; ++i) scores[i] = tanh_by_exp(scores[i] / options.softcap) * options.softcap;
  float peak = query.peak;
  for (int64_t i = from; i < to; ++i) peak = scores[i] > peak ? scores[i] : peak;
  for (int64_t i = 0; i < TILE; ++i) scores[i] = exp_nonpositive(scores[i] - peak);
  for (int64_t i = 0; i < from; ++i) scores[i] = 0.0f;
  for (int64_t i = to; i < TILE; ++i) scores[i] = 0.0f;
  Lanes sums = load(scores);
  for (int64_t i = WIDTH; i < TILE; i += WIDTH) sums += load(scores + i);
  const float total = add_lanes(sums);
  query.rescale = exp_nonpositive(query.peak - peak);
  query.sum = query.sum * query.rescale + total;
  query.peak = peak;
}

class Worker {
 public:
  Worker(const Shape& shape, const Options& options, const float* keys, const float* values)
      : shape_(shape), options_(options), keys_(keys), values_(values), tile_keys_(shape.key_dim * TILE),
        scores_(ROW_BLOCK * shape.group * TILE) {}

  // Attends rows of one sequence to key/value heads [first_head, end_head). Queries: by key/value head, then by row,
  // `group` of each. Heads take turns tile by tile, since a token's keys of all heads lie side by side in memory, and
  // memory is fastest when it is read from end to end.
  void attend(const Span& span, const std::vector<Row>& rows, const int64_t* ancestors, std::vector<Query>& queries,
              int64_t first_head, int64_t end_head) {
    int64_t first = rows[0].first, count = 0;
    for (const Row& row : rows) {
      first = std::min(first, row.first);
      count = std::max(count, row.count);
    }
    // Behind the committed tokens each node of a draft tree has a sequence of its own; those of a chain see what
    // tokens of a text do.
    const bool has_tree = span.num_slots > span.num_committed && !is_line(ancestors, rows.size());
    const int64_t shared = has_tree ? span.num_committed / TILE * TILE : count;
    for (int64_t base = first / TILE * TILE; base < count; base += TILE) {
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

  void finish(Query& query) const {
    float rescale = 1.0f;
    if (options_.sinks != nullptr) {
      const float sink = options_.sinks[query.head], peak = sink > query.peak ? sink : query.peak;
      rescale = exp_nonpositive(query.peak - peak);
      query.sum = query.sum * rescale + exp_nonpositive(sink - peak);
    }
    const float factor = rescale / query.sum;
    for (int64_t d = 0; d < shape_.value_dim; ++d) query.out[d] *= factor;
  }

 private:
  // Whether all rows' ancestors are the first nodes of a draft, and none left out.
  static bool is_line(const int64_t* ancestors, size_t count) {
    return std::all_of(ancestors, ancestors + count, [](int64_t word) { return (word & (word + 1)) == 0; });
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
    const int64_t moments = heads * (TILE / WIDTH + (num_queries + 3) / 4 * (TILE / GROUP) + num_queries);
    lines_at_a_time_ = ahead_.num_lines() / moments + 1;
  }

  // Transposes a tile's keys, [key_dim, TILE], and notes where its values are.
  void fetch(const int64_t* slots, int64_t length, int64_t kv_head) {
    const int64_t key_dim = shape_.key_dim;
    for (int64_t i = 0; i < length; ++i)
      tile_values_[i] = values_ + (slots[i] * shape_.num_kv_heads + kv_head) * shape_.value_dim;
    for (int64_t begin = 0; begin < length; begin += WIDTH) {
      ahead_.ask(lines_at_a_time_);
      const float* keys[WIDTH];
      for (int64_t i = 0; i < WIDTH; ++i)  // Behind the end any key will do: its scores are not used.
        keys[i] = keys_ + (slots[std::min(begin + i, length - 1)] * shape_.num_kv_heads + kv_head) * key_dim;
      int64_t d = 0;
      for (; d + WIDTH <= key_dim; d += WIDTH) {
        transpose(keys, tile_keys_.data() + d * TILE + begin, TILE);
        for (const float*& key : keys) key += WIDTH;
      }
      for (; d < key_dim; ++d)
        for (int64_t i = 0; i < WIDTH; ++i) tile_keys_[d * TILE + begin + i] = *keys[i]++;
    }
  }

  void step(const Row* rows, int64_t num_rows, Query* queries, int64_t base) {
    const int64_t num_queries = num_rows * shape_.group;
    int64_t used = 0;
    for (int64_t r = 0; r < num_rows; ++r) used = std::max(used, std::min(TILE, rows[r].count - base));
    for (int64_t q = 0; q < num_queries; q += 4)
      for (int64_t key = 0; key < used; key += GROUP) {
        ahead_.ask(lines_at_a_time_);
        const float* keys = tile_keys_.data() + key;
        float* scores = scores_.data() + q * TILE + key;
        switch (num_queries - q) {
          case 1: dots<1>(queries + q, keys, shape_.key_dim, scores); break;
          case 2: dots<2>(queries + q, keys, shape_.key_dim, scores); break;
          case 3: dots<3>(queries + q, keys, shape_.key_dim, scores); break;
          default: dots<4>(queries + q, keys, shape_.key_dim, scores);
        }
      }
    for (int64_t q = 0; q < num_queries; ++q) {
      const Row& row = rows[q / shape_.group];
      const int64_t from = std::max<int64_t>(row.first - base, 0), to = std::min(row.count - base, TILE);
      if (from >= to) continue;
      float* scores = scores_.data() + q * TILE;
      softmax_step(scores, from, to, options_, queries[q]);
      ahead_.ask(lines_at_a_time_);
      add_all_values(queries[q].out, queries[q].rescale, scores, tile_values_, from, to, shape_.value_dim);
    }
  }

  const Shape& shape_;
  const Options& options_;
  const float* keys_;
  const float* values_;
  std::vector<float> tile_keys_, scores_;
  const float* tile_values_[TILE];
  Ahead ahead_;
  int64_t lines_at_a_time_ = 0;
};

}  // namespace

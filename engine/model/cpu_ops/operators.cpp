// Operators of a CPU step: attention over the paged cache, and linear layers on packed weights.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/quantized/PackedParams.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "few_bits.h"
#include "int8.h"
#include "lanes.h"
#include "sampling.h"
#include "six_bits.h"
#include "six_steps.h"
#include "steps.h"
#include "team.h"

namespace {

// How many threads work for the calling one; 0: as many as would for torch.
thread_local int own_threads = 0;

int num_threads() { return own_threads > 0 ? own_threads : at::get_num_threads(); }

// Calls function(begin, end) for pieces of 0 .. count. Threads fetch piece by piece, because a thread that the
// system holds up would let all others wait for its share.
template <typename Function>
void for_pieces(int64_t count, int64_t piece, const Function& function) {
  Team::instance().share(count, piece, num_threads(), function);
}

void use_threads(int64_t count) { own_threads = static_cast<int>(count); }

// A block of one sequence's rows and some of the key/value heads.
struct Item {
  int64_t span, begin, end, first_head, end_head;
};

// Calls function(number) with a number of the type that a cache holds.
template <typename Function>
void with_cached_type(const at::Tensor& cache, const Function& function) {
  switch (cache.scalar_type()) {
    case at::kFloat: return function(float());
    case at::kHalf: return function(at::Half());
    case at::kBFloat16: return function(at::BFloat16());
    default: TORCH_CHECK(false, "keys and values are float32, float16 or bfloat16 here, not ", cache.scalar_type());
  }
}

// Keys and values [1, heads, tokens, dim] to the slots of [slots, heads, dim], rounded to the cache's type.
template <typename Number>
void write_slots(const at::Tensor& tokens, const at::Tensor& slots, at::Tensor& cache) {
  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto* source = tokens.const_data_ptr<float>();
  auto* target = cache.mutable_data_ptr<Number>();
  const int64_t heads = tokens.size(1), dim = tokens.size(3), head_stride = tokens.stride(1),
                token_stride = tokens.stride(2);
  for_pieces(tokens.size(2), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h)
        narrow(source + t * token_stride + h * head_stride, dim, target + (slot[t] * heads + h) * dim);
  });
}

at::Tensor dense_heads(const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

// spans: int64 [S, 5]: begin, end, num_committed, num_slots, offset into context. See CpuAttention. Queries, keys and
// values are of float32, caches of float32, float16 or bfloat16.
at::Tensor attend(const at::Tensor& query_, const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache,
                  at::Tensor value_cache, const at::Tensor& slots, const at::Tensor& spans, const at::Tensor& context,
                  const at::Tensor& visible, const at::Tensor& ancestors, double scale, int64_t window, double softcap,
                  const std::optional<at::Tensor>& sinks) {
  TORCH_CHECK(key_cache.scalar_type() == value_cache.scalar_type(), "keys and values are of one type");
  with_cached_type(key_cache, [&](auto number) {
    write_slots<decltype(number)>(dense_heads(key), slots, key_cache);
    write_slots<decltype(number)>(dense_heads(value), slots, value_cache);
  });
  const at::Tensor query = dense_heads(query_);
  const Shape shape{query.size(1), key.size(1), key.size(3), value.size(3), query.size(1) / key.size(1)};
  const at::Tensor sink = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const Options options{static_cast<float>(scale), window, static_cast<float>(softcap),
                        sink.defined() ? sink.const_data_ptr<float>() : nullptr};
  const int64_t num_tokens = query.size(2), head_stride = query.stride(1), token_stride = query.stride(2);
  at::Tensor out = at::zeros({1, num_tokens, shape.num_heads, shape.value_dim}, query.options());

  const auto* span_data = spans.const_data_ptr<int64_t>();
  const auto* visible_data = visible.const_data_ptr<int64_t>();
  const auto* words = ancestors.const_data_ptr<int64_t>();
  std::vector<Span> all_spans;
  std::vector<Item> items;
  int64_t blocks = 0;
  for (int64_t s = 0; s < spans.size(0); ++s) {
    const int64_t* row = span_data + s * 5;
    all_spans.push_back({row[0], row[1], row[2], row[3], context.const_data_ptr<int64_t>() + row[4]});
    blocks += (row[1] - row[0] + ROW_BLOCK - 1) / ROW_BLOCK;
  }
  // All heads at once, unless some threads would then have nothing to do.
  const int64_t threads = num_threads(), heads = blocks >= 2 * threads ? shape.num_kv_heads : 1;
  // Of one block alone the heads that are left over once each thread has had as many are shared out by rows.
  const int64_t left_over = blocks == 1 && shape.num_kv_heads > threads ? shape.num_kv_heads % threads : 0;
  for (int64_t s = 0; s < spans.size(0); ++s)
    for (int64_t begin = all_spans[s].begin; begin < all_spans[s].end; begin += ROW_BLOCK) {
      const int64_t end = std::min(begin + ROW_BLOCK, all_spans[s].end);
      for (int64_t head = 0; head < shape.num_kv_heads; head += heads) {
        const bool is_shared = head >= shape.num_kv_heads - left_over;
        const int64_t rows = is_shared ? ((end - begin) * left_over + threads - 1) / threads : ROW_BLOCK;
        for (int64_t from = begin; from < end; from += rows)
          items.push_back({s, from, std::min(from + rows, end), head, std::min(head + heads, shape.num_kv_heads)});
      }
    }
  const auto* queries_data = query.const_data_ptr<float>();
  auto* out_data = out.mutable_data_ptr<float>();
  std::reverse(items.begin(), items.end());  // The last rows of a chunk see the most.
  const auto run = [&](auto& worker, int64_t first_item, int64_t last_item) {
    std::vector<Row> rows;
    std::vector<Query> queries;
    for (int64_t i = first_item; i < last_item; ++i) {
      const Span& span = all_spans[items[i].span];
      const int64_t begin = items[i].begin, end = items[i].end;
      rows.clear();
      queries.clear();
      for (int64_t t = begin; t < end; ++t) {
        const int64_t count = visible_data[t] + std::popcount(static_cast<uint64_t>(words[t]));
        rows.push_back({window == 0 ? 0 : std::max<int64_t>(0, count - window), count});
      }
      for (int64_t kv_head = items[i].first_head; kv_head < items[i].end_head; ++kv_head)
        for (int64_t t = begin; t < end; ++t)
          for (int64_t h = kv_head * shape.group; h < (kv_head + 1) * shape.group; ++h)
            queries.push_back({queries_data + h * head_stride + t * token_stride,
                               out_data + (t * shape.num_heads + h) * shape.value_dim, h,
                               -std::numeric_limits<float>::infinity(), 0.0f, 0.0f});
      worker.attend(span, rows, words + begin, queries, items[i].first_head, items[i].end_head);
      for (Query& query : queries) worker.finish(query);
    }
  };
  with_cached_type(key_cache, [&](auto number) {
    using Number = decltype(number);
    for_pieces(items.size(), 1, [&](int64_t first, int64_t last) {
      Worker<Number> worker(shape, options, key_cache.const_data_ptr<Number>(), value_cache.const_data_ptr<Number>());
      run(worker, first, last);
    });
  });
  return out;
}

// y = x W^T + b on weights packed as float16. row_sizes[m]: rows to compute for m rows (see RowPadding).
at::Tensor linear_fp16(const at::Tensor& x, const c10::intrusive_ptr<LinearPackedParamsBase>& packed,
                       const at::Tensor& row_sizes) {
  const int64_t in_features = x.size(-1), rows = x.numel() / in_features, most = row_sizes.numel() - 1;
  const auto* sizes = row_sizes.const_data_ptr<int64_t>();
  const at::Tensor flat = x.contiguous().view({rows, in_features});
  std::vector<at::Tensor> parts;
  for (int64_t begin = 0; begin < rows || parts.empty(); begin += most) {
    const int64_t count = std::min(most, rows - begin), size = sizes[count];
    at::Tensor piece = flat.narrow(0, begin, count);
    if (size > count) {
      at::Tensor padded = at::empty({size, in_features}, x.options());
      auto* data = padded.mutable_data_ptr<float>();
      std::memcpy(data, piece.const_data_ptr<float>(), count * in_features * sizeof(float));
      std::memset(data + count * in_features, 0, (size - count) * in_features * sizeof(float));
      piece = padded;
    }
    parts.push_back(packed->apply_dynamic(piece).narrow(0, 0, count));
  }
  const at::Tensor result = parts.size() == 1 ? parts[0] : at::cat(parts);
  auto shape = x.sizes().vec();
  shape.back() = result.size(1);
  return result.view(shape);
}

// y = x W^T + b with packed weights: numbers and scales as the kind of matrix takes them; bias: [panels * PANEL].
template <typename Matrix>
at::Tensor multiply(const at::Tensor& x_, const at::Tensor& numbers, const at::Tensor& scales, const at::Tensor& bias,
                    int64_t out_features) {
  const at::Tensor x = x_.contiguous();
  const int64_t in_features = x.size(-1), rows = x.numel() / in_features;
  const Matrix matrix{numbers.const_data_ptr<typename Matrix::Number>(),
                      static_cast<const uint16_t*>(scales.const_data_ptr()), numbers.size(1)};
  const int64_t stride = matrix.row_bytes(), room = matrix.blocks * Matrix::INPUTS;
  TORCH_CHECK(in_features <= room && in_features > room - Matrix::INPUTS, "the layer has not ", in_features, " inputs");
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  at::Tensor out = at::empty(shape, x.options());
  at::Tensor rounded = at::empty({rows, stride}, x.options().dtype(at::kByte));
  const auto* x_data = x.const_data_ptr<float>();
  auto* rounded_data = rounded.mutable_data_ptr<uint8_t>();
  for_pieces(rows, 32, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      matrix.round(x_data + row * in_features, in_features, rounded_data + row * stride);
  });
  const auto* bias_data = bias.const_data_ptr<float>();
  auto* out_data = out.mutable_data_ptr<float>();
  const int64_t piece = std::max<int64_t>(1, 131072 / (in_features * PANEL * std::max<int64_t>(1, rows / 4)));
  for_pieces(numbers.size(0), piece, [&](int64_t begin, int64_t end) {
    float sums[ROWS * PANEL];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * PANEL, width = std::min(PANEL, out_features - first);
      for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t count = std::min(ROWS, rows - row);
        multiply_rows(matrix, panel, count, rounded_data + row * stride, sums);
        for (int64_t m = 0; m < count; ++m) {
          const float factor = Matrix::factor(rounded_data + (row + m) * stride);
          float* target = out_data + (row + m) * out_features + first;
          int64_t n = 0;
          if (width == PANEL)
            for (; n < width; n += WIDTH)
              store(target + n, factor * load(sums + m * PANEL + n) + load(bias_data + first + n));
          for (; n < width; ++n) target[n] = factor * sums[m * PANEL + n] + bias_data[first + n];
        }
      }
    }
  });
  return out;
}

// With weights of 8, 6, 5 or 4 bits, which the numbers' shape tells; see the matrices.
at::Tensor linear_packed(const at::Tensor& x, const at::Tensor& numbers, const at::Tensor& scales,
                         const at::Tensor& bias, int64_t out_features) {
  if (numbers.scalar_type() == at::kChar) return multiply<int8::Matrix>(x, numbers, scales, bias, out_features);
  if (numbers.size(2) == six_bits::BYTES) return multiply<six_bits::Matrix>(x, numbers, scales, bias, out_features);
  if (numbers.size(2) == few_bits::BYTES<5>)
    return multiply<few_bits::Matrix<5>>(x, numbers, scales, bias, out_features);
  TORCH_CHECK(numbers.size(2) == few_bits::BYTES<4>, "numbers of a panel's block take other bytes");
  return multiply<few_bits::Matrix<4>>(x, numbers, scales, bias, out_features);
}

// Numbers (uint8, like weight), scales and least values (float32 [outputs, blocks], exact in float16) of weights [outputs,
// inputs], and how many blocks do not lie on so many steps; the numbers of those mean nothing.
std::tuple<at::Tensor, at::Tensor, at::Tensor, int64_t> find_steps(const at::Tensor& weight_, int64_t largest) {
  const at::Tensor weight = weight_.contiguous();
  TORCH_CHECK(weight.size(1) % steps::BLOCK == 0, "inputs come in blocks of ", steps::BLOCK);
  const int64_t blocks = weight.numel() / steps::BLOCK;
  at::Tensor numbers = at::empty(weight.sizes(), weight.options().dtype(at::kByte));
  at::Tensor scales = at::zeros({weight.size(0), weight.size(1) / steps::BLOCK}, weight.options());
  at::Tensor least = at::zeros(scales.sizes(), weight.options());
  const auto* source = weight.const_data_ptr<float>();
  auto* number_data = numbers.mutable_data_ptr<uint8_t>();
  auto* scale_data = scales.mutable_data_ptr<float>();
  auto* least_data = least.mutable_data_ptr<float>();
  std::atomic<int64_t> others{0};
  for_pieces(blocks, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      steps::Found found{};
      if (!steps::find(source + i * steps::BLOCK, number_data + i * steps::BLOCK, found, static_cast<int>(largest))) ++others;
      scale_data[i] = found.scale;
      least_data[i] = found.least;
    }
  });
  return {numbers, scales, least, others.load()};
}

// Numbers (uint8, like weight), steps (int8 [outputs, inputs / HALF]) and scales (float32 [outputs, inputs / MANY], exact in
// float16) of weights [outputs, inputs] of six bits, and how many times MANY of them are of another kind; what is
// returned of those means nothing.
std::tuple<at::Tensor, at::Tensor, at::Tensor, int64_t> find_six_bits(const at::Tensor& weight_) {
  const at::Tensor weight = weight_.contiguous();
  TORCH_CHECK(weight.size(1) % six_steps::MANY == 0, "inputs come in blocks of ", six_steps::MANY);
  at::Tensor numbers = at::empty(weight.sizes(), weight.options().dtype(at::kByte));
  at::Tensor steps = at::zeros({weight.size(0), weight.size(1) / six_steps::HALF}, weight.options().dtype(at::kChar));
  at::Tensor scales = at::zeros({weight.size(0), weight.size(1) / six_steps::MANY}, weight.options());
  const auto* source = weight.const_data_ptr<float>();
  auto* number_data = numbers.mutable_data_ptr<uint8_t>();
  auto* step_data = steps.mutable_data_ptr<int8_t>();
  auto* scale_data = scales.mutable_data_ptr<float>();
  std::atomic<int64_t> others{0};
  for_pieces(scales.numel(), 128, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      six_steps::Found found{};
      if (!six_steps::find(source + i * six_steps::MANY, number_data + i * six_steps::MANY, found)) ++others;
      scale_data[i] = found.scale;
      std::memcpy(step_data + i * six_steps::HALVES, found.steps, six_steps::HALVES);
    }
  });
  return {numbers, steps, scales, others.load()};
}

// Calls function(row) for every row; in parallel where there is enough to do.
template <typename Function>
void for_rows(int64_t rows, int64_t size, const Function& function) {
  for_pieces(rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(size, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

at::Tensor rms_norm(const at::Tensor& x_, const at::Tensor& weight, double eps) {
  const at::Tensor x = x_.contiguous();
  const int64_t size = x.size(-1);
  at::Tensor out = at::empty(x.sizes(), x.options());
  const auto* source = x.const_data_ptr<float>();
  const auto* weight_data = weight.const_data_ptr<float>();
  auto* target = out.mutable_data_ptr<float>();
  for_rows(x.numel() / size, size, [&](int64_t row) {
    rms_norm_row(source + row * size, weight_data, size, static_cast<float>(eps), target + row * size);
  });
  return out;
}

// [..., 2 * size], gate and up side by side, to [..., size].
template <float (*activation)(float)>
at::Tensor gate(const at::Tensor& x_) {
  const at::Tensor x = x_.contiguous();
  const int64_t size = x.size(-1) / 2;
  auto shape = x.sizes().vec();
  shape.back() = size;
  at::Tensor out = at::empty(shape, x.options());
  const auto* source = x.const_data_ptr<float>();
  auto* target = out.mutable_data_ptr<float>();
  for_rows(x.numel() / (2 * size), 4 * size,
           [&](int64_t row) { gate_row<activation>(source + row * 2 * size, size, target + row * size); });
  return out;
}

// qkv [1, T, (heads + 2 * kv_heads) * dim] to queries [1, heads, T, dim] and keys, rotated, and values [1, kv_heads,
// T, dim]; cosine and sine: [1, T, dim].
std::tuple<at::Tensor, at::Tensor, at::Tensor> rotate(const at::Tensor& qkv_, const at::Tensor& cosine_,
                                                      const at::Tensor& sine_, int64_t heads, int64_t kv_heads) {
  const at::Tensor qkv = qkv_.contiguous(), cosine = cosine_.contiguous(), sine = sine_.contiguous();
  const int64_t tokens = qkv.size(1), all_heads = heads + 2 * kv_heads, dim = qkv.size(2) / all_heads;
  TORCH_CHECK(cosine.numel() == tokens * dim && sine.numel() == tokens * dim, "rotary positions of another shape");
  at::Tensor out = at::empty({1, tokens, all_heads, dim}, qkv.options());
  const auto* source = qkv.const_data_ptr<float>();
  const auto* cosines = cosine.const_data_ptr<float>();
  const auto* sines = sine.const_data_ptr<float>();
  auto* target = out.mutable_data_ptr<float>();
  for_rows(tokens, all_heads * dim, [&](int64_t t) {
    const int64_t row = t * all_heads * dim, turned = heads + kv_heads;
    for (int64_t h = 0; h < turned; ++h)
      rotate_head(source + row + h * dim, cosines + t * dim, sines + t * dim, dim, target + row + h * dim);
    std::memcpy(target + row + turned * dim, source + row + turned * dim, kv_heads * dim * sizeof(float));
  });
  const at::Tensor by_head = out.transpose(1, 2);
  return {by_head.narrow(1, 0, heads), by_head.narrow(1, heads, kv_heads), by_head.narrow(1, heads + kv_heads, kv_heads)};
}

// A linear layer of a stack: weights, scales, bias.
at::Tensor linear_of(const at::Tensor& x, at::TensorList parameters, int64_t out_features) {
  return linear_packed(x, parameters[0], parameters[1], parameters[2], out_features);
}

// x + y, in x.
void add_to(at::Tensor& x, const at::Tensor& y) {
  auto* sum = x.mutable_data_ptr<float>();
  const auto* more = y.const_data_ptr<float>();
  for_pieces(x.numel(), 32768, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum[i] += more[i];
  });
}

// x [1, T, size] to the places of residuals [T, wanted, size] that are for this layer.
void keep_residuals(const at::Tensor& x, size_t layer, at::IntArrayRef wanted, at::Tensor& residuals) {
  const int64_t size = x.size(2), num_wanted = static_cast<int64_t>(wanted.size());
  const auto* source = x.const_data_ptr<float>();
  auto* target = residuals.mutable_data_ptr<float>();
  for (int64_t place = 0; place < num_wanted; ++place) {
    if (wanted[place] != static_cast<int64_t>(layer)) continue;
    for (int64_t t = 0; t < x.size(1); ++t)
      std::memcpy(target + (t * num_wanted + place) * size, source + t * size, size * sizeof(float));
  }
}

// Where the tokens of a pass go, and what they see; see `attend`.
struct Tables {
  at::Tensor slots, spans, context, visible, ancestors;
};

// x = x + attention(input), then x = x + feed_forward(norm(x)); see run_layers.
void decoder_layer(at::Tensor& x, const at::Tensor& input, at::TensorList own, at::IntArrayRef size,
                   at::ArrayRef<double> factor, const at::Tensor& cosine, const at::Tensor& sine,
                   const at::Tensor& key_cache, const at::Tensor& value_cache, const Tables& tables) {
  const at::Tensor projected = linear_of(input, own.slice(1, 3), size[4]);
  const auto [query, key, value] = rotate(projected, cosine, sine, size[0], size[1]);
  const at::Tensor attended = attend(query, key, value, key_cache, value_cache, tables.slots, tables.spans,
                                     tables.context, tables.visible, tables.ancestors, factor[2], size[2], factor[3],
                                     std::nullopt);
  add_to(x, linear_of(attended.flatten(2), own.slice(4, 3), size[5]));
  const at::Tensor both = linear_of(rms_norm(x, own[7], factor[1]), own.slice(8, 3), size[6]);
  add_to(x, linear_of(size[3] ? gate<gelu_tanh>(both) : gate<silu>(both), own.slice(11, 3), size[7]));
}

// Decoder layers, x = x + attention(norm(x)), then x = x + feed_forward(norm(x)). hidden: [1, T, size]. Per layer
//   14 parameters: norm, three of queries, keys and values in one, three of the output, norm, three of gate and up in
//   one, three of down (each weights, scales, bias);
//   8 sizes: heads, kv_heads, window, whether gelu and not silu, outputs of the four linear layers;
//   4 factors: eps of the norms, scale and softcap of attention.
// wanted: numbers of layers, the count of layers for what the last one gives. Returns what the last layer gives, and
// [T, wanted, size], what goes into the wanted layers.
std::tuple<at::Tensor, at::Tensor> run_layers(const at::Tensor& hidden, const at::Tensor& cosine, const at::Tensor& sine,
                      at::TensorList parameters, at::IntArrayRef sizes, at::ArrayRef<double> factors,
                      at::TensorList key_caches, at::TensorList value_caches, const at::Tensor& slots,
                      const at::Tensor& spans, const at::Tensor& context, const at::Tensor& visible,
                      const at::Tensor& ancestors, at::IntArrayRef wanted) {
  const int64_t num_wanted = static_cast<int64_t>(wanted.size());
  at::Tensor x = at::empty(hidden.sizes(), hidden.options());
  at::Tensor residuals = at::empty({hidden.size(1), num_wanted, hidden.size(2)}, hidden.options());
  const at::Tensor source = hidden.contiguous();
  std::memcpy(x.mutable_data_ptr<float>(), source.const_data_ptr<float>(), x.numel() * sizeof(float));
  const Tables tables{slots, spans, context, visible, ancestors};
  for (size_t layer = 0; layer < key_caches.size(); ++layer) {
    keep_residuals(x, layer, wanted, residuals);
    const at::TensorList own = parameters.slice(14 * layer, 14);
    const at::ArrayRef<double> factor = factors.slice(4 * layer, 4);
    decoder_layer(x, rms_norm(x, own[0], factor[0]), own, sizes.slice(8 * layer, 8), factor, cosine, sine,
                  key_caches[layer], value_caches[layer], tables);
  }
  keep_residuals(x, key_caches.size(), wanted, residuals);
  return {x, residuals};
}

// Truncates rows of logits in place. options: float64 [rows, 4]: temperature (0 leaves the row as it is), top_k (0 is
// off), top_p, min_p.
void truncate_rows(at::Tensor logits, const at::Tensor& options) {
  TORCH_CHECK(logits.is_contiguous() && options.is_contiguous(), "rows and options must lie together");
  const int64_t rows = logits.size(0), size = logits.size(1);
  auto* data = logits.mutable_data_ptr<float>();
  const auto* wanted = options.const_data_ptr<double>();
  for_pieces(rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t row = begin; row < end; ++row) {
      const double* values = wanted + 4 * row;
      sampling::truncate(data + row * size, size, {values[0], values[1], values[2], values[3]}, scratch);
    }
  });
}

// The `count` highest of row + Gumbel noise per row, and their scores; starts: int64 [rows], where the noise of each
// begins; ids: int64 [size], whose noise each entry gets, none where that is its number.
std::tuple<at::Tensor, at::Tensor> top_rows(const at::Tensor& logits_, const at::Tensor& starts, int64_t count,
                                            const std::optional<at::Tensor>& ids) {
  const at::Tensor logits = logits_.contiguous();
  const int64_t rows = logits.size(0), size = logits.size(1);
  at::Tensor tokens = at::empty({rows, count}, starts.options());
  at::Tensor scores = at::empty({rows, count}, logits.options().dtype(at::kDouble));
  const auto* data = logits.const_data_ptr<float>();
  const auto* noise = starts.const_data_ptr<int64_t>();
  auto* token_data = tokens.mutable_data_ptr<int64_t>();
  auto* score_data = scores.mutable_data_ptr<double>();
  for_pieces(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      sampling::top(data + row * size, size, static_cast<uint64_t>(noise[row]), count, token_data + row * count,
                    score_data + row * count, ids ? ids->const_data_ptr<int64_t>() : nullptr);
  });
  return {tokens, scores};
}

}  // namespace

#include "heads.h"

TORCH_LIBRARY(OUTRIDER_NAMESPACE, library) {
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
      "Tensor spans, Tensor context, Tensor visible, Tensor ancestors, float scale, int window, float softcap, Tensor? sinks) -> "
      "Tensor");
  library.def(
      "linear_fp16(Tensor x, __torch__.torch.classes.quantized.LinearPackedParamsBase packed, Tensor row_sizes) -> "
      "Tensor");
  library.def("linear_packed(Tensor x, Tensor numbers, Tensor scales, Tensor bias, int out_features) -> Tensor");
  library.def("find_six_bits(Tensor weight) -> (Tensor, Tensor, Tensor, int)");
  library.def("find_steps(Tensor weight, int largest) -> (Tensor, Tensor, Tensor, int)");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("gate_silu(Tensor x) -> Tensor");
  library.def("gate_gelu_tanh(Tensor x) -> Tensor");
  library.def(
      "rotate(Tensor qkv, Tensor cosine, Tensor sine, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)");
  library.def(
      "run_layers(Tensor hidden, Tensor cosine, Tensor sine, Tensor[] parameters, int[] sizes, float[] factors, "
      "Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor slots, Tensor spans, Tensor context, Tensor visible, "
      "Tensor ancestors, int[] wanted) -> (Tensor, Tensor)");
  library.def("use_threads(int count) -> ()", use_threads);
  library.def("truncate_rows(Tensor(a!) logits, Tensor options) -> ()");
  library.def("top_rows(Tensor logits, Tensor starts, int count, Tensor? ids=None) -> (Tensor, Tensor)");
  library.def(
      "run_head(Tensor hidden, Tensor ids, Tensor positions, Tensor embeddings, Tensor cosines, Tensor sines, "
      "Tensor[] parameters, int[] sizes, float[] factors, Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, "
      "Tensor slots, Tensor spans, Tensor context, Tensor visible, Tensor ancestors) -> Tensor");
  library.def(
      "draft_chains(Tensor hidden, Tensor ids, Tensor pieces, Tensor blocks, int block_size, Tensor options, "
      "Tensor chances, Tensor starts, Tensor? draft_ids, bool wants_rows, Tensor embeddings, Tensor cosines, "
      "Tensor sines, Tensor[] parameters, int[] sizes, float[] factors, Tensor(a!)[] key_caches, "
      "Tensor(b!)[] value_caches) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("attend", attend);
  library.impl("linear_fp16", linear_fp16);
  library.impl("linear_packed", linear_packed);
  library.impl("find_six_bits", find_six_bits);
  library.impl("find_steps", find_steps);
  library.impl("rms_norm", rms_norm);
  library.impl("gate_silu", gate<silu>);
  library.impl("gate_gelu_tanh", gate<gelu_tanh>);
  library.impl("rotate", rotate);
  library.impl("run_layers", run_layers);
  library.impl("truncate_rows", truncate_rows);
  library.impl("top_rows", top_rows);
  library.impl("run_head", run_head);
  library.impl("draft_chains", draft_chains);
}

// Operators of a CPU step: attention over the paged cache, and linear layers on packed weights.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/quantized/PackedParams.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "batch_attention.h"
#include "elementwise.h"
#include "few_bits.h"
#include "int8.h"
#include "lanes.h"
#include "room.h"
#include "sampling.h"
#include "six_bits.h"
#include "six_steps.h"
#include "steps.h"
#include "threads.h"
#include "truncation.h"

namespace {

// Calls function(row) for every row; in parallel where there is enough to do. cost: of a row, in additions or the like.
template <typename Function>
void for_rows(int64_t rows, int64_t cost, const Function& function) {
  for_pieces(rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(cost, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

void use_threads(int64_t count) { own_threads = static_cast<int>(count); }

// Norms rows [rows, size]; weight: [size].
void rms_norm_into(const float* x, int64_t rows, const at::Tensor& weight_, double eps, float* out) {
  const int64_t size = weight_.numel();
  const auto* weight = weight_.const_data_ptr<float>();
  for_rows(rows, 2 * size, [&](int64_t row) {
    rms_norm_row(x + row * size, weight, size, static_cast<float>(eps), out + row * size);
  });
}

// [rows, 2 * size] to [rows, size].
template <float (*activation)(float)>
void gate_into(const float* x, int64_t rows, int64_t size, float* out) {
  for_rows(rows, 8 * size, [&](int64_t row) { gate_row<activation>(x + row * 2 * size, size, out + row * size); });
}

// Turns the first `turned` of the heads [tokens, all_heads, dim]; the others stay as they are. cosine and sine: [1,
// tokens, dim].
void rotate_into(const float* x, int64_t tokens, int64_t all_heads, int64_t turned, const at::Tensor& cosine,
                 const at::Tensor& sine, float* out) {
  const int64_t dim = cosine.size(-1);
  TORCH_CHECK(cosine.numel() == tokens * dim && sine.numel() == tokens * dim, "rotary positions of another shape");
  const auto* cosines = cosine.const_data_ptr<float>();
  const auto* sines = sine.const_data_ptr<float>();
  for_rows(tokens, 2 * all_heads * dim, [&](int64_t t) {
    const int64_t row = t * all_heads * dim, rest = row + turned * dim;
    for (int64_t h = 0; h < turned; ++h)
      rotate_head(x + row + h * dim, cosines + t * dim, sines + t * dim, dim, out + row + h * dim);
    std::copy(x + rest, x + row + all_heads * dim, out + rest);
  });
}

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

// Where the tokens of a pass go, and what they see. spans: int64 [S, 5]: begin, end, num_committed, num_slots, offset
// into context. See CpuAttention.
struct Tables {
  at::Tensor slots, spans, context, visible, ancestors;

  Batch batch() const {
    Batch batch{slots.size(0), slots.const_data_ptr<int64_t>(), visible.const_data_ptr<int64_t>(),
                ancestors.const_data_ptr<int64_t>(), {}};
    const auto* row = spans.const_data_ptr<int64_t>();
    for (int64_t s = 0; s < spans.size(0); ++s, row += 5)
      batch.spans.push_back({row[0], row[1], row[2], row[3], context.const_data_ptr<int64_t>() + row[4]});
    return batch;
  }
};

// Stores keys and values of a layer's tokens, and attends: out [tokens, heads, value_dim]. Queries, keys and values are of
// float32, caches of float32, float16 or bfloat16.
void attend_into(const Heads& query, const Heads& key, const Heads& value, const at::Tensor& key_cache,
                 const at::Tensor& value_cache, const Tables& tables, const Options& options, float* out) {
  TORCH_CHECK(key_cache.scalar_type() == value_cache.scalar_type(), "keys and values are of one type");
  const Shape shape{query.count, key.count, key.dim, value.dim, query.count / key.count};
  const Batch batch = tables.batch();
  with_cached_type(key_cache, [&](auto number) {
    using Number = decltype(number);
    auto* keys = static_cast<Number*>(key_cache.data_ptr());
    auto* values = static_cast<Number*>(value_cache.data_ptr());
    write_slots(key, batch, keys);
    write_slots(value, batch, values);
    BatchAttention(batch, shape, options, keys, values, num_threads()).run(query, out);
  });
}

at::Tensor dense_heads(const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

// x: [1, heads, tokens, dim].
Heads heads_of(const at::Tensor& x) {
  return {x.const_data_ptr<float>(), x.size(1), x.size(3), x.stride(1), x.stride(2)};
}

at::Tensor attend(const at::Tensor& query_, const at::Tensor& key_, const at::Tensor& value_, at::Tensor key_cache,
                  at::Tensor value_cache, const at::Tensor& slots, const at::Tensor& spans, const at::Tensor& context,
                  const at::Tensor& visible, const at::Tensor& ancestors, double scale, int64_t window, double softcap,
                  const std::optional<at::Tensor>& sinks) {
  const at::Tensor query = dense_heads(query_), key = dense_heads(key_), value = dense_heads(value_);
  const at::Tensor sink = sinks ? sinks->to(at::kFloat).contiguous() : at::Tensor();
  const Options options{static_cast<float>(scale), window, static_cast<float>(softcap),
                        sink.defined() ? sink.const_data_ptr<float>() : nullptr};
  at::Tensor out = at::empty({1, query.size(2), query.size(1), value.size(3)}, query.options());
  attend_into(heads_of(query), heads_of(key), heads_of(value), key_cache, value_cache,
              {slots, spans, context, visible, ancestors}, options, out.mutable_data_ptr<float>());
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

// A linear layer with packed weights: numbers and scales as the kind of matrix takes them, which the numbers' shape
// tells; bias: [panels * PANEL].
struct Linear {
  const at::Tensor &numbers, &scales, &bias;
  int64_t out_features;
};

// out [rows, out_features] = x W^T + b, or with `adds` that much more. x: [rows, in_features].
template <typename Matrix>
void multiply(const float* x, int64_t rows, int64_t in_features, const Linear& layer, bool adds, Room<uint8_t>& room,
              float* out) {
  const Matrix matrix{layer.numbers.size(1), layer.numbers.const_data_ptr<typename Matrix::Number>(),
                      static_cast<const uint16_t*>(layer.scales.const_data_ptr())};
  const int64_t stride = matrix.row_bytes(), inputs = matrix.blocks * Matrix::INPUTS;
  TORCH_CHECK(in_features <= inputs && in_features > inputs - Matrix::INPUTS, "the layer has not ", in_features,
              " inputs");
  uint8_t* rounded = room.with(rows * stride);
  for_rows(rows, 8 * in_features,
           [&](int64_t row) { matrix.round(x + row * in_features, in_features, rounded + row * stride); });
  const auto* bias = layer.bias.const_data_ptr<float>();
  const int64_t out_features = layer.out_features;
  const int64_t piece = std::max<int64_t>(1, 131072 / (in_features * PANEL * std::max<int64_t>(1, rows / 4)));
  for_pieces(layer.numbers.size(0), piece, [&](int64_t begin, int64_t end) {
    float sums[ROWS * PANEL];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * PANEL, width = std::min(PANEL, out_features - first);
      prefetch(bias + first);
      for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t count = std::min(ROWS, rows - row);
        multiply_rows(matrix, panel, count, rounded + row * stride, sums);
        for (int64_t m = 0; m < count; ++m) {
          const float factor = Matrix::factor(rounded + (row + m) * stride);
          float* target = out + (row + m) * out_features + first;
          int64_t n = 0;
          if (width == PANEL)
            for (; n < width; n += WIDTH) {
              const Lanes sum = factor * load(sums + m * PANEL + n) + load(bias + first + n);
              store(target + n, adds ? load(target + n) + sum : sum);
            }
          for (; n < width; ++n) {
            const float sum = factor * sums[m * PANEL + n] + bias[first + n];
            target[n] = adds ? target[n] + sum : sum;
          }
        }
      }
    }
  });
}

void linear_into(const float* x, int64_t rows, int64_t in_features, const Linear& layer, bool adds, Room<uint8_t>& room,
                 float* out) {
  if (layer.numbers.scalar_type() == at::kChar)
    return multiply<int8::Matrix>(x, rows, in_features, layer, adds, room, out);
  if (layer.numbers.size(2) == six_bits::BYTES)
    return multiply<six_bits::Matrix>(x, rows, in_features, layer, adds, room, out);
  if (layer.numbers.size(2) == few_bits::BYTES<5>)
    return multiply<few_bits::Matrix<5>>(x, rows, in_features, layer, adds, room, out);
  TORCH_CHECK(layer.numbers.size(2) == few_bits::BYTES<4>, "numbers of a panel's block take other bytes");
  multiply<few_bits::Matrix<4>>(x, rows, in_features, layer, adds, room, out);
}

at::Tensor linear_packed(const at::Tensor& x_, const at::Tensor& numbers, const at::Tensor& scales,
                         const at::Tensor& bias, int64_t out_features) {
  const at::Tensor x = x_.contiguous();
  const int64_t in_features = x.size(-1);
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  at::Tensor out = at::empty(shape, x.options());
  Room<uint8_t> room;
  linear_into(x.const_data_ptr<float>(), x.numel() / in_features, in_features, {numbers, scales, bias, out_features},
              false, room, out.mutable_data_ptr<float>());
  return out;
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

at::Tensor rms_norm(const at::Tensor& x_, const at::Tensor& weight, double eps) {
  const at::Tensor x = x_.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  rms_norm_into(x.const_data_ptr<float>(), x.numel() / x.size(-1), weight, eps, out.mutable_data_ptr<float>());
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
  gate_into<activation>(x.const_data_ptr<float>(), x.numel() / (2 * size), size, out.mutable_data_ptr<float>());
  return out;
}

// qkv [1, T, (heads + 2 * kv_heads) * dim] to queries [1, heads, T, dim] and keys, rotated, and values [1, kv_heads,
// T, dim]; cosine and sine: [1, T, dim].
std::tuple<at::Tensor, at::Tensor, at::Tensor> rotate(const at::Tensor& qkv_, const at::Tensor& cosine_,
                                                      const at::Tensor& sine_, int64_t heads, int64_t kv_heads) {
  const at::Tensor qkv = qkv_.contiguous(), cosine = cosine_.contiguous(), sine = sine_.contiguous();
  const int64_t tokens = qkv.size(1), all_heads = heads + 2 * kv_heads, dim = qkv.size(2) / all_heads;
  at::Tensor out = at::empty({1, tokens, all_heads, dim}, qkv.options());
  rotate_into(qkv.const_data_ptr<float>(), tokens, all_heads, heads + kv_heads, cosine, sine,
              out.mutable_data_ptr<float>());
  const at::Tensor by_head = out.transpose(1, 2);
  return {by_head.narrow(1, 0, heads), by_head.narrow(1, heads, kv_heads), by_head.narrow(1, heads + kv_heads, kv_heads)};
}

// Rows of logits that lie anywhere, each in one piece.
at::Tensor dense_rows(const at::Tensor& logits) { return logits.stride(1) == 1 ? logits : logits.contiguous(); }

sampling::Truncation truncation_at(const double* options) { return {options[0], options[1], options[2], options[3]}; }

// Truncated rows of logits. options: per row temperature (0 leaves it as it is), top_k (0 is off), top_p, min_p.
at::Tensor truncate_rows(const at::Tensor& logits_, at::ArrayRef<double> options) {
  const at::Tensor logits = dense_rows(logits_);
  const int64_t rows = logits.size(0), size = logits.size(1), stride = logits.stride(0);
  TORCH_CHECK(static_cast<int64_t>(options.size()) == 4 * rows, "each row has four options");
  at::Tensor out = at::empty({rows, size}, logits.options());
  const auto* data = logits.const_data_ptr<float>();
  auto* target = out.mutable_data_ptr<float>();
  for_pieces(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      sampling::truncate(data + row * stride, size, truncation_at(options.data() + 4 * row), target + row * size);
  });
  return out;
}

// The token of each of these rows of logits; options as truncate_rows has them: the likeliest where the temperature is 0,
// elsewhere the one that comes out ahead, truncated, under the Gumbel noise that begins at its start.
std::vector<int64_t> choose_rows(const at::Tensor& logits_, at::IntArrayRef rows, at::ArrayRef<double> options,
                                 at::IntArrayRef starts) {
  const at::Tensor logits = dense_rows(logits_);
  const int64_t size = logits.size(1), stride = logits.stride(0);
  TORCH_CHECK(options.size() == 4 * rows.size() && starts.size() == rows.size(), "each row has four options and a start");
  for (const int64_t row : rows) TORCH_CHECK(row >= 0 && row < logits.size(0), "there is no row ", row);
  const auto* data = logits.const_data_ptr<float>();
  std::vector<int64_t> tokens(rows.size());
  for_pieces(static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      tokens[i] = sampling::choose(data + rows[i] * stride, size, truncation_at(options.data() + 4 * i),
                                   static_cast<uint64_t>(starts[i]));
  });
  return tokens;
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

#include "layers.h"
#include "heads.h"

#define TEXT_OF(name) TEXT_OF_VALUE(name)
#define TEXT_OF_VALUE(value) #value
#define LAYERS_TYPE "__torch__.torch.classes." TEXT_OF(OUTRIDER_NAMESPACE) ".Layers"

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
  library.class_<Layers>("Layers");
  library.def(
      "hold_layers(Tensor[] parameters, int[] sizes, float[] factors, Tensor[] key_caches, Tensor[] value_caches) -> "
      LAYERS_TYPE);
  library.def(
      "run_layers(" LAYERS_TYPE " layers, Tensor hidden, Tensor cosine, Tensor sine, Tensor slots, Tensor spans, "
      "Tensor context, Tensor visible, Tensor ancestors, int[] wanted) -> (Tensor, Tensor)");
  library.def("use_threads(int count) -> ()", use_threads);
  library.def("truncate_rows(Tensor logits, float[] options) -> Tensor");
  library.def("choose_rows(Tensor logits, int[] rows, float[] options, int[] starts) -> int[]");
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
  library.impl("hold_layers", hold_layers);
  library.impl("run_layers", run_layers);
  library.impl("truncate_rows", truncate_rows);
  library.impl("choose_rows", choose_rows);
  library.impl("top_rows", top_rows);
  library.impl("run_head", run_head);
  library.impl("draft_chains", draft_chains);
}

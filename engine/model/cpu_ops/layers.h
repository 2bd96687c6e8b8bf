// Decoder layers without anything between them.
//
// Included by operators.cpp, of whose functions it is made.

#pragma once

namespace {

// What passes through a layer on its way. Layers use it one after the other, so that it stays near.
struct Workspace {
  Room<float> normed, projected, rotated, attended, both, gated;
  Room<uint8_t> rounded;
};

// A decoder layer, x = x + attention(norm(x)), then x = x + feed_forward(norm(x)):
//   14 parameters: norm, three of queries, keys and values in one, three of the output, norm, three of gate and up in
//   one, three of down (each weights, scales, bias);
//   8 sizes: heads, kv_heads, window, whether gelu and not silu, outputs of the four linear layers;
//   4 factors: eps of the norms, scale and softcap of attention.
struct Layer {
  static constexpr size_t PARAMETERS = 14, SIZES = 8, FACTORS = 4;
  at::TensorList parameters;
  at::IntArrayRef sizes;
  at::ArrayRef<double> factors;
  const at::Tensor &key_cache, &value_cache;

  // Which of the four, and its first parameter.
  Linear linear(size_t number, size_t place) const {
    return {parameters[place], parameters[place + 1], parameters[place + 2], sizes[4 + number]};
  }

  // x [tokens, size], in place. input [tokens, input_size]: the normed x, or what attention gets instead; cosine and
  // sine: float32 [1, tokens, dim].
  void run(float* x, const float* input, int64_t tokens, int64_t input_size, const at::Tensor& cosine,
           const at::Tensor& sine, const Tables& tables, Workspace& work) const {
    const int64_t heads = sizes[0], kv_heads = sizes[1], all_heads = heads + 2 * kv_heads;
    const Linear qkv = linear(0, 1), out = linear(1, 4), gate_up = linear(2, 8), down = linear(3, 11);
    const int64_t dim = qkv.out_features / all_heads, size = out.out_features, inner = gate_up.out_features / 2;
    float* projected = work.projected.with(tokens * qkv.out_features);
    linear_into(input, tokens, input_size, qkv, false, work.rounded, projected);
    float* rotated = work.rotated.with(tokens * qkv.out_features);
    rotate_into(projected, tokens, all_heads, heads + kv_heads, cosine, sine, rotated);
    const auto part = [&](int64_t first, int64_t count) {
      return Heads{rotated + first * dim, count, dim, dim, all_heads * dim};
    };
    float* attended = work.attended.with(tokens * heads * dim);
    attend_into(part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads), key_cache, value_cache, tables,
                {static_cast<float>(factors[2]), sizes[2], static_cast<float>(factors[3]), nullptr}, attended);
    linear_into(attended, tokens, heads * dim, out, true, work.rounded, x);
    float* normed = work.normed.with(tokens * size);
    rms_norm_into(x, tokens, parameters[7], factors[1], normed);
    float* both = work.both.with(tokens * 2 * inner);
    linear_into(normed, tokens, size, gate_up, false, work.rounded, both);
    float* gated = work.gated.with(tokens * inner);
    (sizes[3] ? gate_into<gelu_tanh> : gate_into<silu>)(both, tokens, inner, gated);
    linear_into(gated, tokens, inner, down, true, work.rounded, x);
  }
};

// The layers of a model, held here so that a pass does not have to hand over hundreds of tensors.
struct Layers : torch::CustomClassHolder {
  std::vector<at::Tensor> parameters;
  std::vector<int64_t> sizes;
  std::vector<double> factors;
  std::vector<at::Tensor> key_caches, value_caches;

  Layer layer(size_t number) const {
    return {at::TensorList(parameters).slice(Layer::PARAMETERS * number, Layer::PARAMETERS),
            at::IntArrayRef(sizes).slice(Layer::SIZES * number, Layer::SIZES),
            at::ArrayRef<double>(factors).slice(Layer::FACTORS * number, Layer::FACTORS), key_caches[number],
            value_caches[number]};
  }
};

c10::intrusive_ptr<Layers> hold_layers(at::TensorList parameters, at::IntArrayRef sizes, at::ArrayRef<double> factors,
                                       at::TensorList key_caches, at::TensorList value_caches) {
  const size_t count = key_caches.size();
  TORCH_CHECK(parameters.size() == Layer::PARAMETERS * count && sizes.size() == Layer::SIZES * count &&
                  factors.size() == Layer::FACTORS * count && value_caches.size() == count,
              "not what ", count, " layers are made of");
  auto layers = c10::make_intrusive<Layers>();
  layers->parameters = parameters.vec();
  layers->sizes = sizes.vec();
  layers->factors = factors.vec();
  layers->key_caches = key_caches.vec();
  layers->value_caches = value_caches.vec();
  return layers;
}

// x [tokens, size] to the places of residuals [tokens, wanted, size] that are for this layer.
void keep_residuals(const float* x, int64_t tokens, int64_t size, size_t layer, at::IntArrayRef wanted, float* residuals) {
  const int64_t num_wanted = static_cast<int64_t>(wanted.size());
  for (int64_t place = 0; place < num_wanted; ++place) {
    if (wanted[place] != static_cast<int64_t>(layer)) continue;
    for (int64_t t = 0; t < tokens; ++t)
      std::memcpy(residuals + (t * num_wanted + place) * size, x + t * size, size * sizeof(float));
  }
}

// hidden: [1, T, size]. wanted: numbers of layers, the count of layers for what the last one gives. Returns what the last
// layer gives, and [T, wanted, size], what goes into the wanted layers.
std::tuple<at::Tensor, at::Tensor> run_layers(const c10::intrusive_ptr<Layers>& layers, const at::Tensor& hidden,
                                              const at::Tensor& cosine_, const at::Tensor& sine_,
                                              const at::Tensor& slots, const at::Tensor& spans,
                                              const at::Tensor& context, const at::Tensor& visible,
                                              const at::Tensor& ancestors, at::IntArrayRef wanted) {
  const int64_t tokens = hidden.size(1), size = hidden.size(2), num_wanted = static_cast<int64_t>(wanted.size());
  const at::Tensor x = hidden.clone(at::MemoryFormat::Contiguous);
  const at::Tensor residuals = at::empty({tokens, num_wanted, size}, hidden.options());
  const at::Tensor cosine = cosine_.contiguous(), sine = sine_.contiguous();
  const Tables tables{slots, spans, context, visible, ancestors};
  auto* data = x.mutable_data_ptr<float>();
  auto* kept = residuals.mutable_data_ptr<float>();
  Workspace work;
  float* normed = work.normed.with(tokens * size);
  const size_t count = layers->key_caches.size();
  for (size_t number = 0; number < count; ++number) {
    const Layer layer = layers->layer(number);
    keep_residuals(data, tokens, size, number, wanted, kept);
    rms_norm_into(data, tokens, layer.parameters[0], layer.factors[0], normed);
    layer.run(data, normed, tokens, size, cosine, sine, tables, work);
  }
  keep_residuals(data, tokens, size, count, wanted, kept);
  return {x, residuals};
}

}  // namespace

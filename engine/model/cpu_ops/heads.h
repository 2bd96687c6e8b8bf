// Draft heads: a pass of an EAGLE head, and whole chains of drafts without Python between their levels.
//
// Included by operators.cpp, of whose functions it is made.

#pragma once

namespace {

// A draft head. Its parameters:
//   norms of embedding, hidden state and output (empty where there is none), three of fc, three of the output layer
//   (each weights, scales, bias; empty where there is none), then those of its layers, see Layer.
// sizes: whether fc joins embedding and hidden state (EAGLE-1) and not the first layer's attention (EAGLE-3), whether
//   the first layer norms what fc gives, whether the first layer's residual is the normed hidden state, whether the
//   next pass gets the normed output, outputs of fc, of the output layer, heads that may be chosen; then those of its
//   layers.
// factors: eps of the norms, then those of its layers.
struct Head {
  static constexpr size_t PARAMETERS = 9, SIZES = 7, FACTORS = 1;
  at::TensorList parameters;
  at::IntArrayRef sizes;
  at::ArrayRef<double> factors;
  at::TensorList key_caches, value_caches;

  at::Tensor normed(const at::Tensor& x, size_t place) const {
    return parameters[place].numel() ? rms_norm(x, parameters[place], factors[0]) : x;
  }

  Layer layer(size_t number) const {
    return {parameters.slice(PARAMETERS + Layer::PARAMETERS * number, Layer::PARAMETERS),
            sizes.slice(SIZES + Layer::SIZES * number, Layer::SIZES),
            factors.slice(FACTORS + Layer::FACTORS * number, Layer::FACTORS), key_caches[number], value_caches[number]};
  }

  at::Tensor linear(const at::Tensor& x, size_t place, int64_t out_features) const {
    return linear_packed(x, parameters[place], parameters[place + 1], parameters[place + 2], out_features);
  }

  // hidden, embedded: [1, T, size]. Returns what the last layer gives, [1, T, size].
  at::Tensor run(const at::Tensor& hidden, const at::Tensor& embedded, const at::Tensor& cosine,
                 const at::Tensor& sine, const Tables& tables) const {
    const at::Tensor own_hidden = normed(hidden, 1);
    const at::Tensor joined = at::cat({normed(embedded, 0), own_hidden}, 2);
    at::Tensor x, input;
    if (sizes[0]) {
      x = linear(joined, 3, sizes[4]);
      input = sizes[1] ? rms_norm(x, parameters[PARAMETERS], factors[FACTORS]) : x;
    } else {
      x = (sizes[2] ? own_hidden : hidden).clone(at::MemoryFormat::Contiguous);
      input = joined;
    }
    Workspace work;
    for (size_t number = 0; number < key_caches.size(); ++number) {
      const Layer own = layer(number);
      if (number) input = rms_norm(x, own.parameters[0], own.factors[0]);
      own.run(x.mutable_data_ptr<float>(), input.const_data_ptr<float>(), x.size(1), input.size(2), cosine, sine, tables,
              work);
    }
    return x;
  }

  // Logits of states [1, R, size], [1, R, outputs], and what the states' children get in a hidden state's place.
  std::tuple<at::Tensor, at::Tensor> score(const at::Tensor& out) const {
    const at::Tensor state = normed(out, 2);
    return {linear(state, 6, sizes[5]), sizes[3] ? state : out};
  }
};

// Rows of a table of float32, bfloat16 or float16, as float32 [1, rows, size].
at::Tensor rows_of(const at::Tensor& table, const std::vector<int64_t>& rows) {
  const int64_t size = table.size(1), count = static_cast<int64_t>(rows.size());
  at::Tensor out = at::empty({1, count, size}, table.options().dtype(at::kFloat));
  auto* target = out.mutable_data_ptr<float>();
  const auto copy = [&](const auto* source) {
    for (int64_t r = 0; r < count; ++r) {
      TORCH_CHECK(rows[r] >= 0 && rows[r] < table.size(0), "row ", rows[r], " of ", table.size(0));
      for (int64_t i = 0; i < size; ++i) target[r * size + i] = static_cast<float>(source[rows[r] * size + i]);
    }
  };
  switch (table.scalar_type()) {
    case at::kBFloat16: copy(table.const_data_ptr<at::BFloat16>()); break;
    case at::kHalf: copy(table.const_data_ptr<at::Half>()); break;
    default: copy(table.const_data_ptr<float>());
  }
  return out;
}

at::Tensor rows_at(const at::Tensor& x, const std::vector<int64_t>& rows) {
  const int64_t size = x.size(2), count = static_cast<int64_t>(rows.size());
  at::Tensor out = at::empty({1, count, size}, x.options());
  const auto* source = x.const_data_ptr<float>();
  auto* target = out.mutable_data_ptr<float>();
  for (int64_t r = 0; r < count; ++r)
    std::memcpy(target + r * size, source + rows[r] * size, size * sizeof(float));
  return out;
}

at::Tensor tensor_of(const std::vector<int64_t>& values, const at::Tensor& like) {
  at::Tensor out = at::empty({static_cast<int64_t>(values.size())}, like.options());
  std::copy(values.begin(), values.end(), out.mutable_data_ptr<int64_t>());
  return out;
}

// A text of which tokens are computed, and behind them a chain of drafts.
struct Piece {
  int64_t count, start, length;  // Tokens, the place of the first in the text, drafts wanted.
  const int64_t* blocks;
  int64_t block_size, context;  // context: where its slots begin in the tables.

  // The head's text begins with the second token, and slot 0 stays empty.
  int64_t committed() const { return start - 1 + count; }
  int64_t slot(int64_t place) const { return blocks[place / block_size] * block_size + place % block_size; }
};

// The tables of one pass: for each piece its tokens, or the draft of a level.
struct Layout {
  std::vector<int64_t> positions, slots, spans, visible;

  void add(const Piece& piece, int64_t first, int64_t count) {
    const auto begin = static_cast<int64_t>(positions.size());
    for (int64_t position = first; position < first + count; ++position) {
      positions.push_back(position);
      slots.push_back(piece.slot(position + 1));
      visible.push_back(position + 1);
    }
    spans.insert(spans.end(), {begin, begin + count, first + count, first + count, piece.context});
  }

  Tables tables(const at::Tensor& context) const {
    return {tensor_of(slots, context), tensor_of(spans, context).view({-1, 5}), context, tensor_of(visible, context),
            at::zeros({static_cast<int64_t>(visible.size())}, context.options())};
  }
};

// The share of an entry with the logit `peak`, the row's highest; 0 where that is no number.
float share(const float* row, int64_t size, float peak) {
  Lanes sums = {};
  int64_t entry = 0;
  for (; entry + WIDTH <= size; entry += WIDTH)
    for (int64_t i = 0; i < WIDTH; ++i) sums[i] += exp_nonpositive(row[entry + i] - peak);
  float sum = add_lanes(sums);
  for (; entry < size; ++entry) sum += exp_nonpositive(row[entry] - peak);
  return sum >= 1.0f ? 1.0f / sum : 0.0f;
}

// The token of one row of logits: the likeliest, or with options.temperature the one that comes out ahead under the
// Gumbel noise that begins at `start`. ids: the target's id of each entry. confidence: the likeliest one's share.
int64_t choose(float* row, int64_t size, const sampling::Truncation& options, uint64_t start, const int64_t* ids,
               float& confidence) {
  const auto id = [&](int64_t entry) { return ids ? ids[entry] : entry; };
  sampling::truncate(row, size, options, row);
  int64_t best = 0;
  for (int64_t entry = 1; entry < size; ++entry)
    if (row[entry] > row[best] || (row[entry] == row[best] && id(entry) < id(best))) best = entry;
  confidence = share(row, size, row[best]);
  if (options.temperature != 0.0) {
    double score;
    sampling::top(row, size, start, 1, &best, &score, ids);
  }
  return id(best);
}

// A pass of a head. ids, positions: int64 [T]; embeddings, cosines and sines are tables by id and position.
at::Tensor run_head(const at::Tensor& hidden, const at::Tensor& ids, const at::Tensor& positions,
                    const at::Tensor& embeddings, const at::Tensor& cosines, const at::Tensor& sines,
                    at::TensorList parameters, at::IntArrayRef sizes, at::ArrayRef<double> factors,
                    at::TensorList key_caches, at::TensorList value_caches, const at::Tensor& slots,
                    const at::Tensor& spans, const at::Tensor& context, const at::Tensor& visible,
                    const at::Tensor& ancestors) {
  const Head head{parameters, sizes, factors, key_caches, value_caches};
  const auto list = [](const at::Tensor& x) {
    return std::vector<int64_t>(x.const_data_ptr<int64_t>(), x.const_data_ptr<int64_t>() + x.numel());
  };
  const std::vector<int64_t> places = list(positions);
  return head.run(hidden.contiguous(), rows_of(embeddings, list(ids)), rows_of(cosines, places),
                  rows_of(sines, places), {slots, spans, context, visible, ancestors});
}

// Chains of drafts, greedy or drawn with noise.
//   hidden: [1, T, size], for each token what takes the place of the hidden state; ids: int64 [T].
//   pieces: int64 [S, 4]: tokens, place of the first, drafts, where its blocks begin in `blocks`.
//   options: float64 [C, 5], for the C pieces with drafts, see truncate_rows; without a temperature the likeliest token
//   is taken. The last one: behind the first draft with which the chance that all stand is below it, a chain ends.
//   chances: float64 [C, bins], by a draft's confidence the chance that it stands. starts: int64 [C, longest chain],
//   where the noise of each draft begins. draft_ids: the target's id of each output; none where that is its number.
// Returns tokens, int64 [C, longest chain]; how sure the head was of each, float32, 0 from a chain's end on; and if wanted
// the truncated rows they were drawn from, [C, longest chain, outputs].
std::tuple<at::Tensor, at::Tensor, at::Tensor> draft_chains(
    const at::Tensor& hidden, const at::Tensor& ids, const at::Tensor& pieces, const at::Tensor& blocks,
    int64_t block_size, const at::Tensor& options, const at::Tensor& chances, const at::Tensor& starts,
    const std::optional<at::Tensor>& draft_ids,
    bool wants_rows, const at::Tensor& embeddings, const at::Tensor& cosines, const at::Tensor& sines,
    at::TensorList parameters, at::IntArrayRef sizes, at::ArrayRef<double> factors, at::TensorList key_caches,
    at::TensorList value_caches) {
  const Head head{parameters, sizes, factors, key_caches, value_caches};
  const auto* piece_data = pieces.const_data_ptr<int64_t>();
  std::vector<Piece> all, chains;
  std::vector<int64_t> context, ends;
  Layout layout;
  for (int64_t s = 0; s < pieces.size(0); ++s) {
    const int64_t* row = piece_data + 4 * s;
    const Piece piece{row[0], row[1], row[2], blocks.const_data_ptr<int64_t>() + row[3], block_size,
                      static_cast<int64_t>(context.size())};
    const int64_t slots = piece.committed() + std::max<int64_t>(0, piece.length - 1);
    for (int64_t place = 1; place <= slots; ++place) context.push_back(piece.slot(place));
    layout.add(piece, piece.start - 1, piece.count);
    if (piece.length) {
      chains.push_back(piece);
      ends.push_back(static_cast<int64_t>(layout.positions.size()) - 1);
    }
  }
  const at::Tensor contexts = tensor_of(context, ids);
  const int64_t count = static_cast<int64_t>(chains.size()), longest = starts.size(1), outputs = sizes[6];
  at::Tensor tokens = at::zeros({count, longest}, ids.options());
  at::Tensor confidences = at::zeros({count, longest}, hidden.options());
  at::Tensor kept = at::empty({wants_rows ? count : 0, longest, outputs}, hidden.options());
  const auto* choice = options.const_data_ptr<double>();
  const auto* chance = chances.const_data_ptr<double>();
  const int64_t num_bins = chances.size(1);
  const auto* noise = starts.const_data_ptr<int64_t>();
  const int64_t* own_ids = draft_ids ? draft_ids->const_data_ptr<int64_t>() : nullptr;
  auto* token_data = tokens.mutable_data_ptr<int64_t>();
  auto* confidence_data = confidences.mutable_data_ptr<float>();

  const auto* id_data = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> texts(id_data, id_data + ids.numel());
  at::Tensor out = head.run(hidden.contiguous(), rows_of(embeddings, texts), rows_of(cosines, layout.positions),
                            rows_of(sines, layout.positions), layout.tables(contexts));
  std::vector<int64_t> live(count);  // The chain of each row.
  std::vector<double> stands(count, 1.0);
  for (int64_t c = 0; c < count; ++c) live[c] = c;
  for (int64_t level = 0; level < longest && !live.empty(); ++level) {
    auto [logits, carried] = head.score(rows_at(out, ends));
    auto* rows = logits.mutable_data_ptr<float>();
    const int64_t width = logits.size(2);
    for_pieces(static_cast<int64_t>(live.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const double* wish = choice + 5 * live[r];
        const int64_t place = live[r] * longest + level;
        token_data[place] = choose(rows + r * width, outputs, {wish[0], wish[1], wish[2], wish[3]},
                                   static_cast<uint64_t>(noise[place]), own_ids, confidence_data[place]);
        if (wants_rows)
          std::memcpy(kept.mutable_data_ptr<float>() + place * outputs, rows + r * width, outputs * sizeof(float));
      }
    });
    Layout next;
    std::vector<int64_t> going, parents, drafts;
    for (size_t r = 0; r < live.size(); ++r) {
      const int64_t chain = live[r];
      const Piece& piece = chains[chain];
      if (confidence_data[chain * longest + level] == 0.0f) continue;
      const auto bin = static_cast<int64_t>(confidence_data[chain * longest + level] * num_bins);
      stands[chain] *= chance[chain * num_bins + std::min(bin, num_bins - 1)];
      if (piece.length <= level + 1 || stands[chain] < choice[5 * chain + 4]) continue;
      next.add(piece, piece.committed() + level, 1);
      going.push_back(chain);
      parents.push_back(static_cast<int64_t>(r));
      drafts.push_back(token_data[chain * longest + level]);
    }
    live = going;
    if (live.empty()) break;
    out = head.run(rows_at(carried, parents), rows_of(embeddings, drafts), rows_of(cosines, next.positions),
                   rows_of(sines, next.positions), next.tables(contexts));
    ends.resize(live.size());
    for (size_t r = 0; r < live.size(); ++r) ends[r] = static_cast<int64_t>(r);
  }
  return {tokens, confidences, kept};
}

}  // namespace

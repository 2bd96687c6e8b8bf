// Attention of a whole batch: what is to be done, shared out among threads.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "room.h"
#include "threads.h"

namespace {

// Heads of tokens; a head's numbers lie together.
struct Heads {
  const float* data;
  int64_t count, dim, head_stride, token_stride;

  const float* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// The tokens of a pass: the cache slot of each, the committed tokens that it sees, and the draft nodes that it sees.
struct Batch {
  int64_t num_tokens;
  const int64_t *slots, *visible, *ancestors;
  std::vector<Span> spans;

  int64_t count(int64_t token) const {
    return visible[token] + std::popcount(static_cast<uint64_t>(ancestors[token]));
  }
};

// Keys or values of tokens to the slots of [slots, heads, dim], rounded to the cache's type.
template <typename Number>
void write_slots(const Heads& heads, const Batch& batch, Number* target) {
  for_pieces(batch.num_tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads.count; ++h)
        narrow(heads.at(t, h), heads.dim, target + (batch.slots[t] * heads.count + h) * heads.dim);
  });
}

// A block of one sequence's rows, how many tiles it sees, and where its queries begin among those of tiles apart.
struct Block {
  int64_t span, begin, end, tiles, first_query;

  int64_t num_rows() const { return end - begin; }
};

// A block, some of its key/value heads, and some of its tiles.
struct Item {
  const Block* block;
  int64_t first_head, end_head, first_tile, end_tile;
};

// Number: what keys and values are in the cache.
template <typename Number>
class BatchAttention {
 public:
  BatchAttention(const Batch& batch, const Shape& shape, const Options& options, const Number* keys,
                 const Number* values, int64_t threads)
      : batch_(batch), shape_(shape), options_(options), keys_(keys), values_(values) {
    list_blocks();
    share_out(threads);
  }

  // out: [tokens, heads, value_dim].
  void run(const Heads& query, float* out) const {
    const auto final_place = [&](int64_t, int64_t token, int64_t head) {
      return out + (token * shape_.num_heads + head) * shape_.value_dim;
    };
    if (!is_apart_) {
      for_workers(static_cast<int64_t>(items_.size()), [&](Worker<Number>& worker, int64_t number) {
        thread_local std::vector<Query> queries;
        const Item& item = items_[number];
        lay_out(item, query, with_room(queries, item), final_place);
        attend(worker, item, queries.data());
        for (Query& each : queries) worker.finish(each);
      });
      return;
    }
    thread_local Room<Query> query_room;
    thread_local Room<float> sum_room;
    Query* parts = query_room.with(num_apart_);
    float* sums = sum_room.with(num_apart_ * shape_.value_dim);
    for_workers(static_cast<int64_t>(items_.size()), [&](Worker<Number>& worker, int64_t number) {
      Item item = items_[number];
      for (const int64_t end = item.end_tile; item.first_tile < end; ++item.first_tile) {
        item.end_tile = item.first_tile + 1;
        const int64_t first = place(item);
        lay_out(item, query, parts + first, [&](int64_t own, int64_t, int64_t) {
          return sums + (first + own) * shape_.value_dim;
        });
        attend(worker, item, parts + first);
      }
    });
    const auto heads = shape_.num_kv_heads;
    for_workers(static_cast<int64_t>(blocks_.size()) * heads, [&](Worker<Number>& worker, int64_t number) {
      thread_local std::vector<Query> queries;
      const Block& block = blocks_[number / heads];
      Item item{&block, number % heads, number % heads + 1, 0, 0};
      lay_out(item, query, with_room(queries, item), final_place);
      for (; item.first_tile < block.tiles; ++item.first_tile)
        for (size_t q = 0; q < queries.size(); ++q) worker.add(parts[place(item) + q], queries[q]);
      for (Query& each : queries) worker.finish(each);
    });
  }

 private:
  // Bytes that the sums of tiles apart may take.
  static constexpr int64_t MOST_BYTES = int64_t{1} << 24;

  void list_blocks() {
    for (size_t s = 0; s < batch_.spans.size(); ++s)
      for (int64_t begin = batch_.spans[s].begin; begin < batch_.spans[s].end; begin += ROW_BLOCK) {
        const int64_t end = std::min(begin + ROW_BLOCK, batch_.spans[s].end);
        int64_t count = 0;
        for (int64_t t = begin; t < end; ++t) count = std::max(count, batch_.count(t));
        const int64_t tiles = (count + TILE - 1) / TILE;
        blocks_.push_back({static_cast<int64_t>(s), begin, end, tiles, num_apart_});
        num_apart_ += tiles * (end - begin) * shape_.num_heads;
        longest_ = std::max(longest_, tiles);
      }
  }

  // Whole blocks, unless some threads would then have nothing to do: parts of texts then, and heads where those are too
  // short. The heads of a token lie side by side, so that all of them together are read faster than one by one.
  void share_out(int64_t threads) {
    const auto count = static_cast<int64_t>(blocks_.size());
    int64_t parts = 1, groups = 1;
    if (threads > 1 && count > 0 && count < 2 * threads) {
      const int64_t wanted = (2 * threads + count - 1) / count;
      const bool is_large = num_apart_ * shape_.value_dim * static_cast<int64_t>(sizeof(float)) > MOST_BYTES;
      parts = is_large ? 1 : std::min(wanted, longest_);
      groups = std::min(shape_.num_kv_heads, (wanted + parts - 1) / parts);
    }
    is_apart_ = parts > 1;
    for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block)  // The last rows of a chunk see the most.
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t group = 0; group < groups; ++group) {
          const Item item{&*block, group * shape_.num_kv_heads / groups, (group + 1) * shape_.num_kv_heads / groups,
                          part * block->tiles / parts, (part + 1) * block->tiles / parts};
          if (item.first_tile < item.end_tile) items_.push_back(item);
        }
  }

  template <typename Function>
  void for_workers(int64_t count, const Function& function) const {
    for_pieces(count, 1, [&](int64_t begin, int64_t end) {
      thread_local Desk<Number> desk;
      Worker<Number> worker(shape_, options_, keys_, values_, desk);
      for (int64_t i = begin; i < end; ++i) function(worker, i);
    });
  }

  // Where the queries of one tile and some heads are, if tiles are apart.
  int64_t place(const Item& item) const {
    const Block& block = *item.block;
    return block.first_query +
           (item.first_tile * shape_.num_heads + item.first_head * shape_.group) * block.num_rows();
  }

  Query* with_room(std::vector<Query>& queries, const Item& item) const {
    queries.resize((item.end_head - item.first_head) * item.block->num_rows() * shape_.group);
    return queries.data();
  }

  // The queries of a block's rows and some heads, by key/value head, then by row, `group` of each. target(number, token,
  // head): where the sums of one go.
  template <typename Target>
  void lay_out(const Item& item, const Heads& query, Query* queries, const Target& target) const {
    int64_t number = 0;
    for (int64_t head = item.first_head * shape_.group; head < item.end_head * shape_.group; head += shape_.group)
      for (int64_t t = item.block->begin; t < item.block->end; ++t)
        for (int64_t h = head; h < head + shape_.group; ++h) {
          float* sums = target(number, t, h);
          std::fill(sums, sums + shape_.value_dim, 0.0f);
          queries[number++] = {query.at(t, h), sums, h, {}, 0.0f, 0.0f};
        }
  }

  void attend(Worker<Number>& worker, const Item& item, Query* queries) const {
    thread_local std::vector<Row> rows;
    rows.clear();
    for (int64_t t = item.block->begin; t < item.block->end; ++t) {
      const int64_t count = batch_.count(t);
      rows.push_back({options_.window == 0 ? 0 : std::max<int64_t>(0, count - options_.window), count});
    }
    worker.attend(batch_.spans[item.block->span], rows, batch_.ancestors + item.block->begin, queries, item.first_head,
                  item.end_head, item.first_tile, item.end_tile);
  }

  const Batch& batch_;
  const Shape& shape_;
  const Options& options_;
  const Number* keys_;
  const Number* values_;
  std::vector<Block> blocks_;
  std::vector<Item> items_;
  int64_t num_apart_ = 0, longest_ = 1;
  bool is_apart_ = false;
};

}  // namespace

// The row table built as csrc/cuda/schedule does it, by one thread that takes the place of all: chunks in any order.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "moe/chunks.h"

namespace mok::verify {

class ChunkedTable {
 public:
  // `clean` are the expert ids of all ranks. Shares of a chunk are what warps have, of `lanes` lanes each.
  ChunkedTable(const Shape& s, const std::vector<int32_t>& clean, int32_t chunks, int32_t shares, int32_t lanes)
      : shape_(s),
        clean_(clean),
        chunks_(chunks),
        shares_(shares),
        lanes_(lanes),
        experts_(static_cast<int32_t>(s.local_experts)),
        histogram_(s.local_experts * chunks),
        expert_rows_(s.local_experts),
        expert_block_(s.local_experts + 1) {}

  std::vector<RowSource> build(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int32_t chunk : shuffled(random)) {
      const std::vector<int32_t> counts = count(chunk);
      for (int32_t i = 0; i < shares_ * experts_; ++i) histogram_[i % experts_ * chunks_ + chunk] += counts[i];
    }
    for (int32_t chunk : shuffled(random)) write(chunk);
    return rows_;
  }

 private:
  std::vector<int32_t> shuffled(std::mt19937_64& random) const {
    std::vector<int32_t> order(chunks_);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::shuffle(order, random);
    return order;
  }

  // visit(share, expert, slot of all ranks in one line) of a chunk's slots for local experts.
  template <class Visit>
  void for_each_slot(int32_t chunk, const Visit& visit) const {
    for (int32_t share = 0; share < shares_; ++share) {
      const SlotRange slots = slots_of_share(shape_, chunk * shares_ + share, chunks_ * shares_, lanes_);
      for (int64_t i = slots.begin; i < slots.end; ++i) {
        const int64_t expert = clean_[i] - shape_.rank * experts_;
        if (expert >= 0 && expert < experts_) visit(share, static_cast<int32_t>(expert), i);
      }
    }
  }

  // [shares, experts]
  std::vector<int32_t> count(int32_t chunk) const {
    std::vector<int32_t> counts(shares_ * experts_);
    for_each_slot(chunk, [&](int32_t share, int32_t expert, int64_t) { ++counts[share * experts_ + expert]; });
    return counts;
  }

  void write(int32_t chunk) {
    std::vector<int32_t> next = count(chunk);
    for (int32_t e = 0; e < experts_; ++e) {
      ChunkedRows sum{0, 0};
      for (int32_t lane = 0; lane < lanes_; ++lane) {
        const ChunkedRows part =
            add_chunks([&](int32_t other) { return histogram_[e * chunks_ + other]; }, chunk, chunks_, lane, lanes_);
        sum.total += part.total;
        sum.before += part.before;
      }
      expert_rows_[e] = sum.total;
      place_shares(sum.before, shares_, experts_, next.data() + e);
    }
    place_experts(experts_, expert_rows_.data(), expert_block_.data());
    rows_.resize(expert_block_.back() * kRowBlock, {-1, -1});
    for_each_slot(chunk, [&](int32_t share, int32_t expert, int64_t i) {
      rows_[expert_block_[expert] * kRowBlock + next[share * experts_ + expert]++] = {
          static_cast<int32_t>(i / shape_.slots()), static_cast<int32_t>(i % shape_.slots())};
    });
  }

  const Shape shape_;
  const std::vector<int32_t>& clean_;
  const int32_t chunks_, shares_, lanes_, experts_;
  std::vector<int32_t> histogram_;  // [experts, chunks]
  std::vector<int32_t> expert_rows_, expert_block_;
  std::vector<RowSource> rows_;
};

}  // namespace mok::verify

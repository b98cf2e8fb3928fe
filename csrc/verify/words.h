// Cases as words apart by spaces, for the programs that answer questions. Shapes are `ranks tokens top_k local_experts
// ring_blocks minibatch_blocks`; tiles are `gate_up down hidden_grad row_grad weight_grad down_bands`; a direction is
// 0 forward, 1 backward; ids are of all ranks in turn. A sequence is `ranks blocks bands failures`, then its sites
// after their number, each `direction tokens top_k hidden` and clean ids, then the programs: of each rank the number of
// its streams, of each stream the sites of its calls after their number.
#pragma once

#include <istream>
#include <iterator>
#include <vector>

#include "verify/enumerate.h"
#include "verify/sequence.h"

namespace mok::verify {

inline int64_t next(std::istream& in) {
  int64_t value = 0;
  in >> value;
  return value;
}
inline int32_t next_int(std::istream& in) { return static_cast<int32_t>(next(in)); }

inline std::vector<int32_t> rest(std::istream& in) { return {std::istream_iterator<int32_t>(in), {}}; }

inline Shape read_shape(std::istream& in) {
  Shape s{};
  s.ranks = next(in);
  s.tokens = next(in);
  s.top_k = next(in);
  s.local_experts = next(in);
  s.ring_rows = next(in) * kRowBlock;
  s.minibatch_rows = next(in) * kRowBlock;
  s.hidden_size = s.intermediate_size = 1;
  return s;
}

inline TileCounts read_tiles(std::istream& in) {
  TileCounts tiles{};
  for (int32_t* count :
       {&tiles.gate_up, &tiles.down, &tiles.hidden_grad, &tiles.row_grad, &tiles.weight_grad, &tiles.down_bands}) {
    *count = next_int(in);
  }
  return tiles;
}

// All but its ids, which come last in a line.
inline Case read_case(std::istream& in) {
  Case c{};
  c.direction = static_cast<Direction>(next(in));
  c.save = static_cast<Save>(next(in));
  c.shape = read_shape(in);
  c.tiles = read_tiles(in);
  return c;
}

inline CallSite read_site(std::istream& in, int32_t ranks) {
  CallSite site{};
  site.direction = static_cast<Direction>(next(in));
  site.shape.ranks = ranks;
  site.shape.local_experts = 1;
  for (int64_t* size : {&site.shape.tokens, &site.shape.top_k, &site.shape.hidden_size}) *size = next(in);
  for (int64_t i = 0; i < ranks * site.shape.slots(); ++i) site.ids.push_back(next_int(in));
  return site;
}

inline Sequence read_sequence(std::istream& in) {
  Sequence s{};
  for (int32_t* number : {&s.ranks, &s.blocks, &s.bands, &s.failures}) *number = next_int(in);
  for (int64_t sites = next(in); sites > 0; --sites) s.sites.push_back(read_site(in, s.ranks));
  s.programs.resize(s.ranks);
  for (auto& streams : s.programs) {
    streams.resize(next(in));
    for (auto& calls : streams) {
      for (int64_t count = next(in); count > 0; --count) calls.push_back(next_int(in));
    }
  }
  return s;
}

}  // namespace mok::verify

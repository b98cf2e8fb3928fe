// Which bytes of which arena a rank touches in a call: regions.h seen from outside, in bytes, so that calls of
// different shapes alias. Words through which ranks meet are no part of it: they are for all to touch at any time.
#pragma once

#include "moe/arena.h"
#include "verify/sequence.h"

namespace mok::verify {

enum class Act : int32_t {
  stage,     // writes x, dy and weights into its own arena
  push_ids,  // writes its ids into a peer's
  read_ids,  // of all ranks, in its own
  pull,      // reads rows of a peer
  push,      // writes a band of columns of a peer's slots
  reduce,    // reads a band of columns of its own slots
};
inline constexpr int32_t kActs = static_cast<int32_t>(Act::reduce) + 1;
inline constexpr const char* kActNames[] = {"stages its rows", "pushes its ids", "reads ids",
                                            "pulls rows",      "pushes rows",    "reduces"};
static_assert(std::size(kActNames) == kActs);

struct Access {
  Act act;
  int32_t site;
  int32_t parity;  // of the call
  int32_t rank, peer;
  int32_t band;
};

class Footprints {
 public:
  Footprints(const Sequence& sequence, Flaw flaw);

  int32_t class_of(int32_t site) const { return class_of_[site]; }  // a number

  // Whether the two touch a common byte and one of them writes. Remembered.
  bool conflict(const Access& a, const Access& b);

 private:
  struct Span {
    int32_t arena;
    int64_t begin, end;
  };
  using Spans = std::vector<Span>;

  int32_t number(const Access& a) const;
  Spans spans_of(const Access& a) const;
  void add(Spans& spans, const Access& a, int32_t owner, int64_t begin, int64_t bytes) const;
  void add_ids(Spans& spans, const Access& a, int32_t owner, int32_t source) const;
  void add_slots(Spans& spans, const Access& a, int32_t owner, int32_t expert) const;
  void add_pulled(Spans& spans, const Access& a) const;
  void add_staged(Spans& spans, const Access& a) const;
  bool find_conflict(const Access& a, const Access& b) const;

  const Sequence& sequence_;
  Flaw flaw_;
  std::vector<ArenaClass> classes_;
  std::vector<int32_t> class_of_;
  std::vector<int8_t> known_;  // by the numbers of both: 1 they conflict, 0 they do not, -1 not asked yet
  int32_t numbers_;
};

}  // namespace mok::verify

#include "verify/footprint.h"

#include <algorithm>

namespace mok::verify {
namespace {

constexpr int64_t kItem = 2;

bool writes(Act act) { return act == Act::stage || act == Act::push_ids || act == Act::push; }

}  // namespace

Footprints::Footprints(const Sequence& sequence, Flaw flaw) : sequence_(sequence), flaw_(flaw) {
  for (const CallSite& site : sequence.sites) {
    const ArenaClass of(site.shape, kItem);
    const auto known = std::ranges::find(classes_, of);
    class_of_.push_back(static_cast<int32_t>(known - classes_.begin()));
    if (known == classes_.end()) classes_.push_back(of);
  }
  numbers_ = static_cast<int32_t>(sequence.sites.size()) * 2 * kActs * sequence.ranks * sequence.ranks * sequence.bands;
  known_.assign(int64_t{numbers_} * numbers_, -1);
}

int32_t Footprints::number(const Access& a) const {
  const int32_t ranks = sequence_.ranks, act = static_cast<int32_t>(a.act);
  return ((((a.site * 2 + a.parity) * kActs + act) * ranks + a.rank) * ranks + a.peer) * sequence_.bands + a.band;
}

bool Footprints::conflict(const Access& a, const Access& b) {
  int8_t& known = known_[int64_t{number(a)} * numbers_ + number(b)];
  if (known < 0) known = find_conflict(a, b);
  return known != 0;
}

bool Footprints::find_conflict(const Access& a, const Access& b) const {
  if (!writes(a.act) && !writes(b.act)) return false;
  const Spans of_a = spans_of(a), of_b = spans_of(b);
  return std::ranges::any_of(of_a, [&](const Span& one) {
    return std::ranges::any_of(of_b, [&](const Span& other) {
      return one.arena == other.arena && one.begin < other.end && other.begin < one.end;
    });
  });
}

Footprints::Spans Footprints::spans_of(const Access& a) const {
  Spans spans;
  switch (a.act) {
    case Act::stage:
      add_staged(spans, a);
      break;
    case Act::push_ids:
      add_ids(spans, a, a.peer, a.rank);
      break;
    case Act::read_ids:
      for (int32_t source = 0; source < sequence_.ranks; ++source) add_ids(spans, a, a.rank, source);
      break;
    case Act::pull:
      add_pulled(spans, a);
      break;
    case Act::push:
      add_slots(spans, a, a.peer, a.rank);
      break;
    case Act::reduce:  // of all experts
      for (int32_t expert = 0; expert < sequence_.ranks; ++expert) add_slots(spans, a, a.rank, expert);
      add_ids(spans, a, a.rank, a.rank);
      break;
  }
  return spans;
}

void Footprints::add(Spans& spans, const Access& a, int32_t owner, int64_t begin, int64_t bytes) const {
  const int32_t arena = owner * static_cast<int32_t>(classes_.size()) + class_of(a.site);
  spans.push_back({arena, begin, begin + bytes});
}

// The ids of `source`, for `owner` to read.
void Footprints::add_ids(Spans& spans, const Access& a, int32_t owner, int32_t source) const {
  const Shape& s = sequence_.sites[a.site].shape;
  const SharedArenaLayout at(classes_[class_of(a.site)]);
  const int64_t bytes = s.slots() * 4, behind = at.rows_begin + RowsLayout(s, kItem).bytes;
  const auto place = [&](int64_t size) { return behind + a.parity * round_up(size, RowsLayout::kAlignment); };
  if (flaw_ == Flaw::ids_in_place_by_shape) {
    if (a.act != Act::push_ids || owner == source) add(spans, a, source, place(bytes), bytes);
  } else if (flaw_ == Flaw::ids_pushed_by_shape) {
    add(spans, a, owner, place(s.ranks * bytes) + source * bytes, bytes);
  } else {
    const int64_t buffer = at.expert_ids[flaw_ == Flaw::one_buffer_of_ids ? 0 : a.parity];
    add(spans, a, owner, buffer + source * bytes, bytes);
  }
}

// Where rows of `owner` come back from an expert, and what belongs to them.
void Footprints::add_slots(Spans& spans, const Access& a, int32_t owner, int32_t expert) const {
  const CallSite& site = sequence_.sites[a.site];
  const Shape& s = site.shape;
  const RowsLayout rows(s, kItem);
  const int64_t base = SharedArenaLayout(classes_[class_of(a.site)]).rows_begin;
  const bool forward = site.direction == Direction::forward;
  const int64_t row = s.hidden_size * kItem, width = forward ? row / sequence_.bands : row;
  for (int64_t slot = 0; slot < s.slots(); ++slot) {
    if (site.ids[owner * s.slots() + slot] != expert) continue;
    add(spans, a, owner, base + rows.slots + slot * row + a.band * width, width);
    if (!forward) add(spans, a, owner, base + rows.router_grads + slot * 4, 4);
    if (forward && a.act == Act::reduce) add(spans, a, owner, base + rows.weights + slot * 4, 4);
  }
}

void Footprints::add_pulled(Spans& spans, const Access& a) const {
  const CallSite& site = sequence_.sites[a.site];
  const Shape& s = site.shape;
  const RowsLayout rows(s, kItem);
  const int64_t base = SharedArenaLayout(classes_[class_of(a.site)]).rows_begin, row = s.hidden_size * kItem;
  for (int64_t slot = 0; slot < s.slots(); ++slot) {
    if (site.ids[a.peer * s.slots() + slot] != a.rank) continue;
    add(spans, a, a.peer, base + rows.x + slot / s.top_k * row, row);
    if (site.direction == Direction::forward) continue;
    add(spans, a, a.peer, base + rows.dy + slot / s.top_k * row, row);
    add(spans, a, a.peer, base + rows.weights + slot * 4, 4);
  }
}

void Footprints::add_staged(Spans& spans, const Access& a) const {
  const CallSite& site = sequence_.sites[a.site];
  const Shape& s = site.shape;
  const RowsLayout rows(s, kItem);
  const int64_t base = SharedArenaLayout(classes_[class_of(a.site)]).rows_begin,
                bytes = s.tokens * s.hidden_size * kItem;
  add(spans, a, a.rank, base + rows.x, bytes);
  add(spans, a, a.rank, base + rows.weights, s.slots() * 4);
  if (site.direction == Direction::backward) add(spans, a, a.rank, base + rows.dy, bytes);
}

}  // namespace mok::verify

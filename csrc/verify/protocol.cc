#include "verify/protocol.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>
#include <unordered_set>

#include "moe/meeting.h"
#include "verify/footprint.h"

namespace mok::verify {
namespace {

constexpr int32_t kRanks = 3, kStreams = 2, kBlocks = 2, kGroups = 2, kClasses = 2;  // at most

// All numbers are bytes, so that equal states have equal bytes. Sets of ranks are bits.
using Byte = uint8_t;

// The words of a Meeting.
struct Words {
  Byte call, busy, cancelled;
  Byte entered[kRanks], hash[kRanks][2];
  Byte arrived[kGroups], before[kGroups];
};

// Where a CTA of the schedule kernel is.
enum Place : Byte { kBegin, kClaim, kFill, kBarrier, kMeet, kRead, kSecondBarrier, kDone, kLeft };
// What a stream runs: the schedule kernel; nothing, as it has ended; the layer's kernel; the kernel that only cancels.
enum Phase : Byte { kSchedule, kBetween, kLayer, kAbort };

struct Stream {
  Byte ended;   // calls
  Byte failed;  // one of them has
  Byte phase;
  Byte number;                        // of the call; 0: it has none yet
  Byte place[kBlocks], met[kBlocks];  // peers
  Byte at_barrier;
  Byte hashed, entered;    // peers that have been told which call this is, and that it has begun
  Byte notified[kGroups];  // peers that have their rows back
  Byte raising;            // peers that are still to be cancelled
};

struct State {
  Words words[kRanks][kClasses];  // one Meeting of a rank is used, unless a flaw has one of each class
  Stream streams[kRanks][kStreams];
  Byte told[kRanks];  // the host has learnt of a failure
  Byte failures;      // so far

  bool operator==(const State& other) const { return std::memcmp(this, &other, sizeof(State)) == 0; }
};
static_assert(std::has_unique_object_representations_v<State>);

struct StateHash {
  size_t operator()(const State& s) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&s), sizeof(State)});
  }
};

bool in(Byte set, int32_t rank) { return set >> rank & 1; }
Byte bit(int32_t rank) { return static_cast<Byte>(1 << rank); }

class Explorer {
 public:
  Explorer(const Sequence& sequence, Flaw flaw)
      : sequence_(sequence),
        flaw_(flaw),
        footprints_(sequence, flaw),
        all_(static_cast<Byte>((1 << sequence.ranks) - 1)) {
    for (const CallSite& site : sequence.sites) {
      for (int32_t rank = 0; rank < sequence.ranks; ++rank) {
        const auto of_rank = site.ids.begin() + rank * site.shape.slots();
        for (int32_t expert = 0; expert < sequence.ranks; ++expert) {
          rows_.push_back(static_cast<int32_t>(std::count(of_rank, of_rank + site.shape.slots(), expert)));
        }
      }
    }
  }

  Exploration explore() {
    visit(State{});
    found_.states = static_cast<int64_t>(seen_.size());
    for (const Step& step : path_) found_.steps.push_back(describe(step));
    return std::move(found_);
  }

 private:
  // Which step of whom, for the report.
  struct Step {
    int32_t rank, stream;
    const char* what;
    int32_t peer;  // or -1
  };

  // ---- The search.

  void visit(const State& s) {
    if (!seen_.insert(s).second) return;
    if (find_wrong_access(s)) return;
    bool moves = false, over = true;
    for (int32_t rank = 0; rank < sequence_.ranks; ++rank) {
      for (int32_t stream = 0; stream < streams(rank); ++stream) {
        moves |= Turn(*this, s, rank, stream).take_all();
        if (!found_.error.empty()) return;
        over &= ended(s.streams[rank][stream], rank, stream);
      }
    }
    if (over) {
      find_wrong_end(s);
    } else if (!moves) {
      found_.error = "nothing can happen any more:" + describe_waits(s);
    }
  }

  // Goes on with a state after a step; false: an error has been found, and the path to it stays.
  void follow(const Step& step, const State& next) {
    if (!found_.error.empty()) return;
    path_.push_back(step);
    visit(next);
    if (found_.error.empty()) path_.pop_back();
  }

  void find_wrong_end(const State& s) {
    for (int32_t rank = 0; rank < sequence_.ranks; ++rank) {
      for (int32_t stream = 0; stream < streams(rank); ++stream) {
        if (!s.streams[rank][stream].failed || s.told[rank]) continue;
        found_.error = "the host of rank " + std::to_string(rank) + " has not learnt that a call has failed";
      }
    }
  }

  // ---- Accesses that can happen in a state.

  struct Active {
    int32_t stream;
    Access access;
  };

  bool find_wrong_access(const State& s) {
    active_.clear();
    int32_t least = 255, most = 0;
    for (int32_t rank = 0; rank < sequence_.ranks; ++rank) {
      for (int32_t stream = 0; stream < streams(rank); ++stream) add_active(s, rank, stream);
      if (s.words[rank][0].cancelled) continue;
      const int32_t call = last_begun(s, rank);
      least = std::min(least, call);
      most = std::max(most, call);
    }
    found_.furthest_ahead = std::max(found_.furthest_ahead, most - least);
    for (const Active& a : active_) {
      for (const Active& b : active_) {
        if (a.access.rank == b.access.rank && a.stream == b.stream) break;
        if (!footprints_.conflict(a.access, b.access)) continue;
        found_.error = describe(a) + " while " + describe(b);
        return true;
      }
    }
    return false;
  }

  static int32_t last_begun(const State& s, int32_t rank) {
    int32_t call = s.words[rank][0].call;
    for (const Stream& of : s.streams[rank]) call = std::max<int32_t>(call, of.number);
    return call;
  }

  void add_active(const State& s, int32_t rank, int32_t stream) {
    const Stream& of = s.streams[rank][stream];
    if (ended(of, rank, stream)) return;
    const auto add = [&](Act act, int32_t peer, int32_t band) {
      const Access access{act, site_of(of, rank, stream), parity_of(of.number), rank, peer, band};
      active_.push_back({stream, access});
    };
    if (of.phase == kSchedule) {
      const auto somewhere = [&](Place first, Place last) {
        return std::any_of(of.place, of.place + sequence_.blocks, [&](Byte p) { return first <= p && p <= last; });
      };
      const auto filling = [&](Flaw late) { return somewhere(kFill, flaw_ == late ? kMeet : kFill); };
      if (filling(Flaw::enter_before_staging)) add(Act::stage, rank, 0);
      for (int32_t peer = 0; filling(Flaw::enter_before_ids) && peer < sequence_.ranks; ++peer) {
        if (peer == rank || forward(of, rank, stream)) add(Act::push_ids, peer, 0);
      }
      if (somewhere(kRead, kRead)) add(Act::read_ids, rank, 0);
    } else if (of.phase == kLayer) {
      add_active_of_layer(s, rank, stream, add);
    }
  }

  template <class Add>
  void add_active_of_layer(const State& s, int32_t rank, int32_t stream, const Add& add) const {
    const Stream& of = s.streams[rank][stream];
    for (int32_t peer = 0; peer < sequence_.ranks; ++peer) {
      if (rows(of, rank, stream, peer) == 0) continue;
      if (!in(of.notified[0], peer) || flaw_ == Flaw::notify_before_pulled) add(Act::pull, peer, 0);
      for (int32_t band = 0; band < bands(of, rank, stream); ++band) {
        if (!in(of.notified[band], peer) || flaw_ == Flaw::notify_before_pushed) add(Act::push, peer, band);
      }
    }
    for (int32_t band = 0; band < bands(of, rank, stream); ++band) {
      if (all_arrived(s, rank, stream, band)) add(Act::reduce, rank, band);
    }
  }

  // ---- What a stream is at.

  int32_t streams(int32_t rank) const { return static_cast<int32_t>(sequence_.programs[rank].size()); }
  const std::vector<int32_t>& program(int32_t rank, int32_t stream) const { return sequence_.programs[rank][stream]; }
  bool ended(const Stream& of, int32_t rank, int32_t stream) const { return of.ended == program(rank, stream).size(); }
  int32_t site_of(const Stream& of, int32_t rank, int32_t stream) const { return program(rank, stream)[of.ended]; }
  bool forward(const Stream& of, int32_t rank, int32_t stream) const {
    return sequence_.sites[site_of(of, rank, stream)].direction == Direction::forward;
  }
  int32_t bands(const Stream& of, int32_t rank, int32_t stream) const {
    return forward(of, rank, stream) ? sequence_.bands : 1;
  }
  // Of a peer, that this rank's expert has.
  int32_t rows(const Stream& of, int32_t rank, int32_t stream, int32_t peer) const {
    return rows_[(site_of(of, rank, stream) * sequence_.ranks + peer) * sequence_.ranks + rank];
  }
  int32_t own_slots(const Stream& of, int32_t rank, int32_t stream) const {
    const auto first = rows_.begin() + (site_of(of, rank, stream) * sequence_.ranks + rank) * sequence_.ranks;
    int32_t sum = 0;
    for (auto i = first; i < first + sequence_.ranks; ++i) sum += *i;
    return sum;
  }
  int32_t meeting(int32_t site) const { return flaw_ == Flaw::enter_by_class ? footprints_.class_of(site) : 0; }
  int32_t cancelling(int32_t site) const { return flaw_ == Flaw::cancel_by_class ? footprints_.class_of(site) : 0; }

  bool all_arrived(const State& s, int32_t rank, int32_t stream, int32_t band) const {
    const Stream& of = s.streams[rank][stream];
    const Words& words = s.words[rank][meeting(site_of(of, rank, stream))];
    return words.arrived[band] - words.before[band] >= own_slots(of, rank, stream);
  }
  bool all_notified(const Stream& of, int32_t rank, int32_t stream) const {
    for (int32_t peer = 0; peer < sequence_.ranks; ++peer) {
      if (rows(of, rank, stream, peer) == 0) continue;
      for (int32_t band = 0; band < bands(of, rank, stream); ++band) {
        if (!in(of.notified[band], peer)) return false;
      }
    }
    return true;
  }

  // Which call site is a rank's call of this number, by its program; -1: none, or a matter of chance.
  int32_t site_of_number(int32_t rank, int32_t number, int32_t meeting_place) const {
    if (streams(rank) > 1) return -1;
    for (int32_t site : program(rank, 0)) {
      if (meeting(site) == meeting_place && --number == 0) return site;
    }
    return -1;
  }

  // ---- One stream's steps from a state.

  class Turn {
   public:
    Turn(Explorer& explorer, const State& state, int32_t rank, int32_t stream)
        : e_(explorer), s_(state), rank_(rank), stream_(stream), of_(state.streams[rank][stream]) {}

    // Takes each step that is possible and comes back; whether there was one that is no failure.
    bool take_all() {
      if (e_.ended(of_, rank_, stream_)) return false;
      site_ = e_.site_of(of_, rank_, stream_);
      raise();
      if (of_.phase == kSchedule) schedule();
      if (of_.phase == kBetween) between();
      if (of_.phase == kLayer) layer();
      if (of_.phase == kAbort && !of_.raising) end_program("has aborted");
      return moved_;
    }

   private:
    bool flaw(Flaw flaw) const { return e_.flaw_ == flaw; }
    const Words& words() const { return s_.words[rank_][e_.meeting(site_)]; }
    bool cancelled() const { return s_.words[rank_][e_.cancelling(site_)].cancelled; }
    Byte others() const { return e_.all_ & ~bit(rank_); }
    Byte token() const { return static_cast<Byte>(stream_ + 1); }

    // What may be changed by a step: the stream, its rank's words and the peers'.
    struct Change {
      State s;
      Stream& of;
      Words& words;
      Change(const Turn& t)
          : s(t.s_), of(s.streams[t.rank_][t.stream_]), words(s.words[t.rank_][t.e_.meeting(t.site_)]) {}
      Change(const Change&) = delete;
    };

    template <class Make>
    void step(const char* what, int32_t peer, const Make& make) {
      Change change(*this);
      make(change);
      moved_ = true;
      e_.follow({rank_, stream_, what, peer}, change.s);
    }

    // ---- Failing.

    void fail(Change& change) const {
      Byte& cancelled = change.s.words[rank_][e_.cancelling(site_)].cancelled;
      change.s.told[rank_] = 1;
      if (cancelled) return;  // by a peer, who raises it everywhere
      cancelled = 1;
      if (!flaw(Flaw::cancel_own_rank)) change.of.raising = others();
    }

    // A failure that comes from outside; it is nothing to rely on.
    template <class Make>
    void may_fail(const char* what, const Make& make) {
      if (s_.failures == e_.sequence_.failures) return;
      Change change(*this);
      ++change.s.failures;
      make(change);
      e_.follow({rank_, stream_, what, -1}, change.s);
    }
    void may_time_out(const char* what) {
      if (!cancelled()) may_fail(what, [&](Change& change) { fail(change); });
    }
    void host_may_fail() {
      may_fail("has an error of its host", [&](Change& change) {
        change.s.told[rank_] = 1;
        change.of.failed = 1;
        change.of.phase = kAbort;
        if (!flaw(Flaw::no_abort)) fail(change);
      });
    }

    void raise() {
      for (int32_t peer = 0; peer < e_.sequence_.ranks; ++peer) {
        if (!in(of_.raising, peer)) continue;
        step("cancels rank", peer, [&](Change& change) {
          change.of.raising &= ~bit(peer);
          change.s.words[peer][e_.cancelling(site_)].cancelled = 1;
        });
      }
    }

    void end_program(const char* what) {
      step(what, -1, [&](Change& change) {
        change.of = {};
        change.of.ended = static_cast<Byte>(e_.program(rank_, stream_).size());
        change.of.failed = 1;
      });
    }

    // ---- The schedule kernel.

    void schedule() {
      const Byte* end = of_.place + e_.sequence_.blocks;
      if (std::all_of(of_.place, end, [](Byte p) { return p == kBegin; })) {  // perhaps it is not launched yet
        if (s_.told[rank_]) end_program("is refused by its host");
        host_may_fail();
      }
      for (int32_t block = 0; block < e_.sequence_.blocks; ++block) run_block(block);
      if (!of_.raising && std::all_of(of_.place, end, [](Byte p) { return p >= kDone; })) {
        step("ends its schedule kernel", -1, [](Change& change) { change.of.phase = kBetween; });
      }
    }

    void go(int32_t block, const char* what, Place place) {
      step(what, -1, [&](Change& change) { change.of.place[block] = place; });
    }

    void run_block(int32_t block) {
      switch (of_.place[block]) {
        case kBegin:
          return begin(block);
        case kClaim:
          return step("takes the busy word", -1, [&](Change& change) { claim(change, block); });
        case kFill:
          return filled(block);
        case kBarrier:
          return wait_at_barrier(block, 1, kMeet);
        case kMeet:
          if (block == 0) enter();
          return meet(block);
        case kRead:
          if (e_.sequence_.blocks == 1) return go(block, "has read ids", kDone);
          return arrive(block, "has read ids", kSecondBarrier);
        case kSecondBarrier:
          return wait_at_barrier(block, 2, kDone);
        default:
          return;
      }
    }

    void claim(Change& change, int32_t block) const {
      change.words.busy = token();
      change.of.number = change.words.call + 1;
      change.of.place[block] = kFill;
    }

    void begin(int32_t block) {
      if (cancelled() && !flaw(Flaw::cancel_ignored_at_entry)) return go(block, "leaves at once", kLeft);
      const bool looks = !flaw(Flaw::busy_ignored) && (block == 0 || !flaw(Flaw::busy_seen_by_one_block));
      if (looks && words().busy != 0 && words().busy != token()) {
        return step("finds the device busy", -1, [&](Change& change) {
          fail(change);
          change.of.place[block] = kLeft;
        });
      }
      if (flaw(Flaw::busy_not_atomic)) return go(block, "finds the device free", kClaim);
      step("begins", -1, [&](Change& change) { claim(change, block); });
    }

    void filled(int32_t block) {
      if (flaw(Flaw::backward_does_not_meet) && !e_.forward(of_, rank_, stream_)) {
        return go(block, "has filled its arena", kDone);
      }
      if (e_.sequence_.blocks == 1) return go(block, "has filled its arena", kMeet);
      arrive(block, "has filled its arena", kBarrier);
    }

    void arrive(int32_t block, const char* what, Place place) {
      step(what, -1, [&](Change& change) {
        change.of.place[block] = place;
        ++change.of.at_barrier;
      });
    }

    void wait_at_barrier(int32_t block, int32_t number, Place next) {
      if (of_.at_barrier >= number * e_.sequence_.blocks) return go(block, "passes a barrier", next);
      may_time_out("runs out of time at a barrier");
      if (cancelled() && !flaw(Flaw::cancel_ignored_in_barrier)) go(block, "leaves a barrier", kLeft);
    }

    // Tells every peer.
    void enter() {
      const bool late = flaw(Flaw::hash_after_entry);
      for (int32_t peer = 0; peer < e_.sequence_.ranks; ++peer) {
        if (peer == rank_) continue;
        const bool hashed = in(of_.hashed, peer), entered = in(of_.entered, peer);
        if (!hashed && (!late || entered)) {
          step("tells its call to rank", peer, [&](Change& change) {
            change.of.hashed |= bit(peer);
            const int32_t place = flaw(Flaw::one_hash) ? 0 : parity_of(of_.number);
            change.s.words[peer][e_.meeting(site_)].hash[rank_][place] = static_cast<Byte>(site_ + 1);
          });
        }
        if (!entered && (late || hashed)) {
          step("enters at rank", peer, [&](Change& change) {
            change.of.entered |= bit(peer);
            change.s.words[peer][e_.meeting(site_)].entered[rank_] = of_.number;
          });
        }
      }
    }

    // The ranks that this one waits for, one after the other: the order does not matter, as words only grow.
    void meet(int32_t block) {
      const int32_t peers = e_.sequence_.ranks - 1 - (flaw(Flaw::meet_not_all) ? 1 : 0), met = of_.met[block];
      const bool told = block > 0 || (of_.entered == others() && of_.hashed == others());
      if (cancelled() && told && !flaw(Flaw::cancel_ignored_in_meet)) go(block, "leaves the meeting", kLeft);
      if (met == peers) {
        if (told) go(block, "has met all", e_.forward(of_, rank_, stream_) ? kRead : kDone);
        return;
      }
      const int32_t peer = (rank_ + 1 + met) % e_.sequence_.ranks;
      const int32_t number = of_.number - (flaw(Flaw::meet_previous_call) ? 1 : 0);
      if (words().entered[peer] < number) return may_time_out("runs out of time in the meeting");
      compare_calls(block, peer);
    }

    void compare_calls(int32_t block, int32_t peer) {
      const int32_t place = flaw(Flaw::one_hash) ? 0 : parity_of(of_.number);
      const bool same = words().hash[peer][place] == site_ + 1 || flaw(Flaw::hash_not_compared);
      const int32_t truth = e_.site_of_number(peer, of_.number, e_.meeting(site_));
      if (truth >= 0 && same != (truth == site_)) {
        return e_.report(same ? "another call passes for the same: rank " : "the same call passes for another: rank ",
                         rank_);
      }
      if (same) return step("meets rank", peer, [&](Change& change) { ++change.of.met[block]; });
      step("finds in another call rank", peer, [&](Change& change) {
        fail(change);
        change.of.place[block] = kLeft;
        change.of.entered = change.of.hashed = others();  // a thread a peer: no other one is kept from telling
      });
    }

    // ---- The layer's kernel.

    void between() {
      host_may_fail();
      if (cancelled()) return depart("leaves before the layer");
      step("begins its layer", -1, [&](Change& change) {
        change.of.phase = kLayer;
        if (flaw(Flaw::settle_when_met)) settle(change.words);
      });
    }

    void settle(Words& words) const { std::copy(words.arrived, words.arrived + kGroups, words.before); }

    void layer() {
      bool over = e_.all_notified(of_, rank_, stream_);
      for (int32_t band = 0; band < e_.bands(of_, rank_, stream_); ++band) {
        notify(band);
        const bool needed = band == 0 || !flaw(Flaw::leave_before_last_band);
        over &= !needed || e_.all_arrived(s_, rank_, stream_, band);
      }
      if (over) return depart("leaves the call");
      may_time_out("runs out of time in a task");
      if (cancelled() && !flaw(Flaw::cancel_ignored_in_tasks)) depart("leaves its tasks");
    }

    void notify(int32_t band) {
      for (int32_t peer = 0; peer < e_.sequence_.ranks; ++peer) {
        const int32_t rows = e_.rows(of_, rank_, stream_, peer);
        if (rows == 0 || in(of_.notified[band], peer)) continue;
        if (band > 0 && !in(of_.notified[band - 1], peer)) continue;
        step("notifies rank", peer, [&](Change& change) {
          change.of.notified[band] |= bit(peer);
          Byte& arrived = change.s.words[peer][e_.meeting(site_)].arrived[band];
          arrived = static_cast<Byte>(arrived + rows);
        });
      }
    }

    void depart(const char* what) {
      if (of_.raising) return;
      const bool good = !cancelled();
      if (good && of_.failed) return e_.report("a call ends well after one that has failed: rank ", rank_);
      step(what, -1, [&](Change& change) {
        if (!good && !flaw(Flaw::host_not_told)) change.s.told[rank_] = 1;
        if (of_.number > 0) leave_words(change);
        change.of = {};
        change.of.ended = of_.ended + 1;
        change.of.failed = of_.failed | !good;
      });
    }

    void leave_words(Change& change) const {
      if (!flaw(Flaw::settle_when_met) && !flaw(Flaw::never_settle)) settle(change.words);
      change.words.call = of_.number;
      if (change.words.busy == token()) change.words.busy = 0;
      if (flaw(Flaw::cancel_forgotten)) change.s.words[rank_][e_.cancelling(site_)].cancelled = 0;
    }

    Explorer& e_;
    const State& s_;
    const int32_t rank_, stream_;
    const Stream& of_;
    int32_t site_ = 0;
    bool moved_ = false;
  };

  // ---- Reports.

  void report(const char* what, int32_t rank) {
    if (found_.error.empty()) found_.error = what + std::to_string(rank);
  }

  std::string name(int32_t rank, int32_t stream) const {
    return "rank " + std::to_string(rank) + (streams(rank) > 1 ? ", stream " + std::to_string(stream) : "");
  }
  std::string describe(const Step& step) const {
    const std::string peer = step.peer < 0 ? "" : " " + std::to_string(step.peer);
    return name(step.rank, step.stream) + " " + step.what + peer;
  }
  std::string describe(const Active& a) const {
    const bool of_peer = a.access.peer != a.access.rank;
    return name(a.access.rank, a.stream) + " " + kActNames[static_cast<int32_t>(a.access.act)] +
           (of_peer ? ", rank " + std::to_string(a.access.peer) + "'s" : "") + " of site " +
           std::to_string(a.access.site);
  }
  std::string describe_waits(const State& s) const {
    constexpr const char* kPhases[] = {"schedules", "is between two kernels", "runs tasks", "aborts"};
    std::string text;
    for (int32_t rank = 0; rank < sequence_.ranks; ++rank) {
      for (int32_t stream = 0; stream < streams(rank); ++stream) {
        const Stream& of = s.streams[rank][stream];
        text += " " + name(rank, stream) + " ";
        text += ended(of, rank, stream) ? "has ended;" : std::string(kPhases[of.phase]) + ";";
      }
    }
    return text;
  }

  const Sequence& sequence_;
  const Flaw flaw_;
  Footprints footprints_;
  const Byte all_;
  std::vector<int32_t> rows_;  // [sites, source ranks, experts]
  std::unordered_set<State, StateHash> seen_;
  std::vector<Step> path_;
  std::vector<Active> active_;
  Exploration found_;
};

}  // namespace

Exploration explore(const Sequence& sequence, Flaw flaw) { return Explorer(sequence, flaw).explore(); }

}  // namespace mok::verify

// Answers questions about csrc/moe over a pipe, for tests in Python: one question a line, words apart by spaces, and
// one line of JSON back. Shapes, tiles, directions and ids as in words.h.
//
//   enumerate direction save SHAPE TILES shared communication_workers compute_workers seed IDS
//   mutate    direction save SHAPE TILES IDS
//   program   direction save SHAPE TILES IDS  -> the task lists of all ranks, each communication, then compute
//   rows      rank SHAPE IDS                  -> the row table of a rank
//   chunked   rank SHAPE chunks shares lanes seed IDS -> the same, of chunks that were counted and written in any order
//   macrobatches ring_blocks EXPERT_BLOCKS    -> where they are cut
//   bounds    SHAPE                           -> what is known before any token is routed
//   arena     SHAPE hidden item_bytes         -> byte offsets
//   shared_arena SHAPE hidden item_bytes      -> its class, and byte offsets in that class's arena
//   flaws                                     -> names of the ways in which the protocol between calls may be wrong
//   protocol  flaw SEQUENCE                   -> the first error among all states that the sequence can reach
//   ticket    direction communication ticket TILES ring_blocks minibatch_blocks EXPERT_ROWS -> one task of one rank
#include <algorithm>
#include <iostream>
#include <numeric>
#include <sstream>

#include "moe/arena.h"
#include "verify/chunks.h"
#include "verify/mutate.h"
#include "verify/order.h"
#include "verify/protocol.h"
#include "verify/words.h"

namespace mok::verify {
namespace {

template <class Values>
std::string list_of(const Values& values) {
  std::string text = "[";
  for (const auto& value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}
std::string quoted(const std::string& text) { return "\"" + text + "\""; }

// The hardest machines and the one that the case names; then everything that can be said about the order.
std::string find_error(const JointProgram& program, const Machine& machine) {
  if (const std::string wrong = program.find_wrong_task(); !wrong.empty()) return wrong;
  const Run hardest = run(program, {machine.shared, 1, 1, machine.seed});
  const Run in_pairs = run(program, {machine.shared, 1, 1, machine.seed, true});
  for (const Run& r : {hardest, in_pairs, run(program, machine)}) {
    if (!r.deadlock.empty()) return "deadlock: " + r.deadlock;
    if (r.order.size() != program.nodes().size()) return "a list ended early";
  }
  const Accesses accesses(program);
  if (const std::string wrong = accesses.find_wrong_result(); !wrong.empty()) return wrong;
  return accesses.find_conflict(HappensBefore(program, hardest.order), hardest.order);
}

std::string enumerate(std::istream& in) {
  Case c = read_case(in);
  Machine machine;
  machine.shared = next(in) != 0;
  machine.communication_workers = next_int(in);
  machine.compute_workers = next_int(in);
  machine.seed = static_cast<uint64_t>(next(in));
  c.ids = rest(in);
  const JointProgram program(c);
  int32_t macrobatches = 0;
  for (const auto& r : program.ranks()) macrobatches = larger(macrobatches, r->plan.macrobatches);
  return "{\"tasks\": " + std::to_string(program.nodes().size()) +
         ", \"macrobatches\": " + std::to_string(macrobatches) +
         ", \"error\": " + quoted(find_error(program, machine)) + "}";
}

std::string mutate(std::istream& in) {
  Case c = read_case(in);
  c.ids = rest(in);
  JointProgram program(c);
  std::string text;
  for (const auto& [rule, tally] : try_mutations(program)) {
    text += (text.empty() ? "" : ", ") + quoted(rule) + ": {\"caught\": " + std::to_string(tally.caught) +
            ", \"implied\": " + std::to_string(tally.implied) + ", \"unchanged\": " + std::to_string(tally.unchanged) +
            ", \"unread\": " + std::to_string(tally.unread) + ", \"missed\": " + std::to_string(tally.missed) + "}";
  }
  return "{" + text + "}";
}

// "[family, index, amount, rank]" of a counter.
std::string counter_of(const JointProgram& program, int32_t counter, int32_t amount) {
  const auto [rank, family, index] = program.name(counter);
  return "[" + quoted(kCounterNames[static_cast<int>(family)]) + ", " + std::to_string(index) + ", " +
         std::to_string(amount) + ", " + std::to_string(rank) + "]";
}

std::string task_of(const JointProgram& program, const Node& node) {
  const Task& t = node.task;
  std::string waits, signals;
  for (const Wait& wait : node.waits) {
    waits += (waits.empty() ? "" : ", ") + counter_of(program, wait.counter, wait.target);
  }
  for (const Signal& signal : node.signals) {
    signals += (signals.empty() ? "" : ", ") + counter_of(program, signal.counter, signal.amount);
  }
  return "{\"kind\": " + quoted(kTaskNames[static_cast<int>(t.kind)]) +
         ", \"macrobatch\": " + std::to_string(t.macrobatch) + ", \"block\": " + std::to_string(t.block) +
         ", \"blocks\": " + std::to_string(t.blocks) + ", \"expert\": " + std::to_string(t.expert) +
         ", \"part\": " + std::to_string(t.part) + ", \"waits\": [" + waits + "], \"signals\": [" + signals + "]}";
}

std::string program(std::istream& in) {
  Case c = read_case(in);
  c.ids = rest(in);
  const JointProgram joint(c);
  std::string text;
  for (int32_t list = 0; list < 2 * static_cast<int32_t>(joint.ranks().size()); ++list) {
    std::string tasks;
    for (int32_t i = joint.list(list).begin; i < joint.list(list).end; ++i) {
      tasks += (tasks.empty() ? "" : ", ") + task_of(joint, joint.nodes()[i]);
    }
    text += (text.empty() ? "[" : ", [") + tasks + "]";
  }
  return "[" + text + "]";
}

std::string columns_of(const std::vector<RowSource>& rows) {
  std::vector<int32_t> ranks, slots;
  for (const RowSource& row : rows) {
    ranks.push_back(row.rank);
    slots.push_back(row.slot);
  }
  return "\"row_rank\": " + list_of(ranks) + ", \"row_slot\": " + list_of(slots);
}

std::string rows(std::istream& in) {
  const int64_t rank = next(in);
  Case c{};
  c.shape = read_shape(in);
  c.ids = rest(in);
  const JointProgram program(c);
  const RankPlan& r = *program.ranks()[rank];
  return "{" + columns_of(r.rows) + ", \"expert_rows\": " + list_of(r.expert_rows) +
         ", \"expert_block\": " + list_of(r.expert_block) + ", \"valid_slots\": " + std::to_string(r.plan.valid_slots) +
         "}";
}

std::string chunked(std::istream& in) {
  const int64_t rank = next(in);
  Shape s = read_shape(in);
  s.rank = rank;
  const int32_t chunks = next_int(in), shares = next_int(in), lanes = next_int(in);
  const auto seed = static_cast<uint64_t>(next(in));
  return "{" + columns_of(ChunkedTable(s, rest(in), chunks, shares, lanes).build(seed)) + "}";
}

std::vector<int32_t> cuts_of(const std::vector<int32_t>& expert_block, int32_t ring_blocks) {
  std::vector<int32_t> cuts(2 * (expert_block.back() / ring_blocks) + 2);
  const int32_t experts = static_cast<int32_t>(expert_block.size()) - 1;
  cuts.resize(cut_macrobatches(expert_block.data(), experts, ring_blocks, cuts.data()) + 1);
  return cuts;
}

std::string macrobatches(std::istream& in) {
  const int32_t ring_blocks = next_int(in);
  return list_of(cuts_of(rest(in), ring_blocks));
}

std::string bounds(std::istream& in) {
  const Shape s = read_shape(in);
  return "{\"max_rows\": " + std::to_string(max_rows(s)) +
         ", \"default_ring_rows\": " + std::to_string(default_ring_rows(s)) +
         ", \"max_macrobatches\": " + std::to_string(max_macrobatches(s)) + "}";
}

std::string arena(std::istream& in) {
  Shape s = read_shape(in);
  s.hidden_size = next(in);
  const ArenaLayout at(s, next(in));
  return list_of(std::vector<int64_t>{at.x, at.dy, at.slots, at.weights, at.router_grads, at.expert_ids, at.bytes});
}

std::string shared_arena(std::istream& in) {
  Shape s = read_shape(in);
  s.hidden_size = next(in);
  const ArenaClass of(s, next(in));
  const SharedArenaLayout at(of);
  return list_of(std::vector<int64_t>{of.ids, of.rows, at.expert_ids[0], at.expert_ids[1], at.rows_begin, at.bytes});
}

std::string flaws(std::istream&) {
  std::string text;
  for (const char* name : kFlawNames) text += (text.empty() ? "" : ", ") + quoted(name);
  return "[" + text + "]";
}

std::string protocol(std::istream& in) {
  std::string name;
  in >> name;
  const auto flaw = std::ranges::find(kFlawNames, name) - std::begin(kFlawNames);
  if (flaw == std::size(kFlawNames)) return "{\"error\": " + quoted("no such flaw: " + name) + "}";
  const Exploration found = explore(read_sequence(in), static_cast<Flaw>(flaw));
  std::string steps;
  for (const std::string& step : found.steps) steps += (steps.empty() ? "" : ", ") + quoted(step);
  return "{\"states\": " + std::to_string(found.states) +
         ", \"furthest_ahead\": " + std::to_string(found.furthest_ahead) + ", \"error\": " + quoted(found.error) +
         ", \"steps\": [" + steps + "]}";
}

std::string ticket(std::istream& in) {
  const auto direction = static_cast<Direction>(next(in));
  const bool communication = next(in) != 0;
  const int64_t number = next(in);
  const TileCounts tiles = read_tiles(in);
  Shape s{};
  s.ranks = s.top_k = 1;
  s.ring_rows = next(in) * kRowBlock;
  s.minibatch_rows = next(in) * kRowBlock;
  const std::vector<int32_t> expert_rows = rest(in);
  s.local_experts = static_cast<int64_t>(expert_rows.size());
  s.tokens = std::accumulate(expert_rows.begin(), expert_rows.end(), int64_t{0});
  std::vector<int32_t> expert_block(s.local_experts + 1), macro_block(max_macrobatches(s) + 1);
  place_experts(static_cast<int32_t>(s.local_experts), expert_rows.data(), expert_block.data());
  Plan p;
  make_plan(s, tiles, Save::pre_activations, 1, expert_rows.data(), expert_block.data(), macro_block.data(), p);
  p.token_blocks = 1;  // so that a list ends with one task of each band
  const TaskLists lists(direction, s, p);
  const TaskList& list = communication ? lists.communication() : lists.compute();
  const Task t = lists.task(list, number < 0 ? list.tasks + number : number);
  return "{\"tasks\": " + std::to_string(list.tasks) + ", \"kind\": " + quoted(kTaskNames[static_cast<int>(t.kind)]) +
         ", \"macrobatch\": " + std::to_string(t.macrobatch) + ", \"block\": " + std::to_string(t.block) +
         ", \"expert\": " + std::to_string(t.expert) + ", \"part\": " + std::to_string(t.part) +
         ", \"ring_row\": " + std::to_string(p.ring_block(t.block) * kRowBlock) + "}";
}

std::string answer(const std::string& line) {
  std::istringstream in(line);
  std::string question;
  in >> question;
  const struct {
    const char* name;
    std::string (*answer)(std::istream&);
  } questions[] = {{"enumerate", enumerate}, {"mutate", mutate},
                   {"program", program},     {"rows", rows},
                   {"chunked", chunked},     {"macrobatches", macrobatches},
                   {"bounds", bounds},       {"arena", arena},
                   {"ticket", ticket},       {"shared_arena", shared_arena},
                   {"flaws", flaws},         {"protocol", protocol}};
  for (const auto& known : questions) {
    if (question == known.name) return known.answer(in);
  }
  return "{\"error\": " + quoted("no such question: " + question) + "}";
}

}  // namespace
}  // namespace mok::verify

int main() {
  for (std::string line; std::getline(std::cin, line);) std::cout << mok::verify::answer(line) << std::endl;
}

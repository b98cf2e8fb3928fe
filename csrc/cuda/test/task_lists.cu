// Compares what a device makes of the algorithm with what the host does: tables and every task of every rank, field by
// field. Cases come one a line, `direction save SHAPE TILES IDS` as in csrc/verify/words.h. One line back: the number
// of tasks, or the first difference.
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "cuda/test/algorithm.h"
#include "verify/words.h"

namespace mok::cuda::test {
namespace {

using verify::Case;
using verify::JointProgram;
using verify::RankPlan;

// A mismatch that ends the comparison.
void expect_equal(const std::string& what, int64_t device, int64_t host) {
  if (device == host) return;
  throw std::runtime_error(what + " is " + std::to_string(device) + " on the device, " + std::to_string(host) +
                           " on the host");
}

void expect_equal(const std::string& what, const std::vector<int32_t>& device, const int32_t* host, size_t count) {
  expect_equal("size of " + what, device.size(), count);
  for (size_t i = 0; i < count; ++i) expect_equal(what + "[" + std::to_string(i) + "]", device[i], host[i]);
}

void compare(const std::string& what, const Task& device, const Task& host) {
  const auto field = [&](const std::string& name, int64_t a, int64_t b) { expect_equal(name + " of " + what, a, b); };
  field("kind", static_cast<int64_t>(device.kind), static_cast<int64_t>(host.kind));
  field("macrobatch", device.macrobatch, host.macrobatch);
  field("block", device.block, host.block);
  field("blocks", device.blocks, host.blocks);
  field("expert", device.expert, host.expert);
  field("part", device.part, host.part);
  field("place in its run", device.in_run, host.in_run);
  field("run", device.run, host.run);
  field("number of waits", device.wait_count, host.wait_count);
  for (int32_t i = 0; i < host.wait_count; ++i) {
    field("counter " + std::to_string(i), device.waits[i].counter, host.waits[i].counter);
    field("target " + std::to_string(i), device.waits[i].target, host.waits[i].target);
  }
  field("number of signals", device.signal_count, host.signal_count);
  for (int32_t i = 0; i < host.signal_count; ++i) {
    field("signal " + std::to_string(i), device.signals[i], host.signals[i]);
  }
}

void compare_list(const std::string& what, const std::vector<Task>& device, const JointProgram& host, Range nodes) {
  expect_equal("number of " + what, device.size(), nodes.end - nodes.begin);
  for (size_t ticket = 0; ticket < device.size(); ++ticket) {
    compare(what + " " + std::to_string(ticket), device[ticket], host.nodes()[nodes.begin + ticket].task);
  }
}

// All of one rank. Returns the number of its tasks.
int64_t compare_rank(const Case& c, const JointProgram& host, int32_t rank) {
  const RankPlan& r = *host.ranks()[rank];
  const DeviceProgram device = make_on_device(c.direction, c.save, r.shape, c.tiles, c.ids);
  const std::vector<int32_t> own(device.clean.begin() + rank * r.shape.slots(),
                                 device.clean.begin() + (rank + 1) * r.shape.slots());
  expect_equal("clean ids", own, r.clean.data(), r.clean.size());
  expect_equal("expert_rows", device.expert_rows, r.expert_rows.data(), r.expert_rows.size());
  expect_equal("expert_block", device.expert_block, r.expert_block.data(), r.expert_block.size());
  expect_equal("macro_block", device.macro_block, r.macro_block.data(), r.plan.macrobatches + 1);
  expect_equal("rows", device.rows.size(), r.rows.size());
  for (size_t i = 0; i < r.rows.size(); ++i) {
    expect_equal("source rank of row " + std::to_string(i), device.rows[i].rank, r.rows[i].rank);
    expect_equal("slot of row " + std::to_string(i), device.rows[i].slot, r.rows[i].slot);
  }
  expect_equal("valid_slots", device.plan.valid_slots, r.plan.valid_slots);
  compare_list("communication task", device.communication, host, host.list(2 * rank));
  compare_list("compute task", device.compute, host, host.list(2 * rank + 1));
  return static_cast<int64_t>(device.communication.size() + device.compute.size());
}

std::string answer(const Case& c) {
  const JointProgram host(c);
  int64_t tasks = 0;
  for (int32_t rank = 0; rank < c.shape.ranks; ++rank) {
    try {
      tasks += compare_rank(c, host, rank);
    } catch (const std::runtime_error& error) {
      return "rank " + std::to_string(rank) + ": " + error.what();
    }
  }
  return std::to_string(tasks);
}

}  // namespace
}  // namespace mok::cuda::test

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    mok::verify::Case c = mok::verify::read_case(in);
    c.ids = mok::verify::rest(in);
    std::cout << mok::cuda::test::answer(c) << std::endl;
  }
}

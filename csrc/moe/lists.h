// A rank's two task lists: how they are filled, and how a ticket of one becomes a task. Nothing else chooses between
// forward.h and backward.h.
#pragma once

#include <vector>

#include "moe/backward.h"
#include "moe/forward.h"

namespace mok {

// Each list has memory for max_segments.
template <Direction direction>
MOK_FN void fill_lists(const Plan& p, TaskList& communication, TaskList& compute) {
  if constexpr (direction == Direction::forward) {
    forward_communication(p, communication);
    forward_compute(p, compute);
  } else {
    backward_communication(p, communication);
    backward_compute(p, compute);
  }
}

// Task number `ticket` of a list, of which segment `s` holds it, written where it is to lie: on a device its arrays,
// indexed at run time, must not be in registers.
template <Direction direction>
MOK_FN void write_task(const Plan& p, const Segment& s, int64_t ticket, Task& t) {
  if constexpr (direction == Direction::forward) {
    write_forward_task(p, s, ticket, t);
  } else {
    write_backward_task(p, s, ticket, t);
  }
}

// The same where the direction is known at run time only.
MOK_FN void fill_lists(Direction direction, const Plan& p, TaskList& communication, TaskList& compute) {
  direction == Direction::forward ? fill_lists<Direction::forward>(p, communication, compute)
                                  : fill_lists<Direction::backward>(p, communication, compute);
}
MOK_FN void write_task(Direction direction, const Plan& p, const Segment& s, int64_t ticket, Task& t) {
  direction == Direction::forward ? write_task<Direction::forward>(p, s, ticket, t)
                                  : write_task<Direction::backward>(p, s, ticket, t);
}

// Both lists of a plan in memory of their own, for hosts. The plan must stay.
class TaskLists {
 public:
  TaskLists(Direction direction, const Shape& s, const Plan& p)
      : direction_(direction),
        plan_(p),
        segments_(2 * max_segments(s)),
        communication_{segments_.data()},
        compute_{segments_.data() + max_segments(s)} {
    fill_lists(direction, p, communication_, compute_);
  }
  TaskLists(const TaskLists&) = delete;

  const TaskList& communication() const { return communication_; }
  const TaskList& compute() const { return compute_; }

  // Of one of the two.
  Task task(const TaskList& list, int64_t ticket) const {
    Task t;
    write_task(direction_, plan_, list.segment_of(ticket), ticket, t);
    return t;
  }

 private:
  Direction direction_;
  const Plan& plan_;
  std::vector<Segment> segments_;
  TaskList communication_, compute_;
};

}  // namespace mok

// Breaks the task program in every smallest way, one at a time, and asks whether enumeration notices: a signal dropped,
// a wait removed, a wait's target lowered by one. Sorted by rule ("gate_up waits for rows_pulled"), because what is
// superfluous in one instance may be needed in another: a rule is superfluous if no instance of it is ever needed.
#pragma once

#include <map>

#include "verify/enumerate.h"

namespace mok::verify {

struct Tally {
  int32_t caught = 0;     // by a deadlock or by a conflict without order
  int32_t implied = 0;    // other waits order everything that this one did
  int32_t unchanged = 0;  // lowered, but no signal became dispensable: each one counts several rows
  int32_t unread = 0;     // a signal that no wait counts
  int32_t missed = 0;     // none of these: the wait orders what need not be ordered
};

// By what was done and to which rule.
std::map<std::string, Tally> try_mutations(JointProgram& program);

}  // namespace mok::verify

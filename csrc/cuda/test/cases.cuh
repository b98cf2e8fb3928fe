// Cases of a test: all are tried, whatever came of others, and each tells its result in a line of its own. And the end
// of a program in which something waits for ever after all.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>

#include "cuda/test/harness.cuh"

namespace mok::cuda::test {

class Clock {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  std::string text() const { return std::to_string(std::lround(1000 * seconds())) + " ms"; }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

inline char under_way[256] = "";  // what was begun last

// Adds to a failure what was being tried.
template <class Try>
void named(const std::string& what, const Try& attempt) {
  std::snprintf(under_way, sizeof(under_way), "%s", what.c_str());
  try {
    attempt();
  } catch (const Failed& failure) {
    throw Failed(what + ": " + failure.what());
  }
}

class Cases {
 public:
  template <class Try>
  void run(const std::string& what, const Try& attempt) {
    const Clock clock;
    std::string outcome = what + ": ok";
    try {
      named(what, attempt);
    } catch (const Failed& failure) {
      outcome = failure.what();
      ++failed_;
    }
    std::printf("  %s (%s)\n", outcome.c_str(), clock.text().c_str());
    std::fflush(stdout);
  }
  void expect_none_failed() const {
    if (failed_ > 0) throw Failed(std::to_string(failed_) + " cases failed");
  }

 private:
  int32_t failed_ = 0;
};

inline void bark(int) {
  constexpr char kText[] = "ended by the watchdog; last was begun: ";
  const bool told = write(1, kText, sizeof(kText) - 1) > 0 && write(1, under_way, std::strlen(under_way)) > 0;
  _exit(told ? 3 : 4);
}

// Ends the program after so many seconds, also where it hangs in CUDA.
inline void watch(unsigned seconds) {
  std::signal(SIGALRM, bark);
  alarm(seconds);
}

}  // namespace mok::cuda::test

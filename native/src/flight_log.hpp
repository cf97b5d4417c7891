// The collectives of a rank that have ended since somebody asked for them: for a timeline. Other
// than the flight record it has all of them, up to a limit, and counts those beyond.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace farandole {

struct LoggedFlight {
  std::uint64_t sequence = 0;
  std::uint64_t what = 0;
  std::uint64_t count = 0;
  std::uint64_t payload_bytes = 0;
  std::int64_t called_ns = 0;  // since when a caller waited for it; 0 if it is in the background
  std::int64_t began_ns = 0;   // by the steady clock, as the others
  std::int64_t ended_ns = 0;
  bool is_done = true;  // else it ended with a failure
};

class FlightLog {
 public:
  // What has been logged, and how many flights had no room.
  using Taken = std::pair<std::vector<LoggedFlight>, std::uint64_t>;

  // Whether flights are wanted. What a run looks at, and all that it does if they are not.
  bool is_on() const noexcept { return is_on_.load(std::memory_order_relaxed); }

  // From now on, up to `most` flights.
  void start(std::size_t most) {
    const std::lock_guard lock(mutex_);
    most_ = most;
    num_lost_ = 0;
    flights_.clear();
    is_on_.store(true, std::memory_order_relaxed);
  }

  Taken stop() {
    const std::lock_guard lock(mutex_);
    is_on_.store(false, std::memory_order_relaxed);
    return {std::exchange(flights_, {}), std::exchange(num_lost_, 0)};
  }

  void add(const LoggedFlight& flight) noexcept {
    const std::lock_guard lock(mutex_);
    if (!is_on()) return;
    try {
      if (flights_.size() < most_) {
        flights_.push_back(flight);
        return;
      }
    } catch (...) {  // a timeline is not worth the call that it is about
    }
    ++num_lost_;
  }

 private:
  std::atomic<bool> is_on_{false};  // relaxed: a flight at either end of a log may be in or out
  std::mutex mutex_;                // guards what follows
  std::size_t most_ = 0;
  std::uint64_t num_lost_ = 0;
  std::vector<LoggedFlight> flights_;
};

}  // namespace farandole

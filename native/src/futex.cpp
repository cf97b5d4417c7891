#include "futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace farandole {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds timeout) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(seconds.count());
  limit.tv_nsec = static_cast<long>((timeout - seconds).count());
  // Every way to return (woken, word changed, timeout, signal) means "look again" to the caller.
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void notify(int event) noexcept {
  const std::uint64_t one = 1;
  // It fails only if the counter is full, and then it is readable.
  [[maybe_unused]] const ssize_t written = write(event, &one, sizeof(one));
}

}  // namespace farandole

// Counters of what was moved.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace farandole {

// What finished calls moved, in sum. Written by one thread at a time (who holds an engine's turn,
// or a postbox's mutex), read by any; relaxed: a snapshot.
struct Tally : std::enable_shared_from_this<Tally> {
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> bytes_sent{0};
  std::atomic<std::uint64_t> bytes_received{0};
  std::atomic<std::uint64_t> bytes_mapped{0};
  std::atomic<std::uint64_t> scheduled_bytes_sent{0};
  std::atomic<std::uint64_t> payload_bytes{0};
  std::atomic<std::uint64_t> nanoseconds{0};
};

// pre: nobody else writes to `sum` at the same time
inline void add(std::atomic<std::uint64_t>& sum, std::uint64_t value) noexcept {
  sum.store(sum.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

}  // namespace farandole

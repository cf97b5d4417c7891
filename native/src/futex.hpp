// Sleeping on a 32-bit word in memory that several processes share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace farandole {

// Sleeps while `word` holds `expected`, until woken, interrupted by a signal, or `timeout` is over.
// May return early. pre: `word` lives in memory that all of its users map.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds timeout) noexcept;

// Wakes every sleeper on `word`.
void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept;

// Wakes who waits for an eventfd to be readable.
void notify(int event) noexcept;

}  // namespace farandole

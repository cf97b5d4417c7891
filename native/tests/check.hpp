// The whole test harness: checks that report where they failed, and a count at the end.
#pragma once

#include <concepts>
#include <cstddef>
#include <iostream>
#include <source_location>

namespace farandole::testing {

inline std::size_t num_checks = 0;
inline std::size_t num_failures = 0;
inline constexpr std::size_t max_reports = 20;

// Counts a check; on failure prints its place and what describe(stream) writes.
template <typename Describe>
  requires std::invocable<Describe, std::ostream&>
void check(bool condition, Describe describe,
           std::source_location place = std::source_location::current()) {
  ++num_checks;
  if (condition) return;
  if (++num_failures > max_reports) return;
  std::cerr << place.file_name() << ':' << place.line() << ": ";
  describe(std::cerr);
  std::cerr << '\n';
}

inline void check(bool condition, const char* claim,
                  std::source_location place = std::source_location::current()) {
  check(condition, [&](std::ostream& out) { out << "not so: " << claim; }, place);
}

template <typename Actual, typename Expected>
void check_equal(const Actual& actual, const Expected& expected,
                 std::source_location place = std::source_location::current()) {
  check(
      actual == expected,
      [&](std::ostream& out) { out << "got " << actual << ", expected " << expected; }, place);
}

// What main returns: 0 where every check held and there was one.
inline int report() {
  std::cout << num_checks << " checks, " << num_failures << " failures" << std::endl;
  return num_failures == 0 && num_checks > 0 ? 0 : 1;
}

}  // namespace farandole::testing

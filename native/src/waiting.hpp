// What all loops that wait for another rank have in common.
#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace farandole {

// Between two looks at deadlines, dead peers and signals while asleep.
inline constexpr std::chrono::milliseconds kSlice{50};

// Between two looks at memory that another core writes to.
inline void pause_briefly() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace farandole

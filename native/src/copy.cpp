#include "copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace farandole {

void copy_streaming(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  const std::size_t offset = reinterpret_cast<std::uintptr_t>(target) % kLine;
  const std::size_t head = std::min(bytes, (kLine - offset) % kLine);
  std::memcpy(target, source, head);
  target += head;
  source += head;
  bytes -= head;
  for (; bytes >= kLine; target += kLine, source += kLine, bytes -= kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source);
    auto* to = reinterpret_cast<__m128i*>(target);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  _mm_sfence();
#endif
  // Elsewhere that is all: cores of 64-bit ARM see by themselves that whole cache lines are written
  // one after the other, and then do not read them first ("write streaming mode").
  std::memcpy(target, source, bytes);
}

}  // namespace farandole

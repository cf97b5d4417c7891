// In what form float32 may travel between hosts, where the caller has asked for it: in fewer bytes,
// rounded.
//
// bfloat16: 2 bytes a number, rounded to nearest, ties to even. What is beyond its largest number
// becomes infinite; every NaN becomes the positive quiet one without payload.
//
// int8: blocks of 256 numbers, the last one shorter, each a byte c for its scale 2^k, k = c - 133,
// and then a byte q per number, which stands for q * 2^k. Let M be the largest magnitude of the
// block. k is the smallest in -133..121 with M <= 127 * 2^k, or 121 if none is; q is x / 2^k
// rounded to nearest, ties to even, but no more than 127 either way. So a number changes by at most
// M / 127, or by 2^-134 if that is more: the least normal number is 2^-126. -0 becomes +0. A block
// with a NaN or an infinity has no such scale: it travels with c = 255, and all of it becomes NaN.
//
// What was rounded once does not change any more, so that it may cross any number of wires, and who
// keeps it has the bits of those who get it. For bfloat16 that is plain. For int8, let x = q * 2^k
// be the numbers of a block that was rounded, and 2^j its scale the second time. As no |x| is more
// than 127 * 2^k, there is such a j, and j <= k. So x / 2^j = q * 2^(k - j) is a whole number, and
// no more than 127 either way: each x is found again exactly. A block of NaNs stays one.
//
// A segment is encoded by itself: its first number begins a block. Segments of a chunk are cut
// alike everywhere, so blocks are, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace farandole {

// The values travel in labels between hosts: never renumber them.
enum class WireForm : std::uint8_t { as_is = 0, bfloat16 = 1, int8 = 2 };
inline constexpr std::uint8_t num_wire_forms = 3;

inline constexpr std::size_t kWireBlock = 256;  // numbers

// What Label::total_bytes holds: bytes as they are in memory, and from bit 56 on the form that they
// travel in (of a message, its dtype: see postbox.cpp).
inline constexpr std::uint64_t kBytesOfLabel = (std::uint64_t{1} << 56) - 1;
constexpr std::uint64_t with_form(std::uint64_t bytes, WireForm form) {
  return bytes | static_cast<std::uint64_t>(form) << 56;
}
constexpr WireForm form_of(std::uint64_t total_bytes) {
  return static_cast<WireForm>(total_bytes >> 56);
}

// Bytes that `bytes` bytes of memory become. pre: they are whole float32, unless they stay as is
constexpr std::size_t encoded_bytes(WireForm form, std::size_t bytes) {
  const std::size_t count = bytes / sizeof(float);
  switch (form) {
    case WireForm::as_is:
      return bytes;
    case WireForm::bfloat16:
      return 2 * count;
    case WireForm::int8:
      return count + (count + kWireBlock - 1) / kWireBlock;
  }
  return 0;
}

// The other way round. None if there is no such form, or no numbers become so many bytes.
constexpr std::optional<std::size_t> decoded_bytes(WireForm form, std::size_t bytes) {
  if (static_cast<std::uint8_t>(form) >= num_wire_forms) return std::nullopt;
  std::size_t decoded = bytes;
  if (form == WireForm::bfloat16) decoded = 2 * bytes;
  if (form == WireForm::int8) {
    decoded = sizeof(float) * (bytes - (bytes + kWireBlock) / (kWireBlock + 1));
  }
  return encoded_bytes(form, decoded) == bytes ? std::optional(decoded) : std::nullopt;
}

// For one form and instruction set; all give the same bits. `count` numbers, at any alignment;
// `floats` and `wire` do not overlap.
struct WireKernels {
  void (*encode)(std::byte* wire, const std::byte* floats, std::size_t count) = nullptr;
  void (*decode)(std::byte* floats, const std::byte* wire, std::size_t count) = nullptr;
  // What decode makes of what encode makes, in place.
  void (*round)(std::byte* floats, std::size_t count) = nullptr;
};

}  // namespace farandole

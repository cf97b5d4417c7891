// What travels between hosts: every instruction set against a reference in plain doubles, and that
// what was rounded once does not change any more, whatever the processor does with subnormal
// numbers. Bits are compared, there are no tolerances.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "check.hpp"
#include "kernels.hpp"
#include "kernels_reference.hpp"
#include "wire_forms.hpp"

namespace farandole::testing {
namespace {

using Random = std::mt19937_64;
using Floats = std::vector<float>;

constexpr WireForm kForms[] = {WireForm::bfloat16, WireForm::int8};
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 17, 255, 256, 257, 511, 512, 513, 1000, 4099};

float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }

bool are_same(const Floats& a, const Floats& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// ---- The reference ----------------------------------------------------------------------------

float reference_bfloat16(float x) {
  return static_cast<float>(BrainFloat::from(x).number());  // whose NaN is the usual one
}

void reference_block(float* block, std::size_t count) {
  double largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (!std::isfinite(block[i])) {
      std::fill_n(block, count, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    largest = std::max(largest, std::fabs(double{block[i]}));
  }
  int k = -133;
  while (k < 121 && largest > std::ldexp(127.0, k)) ++k;
  for (std::size_t i = 0; i < count; ++i) {
    const double quotient = std::nearbyint(std::ldexp(double{block[i]}, -k));
    block[i] = static_cast<float>(std::ldexp(std::clamp(quotient, -127.0, 127.0), k)) + 0.0F;
  }
}

Floats reference(WireForm form, Floats floats) {
  if (form == WireForm::bfloat16) {
    std::ranges::transform(floats, floats.begin(), reference_bfloat16);
  } else {
    for (std::size_t first = 0; first < floats.size(); first += 256) {
      reference_block(floats.data() + first, std::min<std::size_t>(256, floats.size() - first));
    }
  }
  return floats;
}

// Has this thread take subnormal numbers for zeros, where the processor can (FTZ and DAZ).
class Flushing {
 public:
#ifdef __SSE__
  explicit Flushing(bool flushes) { _mm_setcsr(flushes ? before_ | 0x8040 : before_); }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  unsigned before_ = _mm_getcsr();
#else
  explicit Flushing(bool) {}
#endif
};

// ---- What the kernels do ----------------------------------------------------------------------

// At odd addresses, between bytes that must stay.
Floats over_the_wire(WireKernels kernels, WireForm form, const Floats& floats) {
  const std::size_t bytes = floats.size() * sizeof(float);
  std::vector<std::byte> plain(bytes + 2, std::byte{7});
  std::vector<std::byte> wire(encoded_bytes(form, bytes) + 2, std::byte{7});
  if (bytes != 0) std::memcpy(plain.data() + 1, floats.data(), bytes);
  kernels.encode(wire.data() + 1, plain.data() + 1, floats.size());
  check_equal(int(wire.back()), 7);
  kernels.decode(plain.data() + 1, wire.data() + 1, floats.size());
  check_equal(int(plain.back()), 7);
  Floats result(floats.size());
  if (bytes != 0) std::memcpy(result.data(), plain.data() + 1, bytes);
  return result;
}

void check_floats(WireForm form, const Floats& floats,
                  std::source_location place = std::source_location::current()) {
  const Floats expected = reference(form, floats);
  for (const auto isa : available_instruction_sets()) {
    const WireKernels kernels = find_wire_kernels(form, isa);
    for (const bool flushes : {false, true}) {
      const Flushing flushing(flushes);
      const Floats arrived = over_the_wire(kernels, form, floats);
      Floats rounded = floats;
      kernels.round(reinterpret_cast<std::byte*>(rounded.data()), rounded.size());
      const Floats again = over_the_wire(kernels, form, arrived);
      check(
          are_same(arrived, expected) && are_same(rounded, expected) && are_same(again, expected),
          [&](std::ostream& out) {
            std::size_t i = 0;
            while (i + 1 < floats.size() && std::bit_cast<std::uint32_t>(arrived[i]) ==
                                                std::bit_cast<std::uint32_t>(expected[i])) {
              ++i;
            }
            out << name_of(isa) << ", form " << int(form) << ", " << floats.size()
                << " numbers: " << std::hexfloat << floats[i] << " became " << arrived[i]
                << ", expected " << expected[i];
          },
          place);
    }
  }
}

// ---- Tests ------------------------------------------------------------------------------------

void test_sizes() {
  for (const WireForm form : {WireForm::as_is, WireForm::bfloat16, WireForm::int8}) {
    std::set<std::size_t> sizes;
    for (std::size_t count = 0; count < 3000; ++count) {
      const std::size_t encoded = encoded_bytes(form, 4 * count);
      check(decoded_bytes(form, encoded) == 4 * count, "a size is found again");
      sizes.insert(encoded);
    }
    for (std::size_t bytes = 0; bytes < 3000; ++bytes) {
      if (form == WireForm::as_is) continue;
      check_equal(decoded_bytes(form, bytes).has_value(), sizes.contains(bytes));
    }
  }
  check_equal(encoded_bytes(WireForm::int8, 4 * 1024), std::size_t{1024 + 4});
  check(!decoded_bytes(static_cast<WireForm>(3), 8), "there is no form 3");
  check(form_of(with_form(kBytesOfLabel, WireForm::int8)) == WireForm::int8, "labels hold forms");
  check_equal(with_form(5, WireForm::int8) & kBytesOfLabel, std::uint64_t{5});
  check(find_wire_kernels(WireForm::as_is).round == nullptr, "nothing rounds what stays as it is");
}

void test_every_bfloat16_and_what_is_around_it() {
  Floats floats;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      floats.push_back(from_bits(upper << 16 | lower));
    }
  }
  check_floats(WireForm::bfloat16, floats);
  const std::uint32_t ways[][2] = {{0x7f800001, 0x7fc00000}, {0xffffffff, 0x7fc00000},
                                   {0x7f7fffff, 0x7f800000}, {0x80000000, 0x80000000},
                                   {0x80000001, 0x80000000}, {0x3f808000, 0x3f800000},
                                   {0x3f818000, 0x3f820000}};
  for (const auto& [before, after] : ways) {
    Floats one{from_bits(before)};
    find_wire_kernels(WireForm::bfloat16).round(reinterpret_cast<std::byte*>(one.data()), 1);
    check_equal(std::bit_cast<std::uint32_t>(one[0]), after);
  }
}

// Each scale, at and around the largest magnitudes that it is for, with all numbers that it has.
void test_every_scale() {
  Random random(1);
  constexpr std::uint32_t mantissas[] = {0,        1,        0x400000, 0x7dffff, 0x7e0000, 0x7e0001,
                                         0x7effff, 0x7f0000, 0x7f0001, 0x7ffffe, 0x7fffff};
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const std::uint32_t mantissa : mantissas) {
      const float largest = from_bits(exponent << 23 | mantissa);
      Floats floats(256);
      for (float& x : floats) {  // of all sizes, halfway between two numbers among them
        const auto share = static_cast<float>(random() % 512) / 256.0F - 1.0F;
        x = static_cast<float>(std::ldexp(share * largest, -static_cast<int>(random() % 8)));
      }
      floats[random() % 256] = random() % 2 ? largest : -largest;
      check_floats(WireForm::int8, floats);
    }
    Floats all;
    for (int q = -127; q < 128; ++q) {
      all.push_back(static_cast<float>(std::ldexp(q, static_cast<int>(exponent) - 133)));
    }
    check(are_same(reference(WireForm::int8, all), all), "a scale's own numbers stay");
    check_floats(WireForm::int8, all);
  }
}

void test_a_block_changes_by_a_127th_of_its_largest_number() {
  Random random(2);
  for (int round = 0; round < 20'000; ++round) {
    Floats floats(1 + random() % 256);
    double largest = 0;
    for (float& x : floats) {
      do {
        x = from_bits(static_cast<std::uint32_t>(random()));
        x = std::ldexp(x, -static_cast<int>(static_cast<unsigned>(round) % 250));
      } while (!std::isfinite(x));
      largest = std::max(largest, std::fabs(double{x}));
    }
    Floats rounded = floats;
    find_wire_kernels(WireForm::int8)
        .round(reinterpret_cast<std::byte*>(rounded.data()), rounded.size());
    const double limit = std::max(largest / 127, std::ldexp(1.0, -134));
    for (std::size_t i = 0; i < floats.size(); ++i) {
      check(std::fabs(double{rounded[i]} - floats[i]) <= limit, "the bound holds");
    }
  }
}

void test_random_bits_of_all_counts() {
  Random random(3);
  for (const WireForm form : kForms) {
    for (const std::size_t count : kCounts) {
      for (const int share : {1, 50, 5000}) {  // one number in so many may be none that is finite
        Floats floats(count);
        for (float& x : floats) {
          x = from_bits(static_cast<std::uint32_t>(random()));
          const bool may_be_any = random() % static_cast<unsigned>(share) == 0;
          if (!may_be_any && !std::isfinite(x)) x = 1.5F;
        }
        check_floats(form, floats);
      }
    }
  }
}

void test_a_block_that_is_not_finite_becomes_nan_and_no_other() {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const float odd : {infinity, -infinity, from_bits(0x7f800001), from_bits(0xffc00000)}) {
    for (const std::size_t where : {0, 100, 255, 256, 511, 512, 599}) {
      Floats floats(600, -3.0F);
      floats[where] = odd;
      check_floats(WireForm::int8, floats);
      find_wire_kernels(WireForm::int8)
          .round(reinterpret_cast<std::byte*>(floats.data()), floats.size());
      for (std::size_t i = 0; i < floats.size(); ++i) {
        const bool is_hit = i / 256 == where / 256;
        check_equal(std::bit_cast<std::uint32_t>(floats[i]), is_hit ? 0x7fc00000 : 0xc0400000);
      }
    }
  }
}

}  // namespace
}  // namespace farandole::testing

int main() {
  using namespace farandole::testing;
  test_sizes();
  test_every_bfloat16_and_what_is_around_it();
  test_every_scale();
  test_a_block_changes_by_a_127th_of_its_largest_number();
  test_random_bits_of_all_counts();
  test_a_block_that_is_not_finite_becomes_nan_and_no_other();
  return report();
}

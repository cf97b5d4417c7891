// The kernels of one instruction set, FARANDOLE_INSTRUCTION_SET; kernels.hpp says what they
// compute.
//
// A step of num_vectors vectors is loaded from every source, folded in registers and stored before
// the next step begins. So dst may be any of the sources, a source is read once however many there
// are, and no scratch memory is needed.
#include "kernels_impl.hpp"

#include "kernels.hpp"

namespace farandole::FARANDOLE_INSTRUCTION_SET {
namespace {

// What a kernel is given, less the count.
struct Operands {
  std::byte* dst;
  const std::byte* const* srcs;
  std::size_t num_srcs;
  std::uint32_t divisor;
};

template <typename Format>
[[gnu::always_inline]] inline typename Format::Lanes finish(typename Format::Lanes lanes,
                                                            std::uint32_t divisor) {
  if constexpr (requires { Format::divide(lanes, divisor); }) {
    if (divisor > 1) return Format::divide(lanes, divisor);
  }
  return lanes;
}

// Four vectors, starting at byte offset: enough independent work to hide the latency of one.
template <typename Format, typename Op>
[[gnu::always_inline]] inline void combine_four(Operands operands, std::size_t offset) {
  using Lanes = typename Format::Lanes;
  const std::byte* src = operands.srcs[0] + offset;
  Lanes a = Format::load(src);
  Lanes b = Format::load(src + vector_bytes);
  Lanes c = Format::load(src + 2 * vector_bytes);
  Lanes d = Format::load(src + 3 * vector_bytes);
  for (std::size_t s = 1; s < operands.num_srcs; ++s) {
    src = operands.srcs[s] + offset;
    a = fold<Op>(a, Format::load(src));
    b = fold<Op>(b, Format::load(src + vector_bytes));
    c = fold<Op>(c, Format::load(src + 2 * vector_bytes));
    d = fold<Op>(d, Format::load(src + 3 * vector_bytes));
  }
  std::byte* dst = operands.dst + offset;
  Format::store(dst, finish<Format>(a, operands.divisor));
  Format::store(dst + vector_bytes, finish<Format>(b, operands.divisor));
  Format::store(dst + 2 * vector_bytes, finish<Format>(c, operands.divisor));
  Format::store(dst + 3 * vector_bytes, finish<Format>(d, operands.divisor));
}

// One vector, of which num_bytes bytes exist in memory; the rest is computed from zeros.
template <typename Format, typename Op>
[[gnu::always_inline]] inline void combine_one(Operands operands, std::size_t offset,
                                               std::size_t num_bytes) {
  alignas(vector_bytes) std::byte buffer[vector_bytes] = {};
  std::memcpy(buffer, operands.srcs[0] + offset, num_bytes);
  auto lanes = Format::load(buffer);
  for (std::size_t s = 1; s < operands.num_srcs; ++s) {
    std::memcpy(buffer, operands.srcs[s] + offset, num_bytes);
    lanes = fold<Op>(lanes, Format::load(buffer));
  }
  Format::store(buffer, finish<Format>(lanes, operands.divisor));
  std::memcpy(operands.dst + offset, buffer, num_bytes);
}

template <typename Format, typename Op>
[[gnu::always_inline]] inline void combine_all(Operands operands, std::size_t num_bytes) {
  std::size_t offset = 0;
  for (; num_bytes - offset >= 4 * vector_bytes; offset += 4 * vector_bytes) {
    combine_four<Format, Op>(operands, offset);
  }
  for (; num_bytes - offset >= vector_bytes; offset += vector_bytes) {
    combine_one<Format, Op>(operands, offset, vector_bytes);
  }
  if (offset < num_bytes) combine_one<Format, Op>(operands, offset, num_bytes - offset);
}

template <typename Format, typename Op>
void combine(std::byte* dst, const std::byte* const* srcs, std::size_t num_srcs, std::size_t count,
             std::uint32_t divisor) {
  if (count == 0) return;
  const std::size_t num_bytes = count * Format::element_bytes;
  constexpr bool divides_after = requires { Format::divide_all(dst, count, divisor); };
  const bool is_copy = num_srcs == 1 && (divisor <= 1 || divides_after);
  if (Format::is_copied_as_bytes && is_copy) {
    if (dst != srcs[0]) std::memcpy(dst, srcs[0], num_bytes);
  } else if (num_srcs == 2) {
    combine_all<Format, Op>({dst, srcs, 2, divisor}, num_bytes);
  } else {
    combine_all<Format, Op>({dst, srcs, num_srcs, divisor}, num_bytes);
  }
  if constexpr (divides_after) {
    if (divisor > 1) Format::divide_all(dst, count, divisor);
  }
}

// ---- Which kernel for which pair; kernels.cpp has refused the unsupported ones ----------------

template <typename Format>
CombineFunction find_float(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return combine<Format, Sum>;
    case ReduceOp::prod:
      return combine<Format, Product>;
    case ReduceOp::min:
      return combine<Format, Min>;
    case ReduceOp::max:
      return combine<Format, Max>;
    default:
      return nullptr;
  }
}

template <typename T, typename Unsigned>
CombineFunction find_integer(ReduceOp op) {
  using Wrapping = Integer<T, Unsigned>;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return combine<Wrapping, Sum>;
    case ReduceOp::prod:
      return combine<Wrapping, Product>;
    case ReduceOp::min:
      return combine<Integer<T>, Min>;
    case ReduceOp::max:
      return combine<Integer<T>, Max>;
    case ReduceOp::band:
      return combine<Wrapping, And>;
    case ReduceOp::bor:
      return combine<Wrapping, Or>;
    case ReduceOp::bxor:
      return combine<Wrapping, Xor>;
  }
  return nullptr;
}

CombineFunction find_boolean(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor:
      return combine<Boolean, Or>;
    case ReduceOp::prod:
    case ReduceOp::min:
    case ReduceOp::band:
      return combine<Boolean, And>;
    case ReduceOp::bxor:
      return combine<Boolean, Xor>;
    default:
      return nullptr;
  }
}

template <typename T>
CombineFunction find_complex(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return combine<Complex<T>, Sum>;
    case ReduceOp::prod:
      return combine<Complex<T>, ComplexProduct>;
    default:
      return nullptr;
  }
}

}  // namespace

CombineFunction find_combine(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::float64:
      return find_float<Real<double>>(op);
    case DType::float32:
      return find_float<Real<float>>(op);
    case DType::float16:
      return find_float<Float16>(op);
    case DType::bfloat16:
      return find_float<BFloat16>(op);
    case DType::int8:
      return find_integer<std::int8_t, std::uint8_t>(op);
    case DType::int16:
      return find_integer<std::int16_t, std::uint16_t>(op);
    case DType::int32:
      return find_integer<std::int32_t, std::uint32_t>(op);
    case DType::int64:
      return find_integer<std::int64_t, std::uint64_t>(op);
    case DType::uint8:
      return find_integer<std::uint8_t, std::uint8_t>(op);
    case DType::uint16:
      return find_integer<std::uint16_t, std::uint16_t>(op);
    case DType::uint32:
      return find_integer<std::uint32_t, std::uint32_t>(op);
    case DType::uint64:
      return find_integer<std::uint64_t, std::uint64_t>(op);
    case DType::boolean:
      return find_boolean(op);
    case DType::complex64:
      return find_complex<float>(op);
    case DType::complex128:
      return find_complex<double>(op);
  }
  return nullptr;
}

}  // namespace farandole::FARANDOLE_INSTRUCTION_SET

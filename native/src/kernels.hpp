// The arithmetic of every reduction: k buffers combined element by element into one.
//
// One documented meaning per (dtype, op), the same bits on every instruction set, so that ranks on
// different hosts agree:
//   - floats: folded left to right in the dtype; 16-bit floats are folded in float32 and rounded
//     once, to nearest, ties to even. No fused multiply-add anywhere.
//   - NaN: an operand that is NaN makes the result NaN, in min and max too. A NaN that comes out of
//     a kernel is always the dtype's positive quiet NaN without payload (0x7fc00000 in float32), as
//     hardware differs in whose payload and sign survive. Only the plain copy (one source, divisor
//     1) keeps the bits of a NaN.
//   - -0 lies below +0 in min and max (IEEE 754-2019's minimum and maximum). So two operands give
//     the same bits in either order, in every op.
//   - integers: wrap around (two's complement). avg divides the wrapped sum, truncating toward 0.
//   - bool: any non-zero byte is true, the stored byte is 0 or 1. It has no division: divisor is
//     ignored.
//   - complex: sum and division by component; the product is (ac - bd, ad + bc), without the
//     infinity recovery of C99 Annex G.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "numbers.hpp"
#include "wire_forms.hpp"

namespace farandole {

// dst[i] = op(srcs[0][i], srcs[1][i], ..., srcs[num_srcs - 1][i]), folded left to right; with
// divisor > 1 the result is divided by it before it is rounded to the dtype. That is how avg
// divides: its last hop passes the size of the group, the hops before it pass 1.
// pre: num_srcs >= 1; divisor >= 1; every buffer holds count elements, at any alignment; dst is
// identical to some of srcs or disjoint from them, never partly overlapping.
// Cost: one pass over the sources and dst, no memory of its own.
using CombineFunction = void (*)(std::byte* dst, const std::byte* const* srcs, std::size_t num_srcs,
                                 std::size_t count, std::uint32_t divisor);

// The kernel for the best instruction set of this machine; nullptr where is_supported is false.
CombineFunction find_combine(DType dtype, ReduceOp op);

// What rounds numbers for other hosts, likewise. No kernels for WireForm::as_is.
WireKernels find_wire_kernels(WireForm form);

// The instruction set that both choose: "avx512", "avx2", "neon" or "baseline". On 64-bit
// ARM, where every machine has NEON, it is "neon" and there is no other.
std::string_view instruction_set();

// What follows is for tests, which run every instruction set that the machine has.

enum class InstructionSet : std::uint8_t { baseline, neon, avx2, avx512 };

std::string_view name_of(InstructionSet isa);

// Whether this build has kernels for isa and this machine can run them.
bool is_available(InstructionSet isa);

// As find_combine above, for one instruction set; nullptr also where is_available is false.
CombineFunction find_combine(DType dtype, ReduceOp op, InstructionSet isa);
// pre: is_available(isa)
WireKernels find_wire_kernels(WireForm form, InstructionSet isa);

}  // namespace farandole

// Chooses between the kernels of kernels_impl.cpp and wire_forms_impl.cpp, which are compiled once
// per instruction set.
#include "kernels.hpp"

#include <algorithm>
#include <span>

namespace farandole {

// Each is defined where native/CMakeLists.txt compiles kernels for it.
namespace baseline {
CombineFunction find_combine(DType dtype, ReduceOp op);
WireKernels find_wire_kernels(WireForm form);
}  // namespace baseline
namespace neon {
CombineFunction find_combine(DType dtype, ReduceOp op);
WireKernels find_wire_kernels(WireForm form);
}  // namespace neon
namespace avx2 {
CombineFunction find_combine(DType dtype, ReduceOp op);
WireKernels find_wire_kernels(WireForm form);
}  // namespace avx2
namespace avx512 {
CombineFunction find_combine(DType dtype, ReduceOp op);
WireKernels find_wire_kernels(WireForm form);
}  // namespace avx512

namespace {

struct Kernels {
  InstructionSet isa;
  bool is_available;
  CombineFunction (*find)(DType dtype, ReduceOp op);
  WireKernels (*find_wire)(WireForm form);
};

// What native/CMakeLists.txt compiles for this architecture, the best first; the last runs on every
// machine of it.
std::span<const Kernels> compiled_kernels() {
#if defined(__x86_64__)
  // Asks for exactly what is passed there as -m flags.
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  static const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const Kernels compiled[] = {
      {InstructionSet::avx512, has_avx512, avx512::find_combine, avx512::find_wire_kernels},
      {InstructionSet::avx2, has_avx2, avx2::find_combine, avx2::find_wire_kernels},
      {InstructionSet::baseline, true, baseline::find_combine, baseline::find_wire_kernels}};
#elif defined(__aarch64__)
  static const Kernels compiled[] = {
      {InstructionSet::neon, true, neon::find_combine, neon::find_wire_kernels}};
#else
  static const Kernels compiled[] = {
      {InstructionSet::baseline, true, baseline::find_combine, baseline::find_wire_kernels}};
#endif
  return compiled;
}

InstructionSet best_instruction_set() {
  static const auto best = std::ranges::find_if(compiled_kernels(), &Kernels::is_available)->isa;
  return best;
}

}  // namespace

bool is_available(InstructionSet isa) {
  return std::ranges::any_of(compiled_kernels(), [&](const Kernels& kernels) {
    return kernels.isa == isa && kernels.is_available;
  });
}

CombineFunction find_combine(DType dtype, ReduceOp op, InstructionSet isa) {
  if (!is_supported(dtype, op) || !is_available(isa)) return nullptr;
  return std::ranges::find(compiled_kernels(), isa, &Kernels::isa)->find(dtype, op);
}

CombineFunction find_combine(DType dtype, ReduceOp op) {
  return find_combine(dtype, op, best_instruction_set());
}

WireKernels find_wire_kernels(WireForm form, InstructionSet isa) {
  return std::ranges::find(compiled_kernels(), isa, &Kernels::isa)->find_wire(form);
}

WireKernels find_wire_kernels(WireForm form) {
  return find_wire_kernels(form, best_instruction_set());
}

std::string_view instruction_set() { return name_of(best_instruction_set()); }

std::string_view name_of(InstructionSet isa) {
  switch (isa) {
    case InstructionSet::avx512:
      return "avx512";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::neon:
      return "neon";
    default:
      return "baseline";
  }
}

}  // namespace farandole

// The engine as a Python module. Buffers are passed as addresses: that they are long enough is
// checked by farandole/communicator.py, that they stay alive is seen to by farandole/runner.py.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "arena.hpp"
#include "engine.hpp"
#include "kernels.hpp"
#include "plan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace farandole {
namespace {

using Ints32 = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints64 = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<const std::int64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
template <int Columns>
using Rows32 =
    nb::ndarray<const std::int32_t, nb::shape<-1, Columns>, nb::c_contig, nb::device::cpu>;

template <typename Array>
auto as_span(const Array& array) {
  return std::span{array.data(), array.size()};
}

template <typename Row, typename Array>
std::span<const Row> as_rows(const Array& array) {
  static_assert(std::is_trivial_v<Row>);
  return {reinterpret_cast<const Row*>(array.data()), array.shape(0)};
}

std::shared_ptr<Plan> make_plan(Rows32<5> operations, Rows32<4> operands, Ints32 operand_ends,
                                Ints32 after, Ints32 after_ends, Ints64 size_bytes,
                                Slots input_slots, Slots output_slots, std::int64_t num_work_slots,
                                Ints32 size_classes, std::uint32_t rank, std::uint32_t world_size,
                                std::size_t max_segment_bytes, std::size_t element_bytes) {
  const ProgramColumns program{as_rows<ProgramColumns::Operation>(operations),
                               as_rows<ProgramColumns::Operand>(operands),
                               as_span(operand_ends),
                               as_span(after),
                               as_span(after_ends),
                               as_span(size_classes)};
  const Layout layout{as_span(size_bytes), as_rows<Layout::Slot>(input_slots),
                      as_rows<Layout::Slot>(output_slots), num_work_slots};
  return std::make_shared<Plan>(program, layout, rank, world_size, max_segment_bytes,
                                element_bytes);
}

Call make_call(std::shared_ptr<const Plan> plan, std::uintptr_t input, std::uintptr_t output,
               int dtype, int op, std::uint32_t divisor, std::uint64_t fingerprint, bool sequenced,
               std::uint64_t what, std::uint64_t count, std::int64_t tag, double timeout_s) {
  Call call;
  call.plan = std::move(plan);
  call.input = reinterpret_cast<const std::byte*>(input);
  call.output = reinterpret_cast<std::byte*>(output);
  if (op < 0 && call.plan->max_operands() > 1) {
    throw std::invalid_argument("this plan reduces, and the call names no op");
  }
  if (op >= 0) {
    call.combine = find_combine(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
    if (call.combine == nullptr) throw std::invalid_argument("this dtype cannot be reduced so");
  }
  call.divisor = divisor;
  call.fingerprint = fingerprint;
  call.sequenced = sequenced;
  call.what = what;
  call.count = count;
  call.tag = tag;
  if (std::isfinite(timeout_s)) {
    call.timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(timeout_s * 1e9));
  }
  return call;
}

// True if a signal handler raised; its exception is then pending in this thread.
bool signal_raised() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

using ReceiptTuple = std::tuple<int, std::uint32_t, std::uint64_t, std::uint64_t, double>;

ReceiptTuple as_tuple(const Receipt& r) {
  return {static_cast<int>(r.status), r.subject, r.bytes_sent, r.bytes_received, r.seconds};
}

ReceiptTuple run(Engine& engine, const Call& call) {
  Receipt receipt;
  bool raised = false;
  {
    const nb::gil_scoped_release released;
    receipt = engine.run(call, [&raised] { return raised = raised || signal_raised(); });
  }
  if (raised) throw nb::python_error();
  return as_tuple(receipt);
}

// Waits in slices, so that Ctrl-C works. False if `timeout_s` was over first.
bool wait_for_work(Work& work, double timeout_s) {
  constexpr std::chrono::milliseconds kSlice{50};
  const auto start = std::chrono::steady_clock::now();
  const std::chrono::duration<double> limit(timeout_s);
  while (!work.is_done()) {
    const std::chrono::duration<double> left = limit - (std::chrono::steady_clock::now() - start);
    if (left.count() <= 0) return false;
    {
      const nb::gil_scoped_release released;
      work.wait_for(left < kSlice ? std::chrono::duration_cast<std::chrono::nanoseconds>(left)
                                  : std::chrono::nanoseconds(kSlice));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return true;
}

using CallTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                             std::int64_t, double, bool>;

std::vector<CallTuple> calls_of(const Engine& engine) {
  std::vector<CallTuple> calls;
  const Arena& arena = engine.arena();
  for (std::uint32_t rank = 0; rank < arena.geometry().world_size; ++rank) {
    const RankState& state = arena.rank(rank);
    const auto timeout_ns = state.call.timeout_ns.load(std::memory_order_relaxed);
    calls.emplace_back(state.call.sequence.load(std::memory_order_relaxed),
                       state.call.finished.load(std::memory_order_relaxed),
                       state.call.what.load(std::memory_order_relaxed),
                       state.call.count.load(std::memory_order_relaxed),
                       state.call.tag.load(std::memory_order_relaxed),
                       timeout_ns > 0 ? static_cast<double>(timeout_ns) * 1e-9 : HUGE_VAL,
                       state.closed.load(std::memory_order_acquire) != 0);
  }
  return calls;
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "The engine of farandole. Use farandole.Communicator instead.";

  nb::class_<Arena>(module, "Arena")
      .def_static(
          "create",
          [](std::uint32_t world_size, std::uint32_t num_slots, std::uint64_t slot_bytes,
             std::uint64_t nonce) {
            return Arena::create({world_size, num_slots, slot_bytes, nonce});
          },
          "world_size"_a, "num_slots"_a, "slot_bytes"_a, "nonce"_a)
      .def_static("map", &Arena::map, "descriptor"_a)
      .def_prop_ro("world_size", [](const Arena& arena) { return arena.geometry().world_size; })
      .def_prop_ro("slot_bytes", [](const Arena& arena) { return arena.geometry().slot_bytes; })
      .def_prop_ro("nonce", [](const Arena& arena) { return arena.geometry().nonce; })
      .def_prop_ro("descriptor", &Arena::descriptor)
      .def("close_descriptor", &Arena::close_descriptor);

  nb::class_<Plan>(module, "Plan")
      .def(nb::new_(&make_plan), "operations"_a, "operands"_a, "operand_ends"_a, "after"_a,
           "after_ends"_a, "size_bytes"_a, "input_slots"_a, "output_slots"_a, "num_work_slots"_a,
           "size_classes"_a, "rank"_a, "world_size"_a, "max_segment_bytes"_a, "element_bytes"_a);

  nb::class_<Work>(module, "Work")
      .def("is_done", &Work::is_done)
      .def("wait", &wait_for_work, "timeout_s"_a)
      .def("receipt", [](const Work& work) { return as_tuple(work.receipt()); });

  nb::class_<Engine>(module, "Engine")
      .def(nb::init<std::shared_ptr<Arena>, std::uint32_t, std::vector<int>, std::uint32_t>(),
           "arena"_a, "rank"_a, "process_descriptors"_a, "spins"_a)
      .def(
          "run",
          [](Engine& engine, std::shared_ptr<Plan> plan, std::uintptr_t input,
             std::uintptr_t output, int dtype, int op, std::uint32_t divisor,
             std::uint64_t fingerprint, bool sequenced, std::uint64_t what, std::uint64_t count,
             std::int64_t tag, double timeout_s) {
            return run(engine, make_call(std::move(plan), input, output, dtype, op, divisor,
                                         fingerprint, sequenced, what, count, tag, timeout_s));
          },
          "plan"_a, "input"_a, "output"_a, "dtype"_a, "op"_a, "divisor"_a, "fingerprint"_a,
          "sequenced"_a, "what"_a, "count"_a, "tag"_a, "timeout_s"_a)
      .def(
          "submit",
          [](Engine& engine, std::shared_ptr<Plan> plan, std::uintptr_t input,
             std::uintptr_t output, int dtype, int op, std::uint32_t divisor,
             std::uint64_t fingerprint, bool sequenced, std::uint64_t what, std::uint64_t count,
             std::int64_t tag, double timeout_s) {
            return engine.submit(make_call(std::move(plan), input, output, dtype, op, divisor,
                                           fingerprint, sequenced, what, count, tag, timeout_s));
          },
          "plan"_a, "input"_a, "output"_a, "dtype"_a, "op"_a, "divisor"_a, "fingerprint"_a,
          "sequenced"_a, "what"_a, "count"_a, "tag"_a, "timeout_s"_a)
      .def(
          "abort",
          [](Engine& engine, int reason, std::uint32_t subject) {
            engine.abort(static_cast<Abort>(reason), subject);
          },
          "reason"_a, "subject"_a)
      .def("aborted",
           [](const Engine& engine) {
             const auto [reason, subject] = engine.aborted();
             return std::pair{static_cast<int>(reason), subject};
           })
      .def("calls", &calls_of)
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());

  module.def("instruction_set", [] { return instruction_set(); });
  module.def("is_supported", [](int dtype, int op) {
    return is_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
  });
}

}  // namespace farandole

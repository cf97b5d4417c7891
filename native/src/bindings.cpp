// The engine as a Python module. Buffers are passed as addresses: that they are long enough is
// checked by farandole/communicator.py, that they stay alive is seen to by farandole/runner.py.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "arena.hpp"
#include "engine.hpp"
#include "kernels.hpp"
#include "plan.hpp"
#include "postbox.hpp"
#include "repeats.hpp"

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

std::shared_ptr<Plan> make_plan(Rows32<6> operations, Rows32<4> operands, Ints32 operand_ends,
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

std::shared_ptr<SettledCall> make_settled_call(std::shared_ptr<const Plan> plan, int dtype, int op,
                                               std::uint32_t divisor, std::uint64_t fingerprint,
                                               std::uint64_t what, std::uint64_t count,
                                               std::uint64_t scheduled_bytes_sent,
                                               std::uint64_t payload_bytes,
                                               std::shared_ptr<Tally> tally, int wire_form) {
  auto call = std::make_shared<SettledCall>();
  if (op < 0 && plan->max_operands() > 1) {
    throw std::invalid_argument("this plan reduces, and the call names no op");
  }
  if (op >= 0) {
    call->combine = find_combine(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
    if (call->combine == nullptr) throw std::invalid_argument("this dtype cannot be reduced so");
  }
  call->plan = std::move(plan);
  call->divisor = divisor;
  call->fingerprint = fingerprint;
  call->what = what;
  call->count = count;
  call->scheduled_bytes_sent = scheduled_bytes_sent;
  call->payload_bytes = payload_bytes;
  call->tally = std::move(tally);
  if (wire_form < 0 || wire_form >= num_wire_forms) {
    throw std::invalid_argument("there is no such wire form");
  }
  if (wire_form != 0 && static_cast<DType>(dtype) != DType::float32) {
    throw std::invalid_argument("only float32 has wire forms");
  }
  call->wire_form = static_cast<WireForm>(wire_form);
  call->round = find_wire_kernels(call->wire_form).round;
  return call;
}

Call make_call(std::shared_ptr<SettledCall> settled, std::uintptr_t input, std::uintptr_t output,
               double timeout_s) {
  return {std::move(settled), reinterpret_cast<const std::byte*>(input),
          reinterpret_cast<std::byte*>(output), timeout_of(timeout_s)};
}

using ReceiptTuple = std::tuple<int, std::uint32_t>;

ReceiptTuple as_tuple(const Receipt& receipt) {
  return {static_cast<int>(receipt.status), receipt.subject};
}

// Waits in slices, so that Ctrl-C works. False if `timeout_s` was over first.
template <typename Waitable>
bool wait_for_work(Waitable& work, double timeout_s) {
  constexpr std::chrono::milliseconds kSlice{50};
  const auto start = std::chrono::steady_clock::now();
  const std::chrono::duration<double> limit(timeout_s);
  while (!work.is_done()) {
    const std::chrono::duration<double> left = limit - (std::chrono::steady_clock::now() - start);
    if (!(left.count() > 0)) return false;  // nor is it if there is no such time
    {
      const WithoutGil released;
      work.wait_for(left < kSlice ? std::chrono::duration_cast<std::chrono::nanoseconds>(left)
                                  : std::chrono::nanoseconds(kSlice));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
  return true;
}

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;

// Registered memory, which goes back to its heap with the array.
Bytes allocate(Engine& engine, std::size_t num_bytes) {
  struct Owner {
    std::shared_ptr<Heap> heap;
    std::byte* memory;
  };
  auto heap = engine.heap();
  std::byte* memory = heap->allocate(num_bytes);
  auto* owner = new Owner{std::move(heap), memory};
  const nb::capsule capsule(owner, [](void* pointer) noexcept {
    const std::unique_ptr<Owner> released(static_cast<Owner*>(pointer));
    released->heap->free(released->memory);
  });
  return Bytes(reinterpret_cast<std::uint8_t*>(memory), {num_bytes}, capsule);
}

// A message, and what moves it.
struct PostedMessage {
  std::shared_ptr<Postbox> postbox;
  std::shared_ptr<Message> message;

  bool is_done() const noexcept { return message->is_done(); }
  void wait_for(std::chrono::nanoseconds timeout) { postbox->wait_for(*message, timeout); }
};

PostedMessage post_message(std::shared_ptr<Postbox> postbox, bool sends, std::uintptr_t data,
                           std::uint64_t num_bytes, std::optional<std::uint32_t> peer,
                           std::int64_t tag, std::uint8_t dtype, double timeout_s, bool waits) {
  auto message =
      std::make_shared<Message>(sends, peer.value_or(kAnySource), Envelope{tag, num_bytes, dtype},
                                reinterpret_cast<std::byte*>(data));
  bool raised = false;
  {
    WithoutGil released;
    postbox->post(message, timeout_of(timeout_s), waits,
                  [&] { return raised = raised || released.signal_raised(); });
  }
  if (raised) throw nb::python_error();
  return {std::move(postbox), std::move(message)};
}

double seconds_of(const std::atomic<std::int64_t>& timeout_ns) {
  const std::int64_t nanoseconds = timeout_ns.load(std::memory_order_relaxed);
  return nanoseconds > 0 ? static_cast<double>(nanoseconds) * 1e-9 : HUGE_VAL;
}

std::uint32_t checked_rank(const Engine& engine, std::uint32_t rank) {
  if (rank >= engine.arena().geometry().world_size) throw nb::index_error("no such rank");
  return rank;
}

// What the rank of `engine` has refused, for others, while so many of its collectives had not
// ended; longer texts are cut.
void refuse(const Engine& engine, std::string_view text, std::uint64_t waiting) {
  const RankState& state = engine.arena().rank(engine.rank());
  RefusalRecord& record = engine.arena().rank(engine.rank()).refusal;
  std::array<char, sizeof(record.text)> bytes{};
  text.copy(bytes.data(), bytes.size() - 1);
  for (std::size_t i = 0; i < record.text.size(); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i * sizeof(word), sizeof(word));
    record.text[i].store(word, std::memory_order_relaxed);
  }
  record.messages.store(state.message.posted.load(std::memory_order_relaxed),
                        std::memory_order_relaxed);
  record.calls.store(state.call.finished.load(std::memory_order_relaxed) + waiting + 1,
                     std::memory_order_relaxed);
}

// What a rank has refused since the call and the message that it began last, if anything.
nb::bytes refusal_of(const RankState& state) {
  const RefusalRecord& record = state.refusal;
  const std::uint64_t begun = state.call.sequence.load(std::memory_order_relaxed);
  const std::uint64_t made = record.calls.load(std::memory_order_relaxed);
  const std::uint64_t posted = state.message.posted.load(std::memory_order_relaxed);
  if (made == 0 || begun >= made || posted != record.messages.load(std::memory_order_relaxed)) {
    return nb::bytes("", 0);
  }
  std::array<char, sizeof(record.text)> bytes{};
  for (std::size_t i = 0; i < record.text.size(); ++i) {
    const std::uint64_t word = record.text[i].load(std::memory_order_relaxed);
    std::memcpy(bytes.data() + i * sizeof(word), &word, sizeof(word));
  }
  return nb::bytes(bytes.data(), strnlen(bytes.data(), bytes.size()));
}

std::vector<std::uint64_t> board_of(const Engine& engine, std::uint32_t rank) {
  const Board& board = engine.arena().rank(checked_rank(engine, rank)).board;
  std::vector<std::uint64_t> words;
  for (const auto& word : board.words) words.push_back(word.load(std::memory_order_acquire));
  return words;
}

void write_board(const Engine& engine, std::size_t word, std::uint64_t value) {
  Board& board = engine.arena().rank(engine.rank()).board;
  if (word >= board.words.size()) throw nb::index_error("no such word");
  board.words[word].store(value, std::memory_order_release);
  if (engine.relay() != nullptr) engine.relay()->tell();
}

// Makes the rank of `engine` the leader in place of `lost`, if that still is. Returns who is, then.
std::uint64_t claim_lead(const Engine& engine, std::uint64_t lost) {
  std::uint64_t leader = lost;
  const std::uint64_t own = std::uint64_t{engine.rank()} + 1;
  const bool won = engine.arena().header().leader.compare_exchange_strong(
      leader, own, std::memory_order_acq_rel, std::memory_order_acquire);
  return won ? own : leader;
}

using CallTuple =
    std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, double,
               double, bool, std::uint64_t, std::uint64_t, std::uint64_t, nb::bytes>;

std::vector<CallTuple> calls_of(const Engine& engine) {
  std::vector<CallTuple> calls;
  const Arena& arena = engine.arena();
  for (std::uint32_t rank = 0; rank < arena.geometry().world_size; ++rank) {
    const RankState& state = arena.rank(rank);
    calls.emplace_back(
        state.call.sequence.load(std::memory_order_relaxed),
        state.call.finished.load(std::memory_order_relaxed),
        state.call.what.load(std::memory_order_relaxed),
        state.call.count.load(std::memory_order_relaxed),
        state.call.payload_bytes.load(std::memory_order_relaxed), seconds_of(state.call.timeout_ns),
        static_cast<double>(state.call.began_ns.load(std::memory_order_relaxed)) * 1e-9,
        state.closed.load(std::memory_order_acquire) != 0,
        state.call.misfit_rank.load(std::memory_order_relaxed),
        state.call.misfit_bytes.load(std::memory_order_relaxed),
        state.call.expected_bytes.load(std::memory_order_relaxed), refusal_of(state));
  }
  return calls;
}

using FlightTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                               std::int64_t, std::int64_t>;

std::vector<FlightTuple> flights_of(const Engine& engine) {
  std::vector<FlightTuple> flights;
  for (const Flight& flight : engine.flights()) {
    const std::uint64_t sequence = flight.sequence.load(std::memory_order_acquire);
    if (sequence == 0) continue;
    const FlightTuple read(sequence, flight.what.load(std::memory_order_acquire),
                           flight.count.load(std::memory_order_acquire),
                           flight.payload_bytes.load(std::memory_order_acquire),
                           flight.began_ns.load(std::memory_order_acquire),
                           flight.ended_ns.load(std::memory_order_acquire));
    if (flight.sequence.load(std::memory_order_relaxed) == sequence) flights.push_back(read);
  }
  std::sort(flights.begin(), flights.end());
  return flights;
}

using LoggedTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                               std::int64_t, std::int64_t, std::int64_t, bool>;

std::pair<std::vector<LoggedTuple>, std::uint64_t> logged_flights_of(Engine& engine) {
  const auto [flights, num_lost] = engine.flight_log().stop();
  std::vector<LoggedTuple> tuples;
  tuples.reserve(flights.size());
  for (const LoggedFlight& flight : flights) {
    tuples.emplace_back(flight.sequence, flight.what, flight.count, flight.payload_bytes,
                        flight.called_ns, flight.began_ns, flight.ended_ns, flight.is_done);
  }
  return {std::move(tuples), num_lost};
}

using MessageTuple =
    std::tuple<std::uint64_t, std::uint64_t, std::int64_t, double, std::uint64_t, std::uint64_t>;

std::vector<MessageTuple> messages_of(const Engine& engine) {
  std::vector<MessageTuple> messages;
  const Arena& arena = engine.arena();
  for (std::uint32_t rank = 0; rank < arena.geometry().world_size; ++rank) {
    const MessageRecord& record = arena.rank(rank).message;
    messages.emplace_back(record.what.load(std::memory_order_relaxed),
                          record.bytes.load(std::memory_order_relaxed),
                          record.tag.load(std::memory_order_relaxed), seconds_of(record.timeout_ns),
                          record.arrived_what.load(std::memory_order_relaxed),
                          record.arrived_bytes.load(std::memory_order_relaxed));
  }
  return messages;
}

}  // namespace

NB_MODULE(_native, module) {
  module.doc() = "The engine of farandole. Use farandole.Communicator instead.";

  // At exit, a thread that is held in WithoutGil still refers to what it uses.
  nb::set_leak_warnings(false);
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const NestedCall& nested) {
      const nb::object kind = nb::module_::import_("farandole.errors").attr("ArgumentError");
      PyErr_SetString(kind.ptr(), nested.what());
    }
  });

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
      .def(
          "has_closed",
          [](const Arena& arena, std::uint32_t rank) {
            if (rank >= arena.geometry().world_size) throw nb::index_error("no such rank");
            return arena.rank(rank).closed.load(std::memory_order_acquire) != 0;
          },
          "rank"_a)
      .def("close_descriptor", &Arena::close_descriptor);

  nb::class_<Plan>(module, "Plan")
      .def(nb::new_(&make_plan), "operations"_a, "operands"_a, "operand_ends"_a, "after"_a,
           "after_ends"_a, "size_bytes"_a, "input_slots"_a, "output_slots"_a, "num_work_slots"_a,
           "size_classes"_a, "rank"_a, "world_size"_a, "max_segment_bytes"_a, "element_bytes"_a);

  nb::class_<Work>(module, "Work")
      .def("is_done", &Work::is_done)
      .def("wait", &wait_for_work<Work>, "timeout_s"_a)
      .def("receipt", [](const Work& work) { return as_tuple(work.receipt()); });

  nb::class_<Tally>(module, "Tally")
      .def(nb::new_([] { return std::make_shared<Tally>(); }))
      .def("read", [](const Tally& tally) {
        const auto read = [](const auto& field) { return field.load(std::memory_order_relaxed); };
        return std::tuple{read(tally.calls),
                          read(tally.bytes_sent),
                          read(tally.bytes_received),
                          read(tally.bytes_mapped),
                          read(tally.scheduled_bytes_sent),
                          read(tally.payload_bytes),
                          static_cast<double>(read(tally.nanoseconds)) * 1e-9};
      });

  nb::class_<SettledCall>(module, "SettledCall")
      .def(nb::new_(&make_settled_call), "plan"_a, "dtype"_a, "op"_a, "divisor"_a, "fingerprint"_a,
           "what"_a, "count"_a, "scheduled_bytes_sent"_a, "payload_bytes"_a, "tally"_a,
           "wire_form"_a);

  nb::class_<Engine>(module, "Engine")
      .def(nb::new_([](std::shared_ptr<Arena> arena, std::uint32_t rank,
                       std::vector<int> process_descriptors, std::uint32_t spins,
                       std::uint32_t background_spins, std::uint32_t yields,
                       std::size_t smallest_mapped_bytes, std::size_t most_unexpected_bytes,
                       std::vector<int> connections) {
             return std::make_shared<Engine>(std::move(arena), rank, std::move(process_descriptors),
                                             Tuning{spins, background_spins, yields,
                                                    smallest_mapped_bytes, most_unexpected_bytes},
                                             std::move(connections));
           }),
           "arena"_a, "rank"_a, "process_descriptors"_a, "spins"_a = 0, "background_spins"_a = 0,
           "yields"_a = 0, "smallest_mapped_bytes"_a = 0,
           "most_unexpected_bytes"_a = std::numeric_limits<std::size_t>::max(),
           "connections"_a = std::vector<int>())
      .def(
          "run",
          [](Engine& engine, std::shared_ptr<SettledCall> call, std::uintptr_t input,
             std::uintptr_t output, double timeout_s) {
            return as_tuple(
                run_without_gil(engine, make_call(std::move(call), input, output, timeout_s)));
          },
          "call"_a, "input"_a, "output"_a, "timeout_s"_a)
      .def(
          "submit",
          [](Engine& engine, std::shared_ptr<SettledCall> call, std::uintptr_t input,
             std::uintptr_t output, double timeout_s) {
            return engine.submit(make_call(std::move(call), input, output, timeout_s));
          },
          "call"_a, "input"_a, "output"_a, "timeout_s"_a)
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
      .def("allocate", &allocate, "num_bytes"_a)
      .def("refuse", &refuse, "text"_a, "waiting"_a)
      .def("board", &board_of, "rank"_a)
      .def("write_board", &write_board, "word"_a, "value"_a)
      .def("leader",
           [](const Engine& engine) {
             return engine.arena().header().leader.load(std::memory_order_acquire);
           })
      .def("claim_lead", &claim_lead, "lost"_a)
      .def(
          "is_gone",
          [](const Engine& engine, std::uint32_t rank) {
            return engine.has_ended(checked_rank(engine, rank));
          },
          "rank"_a)
      .def("silent",
           [](const Engine& engine) {
             return engine.relay() == nullptr ? std::vector<std::uint32_t>()
                                              : engine.relay()->silent();
           })
      .def("wire_bytes",
           [](const Engine& engine) {
             const Relay* relay = engine.relay();
             return relay == nullptr ? std::pair<std::uint64_t, std::uint64_t>{}
                                     : std::pair{relay->bytes_sent(), relay->bytes_received()};
           })
      .def("calls", &calls_of)
      .def("messages", &messages_of)
      .def("flights", &flights_of)
      .def(
          "log_flights", [](Engine& engine, std::size_t most) { engine.flight_log().start(most); },
          "most"_a)
      .def("logged_flights", &logged_flights_of)
      .def("close", &Engine::close, nb::call_guard<WithoutGil>());

  nb::class_<PostedMessage>(module, "Message")
      .def("is_done", &PostedMessage::is_done)
      .def("wait", &wait_for_work<PostedMessage>, "timeout_s"_a)
      .def("receipt",
           [](const PostedMessage& posted) { return as_tuple(posted.message->receipt()); })
      .def("source", [](const PostedMessage& posted) {
        const std::uint32_t source = posted.message->source();
        return source == kAnySource ? std::optional<std::uint32_t>() : source;
      });

  nb::class_<Postbox>(module, "Postbox")
      .def(
          nb::new_([](std::shared_ptr<Engine> engine) { return Postbox::make(std::move(engine)); }),
          "engine"_a)
      .def("post", &post_message, "sends"_a, "data"_a, "num_bytes"_a, "peer"_a.none(), "tag"_a,
           "dtype"_a, "timeout_s"_a, "waits"_a)
      .def_prop_ro("sends", &Postbox::sends)
      .def_prop_ro("receives", &Postbox::receives)
      .def("close", &Postbox::close, nb::call_guard<WithoutGil>());

  nb::class_<Repeats>(module, "Repeats")
      .def(nb::init<std::shared_ptr<Engine>>(), "engine"_a)
      .def("run", &Repeats::run, "collective"_a, "source"_a.none(), "target"_a.none(),
           "op"_a.none(), "root"_a.none(), "algorithm"_a.none(), "timeout_s"_a.none())
      .def("remember", &Repeats::remember, "collective"_a, "source"_a.none(), "target"_a.none(),
           "op"_a.none(), "root"_a.none(), "algorithm"_a.none(), "settled"_a, "input_start"_a,
           "output_start"_a);

  module.def("instruction_set", [] { return instruction_set(); });
  module.def("is_supported", [](int dtype, int op) {
    return is_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
  });
}

}  // namespace farandole

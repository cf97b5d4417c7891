// Whole calls, with the ranks as threads on one mapping: the programs that the lowering makes for a
// ring and for a one-step exchange, written out by hand, on sizes that are uneven, empty, and cut
// into many segments.

#include <sys/socket.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "copy.hpp"
#include "engine.hpp"

namespace farandole {
namespace {

using Columns = ProgramColumns;

// A program as its columns, built operation by operation.
struct Program {
  std::vector<Columns::Operation> operations;
  std::vector<Columns::Operand> operands;
  std::vector<std::int32_t> operand_ends, after, after_ends;

  void publish(std::int32_t region, std::int32_t slot, std::int32_t reader,
               const std::vector<std::int32_t>& waits_for = {}) {
    append({region, slot, slot, reader, 0, 1}, {}, waits_for);
  }
  void combine(std::int32_t slot, const std::vector<Columns::Operand>& sources, bool completes,
               const std::vector<std::int32_t>& waits_for = {}) {
    append({1, slot, slot, Columns::kCombine, completes ? 1 : 0, 0}, sources, waits_for);
  }
  std::int32_t last() const { return static_cast<std::int32_t>(operations.size()) - 1; }

 private:
  void append(const Columns::Operation& operation, const std::vector<Columns::Operand>& sources,
              const std::vector<std::int32_t>& waits_for) {
    operations.push_back(operation);
    operands.insert(operands.end(), sources.begin(), sources.end());
    operand_ends.push_back(static_cast<std::int32_t>(operands.size()));
    after.insert(after.end(), waits_for.begin(), waits_for.end());
    after_ends.push_back(static_cast<std::int32_t>(after.size()));
  }
};

Columns::Operand local(std::int32_t region, std::int32_t slot) {
  return {Columns::kLocal, 0, region, slot};
}
Columns::Operand from(std::int32_t peer, bool shared) { return {peer, shared ? 1 : 0, 0, 0}; }

Program ring_all_reduce(std::int32_t rank, std::int32_t n) {
  Program program;
  const std::int32_t right = (rank + 1) % n;
  const std::int32_t left = (rank + n - 1) % n;
  std::vector<std::int32_t> written(static_cast<std::size_t>(n), -1);
  std::vector<std::int32_t> published(static_cast<std::size_t>(n), -1);
  for (std::int32_t step = 0; step < 2 * (n - 1); ++step) {
    const auto sent = static_cast<std::size_t>((rank - step + 2 * n) % n);
    const auto arriving = static_cast<std::size_t>((rank - step - 1 + 2 * n) % n);
    const auto sent_slot = static_cast<std::int32_t>(sent);
    const auto arriving_slot = static_cast<std::int32_t>(arriving);
    if (written[sent] < 0) {
      program.publish(0, sent_slot, right);
    } else {
      program.publish(1, sent_slot, right, {written[sent]});
    }
    published[sent] = program.last();
    std::vector<std::int32_t> waits_for;
    if (published[arriving] >= 0) waits_for.push_back(published[arriving]);
    if (step < n - 1) {
      program.combine(arriving_slot, {local(0, arriving_slot), from(left, false)}, step == n - 2,
                      waits_for);
    } else {
      program.combine(arriving_slot, {from(left, false)}, false, waits_for);
    }
    written[arriving] = program.last();
  }
  if (n == 1) program.combine(0, {local(0, 0)}, false);
  return program;
}

Program one_shot_all_reduce(std::int32_t rank, std::int32_t n) {
  Program program;
  if (n > 1) program.publish(0, 0, n > 2 ? Columns::kEveryone : 1 - rank);
  std::vector<Columns::Operand> sources;
  for (std::int32_t peer = 0; peer < n; ++peer) {
    sources.push_back(peer == rank ? local(0, 0) : from(peer, n > 2));
  }
  program.combine(0, sources, n > 1,
                  n > 1 ? std::vector<std::int32_t>{0} : std::vector<std::int32_t>{});
  return program;
}

using MakeProgram = Program (*)(std::int32_t rank, std::int32_t n);

std::shared_ptr<Plan> bind_plan(const Program& program, const std::vector<std::int64_t>& counts,
                                std::uint32_t rank, const Geometry& geometry) {
  std::vector<std::int64_t> bytes;
  std::vector<Layout::Slot> slots;
  std::vector<std::int32_t> classes(counts.size());
  std::iota(classes.begin(), classes.end(), 0);
  std::int64_t offset = 0;
  for (const std::int64_t count : counts) {
    bytes.push_back(count * 4);
    slots.push_back({offset, count * 4});
    offset += count * 4;
  }
  const Columns columns{program.operations, program.operands,   program.operand_ends,
                        program.after,      program.after_ends, classes};
  return std::make_shared<Plan>(columns, Layout{bytes, slots, slots, 0}, rank, geometry.world_size,
                                geometry.slot_bytes, 4);
}

std::vector<std::int64_t> split(std::int64_t count, std::int64_t parts) {
  std::vector<std::int64_t> counts;
  for (std::int64_t i = 0; i < parts; ++i) counts.push_back(count / parts + (i < count % parts));
  return counts;
}

std::int32_t element(std::uint32_t rank, std::size_t i, int round) {
  return static_cast<std::int32_t>(rank * 1'000'003 + i * 17 + static_cast<std::size_t>(round) * 7);
}

std::size_t count_wrong_sums(std::span<const std::int32_t> sums, std::uint32_t n, int round) {
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    std::int64_t sum = 0;
    for (std::uint32_t peer = 0; peer < n; ++peer) sum += element(peer, i, round);
    wrong += sums[i] != static_cast<std::int32_t>(sum);
  }
  return wrong;
}

Call make_call(std::shared_ptr<Plan> plan, std::vector<std::int32_t>& buffer,
               std::uint64_t fingerprint = 42) {
  const auto settled = std::make_shared<SettledCall>();
  settled->plan = std::move(plan);
  settled->combine = find_combine(DType::int32, ReduceOp::sum);
  settled->fingerprint = fingerprint;
  settled->tally = std::make_shared<Tally>();
  Call call;
  call.settled = settled;
  call.input = reinterpret_cast<const std::byte*>(buffer.data());
  call.output = reinterpret_cast<std::byte*>(buffer.data());
  call.timeout = std::chrono::minutes(2);
  return call;
}

// One thread per rank, each with an engine of its own on the shared mapping.
void on_all_ranks(const std::shared_ptr<Arena>& arena, const std::function<void(Engine&)>& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < arena->geometry().world_size; ++rank) {
    threads.emplace_back([&, rank] {
      Engine engine(arena, rank, {}, Tuning{50, 50, 2});
      body(engine);
    });
  }
  for (auto& thread : threads) thread.join();
}

void test_all_reduce(MakeProgram make_program, std::uint32_t n, std::int64_t num_chunks,
                     std::int64_t count, bool background) {
  const auto arena = Arena::create({n, 2, 16 * 1024, 7});
  std::atomic<std::size_t> wrong{0};
  std::atomic<std::uint64_t> sent{0};
  std::atomic<std::uint64_t> received{0};
  on_all_ranks(arena, [&](Engine& engine) {
    const std::uint32_t rank = engine.rank();
    const auto plan =
        bind_plan(make_program(static_cast<std::int32_t>(rank), static_cast<std::int32_t>(n)),
                  split(count, num_chunks), rank, arena->geometry());
    constexpr int kRounds = 5;
    std::vector<std::vector<std::int32_t>> buffers(kRounds);
    std::vector<std::shared_ptr<Work>> works;
    for (int round = 0; round < kRounds; ++round) {
      auto& buffer = buffers[static_cast<std::size_t>(round)];
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
        buffer.push_back(element(rank, i, round));
      }
      const Call call = make_call(plan, buffer);
      // The last call of a background run is synchronous: it must come after all the others.
      if (background && round + 1 < kRounds) {
        works.push_back(engine.submit(call));
        continue;
      }
      const Receipt receipt = engine.run(call, {});
      wrong += receipt.status != Abort::none;
      sent += receipt.bytes_sent;
      received += receipt.bytes_received;
    }
    for (const auto& work : works) {
      while (!work->wait_for(std::chrono::seconds(1))) {
      }
      wrong += work->receipt().status != Abort::none;
      sent += work->receipt().bytes_sent;
      received += work->receipt().bytes_received;
    }
    for (int round = 0; round < kRounds; ++round) {
      wrong += count_wrong_sums(buffers[static_cast<std::size_t>(round)], n, round);
    }
  });
  testing::check_equal(wrong.load(), std::size_t{0});
  testing::check_equal(sent.load(), received.load());
  const std::uint64_t volume = (num_chunks == 1 ? n : 2) * std::uint64_t{n - 1} * 4 * 5;
  testing::check_equal(sent.load(), volume * static_cast<std::uint64_t>(count));
}

// As test_all_reduce, with the buffers in registered memory: on all ranks, or on every other one.
void test_mapped_all_reduce(std::uint32_t n, std::int64_t count, bool all) {
  const auto arena = Arena::create({n, 2, 16 * 1024, 7});
  std::atomic<std::size_t> wrong{0};
  on_all_ranks(arena, [&](Engine& engine) {
    const std::uint32_t rank = engine.rank();
    const auto plan =
        bind_plan(ring_all_reduce(static_cast<std::int32_t>(rank), static_cast<std::int32_t>(n)),
                  split(count, n), rank, arena->geometry());
    const auto size = static_cast<std::size_t>(count);
    std::vector<std::int32_t> buffer(size);
    const auto heap = engine.heap();
    auto* memory = reinterpret_cast<std::int32_t*>(heap->allocate(size * 4));
    std::int32_t* data = all || rank % 2 == 0 ? memory : buffer.data();
    for (int round = 0; round < 5; ++round) {
      for (std::size_t i = 0; i < size; ++i) data[i] = element(rank, i, round);
      Call call = make_call(plan, buffer);
      call.input = reinterpret_cast<const std::byte*>(data);
      call.output = reinterpret_cast<std::byte*>(data);
      wrong += engine.run(call, {}).status != Abort::none;
      wrong += count_wrong_sums({data, size}, n, round);
    }
    heap->free(reinterpret_cast<std::byte*>(memory));
  });
  testing::check_equal(wrong.load(), std::size_t{0});
}

// Sockets between all of n ranks, each on a host of its own: per rank, those to the others.
std::vector<std::vector<int>> connect_all(std::uint32_t n) {
  std::vector<std::vector<int>> connections(n, std::vector<int>(n, -1));
  for (std::uint32_t one = 0; one < n; ++one) {
    for (std::uint32_t other = one + 1; other < n; ++other) {
      int ends[2];
      testing::check_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
      connections[one][other] = ends[0];
      connections[other][one] = ends[1];
    }
  }
  return connections;
}

// float32 on hosts of one rank each, a ring of them: the bits are the same on all, sums that every
// form can hold arrive unchanged, others nearly, and what travels is as short as it should be.
void test_wire_forms(WireForm form, std::int64_t count, bool is_registered) {
  constexpr std::uint32_t n = 3;
  const auto size = static_cast<std::size_t>(count);
  auto connections = connect_all(n);
  std::vector<std::vector<float>> sums(n);
  std::atomic<std::uint64_t> sent{0};
  std::atomic<std::size_t> wrong{0};
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      const Geometry geometry{n, 2, 16 * 1024, 7};
      Engine engine(Arena::create(geometry), rank, {}, Tuning{5, 5, 2}, connections[rank]);
      const auto plan = bind_plan(ring_all_reduce(static_cast<std::int32_t>(rank), n),
                                  split(count, n), rank, geometry);
      const auto heap = engine.heap();
      std::byte* memory = heap->allocate(4 * size + 1);
      std::vector<float> own(size);
      float* data = is_registered ? reinterpret_cast<float*>(memory) : own.data();
      SettledCall settled;
      settled.plan = plan;
      settled.combine = find_combine(DType::float32, ReduceOp::sum);
      settled.fingerprint = 42;
      settled.wire_form = form;
      settled.round = find_wire_kernels(form).round;
      Call call;
      call.settled = std::make_shared<SettledCall>(settled);
      call.input = reinterpret_cast<const std::byte*>(data);
      call.output = reinterpret_cast<std::byte*>(data);
      for (const float unit : {1.0F, 0.3F}) {
        for (std::size_t i = 0; i < size; ++i) {
          data[i] = unit * static_cast<float>(static_cast<int>(i * (rank + 1) % 80) - 40);
        }
        wrong += engine.run(call, {}).status != Abort::none;
        for (std::size_t i = 0; i < size; ++i) {
          const auto sum =
              static_cast<float>(static_cast<int>(i % 80 + 2 * i % 80 + 3 * i % 80) - 120);
          wrong += std::fabs(data[i] - unit * sum) > (unit == 1.0F ? 0.0F : 2.0F);
        }
        sums[rank].insert(sums[rank].end(), data, data + size);
      }
      engine.close();  // which sends what is left
      sent += engine.relay()->bytes_sent();
      heap->free(memory);
    });
  }
  for (auto& thread : threads) thread.join();
  testing::check_equal(wrong.load(), std::size_t{0});
  for (std::uint32_t rank = 1; rank < n; ++rank) {
    testing::check(sums[rank] == sums[0], "all ranks have the same bits");
  }
  std::uint64_t expected = 0;
  for (const std::int64_t chunk : split(count, n)) {
    const auto whole = static_cast<std::size_t>(4 * chunk);
    const std::size_t segment = segment_bytes(whole, 16 * 1024);
    for (std::size_t first = 0; first < whole; first += segment) {
      expected += encoded_bytes(form, std::min(segment, whole - first));
    }
  }
  testing::check_equal(sent.load(), 2 * 2 * (n - 1) * expected);
}

// A publication that travels mapped is over only when its reader has taken it: not before, or the
// caller would change what is still read; and not never, if the reader is gone.
void test_a_mapped_reader_that_is_gone() {
  const auto arena = Arena::create({2, 4, 16 * 1024, 7});
  Engine engine(arena, 0, {}, Tuning{5, 5, 2});
  Program sends;
  sends.publish(0, 0, 1);
  std::vector<std::int32_t> buffer(100);
  const auto heap = engine.heap();
  std::byte* memory = heap->allocate(400);
  Call call = make_call(bind_plan(sends, {100}, 0, arena->geometry()), buffer);
  call.input = memory;
  std::atomic<bool> ended{false};
  Receipt receipt;
  std::thread caller([&] {
    receipt = engine.run(call, {});
    ended = true;
  });
  Reader reader(*arena, 0, 1, 1, Traffic::collectives);
  while (!reader.has_data()) std::this_thread::yield();
  testing::check(!ended, "the call lasts until its reader is through");
  testing::check_equal(reader.label().heap_position, heap->offset_of(memory) + 1);
  arena->rank(1).closed.store(1);
  caller.join();
  testing::check_equal(static_cast<int>(receipt.status), static_cast<int>(Abort::peer_lost));
  testing::check_equal(receipt.subject, 1U);
  heap->free(memory);
}

// Every alignment of both ends, and every length around whole cache lines; nothing beside it
// changes.
void test_copy_streaming() {
  std::vector<std::byte> source(1024);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 + 1);
  std::size_t wrong = 0;
  for (std::size_t to = 0; to < 65; to += 3) {
    for (std::size_t from = 0; from < 65; from += 7) {
      for (const std::size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 129, 500}) {
        std::vector<std::byte> target(1024, std::byte{0});
        copy_streaming(target.data() + to, source.data() + from, bytes);
        for (std::size_t i = 0; i < target.size(); ++i) {
          const bool inside = i >= to && i < to + bytes;
          wrong += target[i] != (inside ? source[from + i - to] : std::byte{0});
        }
      }
    }
  }
  testing::check_equal(wrong, std::size_t{0});
}

void test_heap() {
  const auto arena = Arena::create({1, 2, 64, 7});
  Heap heap(arena->rank(0).heap);
  std::vector<std::byte*> blocks;
  for (const std::size_t bytes : {1, 4096, 4097, 40'960}) blocks.push_back(heap.allocate(bytes));
  testing::check_equal(blocks[2] - blocks[1], std::ptrdiff_t{4096});
  testing::check_equal(blocks[3] - blocks[2], std::ptrdiff_t{8192});
  // Holes that meet become one: in either order, and in between.
  heap.free(blocks[0]);
  heap.free(blocks[2]);
  testing::check_equal(heap.allocate(3 * 4096) - blocks[3], std::ptrdiff_t{40'960});
  heap.free(blocks[1]);
  testing::check(heap.allocate(4 * 4096) == blocks[0], "three holes became one");
  PeerHeap peer(arena->rank(0).heap);
  blocks[3][7] = std::byte{42};
  testing::check(*peer.at(heap.offset_of(blocks[3]) + 7, 1) == std::byte{42}, "it reads the same");
  testing::check(peer.at(~std::uint64_t{0}, 1) == nullptr, "not beyond the end");
  bool refused = false;
  try {
    heap.allocate(std::size_t{1} << 60);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  testing::check(refused, "more than there is");
}

// Rank 0 calls with a fingerprint or a size of its own: every rank must hear of it, whoever finds
// it.
void test_mismatch(bool other_size) {
  const auto arena = Arena::create({3, 2, 16 * 1024, 7});
  std::atomic<std::size_t> found{0};
  on_all_ranks(arena, [&](Engine& engine) {
    const bool differs = engine.rank() == 0;
    const std::int64_t count = differs && other_size ? 90'001 : 90'000;
    const auto plan = bind_plan(ring_all_reduce(static_cast<std::int32_t>(engine.rank()), 3),
                                split(count, 3), engine.rank(), arena->geometry());
    std::vector<std::int32_t> buffer(static_cast<std::size_t>(count));
    const Call call = make_call(plan, buffer, differs && !other_size ? 43 : 42);
    found += engine.run(call, {}).status == Abort::mismatch;
    found += engine.run(call, {}).status == Abort::mismatch;  // and at every later call
  });
  testing::check_equal(found.load(), std::size_t{6});
}

void test_absence(Abort expected) {
  const auto arena = Arena::create({2, 2, 16 * 1024, 7});
  Receipt receipt;
  on_all_ranks(arena, [&](Engine& engine) {
    if (engine.rank() == 1) {
      if (expected == Abort::timeout) {
        while (engine.aborted().first == Abort::none) std::this_thread::yield();
      }
      if (expected == Abort::requested) engine.abort(Abort::requested, 1);
      return;  // the engine is closed
    }
    const auto plan = bind_plan(ring_all_reduce(0, 2), {30'000, 30'000}, 0, arena->geometry());
    std::vector<std::int32_t> buffer(60'000);
    Call call = make_call(plan, buffer);
    if (expected == Abort::timeout) call.timeout = std::chrono::milliseconds(1);
    receipt = engine.run(call, {});
  });
  testing::check_equal(static_cast<int>(receipt.status), static_cast<int>(expected));
  testing::check_equal(receipt.subject, expected == Abort::timeout ? 0U : 1U);
}

// Rank 1 lives and does not read yet; behind it, rank 2 is gone.
void test_absence_behind_a_slow_reader() {
  const auto arena = Arena::create({3, 2, 16 * 1024, 7});
  arena->rank(2).closed.store(1);
  Engine engine(arena, 0, {}, Tuning{5, 5, 2});
  const auto plan = bind_plan(one_shot_all_reduce(0, 3), {60'000}, 0, arena->geometry());
  std::vector<std::int32_t> buffer(60'000);
  const Receipt receipt = engine.run(make_call(plan, buffer), {});
  testing::check_equal(static_cast<int>(receipt.status), static_cast<int>(Abort::peer_lost));
  testing::check_equal(receipt.subject, 2U);
}

// Two ranks that each only send, in calls that differ: whoever closes last must notice.
void test_disagreement_on_closing() {
  const auto arena = Arena::create({2, 2, 16 * 1024, 7});
  std::vector<std::int32_t> buffer(4);
  std::vector<std::unique_ptr<Engine>> engines;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    Program sends;
    sends.publish(0, 0, static_cast<std::int32_t>(1 - rank));
    const Call call = make_call(bind_plan(sends, {4}, rank, arena->geometry()), buffer, rank);
    engines.push_back(std::make_unique<Engine>(arena, rank, std::vector<int>{}, Tuning{5, 5, 2}));
    const Receipt receipt = engines.back()->run(call, {});
    testing::check_equal(static_cast<int>(receipt.status), static_cast<int>(Abort::none));
  }
  engines[1]->close();
  testing::check_equal(static_cast<int>(engines[0]->aborted().first),
                       static_cast<int>(Abort::mismatch));
}

void test_interruption() {
  const auto arena = Arena::create({2, 2, 16 * 1024, 7});
  Engine engine(arena, 0, {}, Tuning{5, 5, 2});
  const auto plan = bind_plan(ring_all_reduce(0, 2), {10, 10}, 0, arena->geometry());
  std::vector<std::int32_t> buffer(20);
  const Receipt receipt = engine.run(make_call(plan, buffer), [] { return true; });
  testing::check_equal(static_cast<int>(receipt.status), static_cast<int>(Abort::interrupted));
}

void test_close_with_work() {
  const auto arena = Arena::create({2, 2, 16 * 1024, 7});
  Engine engine(arena, 0, {}, Tuning{5, 5, 2});
  const auto plan = bind_plan(ring_all_reduce(0, 2), {10, 10}, 0, arena->geometry());
  std::vector<std::int32_t> buffer(20);
  const auto first = engine.submit(make_call(plan, buffer));
  const auto second = engine.submit(make_call(plan, buffer));
  engine.close();
  testing::check(first->is_done() && second->is_done(), "close ends what still waits");
  testing::check_equal(static_cast<int>(second->receipt().status),
                       static_cast<int>(Abort::requested));
  const auto late = engine.submit(make_call(plan, buffer));
  testing::check(late->is_done(), "nothing starts after close");
}

// The engine's thread sleeps while a synchronous call runs; closing must wake it all the same.
void test_close_during_a_call() {
  const auto arena = Arena::create({2, 2, 16 * 1024, 7});
  Engine engine(arena, 0, {}, Tuning{5, 5, 2});
  std::vector<std::int32_t> one(1);
  const auto alone = bind_plan(ring_all_reduce(0, 1), {1}, 0, arena->geometry());
  engine.submit(make_call(alone, one))->wait_for(std::chrono::minutes(1));
  const auto plan = bind_plan(ring_all_reduce(0, 2), {10, 10}, 0, arena->geometry());
  std::vector<std::int32_t> buffer(20);
  std::atomic<int> status{-1};
  std::thread caller(
      [&] { status = static_cast<int>(engine.run(make_call(plan, buffer), {}).status); });
  while (arena->rank(0).call.sequence.load() < 2) std::this_thread::yield();
  engine.close();
  caller.join();
  testing::check_equal(status.load(), static_cast<int>(Abort::requested));
  const Receipt late = engine.run(make_call(alone, one), {});
  testing::check_equal(static_cast<int>(late.status), static_cast<int>(Abort::requested));
}

void test_plan_refuses_what_has_no_room() {
  const std::vector<std::int64_t> sizes{8, 16};
  const std::vector<Layout::Slot> rooms{{0, 8}, {8, 15}};
  const std::vector<std::int32_t> classes{0, 1};
  const auto refuses = [&](const Program& program) {
    const Columns columns{program.operations, program.operands,   program.operand_ends,
                          program.after,      program.after_ends, classes};
    try {
      const Plan plan(columns, Layout{sizes, rooms, rooms, 0}, 0, 2, 64, 4);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  Program fits;
  fits.publish(0, 0, 1);
  testing::check(!refuses(fits), "what just fits");
  Program reads;
  reads.publish(0, 1, 1);
  testing::check(refuses(reads), "a publication longer than its place");
  Program writes;
  writes.combine(1, {from(1, false)}, false);
  testing::check(refuses(writes), "a combination longer than its place");
  Program takes;
  takes.combine(0, {local(0, 1)}, false);
  takes.operations[0].size = 1;
  testing::check(refuses(takes), "an operand longer than its place");
  Program broken = fits;
  broken.operand_ends = {1};
  testing::check(refuses(broken), "operands that are not there");
  broken = fits;
  broken.after_ends.clear();
  testing::check(refuses(broken), "columns of different lengths");
}

void test_plan_refuses() {
  const auto refuses = [](const Program& program, const std::vector<std::int64_t>& counts) {
    try {
      bind_plan(program, counts, 0, {2, 2, 64, 0});
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  Program to_itself;
  to_itself.publish(0, 0, 0);
  testing::check(refuses(to_itself, {4}), "a publication to itself");
  Program to_nobody;
  to_nobody.publish(0, 0, 2);
  testing::check(refuses(to_nobody, {4}), "a publication to a rank that is not there");
  Program no_slot;
  no_slot.publish(0, 1, 1);
  testing::check(refuses(no_slot, {4}), "a slot that is not there");
  Program no_work;
  no_work.publish(2, 0, 1);
  testing::check(refuses(no_work, {4}), "a work slot that is not there");
  Program waits_for_itself;
  waits_for_itself.publish(0, 0, 1, {0});
  testing::check(refuses(waits_for_itself, {4}), "an operation that waits for itself");
  testing::check(refuses(one_shot_all_reduce(0, 2), {-4}), "a negative size");
  test_plan_refuses_what_has_no_room();
}

// Calls in the background and blocking ones, while the log is started, full, stopped, and read on
// another thread.
void test_flight_log() {
  const auto arena = Arena::create({2, 2, 16 * 1024, 7});
  std::atomic<std::size_t> wrong{0};
  on_all_ranks(arena, [&](Engine& engine) {
    const auto plan = bind_plan(ring_all_reduce(static_cast<std::int32_t>(engine.rank()), 2),
                                split(10, 2), engine.rank(), arena->geometry());
    std::vector<std::int32_t> buffer(10);
    const auto run = [&](int times) {
      for (int i = 0; i < times; ++i) {
        const auto work = engine.submit(make_call(plan, buffer));
        wrong += engine.run(make_call(plan, buffer), {}).status != Abort::none;
      }
    };
    run(3);
    wrong += !engine.flight_log().stop().first.empty();
    engine.flight_log().start(15);
    run(10);
    const auto [flights, num_lost] = engine.flight_log().stop();
    wrong += flights.size() != 15 || num_lost != 5;
    std::uint64_t sequence = 6;
    for (const LoggedFlight& flight : flights) {
      const bool blocks = ++sequence % 2 == 0;
      wrong += flight.sequence != sequence || (flight.called_ns != 0) != blocks;
      wrong += flight.called_ns > flight.began_ns || flight.began_ns > flight.ended_ns;
    }
    std::size_t num_logged = 0;
    std::atomic<bool> is_over{false};
    std::thread reader([&] {
      while (!is_over.load()) {
        engine.flight_log().start(1000);
        num_logged += engine.flight_log().stop().first.size();
      }
    });
    run(200);
    is_over.store(true);
    reader.join();
    wrong += num_logged > 400;
  });
  testing::check_equal(wrong.load(), std::size_t{0});
}

}  // namespace
}  // namespace farandole

int main() {
  using namespace farandole;
  test_plan_refuses();
  for (const bool background : {false, true}) {
    for (std::uint32_t n = 1; n <= 5; ++n) {
      for (const std::int64_t count : {0, 1, 3, 5, 4096, 8191, 50'021}) {
        test_all_reduce(ring_all_reduce, n, n, count, background);
        if (n > 1) test_all_reduce(one_shot_all_reduce, n, 1, count, background);
      }
    }
  }
  for (const std::uint32_t n : {2U, 3U, 5U}) {
    for (const bool all : {false, true}) test_mapped_all_reduce(n, 50'021, all);
  }
  for (const WireForm form : {WireForm::as_is, WireForm::bfloat16, WireForm::int8}) {
    for (const std::int64_t count : {0, 1, 3, 25, 5000, 50'021}) {
      for (const bool is_registered : {false, true}) test_wire_forms(form, count, is_registered);
    }
  }
  test_a_mapped_reader_that_is_gone();
  test_heap();
  test_copy_streaming();
  test_mismatch(false);
  test_mismatch(true);
  test_absence(Abort::timeout);
  test_absence(Abort::peer_lost);
  test_absence(Abort::requested);
  test_absence_behind_a_slow_reader();
  test_disagreement_on_closing();
  test_interruption();
  test_close_with_work();
  test_close_during_a_call();
  test_flight_log();
  return testing::report();
}

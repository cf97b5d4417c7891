// Both ends of a channel as threads on one mapping, so that ThreadSanitizer sees every access.
// What arrives is compared byte by byte and in order: a reordering passes no test here.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "check.hpp"
#include "endpoint.hpp"

namespace farandole {
namespace {

constexpr std::uint64_t kMessages = 20'000;

std::byte expected_byte(std::uint32_t src, std::uint64_t number, std::size_t position) {
  return static_cast<std::byte>((src * 131 + number * 31 + position * 7) & 0xff);
}

std::size_t expected_bytes(std::uint64_t number, std::size_t slot_bytes) {
  return number * 2654435761U % (slot_bytes + 1);
}

// Waits as the engine does: looks for a while, then announces that it sleeps, looks again, and
// sleeps.
template <typename Condition>
void wait_until(Doorbell& self, const Condition& holds) {
  for (int spin = 0; spin < 50; ++spin) {
    if (holds()) return;
  }
  while (true) {
    const std::uint32_t bell = self.rings.load(std::memory_order_seq_cst);
    self.sleeping.store(1, std::memory_order_seq_cst);
    const bool now = holds();
    // A lost wake-up shows as a test that runs into its time limit: the sleep is far longer than
    // the test.
    if (!now) futex_wait(self.rings, bell, std::chrono::minutes(10));
    self.sleeping.store(0, std::memory_order_seq_cst);
    if (now || holds()) return;
  }
}

void write_all(const Arena& arena, std::uint32_t src, std::uint32_t dst, Traffic traffic) {
  Writer writer(arena, src, dst, traffic);
  std::vector<std::byte> message(arena.geometry().slot_bytes);
  for (std::uint64_t number = 0; number < kMessages; ++number) {
    const std::size_t bytes = expected_bytes(number, message.size());
    for (std::size_t i = 0; i < bytes; ++i) message[i] = expected_byte(src, number, i);
    wait_until(arena.rank(src).doorbell(traffic), [&] { return writer.has_room(); });
    writer.publish(message.data(), bytes, {number, bytes});
  }
}

std::uint64_t count_wrong(const Arena& arena, std::uint32_t src, std::uint32_t dst,
                          std::uint32_t reader_rank, Traffic traffic) {
  Reader reader(arena, src, dst, reader_rank, traffic);
  std::uint64_t wrong = 0;
  for (std::uint64_t number = 0; number < kMessages; ++number) {
    wait_until(arena.rank(reader_rank).doorbell(traffic), [&] { return reader.has_data(); });
    const std::size_t bytes = expected_bytes(number, arena.geometry().slot_bytes);
    const Label label = reader.label();
    wrong += label.fingerprint != number || label.total_bytes != bytes;
    for (std::size_t i = 0; i < bytes; ++i) {
      wrong += reader.data(bytes)[i] != expected_byte(src, number, i);
    }
    reader.release();
  }
  return wrong;
}

void test_pair(std::uint32_t num_slots, Traffic traffic) {
  const auto arena = Arena::create({2, num_slots, 128, 1});
  std::uint64_t wrong = 0;
  std::thread reading([&] { wrong = count_wrong(*arena, 0, 1, 1, traffic); });
  write_all(*arena, 0, 1, traffic);
  reading.join();
  testing::check_equal(wrong, std::uint64_t{0});
}

void test_shared(std::uint32_t num_slots) {
  constexpr std::uint32_t kRanks = 4;
  constexpr Traffic kTraffic = Traffic::collectives;
  const auto arena = Arena::create({kRanks, num_slots, 64, 2});
  std::array<std::uint64_t, kRanks> wrong{};
  std::vector<std::thread> readers;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    if (rank == 1) continue;
    readers.emplace_back([&, rank] { wrong[rank] = count_wrong(*arena, 1, 1, rank, kTraffic); });
  }
  write_all(*arena, 1, 1, kTraffic);
  for (auto& reader : readers) reader.join();
  for (const std::uint64_t count : wrong) testing::check_equal(count, std::uint64_t{0});
}

void test_room() {
  const auto arena = Arena::create({3, 2, 64, 3});
  Writer shared(*arena, 0, 0, Traffic::collectives);
  Reader first(*arena, 0, 0, 1, Traffic::collectives);
  Reader second(*arena, 0, 0, 2, Traffic::collectives);
  const std::array<std::byte, 4> data{};
  shared.publish(data.data(), data.size(), {1, 4});
  testing::check(shared.has_room(), "shared.has_room()");
  shared.publish(data.data(), data.size(), {2, 4});
  testing::check(!shared.has_room(), "!shared.has_room()");
  testing::check(first.has_data(), "first.has_data()");
  first.release();
  testing::check(!shared.has_room(), "!shared.has_room()");  // the second reader has not taken it
  testing::check(shared.waits_for(2) && !shared.waits_for(1), "it waits for the second alone");
  testing::check(second.has_data(), "second.has_data()");
  second.release();
  testing::check(shared.has_room(), "shared.has_room()");
}

void test_layout() {
  const auto arena = Arena::create({5, 3, 192, 4});
  std::vector<const std::byte*> starts;
  for (std::uint32_t src = 0; src < 5; ++src) {
    for (std::uint32_t index = 0; index < 10; ++index) {
      const std::uint32_t dst = index % 5;
      const Traffic traffic = index < 5 ? Traffic::collectives : Traffic::messages;
      if (src == dst && traffic == Traffic::messages) continue;
      const Channel channel = arena->channel(src, dst, traffic);
      starts.push_back(reinterpret_cast<const std::byte*>(&channel.taken(dst)));
      testing::check_equal(reinterpret_cast<std::uintptr_t>(&channel.taken(dst)) % kCacheLine,
                           std::uintptr_t{0});
      testing::check_equal(reinterpret_cast<std::uintptr_t>(channel.data(2, 192)) % kCacheLine,
                           std::uintptr_t{0});
    }
  }
  std::sort(starts.begin(), starts.end());
  for (std::size_t i = 1; i < starts.size(); ++i) {
    testing::check(starts[i] - starts[i - 1] >=
                       static_cast<std::ptrdiff_t>(Channel::bytes(arena->geometry(), false)),
                   "channels lie apart");
  }
  const auto* begin = reinterpret_cast<const std::byte*>(&arena->header());
  testing::check(starts.back() + Channel::bytes(arena->geometry(), false) <=
                     begin + Arena::total_bytes(arena->geometry()),
                 "the last channel ends in the arena");
}

}  // namespace
}  // namespace farandole

int main() {
  farandole::test_layout();
  farandole::test_room();
  for (const std::uint32_t num_slots : {1U, 2U, 5U}) {
    farandole::test_pair(num_slots, farandole::Traffic::collectives);
    farandole::test_pair(num_slots, farandole::Traffic::messages);
    farandole::test_shared(num_slots);
  }
  return farandole::testing::report();
}

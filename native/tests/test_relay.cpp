// Relays between two hosts that are arenas of this process: what is published at one end arrives at
// the other in order, whole and no sooner than there is room; what is left is sent by who leaves;
// aborts and records are told; and nothing that comes over a connection does harm.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "plan.hpp"
#include "relay.hpp"

namespace farandole {
namespace {

using testing::check;
using testing::check_equal;

constexpr Geometry kGeometry{2, 4, 128, 7};
constexpr std::array<Traffic, 2> kTraffics{Traffic::collectives, Traffic::messages};

// Two ranks on two hosts, with a relay each.
struct World {
  std::array<std::shared_ptr<Arena>, 2> arenas{Arena::create(kGeometry), Arena::create(kGeometry)};
  std::vector<std::byte> heap = std::vector<std::byte>(10'000);
  std::array<std::unique_ptr<Relay>, 2> relays;

  World() {
    std::array<int, 2> sockets{};
    check_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      std::vector<int> connections{-1, -1};
      connections[1 - rank] = sockets[rank];
      relays[rank] = std::make_unique<Relay>(
          arenas[rank], rank, connections,
          [this](std::uint64_t position) { return heap.data() + position; });
    }
  }
  Writer writer(std::uint32_t rank, Traffic traffic) {
    return {*arenas[rank], rank, 1 - rank, traffic, &relays[rank]->bell()};
  }
  Reader reader(std::uint32_t rank, Traffic traffic) {
    return {*arenas[rank], 1 - rank, rank, rank, traffic, &relays[rank]->bell()};
  }
};

std::byte value(std::uint64_t number, std::size_t i) {
  return static_cast<std::byte>(number * 31 + i * 7 + i / 251);
}

// Some publications, and what they are cut into.
struct Stream {
  std::vector<std::size_t> sizes;

  Stream(unsigned seed, std::size_t number) {
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < number; ++i) {
      sizes.push_back(std::array<std::size_t, 6>{0, 1, 32, 33, 128, 1000}[random() % 6]);
    }
  }
  template <typename Visit>  // visit(number, offset, bytes, size)
  void for_each_segment(const Visit& visit) const {
    for (std::size_t number = 0; number < sizes.size(); ++number) {
      std::size_t offset = 0;
      do {
        const std::size_t bytes =
            std::min(segment_bytes(sizes[number], kGeometry.slot_bytes), sizes[number] - offset);
        visit(number, offset, bytes, sizes[number]);
        offset += bytes;
      } while (offset < sizes[number]);
    }
  }
};

void publish_all(Writer writer, const Stream& stream) {
  stream.for_each_segment(
      [&](std::size_t number, std::size_t offset, std::size_t bytes, std::size_t size) {
        std::array<std::byte, kGeometry.slot_bytes> data{};
        for (std::size_t i = 0; i < bytes; ++i) data[i] = value(number, offset + i);
        while (!writer.has_room()) std::this_thread::yield();
        writer.publish(data.data(), bytes, {number, size, 0});
      });
}

// Returns how many segments were not what was published.
int take_all(Reader reader, const Stream& stream) {
  int num_wrong = 0;
  stream.for_each_segment(
      [&](std::size_t number, std::size_t offset, std::size_t bytes, std::size_t size) {
        while (!reader.has_data()) std::this_thread::yield();
        const Label& label = reader.label();
        bool is_right = label.fingerprint == number && label.total_bytes == size;
        is_right &= label.heap_position == 0;
        const std::byte* data = reader.data(bytes);
        for (std::size_t i = 0; i < bytes; ++i) is_right &= data[i] == value(number, offset + i);
        num_wrong += is_right ? 0 : 1;
        reader.release();
      });
  return num_wrong;
}

void test_both_ways_and_kinds_at_once(unsigned seed) {
  World world;
  std::vector<std::thread> threads;
  std::vector<Stream> streams;
  for (unsigned i = 0; i < 4; ++i) streams.emplace_back(4 * seed + i, 300);
  std::size_t next = 0;
  std::atomic<int> num_wrong{0};
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    for (const Traffic traffic : kTraffics) {
      const Stream& stream = streams[next++];
      threads.emplace_back(
          [&, rank, traffic] { publish_all(world.writer(rank, traffic), stream); });
      threads.emplace_back(
          [&, rank, traffic] { num_wrong += take_all(world.reader(1 - rank, traffic), stream); });
    }
  }
  for (std::thread& thread : threads) thread.join();
  check_equal(num_wrong.load(), 0);
  check_equal(world.relays[0]->bytes_sent(), world.relays[1]->bytes_received());
}

void test_what_is_mapped_is_sent_from_where_it_lies() {
  World world;
  for (std::size_t i = 0; i < world.heap.size(); ++i) world.heap[i] = value(3, i);
  Writer writer = world.writer(0, Traffic::collectives);
  writer.publish(world.heap.data(), 100, {3, 100, 500 + 1});
  Reader reader = world.reader(1, Traffic::collectives);
  while (!reader.has_data()) std::this_thread::yield();
  check(std::memcmp(reader.data(100), world.heap.data() + 500, 100) == 0, "the same bytes");
  while (writer.taken() != 1) std::this_thread::yield();
}

// A reader that does not come holds up neither the other kind of traffic nor who leaves.
void test_who_leaves_waits_for_nobody() {
  World world;
  const Stream stuck(1, 1);
  Writer writer = world.writer(0, Traffic::collectives);
  std::array<std::byte, 8> data{};
  std::uint64_t published = 0;
  for (; published < 2 * kGeometry.num_slots; ++published) {  // as many as fit at both ends
    while (!writer.has_room()) std::this_thread::yield();
    writer.publish(data.data(), data.size(), {published, data.size(), 0});
  }
  const Stream others(2, 50);
  int num_wrong = 0;
  std::thread taking([&] { num_wrong = take_all(world.reader(1, Traffic::messages), others); });
  publish_all(world.writer(0, Traffic::messages), others);
  taking.join();
  check_equal(num_wrong, 0);
  check(!world.relays[1]->is_gone(0, Traffic::collectives), "it is there");
  world.relays[0]->close();
  Reader reader = world.reader(1, Traffic::collectives);
  for (std::uint64_t taken = 0; taken < published; ++taken) {
    while (!reader.has_data()) std::this_thread::yield();
    check(taken + kGeometry.num_slots >= published ||
              !world.relays[1]->is_gone(0, Traffic::collectives),
          "nobody is gone whose words have not all come");
    check_equal(reader.label().fingerprint, taken);
    reader.release();
  }
  while (!world.relays[1]->is_gone(0, Traffic::collectives)) std::this_thread::yield();
  check_equal(world.arenas[1]->rank(0).closed.load(), 1U);
}

// What travels in another form arrives as it was in memory, with the label that it had; also what
// there was no slot for when it came.
void test_another_form_on_the_wire(WireForm form) {
  World world;
  constexpr std::size_t kCount = kGeometry.slot_bytes / sizeof(float);
  constexpr std::uint64_t kPublished = 2 * kGeometry.num_slots;
  const std::uint64_t total = with_form(kGeometry.slot_bytes, form);
  const auto number = [](std::uint64_t segment, std::size_t i) {  // which all forms can hold
    return std::ldexp(static_cast<float>(i) - 16.0F, static_cast<int>(segment));
  };
  Writer writer = world.writer(0, Traffic::collectives);
  for (std::uint64_t segment = 0; segment < kPublished; ++segment) {
    std::array<float, kCount> data{};
    for (std::size_t i = 0; i < kCount; ++i) data[i] = number(segment, i);
    while (!writer.has_room()) std::this_thread::yield();
    writer.publish(reinterpret_cast<const std::byte*>(data.data()), sizeof(data),
                   {segment, total, 0});
  }
  world.relays[0]->close();  // which sends what there is no room for
  Reader reader = world.reader(1, Traffic::collectives);
  std::size_t num_wrong = 0;
  for (std::uint64_t segment = 0; segment < kPublished; ++segment) {
    while (!reader.has_data()) std::this_thread::yield();
    num_wrong += reader.label().fingerprint != segment || reader.label().total_bytes != total;
    std::array<float, kCount> data{};
    std::memcpy(data.data(), reader.data(sizeof(data)), sizeof(data));
    for (std::size_t i = 0; i < kCount; ++i) num_wrong += data[i] != number(segment, i);
    reader.release();
  }
  check_equal(num_wrong, std::size_t{0});
  check_equal(world.relays[0]->bytes_sent(),
              kPublished * encoded_bytes(form, kGeometry.slot_bytes));
  check_equal(world.relays[1]->bytes_received(), world.relays[0]->bytes_sent());
}

void test_records_and_aborts_are_told() {
  World world;
  CallRecord& call = world.arenas[0]->rank(0).call;
  call.what.store(77);
  call.count.store(5);
  call.sequence.store(3);
  world.arenas[0]->rank(0).message.tag.store(-9);
  world.arenas[0]->rank(0).board.words[2].store(11);
  world.relays[0]->tell();
  const CallRecord& mirror = world.arenas[1]->rank(0).call;
  while (mirror.sequence.load() != 3) std::this_thread::yield();
  while (world.arenas[1]->rank(0).board.words[2].load() != 11) std::this_thread::yield();
  check_equal(mirror.what.load(), 77U);
  check_equal(mirror.count.load(), 5U);
  check_equal(world.arenas[1]->rank(0).message.tag.load(), -9);
  check_equal(world.relays[1]->silent().size(), 1U);  // there was no abort
  call.misfit_rank.store(2);
  const std::uint64_t abort = std::uint64_t{1} << 32 | static_cast<std::uint32_t>(Abort::timeout);
  world.arenas[0]->header().abort.store(abort);
  world.relays[0]->tell();
  while (world.arenas[1]->header().abort.load() == 0) std::this_thread::yield();
  check_equal(world.arenas[1]->header().abort.load(), abort);
  check_equal(mirror.misfit_rank.load(), 2U);  // what is said of an abort comes before it
  while (!world.relays[0]->silent().empty() || !world.relays[1]->silent().empty()) {
    std::this_thread::yield();
  }
}

// Whatever comes, the relay lives or gives the connection up; it touches no other memory.
void test_junk(unsigned seed, const std::vector<std::byte>& sound) {
  std::mt19937 random(seed);
  const auto arena = Arena::create(kGeometry);
  std::array<int, 2> sockets{};
  check_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
  Relay relay(arena, 0, {-1, sockets[0]}, [](std::uint64_t) { return nullptr; });
  std::vector<std::byte> junk = sound;
  const auto kind = random() % 3;
  if (kind == 0) {
    junk.resize(random() % 600);
    for (std::byte& one : junk) one = static_cast<std::byte>(random());
  } else {
    junk.resize(std::min<std::size_t>(junk.size(), random() % 2000));
    const auto num_changes = kind == 1 ? 1 : random() % 20;
    for (std::size_t i = 0; i < num_changes && !junk.empty(); ++i) {
      junk[random() % junk.size()] = static_cast<std::byte>(random());
    }
  }
  check_equal(send(sockets[1], junk.data(), junk.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(junk.size()));
  ::close(sockets[1]);
  Reader reader(*arena, 1, 0, 0, Traffic::collectives, &relay.bell());
  while (!relay.is_gone(1, Traffic::collectives)) {
    if (reader.has_data()) reader.release();
    std::this_thread::yield();
  }
}

// Segments after the first must be of the same publication and the right size: readers count on it.
void test_a_publication_that_changes_its_size() {
  for (const bool changes : {false, true}) {
    World world;
    Writer writer = world.writer(0, Traffic::messages);
    std::array<std::byte, kGeometry.slot_bytes> data{};
    const std::size_t total = 2 * kGeometry.slot_bytes;
    writer.publish(data.data(), data.size(), {5, total, 0});
    writer.publish(data.data(), data.size(), {5, changes ? std::uint64_t{1} << 40 : total, 0});
    Reader reader = world.reader(1, Traffic::messages);
    while (!reader.has_data()) std::this_thread::yield();
    reader.release();
    while (!reader.has_data() && !world.relays[1]->is_gone(0, Traffic::messages)) {
      std::this_thread::yield();
    }
    check_equal(reader.has_data(), !changes);
  }
}

// What a relay says in a short life.
std::vector<std::byte> sound_bytes() {
  const auto arena = Arena::create(kGeometry);
  std::array<int, 2> sockets{};
  check_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
  {
    Relay relay(arena, 1, {sockets[0], -1}, [](std::uint64_t) { return nullptr; });
    Writer writer(*arena, 1, 0, Traffic::collectives, &relay.bell());
    std::array<std::byte, 100> data{};
    for (std::uint64_t number = 0; number < 3; ++number) {
      const auto form = static_cast<WireForm>(number);
      writer.publish(data.data(), data.size(), {number, with_form(data.size(), form), 0});
    }
    while (writer.taken() != 3) std::this_thread::yield();
    std::thread closing([&] { relay.close(); });
    shutdown(sockets[1], SHUT_WR);
    closing.join();
  }
  std::vector<std::byte> bytes(10'000);
  std::size_t size = 0;
  while (true) {
    const ssize_t got = recv(sockets[1], bytes.data() + size, bytes.size() - size, 0);
    if (got <= 0) break;
    size += static_cast<std::size_t>(got);
  }
  ::close(sockets[1]);
  bytes.resize(size);
  check(size > 300, "there is something to spoil");
  return bytes;
}

}  // namespace
}  // namespace farandole

int main() {
  using namespace farandole;
  for (unsigned seed = 0; seed < 5; ++seed) test_both_ways_and_kinds_at_once(seed);
  test_what_is_mapped_is_sent_from_where_it_lies();
  test_who_leaves_waits_for_nobody();
  for (const WireForm form : {WireForm::as_is, WireForm::bfloat16, WireForm::int8}) {
    test_another_form_on_the_wire(form);
  }
  test_records_and_aborts_are_told();
  test_a_publication_that_changes_its_size();
  const std::vector<std::byte> sound = sound_bytes();
  for (unsigned seed = 0; seed < 10'000; ++seed) test_junk(seed, sound);
  return testing::report();
}

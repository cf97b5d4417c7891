// Messages, with the ranks as threads on one mapping: in any order on both sides, in channels that
// hold far less than what is sent. Every byte tells whose it is and where it belongs.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <source_location>
#include <thread>
#include <vector>

#include "check.hpp"
#include "postbox.hpp"

namespace farandole {
namespace {

constexpr std::size_t kSlotBytes = 16 * 1024;
constexpr std::size_t kLarge = 40 * kSlotBytes + 13;
constexpr std::uint8_t kDtype = 3;

using Bytes = std::vector<std::byte>;

std::mutex checking;  // the ranks are threads

void expect(bool condition, const char* claim,
            std::source_location place = std::source_location::current()) {
  const std::lock_guard lock(checking);
  testing::check(condition, claim, place);
}

template <typename Actual, typename Expected>
void expect_equal(const Actual& actual, const Expected& expected,
                  std::source_location place = std::source_location::current()) {
  const std::lock_guard lock(checking);
  testing::check_equal(actual, expected, place);
}

Bytes contents(std::uint32_t src, std::uint32_t dst, std::int64_t tag, std::size_t size) {
  Bytes bytes(size);
  const std::size_t start = src * 131 + dst * 37 + static_cast<std::size_t>(tag) * 7;
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(start + i * 3 + i / 251);
  return bytes;
}

// One rank, with the few verbs that these tests need.
class Rank {
 public:
  Rank(const std::shared_ptr<Arena>& arena, std::uint32_t rank,
       const Tuning& tuning = Tuning{50, 50, 2})
      : engine(std::make_shared<Engine>(arena, rank, std::vector<int>{}, tuning)),
        postbox(Postbox::make(engine)) {}
  ~Rank() {
    postbox->close();
    engine->close();
  }

  std::uint32_t rank() const { return engine->rank(); }
  std::shared_ptr<Message> post(bool sends, Bytes& bytes, std::uint32_t peer, std::int64_t tag,
                                bool waits, std::uint8_t dtype = kDtype,
                                std::chrono::nanoseconds timeout = std::chrono::minutes(2)) {
    auto message =
        std::make_shared<Message>(sends, peer, Envelope{tag, bytes.size(), dtype}, bytes.data());
    postbox->post(message, timeout, waits, {});
    return message;
  }
  Abort finish(const Message& message) {
    while (!postbox->wait_for(message, std::chrono::seconds(1))) {
    }
    return message.receipt().status;
  }
  void send(std::uint32_t dst, std::int64_t tag, std::size_t size) {
    Bytes bytes = contents(rank(), dst, tag, size);
    expect(post(true, bytes, dst, tag, true)->is_done(), "a send that waits is done");
  }
  void receive(std::uint32_t src, std::int64_t tag, std::size_t size) {
    Bytes bytes(size);
    const auto message = post(false, bytes, src, tag, true);
    expect(message->receipt().status == Abort::none, "the receive ends well");
    expect(bytes == contents(src, rank(), tag, size), "what arrives is what was sent");
    expect_equal(message->source(), src);
  }

  const std::shared_ptr<Engine> engine;
  const std::shared_ptr<Postbox> postbox;
};

void on_all_ranks(std::uint32_t n, const std::function<void(Rank&)>& body,
                  std::uint32_t num_slots = 2) {
  const auto arena = Arena::create({n, num_slots, kSlotBytes, 7});
  std::vector<std::thread> threads;
  // A rank must not leave while others still need it only to say so: all leave together.
  std::vector<std::unique_ptr<Rank>> ranks;
  for (std::uint32_t rank = 0; rank < n; ++rank)
    ranks.push_back(std::make_unique<Rank>(arena, rank));
  for (auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
  for (auto& thread : threads) thread.join();
}

void test_all_send_first(std::uint32_t n, std::size_t size) {
  on_all_ranks(n, [&](Rank& self) {
    const std::uint32_t left = (self.rank() + n - 1) % n;
    for (std::int64_t round = 0; round < 3; ++round) {
      self.send((self.rank() + 1) % n, round, size);
      self.receive(left, round, size);
    }
  });
}

void test_tags_out_of_order() {
  on_all_ranks(2, [](Rank& self) {
    constexpr std::int64_t kTags = 20;
    const auto size = [](std::int64_t tag) {
      return tag == 0 ? kLarge : static_cast<std::size_t>(tag % 3) * 777;
    };
    if (self.rank() == 0) {
      std::vector<Bytes> kept;
      std::vector<std::shared_ptr<Message>> messages;
      for (std::int64_t tag = 0; tag < kTags; ++tag) {
        kept.push_back(contents(0, 1, tag, size(tag)));
        messages.push_back(self.post(true, kept.back(), 1, tag, false));
      }
      for (const auto& message : messages) expect(self.finish(*message) == Abort::none, "sent");
    } else {
      for (std::int64_t tag = kTags - 1; tag >= 0; --tag) self.receive(0, tag, size(tag));
    }
  });
}

void test_equal_tags_keep_their_order() {
  on_all_ranks(2, [](Rank& self) {
    constexpr std::size_t kMessages = 200;
    std::vector<Bytes> buffers;
    for (std::size_t i = 0; i < kMessages; ++i) {
      buffers.push_back(self.rank() == 0 ? contents(0, 1, static_cast<std::int64_t>(i), 1 + i * 11)
                                         : Bytes(1 + i * 11));
    }
    std::vector<std::shared_ptr<Message>> messages;
    for (Bytes& buffer : buffers)
      messages.push_back(self.post(self.rank() == 0, buffer, 1 - self.rank(), 5, false));
    for (std::size_t i = 0; i < kMessages; ++i) {
      expect(self.finish(*messages[i]) == Abort::none, "it ends well");
      expect(buffers[i] == contents(0, 1, static_cast<std::int64_t>(i), 1 + i * 11), "in order");
    }
  });
}

void test_any_source(std::uint32_t n) {
  on_all_ranks(n, [&](Rank& self) {
    constexpr std::size_t kEach = 30;
    const auto size = [](std::size_t i) { return i * 1999; };
    if (self.rank() != 0) {
      for (std::size_t i = 0; i < kEach; ++i) self.send(0, static_cast<std::int64_t>(i), size(i));
      return;
    }
    std::vector<std::size_t> received(n);
    for (std::size_t i = 0; i < kEach; ++i) {
      for (std::uint32_t peer = 1; peer < n; ++peer) {
        Bytes bytes(size(i));
        const auto tag = static_cast<std::int64_t>(i);
        const auto message = self.post(false, bytes, kAnySource, tag, true);
        expect(message->receipt().status == Abort::none, "the receive ends well");
        expect(bytes == contents(message->source(), 0, tag, size(i)), "of its source");
        ++received[message->source()];
      }
    }
    for (std::uint32_t peer = 1; peer < n; ++peer) expect_equal(received[peer], kEach);
  });
}

// All pairs exchange messages with tags of their own; each rank posts its part in an order of its
// own, and waits in another.
void test_random_traffic(std::uint32_t n, unsigned seed) {
  struct Plan {
    std::uint32_t src, dst;
    std::int64_t tag;
    std::size_t size;
  };
  std::vector<Plan> plans;
  std::mt19937 generator(seed);
  const auto random = [&] { return static_cast<std::uint32_t>(generator()); };
  for (std::int64_t tag = 0; tag < 60; ++tag) {
    const std::uint32_t src = random() % n;
    const std::uint32_t dst = (src + 1 + random() % (n - 1)) % n;
    const std::size_t sizes[] = {0,          1,     32, 33, 5000, kSlotBytes, kSlotBytes + 1,
                                 kLarge / 2, kLarge};
    plans.push_back({src, dst, tag, sizes[random() % std::size(sizes)]});
  }
  on_all_ranks(n, [&](Rank& self) {
    std::mt19937 order(seed * 31 + self.rank());
    std::vector<Plan> mine;
    std::copy_if(plans.begin(), plans.end(), std::back_inserter(mine), [&](const Plan& plan) {
      return plan.src == self.rank() || plan.dst == self.rank();
    });
    std::shuffle(mine.begin(), mine.end(), order);
    std::vector<Bytes> buffers;
    std::vector<std::shared_ptr<Message>> messages;
    std::vector<std::size_t> turns;
    for (const Plan& plan : mine) {
      const bool sends = plan.src == self.rank();
      turns.push_back(buffers.size());
      buffers.push_back(sends ? contents(plan.src, plan.dst, plan.tag, plan.size)
                              : Bytes(plan.size));
      messages.push_back(
          self.post(sends, buffers.back(), sends ? plan.dst : plan.src, plan.tag, false));
    }
    std::shuffle(turns.begin(), turns.end(), order);
    for (const std::size_t i : turns) {
      const Plan& plan = mine[i];
      expect(self.finish(*messages[i]) == Abort::none, "it ends well");
      expect(buffers[i] == contents(plan.src, plan.dst, plan.tag, plan.size), "what was sent");
    }
  });
}

// Nobody waits on rank 0 until all has gone.
void test_background() {
  on_all_ranks(2, [](Rank& self) {
    if (self.rank() == 0) {
      Bytes bytes = contents(0, 1, 1, kLarge);
      Bytes back(kLarge);
      const auto sent = self.post(true, bytes, 1, 1, false);
      const auto received = self.post(false, back, 1, 2, false);
      while (!sent->is_done() || !received->is_done()) std::this_thread::yield();
      expect(back == contents(1, 0, 2, kLarge), "what was sent");
    } else {
      self.receive(0, 1, kLarge);
      self.send(0, 2, kLarge);
    }
  });
}

// Threads of one rank wait side by side, each for its own.
void test_many_threads() {
  constexpr std::int64_t kThreads = 4;
  on_all_ranks(2, [](Rank& self) {
    std::vector<std::thread> threads;
    for (std::int64_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&self, thread] {
        for (std::int64_t round = 0; round < 30; ++round) {
          const std::int64_t tag = thread * 1000 + round;
          const std::size_t size = round % 7 == 0 ? kLarge : 8;
          const std::uint32_t peer = 1 - self.rank();
          if ((self.rank() + static_cast<std::uint32_t>(thread)) % 2 == 0) {
            self.send(peer, tag, size);
            self.receive(peer, tag, size);
          } else {
            self.receive(peer, tag, size);
            self.send(peer, tag, size);
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

void test_mismatch(std::size_t size, std::uint8_t dtype, bool posted_first) {
  const auto arena = Arena::create({2, 2, kSlotBytes, 7});
  Rank sender(arena, 0);
  Rank receiver(arena, 1);
  Bytes sent(8);
  Bytes received(size);
  std::shared_ptr<Message> receive;
  if (posted_first) receive = receiver.post(false, received, 0, 4, false, dtype);
  sender.post(true, sent, 1, 4, false);
  if (!posted_first) receive = receiver.post(false, received, kAnySource, 4, false, dtype);
  expect(receiver.finish(*receive) == Abort::message_mismatch, "it does not fit");
  expect_equal(receive->receipt().subject, 1U);
  const MessageRecord& record = arena->rank(1).message;
  expect_equal(record.arrived_what.load(), std::uint64_t{1 | kDtype << 8});
  expect_equal(record.arrived_bytes.load(), std::uint64_t{8});
  expect_equal(record.bytes.load(), std::uint64_t{size});
  const auto later = sender.post(true, sent, 1, 4, false);
  expect(later->receipt().status == Abort::message_mismatch, "both hear of it");
}

void test_absence() {
  const auto arena = Arena::create({3, 2, kSlotBytes, 7});
  Bytes bytes(kLarge);
  auto first = std::make_unique<Rank>(arena, 1);
  {
    Rank self(arena, 0);
    Bytes small = contents(1, 0, 8, 40);
    first->post(true, small, 0, 8, true);
    first.reset();
    self.receive(1, 8, 40);  // what was sent before it left
    const auto send = self.post(true, bytes, 1, 0, false);
    expect(self.finish(*send) == Abort::peer_lost, "nobody receives it");
    expect_equal(send->receipt().subject, 1U);
  }
  const auto other = Arena::create({3, 2, kSlotBytes, 7});
  Rank self(other, 0);
  const auto any = self.post(false, bytes, kAnySource, 0, false);
  other->rank(1).closed.store(1);
  expect(!self.postbox->wait_for(*any, std::chrono::milliseconds(120)), "rank 2 may send");
  other->rank(2).closed.store(1);
  expect(self.finish(*any) == Abort::peer_lost, "nobody is left");
}

void test_most_unexpected() {
  constexpr std::size_t kMost = 3000;
  constexpr std::size_t kOverhead = 200;  // more than is counted for what is known of a message
  Tuning tuning{50, 50, 2};
  tuning.most_unexpected_bytes = kMost + kOverhead;
  const auto arena = Arena::create({2, 2, kSlotBytes, 7});
  Rank sender(arena, 0);
  Rank receiver(arena, 1, tuning);
  Bytes kept = contents(0, 1, 0, kMost);
  Bytes more(kOverhead);
  Bytes got(kMost);
  Bytes one(kOverhead);
  // As much as there may be, again and again.
  for (int round = 0; round < 3; ++round) {
    const auto first = sender.post(true, kept, 1, 0, false);
    const auto second = sender.post(true, more, 1, 1, false);
    receiver.post(false, one, 0, 1, true);
    const auto late = receiver.post(false, got, 0, 0, true);
    expect(late->receipt().status == Abort::none && got == kept, "what was kept is delivered");
    expect(sender.finish(*first) == Abort::none && sender.finish(*second) == Abort::none, "sent");
  }
  // A byte more.
  const auto first = sender.post(true, kept, 1, 0, false);
  const auto second = sender.post(true, more, 1, 0, false);
  const auto third = receiver.post(false, one, 0, 1, true);
  expect(third->receipt().status == Abort::too_many_unexpected, "too much for the receiver");
  expect_equal(third->receipt().subject, 1u);
  sender.finish(*first);  // it was through
  const Abort heard = sender.finish(*second);
  expect(heard == Abort::none || heard == Abort::too_many_unexpected, "through, or told of it");
}

void test_ends() {
  Bytes bytes(kLarge);
  {
    Rank self(Arena::create({2, 2, kSlotBytes, 7}), 0);
    const auto first = self.post(false, bytes, 1, 0, false);
    const auto message = self.post(false, bytes, 1, 0, true, kDtype, std::chrono::milliseconds(1));
    expect(message->receipt().status == Abort::message_timeout, "time is over");
    expect(self.finish(*first) == Abort::message_timeout, "for all");
  }
  {
    Rank self(Arena::create({2, 2, kSlotBytes, 7}), 0);
    const auto kept =
        std::make_shared<Message>(false, 1, Envelope{0, bytes.size(), kDtype}, bytes.data());
    self.postbox->post(kept, std::nullopt, true, [] { return true; });
    expect(kept->receipt().status == Abort::interrupted, "interrupted");
  }
  {
    const auto arena = Arena::create({2, 2, kSlotBytes, 7});
    Rank self(arena, 0);
    Rank peer(arena, 1);
    const auto kept = self.post(false, bytes, 1, 0, false);
    std::thread waiting([&] { self.finish(*kept); });
    peer.engine->abort(Abort::requested, 1);
    waiting.join();
    expect(kept->receipt().status == Abort::requested, "aborted by another");
  }
  {
    Rank self(Arena::create({2, 2, kSlotBytes, 7}), 0);
    const auto sent = self.post(true, bytes, 1, 0, false);
    const auto kept = self.post(false, bytes, 1, 0, false);
    std::thread waiting([&] { self.finish(*kept); });
    self.postbox->close();
    waiting.join();
    expect(sent->is_done() && kept->is_done(), "close ends what waits");
    expect(self.post(false, bytes, 1, 0, true)->receipt().status == Abort::requested,
           "and what comes");
  }
}

}  // namespace
}  // namespace farandole

int main() {
  using namespace farandole;
  for (const std::uint32_t n : {2U, 3U, 5U}) {
    for (const std::size_t size : {std::size_t{0}, std::size_t{100}, kLarge})
      test_all_send_first(n, size);
    test_any_source(n);
  }
  test_tags_out_of_order();
  test_equal_tags_keep_their_order();
  for (unsigned seed = 0; seed < 20; ++seed) test_random_traffic(2 + seed % 4, seed);
  test_background();
  test_many_threads();
  for (const bool posted_first : {false, true}) {
    test_mismatch(9, kDtype, posted_first);
    test_mismatch(8, kDtype + 1, posted_first);
  }
  test_absence();
  test_most_unexpected();
  test_ends();
  return testing::report();
}

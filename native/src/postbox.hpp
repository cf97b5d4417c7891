// Messages from one rank to another, beside the collectives and independent of them.
//
// A message is a send on one rank, matched with a receive on another. It travels in the channel
// from the one to the other that is for messages alone, cut into segments as a chunk of a
// collective is; the segments of one message come one after the other. The label of each says what
// the message is: its tag, its size and its dtype (its *envelope*).
//
// Sends to one rank leave in the order in which they were posted; all else goes on side by side. A
// send is done when its last segment lies in a slot: its buffer may then be used again.
//
// A receive takes the first message that has its tag and comes from its source (or from any). Where
// several receives would take a message, the one posted first does. What arrives and finds no
// receive stays in the channel, if nothing has to come past it. It is read into memory of its own
// (it becomes *unexpected*) once a receive waits for something else from the same rank, which must
// be behind it; or once a thread of this rank waits for a send and nothing moves, as the receiver
// of that may itself be waiting for a send, to here. So no order of sends and receives, nor of
// tags, ends with ranks that wait for each other.
//
// Who does the work: every thread that waits for a message moves all messages of its rank, one at a
// time under one mutex, and sleeps if nothing can be moved. While nobody waits, a thread of the
// postbox does, from the first asynchronous message on that is not done at once.
//
// Owners and memory orders: what is shared with other ranks is the channels and the doorbell, as
// arena.hpp says. Several threads of a rank may sleep on its doorbell. So none of them takes back
// `sleeping`, which is for all; only who rings does, and rings for all of them: a thread that sets
// it in between loaded `rings` before, and so does not fall asleep. Within the rank, all is guarded
// by the mutex but for `Message::done_`. Whoever finishes a message for another thread, which may
// sleep, wakes it by the same doorbell, after a look at `sleeping` under the mutex; the other has
// set that before it looked, under the mutex, for its message.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "endpoint.hpp"
#include "engine.hpp"
#include "tally.hpp"

namespace farandole {

// What a message is, as its label says.
struct Envelope {
  std::int64_t tag = 0;
  std::uint64_t bytes = 0;  // below 2^56
  std::uint8_t dtype = 0;   // see farandole/dtypes.py; only compared and shown
};

inline constexpr std::uint32_t kAnySource = 0xffffffff;

// The future of a posted send or receive. Its owner may be any thread.
class Message {
 public:
  Message(bool sends, std::uint32_t peer, const Envelope& envelope, std::byte* data) noexcept
      : sends_(sends), peer_(peer), envelope_(envelope), data_(data) {}

  bool is_done() const noexcept { return done_.load(std::memory_order_acquire); }
  // pre of both: is_done()
  const Receipt& receipt() const noexcept { return receipt_; }
  // Of a receive that ended well: the rank that sent.
  std::uint32_t source() const noexcept { return source_; }

 private:
  friend class Postbox;

  const bool sends_;
  const std::uint32_t peer_;  // or kAnySource
  const Envelope envelope_;
  std::byte* const data_;  // a send only reads it
  std::optional<std::chrono::nanoseconds> timeout_;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::time_point::max();
  std::size_t moved_ = 0;                                // bytes of a send that have left
  std::list<std::shared_ptr<Message>>::iterator place_;  // in Postbox::pending_
  // Written before done_ is set, read after.
  Receipt receipt_;
  std::uint32_t source_ = kAnySource;
  std::atomic<bool> done_{false};  // release by whoever finishes it, acquire by its owner
};

class Postbox {
 public:
  using Clock = std::chrono::steady_clock;
  using Interrupted = Engine::Interrupted;

  // Of the engine's rank. The two share its life: what aborts one aborts both. In a child forked
  // from its process a postbox is never destroyed, as its thread does not exist there and its mutex
  // may be held for ever.
  static std::shared_ptr<Postbox> make(std::shared_ptr<Engine> engine);
  Postbox(const Postbox&) = delete;
  Postbox& operator=(const Postbox&) = delete;

  // Posts a message; its data must stay as they are until it is done.
  //
  // With `waits`, returns when it is done. `interrupted` is then asked a few times a second while
  // it waits; if it returns true the communicator is aborted.
  //
  // pre: peer_ is another rank, or kAnySource for a receive; `timeout` > 0
  void post(const std::shared_ptr<Message>& message,
            std::optional<std::chrono::nanoseconds> timeout, bool waits,
            const Interrupted& interrupted);
  // Moves messages until this one is done. False if `timeout` was over first.
  bool wait_for(const Message& message, std::chrono::nanoseconds timeout);

  const Engine& engine() const noexcept { return *engine_; }
  // What ended well.
  const std::shared_ptr<Tally>& sends() const noexcept { return sends_; }
  const std::shared_ptr<Tally>& receives() const noexcept { return receives_; }
  // Ends all messages that are not done, by an abort. Later ones end at once. Before the engine's.
  void close() noexcept;

 private:
  explicit Postbox(std::shared_ptr<Engine> engine);
  ~Postbox();

  struct Unexpected {
    std::uint32_t src;
    Envelope envelope;
    std::unique_ptr<std::byte[]> data;
  };
  struct Destination {
    Writer writer;
    std::deque<std::shared_ptr<Message>> queue;
  };
  struct Source {
    Reader reader;
    std::shared_ptr<Message> target;   // whose message arrives now; or
    Unexpected* unexpected = nullptr;  // what arrives now without a receive
    std::size_t arrived = 0;           // bytes of it
    std::uint32_t num_receives = 0;    // in posted_, from this rank alone
    bool is_arriving() const noexcept { return target != nullptr || unexpected != nullptr; }
  };
  std::unique_lock<std::mutex> enter();
  void wait(std::unique_lock<std::mutex>& lock, const Message& message, Clock::time_point limit,
            const Interrupted& interrupted);
  template <typename IsOver>
  bool drive(std::unique_lock<std::mutex>& lock, const IsOver& is_over, const Message* awaited,
             Clock::time_point limit, const Interrupted& interrupted);
  void serve();

  // All of these under the mutex.
  void start(const std::shared_ptr<Message>& message);
  bool pass() noexcept;
  bool send_segment(std::uint32_t dst);
  bool receive_segment(std::uint32_t src);
  bool accept(std::uint32_t src, const Envelope& envelope);
  bool take_unexpected(const std::shared_ptr<Message>& message);
  bool bind(const std::shared_ptr<Message>& message, std::uint32_t src, const Envelope& envelope);
  void count(const Message& receive, int change) noexcept;
  void copy(std::byte* target, const std::byte* source, std::size_t bytes,
            std::size_t whole) const noexcept;
  void finish(Message& message, const Receipt& receipt) noexcept;
  void fail(Abort reason, std::uint32_t subject) noexcept;
  bool stop_if_aborted() noexcept;
  void stop(const Receipt& verdict) noexcept;
  Clock::time_point check_deadlines(Clock::time_point now) noexcept;
  void check_peers() noexcept;
  static std::uint64_t kept_bytes(const Envelope& envelope) noexcept;
  void record(const Message& message) noexcept;
  void record_arrived(std::uint32_t src, const Envelope& envelope) noexcept;

  const std::shared_ptr<Engine> engine_;
  const std::uint32_t rank_;
  const std::uint32_t world_size_;
  const std::size_t slot_bytes_;
  Doorbell& doorbell_;
  const std::shared_ptr<Tally> sends_ = std::make_shared<Tally>();
  const std::shared_ptr<Tally> receives_ = std::make_shared<Tally>();

  // What follows is guarded by the mutex.
  std::list<std::shared_ptr<Message>> pending_;  // in the order in which they were posted
  std::vector<Destination> destinations_;
  std::vector<std::uint32_t> sending_;  // destinations whose queue is not empty
  std::vector<Source> sources_;
  std::list<std::shared_ptr<Message>> posted_;  // receives without a message, in that order, too
  std::list<Unexpected> unexpected_;            // in the order in which they began to arrive
  std::uint64_t unexpected_bytes_ = 0;          // of all of these
  std::uint32_t num_any_receives_ = 0;          // in posted_, from any rank
  std::uint32_t num_stuck_sends_ = 0;           // threads that wait for a send, and nothing moves
  std::uint32_t num_waiting_ = 0;               // threads that wait for a message
  std::uint32_t first_source_ = 0;  // to look at in the next pass, so that all get a turn
  Clock::time_point next_check_;    // of peers and deadlines
  bool is_stopped_ = false;
  Receipt verdict_;  // if it is stopped: for all later messages

  std::condition_variable changed_;  // pending_, num_waiting_ or is_closing_ changed
  std::thread thread_;
  bool is_closing_ = false;

  std::mutex mutex_;
  // Threads that are about to take the mutex: who has it for long lets them. (relaxed: a hint)
  std::atomic<std::uint32_t> num_entering_{0};
};

}  // namespace farandole

// Runs plans: one engine per rank and communicator.
//
// A run keeps the operations whose turn has come in a short list, in program order, and lets each
// go on by one segment at a time for as long as any can. A combination followed by a publication of
// the same chunk so passes each segment on while it is still in the cache. When nothing can go on,
// the rank spins for a moment and then sleeps on its doorbell.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "endpoint.hpp"
#include "flight_log.hpp"
#include "heap.hpp"
#include "kernels.hpp"
#include "plan.hpp"
#include "relay.hpp"
#include "tally.hpp"
#include "wire_forms.hpp"

namespace farandole {

// A call with all that is known of it before its buffers are.
struct SettledCall : std::enable_shared_from_this<SettledCall> {
  std::shared_ptr<const Plan> plan;
  CombineFunction combine = nullptr;  // null where nothing is reduced
  std::uint32_t divisor = 1;          // of completed sums
  // In what form it travels between hosts, and what rounds completed sums to it; null if nothing.
  WireForm wire_form = WireForm::as_is;
  void (*round)(std::byte* floats, std::size_t count) = nullptr;
  std::uint64_t fingerprint = 0;  // of everything that all ranks must agree on
  std::uint64_t what = 0;         // this and count: see CallRecord
  std::uint64_t count = 0;
  std::uint64_t scheduled_bytes_sent = 0;
  std::uint64_t payload_bytes = 0;
  std::shared_ptr<Tally> tally;
};

struct Call {
  std::shared_ptr<const SettledCall> settled;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::optional<std::chrono::nanoseconds> timeout;
  std::int64_t called_ns = 0;  // see LoggedFlight; set while flights are logged
};

struct Receipt {
  Abort status = Abort::none;
  std::uint32_t subject = 0;  // the rank that status is about
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t bytes_mapped = 0;  // of those sent, what was read where it lay
};

// A call on an engine from within another of its calls, as by a signal handler.
struct NestedCall : std::logic_error {
  NestedCall()
      : logic_error(
            "a call on a communicator cannot be made from within another on it, as by a signal "
            "handler; a handler may call abort() or close()") {}
};

struct Tuning {
  // How often a rank that waits looks again before it goes to sleep: while it keeps its core (in
  // the background, where its other thread may want one, too: background_spins), and after that,
  // each time the others of its core had their turn.
  std::uint32_t spins = 0;
  std::uint32_t background_spins = 0;
  std::uint32_t yields = 0;
  // Below this a copy costs less than to wait until the readers are through.
  std::size_t smallest_mapped_bytes = 0;
  // How much may wait in memory of its own for receives that were not posted yet.
  std::size_t most_unexpected_bytes = std::numeric_limits<std::size_t>::max();
};

// The future of a submitted call. Its owner may be any thread.
class Work {
 public:
  bool is_done() const noexcept { return done_.load(std::memory_order_acquire) != 0; }
  // False if `timeout` was over first. pre of receipt(): is_done()
  bool wait_for(std::chrono::nanoseconds timeout) noexcept;
  const Receipt& receipt() const noexcept { return receipt_; }

 private:
  friend class Engine;
  void finish(const Receipt& receipt) noexcept;

  Receipt receipt_;                     // written before done_ is set, read after
  std::atomic<std::uint32_t> done_{0};  // release by the engine's thread, acquire by waiters
};

// A collective that a rank made, for its flight record. Whoever runs it writes: the number first to
// 0, then the rest, each release, so that none comes before that, and then the new number. Who
// reads meanwhile loads the number, the rest, acquire, and the number again: if that is the same,
// the rest belongs to it.
struct Flight {
  std::atomic<std::uint64_t> sequence{0};  // from 1; 0 while it is being overwritten
  std::atomic<std::uint64_t> what{0};
  std::atomic<std::uint64_t> count{0};
  std::atomic<std::uint64_t> payload_bytes{0};
  std::atomic<std::int64_t> began_ns{0};  // by the steady clock
  std::atomic<std::int64_t> ended_ns{0};  // 0 if it has not
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // Returns true to interrupt the run; asked a few times a second while a rank waits.
  using Interrupted = std::function<bool()>;

  // In place of the pidfd of a process.
  static constexpr int kThisProcess = -1;
  static constexpr int kEnded = -2;

  // `process_descriptors`: per rank a pidfd, which the engine then owns, or one of the two above.
  // `connections`: per rank a socket connected to it, for its relay; -1 for ranks of this host. The
  // engine then owns those. Throws std::system_error.
  Engine(std::shared_ptr<Arena> arena, std::uint32_t rank, std::vector<int> process_descriptors,
         Tuning tuning, std::vector<int> connections = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::uint32_t rank() const noexcept { return rank_; }
  const Arena& arena() const noexcept { return *arena_; }
  const Tuning& tuning() const noexcept { return tuning_; }
  // What carries channels to other hosts; null if there are none.
  Relay* relay() const noexcept { return relay_.get(); }
  // The two ends of channels of this rank, wherever their other ends are.
  Writer writer_to(std::uint32_t dst, Traffic traffic) const;
  Reader reader_from(std::uint32_t src, Traffic traffic) const;

  // Runs `call` and returns when this rank's part is done. After calls that were submitted before.
  // Throws NestedCall if called from within a run, by what `interrupted` does.
  Receipt run(const Call& call, const Interrupted& interrupted);
  // Runs `call` on the engine's own thread, after all calls before it.
  std::shared_ptr<Work> submit(const Call& call);

  // Ends all runs and messages of all ranks. The first abort of a communicator decides; later ones
  // change nothing.
  void abort(Abort reason, std::uint32_t subject) noexcept;
  // Abort::none while the communicator is in order; with the rank it is about.
  std::pair<Abort, std::uint32_t> aborted() const noexcept;
  // Whether `peer` has closed, or its process has ended: it will publish nothing more.
  // From another host, of that kind of traffic.
  bool is_gone(std::uint32_t peer, Traffic traffic) const noexcept;
  // The same, though not all that it published need have been taken.
  bool has_ended(std::uint32_t peer) const noexcept;
  // Whether this process was forked from the one that made this engine: then nothing here works.
  bool is_forked() const noexcept;
  // The last kFlights collectives, in no order; those of number 0 are none.
  static constexpr std::size_t kFlights = 1000;
  std::span<const Flight> flights() const noexcept { return flights_; }
  // All collectives from when it is started to when it is stopped. From any thread.
  FlightLog& flight_log() noexcept { return flight_log_; }
  // Memory that the other ranks read in place, made when first asked for. From any thread.
  std::shared_ptr<Heap> heap();
  // Tells peers that nothing more will come. Submitted calls must have ended; others are aborted.
  // Aborts with a mismatch if another rank is known to have made other calls, or more. From within
  // a run it ends that run, and the rest happens after it.
  void close() noexcept;

 private:
  struct Job {
    Call call;
    std::shared_ptr<Work> work;
  };

  Receipt run_in_turn(const Call& call, const Interrupted& interrupted);
  Receipt execute(const Call& call, const Interrupted& interrupted);  // throws nothing of its own
  Receipt run_plan(const Call& call, const Interrupted& interrupted);
  bool advance(std::uint32_t index, const Call& call, Receipt& receipt);
  bool publish_segment(std::uint32_t index, std::size_t offset, std::size_t bytes, const Call& call,
                       Receipt& receipt);
  bool combine_segment(const Plan::Operation& operation, std::size_t offset, std::size_t bytes,
                       const Call& call, Receipt& receipt);
  bool sweep(const Call& call, Receipt& receipt);
  void finish_operation(const Plan::Operation& operation);
  bool is_ready(const Plan::Operation& operation, std::uint32_t segment, const Plan& plan);
  std::uint32_t progress(std::uint32_t index, const Plan& plan);
  bool is_over(const Plan& plan);
  bool moves(const Call& call, Receipt& receipt);
  const std::byte* mapped_at(std::uint32_t peer, std::uint64_t position, std::size_t bytes);
  std::byte* at(const Plan::Place& place, const Call& call) const noexcept;
  void wait(const Call& call, Receipt& receipt, const Interrupted& interrupted,
            std::chrono::steady_clock::time_point deadline);
  void check_agreement(bool closing) noexcept;
  void check_peers(const Call& call);
  void check_readers(const Writer& end, bool whole);
  std::uint64_t agreement() const noexcept;  // see CallRecord
  void record_misfit(std::uint32_t peer, std::uint64_t bytes,
                     const Plan::Operation& operation) noexcept;
  void finish_close() noexcept;
  void close_process_descriptors() noexcept;
  void serve();
  Writer& writer(std::uint32_t channel);
  Reader& reader(std::uint32_t channel);

  std::shared_ptr<Arena> arena_;
  const std::uint32_t rank_;
  const std::uint32_t world_size_;
  std::vector<int> process_descriptors_;
  const Tuning tuning_;
  const std::uint64_t forks_;  // of this process, when the engine was made

  // Used by whoever holds the turn (`busy`), and by nobody else.
  bool in_background_ = false;  // whether the engine's own thread does
  std::vector<std::unique_ptr<Writer>>
      writers_;  // by dst; at rank_: the shared channel. Made when first used.
  std::vector<std::unique_ptr<Reader>>
      readers_;  // by src; at world_size_ + src: its shared channel
  std::vector<std::unique_ptr<PeerHeap>> peer_heaps_;  // mapped when first read
  std::vector<std::uint32_t> done_;                    // segments, per operation
  // Per operation that is a publication and travels mapped, where it begins in its channel, plus 1.
  std::vector<std::uint64_t> mapped_from_;
  std::vector<std::uint32_t> mapped_;  // which they are
  std::vector<std::uint32_t> turns_;   // channels on which it must still wait, per operation
  std::vector<std::uint32_t> active_;  // operations whose turn has come, in program order
  std::vector<const std::byte*> sources_;
  std::unique_ptr<std::byte[]> work_memory_;
  std::size_t work_capacity_ = 0;
  std::vector<Flight> flights_{kFlights};
  FlightLog flight_log_;
  std::uint64_t sequence_ = 0;  // collectives begun
  // Fingerprint of the last collective, which holds those of all before; every segment has it.
  std::uint64_t history_ = 0;
  // Low halves of history_ as they were, by number of the collective: for ranks that are behind.
  std::array<std::uint32_t, 64> past_{};

  std::mutex heap_mutex_;
  std::shared_ptr<Heap> heap_;  // guarded by heap_mutex_
  // The same, set once; for whoever holds the turn. (release, acquire)
  std::atomic<Heap*> own_heap_{nullptr};

  // What callers share with the engine's own thread. In a child forked from the owner that thread
  // does not exist, and the lock may be held for ever: there it is neither used nor destroyed.
  struct Background {
    std::mutex mutex;                 // guards what follows
    std::condition_variable changed;  // busy, queue or stopping changed
    std::deque<Job> queue;
    bool busy = false;
    std::thread::id runner;  // if busy: who runs
    bool stopping = false;
    bool close_after_run = false;
    std::thread thread;  // started by the first submit
    // Not guarded, but counted up under the mutex: where to look without it. (release, acquire)
    std::atomic<std::uint64_t> num_submitted{0};
  };
  std::unique_ptr<Background> background_ = std::make_unique<Background>();
  std::unique_ptr<Relay> relay_;  // likewise not destroyed there
};

}  // namespace farandole

// What carries the channels of a communicator from host to host.
//
// Every host of a communicator has an arena of its own, with channels for all of its ranks. Where
// one end of a channel is a rank of another host, the relay of the rank at this end stands in for
// it: of a channel to another host it is the reader, and sends what it takes over TCP; of a channel
// from there it is the writer, and publishes what it receives, which it receives right into the
// slot. So the engine and the postbox do not know where a rank is, and segments are added up as
// they arrive. Shared channels do not leave a host; programs for several hosts have none.
//
// A segment whose label says so travels in a shorter form (wire_forms.hpp): it is encoded as it is
// sent and decoded into its slot, and whatever says how large something is in memory stays as it
// is.
//
// There is one connection for each two ranks on different hosts, which carries *frames*: a header
// and what it says follows. A segment is sent only if the other relay has a slot for it: it says
// how many its rank has taken (*credit*). So what one channel holds up is in no other's way. A
// relay that closes sends what is left regardless, as nobody must wait for the others to leave; the
// other keeps what it has no slot for.
//
// The records of a rank (RankState) are mirrored in the arenas of the other hosts: its relay sends
// them when they have changed, and before it tells of an abort or of its end. A rank is gone once
// its connection has ended, and all that came over it has been published.
//
// One thread per relay does all of this. It sleeps in epoll, for what arrives and for its bell (an
// eventfd), which the engine and the postbox of its rank ring as they ring another rank's doorbell;
// see `wake`. Connections are trusted: both ends have proved the job's secret before they came
// here.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "endpoint.hpp"
#include "tally.hpp"
#include "wire_forms.hpp"

namespace farandole {

class Relay {
 public:
  // Where in memory of this process a position in the rank's own heap is.
  using HeapAt = std::function<const std::byte*(std::uint64_t position)>;

  // `connections`: per rank a connected socket, which the relay then owns; -1 for the ranks of this
  // host. Throws std::system_error.
  Relay(std::shared_ptr<const Arena> arena, std::uint32_t rank, std::vector<int> connections,
        HeapAt heap_at);
  // In a child forked from its process a relay is never destroyed: its thread does not exist there.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Whether `peer` is on another host.
  bool serves(std::uint32_t peer) const noexcept { return peers_[peer] != nullptr; }
  // What to ring when this rank has done something in a channel that leaves its host.
  Doorbell& bell() noexcept { return bell_; }
  // Whether nothing more of that kind will come from `peer`. pre: serves(peer)
  bool is_gone(std::uint32_t peer, Traffic traffic) const noexcept;
  // Whether it has ended or closed, though not all that came from it need have been taken.
  bool has_ended(std::uint32_t peer) const noexcept;
  // After an abort: the ranks of other hosts from which not all has come that they have to say of
  // it.
  std::vector<std::uint32_t> silent() const;
  // Has the other hosts told soon of changed records.
  void tell() noexcept;
  // Bytes of segments sent to other hosts and received from there, in the form in which they
  // travel; without headers.
  std::uint64_t bytes_sent() const noexcept { return bytes_sent_.load(std::memory_order_relaxed); }
  std::uint64_t bytes_received() const noexcept {
    return bytes_received_.load(std::memory_order_relaxed);
  }
  // Sends what there is and ends. Does not wait for the other ranks, but for their hosts.
  void close() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  enum class Kind : std::uint32_t { collectives, messages, credit, records, abort, close };
  // What of a CallRecord every frame tells, so that the last call of a rank that dies is known.
  struct LastCall {
    std::uint64_t sequence = 0;
    std::uint64_t what = 0;
    std::uint64_t count = 0;
    std::uint64_t payload_bytes = 0;
    std::uint64_t agreement = 0;
  };
  struct Frame {
    Kind kind = Kind::credit;
    std::uint32_t bytes = 0;  // that follow
    // Segments that the sender's rank has taken since the frame before, per kind of traffic.
    std::array<std::uint32_t, 2> taken{};
    Label label;  // of a segment; in `abort`, its first word is what ArenaHeader::abort holds
    LastCall call;

    // In which a segment travels.
    WireForm form() const noexcept {
      return kind == Kind::collectives ? form_of(label.total_bytes) : WireForm::as_is;
    }
  };

  // The records of a rank, and by which clock they count.
  struct Records {
    static constexpr std::size_t kWords = 11 + 7 + 2 + RefusalRecord::kWords + Board::kWords;

    std::array<std::uint64_t, kWords> words{};
    std::int64_t now_ns = 0;
    std::uint64_t is_last = 0;  // 1 if the sender has seen an abort
    std::uint64_t version = 0;  // counted up with every change
  };

  // A segment that there is no slot for yet, as it travels.
  struct Kept {
    Frame frame;
    std::vector<std::byte> data;
  };
  // How far a publication has come that travels segment by segment.
  struct Passage {
    std::uint64_t position = 0;  // of the next segment in it

    std::size_t next_bytes(const Label& label, std::size_t slot_bytes) const noexcept;
    void pass(const Label& label, std::size_t bytes) noexcept;
  };
  // One kind of traffic with one rank.
  struct Lane {
    Reader outgoing;
    Writer incoming;
    Passage sent;
    std::uint64_t in_flight = 0;  // segments sent that the other rank has not taken
    std::uint64_t credited = 0;   // segments that the other relay knows to be taken here
    std::deque<Kept> kept;
    Label arriving;  // of the publication
    Passage arrived;
    std::atomic<bool> is_over{false};  // release, by the relay's thread; acquire
  };
  struct Peer {
    std::uint32_t rank = 0;
    int socket = -1;
    std::array<Lane, 2> lanes;
    std::uint32_t next_lane = 0;

    bool readable = true;  // as far as is known
    std::vector<std::byte> staged;
    std::size_t staged_begin = 0;
    std::size_t staged_end = 0;
    std::optional<Frame> arriving;
    std::byte* target = nullptr;  // of what follows it
    std::size_t arrived = 0;
    std::optional<Kept> unslotted;   // if that is where it goes
    std::vector<std::byte> encoded;  // or here, if it has another form in its slot
    Records records;

    bool writable = true;
    std::optional<Frame> departing;
    const std::byte* source = nullptr;  // of what follows it
    std::vector<std::byte> encoding;    // which lies here if it has another form in memory
    std::size_t departed = 0;           // header included
    Records sent;                       // last
    bool owes_records = false;
    bool owes_abort = true;  // once there is one
    bool has_closed = false;
    bool heard_close = false;

    std::atomic<bool> has_ended{false};  // release, by the relay's thread; acquire
    std::atomic<bool> heard_all{false};  // likewise
  };

  void serve() noexcept;
  bool pass();
  bool send_to(Peer& peer);
  bool choose_frame(Peer& peer);
  void load_segment(Peer& peer, Kind kind, Frame& frame);
  void finish_frame(Peer& peer);
  bool receive_from(Peer& peer);
  bool fill(Peer& peer, std::byte* target, std::size_t bytes);
  bool accept_frame(Peer& peer, const Frame& frame);
  bool is_next(Lane& lane, const Frame& frame) const noexcept;
  void watch_all();
  bool is_abort(std::uint64_t packed) const noexcept;
  void deliver(Peer& peer);
  static void publish(Lane& lane, const Frame& frame, const std::byte* data) noexcept;
  bool place_kept(Peer& peer);
  void lose(Peer& peer) noexcept;
  void bury(Peer& peer) noexcept;
  void look_at_records();
  void mirror(std::uint32_t rank, const Records& records) const noexcept;
  LastCall last_call() const noexcept;
  void mirror_call(std::uint32_t rank, const LastCall& call) const noexcept;
  void sleep();
  void look_at_sockets(std::chrono::milliseconds limit) noexcept;
  bool is_through() const noexcept;
  void abort(std::uint64_t packed) const noexcept;
  std::chrono::milliseconds lingering() const noexcept;
  void watch(int descriptor, std::uint32_t events, std::uint32_t rank) const;

  const std::shared_ptr<const Arena> arena_;
  const std::uint32_t rank_;
  const HeapAt heap_at_;
  const std::size_t slot_bytes_;
  const std::uint32_t num_slots_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null for ranks of this host
  int epoll_ = -1;
  Doorbell bell_;

  // Of the relay's thread.
  Clock::time_point next_look_;
  Clock::time_point last_sent_;
  Records last_records_;

  std::atomic<bool> closing_{false};          // release by close(), acquire by the thread
  std::atomic<bool> records_due_{false};      // set by who changed them, taken back by the thread
  std::atomic<std::uint64_t> bytes_sent_{0};  // written by the thread, relaxed
  std::atomic<std::uint64_t> bytes_received_{0};  // likewise
  std::thread thread_;
};

}  // namespace farandole

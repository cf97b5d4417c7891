// The memory that the ranks of one communicator on one host share, and where everything lies in it.
//
// An arena holds, in this order: a header, one RankState per rank, N x N channels for collectives,
// and N x (N - 1) for messages. Channel (s, d) carries what rank s publishes to rank d. For
// collectives there is also channel (s, s), the shared channel of s, which every other rank reads.
//
// A channel is a queue of `num_slots` slots. Segment i goes into slot i % num_slots; the writer
// fills it and then stamps it with i + 1. A reader that has taken `taken` segments waits for stamp
// taken + 1 in slot taken % num_slots, reads, and then counts `taken` up. The writer may fill a
// slot again once every reader has taken what was in it: published - taken < num_slots. The stamp,
// and a segment of a few bytes, lie in the slot's first cache line: a small message is one line.
//
// Owners and memory orders:
//
// `stamp` is written by the writer alone, after it has filled the slot: a reader that loads it sees
// the slot's contents (store-release, load-acquire). Until every reader has taken the segment the
// writer does not come back to the slot, so a reader never sees it beyond the stamp it waits for.
//
// `taken` is written by its one reader alone, after it has read the slot: a writer that loads it
// may fill the slot again (store-release, load-acquire).
//
// A segment may also lie in registered memory of its writer, which its readers read in place
// (mapped). The stamp and `taken` order that memory as they order a slot: the writer does not touch
// it from the stamp until every reader has taken the segment.
//
// A slot is plain memory. The writer owns it while it is free, its readers while it is published.
//
// For `sleeping` and `rings` see Doorbell. stamp, taken and sleeping are used with seq_cst, which
// contains release and acquire, as going to sleep needs more than those: a sleeper stores
// `sleeping` and then loads the other; its peer stores the other and then loads `sleeping`.
// Were each pair only release and acquire, both loads could miss the other's store. All four are in
// one order, so at least one of the two sees the other's store, and no wake-up is lost.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace farandole {

inline constexpr std::size_t kCacheLine = 64;

struct Geometry {
  std::uint32_t world_size = 1;
  std::uint32_t num_slots = 2;
  std::uint64_t slot_bytes = 0;  // a multiple of kCacheLine
  std::uint64_t nonce = 0;       // a random number, to tell this arena from any other
};

// Why a communicator stopped. Set once, by whichever rank found out first.
enum class Abort : std::uint32_t {
  none,
  mismatch,
  timeout,
  peer_lost,
  requested,
  interrupted,
  out_of_memory,
  unmapped,  // it could not map the registered memory of another
  // These are about the rank whose MessageRecord says more.
  message_mismatch,
  message_timeout,
  too_many_unexpected
};

// The collective that a rank is in, for the errors and the status display of other ranks. Written
// by its rank alone, relaxed: it is a snapshot. Only `agreement` decides anything.
struct CallRecord {
  std::atomic<std::uint64_t> sequence{0};       // calls begun
  std::atomic<std::uint64_t> finished{0};       // calls ended
  std::atomic<std::uint64_t> what{0};           // see farandole/call_records.py
  std::atomic<std::uint64_t> count{0};          // elements of the array that the rank gave
  std::atomic<std::uint64_t> payload_bytes{0};  // of the whole buffer
  std::atomic<std::int64_t> timeout_ns{0};      // of the call; 0 if it has none
  std::atomic<std::int64_t> began_ns{0};        // when, by the steady clock: a host has one
  // High 32 bits: sequence; low 32 bits: of the call's fingerprint. Ranks in the same collective by
  // number that differ here made different calls, even if they never meet on a channel. One word,
  // so that the two belong together; relaxed.
  std::atomic<std::uint64_t> agreement{0};
  // The part of another rank that did not fit, before this rank aborted for that: its bytes, those
  // expected, and the rank plus 1; 0 if there is none.
  std::atomic<std::uint64_t> misfit_bytes{0};
  std::atomic<std::uint64_t> expected_bytes{0};
  std::atomic<std::uint64_t> misfit_rank{0};
};

// What a rank last refused to call, as what its user asked for can never work: in words, for the
// errors of ranks that wait for it. Written by its rank alone, by one thread at a time; relaxed: a
// snapshot, in which two refusals may be mixed.
struct RefusalRecord {
  static constexpr std::size_t kWords = 63;

  std::atomic<std::uint64_t> calls{
      0};  // collectives made by then, plus 1; 0 if it has refused none
  std::atomic<std::uint64_t> messages{0};                 // MessageRecord::posted by then
  std::array<std::atomic<std::uint64_t>, kWords> text{};  // ends at the first byte that is 0
};

// The message that a rank began last or, once the communicator was aborted about one, that one. For
// the errors of other ranks; written by its rank alone, relaxed.
struct MessageRecord {
  std::atomic<std::uint64_t> posted{0};  // counted up whenever the rest changes
  std::atomic<std::uint64_t> what{0};    // see farandole/call_records.py
  std::atomic<std::uint64_t> bytes{0};   // of this rank's buffer
  std::atomic<std::int64_t> tag{0};
  std::atomic<std::int64_t> timeout_ns{0};  // 0 if it has none
  // What arrived and ended all, if anything, as it did not fit its receive or was too much to keep:
  // as above, of the rank that sent.
  std::atomic<std::uint64_t> arrived_what{0};
  std::atomic<std::uint64_t> arrived_bytes{0};
};

// What a rank tells the others as they go on without those that are lost; see
// farandole/shrinking.py, which gives the words their meaning. Each is written by its rank alone,
// once. Release, and loaded with acquire, in their order: a word that is set vouches for those
// behind it.
struct Board {
  static constexpr std::size_t kWords = 11;

  std::array<std::atomic<std::uint64_t>, kWords> words{};
};

// How other ranks open a rank's registered memory (heap.hpp). Written once, by the rank; `bytes`
// last, release, and 0 until then.
struct HeapCard {
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::int32_t> process{0};
  std::atomic<std::int32_t> descriptor{0};
};

// What a channel is for: whoever moves the one kind sleeps and wakes apart from the other.
enum class Traffic : std::uint8_t { collectives, messages };

// What the threads of one rank that wait for one kind of traffic sleep on.
struct alignas(kCacheLine) Doorbell {
  // Counted up by whoever wakes this rank; this rank sleeps on it. (seq_cst, see above)
  std::atomic<std::uint32_t> rings{0};
  // 1 while this rank is asleep or about to be. Written by this rank; reset by whoever wakes it.
  // (seq_cst)
  std::atomic<std::uint32_t> sleeping{0};
  // An eventfd of the process of both, if this is not in shared memory and who sleeps does so in
  // epoll (see relay.hpp); else -1. Set before it is used.
  int event = -1;
};

struct alignas(kCacheLine) RankState {
  std::array<Doorbell, 2> doorbells;
  Doorbell& doorbell(Traffic traffic) noexcept {
    return doorbells[static_cast<std::size_t>(traffic)];
  }
  // 1 once this rank has closed. Written by this rank alone, release; what it published before is
  // then visible.
  std::atomic<std::uint32_t> closed{0};
  // Of a rank of another host, the version of what is mirrored here (see relay.hpp). Written by the
  // relays of this host, relaxed.
  std::atomic<std::uint64_t> mirrored{0};
  HeapCard heap;
  alignas(kCacheLine) CallRecord call;
  alignas(kCacheLine) MessageRecord message;
  alignas(kCacheLine) RefusalRecord refusal;
  alignas(kCacheLine) Board board;
};

struct alignas(kCacheLine) ArenaHeader {
  std::uint64_t magic = 0;
  Geometry geometry;
  // Packed: low 32 bits an Abort, high 32 bits the rank it is about. One compare-exchange from 0
  // decides which rank's finding counts; acq_rel, so that who sees it also sees the finder's
  // CallRecord.
  alignas(kCacheLine) std::atomic<std::uint64_t> abort{0};
  // The rank that decides who goes on without the lost ones, plus 1; another takes over only if
  // that one is gone, too. (acq_rel)
  std::atomic<std::uint64_t> leader{0};
};

struct alignas(kCacheLine) Counter {
  std::atomic<std::uint64_t> value{0};
};

// What a segment is.
struct Label {
  std::uint64_t fingerprint = 0;  // of the call; of a message, its tag
  // Of the whole publication that it is a part of; of a message, with the dtype (see postbox.cpp).
  std::uint64_t total_bytes = 0;
  // If it travels mapped, where it begins in the writer's heap, plus 1; 0 if it lies in the slot.
  std::uint64_t heap_position = 0;
};

struct alignas(kCacheLine) SlotHeader {
  static constexpr std::size_t kInlineBytes = 32;

  std::atomic<std::uint64_t> stamp{0};  // of the segment that it holds, counted from 1
  Label label;
  std::array<std::byte, kInlineBytes> inline_data;  // a segment that fits lies here
};
static_assert(sizeof(SlotHeader) == kCacheLine);

// One channel, as both of its ends see it.
class Channel {
 public:
  Channel() = default;
  Channel(std::byte* memory, const Geometry& geometry, bool shared) noexcept;

  static std::size_t bytes(const Geometry& geometry, bool shared) noexcept;

  std::atomic<std::uint64_t>& taken(std::uint32_t reader) const noexcept {
    return taken_[shared_ ? reader : 0].value;
  }
  // Slots are counted from 0.
  SlotHeader& header(std::uint32_t slot) const noexcept {
    return *reinterpret_cast<SlotHeader*>(slots_ + slot * stride_);
  }
  // Where the `bytes` bytes of a segment in that slot lie.
  std::byte* data(std::uint32_t slot, std::size_t bytes) const noexcept {
    return slots_ + slot * stride_ +
           (bytes <= SlotHeader::kInlineBytes ? offsetof(SlotHeader, inline_data)
                                              : sizeof(SlotHeader));
  }

 private:
  Counter* taken_ = nullptr;
  std::byte* slots_ = nullptr;
  std::size_t stride_ = 0;
  bool shared_ = false;
};

// Shared from this, so that an engine that holds an arena holds no Python object.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // A new arena in anonymous memory, with a descriptor that other processes can map it by.
  static std::shared_ptr<Arena> create(const Geometry& geometry);
  // Maps an arena that another process created. Throws std::runtime_error if `descriptor` is no
  // arena.
  static std::shared_ptr<Arena> map(int descriptor);

  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  const Geometry& geometry() const noexcept { return geometry_; }
  int descriptor() const noexcept { return descriptor_; }
  // Closes the descriptor; the mapping stays. Called once all ranks have mapped the arena.
  void close_descriptor() noexcept;

  ArenaHeader& header() const noexcept { return *reinterpret_cast<ArenaHeader*>(memory_.data()); }
  RankState& rank(std::uint32_t rank) const noexcept;
  // pre: src != dst if it is for messages
  Channel channel(std::uint32_t src, std::uint32_t dst, Traffic traffic) const noexcept;

  static std::size_t total_bytes(const Geometry& geometry) noexcept;

 private:
  Arena(int descriptor, std::span<std::byte> memory, const Geometry& geometry) noexcept
      : descriptor_(descriptor), memory_(memory), geometry_(geometry) {}

  int descriptor_;
  std::span<std::byte> memory_;
  Geometry geometry_;
};

}  // namespace farandole

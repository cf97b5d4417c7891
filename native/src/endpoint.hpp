// The two ends of a channel, each with what only it knows. See arena.hpp for the protocol and its
// memory orders.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "arena.hpp"
#include "futex.hpp"

namespace farandole {

// Wakes whoever sleeps on `doorbell`. Call it after a seq_cst store of the counter that it may be
// waiting for.
inline void wake(Doorbell& doorbell) noexcept {
  if (doorbell.sleeping.load(std::memory_order_seq_cst) == 0) return;
  doorbell.sleeping.store(0, std::memory_order_seq_cst);
  doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(doorbell.rings);
  if (doorbell.event >= 0) notify(doorbell.event);
}

// Wakes all that sleep on the doorbells of a rank, whatever they wait for.
inline void ring(const Arena& arena, std::uint32_t rank) noexcept {
  for (Doorbell& doorbell : arena.rank(rank).doorbells) {
    doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(doorbell.rings);
  }
}

inline void ring_all(const Arena& arena) noexcept {
  for (std::uint32_t rank = 0; rank < arena.geometry().world_size; ++rank) ring(arena, rank);
}

class Writer {
 public:
  Writer() = default;
  // `relay`: the bell of what stands in for the readers, if that is a relay.
  Writer(const Arena& arena, std::uint32_t src, std::uint32_t dst, Traffic traffic,
         Doorbell* relay = nullptr)
      : channel_(arena.channel(src, dst, traffic)), num_slots_(arena.geometry().num_slots) {
    for (std::uint32_t reader = 0; reader < arena.geometry().world_size; ++reader) {
      if (src == dst ? reader != src : reader == dst) {
        readers_.push_back(reader);
        doorbells_.push_back(relay != nullptr ? relay : &arena.rank(reader).doorbell(traffic));
      }
    }
  }

  // True if the next segment has a free slot.
  bool has_room() noexcept {
    if (published_ - taken_ < num_slots_) return true;
    look();
    return published_ - taken_ < num_slots_;
  }

  // True if `reader` has not made room for the next segment; with `whole`, if it has not taken all.
  bool waits_for(std::uint32_t reader, bool whole = false) const noexcept {
    const std::uint64_t taken = channel_.taken(reader).load(std::memory_order_seq_cst);
    return published_ - taken >= (whole ? 1 : num_slots_);
  }
  const std::vector<std::uint32_t>& readers() const noexcept { return readers_; }

  // Segments published so far, and how many of them every reader has taken.
  std::uint64_t published() const noexcept { return published_; }
  std::uint64_t taken() noexcept {
    if (taken_ != published_) look();
    return taken_;
  }

  // Where the data of the next segment lie in its slot. pre: has_room()
  std::byte* place(std::size_t bytes) const noexcept { return channel_.data(slot_, bytes); }

  // pre: has_room(). `data` is copied, unless it lies in its place, or the label says where.
  void publish(const std::byte* data, std::size_t bytes, const Label& label) noexcept {
    SlotHeader& header = channel_.header(slot_);
    header.label = label;
    if (bytes != 0 && label.heap_position == 0 && data != place(bytes)) {
      std::memcpy(channel_.data(slot_, bytes), data, bytes);
    }
    header.stamp.store(++published_, std::memory_order_seq_cst);
    slot_ = slot_ + 1 == num_slots_ ? 0 : slot_ + 1;
    for (Doorbell* doorbell : doorbells_) wake(*doorbell);
  }

  std::size_t num_readers() const noexcept { return readers_.size(); }

 private:
  void look() noexcept {
    std::uint64_t taken = published_;
    for (const std::uint32_t reader : readers_) {
      taken = std::min(taken, channel_.taken(reader).load(std::memory_order_seq_cst));
    }
    taken_ = taken;
  }

  Channel channel_;
  std::vector<std::uint32_t> readers_;
  std::vector<Doorbell*> doorbells_;  // of the readers
  std::uint32_t num_slots_ = 1;
  std::uint32_t slot_ = 0;  // of the next segment
  std::uint64_t published_ = 0;
  std::uint64_t taken_ = 0;  // by the slowest reader, when last looked at
};

class Reader {
 public:
  Reader() = default;
  // `relay`: the bell of what stands in for the writer, if that is a relay.
  Reader(const Arena& arena, std::uint32_t src, std::uint32_t dst, std::uint32_t reader,
         Traffic traffic, Doorbell* relay = nullptr)
      : channel_(arena.channel(src, dst, traffic)),
        writer_(relay != nullptr ? relay : &arena.rank(src).doorbell(traffic)),
        reader_(reader),
        num_slots_(arena.geometry().num_slots) {}

  // True if the next segment has been published.
  bool has_data() const noexcept {
    return channel_.header(slot_).stamp.load(std::memory_order_seq_cst) == taken_ + 1;
  }

  // pre for all three: has_data()
  const Label& label() const noexcept { return channel_.header(slot_).label; }
  // `bytes`: of the segment.
  const std::byte* data(std::size_t bytes) const noexcept { return channel_.data(slot_, bytes); }
  void release() noexcept {
    channel_.taken(reader_).store(++taken_, std::memory_order_seq_cst);
    slot_ = slot_ + 1 == num_slots_ ? 0 : slot_ + 1;
    wake(*writer_);
  }

 private:
  Channel channel_;
  Doorbell* writer_ = nullptr;
  std::uint32_t reader_ = 0;
  std::uint32_t num_slots_ = 1;
  std::uint32_t slot_ = 0;  // of the next segment
  std::uint64_t taken_ = 0;
};

}  // namespace farandole

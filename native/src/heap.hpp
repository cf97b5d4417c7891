// Registered memory: what a rank allocates here, the other ranks of its communicator can read where
// it lies.
//
// A heap is an anonymous file, as large as the machine's memory, of which only what is allocated is
// there. Its owner tells the others in RankState::heap how to open it; each maps it whole, and for
// reading alone, when it first reads from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "arena.hpp"

namespace farandole {

// The owner's side.
class Heap : public std::enable_shared_from_this<Heap> {
 public:
  // Throws std::system_error if the machine gives none.
  explicit Heap(HeapCard& card);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // `bytes` > 0 bytes, zero, from the start of a page. Throws std::bad_alloc. From any thread.
  std::byte* allocate(std::size_t bytes);
  void free(std::byte* memory) noexcept;

  // Whether these bytes lie in this heap, and where.
  bool contains(const std::byte* memory, std::size_t bytes) const noexcept {
    return memory >= memory_.data() && memory + bytes <= memory_.data() + memory_.size();
  }
  std::uint64_t offset_of(const std::byte* memory) const noexcept {
    return static_cast<std::uint64_t>(memory - memory_.data());
  }
  const std::byte* at(std::uint64_t offset) const noexcept { return memory_.data() + offset; }

 private:
  int descriptor_ = -1;
  std::span<std::byte> memory_;
  std::mutex mutex_;                           // guards what follows
  std::map<std::size_t, std::size_t> used_;    // offset -> bytes, of whole pages
  std::map<std::size_t, std::size_t> unused_;  // the rest, no two of them adjacent
};

// The reader's side.
class PeerHeap {
 public:
  // Throws std::system_error if it cannot be mapped.
  explicit PeerHeap(const HeapCard& card);
  ~PeerHeap();
  PeerHeap(const PeerHeap&) = delete;
  PeerHeap& operator=(const PeerHeap&) = delete;

  // Null if the heap does not reach as far as that.
  const std::byte* at(std::uint64_t offset, std::size_t bytes) const noexcept {
    return offset <= memory_.size() && bytes <= memory_.size() - offset ? memory_.data() + offset
                                                                        : nullptr;
  }

 private:
  std::span<const std::byte> memory_;
};

}  // namespace farandole

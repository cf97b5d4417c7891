// A program bound to sizes: everything the engine needs to know about one call before it sees the
// buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace farandole {

enum class Region : std::uint8_t { input, output, work };

// One rank's program as flat columns; see farandole/program.py for what it means.
struct ProgramColumns {
  // Per operation: region, slot, size index, reader (kCombine for a combination, kEveryone for a
  // shared publication), 1 if it completes the sum, 1 if it may travel mapped.
  struct Operation {
    std::int32_t region, slot, size, reader, completes, mapped;
  };
  // Per operand: peer (kLocal for a place of this rank), then 1 if shared, or region and slot.
  struct Operand {
    std::int32_t peer, shared, region, slot;
  };
  static constexpr std::int32_t kEveryone = -1;
  static constexpr std::int32_t kCombine = -2;
  static constexpr std::int32_t kLocal = -1;

  std::span<const Operation> operations;
  std::span<const Operand> operands;
  std::span<const std::int32_t> operand_ends;  // per operation: where its operands end
  std::span<const std::int32_t> after;
  std::span<const std::int32_t> after_ends;    // per operation: where its predecessors end
  std::span<const std::int32_t> size_classes;  // per size index; see farandole/program.py
};

// Where the slots are, in bytes.
struct Layout {
  // A slot of the caller's memory; one that this rank does not have there has room for nothing.
  struct Slot {
    std::int64_t offset, room;
  };

  std::span<const std::int64_t> size_bytes;  // per size index
  std::span<const Slot> input;
  std::span<const Slot> output;
  std::int64_t num_work_slots = 0;  // each as large as the largest size
};

// Shared from this, so that a call that holds a plan holds no Python object, which only a thread
// with the GIL may let go.
class Plan : public std::enable_shared_from_this<Plan> {
 public:
  struct Place {
    Region region;
    std::size_t offset;
  };
  struct Operand {
    std::uint32_t channel;  // reader index in Endpoints, or kLocalOperand
    std::uint32_t peer;
    Place place;
  };
  struct Predecessor {
    std::uint32_t operation;
    bool whole;  // wait for all of it; else segment by segment
  };
  struct Operation {
    bool publishes;
    bool completes;
    bool mapped;   // may travel so
    bool streams;  // if it copies, then past the cache
    Place place;
    std::size_t bytes;
    std::size_t segment_bytes;
    std::uint32_t num_segments;
    std::uint32_t channel;    // writer index in Endpoints, of a publication
    std::uint32_t num_turns;  // channels on which another operation comes first
    std::span<const Operand> operands;
    std::span<const Predecessor> after;
    std::span<const std::uint32_t> next;  // operations whose turn may come when this one ends
  };
  static constexpr std::uint32_t kLocalOperand = 0xffffffff;

  // `max_segment_bytes` is what a slot of the channels holds. Throws std::invalid_argument if an
  // index is out of range, or a place has not the room for what is read or written there.
  Plan(const ProgramColumns& program, const Layout& layout, std::uint32_t rank,
       std::uint32_t world_size, std::size_t max_segment_bytes, std::size_t element_bytes);

  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  std::span<const Operation> operations() const noexcept { return operations_; }
  // Operations whose turn has come when the plan starts.
  std::span<const std::uint32_t> first() const noexcept { return first_; }
  std::size_t work_bytes() const noexcept { return work_bytes_; }
  std::size_t element_bytes() const noexcept { return element_bytes_; }
  std::size_t max_operands() const noexcept { return max_operands_; }

 private:
  void order_turns();

  std::vector<Operation> operations_;
  std::vector<Operand> operands_;
  std::vector<Predecessor> after_;
  std::vector<std::uint32_t> next_;
  std::vector<std::uint32_t> first_;
  std::size_t work_bytes_ = 0;
  std::size_t element_bytes_;
  std::size_t max_operands_ = 1;
};

// Bytes of each segment of a chunk but the last: the same at both ends, since it depends on the
// size alone.
std::size_t segment_bytes(std::size_t chunk_bytes, std::size_t max_segment_bytes) noexcept;

}  // namespace farandole

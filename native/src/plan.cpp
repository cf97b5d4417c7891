#include "plan.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "copy.hpp"

namespace farandole {
namespace {

constexpr std::size_t kSmallestSegment = 16 * 1024;
constexpr std::size_t kSegmentsWanted = 4;

template <typename T>
T at(std::span<const T> values, std::int32_t index, const char* what) {
  if (index < 0 || static_cast<std::size_t>(index) >= values.size()) {
    throw std::invalid_argument(std::string(what) + " " + std::to_string(index) + " is not in 0.." +
                                std::to_string(values.size()));
  }
  return values[static_cast<std::size_t>(index)];
}

// Where the part of operation `index` ends in a column that holds all operations' parts.
std::size_t end_of(std::span<const std::int32_t> ends, std::size_t index, std::size_t begin,
                   std::size_t size) {
  if (index >= ends.size() || std::cmp_less(ends[index], begin) ||
      std::cmp_greater(ends[index], size)) {
    throw std::invalid_argument("the columns of a program do not fit together");
  }
  return static_cast<std::size_t>(ends[index]);
}

}  // namespace

std::size_t segment_bytes(std::size_t chunk_bytes, std::size_t max_segment_bytes) noexcept {
  // Enough segments to overlap writing and reading; none so small that its fixed cost shows.
  const std::size_t wanted = (chunk_bytes / kSegmentsWanted + 63) / 64 * 64;
  return std::min(max_segment_bytes, std::max(wanted, kSmallestSegment));
}

Plan::Plan(const ProgramColumns& program, const Layout& layout, std::uint32_t rank,
           std::uint32_t world_size, std::size_t max_segment_bytes, std::size_t element_bytes)
    : element_bytes_(element_bytes) {
  std::size_t work_slot = 0;
  std::size_t total = 0;
  for (const std::int64_t bytes : layout.size_bytes) {
    if (bytes < 0) throw std::invalid_argument("a size is negative");
    total += static_cast<std::size_t>(bytes);
    work_slot = std::max(work_slot, static_cast<std::size_t>(bytes));
  }
  work_slot = (work_slot + 63) / 64 * 64;
  work_bytes_ = static_cast<std::size_t>(layout.num_work_slots) * work_slot;

  const auto place = [&](std::int32_t region, std::int32_t slot, std::size_t bytes) -> Place {
    if (region != 0 && region != 1) {
      if (slot < 0 || slot >= layout.num_work_slots) {
        throw std::invalid_argument("a work slot is out of range");
      }
      return {Region::work, static_cast<std::size_t>(slot) * work_slot};
    }
    const bool is_input = region == 0;
    const Layout::Slot found =
        at(is_input ? layout.input : layout.output, slot, is_input ? "input slot" : "output slot");
    if (found.offset < 0 || std::cmp_less(found.room, bytes)) {
      throw std::invalid_argument("slot " + std::to_string(slot) + " has room for " +
                                  std::to_string(found.room) + " bytes, not for " +
                                  std::to_string(bytes));
    }
    return {is_input ? Region::input : Region::output, static_cast<std::size_t>(found.offset)};
  };
  const auto peer_index = [&](std::int32_t peer) -> std::uint32_t {
    if (peer < 0 || static_cast<std::uint32_t>(peer) >= world_size ||
        static_cast<std::uint32_t>(peer) == rank) {
      throw std::invalid_argument("peer " + std::to_string(peer) + " is out of range");
    }
    return static_cast<std::uint32_t>(peer);
  };

  const std::size_t num_operations = program.operations.size();
  operations_.reserve(num_operations);
  operands_.reserve(program.operands.size());
  after_.reserve(program.after.size());
  std::size_t operand_begin = 0;
  std::size_t after_begin = 0;
  for (std::size_t index = 0; index < num_operations; ++index) {
    const ProgramColumns::Operation& column = program.operations[index];
    Operation operation{};
    operation.publishes = column.reader != ProgramColumns::kCombine;
    operation.completes = column.completes != 0;
    operation.mapped = column.mapped != 0;
    operation.streams = column.region == 1;
    operation.bytes = static_cast<std::size_t>(at(layout.size_bytes, column.size, "size"));
    operation.place = place(column.region, column.slot, operation.bytes);
    operation.segment_bytes = segment_bytes(operation.bytes, max_segment_bytes);
    operation.num_segments = static_cast<std::uint32_t>(std::max<std::size_t>(
        1, (operation.bytes + operation.segment_bytes - 1) / operation.segment_bytes));
    if (operation.publishes) {
      operation.channel =
          column.reader == ProgramColumns::kEveryone ? rank : peer_index(column.reader);
    }
    const std::size_t operand_end =
        end_of(program.operand_ends, index, operand_begin, program.operands.size());
    const std::size_t first_operand = operands_.size();
    for (; operand_begin < operand_end; ++operand_begin) {
      const ProgramColumns::Operand& operand = program.operands[operand_begin];
      if (operand.peer == ProgramColumns::kLocal) {
        operands_.push_back(
            {kLocalOperand, rank, place(operand.region, operand.slot, operation.bytes)});
      } else {
        const std::uint32_t peer = peer_index(operand.peer);
        operands_.push_back(
            {operand.shared != 0 ? world_size + peer : peer, peer, Place{Region::work, 0}});
      }
    }
    operation.operands = {operands_.data() + first_operand, operands_.size() - first_operand};
    max_operands_ = std::max(max_operands_, operation.operands.size());
    const std::size_t after_end =
        end_of(program.after_ends, index, after_begin, program.after.size());
    const std::size_t first_after = after_.size();
    for (; after_begin < after_end; ++after_begin) {
      const auto earlier = static_cast<std::size_t>(program.after[after_begin]);
      if (earlier >= index) throw std::invalid_argument("an operation waits for a later one");
      after_.push_back({static_cast<std::uint32_t>(earlier),
                        at(program.size_classes, program.operations[earlier].size, "size") !=
                            at(program.size_classes, column.size, "size")});
    }
    operation.after = {after_.data() + first_after, after_.size() - first_after};
    operations_.push_back(operation);
  }
  // In a reduction in place, what is copied over was read before, and may still be in the cache.
  const bool copies_past_cache = total >= kSmallestStreaming * (max_operands_ > 1 ? 2 : 1);
  for (Operation& operation : operations_) operation.streams &= copies_past_cache;
  order_turns();
}

void Plan::order_turns() {
  // Operations on one channel take turns, at both of its ends in program order.
  constexpr std::uint64_t kPublications = std::uint64_t{1} << 32;
  std::map<std::uint64_t, std::uint32_t> last;
  std::vector<std::vector<std::uint32_t>> next(operations_.size());
  for (std::uint32_t index = 0; index < operations_.size(); ++index) {
    Operation& operation = operations_[index];
    const auto take_turn = [&](std::uint64_t channel) {
      const auto [previous, is_first] = last.try_emplace(channel, index);
      if (is_first) return;
      next[previous->second].push_back(index);
      previous->second = index;
      ++operation.num_turns;
    };
    if (operation.publishes) take_turn(kPublications | operation.channel);
    for (const Operand& operand : operation.operands) {
      if (operand.channel != kLocalOperand) take_turn(operand.channel);
    }
    if (operation.num_turns == 0) first_.push_back(index);
  }
  std::size_t total = 0;
  for (const auto& followers : next) total += followers.size();
  next_.reserve(total);
  for (std::size_t index = 0; index < operations_.size(); ++index) {
    const std::size_t begin = next_.size();
    next_.insert(next_.end(), next[index].begin(), next[index].end());
    operations_[index].next = {next_.data() + begin, next[index].size()};
  }
}

}  // namespace farandole

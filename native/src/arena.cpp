#include "arena.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "memory_file.hpp"

namespace farandole {
namespace {

constexpr std::uint64_t kMagic = 0x33454c4f444e4146;  // "FANDOLE3", little endian

std::span<std::byte> map_whole(int descriptor, std::size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "cannot map " + std::to_string(size) + " bytes of shared memory");
  }
  return {static_cast<std::byte*>(memory), size};
}

std::size_t channel_offset(const Geometry& g, std::uint32_t src, std::uint32_t dst) noexcept {
  const std::size_t pair = Channel::bytes(g, false);
  const std::size_t shared = Channel::bytes(g, true);
  // Each row holds N channels, of which the one on the diagonal is shared; it comes first.
  const std::size_t row = shared + (g.world_size - 1) * pair;
  if (src == dst) return src * row;
  return src * row + shared + (dst < src ? dst : dst - 1) * pair;
}

// Of a channel for messages, from the end of those for collectives on.
std::size_t message_channel_offset(const Geometry& g, std::size_t src, std::size_t dst) noexcept {
  return (src * (g.world_size - 1) + (dst < src ? dst : dst - 1)) * Channel::bytes(g, false);
}

}  // namespace

Channel::Channel(std::byte* memory, const Geometry& geometry, bool shared) noexcept
    : taken_(reinterpret_cast<Counter*>(memory)),
      slots_(memory + sizeof(Counter) * (shared ? geometry.world_size : 1)),
      stride_(sizeof(SlotHeader) + geometry.slot_bytes),
      shared_(shared) {}

std::size_t Channel::bytes(const Geometry& geometry, bool shared) noexcept {
  return sizeof(Counter) * (shared ? geometry.world_size : 1) +
         geometry.num_slots * (sizeof(SlotHeader) + geometry.slot_bytes);
}

std::size_t Arena::total_bytes(const Geometry& geometry) noexcept {
  const std::size_t n = geometry.world_size;
  return sizeof(ArenaHeader) + n * sizeof(RankState) +
         channel_offset(geometry, geometry.world_size, geometry.world_size) +
         n * (n - 1) * Channel::bytes(geometry, false);
}

std::shared_ptr<Arena> Arena::create(const Geometry& geometry) {
  if (geometry.world_size == 0 || geometry.num_slots == 0 ||
      geometry.slot_bytes % kCacheLine != 0) {
    throw std::invalid_argument("an arena needs ranks, slots, and slots of whole cache lines");
  }
  const std::size_t size = total_bytes(geometry);
  const int descriptor = create_memory_file(size);
  std::span<std::byte> memory;
  try {
    memory = map_whole(descriptor, size);
  } catch (...) {
    close(descriptor);
    throw;
  }
  // The atomics of the channels are all zero, which is what fresh pages hold.
  auto* header = new (memory.data()) ArenaHeader;
  header->geometry = geometry;
  for (std::uint32_t rank = 0; rank < geometry.world_size; ++rank) {
    new (memory.data() + sizeof(ArenaHeader) + rank * sizeof(RankState)) RankState;
  }
  header->magic = kMagic;  // other processes learn of the descriptor only after this
  return std::shared_ptr<Arena>(new Arena(descriptor, memory, geometry));
}

std::shared_ptr<Arena> Arena::map(int descriptor) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(ArenaHeader))) {
    throw std::runtime_error("this descriptor is not the shared memory of a communicator");
  }
  const auto memory = map_whole(descriptor, static_cast<std::size_t>(status.st_size));
  const auto* header = reinterpret_cast<const ArenaHeader*>(memory.data());
  if (header->magic != kMagic || header->geometry.world_size == 0 ||
      header->geometry.num_slots == 0 || total_bytes(header->geometry) != memory.size()) {
    munmap(memory.data(), memory.size());
    throw std::runtime_error(
        "this shared memory does not belong to a communicator of this version");
  }
  const Geometry geometry = header->geometry;
  return std::shared_ptr<Arena>(new Arena(descriptor, memory, geometry));
}

Arena::~Arena() {
  close_descriptor();
  munmap(memory_.data(), memory_.size());
}

void Arena::close_descriptor() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

RankState& Arena::rank(std::uint32_t rank) const noexcept {
  return *reinterpret_cast<RankState*>(memory_.data() + sizeof(ArenaHeader) +
                                       rank * sizeof(RankState));
}

Channel Arena::channel(std::uint32_t src, std::uint32_t dst, Traffic traffic) const noexcept {
  const std::uint32_t n = geometry_.world_size;
  std::byte* channels = memory_.data() + sizeof(ArenaHeader) + n * sizeof(RankState);
  if (traffic == Traffic::messages) {
    return {
        channels + channel_offset(geometry_, n, n) + message_channel_offset(geometry_, src, dst),
        geometry_, false};
  }
  return {channels + channel_offset(geometry_, src, dst), geometry_, src == dst};
}

}  // namespace farandole

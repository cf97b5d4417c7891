#include "heap.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "memory_file.hpp"

namespace farandole {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers do not know

// Maps `size` bytes of a file, from an address that huge pages can start at.
std::span<std::byte> map_aligned(int descriptor, std::size_t size, int protection) noexcept {
  void* space = mmap(nullptr, size + kHugePage, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(space);
  auto* start = static_cast<std::byte*>(space);
  auto* aligned = start + (kHugePage - address % kHugePage) % kHugePage;
  if (mmap(aligned, size, protection, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(space, size + kHugePage);
    errno = error;
    return {};
  }
  const auto before = static_cast<std::size_t>(aligned - start);
  if (before != 0) munmap(start, before);
  if (before != kHugePage) munmap(aligned + size, kHugePage - before);
  return {aligned, size};
}

std::size_t page_bytes() noexcept { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

Heap::Heap(HeapCard& card) {
  const std::size_t size = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
  descriptor_ = create_memory_file(size);
  memory_ = map_aligned(descriptor_, size, PROT_READ | PROT_WRITE);
  if (memory_.empty()) {
    const int error = errno;
    close(descriptor_);
    errno = error;
    fail("cannot map registered memory");
  }
  // A wish: fewer page faults and look-ups where it is granted.
  madvise(memory_.data(), size, MADV_HUGEPAGE);
  unused_.emplace(0, size);
  card.process.store(getpid(), std::memory_order_relaxed);
  card.descriptor.store(descriptor_, std::memory_order_relaxed);
  card.bytes.store(size, std::memory_order_release);
}

Heap::~Heap() {
  munmap(memory_.data(), memory_.size());
  close(descriptor_);
}

std::byte* Heap::allocate(std::size_t bytes) {
  if (bytes > memory_.size()) throw std::bad_alloc();
  const std::size_t unit = bytes < kHugePage ? page_bytes() : kHugePage;
  const std::size_t length = (bytes + unit - 1) / unit * unit;
  const std::lock_guard lock(mutex_);
  for (auto hole = unused_.begin(); hole != unused_.end(); ++hole) {
    const auto [start, end] = std::pair{hole->first, hole->first + hole->second};
    const std::size_t offset = (start + unit - 1) / unit * unit;
    if (offset + length > end) continue;
    // Takes the pages now: to find out at the first touch that there are none would be a signal.
    if (fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(length)) != 0) {
      throw std::bad_alloc();
    }
    used_.emplace(offset, length);
    unused_.erase(hole);
    if (offset > start) unused_.emplace(start, offset - start);
    if (end > offset + length) unused_.emplace(offset + length, end - offset - length);
    std::byte* memory = memory_.data() + offset;
    // A wish, too: where it is not granted, pages stay small.
    if (unit == kHugePage) madvise(memory, length, kCollapse);
    return memory;
  }
  throw std::bad_alloc();
}

void Heap::free(std::byte* memory) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(offset_of(memory));
  auto [offset, length] = *found;
  used_.erase(found);
  // Gives the pages back; those of the next owner are zero again.
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(length));
  auto next = unused_.lower_bound(offset);
  if (next != unused_.end() && next->first == offset + length) {
    length += next->second;
    next = unused_.erase(next);
  }
  if (next != unused_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += length;
      return;
    }
  }
  unused_.emplace_hint(next, offset, length);
}

PeerHeap::PeerHeap(const HeapCard& card) {
  const std::size_t size = card.bytes.load(std::memory_order_acquire);
  const std::string path = "/proc/" + std::to_string(card.process.load(std::memory_order_relaxed)) +
                           "/fd/" + std::to_string(card.descriptor.load(std::memory_order_relaxed));
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail("cannot open the registered memory of another rank");
  struct stat status{};
  if (fstat(descriptor, &status) == 0 && std::cmp_greater_equal(status.st_size, size)) {
    memory_ = map_aligned(descriptor, size, PROT_READ);
  }
  const int error = errno;
  close(descriptor);
  errno = error;
  if (memory_.empty()) fail("cannot map the registered memory of another rank");
}

PeerHeap::~PeerHeap() { munmap(const_cast<std::byte*>(memory_.data()), memory_.size()); }

}  // namespace farandole

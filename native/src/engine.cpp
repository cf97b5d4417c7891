#include "engine.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>

#include "copy.hpp"
#include "waiting.hpp"

namespace farandole {
namespace {

using Clock = std::chrono::steady_clock;

// How often a thread lets others of its core run before it sleeps, where another thread of this
// process is about to give it something to do: to be woken takes longer than that.
constexpr int kYieldsBetweenThreads = 100;

// Mixes all calls before into a call's fingerprint, so that no call passes for another, and ranks
// that differed in one call are found out at the next, even if they never met in it.
std::uint64_t mix(std::uint64_t fingerprint, std::uint64_t history) noexcept {
  std::uint64_t x = fingerprint + (history + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::uint64_t pack(Abort reason, std::uint32_t subject) noexcept {
  return static_cast<std::uint64_t>(subject) << 32 | static_cast<std::uint32_t>(reason);
}

// How many forks lie between the program's first process and this one. getpid() would be a system
// call each time.
std::uint64_t num_forks() noexcept {
  static std::atomic<std::uint64_t> count{0};
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  return count.load(std::memory_order_relaxed);
}

}  // namespace

bool Work::wait_for(std::chrono::nanoseconds timeout) noexcept {
  for (int look = 0; look < kYieldsBetweenThreads && !is_done(); ++look) sched_yield();
  if (!is_done()) futex_wait(done_, 0, timeout);
  return is_done();
}

void Work::finish(const Receipt& receipt) noexcept {
  receipt_ = receipt;
  done_.store(1, std::memory_order_release);
  futex_wake_all(done_);
}

Engine::Engine(std::shared_ptr<Arena> arena, std::uint32_t rank,
               std::vector<int> process_descriptors, Tuning tuning, std::vector<int> connections)
    : arena_(std::move(arena)),
      rank_(rank),
      world_size_(arena_->geometry().world_size),
      process_descriptors_(std::move(process_descriptors)),
      tuning_(tuning),
      forks_(num_forks()),
      writers_(world_size_),
      readers_(std::size_t{2} * world_size_),
      peer_heaps_(world_size_) {
  process_descriptors_.resize(world_size_, kThisProcess);
  connections.resize(world_size_, -1);
  if (std::any_of(connections.begin(), connections.end(), [](int socket) { return socket >= 0; })) {
    try {
      relay_ = std::make_unique<Relay>(
          arena_, rank_, std::move(connections), [this](std::uint64_t position) {
            return own_heap_.load(std::memory_order_acquire)->at(position);
          });
    } catch (...) {
      close_process_descriptors();
      throw;
    }
  }
}

Engine::~Engine() {
  close();
  if (is_forked()) {
    static_cast<void>(background_.release());
    static_cast<void>(relay_.release());
  }
  close_process_descriptors();
}

void Engine::close_process_descriptors() noexcept {
  for (const int descriptor : process_descriptors_) {
    if (descriptor >= 0) ::close(descriptor);
  }
}

Receipt Engine::run(const Call& call, const Interrupted& interrupted) {
  if (!flight_log_.is_on()) return run_in_turn(call, interrupted);
  Call timed = call;
  timed.called_ns = Clock::now().time_since_epoch().count();
  return run_in_turn(timed, interrupted);
}

Receipt Engine::run_in_turn(const Call& call, const Interrupted& interrupted) {
  std::unique_lock lock(background_->mutex);
  if (background_->stopping) return {.status = Abort::requested, .subject = rank_};
  if (background_->busy && background_->runner == std::this_thread::get_id()) {
    throw NestedCall();
  }
  if (background_->busy || !background_->queue.empty()) {
    // Calls run in the order in which they were made: queue up behind the others.
    lock.unlock();
    const std::shared_ptr<Work> work = submit(call);
    while (!work->wait_for(kSlice)) {
      if (interrupted && interrupted()) abort(Abort::interrupted, rank_);
    }
    return work->receipt();
  }
  background_->busy = true;
  background_->runner = std::this_thread::get_id();
  in_background_ = false;
  lock.unlock();
  const Receipt receipt = execute(call, interrupted);
  lock.lock();
  background_->busy = false;
  const bool others_wait = background_->stopping || !background_->queue.empty();
  const bool closes = background_->close_after_run;
  lock.unlock();
  if (others_wait) background_->changed.notify_all();
  if (closes) finish_close();
  return receipt;
}

std::shared_ptr<Work> Engine::submit(const Call& call) {
  auto work = std::make_shared<Work>();
  {
    const std::lock_guard lock(background_->mutex);
    if (background_->stopping) {
      work->finish({.status = Abort::requested, .subject = rank_});
      return work;
    }
    // First what may fail: a call that was refused must not stay queued.
    if (!background_->thread.joinable()) background_->thread = std::thread(&Engine::serve, this);
    background_->queue.push_back({call, work});
    background_->num_submitted.fetch_add(1, std::memory_order_release);
  }
  background_->changed.notify_all();
  return work;
}

void Engine::serve() {
  std::unique_lock lock(background_->mutex);
  while (true) {
    background_->changed.wait(lock, [this] {
      return !background_->busy && (background_->stopping || !background_->queue.empty());
    });
    if (background_->queue.empty()) return;
    background_->busy = true;
    background_->runner = std::this_thread::get_id();
    const Job job = std::move(background_->queue.front());
    background_->queue.pop_front();
    in_background_ = true;
    lock.unlock();
    const Receipt receipt = execute(job.call, {});
    lock.lock();
    background_->busy = false;  // before whoever waits for it goes on, and perhaps closes
    job.work->finish(receipt);
    if (!background_->queue.empty() || background_->stopping) continue;
    // The next call often comes soon.
    const std::uint64_t seen = background_->num_submitted.load(std::memory_order_acquire);
    lock.unlock();
    for (int look = 0; look < kYieldsBetweenThreads; ++look) {
      if (background_->num_submitted.load(std::memory_order_acquire) != seen) break;
      sched_yield();
    }
    lock.lock();
  }
}

void Engine::abort(Abort reason, std::uint32_t subject) noexcept {
  std::uint64_t none = 0;
  arena_->header().abort.compare_exchange_strong(none, pack(reason, subject),
                                                 std::memory_order_acq_rel);
  ring_all(*arena_);
  if (relay_) relay_->tell();
}

std::pair<Abort, std::uint32_t> Engine::aborted() const noexcept {
  const std::uint64_t packed = arena_->header().abort.load(std::memory_order_acquire);
  return {static_cast<Abort>(packed & 0xffffffff), static_cast<std::uint32_t>(packed >> 32)};
}

void Engine::close() noexcept {
  if (is_forked()) return;  // the rank is not this process's to close
  bool unfinished = false;
  bool within_run = false;
  {
    const std::lock_guard lock(background_->mutex);
    if (background_->stopping) return;
    background_->stopping = true;
    unfinished = background_->busy || !background_->queue.empty();
    within_run = background_->busy && background_->runner == std::this_thread::get_id();
    background_->close_after_run = within_run;
  }
  if (unfinished) abort(Abort::requested, rank_);
  if (!within_run) finish_close();
}

void Engine::finish_close() noexcept {
  background_->changed.notify_all();
  if (background_->thread.joinable()) background_->thread.join();
  {
    std::unique_lock lock(background_->mutex);
    background_->changed.wait(lock, [this] { return !background_->busy; });
  }
  if (aborted().first == Abort::none) check_agreement(true);
  arena_->rank(rank_).closed.store(1, std::memory_order_release);
  ring_all(*arena_);
  if (!relay_) return;
  relay_->close();
  // By now this rank knows the last call of all that have closed, too.
  if (aborted().first == Abort::none) check_agreement(true);
}

bool Engine::is_forked() const noexcept { return num_forks() != forks_; }

Writer Engine::writer_to(std::uint32_t dst, Traffic traffic) const {
  const bool leaves = relay_ && relay_->serves(dst);
  return {*arena_, rank_, dst, traffic, leaves ? &relay_->bell() : nullptr};
}

Reader Engine::reader_from(std::uint32_t src, Traffic traffic) const {
  const bool leaves = relay_ && relay_->serves(src);
  return {*arena_, src, rank_, rank_, traffic, leaves ? &relay_->bell() : nullptr};
}

Writer& Engine::writer(std::uint32_t channel) {
  auto& end = writers_[channel];
  if (!end) end = std::make_unique<Writer>(writer_to(channel, Traffic::collectives));
  return *end;
}

Reader& Engine::reader(std::uint32_t channel) {
  auto& end = readers_[channel];
  if (!end) {
    const std::uint32_t shared = channel - world_size_;
    end = std::make_unique<Reader>(
        channel < world_size_ ? reader_from(channel, Traffic::collectives)
                              : Reader(*arena_, shared, shared, rank_, Traffic::collectives));
  }
  return *end;
}

Receipt Engine::execute(const Call& call, const Interrupted& interrupted) {
  try {
    return run_plan(call, interrupted);
  } catch (...) {  // nothing here throws but for want of memory
    abort(Abort::out_of_memory, rank_);
  }
  Receipt receipt;
  std::tie(receipt.status, receipt.subject) = aborted();
  return receipt;
}

Receipt Engine::run_plan(const Call& call, const Interrupted& interrupted) {
  Receipt receipt;
  const auto start = Clock::now();
  const auto deadline = call.timeout ? start + *call.timeout : Clock::time_point::max();
  const SettledCall& settled = *call.settled;
  const Plan& plan = *settled.plan;
  std::tie(receipt.status, receipt.subject) = aborted();
  // After an abort the records stay as they are: they tell what each rank was in when it happened.
  if (receipt.status != Abort::none) return receipt;
  CallRecord& record = arena_->rank(rank_).call;
  record.what.store(settled.what, std::memory_order_relaxed);
  record.count.store(settled.count, std::memory_order_relaxed);
  record.payload_bytes.store(settled.payload_bytes, std::memory_order_relaxed);
  record.timeout_ns.store(call.timeout ? call.timeout->count() : 0, std::memory_order_relaxed);
  record.began_ns.store(start.time_since_epoch().count(), std::memory_order_relaxed);
  ++sequence_;
  history_ = mix(settled.fingerprint, history_);
  past_[sequence_ % past_.size()] = static_cast<std::uint32_t>(history_);
  record.sequence.store(sequence_, std::memory_order_relaxed);
  record.agreement.store(agreement(), std::memory_order_relaxed);
  Flight& flight = flights_[sequence_ % kFlights];
  flight.sequence.store(0, std::memory_order_relaxed);
  flight.what.store(settled.what, std::memory_order_release);
  flight.count.store(settled.count, std::memory_order_release);
  flight.payload_bytes.store(settled.payload_bytes, std::memory_order_release);
  flight.began_ns.store(start.time_since_epoch().count(), std::memory_order_release);
  flight.ended_ns.store(0, std::memory_order_release);
  flight.sequence.store(sequence_, std::memory_order_release);

  if (plan.work_bytes() > work_capacity_) {
    work_memory_ = std::make_unique_for_overwrite<std::byte[]>(plan.work_bytes());
    work_capacity_ = plan.work_bytes();
  }
  const auto operations = plan.operations();
  done_.assign(operations.size(), 0);
  turns_.resize(operations.size());
  std::transform(operations.begin(), operations.end(), turns_.begin(),
                 [](const Plan::Operation& operation) { return operation.num_turns; });
  active_.assign(plan.first().begin(), plan.first().end());
  sources_.resize(plan.max_operands());
  mapped_.clear();
  if (own_heap_.load(std::memory_order_acquire) != nullptr) {
    mapped_from_.assign(operations.size(), 0);
  }
  while (receipt.status == Abort::none && !is_over(plan)) {
    if (!sweep(call, receipt) && receipt.status == Abort::none) {
      wait(call, receipt, interrupted, deadline);
    }
  }
  const auto end = Clock::now();
  const std::int64_t ended_ns = end.time_since_epoch().count();
  if (flight_log_.is_on()) {
    flight_log_.add({sequence_, settled.what, settled.count, settled.payload_bytes, call.called_ns,
                     start.time_since_epoch().count(), ended_ns, receipt.status == Abort::none});
  }
  if (receipt.status != Abort::none) return receipt;
  record.finished.store(sequence_, std::memory_order_relaxed);
  flight.ended_ns.store(ended_ns, std::memory_order_relaxed);
  if (settled.tally) {
    Tally& tally = *settled.tally;
    add(tally.calls, 1);
    add(tally.bytes_sent, receipt.bytes_sent);
    add(tally.bytes_received, receipt.bytes_received);
    add(tally.bytes_mapped, receipt.bytes_mapped);
    add(tally.scheduled_bytes_sent, settled.scheduled_bytes_sent);
    add(tally.payload_bytes, settled.payload_bytes);
    add(tally.nanoseconds, static_cast<std::uint64_t>((end - start).count()));
  }
  return receipt;
}

// Lets every active operation go on by one segment. False if none could.
bool Engine::sweep(const Call& call, Receipt& receipt) {
  bool progress = false;
  for (std::size_t i = 0; i < active_.size();) {
    const std::uint32_t index = active_[i];
    if (advance(index, call, receipt)) {
      progress = true;
      if (done_[index] == call.settled->plan->operations()[index].num_segments) {
        active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
        finish_operation(call.settled->plan->operations()[index]);
        continue;
      }
    } else if (receipt.status != Abort::none) {
      return false;
    }
    ++i;
  }
  return progress;
}

void Engine::finish_operation(const Plan::Operation& operation) {
  for (const std::uint32_t follower : operation.next) {
    if (--turns_[follower] == 0) {
      active_.insert(std::upper_bound(active_.begin(), active_.end(), follower), follower);
    }
  }
}

bool Engine::is_ready(const Plan::Operation& operation, std::uint32_t segment, const Plan& plan) {
  return std::all_of(operation.after.begin(), operation.after.end(), [&](const auto& earlier) {
    const std::uint32_t all = plan.operations()[earlier.operation].num_segments;
    return progress(earlier.operation, plan) >= (earlier.whole ? all : std::min(segment + 1, all));
  });
}

// Segments of an operation that are over and done with, for those that run after it.
std::uint32_t Engine::progress(std::uint32_t index, const Plan& plan) {
  if (mapped_.empty() || mapped_from_[index] == 0) return done_[index];
  const std::uint64_t start = mapped_from_[index] - 1;
  const std::uint64_t taken = writer(plan.operations()[index].channel).taken();
  return taken < start
             ? 0
             : static_cast<std::uint32_t>(std::min<std::uint64_t>(taken - start, done_[index]));
}

// Whether all is done, and nobody reads this call's buffers any more.
bool Engine::is_over(const Plan& plan) {
  return active_.empty() && std::all_of(mapped_.begin(), mapped_.end(), [&](std::uint32_t index) {
           return progress(index, plan) == plan.operations()[index].num_segments;
         });
}

// Does the next segment of an operation. False if it must wait, or found a mismatch (then
// receipt.status says so).
bool Engine::advance(std::uint32_t index, const Call& call, Receipt& receipt) {
  const Plan::Operation& operation = call.settled->plan->operations()[index];
  const std::uint32_t segment = done_[index];
  if (!is_ready(operation, segment, *call.settled->plan)) return false;
  const std::size_t offset = segment * operation.segment_bytes;
  const std::size_t bytes = std::min(operation.segment_bytes, operation.bytes - offset);
  const bool moved = operation.publishes ? publish_segment(index, offset, bytes, call, receipt)
                                         : combine_segment(operation, offset, bytes, call, receipt);
  if (moved) ++done_[index];
  return moved;
}

bool Engine::publish_segment(std::uint32_t index, std::size_t offset, std::size_t bytes,
                             const Call& call, Receipt& receipt) {
  const Plan::Operation& operation = call.settled->plan->operations()[index];
  Writer& end = writer(operation.channel);
  if (!end.has_room()) return false;
  const std::byte* whole = at(operation.place, call);
  Label label{history_, with_form(operation.bytes, call.settled->wire_form)};
  const Heap* heap = own_heap_.load(std::memory_order_acquire);
  if (heap != nullptr && done_[index] == 0 && operation.mapped &&
      operation.bytes >= tuning_.smallest_mapped_bytes && heap->contains(whole, operation.bytes)) {
    mapped_from_[index] = end.published() + 1;
    mapped_.push_back(index);
  }
  if (!mapped_.empty() && mapped_from_[index] != 0) {
    label.heap_position = heap->offset_of(whole) + offset + 1;
  }
  end.publish(whole + offset, bytes, label);
  receipt.bytes_sent += bytes * end.num_readers();
  if (label.heap_position != 0) receipt.bytes_mapped += bytes * end.num_readers();
  return true;
}

bool Engine::combine_segment(const Plan::Operation& operation, std::size_t offset,
                             std::size_t bytes, const Call& call, Receipt& receipt) {
  for (const Plan::Operand& operand : operation.operands) {
    if (operand.channel != Plan::kLocalOperand && !reader(operand.channel).has_data()) return false;
  }
  for (std::size_t i = 0; i < operation.operands.size(); ++i) {
    const Plan::Operand& operand = operation.operands[i];
    if (operand.channel == Plan::kLocalOperand) {
      sources_[i] = at(operand.place, call) + offset;
      continue;
    }
    const Reader& end = reader(operand.channel);
    const Label label = end.label();
    if (label.fingerprint != history_ ||
        label.total_bytes != with_form(operation.bytes, call.settled->wire_form)) {
      if (label.fingerprint == history_) {
        record_misfit(operand.peer, label.total_bytes & kBytesOfLabel, operation);
      }
      abort(Abort::mismatch, operand.peer);
      std::tie(receipt.status, receipt.subject) = aborted();
      return false;
    }
    sources_[i] = label.heap_position == 0
                      ? end.data(bytes)
                      : mapped_at(operand.peer, label.heap_position - 1, bytes);
    if (sources_[i] == nullptr) {
      std::tie(receipt.status, receipt.subject) = aborted();
      return false;
    }
    receipt.bytes_received += bytes;
  }
  std::byte* target = at(operation.place, call) + offset;
  if (operation.operands.size() > 1) {
    call.settled->combine(target, sources_.data(), operation.operands.size(),
                          bytes / call.settled->plan->element_bytes(),
                          operation.completes ? call.settled->divisor : 1);
    // So that the bits here are those that other hosts get.
    if (operation.completes && call.settled->round != nullptr) {
      call.settled->round(target, bytes / sizeof(float));
    }
  } else if (bytes != 0 && sources_[0] != target) {
    if (operation.streams) {
      copy_streaming(target, sources_[0], bytes);
    } else {
      std::memcpy(target, sources_[0], bytes);
    }
  }
  for (const Plan::Operand& operand : operation.operands) {
    if (operand.channel != Plan::kLocalOperand) reader(operand.channel).release();
  }
  return true;
}

// What lies in the registered memory of another rank. Null, after an abort, if it cannot be had.
const std::byte* Engine::mapped_at(std::uint32_t peer, std::uint64_t position, std::size_t bytes) {
  auto& heap = peer_heaps_[peer];
  try {
    if (!heap) heap = std::make_unique<PeerHeap>(arena_->rank(peer).heap);
  } catch (const std::system_error&) {
    // A process that ends closes its files before it is seen to have ended.
    pollfd descriptor{process_descriptors_[peer], POLLIN, 0};
    poll(&descriptor, 1, 1000);
    if (is_gone(peer, Traffic::collectives)) {
      abort(Abort::peer_lost, peer);
    } else {
      abort(Abort::unmapped, rank_);
    }
    return nullptr;
  }
  const std::byte* memory = heap->at(position, bytes);
  if (memory == nullptr) abort(Abort::unmapped, rank_);
  return memory;
}

std::shared_ptr<Heap> Engine::heap() {
  const std::lock_guard lock(heap_mutex_);
  if (!heap_) {
    heap_ = std::make_shared<Heap>(arena_->rank(rank_).heap);
    own_heap_.store(heap_.get(), std::memory_order_release);
  }
  return heap_;
}

std::byte* Engine::at(const Plan::Place& place, const Call& call) const noexcept {
  switch (place.region) {
    case Region::input:
      // Only ever read: a plan writes to output and work places alone.
      return const_cast<std::byte*>(call.input) + place.offset;
    case Region::output:
      return call.output + place.offset;
    case Region::work:
      break;
  }
  return work_memory_.get() + place.offset;
}

// Whether there is no need to wait any more.
bool Engine::moves(const Call& call, Receipt& receipt) {
  return sweep(call, receipt) || receipt.status != Abort::none || is_over(*call.settled->plan);
}

// Returns once some operation went on or all is over, or with receipt.status set.
void Engine::wait(const Call& call, Receipt& receipt, const Interrupted& interrupted,
                  Clock::time_point deadline) {
  const std::uint32_t spins = in_background_ ? tuning_.background_spins : tuning_.spins;
  for (std::uint32_t spin = 0; spin < spins; ++spin) {
    pause_briefly();
    if (moves(call, receipt)) return;
  }
  for (std::uint32_t yield = 0; yield < tuning_.yields; ++yield) {
    sched_yield();
    if (moves(call, receipt)) return;
  }
  Doorbell& doorbell = arena_->rank(rank_).doorbell(Traffic::collectives);
  while (true) {
    const std::uint32_t rings = doorbell.rings.load(std::memory_order_seq_cst);
    doorbell.sleeping.store(1, std::memory_order_seq_cst);
    const bool moved = moves(call, receipt);
    if (!moved) {
      std::tie(receipt.status, receipt.subject) = aborted();
      if (receipt.status == Abort::none) {
        const auto left =
            std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
        if (left > std::chrono::nanoseconds::zero()) {
          futex_wait(doorbell.rings, rings, std::min<std::chrono::nanoseconds>(kSlice, left));
        } else {
          abort(Abort::timeout, rank_);
          std::tie(receipt.status, receipt.subject) = aborted();
        }
      }
    }
    doorbell.sleeping.store(0, std::memory_order_seq_cst);
    if (moved || receipt.status != Abort::none || moves(call, receipt)) return;
    if (interrupted && interrupted()) abort(Abort::interrupted, rank_);
    check_peers(call);
  }
}

// Only of the call that ends all: after an abort the records stay as they are.
void Engine::record_misfit(std::uint32_t peer, std::uint64_t bytes,
                           const Plan::Operation& operation) noexcept {
  if (aborted().first != Abort::none) return;
  CallRecord& record = arena_->rank(rank_).call;
  record.misfit_bytes.store(bytes, std::memory_order_relaxed);
  record.expected_bytes.store(operation.bytes, std::memory_order_relaxed);
  record.misfit_rank.store(peer + 1, std::memory_order_relaxed);
}

std::uint64_t Engine::agreement() const noexcept {
  return sequence_ << 32 | (history_ & 0xffffffff);
}

// Aborts if a rank has made another call under the same number; when `closing`, also if it has
// closed after another number of calls.
void Engine::check_agreement(bool closing) noexcept {
  for (std::uint32_t peer = 0; peer < world_size_; ++peer) {
    const RankState& state = arena_->rank(peer);
    const bool closed = state.closed.load(std::memory_order_acquire) != 0;
    const std::uint64_t theirs = state.call.agreement.load(std::memory_order_relaxed);
    const auto behind =
        static_cast<std::uint32_t>(sequence_) - static_cast<std::uint32_t>(theirs >> 32);
    const bool comparable =
        theirs != 0 && behind < std::min<std::uint64_t>(sequence_, past_.size());
    if ((comparable &&
         past_[(theirs >> 32) % past_.size()] != static_cast<std::uint32_t>(theirs)) ||
        (closing && closed && behind != 0)) {
      abort(Abort::mismatch, peer);
    }
  }
}

// Aborts if a rank that `end` waits for will never come; with `whole`, for it to take all.
void Engine::check_readers(const Writer& end, bool whole) {
  for (const std::uint32_t peer : end.readers()) {
    if (end.waits_for(peer, whole) && is_gone(peer, Traffic::collectives) &&
        end.waits_for(peer, whole)) {
      abort(Abort::peer_lost, peer);
    }
  }
}

// Aborts if a rank is in another call, or if an operation waits for a rank that will never come.
void Engine::check_peers(const Call& call) {
  check_agreement(false);
  const Plan& plan = *call.settled->plan;
  for (const std::uint32_t index : mapped_) {
    const Plan::Operation& operation = plan.operations()[index];
    if (progress(index, plan) < operation.num_segments) {
      check_readers(writer(operation.channel), true);
    }
  }
  for (const std::uint32_t index : active_) {
    const Plan::Operation& operation = call.settled->plan->operations()[index];
    if (!is_ready(operation, done_[index], *call.settled->plan)) continue;
    if (operation.publishes) {
      check_readers(writer(operation.channel), false);
      continue;
    }
    for (const Plan::Operand& operand : operation.operands) {
      if (operand.channel == Plan::kLocalOperand || reader(operand.channel).has_data()) continue;
      // What it published before it went may have become visible since: look once more.
      if (is_gone(operand.peer, Traffic::collectives) && !reader(operand.channel).has_data()) {
        abort(Abort::peer_lost, operand.peer);
      }
    }
  }
}

bool Engine::is_gone(std::uint32_t peer, Traffic traffic) const noexcept {
  return relay_ && relay_->serves(peer) ? relay_->is_gone(peer, traffic) : has_ended(peer);
}

bool Engine::has_ended(std::uint32_t peer) const noexcept {
  if (relay_ && relay_->serves(peer)) return relay_->has_ended(peer);
  if (arena_->rank(peer).closed.load(std::memory_order_acquire) != 0) return true;
  if (process_descriptors_[peer] < 0) return process_descriptors_[peer] == kEnded;
  pollfd descriptor{process_descriptors_[peer], POLLIN, 0};
  return poll(&descriptor, 1, 0) == 1;
}

}  // namespace farandole

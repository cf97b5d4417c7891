#include "postbox.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "copy.hpp"
#include "plan.hpp"
#include "waiting.hpp"

namespace farandole {
namespace {

// How often posting a message looks for more to move. Enough to fill the slots of a channel; what
// is left is for whoever waits.
constexpr int kPassesOfPost = 4;

// How often a thread looks for what has come before it finds that the time of a message is over.
constexpr int kPassesBeforeDeadline = 16;

// How long the postbox's thread leaves a message to a thread that may be about to wait for it: to
// be woken costs less than to take turns.
constexpr std::chrono::microseconds kGrace{200};

// How many looks share one at the clock.
constexpr std::uint32_t kRoundsPerClock = 64;

constexpr int kDtypeShift = 56;

Label label_of(const Envelope& envelope) noexcept {
  return {static_cast<std::uint64_t>(envelope.tag),
          std::uint64_t{envelope.dtype} << kDtypeShift | envelope.bytes};
}

Envelope envelope_of(const Label& label) noexcept {
  return {static_cast<std::int64_t>(label.fingerprint),
          label.total_bytes & ((std::uint64_t{1} << kDtypeShift) - 1),
          static_cast<std::uint8_t>(label.total_bytes >> kDtypeShift)};
}

// See farandole/call_records.py.
std::uint64_t what_of(bool sends, std::uint32_t peer, std::uint8_t dtype) noexcept {
  return std::uint64_t{sends ? 1U : 2U} | std::uint64_t{dtype} << 8 | std::uint64_t{peer} << 32;
}

}  // namespace

std::shared_ptr<Postbox> Postbox::make(std::shared_ptr<Engine> engine) {
  return {new Postbox(std::move(engine)), [](Postbox* postbox) {
            if (!postbox->engine().is_forked()) delete postbox;
          }};
}

Postbox::Postbox(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)),
      rank_(engine_->rank()),
      world_size_(engine_->arena().geometry().world_size),
      slot_bytes_(engine_->arena().geometry().slot_bytes),
      doorbell_(engine_->arena().rank(rank_).doorbell(Traffic::messages)),
      destinations_(world_size_),
      sources_(world_size_) {
  for (std::uint32_t peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    destinations_[peer].writer = engine_->writer_to(peer, Traffic::messages);
    sources_[peer].reader = engine_->reader_from(peer, Traffic::messages);
  }
}

Postbox::~Postbox() { close(); }

void Postbox::post(const std::shared_ptr<Message>& message,
                   std::optional<std::chrono::nanoseconds> timeout, bool waits,
                   const Interrupted& interrupted) {
  message->timeout_ = timeout;
  message->start_ = Clock::now();
  if (timeout) message->deadline_ = message->start_ + *timeout;
  std::unique_lock lock = enter();
  start(message);
  int passes = 0;
  while (passes < kPassesOfPost && !message->is_done() && pass()) ++passes;
  if (message->is_done()) return;
  if (waits) {
    wait(lock, *message, Clock::time_point::max(), interrupted);
    return;
  }
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread(&Postbox::serve, this);
    } catch (const std::system_error&) {
      fail(Abort::out_of_memory, rank_);
      return;
    }
  }
  const bool nobody_waits = num_waiting_ == 0;
  lock.unlock();
  if (nobody_waits) changed_.notify_all();
  // Whoever sleeps has not seen that there is more to move, and perhaps no other rank rings.
  if (passes == kPassesOfPost) wake(doorbell_);
}

bool Postbox::wait_for(const Message& message, std::chrono::nanoseconds timeout) {
  if (message.is_done()) return true;
  std::unique_lock lock = enter();
  wait(lock, message, Clock::now() + timeout, {});
  return message.is_done();
}

void Postbox::close() noexcept {
  if (engine_->is_forked()) return;  // the rank is not this process's to close
  bool unfinished = false;
  {
    const std::unique_lock lock = enter();
    if (is_closing_) return;
    is_closing_ = true;
    unfinished = !pending_.empty();
  }
  if (unfinished) engine_->abort(Abort::requested, rank_);
  {
    const std::unique_lock lock = enter();
    if (!stop_if_aborted()) stop({.status = Abort::requested, .subject = rank_});
  }
  wake(doorbell_);
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::unique_lock<std::mutex> Postbox::enter() {
  num_entering_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  num_entering_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

// Returns once `message` is done or it is `limit`. pre: `lock` is held
void Postbox::wait(std::unique_lock<std::mutex>& lock, const Message& message,
                   Clock::time_point limit, const Interrupted& interrupted) {
  ++num_waiting_;
  const bool slept = drive(lock, [&] { return message.is_done(); }, &message, limit, interrupted);
  --num_waiting_;
  const bool leaves_work = num_waiting_ == 0 && !pending_.empty();
  lock.unlock();
  // Beside a sleep, telling the postbox's thread costs nothing; else it finds out soon by itself.
  if (slept && leaves_work) changed_.notify_all();
}

// Moves messages, and waits where none can be moved, until `is_over()` or it is `limit`. Returns
// whether it slept.
//
// `awaited` is what the calling thread waits for; null in the postbox's own thread.
// pre: `lock` is held
template <typename IsOver>
bool Postbox::drive(std::unique_lock<std::mutex>& lock, const IsOver& is_over,
                    const Message* awaited, Clock::time_point limit,
                    const Interrupted& interrupted) {
  const Tuning& tuning = engine_->tuning();
  const std::uint32_t spins = awaited != nullptr ? tuning.spins : tuning.background_spins;
  std::uint32_t looks = 0;  // since something moved
  bool is_stuck = false;
  bool slept = false;
  Clock::time_point now = Clock::now();
  Clock::time_point next_question = interrupted ? now + kSlice : Clock::time_point::max();
  // With the mutex free.
  const auto step_aside = [&](auto step) {
    lock.unlock();
    step();
    while (num_entering_.load(std::memory_order_relaxed) != 0) sched_yield();
    lock.lock();
  };
  for (std::uint32_t round = 1; !is_over(); ++round) {
    if (round % kRoundsPerClock == 0) now = Clock::now();
    if (now >= next_question) {
      next_question = now + kSlice;
      step_aside([&] {
        if (interrupted()) engine_->abort(Abort::interrupted, rank_);
      });
      stop_if_aborted();
      continue;
    }
    if (now >= next_check_) {
      next_check_ = now + kSlice;
      if (!stop_if_aborted()) check_peers();
      // What came while this thread could not run has come in time.
      for (int passes = 0; passes < kPassesBeforeDeadline && pass();) ++passes;
      if (!is_stopped_) check_deadlines(now);
      continue;
    }
    if (now >= limit) break;
    if (pass()) {
      looks = 0;
      step_aside([] {});
      continue;
    }
    if (looks < spins) {
      ++looks;
      step_aside(pause_briefly);
      continue;
    }
    if (awaited != nullptr && awaited->sends_ && !is_stuck) {
      is_stuck = true;
      ++num_stuck_sends_;
      continue;
    }
    if (looks < spins + tuning.yields) {
      ++looks;
      step_aside(sched_yield);
      continue;
    }
    const std::uint32_t rings = doorbell_.rings.load(std::memory_order_seq_cst);
    doorbell_.sleeping.store(1, std::memory_order_seq_cst);
    if (pass()) {
      looks = 0;
      continue;
    }
    if (stop_if_aborted() || is_over()) continue;
    now = Clock::now();
    const Clock::time_point wake_up =
        std::min({check_deadlines(now), limit, next_check_, next_question});
    if (now >= wake_up) continue;
    step_aside([&] { futex_wait(doorbell_.rings, rings, wake_up - now); });
    now = Clock::now();
    slept = true;
  }
  if (is_stuck) --num_stuck_sends_;
  return slept;
}

// The postbox's own thread.
void Postbox::serve() {
  std::unique_lock lock(mutex_);
  while (!is_closing_) {
    changed_.wait(lock, [&] { return is_closing_ || !pending_.empty(); });
    // Whoever waits for a message does the work better, and often comes soon.
    if (num_waiting_ == 0) {
      changed_.wait_for(lock, kGrace, [&] { return is_closing_; });
    } else {
      changed_.wait_for(lock, kSlice, [&] { return is_closing_ || num_waiting_ == 0; });
    }
    drive(lock, [&] { return is_closing_ || pending_.empty() || num_waiting_ != 0; }, nullptr,
          Clock::time_point::max(), {});
  }
}

void Postbox::start(const std::shared_ptr<Message>& message) {
  try {
    message->place_ = pending_.insert(pending_.end(), message);
    record(*message);
    if (is_stopped_) {
      finish(*message, verdict_);
    } else if (stop_if_aborted()) {
      return;
    } else if (message->sends_) {
      Destination& to = destinations_[message->peer_];
      to.queue.push_back(message);
      if (to.queue.size() == 1) sending_.push_back(message->peer_);
    } else if (!take_unexpected(message)) {
      posted_.push_back(message);
      count(*message, 1);
    }
  } catch (const std::bad_alloc&) {
    fail(Abort::out_of_memory, rank_);
    if (!message->is_done()) throw;  // it is not even pending
  }
}

// Lets every channel go on by one segment. False if none could. What runs out of memory ends all.
bool Postbox::pass() noexcept {
  if (pending_.empty()) return false;
  bool moved = false;
  try {
    for (std::size_t i = 0; i < sending_.size() && !is_stopped_;) {
      const std::uint32_t dst = sending_[i];
      moved |= send_segment(dst);
      if (is_stopped_) return true;
      if (destinations_[dst].queue.empty()) {
        sending_.erase(sending_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    for (std::uint32_t i = 0; i < world_size_; ++i) {
      const std::uint32_t src = (first_source_ + i) % world_size_;
      if (src == rank_) continue;
      const Source& from = sources_[src];
      if (from.is_arriving() || from.num_receives + num_any_receives_ + num_stuck_sends_ != 0) {
        moved |= receive_segment(src);
        if (is_stopped_) return true;
      }
    }
    first_source_ = (first_source_ + 1) % world_size_;
  } catch (const std::bad_alloc&) {
    fail(Abort::out_of_memory, rank_);
    return true;
  }
  return moved;
}

bool Postbox::send_segment(std::uint32_t dst) {
  Destination& to = destinations_[dst];
  if (!to.writer.has_room()) return false;
  const std::shared_ptr<Message> message = to.queue.front();
  const Envelope& envelope = message->envelope_;
  const std::size_t bytes = std::min(segment_bytes(envelope.bytes, slot_bytes_),
                                     static_cast<std::size_t>(envelope.bytes) - message->moved_);
  to.writer.publish(message->data_ + message->moved_, bytes, label_of(envelope));
  message->moved_ += bytes;
  if (message->moved_ == envelope.bytes) {
    to.queue.pop_front();
    finish(*message, {.bytes_sent = envelope.bytes});
  }
  return true;
}

bool Postbox::receive_segment(std::uint32_t src) {
  Source& from = sources_[src];
  if (!from.reader.has_data()) return false;
  const Envelope envelope = envelope_of(from.reader.label());
  if (!from.is_arriving() && !accept(src, envelope)) return is_stopped_;
  const std::size_t bytes = std::min(segment_bytes(envelope.bytes, slot_bytes_),
                                     static_cast<std::size_t>(envelope.bytes) - from.arrived);
  std::byte* whole = from.target ? from.target->data_ : from.unexpected->data.get();
  copy(whole + from.arrived, from.reader.data(bytes), bytes, envelope.bytes);
  from.reader.release();
  from.arrived += bytes;
  if (from.arrived < envelope.bytes) return true;
  from.arrived = 0;
  from.unexpected = nullptr;
  if (const std::shared_ptr<Message> message = std::exchange(from.target, nullptr)) {
    finish(*message, {.bytes_received = envelope.bytes});
  }
  return true;
}

// Decides where the message at the head of a channel goes. False if it stays there, or if all ends
// as it does not fit.
bool Postbox::accept(std::uint32_t src, const Envelope& envelope) {
  Source& from = sources_[src];
  const auto found =
      std::find_if(posted_.begin(), posted_.end(), [&](const std::shared_ptr<Message>& receive) {
        return receive->envelope_.tag == envelope.tag &&
               (receive->peer_ == src || receive->peer_ == kAnySource);
      });
  if (found != posted_.end()) {
    const std::shared_ptr<Message> message = *found;
    posted_.erase(found);
    count(*message, -1);
    if (!bind(message, src, envelope)) return false;
    from.target = message;
    return true;
  }
  if (from.num_receives + num_any_receives_ + num_stuck_sends_ == 0) return false;
  if (kept_bytes(envelope) > engine_->tuning().most_unexpected_bytes - unexpected_bytes_) {
    // It waits in the channel; unless a receive from this very rank can only be met behind it.
    if (from.num_receives != 0) {
      record_arrived(src, envelope);
      fail(Abort::too_many_unexpected, rank_);
    }
    return false;
  }
  auto data = std::make_unique_for_overwrite<std::byte[]>(envelope.bytes);
  unexpected_bytes_ += kept_bytes(envelope);
  unexpected_.push_back({src, envelope, std::move(data)});
  from.unexpected = &unexpected_.back();
  return true;
}

// Gives a new receive the first unexpected message that is for it. False if there is none.
bool Postbox::take_unexpected(const std::shared_ptr<Message>& message) {
  const auto found =
      std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& one) {
        return one.envelope.tag == message->envelope_.tag &&
               (message->peer_ == one.src || message->peer_ == kAnySource);
      });
  if (found == unexpected_.end()) return false;
  Source& from = sources_[found->src];
  if (!bind(message, found->src, found->envelope)) return true;
  const std::uint64_t bytes = found->envelope.bytes;
  if (from.unexpected == &*found) {  // the rest of it goes straight to where it belongs
    copy(message->data_, found->data.get(), from.arrived, bytes);
    from.unexpected = nullptr;
    from.target = message;
  } else {
    copy(message->data_, found->data.get(), bytes, bytes);
    finish(*message, {.bytes_received = bytes});
  }
  unexpected_bytes_ -= kept_bytes(found->envelope);
  unexpected_.erase(found);
  return true;
}

// Says where the message of a receive comes from. False, after an abort, if it does not fit.
bool Postbox::bind(const std::shared_ptr<Message>& message, std::uint32_t src,
                   const Envelope& envelope) {
  message->source_ = src;
  if (envelope.bytes == message->envelope_.bytes && envelope.dtype == message->envelope_.dtype) {
    return true;
  }
  record(*message);
  record_arrived(src, envelope);
  fail(Abort::message_mismatch, rank_);
  return false;
}

void Postbox::record_arrived(std::uint32_t src, const Envelope& envelope) noexcept {
  if (engine_->aborted().first != Abort::none) return;
  MessageRecord& record = engine_->arena().rank(rank_).message;
  record.arrived_what.store(what_of(true, src, envelope.dtype), std::memory_order_relaxed);
  record.arrived_bytes.store(envelope.bytes, std::memory_order_relaxed);
}

void Postbox::count(const Message& receive, int change) noexcept {
  std::uint32_t& number =
      receive.peer_ == kAnySource ? num_any_receives_ : sources_[receive.peer_].num_receives;
  number += static_cast<std::uint32_t>(change);
}

void Postbox::copy(std::byte* target, const std::byte* source, std::size_t bytes,
                   std::size_t whole) const noexcept {
  if (bytes == 0) return;
  if (whole >= kSmallestStreaming) {
    copy_streaming(target, source, bytes);
  } else {
    std::memcpy(target, source, bytes);
  }
}

void Postbox::finish(Message& message, const Receipt& receipt) noexcept {
  if (receipt.status == Abort::none) {
    Tally& tally = message.sends_ ? *sends_ : *receives_;
    add(tally.calls, 1);
    add(tally.bytes_sent, receipt.bytes_sent);
    add(tally.bytes_received, receipt.bytes_received);
    add(tally.scheduled_bytes_sent, receipt.bytes_sent);
    add(tally.payload_bytes, message.envelope_.bytes);
    add(tally.nanoseconds, static_cast<std::uint64_t>((Clock::now() - message.start_).count()));
  }
  const std::shared_ptr<Message> kept = *message.place_;  // its owner may have let go of it
  pending_.erase(message.place_);
  message.receipt_ = receipt;
  message.done_.store(true, std::memory_order_release);
  wake(doorbell_);
}

void Postbox::fail(Abort reason, std::uint32_t subject) noexcept {
  engine_->abort(reason, subject);
  stop_if_aborted();
}

bool Postbox::stop_if_aborted() noexcept {
  Receipt verdict;
  std::tie(verdict.status, verdict.subject) = engine_->aborted();
  if (verdict.status == Abort::none) return false;
  stop(verdict);
  return true;
}

// Ends all messages, and all later ones. No buffer is touched after that.
void Postbox::stop(const Receipt& verdict) noexcept {
  if (is_stopped_) return;
  is_stopped_ = true;
  verdict_ = verdict;
  posted_.clear();
  unexpected_.clear();
  unexpected_bytes_ = 0;
  sending_.clear();
  num_any_receives_ = 0;
  for (Destination& to : destinations_) to.queue.clear();
  for (Source& from : sources_) {
    from.target.reset();
    from.unexpected = nullptr;
    from.num_receives = 0;
  }
  while (!pending_.empty()) finish(*pending_.front(), verdict);
}

// When the next message runs out of time; ends all if one has.
Postbox::Clock::time_point Postbox::check_deadlines(Clock::time_point now) noexcept {
  Clock::time_point first = Clock::time_point::max();
  for (const std::shared_ptr<Message>& message : pending_) {
    if (message->deadline_ <= now) {
      record(*message);
      fail(Abort::message_timeout, rank_);
      return now;
    }
    first = std::min(first, message->deadline_);
  }
  return first;
}

// Aborts if a message waits for a rank that will never come.
void Postbox::check_peers() noexcept {
  bool has_source = num_any_receives_ == 0;  // whether the receives from any rank have one
  std::uint32_t lost = rank_;
  for (std::uint32_t peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const Destination& to = destinations_[peer];
    const Source& from = sources_[peer];
    const bool sends = !to.queue.empty() && to.writer.waits_for(peer);
    const bool receives = from.target != nullptr || from.num_receives != 0;
    if (!sends && !receives && has_source) continue;
    if (!engine_->is_gone(peer, Traffic::messages)) {
      has_source = true;
      continue;
    }
    // What it did before it went may have become visible since: look once more.
    const bool is_empty = !from.reader.has_data();
    if ((sends && to.writer.waits_for(peer)) || (receives && is_empty)) {
      fail(Abort::peer_lost, peer);
      return;
    }
    has_source |= !is_empty;
    lost = peer;
  }
  if (!has_source) fail(Abort::peer_lost, lost);
}

// What it takes to keep a message: its bytes, and what is known of it.
std::uint64_t Postbox::kept_bytes(const Envelope& envelope) noexcept {
  return envelope.bytes + sizeof(Unexpected) + 4 * sizeof(void*);
}

void Postbox::record(const Message& message) noexcept {
  // After an abort the records stay as they are: they tell what each rank was in when it happened.
  if (engine_->aborted().first != Abort::none) return;
  MessageRecord& record = engine_->arena().rank(rank_).message;
  record.posted.store(record.posted.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  record.what.store(what_of(message.sends_, message.peer_, message.envelope_.dtype),
                    std::memory_order_relaxed);
  record.bytes.store(message.envelope_.bytes, std::memory_order_relaxed);
  record.tag.store(message.envelope_.tag, std::memory_order_relaxed);
  record.timeout_ns.store(message.timeout_ ? message.timeout_->count() : 0,
                          std::memory_order_relaxed);
}

}  // namespace farandole

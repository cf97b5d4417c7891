#include "relay.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "kernels.hpp"
#include "plan.hpp"
#include "waiting.hpp"

namespace farandole {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are in this byte order");

// What is received before it is known where it belongs.
constexpr std::size_t kStagedBytes = 16 * 1024;

// How often the records of a rank are compared with what the other hosts know of them.
constexpr std::chrono::milliseconds kBetweenRecords{100};

// How long a relay that closes waits for a host that takes nothing.
constexpr std::chrono::seconds kLingering{5};
// After an abort there is nothing that it must have.
constexpr std::chrono::milliseconds kLingeringAfterAbort{300};

// How often the thread lets others of its core run, looking for more, before it sleeps.
constexpr int kLooksBeforeSleep = 3;

constexpr std::uint32_t kBell = 0xffffffff;

constexpr std::array<Traffic, 2> kTraffics{Traffic::collectives, Traffic::messages};

// A process forked from that of a relay has its sockets, too, and would hold up their end.
class OpenSockets {
 public:
  static OpenSockets& instance() {
    static auto* all = new OpenSockets;  // for as long as there is any thread
    return *all;
  }
  void add(int socket) {
    const std::lock_guard lock(mutex_);
    sockets_.insert(socket);
  }
  void close(int socket) {
    const std::lock_guard lock(mutex_);
    sockets_.erase(socket);
    ::close(socket);
  }

 private:
  OpenSockets() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     for (const int socket : instance().sockets_) ::close(socket);
                     instance().sockets_.clear();  // the numbers are free for others
                     instance().mutex_.unlock();
                   });
  }

  std::mutex mutex_;  // guards what follows
  std::set<int> sockets_;
};

// Everything that a rank tells of itself, in one order: calls visit(word) for each.
template <typename Visit>
void for_each_word(RankState& state, const Visit& visit) {
  CallRecord& call = state.call;
  for (auto* word :
       {&call.sequence, &call.finished, &call.what, &call.count, &call.payload_bytes,
        &call.agreement, &call.misfit_bytes, &call.expected_bytes, &call.misfit_rank}) {
    visit(*word);
  }
  visit(call.timeout_ns);
  MessageRecord& message = state.message;
  for (auto* word : {&message.posted, &message.what, &message.bytes, &message.arrived_what,
                     &message.arrived_bytes}) {
    visit(*word);
  }
  visit(message.tag);
  visit(message.timeout_ns);
  visit(state.refusal.calls);
  visit(state.refusal.messages);
  for (auto& word : state.refusal.text) visit(word);
}

std::int64_t nanoseconds_now() noexcept {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

}  // namespace

Relay::Relay(std::shared_ptr<const Arena> arena, std::uint32_t rank, std::vector<int> connections,
             HeapAt heap_at)
    : arena_(std::move(arena)),
      rank_(rank),
      heap_at_(std::move(heap_at)),
      slot_bytes_(arena_->geometry().slot_bytes),
      num_slots_(arena_->geometry().num_slots),
      peers_(arena_->geometry().world_size) {
  try {
    for (std::uint32_t other = 0; other < peers_.size(); ++other) {
      if (connections.at(other) < 0) continue;
      auto peer = std::make_unique<Peer>();
      peer->rank = other;
      peer->staged.resize(kStagedBytes);
      for (const Traffic traffic : kTraffics) {
        Lane& lane = peer->lanes[static_cast<std::size_t>(traffic)];
        lane.outgoing = Reader(*arena_, rank_, other, other, traffic);
        lane.incoming = Writer(*arena_, other, rank_, traffic);
      }
      OpenSockets::instance().add(connections[other]);
      peer->socket = std::exchange(connections[other], -1);
      peers_[other] = std::move(peer);
    }
    watch_all();
    thread_ = std::thread(&Relay::serve, this);
  } catch (...) {
    for (const int socket : connections) {
      if (socket >= 0) ::close(socket);
    }
    for (const auto& peer : peers_) {
      if (peer) lose(*peer);
    }
    if (epoll_ >= 0) ::close(epoll_);
    if (bell_.event >= 0) ::close(bell_.event);
    throw;
  }
}

void Relay::watch_all() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  bell_.event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (epoll_ < 0 || bell_.event < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot watch connections");
  }
  watch(bell_.event, EPOLLIN | EPOLLET, kBell);
  for (const auto& peer : peers_) {
    if (peer) watch(peer->socket, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, peer->rank);
  }
}

Relay::~Relay() {
  close();
  ::close(epoll_);
  ::close(bell_.event);
}

void Relay::watch(int descriptor, std::uint32_t events, std::uint32_t rank) const {
  epoll_event event{};
  event.events = events;
  event.data.u32 = rank;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot watch a connection");
  }
}

std::size_t Relay::Passage::next_bytes(const Label& label, std::size_t slot_bytes) const noexcept {
  const std::uint64_t total = label.total_bytes & kBytesOfLabel;
  return std::min<std::uint64_t>(segment_bytes(total, slot_bytes), total - position);
}

void Relay::Passage::pass(const Label& label, std::size_t bytes) noexcept {
  position += bytes;
  if (position == (label.total_bytes & kBytesOfLabel)) position = 0;
}

bool Relay::is_gone(std::uint32_t peer, Traffic traffic) const noexcept {
  const Lane& lane = peers_[peer]->lanes[static_cast<std::size_t>(traffic)];
  return lane.is_over.load(std::memory_order_acquire);
}

bool Relay::has_ended(std::uint32_t peer) const noexcept {
  return peers_[peer]->has_ended.load(std::memory_order_acquire);
}

std::vector<std::uint32_t> Relay::silent() const {
  std::vector<std::uint32_t> ranks;
  for (const auto& peer : peers_) {
    if (peer && !peer->has_ended.load(std::memory_order_acquire) &&
        !peer->heard_all.load(std::memory_order_acquire)) {
      ranks.push_back(peer->rank);
    }
  }
  return ranks;
}

void Relay::tell() noexcept {
  records_due_.store(true, std::memory_order_seq_cst);
  wake(bell_);
}

void Relay::close() noexcept {
  if (!thread_.joinable()) return;
  records_due_.store(true, std::memory_order_seq_cst);
  closing_.store(true, std::memory_order_seq_cst);
  wake(bell_);
  thread_.join();
}

void Relay::serve() noexcept {
  next_look_ = Clock::now();
  bool was_closing = false;
  int looks = 0;
  try {
    while (true) {
      const bool closing = closing_.load(std::memory_order_seq_cst);
      if (closing && !was_closing) last_sent_ = Clock::now();
      was_closing = closing;
      if (pass()) {
        looks = 0;
      } else if (closing && (is_through() || Clock::now() - last_sent_ > lingering())) {
        break;
      } else if (looks < kLooksBeforeSleep) {
        ++looks;
        sched_yield();
        look_at_sockets(std::chrono::milliseconds{0});
      } else {
        looks = 0;
        sleep();
      }
    }
  } catch (const std::bad_alloc&) {
    abort(std::uint64_t{rank_} << 32 | static_cast<std::uint32_t>(Abort::out_of_memory));
  }
  for (const auto& peer : peers_) {
    if (peer) lose(*peer);
  }
}

// As Engine::abort, of what is packed already.
void Relay::abort(std::uint64_t packed) const noexcept {
  std::uint64_t none = 0;
  arena_->header().abort.compare_exchange_strong(none, packed, std::memory_order_acq_rel);
  ring_all(*arena_);
}

std::chrono::milliseconds Relay::lingering() const noexcept {
  const bool is_aborted = arena_->header().abort.load(std::memory_order_acquire) != 0;
  return is_aborted ? kLingeringAfterAbort : kLingering;
}

bool Relay::is_through() const noexcept {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const auto& peer) { return !peer || peer->socket < 0; });
}

// Waits for something to happen, for at most kSlice. pre: nothing could be moved
void Relay::sleep() {
  bell_.sleeping.store(1, std::memory_order_seq_cst);
  const bool is_called = records_due_.load(std::memory_order_seq_cst) ||
                         (closing_.load(std::memory_order_seq_cst) && is_through());
  const bool has_work =
      is_called || std::any_of(peers_.begin(), peers_.end(), [&](const auto& peer) {
        return peer && (choose_frame(*peer) || place_kept(*peer));
      });
  look_at_sockets(has_work ? std::chrono::milliseconds{0} : kSlice);
  bell_.sleeping.store(0, std::memory_order_seq_cst);
}

void Relay::look_at_sockets(std::chrono::milliseconds limit) noexcept {
  std::array<epoll_event, 64> events;
  const int num_events = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()),
                                    static_cast<int>(limit.count()));
  for (int i = 0; i < num_events; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u32 == kBell) continue;  // edge-triggered: what is counted there is of no use
    Peer& peer = *peers_[event.data.u32];
    peer.writable |= (event.events & EPOLLOUT) != 0;
    peer.readable |= (event.events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0;
  }
}

// Lets every connection go on by one frame each way. False if none could.
bool Relay::pass() {
  const bool due = records_due_.exchange(false, std::memory_order_seq_cst);
  const bool is_aborted = arena_->header().abort.load(std::memory_order_acquire) != 0;
  if (due || (is_aborted && last_records_.is_last == 0) || Clock::now() >= next_look_) {
    look_at_records();
  }
  bool moved = false;
  for (const auto& peer : peers_) {
    if (!peer) continue;
    moved |= place_kept(*peer);
    if (peer->socket >= 0) moved |= send_to(*peer);
    if (peer->socket >= 0) moved |= receive_from(*peer);
  }
  return moved;
}

// -- sending

bool Relay::send_to(Peer& peer) {
  if (!choose_frame(peer)) return false;
  Frame& frame = *peer.departing;
  std::array<iovec, 2> parts;
  std::size_t num_parts = 0;
  const std::size_t whole = sizeof(Frame) + frame.bytes;
  if (peer.departed < sizeof(Frame)) {
    parts[num_parts++] = {reinterpret_cast<std::byte*>(&frame) + peer.departed,
                          sizeof(Frame) - peer.departed};
  }
  if (frame.bytes != 0) {
    const std::size_t of_data = peer.departed - std::min(peer.departed, sizeof(Frame));
    parts[num_parts++] = {const_cast<std::byte*>(peer.source) + of_data, frame.bytes - of_data};
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = num_parts;
  const ssize_t sent = sendmsg(peer.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      peer.writable = false;
      return false;
    }
    if (errno == EINTR) return true;
    peer.writable = false;  // what came before it ended is still to be received
    peer.departing.reset();
    return false;
  }
  last_sent_ = Clock::now();
  peer.departed += static_cast<std::size_t>(sent);
  if (peer.departed == whole) finish_frame(peer);
  return true;
}

// Makes sure that there is a frame to send. False if there is nothing to say.
bool Relay::choose_frame(Peer& peer) {
  if (peer.departing) return peer.writable;
  if (peer.has_closed || peer.socket < 0 || !peer.writable) return false;
  Frame frame;
  const std::uint64_t abort = arena_->header().abort.load(std::memory_order_acquire);
  const bool closing = closing_.load(std::memory_order_seq_cst);
  const auto has_segment = [&](Lane& lane) {
    return abort == 0 && !peer.heard_close && (closing || lane.in_flight < num_slots_) &&
           lane.outgoing.has_data();
  };
  std::uint64_t owed = 0;
  for (std::size_t i = 0; i < peer.lanes.size(); ++i) {
    Lane& lane = peer.lanes[i];
    frame.taken[i] = static_cast<std::uint32_t>(lane.incoming.taken() - lane.credited);
    owed = std::max<std::uint64_t>(owed, frame.taken[i]);
  }
  if (peer.owes_records) {
    frame.kind = Kind::records;
    frame.bytes = sizeof(Records);
    peer.sent = last_records_;
    peer.sent.now_ns = nanoseconds_now();
    peer.source = reinterpret_cast<const std::byte*>(&peer.sent);
    peer.owes_records = false;
  } else if (abort != 0 && peer.owes_abort && last_records_.is_last != 0) {
    frame.kind = Kind::abort;
    frame.label.fingerprint = abort;
    peer.owes_abort = false;
  } else if (has_segment(peer.lanes[peer.next_lane]) ||
             has_segment(peer.lanes[1 - peer.next_lane])) {
    const std::uint32_t which =
        has_segment(peer.lanes[peer.next_lane]) ? peer.next_lane : 1 - peer.next_lane;
    load_segment(peer, static_cast<Kind>(which), frame);
    peer.next_lane = 1 - which;
  } else if (2 * owed >= num_slots_) {
    frame.kind = Kind::credit;
  } else if (closing && !records_due_.load(std::memory_order_seq_cst)) {
    frame.kind = Kind::close;
  } else {
    return false;
  }
  for (std::size_t i = 0; i < peer.lanes.size(); ++i) peer.lanes[i].credited += frame.taken[i];
  frame.call = last_call();
  peer.departing = frame;
  peer.departed = 0;
  return true;
}

// Makes a frame of the next segment of one kind, encoded if its label says so.
void Relay::load_segment(Peer& peer, Kind kind, Frame& frame) {
  const Lane& lane = peer.lanes[static_cast<std::size_t>(kind)];
  const Label& label = lane.outgoing.label();
  const std::size_t bytes = lane.sent.next_bytes(label, slot_bytes_);
  frame.kind = kind;
  frame.label = {label.fingerprint, label.total_bytes, 0};
  frame.bytes = static_cast<std::uint32_t>(encoded_bytes(frame.form(), bytes));
  peer.source =
      label.heap_position == 0 ? lane.outgoing.data(bytes) : heap_at_(label.heap_position - 1);
  if (frame.form() == WireForm::as_is) return;
  peer.encoding.resize(frame.bytes);
  find_wire_kernels(frame.form()).encode(peer.encoding.data(), peer.source, bytes / sizeof(float));
  peer.source = peer.encoding.data();
}

void Relay::finish_frame(Peer& peer) {
  const Frame frame = *std::exchange(peer.departing, std::nullopt);
  if (frame.kind == Kind::close) {
    peer.has_closed = true;
    if (peer.heard_close) {
      lose(peer);
    } else {
      shutdown(peer.socket, SHUT_WR);
    }
  }
  if (frame.kind != Kind::collectives && frame.kind != Kind::messages) return;
  Lane& lane = peer.lanes[static_cast<std::size_t>(frame.kind)];
  lane.sent.pass(frame.label, *decoded_bytes(frame.form(), frame.bytes));
  ++lane.in_flight;
  lane.outgoing.release();
  add(bytes_sent_, frame.bytes);
}

// -- receiving

bool Relay::receive_from(Peer& peer) {
  bool moved = false;
  if (!peer.arriving) {
    while (peer.staged_end - peer.staged_begin < sizeof(Frame)) {
      if (!fill(peer, nullptr, 0)) return moved;
      moved = true;
    }
    Frame frame;
    std::memcpy(&frame, peer.staged.data() + peer.staged_begin, sizeof(Frame));
    peer.staged_begin += sizeof(Frame);
    if (!accept_frame(peer, frame)) {
      lose(peer);
      return true;
    }
  }
  while (peer.arrived < peer.arriving->bytes) {
    const std::size_t left = peer.arriving->bytes - peer.arrived;
    const std::size_t staged = std::min(left, peer.staged_end - peer.staged_begin);
    if (staged != 0) {
      std::memcpy(peer.target + peer.arrived, peer.staged.data() + peer.staged_begin, staged);
      peer.staged_begin += staged;
      peer.arrived += staged;
    } else if (!fill(peer, peer.target + peer.arrived, left)) {
      return moved;
    }
    moved = true;
  }
  deliver(peer);
  return true;
}

// Receives what there is: first `bytes` bytes of `target`, and what comes after them into what is
// staged. False if there is nothing, or never will be.
bool Relay::fill(Peer& peer, std::byte* target, std::size_t bytes) {
  if (!peer.readable) return false;
  const std::size_t kept = peer.staged_end - peer.staged_begin;
  std::memmove(peer.staged.data(), peer.staged.data() + peer.staged_begin, kept);
  peer.staged_begin = 0;
  peer.staged_end = kept;
  std::array<iovec, 2> parts{
      {{target, bytes}, {peer.staged.data() + kept, peer.staged.size() - kept}}};
  msghdr message{};
  message.msg_iov = bytes != 0 ? parts.data() : parts.data() + 1;
  message.msg_iovlen = bytes != 0 ? 2 : 1;
  const ssize_t result = recvmsg(peer.socket, &message, MSG_DONTWAIT);
  if (result > 0) {
    const auto received = static_cast<std::size_t>(result);
    peer.arrived += std::min(received, bytes);
    peer.staged_end += received - std::min(received, bytes);
    return true;
  }
  if (result < 0 && errno == EINTR) return true;
  peer.readable = false;
  if (result == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) lose(peer);
  return false;
}

// Takes what a header says, and decides where what follows it goes. False if it makes no sense.
bool Relay::accept_frame(Peer& peer, const Frame& frame) {
  for (std::size_t i = 0; i < peer.lanes.size(); ++i) {
    Lane& lane = peer.lanes[i];
    if (frame.taken[i] > lane.in_flight) return false;
    lane.in_flight -= frame.taken[i];
  }
  mirror_call(peer.rank, frame.call);
  peer.arriving = frame;
  peer.arrived = 0;
  switch (frame.kind) {
    case Kind::collectives:
    case Kind::messages: {
      Lane& lane = peer.lanes[static_cast<std::size_t>(frame.kind)];
      const auto bytes = decoded_bytes(frame.form(), frame.bytes);
      if (!bytes || *bytes > slot_bytes_ || lane.kept.size() > num_slots_) return false;
      if (!is_next(lane, frame)) return false;
      if (!lane.kept.empty() || !lane.incoming.has_room()) {
        peer.unslotted.emplace(Kept{frame, std::vector<std::byte>(frame.bytes)});
        peer.target = peer.unslotted->data.data();
      } else if (frame.form() == WireForm::as_is) {
        peer.target = lane.incoming.place(frame.bytes);
      } else {
        peer.encoded.resize(frame.bytes);
        peer.target = peer.encoded.data();
      }
      return true;
    }
    case Kind::records:
      peer.target = reinterpret_cast<std::byte*>(&peer.records);
      return frame.bytes == sizeof(Records);
    case Kind::abort:
      return frame.bytes == 0 && is_abort(frame.label.fingerprint);
    case Kind::credit:
    case Kind::close:
      return frame.bytes == 0;
  }
  return false;
}

// Whether a frame is the next segment of what arrives, or the first of another publication: whoever
// reads it relies on its size.
bool Relay::is_next(Lane& lane, const Frame& frame) const noexcept {
  const Label& label = frame.label;
  if (lane.arrived.position == 0) lane.arriving = label;
  const std::uint64_t bytes = *decoded_bytes(frame.form(), frame.bytes);
  if (label.fingerprint != lane.arriving.fingerprint ||
      label.total_bytes != lane.arriving.total_bytes || label.heap_position != 0 ||
      bytes != lane.arrived.next_bytes(label, slot_bytes_)) {
    return false;
  }
  lane.arrived.pass(label, bytes);
  return true;
}

bool Relay::is_abort(std::uint64_t packed) const noexcept {
  const auto reason = static_cast<std::uint32_t>(packed);
  return reason != 0 && reason <= static_cast<std::uint32_t>(Abort::too_many_unexpected) &&
         packed >> 32 < peers_.size();
}

// Does with a frame what it is for, now that all of it is here.
void Relay::deliver(Peer& peer) {
  const Frame frame = *std::exchange(peer.arriving, std::nullopt);
  switch (frame.kind) {
    case Kind::collectives:
    case Kind::messages: {
      Lane& lane = peer.lanes[static_cast<std::size_t>(frame.kind)];
      add(bytes_received_, frame.bytes);
      if (peer.unslotted) {
        lane.kept.push_back(*std::exchange(peer.unslotted, std::nullopt));
      } else {
        publish(lane, frame, peer.target);
      }
      return;
    }
    case Kind::records:
      mirror(peer.rank, peer.records);
      if (peer.records.is_last != 0) peer.heard_all.store(true, std::memory_order_release);
      return;
    case Kind::abort:
      abort(frame.label.fingerprint);
      return;
    case Kind::close:
      arena_->rank(peer.rank).closed.store(1, std::memory_order_release);
      if (closing_.load(std::memory_order_seq_cst) && !peer.has_closed) {
        peer.heard_close = true;  // it hears of this rank's last call, too
      } else {
        lose(peer);
      }
      return;
    case Kind::credit:
      return;
  }
}

// Publishes a segment that has come, which is decoded as it goes into its slot. pre: there is one
void Relay::publish(Lane& lane, const Frame& frame, const std::byte* data) noexcept {
  const std::size_t bytes = *decoded_bytes(frame.form(), frame.bytes);
  if (frame.form() != WireForm::as_is) {
    std::byte* place = lane.incoming.place(bytes);
    find_wire_kernels(frame.form()).decode(place, data, bytes / sizeof(float));
    data = place;
  }
  lane.incoming.publish(data, bytes, frame.label);
}

// Publishes what there was no slot for, as far as there is one now.
bool Relay::place_kept(Peer& peer) {
  bool moved = false;
  for (Lane& lane : peer.lanes) {
    while (!lane.kept.empty() && lane.incoming.has_room()) {
      const Kept& kept = lane.kept.front();
      publish(lane, kept.frame, kept.data.data());
      lane.kept.pop_front();
      moved = true;
    }
  }
  if (moved && peer.socket < 0) bury(peer);
  return moved;
}

// Ends a connection, for whatever reason.
void Relay::lose(Peer& peer) noexcept {
  if (peer.socket < 0) return;
  OpenSockets::instance().close(std::exchange(peer.socket, -1));
  peer.arriving.reset();
  peer.departing.reset();
  bury(peer);
}

// Has it known of what a rank will send nothing more, once all that it sent is where it belongs.
void Relay::bury(Peer& peer) noexcept {
  for (Lane& lane : peer.lanes) {
    if (lane.kept.empty()) lane.is_over.store(true, std::memory_order_release);
  }
  peer.has_ended.store(true, std::memory_order_release);
  ring(*arena_, rank_);
}

// -- records

void Relay::look_at_records() {
  next_look_ = Clock::now() + kBetweenRecords;
  Records records;
  // First: with an abort come the records as they were when it happened.
  records.is_last = arena_->header().abort.load(std::memory_order_acquire) != 0 ? 1 : 0;
  auto word = records.words.begin();
  RankState& state = arena_->rank(rank_);
  for_each_word(state, [&](const auto& one) {
    *word++ = static_cast<std::uint64_t>(one.load(std::memory_order_relaxed));
  });
  *word++ = static_cast<std::uint64_t>(state.call.began_ns.load(std::memory_order_relaxed));
  for (const auto& one : state.board.words) *word++ = one.load(std::memory_order_acquire);
  if (records.words == last_records_.words && records.is_last == last_records_.is_last) return;
  records.version = last_records_.version + 1;
  last_records_ = records;
  for (const auto& peer : peers_) {
    if (peer) peer->owes_records = true;
  }
}

Relay::LastCall Relay::last_call() const noexcept {
  const CallRecord& call = arena_->rank(rank_).call;
  const auto read = [](const auto& word) { return word.load(std::memory_order_relaxed); };
  return {read(call.sequence), read(call.what), read(call.count), read(call.payload_bytes),
          read(call.agreement)};
}

void Relay::mirror_call(std::uint32_t rank, const LastCall& call) const noexcept {
  CallRecord& record = arena_->rank(rank).call;
  if (call.sequence <= record.sequence.load(std::memory_order_relaxed)) return;
  record.what.store(call.what, std::memory_order_relaxed);
  record.count.store(call.count, std::memory_order_relaxed);
  record.payload_bytes.store(call.payload_bytes, std::memory_order_relaxed);
  record.agreement.store(call.agreement, std::memory_order_relaxed);
  record.began_ns.store(nanoseconds_now(), std::memory_order_relaxed);
  record.sequence.store(call.sequence, std::memory_order_relaxed);
}

// Several relays of this host may do so at once, for one rank; what they write is hers alone.
void Relay::mirror(std::uint32_t rank, const Records& records) const noexcept {
  RankState& state = arena_->rank(rank);
  if (records.version <= state.mirrored.load(std::memory_order_relaxed)) return;
  state.mirrored.store(records.version, std::memory_order_relaxed);
  auto word = records.words.begin();
  for_each_word(state, [&]<typename Word>(std::atomic<Word>& one) {
    one.store(static_cast<Word>(*word++), std::memory_order_relaxed);
  });
  const auto age_ns = records.now_ns - static_cast<std::int64_t>(*word++);
  state.call.began_ns.store(nanoseconds_now() - age_ns, std::memory_order_relaxed);
  auto& board = state.board.words;
  for (std::size_t i = board.size(); i-- > 0;) {
    board[i].store(*(word + static_cast<std::ptrdiff_t>(i)), std::memory_order_release);
  }
}

}  // namespace farandole

// "lab": a device of torch's (PrivateUse1) in host memory, for tests of what has to hold on a device that is not the CPU.
//
// Memory is the host's, but torch does not call it CPU. It is counted, and full of NaN until something is written.
//
// Order is adversarial. An operator computes at once, on the host, from what its stream has done so far; what it
// computes only *lands* in the device's memory when that stream is next drained: by its next operator, a blocking copy,
// `.item()`, a synchronisation, or another stream that waits for it. Copies on the device, non-blocking ones from and to
// pinned memory, and collectives are done as a whole at that time. So where streams are not ordered, or the host is not,
// the old bytes are there every time, and not once in a thousand runs as on a card.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using at::TensorList;
using c10::DispatchKey;

constexpr auto kLab = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in every integer one
constexpr size_t kAlignment = 256;
constexpr size_t kPage = 4096;
constexpr size_t kLarge = size_t{16} << 20;

c10::Device lab() {
  return {kLab, 0};
}

bool is_lab(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLab;
}

// ---- a forked process: as on a card, it cannot use what its parent has used ----------------------------------------

std::atomic<bool> is_used{false};
std::atomic<bool> is_forked{false};
std::atomic<bool> is_broken{false};

void after_fork() {
  is_forked = is_used.load();
}

void use() {
  TORCH_CHECK(!is_forked, "lab: this process was forked from one that had used the device, and cannot use it");
  TORCH_CHECK(!is_broken, "lab: an earlier access to memory was illegal, and the device takes nothing any more");
  is_used = true;
}

// ---- memory -------------------------------------------------------------------------------------------------------

using c10::StreamId;
using Places = std::map<StreamId, uint64_t>;  // how far streams have got, each counted in pieces of work

// A file of poison, mapped into blocks that are large: a page of theirs is made when it is first written. DeepSpeed asks
// for buffers of gigabytes of which it uses little.
int poison_file() {
  static const int file = [] {
    const int made = memfd_create("lab", MFD_CLOEXEC);
    const std::vector<char> poison(kLarge, static_cast<char>(kPoison));
    TORCH_CHECK(write(made, poison.data(), kLarge) == static_cast<ssize_t>(kLarge), "lab: no memory for the poison");
    return made;
  }();
  return file;
}

void* map_poison(size_t bytes) {
  auto* begin = static_cast<char*>(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  TORCH_CHECK(begin != MAP_FAILED, "lab: the host has no ", bytes, " bytes of addresses left");
  for (size_t done = 0; done < bytes; done += kLarge) {
    const auto length = std::min(kLarge, bytes - done);
    const auto flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    const auto* mapped = mmap(begin + done, length, PROT_READ | PROT_WRITE, flags, poison_file(), 0);
    TORCH_CHECK(mapped != MAP_FAILED, "lab: the host has no ", bytes, " bytes left");
  }
  return begin;
}

// Bytes that live until the last tensor over them is gone and the last queued work that touches them is done.
struct Block {
  Block(size_t bytes, size_t alignment, StreamId home) : bytes(bytes), home(home) {
    if (bytes >= kLarge) {
      address = map_poison(bytes);
    } else {
      TORCH_CHECK(posix_memalign(&address, alignment, bytes) == 0, "lab: the host has no ", bytes, " bytes left");
      memset(address, kPoison, bytes);
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (bytes >= kLarge) {
      munmap(address, bytes);
    } else {
      free(address);
    }
  }
  void* address = nullptr;
  size_t bytes;
  StreamId home;                // the present stream when it was allocated: who frees it gives it back to that one
  Places uses;                  // the last piece of work of each stream that touches it
  std::set<StreamId> recorded;  // streams that `record_stream` has named
};
using Held = std::shared_ptr<Block>;

struct Counters {
  int64_t used = 0, peak = 0, allocations = 0, pinned = 0, capacity = int64_t{8} << 30;
};
Counters counters;
std::map<uintptr_t, size_t> pinned_ranges;
std::mutex memory_mutex;
thread_local StreamId present = 0;
void give_back(const Block& block);
void check_given_back();

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    use();
    if (bytes == 0) {
      return {nullptr, lab()};
    }
    check_given_back();
    {
      std::lock_guard<std::mutex> lock(memory_mutex);
      const auto used = counters.used + static_cast<int64_t>(bytes);
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          used <= counters.capacity,
          "lab: ", bytes, " bytes do not fit: ", counters.used, " of ", counters.capacity, " are used");
      counters.used = used;
      counters.peak = std::max(counters.peak, used);
      ++counters.allocations;
    }
    auto* held = new Held(std::make_shared<Block>(bytes, kAlignment, present));
    return {(*held)->address, held, &release, lab()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  static void release(void* context) {
    std::unique_ptr<Held> held(static_cast<Held*>(context));
    give_back(**held);
    std::lock_guard<std::mutex> lock(memory_mutex);
    counters.used -= static_cast<int64_t>((*held)->bytes);
  }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kLab, &device_allocator);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    use();
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    auto* block = new Block(bytes, kPage, 0);
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned_ranges[reinterpret_cast<uintptr_t>(block->address)] = bytes;
    counters.pinned += static_cast<int64_t>(bytes);
    return {block->address, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  static void release(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned_ranges.erase(reinterpret_cast<uintptr_t>(block->address));
    counters.pinned -= static_cast<int64_t>(block->bytes);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned_ranges.upper_bound(address);
  return after != pinned_ranges.begin() && address < (--after)->first + after->second;
}

bool is_pinned(const Tensor& tensor) {
  return is_pinned(tensor.storage().data());
}

// Of a tensor over memory of the device; nothing for another one, an empty one, and where torch has wrapped the bytes.
Held block_of(const Tensor& tensor) {
  if (!is_lab(tensor) || tensor.numel() == 0) {
    return nullptr;
  }
  const auto& pointer = tensor.storage().data_ptr();
  const bool is_ours = pointer.get_deleter() == &DeviceAllocator::release;
  return is_ours ? *static_cast<Held*>(pointer.get_context()) : nullptr;
}

// A CPU tensor over the same bytes, which stay as long as it does.
Tensor on_host(const Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  auto held = block_of(tensor);
  auto* data = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [held](void*) {}, options);
}

// ---- streams and events -------------------------------------------------------------------------------------------

// What is done here is done by the device: no autograd, and none of the modes that Python code may be in.
struct Plainly {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard without{
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::AutocastPrivateUse1,
                           DispatchKey::AutocastCPU})};
};

using Work = std::function<void()>;

// Memory of a stream that was freed while another one had work on it, the last piece at `place`.
struct GivenBack {
  size_t bytes;
  StreamId stream;
  uint64_t place;
};

struct Queue {
  std::deque<Work> waiting;
  uint64_t queued = 0, done = 0;
  bool is_busy = false;
  Places after;  // what of other streams comes before all that will be queued here
  std::vector<GivenBack> given_back;
};

// All queues. Work runs without the lock, one piece of a stream at a time, in whichever thread needs it done.
class Streams {
 public:
  // Put `work` at the end of a stream. blocks: that it touches, null for those of the host. Returns its place.
  uint64_t queue(StreamId stream, Work work, const std::vector<Held>& blocks = {}) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = queues_[stream];
    queue.waiting.push_back(std::move(work));
    ++queue.queued;
    for (const auto& block : blocks) {
      if (block) {
        block->uses[stream] = queue.queued;
      }
    }
    return queue.queued;
  }

  uint64_t end(StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return queues_[stream].queued;
  }

  // All that comes before what will be queued on a stream, itself counted.
  Places places(StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = queues_[stream].after;
    found[stream] = queues_[stream].queued;
    return found;
  }

  // Make a stream wait for `other` at `place`, and so for all that came before that.
  void wait(StreamId stream, StreamId other, uint64_t place, const Places& before) {
    if (stream == other) {
      return;
    }
    queue(stream, [this, other, place] { reach(other, place); });
    std::lock_guard<std::mutex> lock(mutex_);
    auto& after = queues_[stream].after;
    for (const auto& [each, reached] : before) {
      after[each] = std::max(after[each], reached);
    }
  }

  // Memory that is freed goes to its home stream, whatever others have queued on it.
  void give_back(const Block& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& home = queues_[block.home];
    for (const auto& [stream, place] : block.uses) {
      if (stream != block.home && !block.recorded.count(stream) && !is_before(stream, place, home)) {
        home.given_back.push_back({block.bytes, stream, place});
      }
    }
  }

  // On a card what is allocated on a stream may be memory that was given back to it: by now others must be done with it.
  void check_given_back(StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& home = queues_[stream];
    for (const auto& [bytes, other, place] : std::exchange(home.given_back, {})) {
      TORCH_CHECK(
          is_before(other, place, home),
          "lab: ", bytes, " bytes of stream ", stream, " were freed while stream ", other, " had work on them, and may be ",
          "given away now: neither was the stream named by record_stream, nor does this one wait for it");
    }
  }

  void record(const Held& block, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (block) {
      block->recorded.insert(stream);
    }
  }

  // Do all that a stream has up to `place`, or wait until another thread has.
  void reach(StreamId stream, uint64_t place) {
    use();
    std::unique_lock<std::mutex> lock(mutex_);
    auto& queue = queues_[stream];
    while (queue.done < place) {
      if (queue.is_busy) {
        changed_.wait(lock);
      } else {
        run_next(queue, lock);
      }
    }
  }

  void drain(StreamId stream) {
    reach(stream, end(stream));
  }

  void drain_all() {
    std::vector<std::pair<StreamId, uint64_t>> ends;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [stream, queue] : queues_) {
        ends.emplace_back(stream, queue.queued);
      }
    }
    for (const auto& [stream, place] : ends) {
      reach(stream, place);
    }
  }

  // Whether a place was reached before it was asked for. A "no" does one piece, so that who polls gets there.
  bool query(StreamId stream, uint64_t place) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& queue = queues_[stream];
    if (queue.done >= place) {
      return true;
    }
    if (!queue.is_busy) {
      run_next(queue, lock);
    }
    return false;
  }

  uint64_t waiting() {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t found = 0;
    for (const auto& [stream, queue] : queues_) {
      found += queue.queued - queue.done;
    }
    return found;
  }

 private:
  // Whether a piece of work is done, or comes before all that will be queued in `queue`.
  bool is_before(StreamId stream, uint64_t place, const Queue& queue) {
    const auto known = queue.after.find(stream);
    return queues_[stream].done >= place || (known != queue.after.end() && known->second >= place);
  }

  void run_next(Queue& queue, std::unique_lock<std::mutex>& lock) {
    auto work = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    queue.is_busy = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      Plainly plainly;
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    work = nullptr;  // what it held may need Python's lock to go, which must not be waited for under ours
    lock.lock();
    queue.is_busy = false;
    ++queue.done;
    changed_.notify_all();
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<StreamId, Queue> queues_;
};
auto& streams = *new Streams();  // never taken down: threads of others may outlive this library's statics

std::atomic<StreamId> next_stream{1};

void give_back(const Block& block) {
  streams.give_back(block);
}

void check_given_back() {
  streams.check_given_back(present);
}

// The end of a stream as it was when the event was recorded.
struct Event {
  explicit Event(StreamId stream) : stream(stream), before(streams.places(stream)) {}
  uint64_t place() const {
    return before.at(stream);
  }
  StreamId stream;
  Places before;
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kLab;
  c10::DeviceType type() const override {
    return kLab;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return lab();
  }
  c10::Device getDevice() const override {
    return lab();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "lab: there is one device, and no ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Stream getStream(c10::Device) const override {
    return stream(present);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    use();
    return stream(next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream other) const override {
    return stream(std::exchange(present, other.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return streams.query(stream.id(), streams.end(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    streams.drain(stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    streams.drain_all();
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new Event(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (const auto* recorded = static_cast<Event*>(event)) {
      streams.wait(stream.id(), recorded->stream, recorded->place(), recorded->before);
    }
  }
  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<Event*>(event);
    return !recorded || streams.query(recorded->stream, recorded->place());
  }
  void synchronizeEvent(void* event) const override {
    if (const auto* recorded = static_cast<Event*>(event)) {
      streams.reach(recorded->stream, recorded->place());
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (pointer.get_deleter() == &DeviceAllocator::release) {
      streams.record(*static_cast<Held*>(pointer.get_context()), stream.id());
    }
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    const auto taken = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(taken).count();
  }

 private:
  static c10::Stream stream(StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, lab(), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers -----------------------------------------------------------------------------------------------

// A stream of its own: the host's generator, which the operators draw from, takes on its state for as long.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator host)
      : c10::GeneratorImpl(lab(), c10::DispatchKeySet(DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(host.clone());
  }
  at::Generator host;
};

at::Generator make_generator() {
  return at::make_generator<Generator>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

const at::Generator& default_generator() {
  static auto generator = make_generator();
  return generator;
}

// As long as this lives, what draws from the host's generator draws from `generator`.
class Drawing {
 public:
  explicit Drawing(const at::Generator& generator)
      : generator_(generator), host_(at::detail::getDefaultCPUGenerator()), kept_(host_.get_state()) {
    host_.set_state(generator_.get_state());
  }
  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;
  ~Drawing() {
    generator_.set_state(host_.get_state());
    host_.set_state(kept_);
  }

 private:
  at::Generator generator_, host_;
  Tensor kept_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return is_used;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return lab();
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return make_generator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    streams.drain(present);
    auto fresh = device_allocator.allocate(bytes);
    if (const auto kept = std::min(storage.nbytes(), bytes)) {
      memcpy(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- operators ----------------------------------------------------------------------------------------------------

Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &device_allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor as_strided(
    const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, sizes, format);
}

// What a copy does, and when: see the table in README.md.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool is_here = is_lab(from) && is_lab(to);
  const bool is_late = is_here || (non_blocking && is_pinned(is_lab(from) ? to : from));
  if (is_late) {
    // A tensor of the host's is held, not only its bytes: its allocator must not give them to anybody else.
    const auto kept = is_here ? Tensor() : is_lab(from) ? to : from;
    auto copy = [kept, source = on_host(from), target = on_host(to)] { target.copy_(source); };
    streams.queue(present, copy, {block_of(from), block_of(to)});
  } else if (non_blocking && is_lab(to)) {
    streams.queue(present, [target = on_host(to), source = from.clone()] { target.copy_(source); }, {block_of(to)});
  } else {
    streams.drain(present);
    on_host(to).copy_(on_host(from));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  streams.drain(present);
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

Tensor& set_source_storage_offset(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

// As a card's: `parameter.data = ...` takes a tensor of the host as well, so `module.to` keeps the parameters that it has.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  return self.layout() == c10::kStrided && from.layout() == c10::kStrided;
}

void record_stream(Tensor& self, c10::Stream stream) {
  streams.record(block_of(self), stream.id());
}

// One call of an operator on the host: what it reads it reads in place, what it writes are copies that land later.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    streams.drain(present);
    const auto& arguments = op_.schema().arguments();
    for (size_t number = 0; number < arguments.size(); ++number) {
      const auto* alias = arguments[number].alias_info();
      stack_[first_ + number] = argument(stack_[first_ + number], alias && alias->isWrite());
    }
    TORCH_CHECK(
        !strays_ || !has_lab_,
        op_.schema().name(), ": expected all tensors to be on the same device, but found lab:0 and cpu");
    {
      std::optional<Drawing> drawing;
      if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
        drawing.emplace(generator_.defined() ? generator_ : default_generator());
      }
      op_.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack_);
    }
    for (const auto& [device, host] : written_) {
      if (device.sizes() != host.sizes()) {
        at::native::resize_(device, host.sizes(), std::nullopt);
      }
      land(device, host);
    }
    const auto results = op_.schema().returns().size();
    for (auto place = stack_.size() - results; place < stack_.size(); ++place) {
      stack_[place] = result(stack_[place]);
    }
    if (!landing_.empty()) {
      auto work = [landing = std::move(landing_)] {
        for (const auto& [device, host] : landing) {
          device.copy_(host);
        }
      };
      streams.queue(present, std::move(work), blocks_);
    }
  }

 private:
  c10::IValue argument(const c10::IValue& given, bool is_written) {
    if (given.isTensor()) {
      return tensor(given.toTensor(), is_written, false);
    }
    if (given.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& one : given.toTensorVector()) {
        made.push_back(tensor(one, is_written, false));
      }
      return made;
    }
    if (given.isOptionalTensorList()) {  // indices, which may lie on the host
      c10::List<std::optional<Tensor>> made;
      for (const auto& one : given.toOptionalTensorVector()) {
        made.push_back(one ? std::make_optional(tensor(*one, is_written, true)) : std::nullopt);
      }
      return made;
    }
    if (given.isDevice() && given.toDevice().type() == kLab) {
      has_lab_ = true;
      return c10::Device(c10::DeviceType::CPU);
    }
    if (given.isGenerator() && given.toGenerator().device().type() == kLab) {
      generator_ = given.toGenerator();
      return {};
    }
    return given;
  }

  Tensor tensor(const Tensor& given, bool is_written, bool may_be_on_host) {
    if (!is_lab(given)) {
      strays_ |= given.defined() && given.dim() > 0 && !may_be_on_host;
      return given;
    }
    has_lab_ = true;
    blocks_.push_back(block_of(given));
    for (const auto& [device, host] : written_) {
      if (device.is_same(given)) {
        return host;
      }
    }
    auto host = on_host(given);
    if (is_written) {
      written_.emplace_back(given, host.clone());
      return written_.back().second;
    }
    read_.push_back(host);
    return host;
  }

  c10::IValue result(const c10::IValue& given) {
    if (given.isTensor()) {
      return result(given.toTensor());
    }
    if (given.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& one : given.toTensorVector()) {
        made.push_back(result(one));
      }
      return made;
    }
    return given;
  }

  Tensor result(const Tensor& host) {
    for (const auto& [device, clone] : written_) {
      if (clone.is_same(host)) {
        return device;
      }
    }
    if (!host.defined() || !has_lab_) {
      return host;
    }
    for (const auto& argument : read_) {
      TORCH_CHECK(!host.is_alias_of(argument), op_.schema().name(), ": lab has no kernel for this view");
    }
    const auto is_plain = host.is_non_overlapping_and_dense();
    const auto strides = is_plain ? host.strides() : c10::IntArrayRef();
    auto device = is_plain ? empty_strided(host.sizes(), strides, host.scalar_type(), {}, {}, {})
                           : empty(host.sizes(), host.scalar_type(), {}, {}, {}, {});
    land(device, host);
    return device;
  }

  void land(const Tensor& device, const Tensor& host) {
    landing_.emplace_back(on_host(device), host);
    blocks_.push_back(block_of(device));
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  size_t first_;
  std::vector<std::pair<Tensor, Tensor>> written_;  // on the device, and the copy on the host
  std::vector<std::pair<Tensor, Tensor>> landing_;  // its memory, and what is to be there
  std::vector<Tensor> read_;
  std::vector<Held> blocks_;
  at::Generator generator_;
  bool has_lab_ = false, strays_ = false;
};

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall(op, stack).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", record_stream);
  // Without one of the device's own these would be put together from others, and round differently than on the host.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_PROMOTE(PROMOTE)
}

// ---- collectives --------------------------------------------------------------------------------------------------

// A collective that has begun: its results land on a stream of the group's. As under NCCL, `wait` makes the present
// stream wait, and not the host; that of a barrier makes the host wait, too.
class Begun final : public c10d::Work {
 public:
  Begun(StreamId stream, bool is_barrier) : end_(stream), is_barrier_(is_barrier) {}
  bool isCompleted() override {
    return streams.query(end_.stream, end_.place());
  }
  bool isSuccess() const override {
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds) override {
    streams.wait(present, end_.stream, end_.place(), end_.before);
    if (is_barrier_) {
      streams.drain(present);
    }
    return true;
  }

 private:
  Event end_;
  bool is_barrier_;
};

// What a collective is given, on the host.
class Hosts {
 public:
  Tensor in(const Tensor& tensor) {
    TORCH_CHECK(is_lab(tensor), "staged: a tensor of ", tensor.device(), " in a collective of lab's");
    TORCH_CHECK(tensor.is_contiguous(), "staged: tensors must be contiguous");
    return on_host(tensor).clone();
  }
  Tensor out(const Tensor& tensor) {
    results_.emplace_back(on_host(tensor), in(tensor));
    return results_.back().second;
  }
  std::vector<Tensor> in(const std::vector<Tensor>& tensors) {
    return each(tensors, [this](const Tensor& one) { return in(one); });
  }
  std::vector<Tensor> out(const std::vector<Tensor>& tensors) {
    return each(tensors, [this](const Tensor& one) { return out(one); });
  }
  std::vector<std::vector<Tensor>> in(const std::vector<std::vector<Tensor>>& lists) {
    return each(lists, [this](const std::vector<Tensor>& one) { return in(one); });
  }
  std::vector<std::vector<Tensor>> out(const std::vector<std::vector<Tensor>>& lists) {
    return each(lists, [this](const std::vector<Tensor>& one) { return out(one); });
  }
  // A mean, which gloo has not: a sum over so many members.
  void divide(int64_t members) {
    members_ = members;
  }
  void land() const {
    for (const auto& [device, host] : results_) {
      device.copy_(members_ == 1 ? host : host.is_floating_point() ? host / members_ : host.div(members_, "trunc"));
    }
  }
  void garble() const {
    for (const auto& [device, host] : results_) {
      std::memset(device.mutable_data_ptr(), kPoison, device.nbytes());
    }
  }

 private:
  template <typename T, typename F>
  static std::vector<T> each(const std::vector<T>& given, F&& function) {
    std::vector<T> made;
    made.reserve(given.size());
    for (const auto& one : given) {
      made.push_back(function(one));
    }
    return made;
  }
  std::vector<std::pair<Tensor, Tensor>> results_;
  int64_t members_ = 1;
};

// Whether a group was aborted, and what it is waited for by.
struct Fate {
  void abort() {
    std::lock_guard<std::mutex> lock(mutex);
    is_aborted = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return is_aborted.load(); });
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<bool> is_aborted{false};
};

bool is_of_a_peer(const std::exception& error) {
  return std::string(error.what()).find("gloo/") != std::string::npos;
}

// As under NCCL, whoever waits for a peer that is gone waits until the group is aborted. Then nothing is raised, and what
// was to be written is garbage. Messages cannot be waited for piece by piece, and end with their connections.
bool arrives(c10d::Work& work, Fate& fate, bool is_message) {
  bool has_ended = is_message;  // else it may only not have ended yet
  while (true) {
    try {
      has_ended ? work.wait() : work.wait(std::chrono::milliseconds(20));
      return true;
    } catch (const std::exception& error) {
      if (has_ended) {
        if (!is_of_a_peer(error)) {
          throw;
        }
        fate.wait();
      }
      if (fate.is_aborted) {
        return false;
      }
      has_ended = work.isCompleted();  // some never say so, and fail at once each time
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// The collectives that this process has begun, of all groups, in order. Those that one group call has begun have no
// order among themselves. Both ends of a message, and all members of a collective, give it one name.
class Journal {
 public:
  using Batch = std::vector<std::string>;

  void note(std::string name) {
    if (open_) {
      open_->push_back(std::move(name));
    } else {
      add({std::move(name)});
    }
  }
  void open() {
    open_.emplace();
  }
  void close() {
    add(std::exchange(open_, std::nullopt).value_or(Batch{}));
  }
  std::vector<Batch> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(batches_, {});
  }

 private:
  void add(Batch batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    batches_.push_back(std::move(batch));
  }
  std::mutex mutex_;
  std::vector<Batch> batches_;
  static thread_local std::optional<Batch> open_;
};

thread_local std::optional<Journal::Batch> Journal::open_;
Journal journal;

// Gloo does it, on copies in host memory. It begins at once, so that all members begin in the same order.
class Staged final : public c10d::Backend {
 public:
  using Handle = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;
  using Lists = std::vector<std::vector<Tensor>>;

  // sockets: descriptor and inode of each that gloo has opened. name: the same for all members, and no other group's.
  Staged(c10::intrusive_ptr<c10d::Backend> gloo, std::map<int, uint64_t> sockets, std::string name)
      : c10d::Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        sockets_(std::move(sockets)),
        name_(std::move(name)),
        stream_(next_stream++) {}

  // Gloo waits for what is under way when it goes, and shut sockets do not always end that: one that is aborted stays.
  ~Staged() override {
    if (fate_->is_aborted) {
      (void)gloo_.release();
    }
  }

  const std::string getBackendName() const override {
    return "staged";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {
    journal.open();
  }
  Handle endCoalescing() override {
    journal.close();
    return c10::make_intrusive<Begun>(stream_, false);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  void abort() override {
    fate_->abort();
    for (const auto& [descriptor, inode] : sockets_) {
      struct stat found;
      int listens = 1;  // gloo ends the process without the socket that it listens at
      socklen_t length = sizeof(listens);
      const bool is_there = fstat(descriptor, &found) == 0 && found.st_ino == inode;
      if (is_there && getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && !listens) {
        ::shutdown(descriptor, SHUT_RDWR);
      }
    }
  }
  void shutdown() override {
    gloo_->shutdown();
  }

  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return begin("broadcast", [&](Hosts& hosts) {
      auto there = hosts.out(tensors);
      return gloo_->broadcast(there, options);
    });
  }
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return begin("allreduce", [&](Hosts& hosts) {
      auto there = hosts.out(tensors);
      return gloo_->allreduce(there, summed(options, hosts));
    });
  }
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return begin("allreduce_coalesced", [&](Hosts& hosts) {
      auto there = hosts.out(tensors);
      return gloo_->allreduce_coalesced(there, summed(options, hosts));
    });
  }
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return begin("reduce", [&](Hosts& hosts) {
      auto there = hosts.out(tensors);
      return gloo_->reduce(there, summed(options, hosts));
    });
  }
  Handle allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return begin("allgather", [&](Hosts& hosts) {
      auto to = hosts.out(outputs);
      auto from = hosts.in(inputs);
      return gloo_->allgather(to, from, options);
    });
  }
  Handle _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return begin("_allgather_base", [&](Hosts& hosts) {
      auto to = hosts.out(output);
      auto from = hosts.in(input);
      return gloo_->_allgather_base(to, from, options);
    });
  }
  Handle allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return begin("allgather_into_tensor_coalesced", [&](Hosts& hosts) {
      auto to = hosts.out(outputs);
      auto from = hosts.in(inputs);
      return gloo_->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  Handle gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return begin("gather", [&](Hosts& hosts) {
      auto to = hosts.out(outputs);
      auto from = hosts.in(inputs);
      return gloo_->gather(to, from, options);
    });
  }
  Handle scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return begin("scatter", [&](Hosts& hosts) {
      auto to = hosts.out(outputs);
      auto from = hosts.in(inputs);
      return gloo_->scatter(to, from, options);
    });
  }
  Handle reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    return begin("reduce_scatter", [&](Hosts& hosts) {
      auto to = hosts.out(outputs);
      auto from = hosts.in(inputs);
      return gloo_->reduce_scatter(to, from, summed(options, hosts));
    });
  }
  Handle _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return begin("_reduce_scatter_base", [&](Hosts& hosts) {
      auto to = hosts.out(output);
      auto from = hosts.in(input);
      return gloo_->_reduce_scatter_base(to, from, summed(options, hosts));
    });
  }
  Handle reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return begin("reduce_scatter_tensor_coalesced", [&](Hosts& hosts) {
      auto to = hosts.out(outputs);
      auto from = hosts.in(inputs);
      return gloo_->reduce_scatter_tensor_coalesced(to, from, summed(options, hosts));
    });
  }
  Handle alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return begin("alltoall_base", [&](Hosts& hosts) {
      auto to = hosts.out(output);
      auto from = hosts.in(input);
      return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
    });
  }
  Handle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return begin("alltoall", [&](Hosts& hosts) {
      auto to = hosts.out(outputs);
      auto from = hosts.in(inputs);
      return gloo_->alltoall(to, from, options);
    });
  }
  Handle send(Tensors& tensors, int to, int tag) override {
    return begin("send", [&](Hosts& hosts) {
      auto there = hosts.in(tensors);
      return gloo_->send(there, to, tag);
    }, false, Message{getRank(), to});
  }
  Handle recv(Tensors& tensors, int from, int tag) override {
    return begin("recv", [&](Hosts& hosts) {
      auto there = hosts.out(tensors);
      return gloo_->recv(there, from, tag);
    }, false, Message{from, getRank()});
  }
  Handle barrier(const c10d::BarrierOptions& options) override {
    return begin("barrier", [&](Hosts&) { return gloo_->barrier(options); }, true);
  }

 private:
  using Message = std::pair<int, int>;  // from, to; of members of the group

  template <typename Options>
  Options summed(Options options, Hosts& hosts) {
    if (options.reduceOp == c10d::ReduceOp::AVG) {
      options.reduceOp = c10d::ReduceOp::SUM;
      hosts.divide(getSize());
    }
    return options;
  }

  template <typename F>
  Handle begin(const char* what, F&& start, bool is_barrier = false, std::optional<Message> message = std::nullopt) {
    TORCH_CHECK_WITH(DistBackendError, !fate_->is_aborted, "staged: the group was aborted");
    note(what, message);
    streams.drain(present);
    Plainly plainly;
    Hosts hosts;
    auto work = started(start, hosts);
    streams.queue(stream_, [work, hosts, message, fate = fate_] {
      if (work) {
        arrives(*work, *fate, message.has_value()) ? hosts.land() : hosts.garble();
      } else {
        fate->wait();
        hosts.garble();
      }
    });
    return c10::make_intrusive<Begun>(stream_, is_barrier);
  }

  void note(const char* what, const std::optional<Message>& message) {
    const auto place = message ? std::to_string(message->first) + ">" + std::to_string(message->second) : what;
    std::lock_guard<std::mutex> lock(counting_);
    const auto number = std::to_string(++begun_[message ? place : ""]);
    journal.note(place + " of " + std::to_string(getSize()) + " (" + name_ + ") #" + number);
  }

  // Null where a peer is gone already, which is none of its business either.
  template <typename F>
  Handle started(F&& start, Hosts& hosts) {
    try {
      return start(hosts);
    } catch (const std::exception& error) {
      if (!is_of_a_peer(error)) {
        throw;
      }
      return nullptr;
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, uint64_t> sockets_;
  std::string name_;
  std::mutex counting_;
  std::map<std::string, int> begun_;
  std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  StreamId stream_;
};

}  // namespace

// ---- for Python ---------------------------------------------------------------------------------------------------

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  pthread_atfork(nullptr, nullptr, after_fork);
  poison_file();  // one for all processes that are forked from here
  m.def("is_forked", [] { return is_forked.load(); });
  m.def("is_used", [] { return is_used.load(); });
  m.def("break_down", [] { is_broken = true; }, "As after an illegal access: whatever is asked of the device raises.");
  m.def("memory", [] {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return std::map<std::string, int64_t>{
        {"used", counters.used},
        {"peak", counters.peak},
        {"allocations", counters.allocations},
        {"pinned", counters.pinned},
        {"capacity", counters.capacity}};
  });
  m.def("reset_peak", [] {
    std::lock_guard<std::mutex> lock(memory_mutex);
    counters.peak = counters.used;
  });
  m.def("set_capacity", [](int64_t bytes) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    counters.capacity = bytes;
  });
  m.def("waiting", [] { return streams.waiting(); }, "Pieces of work that are queued on all streams.");
  m.def("default_generator", [] { return default_generator(); });
  m.def("synchronize", [] { streams.drain_all(); }, py::call_guard<py::gil_scoped_release>());
  using Sockets = std::map<int, uint64_t>;
  using Gloo = c10::intrusive_ptr<c10d::Backend>;
  m.def("staged", [](Gloo gloo, Sockets sockets, std::string name) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Staged>(std::move(gloo), std::move(sockets), std::move(name));
  });
  m.def("begun", [] { return journal.take(); }, "Collectives that were begun since the last call.");
}

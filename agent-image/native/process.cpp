// What a candidate's own process has beside PyTorch: memory that the judge can read when the process stands still, and
// a record of the operators that were dispatched, on whatever thread and from whatever language.
//
// Knows PyTorch's allocators and record functions. Must not know what is judged. It lives in a hostile process: what it
// says is an observation, and what it hands out as an output counts for what lies there.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

namespace {

constexpr size_t GRAIN = 512;

// A range of addresses that blocks are taken from, the best fit first. What is known of a block lies beside the range,
// since the host can't write to a device's.
class Pool {
 public:
  void open(char* base, size_t bytes) {
    std::lock_guard<std::mutex> held(lock_);
    base_ = base;
    bytes_ = bytes / GRAIN * GRAIN;
    free_.clear();
    sizes_.clear();
    put(0, bytes_);
  }

  void* take(size_t bytes) {
    const size_t size = std::max(bytes, size_t{1}) > SIZE_MAX - GRAIN ? 0 : (std::max(bytes, size_t{1}) + GRAIN - 1) / GRAIN * GRAIN;
    std::lock_guard<std::mutex> held(lock_);
    const auto found = sizes_.lower_bound({size, 0});
    if (size == 0 || found == sizes_.end()) return nullptr;
    const auto [whole, at] = *found;
    sizes_.erase(found);
    free_.erase(at);
    if (whole > size) put(at + size, whole - size);
    used_[at] = size;
    return base_ + at;
  }

  // False for what isn't of this pool.
  bool give(void* pointer) {
    if (!holds(pointer)) return false;
    std::lock_guard<std::mutex> held(lock_);
    const auto found = used_.find(static_cast<char*>(pointer) - base_);
    if (found == used_.end()) return true;
    size_t at = found->first;
    size_t size = found->second;
    used_.erase(found);
    auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + size) {
      size += next->second;
      sizes_.erase({next->second, next->first});
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == at) {
        at = before->first;
        size += before->second;
        sizes_.erase({before->second, before->first});
        free_.erase(before);
      }
    }
    put(at, size);
    return true;
  }

  bool holds(const void* pointer) const {
    const char* p = static_cast<const char*>(pointer);
    return base_ != nullptr && p >= base_ && p < base_ + bytes_;
  }

  bool opened() const { return base_ != nullptr; }

  long long offset(const void* pointer) const {
    return holds(pointer) ? static_cast<const char*>(pointer) - base_ : -1;
  }

 private:
  void put(size_t at, size_t size) {
    free_[at] = size;
    sizes_.insert({size, at});
  }

  std::mutex lock_;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  std::map<size_t, size_t> free_;
  std::set<std::pair<size_t, size_t>> sizes_;
  std::unordered_map<size_t, size_t> used_;
};

// Never destroyed: tensors outlive what would destroy it.
Pool& host() {
  static Pool* pool = new Pool;
  return *pool;
}

Pool& device() {
  static Pool* pool = new Pool;
  return *pool;
}

void free_host(void* pointer) {
  if (pointer != nullptr && !host().give(pointer)) c10::free_cpu(pointer);
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes == 0 ? nullptr : host().take(bytes);
    // A full pool isn't the end: such memory is the process's own, and an output in it is copied.
    if (pointer == nullptr) pointer = c10::alloc_cpu(bytes);
    return {pointer, pointer, &free_host, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

std::atomic<bool> watching{false};
std::mutex names_lock;

std::map<std::string, long long>& names() {
  static auto* found = new std::map<std::string, long long>;
  return *found;
}

std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
  if (watching.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> held(names_lock);
    ++names()[function.name()];
  }
  return nullptr;
}

}  // namespace

extern "C" {

// Tensors of the CPU are allocated in `bytes` from `start` of the memory file `fd` from now on. 0, or -1 where it can't be
// mapped.
int kernelfleet_host_pool(int fd, size_t start, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(start));
  if (base == MAP_FAILED) return -1;
  host().open(static_cast<char*>(base), bytes);
  static HostAllocator* allocator = new HostAllocator;
  c10::SetCPUAllocator(allocator, 255);
  return 0;
}

// Where `pointer` lies in the pool; -1 if it doesn't.
long long kernelfleet_host_offset(const void* pointer) { return host().offset(pointer); }

// The same for device memory that is mapped at `base`, as PyTorch's pluggable allocator calls it.
void kernelfleet_device_pool(void* base, size_t bytes) { device().open(static_cast<char*>(base), bytes); }
long long kernelfleet_device_offset(const void* pointer) { return device().offset(pointer); }
void* kernelfleet_device_take(ssize_t bytes, int, void*) {
  void* pointer = device().take(bytes);
  // Before the pool is opened there is nothing to give; afterwards a full one has to be told, or a kernel would write to null.
  TORCH_CHECK_WITH(OutOfMemoryError, pointer != nullptr || bytes == 0 || !device().opened(), "the pool has no room for ", bytes, " bytes more");
  return pointer;
}
void kernelfleet_device_give(void* pointer, ssize_t, int, void*) { device().give(pointer); }

// Operators are recorded from `begin` on; before the first, to be called once while there is one thread.
void kernelfleet_watch() {
  at::addGlobalCallback(at::RecordFunctionCallback(&seen).scopes({at::RecordScope::FUNCTION}));
}

void kernelfleet_begin() {
  std::lock_guard<std::mutex> held(names_lock);
  names().clear();
  watching.store(true);
}

// Stops recording and writes "name count\n" of each operator to `to`; how many bytes that takes.
size_t kernelfleet_end(char* to, size_t room) {
  watching.store(false);
  std::lock_guard<std::mutex> held(names_lock);
  std::string text;
  for (const auto& [name, count] : names()) text += name + " " + std::to_string(count) + "\n";
  std::memcpy(to, text.data(), std::min(room, text.size()));
  return text.size();
}

}

// A simulated accelerator: torch's PrivateUse1, whose kernels run on the CPU. It differs from the CPU where a real
// device does, so that an assumption that holds on CUDA or on the host alone fails here:
// - addresses of its tensors are not readable by the host (a read is a segmentation fault);
// - a copy into pinned memory arrives when its event is waited for, and not before;
// - there is no float64: tensors become float32 without a word;
// - in saturation mode results stay finite, and a flag says that they would not have been;
// - it has its own random numbers, devices, streams, and a mode in which waiting for it is an error.
// Kernels run at once, in the order of the calls: of a stream only the copies to the host are late.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

namespace {

using at::Tensor;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr uintptr_t kShift = 1ULL << 62;  // no processor maps such an address
constexpr size_t kMemory = 4ULL << 30;

void* to_device(void* host) { return host ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) + kShift) : nullptr; }
void* to_host(void* device) { return device ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) - kShift) : nullptr; }

std::recursive_mutex lock;
std::map<std::string, int64_t> counters;
bool saturates = false, overflowed = false, capturing = false;
int64_t sync_debug = 0;
thread_local int inside_kernel = 0;

void count(const std::string& what, int64_t n = 1) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  counters[what] += n;
}

void host_waits(const char* what) {
  if (inside_kernel) return;
  count("host waits");
  TORCH_CHECK(!capturing, what, ": operation not permitted while a stream is being captured");
  TORCH_CHECK(sync_debug != 2, what, ": called a synchronizing operation");
}

// ---------------------------------------------------------------------------------------------------- memory

struct DeviceMemory final : c10::DeviceAllocator {
  size_t now[kDevices] = {}, peak[kDevices] = {};
  struct Block { void* host; size_t size; int device; };

  static void release(void* context);
  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    std::memcpy(to_host(to), to_host(const_cast<void*>(from)), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex i) override { peak[i] = now[i]; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) override { return {kMemory - now[i], kMemory}; }
};

DeviceMemory memory;
thread_local int current_device = 0;

c10::DataPtr DeviceMemory::allocate(size_t size) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  int device = current_device;
  TORCH_CHECK_WITH(OutOfMemoryError, now[device] + size <= kMemory, "NPU out of memory: tried to allocate ", size, " bytes");
  counters["allocations"]++;
  void* host = size ? std::malloc(size) : nullptr;
  now[device] += size;
  peak[device] = std::max(peak[device], now[device]);
  return {to_device(host), new Block{host, size, device}, &DeviceMemory::release, c10::Device(kType, device)};
}

void DeviceMemory::release(void* context) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  auto* block = static_cast<Block*>(context);
  memory.now[block->device] -= block->size;
  std::free(block->host);
  delete block;
}

std::map<uintptr_t, size_t> pinned;

struct PinnedMemory final : c10::Allocator {
  static void release(void* p) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    pinned.erase(reinterpret_cast<uintptr_t>(p));
    std::free(p);
  }
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::recursive_mutex> hold(lock);
    counters["pinned allocations"]++;
    TORCH_CHECK(!capturing, "pinned memory: operation not permitted while a stream is being captured");
    void* p = std::malloc(std::max<size_t>(size, 1));
    pinned[reinterpret_cast<uintptr_t>(p)] = std::max<size_t>(size, 1);
    return {p, p, &PinnedMemory::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> hold(lock);
  auto p = reinterpret_cast<uintptr_t>(data);
  auto next = pinned.upper_bound(p);
  return next != pinned.begin() && p < std::prev(next)->first + std::prev(next)->second;
}

// ---------------------------------------------------------------------------------------------------- streams

struct LateCopy { int64_t number; int device; c10::StreamId stream; Tensor values; Tensor into; };
std::deque<LateCopy> late;
int64_t last_number = 0;
c10::StreamId streams = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

// To share or free a tensor may take Python's lock, whose holder may wait for this one: under the lock they only move.
void arrive(int device, c10::StreamId stream, int64_t until) {
  std::deque<LateCopy> done, rest;
  std::lock_guard<std::recursive_mutex> hold(lock);
  for (auto& copy : late) {
    bool due = copy.device == device && (stream < 0 || copy.stream == stream) && copy.number <= until;
    if (due) copy.into.copy_(copy.values);
    (due ? done : rest).push_back(std::move(copy));
  }
  late.swap(rest);
}

constexpr int kKernelsLate = 20;  // a device that is busy is some kernels behind the host
constexpr int kTimesAsked = 3;    // and an idle one takes a moment

struct Event {
  int64_t number = 0;
  int device = 0;
  c10::StreamId stream = 0;
  bool recorded = false;
  int64_t kernels = 0;
  int asked = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before(kType, current_device);
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device d) const override {
    if (d.index() < 0) return;
    TORCH_CHECK(d.index() < kDevices, "there are ", kDevices, " simulated devices");
    current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  static int index(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static c10::Stream stream(int device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
  c10::Stream getStream(c10::Device d) const override { return stream(index(d), current_stream[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(index(d), ++streams); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    std::lock_guard<std::recursive_mutex> hold(lock);
    *static_cast<Event*>(*event) = {++last_number, s.device_index(), s.id(), true, counters["kernels"]};
  }
  void block(void*, const c10::Stream&) const override { count("stream waits"); }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    if (!e || !e->recorded) return true;
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (++e->asked < kTimesAsked && counters["kernels"] - e->kernels < kKernelsLate) return false;
    arrive(e->device, e->stream, e->number);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override {
    count("host waits");
    arrive(s.device_index(), s.id(), last_number);
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing; }
  void synchronizeEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    count("event waits");
    if (!e || !e->recorded) return;
    e->asked = kTimesAsked;
    arrive(e->device, e->stream, e->number);
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    host_waits("synchronize");
    arrive(d, -1, last_number);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return static_cast<double>(static_cast<Event*>(b)->number - static_cast<Event*>(a)->number);
  }
};

// ---------------------------------------------------------------------------------------------------- random numbers

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit DeviceGenerator(int device)
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { auto hold = inner; return hold.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
};

at::Generator& generator(int64_t device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kDevices; i++) made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all.at(device < 0 ? current_device : device);
}

at::Generator& inner_of(const at::Generator& g) { return static_cast<DeviceGenerator*>(g.unsafeGetGeneratorImpl())->inner; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<DeviceGenerator>(i < 0 ? current_device : i);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({kType, i}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return Guard().exchangeDevice({kType, i}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  void init() const override {}
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = memory.allocate(size);
    auto n = std::min(size, storage.nbytes());
    if (n) std::memcpy(to_host(fresh.get()), to_host(storage.mutable_data()), n);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size);
  }
};

// ---------------------------------------------------------------------------------------------------- tensors

at::ScalarType without_float64(at::ScalarType t) {
  if (t == at::kDouble) return at::kFloat;
  return t == at::kComplexDouble ? at::kComplexFloat : t;
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           without_float64(c10::dtype_or_default(dtype)));
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   without_float64(c10::dtype_or_default(dtype)), format);
}

// The same memory as a CPU tensor, for kernels and copies.
Tensor on_host(const Tensor& x) {
  if (!x.is_privateuseone()) return x;
  auto* storage = static_cast<char*>(to_host(x.storage().mutable_data()));
  auto options = at::TensorOptions().dtype(x.scalar_type()).device(c10::kCPU);
  if (!storage) return at::empty_strided(x.sizes(), x.strides(), options);
  return at::from_blob(storage + x.storage_offset() * x.itemsize(), x.sizes(), x.strides(), options);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.is_privateuseone() && to.is_cpu() && !inside_kernel) {
    bool pinned_target = to.numel() && is_pinned(to.storage().data());
    if (non_blocking && pinned_target) {
      int device = from.get_device();
      Tensor values = on_host(from).clone(), into = to;
      if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());
      std::unique_lock<std::recursive_mutex> hold(lock);
      late.push_back({++last_number, device, current_stream[device], std::move(values), std::move(into)});
      counters["copies to the host"]++;
      hold.unlock();
      return to;
    }
    host_waits("copy to the host");
    arrive(from.get_device(), current_stream[from.get_device()], last_number);
  }
  auto target = on_host(to);
  target.copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.numel() == 0 && from.numel()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& x) {
  host_waits("item");
  arrive(x.get_device(), current_stream[x.get_device()], last_number);
  return at::_local_scalar_dense(on_host(x));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() && static_cast<size_t>(needed) > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

void record_stream(Tensor&, at::Stream) { count("recorded streams"); }

// ---------------------------------------------------------------------------------------------------- kernels

bool finite(const Tensor& x) {
  return !x.defined() || !(x.is_floating_point() || x.is_complex()) || !x.numel() || at::isfinite(x).all().item<bool>();
}

// Applies f to each floating tensor of the device among values of a stack.
template <class F>
void each_tensor(const c10::IValue& value, F f) {
  if (value.isTensor()) {
    if (value.toTensor().defined() && value.toTensor().is_privateuseone()) f(value.toTensor());
  } else if (value.isTensorList()) {
    for (Tensor x : value.toTensorList()) if (x.defined() && x.is_privateuseone()) f(x);
  }
}

const char* makes_infinities[] = {"aten::fill_", "aten::full", "aten::masked_fill", "aten::masked_fill_", "aten::zero_", "aten::where"};

void saturate(const Tensor& x, bool inputs_finite, bool by_design) {
  auto host = on_host(x);
  if (finite(host)) return;
  if (inputs_finite && !by_design) overflowed = true;
  double edge = host.scalar_type() == at::kHalf ? 65504. : host.scalar_type() == at::kBFloat16 ? 3.3895313892515355e38 : 3.4028234663852886e38;
  at::nan_to_num_(host, 0.0, edge, -edge);
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  count("kernels");
  bool reads_on_host = false;
  for (const auto& r : schema.returns()) reads_on_host |= r.type()->kind() == c10::TypeKind::BoolType;
  for (auto* waits : {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"}) reads_on_host |= name == waits;
  if (reads_on_host) host_waits(name.c_str());
  size_t arguments = schema.arguments().size(), first = stack->size() - arguments;
  int device = current_device;
  bool inputs_finite = true;
  for (size_t i = 0; i < arguments; i++) {
    auto& value = (*stack)[first + i];
    each_tensor(value, [&](const Tensor& x) {
      device = x.get_device();
      if (saturates && !schema.arguments()[i].is_out()) inputs_finite &= finite(on_host(x));
    });
    if (value.isGenerator() && value.toGenerator().device().type() == kType) value = inner_of(value.toGenerator());
  }
  bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  auto* host_numbers = static_cast<at::CPUGeneratorImpl*>(at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl());
  auto* own_numbers = static_cast<at::CPUGeneratorImpl*>(inner_of(generator(device)).unsafeGetGeneratorImpl());
  auto kept = host_numbers->engine();
  if (random) host_numbers->set_engine(own_numbers->engine());
  inside_kernel++;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    inside_kernel--;
    if (random) host_numbers->set_engine(kept);
    throw;
  }
  if (random) {
    own_numbers->set_engine(host_numbers->engine());
    host_numbers->set_engine(kept);
  }
  if (saturates) {
    bool by_design = false;
    for (auto* one : makes_infinities) by_design |= name == one;
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
      each_tensor((*stack)[i], [&](const Tensor& x) { saturate(x, inputs_finite, by_design); });
  }
  inside_kernel--;
}

// torch asks every device but its own for convolutions under these names.
Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  count("kernels");
  auto host_bias = bias.has_value() && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  return at::convolution(on_host(x), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups).to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, at::IntArrayRef stride,
                                                        at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  count("kernels");
  std::vector<int64_t> sizes{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [a, b, c] = at::convolution_backward(on_host(grad), on_host(x), on_host(weight), sizes, stride, padding, dilation, transposed,
                                            output_padding, groups, mask);
  auto there = [&](const Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {there(a), there(b), there(c)};
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Setup {
  Setup() {
    c10::SetAllocator(kType, &memory, 1);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} setup;

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", static_cast<Tensor& (*)(Tensor&, const Tensor&)>(&at::native::set_tensor_));
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

// What the tests and the simulated torch_npu ask for.
TORCH_LIBRARY(simulated_npu, m) {
  m.def("counter(str name) -> int", [](const std::string& name) { std::lock_guard<std::recursive_mutex> hold(lock); return counters[name]; });
  m.def("set_saturation(bool on) -> ()", [](bool on) { saturates = on; overflowed = false; });
  m.def("saturates() -> bool", [] { return saturates; });
  m.def("overflowed() -> bool", [] { host_waits("overflow flag"); return overflowed; });
  m.def("overflow_seen() -> bool", [] { return overflowed; });
  m.def("clear_overflow() -> ()", [] { overflowed = false; });
  m.def("set_sync_debug(int mode) -> ()", [](int64_t mode) { sync_debug = mode; });
  m.def("get_sync_debug() -> int", [] { return sync_debug; });
  m.def("set_capturing(bool on) -> ()", [](bool on) { capturing = on; });
  m.def("is_capturing() -> bool", [] { return capturing; });
  m.def("seed(int device, int seed) -> ()", [](int64_t d, int64_t s) { generator(d).set_current_seed(s); });
  m.def("rng_state(int device) -> Tensor", [](int64_t d) { return generator(d).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t d, const Tensor& s) { generator(d).set_state(s); });
  m.def("memory_now(int device) -> int", [](int64_t d) { return static_cast<int64_t>(memory.now[d]); });
  m.def("memory_peak(int device) -> int", [](int64_t d) { return static_cast<int64_t>(memory.peak[d]); });
  m.def("memory_total() -> int", [] { return static_cast<int64_t>(kMemory); });
}

// To torch's CPU build, a GPU whose memory is the host's and whose kernels are the CPU's: what is written for GPUs runs
// here, and code waits for the device exactly where it would for a real one.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

using at::IntArrayRef, at::Tensor, c10::Device, c10::DeviceIndex, c10::DeviceType, c10::IValue, c10::Stream;

namespace {
const Device only(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, only);
const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
void (*on_wait)(const char*) = nullptr;

std::mutex guard;
std::map<const char*, size_t> pinned;

void unpin(void* pointer) {
  std::lock_guard<std::mutex> held(guard);
  pinned.erase(static_cast<char*>(pointer));
  free(pointer);
}

struct Memory final : c10::Allocator {
  explicit Memory(bool on_device) : on_device(on_device) {}
  c10::DataPtr allocate(size_t size) override {
    auto* pointer = static_cast<char*>(aligned_alloc(512, (size + 511) / 512 * 512));
    if (on_device) return {pointer, pointer, &free, only};
    std::lock_guard<std::mutex> held(guard);
    pinned[pointer] = size;
    return {pointer, pointer, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return on_device ? &free : &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  const bool on_device;
} device_memory(true), pinned_memory(false);

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(guard);
  auto next = pinned.upper_bound(static_cast<const char*>(pointer));
  if (next == pinned.begin()) return false;
  --next;
  return static_cast<const char*>(pointer) < next->first + std::max<size_t>(next->second, 1);
}

void wait_for(const std::string& operation) {
  if (on_wait) on_wait(operation.c_str());
}
}  // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace {
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return only; }
  Device exchangeDevice(Device) const override { return only; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream getNewStream(Device, int) const override { return stream; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());
[[maybe_unused]] const bool has_memory = (c10::SetAllocator(DeviceType::CUDA, &device_memory), true);

// The same bytes as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto host = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

Tensor on_device(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  Tensor copied = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &device_memory, keys, tensor.scalar_type());
  on_host(copied).copy_(tensor);
  return copied;
}

IValue moved(const IValue& value, Tensor (*to)(const Tensor&)) {
  if (value.isTensor()) return to(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& each : value.toTensorList()) all.push_back(to(each));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      all.push_back(each ? std::optional(to(*each)) : each);
    return all;
  }
  return value;
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  const auto& host = to.is_cuda() ? from : to;
  if (to.numel() && !host.is_cuda() && !(non_blocking && is_pinned(host.const_data_ptr()))) wait_for("aten::copy_");
  on_host(to).copy_(on_host(from));
  return to;
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  size_t bytes = (tensor->numel() + tensor->storage_offset()) * tensor->itemsize();
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) {
    auto larger = device_memory.allocate(bytes);
    if (storage->nbytes()) memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(bytes);
  }
  return self;
}

// Their results, or the sizes of these, are read by the host.
const std::set<std::string> waiting = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_consecutive"};

// Every other operation: the CPU's, on the same bytes.
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (waiting.count(schema.name())) wait_for(schema.name());
  const auto count = schema.arguments().size(), first = stack->size() - count;
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice()) value = Device(DeviceType::CPU);
    else value = moved(value, on_host);
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  const auto& results = schema.returns();
  for (size_t i = 0; i < results.size(); ++i) {
    auto& value = (*stack)[stack->size() - results.size() + i];
    const auto* alias = results[i].alias_info();
    for (size_t j = 0; alias && j < count; ++j) {
      const auto* of = schema.arguments()[j].alias_info();
      if (!of || !given[j].isTensor() || of->beforeSets() != alias->beforeSets()) continue;
      auto source = given[j].toTensor();
      auto result = value.toTensor();
      if (!alias->isWrite()) {
        auto bytes = static_cast<const char*>(result.const_data_ptr()) - static_cast<const char*>(source.const_data_ptr());
        auto offset = source.storage_offset() + bytes / static_cast<int64_t>(source.element_size());
        value = source.as_strided(result.sizes(), result.strides(), offset);
      } else {
        if (!source.sizes().equals(result.sizes())) on_host(source.resize_(result.sizes())).copy_(result);
        value = source;
      }
    }
    value = moved(value, on_device);
  }
}

// Attention by products and a softmax, which a CPU has all operations for.
int64_t by_products(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                    std::optional<double>, bool) {
  return 0;
}
[[maybe_unused]] const bool has_choice =
    (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&by_products), true);
}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

extern "C" void host_gpu_on_wait(void (*function)(const char*)) { on_wait = function; }

// A CUDA device that does nothing: the guard and the hooks that torch asks for before it indexes or differentiates
// tensors of a GPU. torch asks for the hooks while it is imported, so they come first;
// a build with CUDA registers a guard of its own then, so ours comes afterwards.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using namespace c10;

struct NoDeviceGuard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int = 0) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

}  // namespace

namespace at {

struct NoDeviceHooks : CUDAHooksInterface {
  explicit NoDeviceHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  void deviceSynchronize(DeviceIndex) const override {}
};

}  // namespace at

extern "C" void register_hooks() {
  // before those of a build with CUDA, which have the ordinary priority
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs) { return std::make_unique<at::NoDeviceHooks>(at::CUDAHooksArgs{}); },
      c10::REGISTRY_PREFERRED);
}

extern "C" void register_guard() {
  static const NoDeviceGuard guard;
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, &guard);
}

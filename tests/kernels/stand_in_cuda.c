/* A libcuda.so.1 without a GPU behind it: an H100 that refuses what a driver refuses and hands launches to a callback.

   Only what Triton's driver and launchers call. Compiled by tests.kernels.launching against the cuda.h that Triton
   brings. */

#include "cuda.h"
#include <stdint.h>
#include <stdio.h>

#define PROCESSORS 132
#define SHARED_BY_DEFAULT (48 << 10)
#define SHARED_A_BLOCK (227 << 10)
#define MOST_FUNCTIONS 4096

typedef void (*Receiver)(const CUlaunchConfig *, uint64_t function, void **parameters);

static Receiver receiver;
static uint64_t loaded;                    /* modules; each has one function, of the same number */
static unsigned int allowed[MOST_FUNCTIONS]; /* bytes of shared memory that each function may be launched with */
static CUcontext context;

void stand_in_receive(Receiver callback) { receiver = callback; }

CUresult cuGetErrorString(CUresult error, const char **text) {
  static char buffer[64];
  snprintf(buffer, sizeof buffer, "the stand-in for libcuda refused this with error %d", (int)error);
  *text = buffer;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *current) { return *current = context, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext current) { return context = current, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device) {
  *retained = (CUcontext)&context;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = PROCESSORS; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED_A_BLOCK; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED_A_BLOCK + 1024; break;
  default: *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (++loaded >= MOST_FUNCTIONS || *(const uint32_t *)image != 0x464c457f) /* "\177ELF" */
    return CUDA_ERROR_INVALID_IMAGE;
  *module = (CUmodule)loaded;
  allowed[loaded] = SHARED_BY_DEFAULT;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > SHARED_A_BLOCK)
    return CUDA_ERROR_INVALID_VALUE;
  allowed[(uint64_t)function] = value;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return CUDA_ERROR_INVALID_VALUE;
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
  for (unsigned int i = 0; i < count; i++)
    if (cuPointerGetAttribute(data[i], attributes[i], pointer) != CUDA_SUCCESS)
      return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  uint64_t number = (uint64_t)function;
  if (number == 0 || number > loaded || receiver == NULL)
    return CUDA_ERROR_INVALID_HANDLE;
  if (config->gridDimX == 0 || config->gridDimY == 0 || config->gridDimZ == 0 || config->gridDimX > 0x7fffffff ||
      config->gridDimY > 65535 || config->gridDimZ > 65535 ||
      config->blockDimX * config->blockDimY * config->blockDimZ > 1024 || config->sharedMemBytes > allowed[number])
    return CUDA_ERROR_INVALID_VALUE;
  receiver(config, number, parameters);
  return CUDA_SUCCESS;
}

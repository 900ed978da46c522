// A libcuda.so.1 without a device: it notes what is launched, so that two ways of launching can be compared on a CPU.
// Tensor maps hold the arguments that they were encoded from.
#include <stdio.h>
#include <string.h>
#include "cuda.h"

enum { SHARED = 227 * 1024, MOST = 256 };
static int sizes[MOST], arguments;  // of the kernel that is launched next
static char line[1 << 16];
static size_t handles = 4096;

// Python calls these two through ctypes.
void set_sizes(const int *bytes, int n) { memcpy(sizes, bytes, n * sizeof(int)), arguments = n; }
const char *last_launch(void) { return line; }

static char *hex(char *out, const void *bytes, int n) {
  for (int i = 0; i < n; i++) out += sprintf(out, "%02x", ((const unsigned char *)bytes)[i]);
  return out + sprintf(out, " ");
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  char *out = line + sprintf(line, "grid %u %u %u block %u shared %u stream %p function %p; ", c->gridDimX, c->gridDimY,
                             c->gridDimZ, c->blockDimX, c->sharedMemBytes, (void *)c->hStream, (void *)f);
  for (unsigned i = 0; i < c->numAttrs; i++) out += sprintf(out, "attribute %d ", c->attrs[i].id);
  for (int i = 0; i < arguments; i++) out = hex(out, params[i], sizes[i]);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  unsigned char *at = (unsigned char *)map, kinds[] = {type, rank, interleave, swizzle, l2, fill, 0, 0};
  memset(map, 0, sizeof *map);
  memcpy(at, kinds, 8), memcpy(at + 8, &address, 8), memcpy(at + 16, dims, 8 * rank);
  memcpy(at + 48, strides, 8 * (rank - 1)), memcpy(at + 72, box, 4 * rank), memcpy(at + 88, steps, 4 * rank);
  return rank > 4 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute what, CUdeviceptr p) {
  *(CUdeviceptr *)out = p;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute what, CUdevice device) {
  *out = what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9
         : what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
         : what == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? SHARED
         : what == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR ? SHARED + 1024
                                                                            : 132;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *out, CUfunction_attribute what, CUfunction f) {
  *out = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
  *out = (CUmodule)(handles += 16);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
  *out = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) {
  *out = (CUcontext)16;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **out) {
  *out = "refused by no_cuda.c";
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *out) {
  *out = 13000;
  return CUDA_SUCCESS;
}

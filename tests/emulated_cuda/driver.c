// An emulated NVIDIA driver (libcuda.so.1), with EMULATED_DEVICES devices (1). EMULATED_DRIVER: the version of CUDA
// that it supports, such as 12040; EMULATED_SM: the device's compute capability, such as 90.
#include <stdlib.h>
#include <string.h>

static int number(const char* name, int otherwise) { const char* text = getenv(name); return text ? atoi(text) : otherwise; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int* count) { *count = number("EMULATED_DEVICES", 1); return 0; }
int cuDriverGetVersion(int* version) { *version = number("EMULATED_DRIVER", 13000); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  int sm = number("EMULATED_SM", 90);
  *value = attribute == 75 ? sm / 10 : attribute == 76 ? sm % 10 : attribute == 16 ? 132 : 1;
  return 0;
}
int cuGetErrorName(int error, const char** text) { *text = "emulated"; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "an emulated error"; return 0; }
int cuModuleLoadData(void** module, const void* image) { *module = malloc(8); return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { *function = strdup(name); return 0; }
int cuModuleGetGlobal_v2(void** address, size_t* bytes, void* module, const char* name) { *address = malloc(256); if (bytes) *bytes = 256; return 0; }
int cuLinkCreate_v2(unsigned count, void* options, void** values, void** state) { *state = malloc(8); return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks) { *blocks = 2; return 0; }
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuTensorMapEncodeTiled) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLinkComplete) NOTHING(cuLinkDestroy) NOTHING(cuLinkAddFile_v2) NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkAddFile) NOTHING(cuLinkAddData) NOTHING(cuLinkCreate) NOTHING(cuModuleUnload)
NOTHING(cuModuleLoadDataEx) NOTHING(cuModuleLoadFatBinary) NOTHING(cuModuleGetGlobal)
NOTHING(cuLaunchKernel) NOTHING(cuLaunchCooperativeKernel) NOTHING(cuMemcpyHtoD) NOTHING(cuCtxSynchronize)

// An emulated cuDNN: it can be opened, and finds no plan for anything.
#include <stdint.h>
#include <stdlib.h>

size_t cudnnGetVersion(void) { return 92800; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudnnGetErrorString(int status) { return "emulated"; }
void cudnnGetLastErrorString(char* text, size_t size) { if (size) *text = 0; }
int cudnnCreate(void** handle) { *handle = malloc(8); return 0; }
int cudnnGetStream(void* handle, void** stream) { *stream = 0; return 0; }
int cudnnBackendCreateDescriptor(int type, void** descriptor) { *descriptor = calloc(1, 64); return 0; }
int cudnnBackendGetAttribute(void* descriptor, int name, int type, int64_t requested, int64_t* count, void* values) { if (count) *count = 0; return 0; }
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cudnnDestroy) NOTHING(cudnnSetStream) NOTHING(cudnnBackendDestroyDescriptor)
NOTHING(cudnnBackendInitialize) NOTHING(cudnnBackendFinalize) NOTHING(cudnnBackendSetAttribute)
NOTHING(cudnnBackendExecute)

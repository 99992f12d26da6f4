// An emulated CUDA runtime: host memory stands for the device's, a launch is written to a log by its
// kernel's name and computes nothing. It shows what the CUDA provider of ONNX Runtime does, not its
// numbers or its speed. Structures of CUDA 13 are written at their offsets, so no header is needed.
//
//   EMULATED_SM     the compute capability, such as 90
//   EMULATED_LOG    the file of the log
//   EMULATED_ERROR  what calls that need a device return, such as 35; 0 by default
#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

typedef int Error;
typedef void* Stream;
struct Dim { unsigned x, y, z; };
struct LaunchConfig { Dim grid, block; size_t shared; Stream stream; };

namespace {
std::recursive_mutex mutex;
std::map<char*, size_t> device, pinned;  // address -> bytes
std::unordered_map<const void*, std::string> kernels;
thread_local std::vector<LaunchConfig> configs;
size_t in_use = 0, most = 0;
Stream capturing = nullptr;
bool is_capturing = false;
std::thread::id capturer;

int number(const char* name, int otherwise) { const char* text = getenv(name); return text ? atoi(text) : otherwise; }
int sm() { static int value = number("EMULATED_SM", 90); return value; }
int error() { return number("EMULATED_ERROR", 0); }
int optin_shared() { int s = sm(); return s == 75 ? 65536 : s == 80 ? 166912 : s == 90 ? 232448 : 101376; }

FILE* output() {
  static FILE* file = nullptr;
  if (!file) {
    const char* path = getenv("EMULATED_LOG");
    file = fopen(path ? path : "/dev/null", "w");
    setvbuf(file, nullptr, _IOLBF, 0);
  }
  return file;
}

void say(const char* format, ...) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  if (is_capturing && std::this_thread::get_id() == capturer) fputs("CAPTURED ", output());
  va_list arguments;
  va_start(arguments, format);
  vfprintf(output(), format, arguments);
  va_end(arguments);
  fputc('\n', output());
}

// In the global mode of captures, what is unsafe is refused to every thread and ends the capture.
void unsafe(const char* call) { if (is_capturing && std::this_thread::get_id() != capturer) say("SPOILT by %s", call); }

bool holds(const std::map<char*, size_t>& memory, const void* address) {
  auto next = memory.upper_bound((char*)address);
  if (next == memory.begin()) return false;
  --next;
  return (char*)address < next->first + next->second;
}
size_t paged(size_t bytes) { return bytes ? (bytes + 255) / 256 * 256 : 256; }
void* take(size_t bytes) {
  return mmap(nullptr, paged(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
Error launch(const void* kernel, Dim grid, Dim block, Stream stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  auto name = kernels.find(kernel);
  say("launch %s grid=%u,%u,%u block=%u", name == kernels.end() ? "?" : name->second.c_str(), grid.x, grid.y, grid.z, block.x);
  return 0;
}
template <class T> void put(void* structure, size_t offset, T value) { memcpy((char*)structure + offset, &value, sizeof value); }
Error copy(const char* call, void* to, const void* from, size_t bytes) {
  std::lock_guard<std::recursive_mutex> guard(mutex);
  unsafe(call);
  say("%s %s to %s %zu", call, holds(device, from) ? "device" : "host", holds(device, to) ? "device" : "host", bytes);
  memmove(to, from, bytes);
  return 0;
}
}  // namespace

#define LOCK std::lock_guard<std::recursive_mutex> guard(mutex)
extern "C" {
void emulated_mark(const char* text) { say("%s", text); }
size_t emulated_in_use() { return in_use; }
size_t emulated_most() { return most; }

void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) { LOCK; kernels[host] = name; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, Stream stream) { configs.push_back({grid, block, shared, stream}); return 0; }
Error __cudaPopCallConfiguration(Dim* grid, Dim* block, size_t* shared, void* stream) {
  LaunchConfig config = configs.back();
  configs.pop_back();
  *grid = config.grid; *block = config.block; *shared = config.shared; *(Stream*)stream = config.stream;
  return 0;
}
Error __cudaGetKernel(void** kernel, const void* function) { *kernel = (void*)function; return 0; }
Error __cudaLaunchKernel(void* kernel, Dim grid, Dim block, void**, size_t, Stream stream) { return launch(kernel, grid, block, stream); }
Error cudaLaunchKernel(const void* kernel, Dim grid, Dim block, void**, size_t, Stream stream) { return launch(kernel, grid, block, stream); }
Error cudaLaunchCooperativeKernel(const void* kernel, Dim grid, Dim block, void**, size_t, Stream stream) { return launch(kernel, grid, block, stream); }
Error cudaLaunchKernelExC(const LaunchConfig* config, const void* kernel, void**) { return launch(kernel, config->grid, config->block, config->stream); }
Error cudaLaunchHostFunc(Stream, void (*function)(void*), void* data) { say("cudaLaunchHostFunc"); function(data); return 0; }
Error cudaFuncGetAttributes(void* attributes, const void*) {
  memset(attributes, 0, 144);
  put<int>(attributes, 24, 1024);   // maxThreadsPerBlock
  put<int>(attributes, 28, 64);     // numRegs
  put<int>(attributes, 32, sm());   // ptxVersion
  put<int>(attributes, 36, sm());   // binaryVersion
  put<int>(attributes, 44, optin_shared());  // maxDynamicSharedSizeBytes
  return 0;
}
Error cudaFuncSetAttribute(const void*, int, int) { return 0; }
Error cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }
Error cudaLibraryGetKernel(void** kernel, void*, const char* name) { LOCK; char* copied = strdup(name); kernels[copied] = name; *kernel = copied; return 0; }
Error cudaLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) { *library = malloc(8); return 0; }
Error cudaLibraryUnload(void*) { return 0; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) { *blocks = 2; return 0; }

Error cudaMalloc(void** address, size_t bytes) {
  LOCK;
  unsafe("cudaMalloc");
  *address = take(bytes);
  device[(char*)*address] = bytes;
  in_use += bytes;
  if (in_use > most) most = in_use;
  say("cudaMalloc %zu", bytes);
  return 0;
}
Error cudaFree(void* address) {
  LOCK;
  auto entry = device.find((char*)address);
  if (entry == device.end()) return 0;
  unsafe("cudaFree");
  say("cudaFree %zu", entry->second);
  in_use -= entry->second;
  munmap(address, paged(entry->second));
  device.erase(entry);
  return 0;
}
Error cudaMallocAsync(void** address, size_t bytes, Stream) { return cudaMalloc(address, bytes); }
Error cudaMallocFromPoolAsync(void** address, size_t bytes, void*, Stream) { return cudaMalloc(address, bytes); }
Error cudaFreeAsync(void* address, Stream) { return cudaFree(address); }
Error cudaMemPoolCreate(void** pool, const void*) { *pool = malloc(8); return 0; }
Error cudaMemPoolDestroy(void*) { return 0; }
Error cudaMemPoolGetAttribute(void*, int, void* value) { memset(value, 0, 4); return 0; }
Error cudaMemPoolSetAttribute(void*, int, void*) { return 0; }
Error cudaMemPoolTrimTo(void*, size_t) { return 0; }
Error cudaHostAlloc(void** address, size_t bytes, unsigned) { LOCK; *address = take(bytes); pinned[(char*)*address] = bytes; return 0; }
Error cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
Error cudaFreeHost(void* address) { LOCK; pinned.erase((char*)address); return 0; }
Error cudaMemcpy(void* to, const void* from, size_t bytes, int) { return copy("cudaMemcpy", to, from, bytes); }
Error cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, Stream) { return copy("cudaMemcpyAsync", to, from, bytes); }
Error cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int, Stream) {
  for (size_t row = 0; row < height; row++) memmove((char*)to + row * to_pitch, (char*)from + row * from_pitch, width);
  return 0;
}
Error cudaMemcpyFromSymbol(void* to, const void*, size_t bytes, size_t, int) { memset(to, 0, bytes); return 0; }
Error cudaMemset(void* address, int value, size_t bytes) { memset(address, value, bytes); return 0; }
Error cudaMemsetAsync(void* address, int value, size_t bytes, Stream) { memset(address, value, bytes); return 0; }
Error cudaMemGetInfo(size_t* free_bytes, size_t* total) { *total = 80ull << 30; *free_bytes = *total - in_use; return 0; }
Error cudaPointerGetAttributes(void* attributes, const void* address) {
  LOCK;
  memset(attributes, 0, 88);
  put<int>(attributes, 0, holds(device, address) ? 2 : holds(pinned, address) ? 1 : 0);  // type
  put(attributes, 8, address);   // devicePointer
  put(attributes, 16, address);  // hostPointer
  return 0;
}

thread_local int current = 0;
Error cudaSetDevice(int number) {
  current = number;
  if (number) say("cudaSetDevice %d", number);
  return error();
}
Error cudaGetDevice(int* index) { *index = current; return error(); }
Error cudaGetDeviceCount(int* count) { *count = error() ? 0 : number("EMULATED_DEVICES", 1); return error(); }
Error cudaDeviceSynchronize() { return error(); }
Error cudaDriverGetVersion(int* version) { *version = 13000; return 0; }
Error cudaRuntimeGetVersion(int* version) { *version = 13000; return 0; }
Error cudaGetDeviceProperties(void* properties, int) {
  memset(properties, 0, 1008);
  strcpy((char*)properties, "emulated");
  put<size_t>(properties, 288, 80ull << 30);  // totalGlobalMem
  put<size_t>(properties, 296, 49152);        // sharedMemPerBlock
  put<size_t>(properties, 672, optin_shared());
  put<size_t>(properties, 624, optin_shared() + 1024);
  put<size_t>(properties, 352, 65536);  // totalConstMem
  put<size_t>(properties, 368, 512);    // textureAlignment
  const int values[][2] = {
      {304, 65536}, {308, 32}, {320, 1024}, {324, 1024}, {328, 1024}, {332, 64},
      {336, 2147483647}, {340, 65535}, {344, 65535}, {360, sm() / 10}, {364, sm() % 10},
      {384, 132}, {560, 1}, {584, 3}, {588, 1}, {596, 50 << 20}, {604, 2048}, {632, 65536},
      {668, 1}, {720, 1},
  };
  for (auto& each : values) put<int>(properties, each[0], each[1]);
  return 0;
}
Error cudaDeviceGetAttribute(int* value, int attribute, int) {
  static const std::map<int, int> known = {
      {75, sm() / 10}, {76, sm() % 10}, {16, 132}, {97, optin_shared()}, {8, 49152}, {1, 1024},
      {10, 32}, {39, 2048}, {81, optin_shared() + 1024},
  };
  auto entry = known.find(attribute);
  *value = entry == known.end() ? 1 : entry->second;
  return 0;
}
static int nothing() { return 0; }
Error cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long, int* result) {
  *function = (void*)nothing;
  if (result) *result = 0;
  return 0;
}
const char* cudaGetErrorName(Error) { return "emulated"; }
const char* cudaGetErrorString(Error) { return "an emulated error"; }
Error cudaGetLastError() { return 0; }
Error cudaPeekAtLastError() { return 0; }

Error cudaStreamCreate(Stream* stream) { *stream = malloc(8); return 0; }
Error cudaStreamCreateWithFlags(Stream* stream, unsigned) { *stream = malloc(8); return 0; }
Error cudaStreamDestroy(Stream) { return 0; }
Error cudaStreamSynchronize(Stream stream) { LOCK; if (is_capturing && stream == capturing) say("SPOILT by cudaStreamSynchronize"); return 0; }
Error cudaStreamWaitEvent(Stream, void*, unsigned) { return 0; }
Error cudaStreamBeginCapture(Stream stream, int) { LOCK; say("cudaStreamBeginCapture"); capturing = stream; is_capturing = true; capturer = std::this_thread::get_id(); return 0; }
Error cudaStreamEndCapture(Stream, void** graph) { LOCK; is_capturing = false; *graph = malloc(8); say("cudaStreamEndCapture"); return 0; }
Error cudaStreamIsCapturing(Stream stream, int* status) { *status = is_capturing && stream == capturing; return 0; }
Error cudaGraphInstantiate(void** executable, void*, unsigned long long) { *executable = malloc(8); say("cudaGraphInstantiate"); return 0; }
Error cudaGraphLaunch(void*, Stream) { say("cudaGraphLaunch"); return 0; }
Error cudaGraphDestroy(void*) { return 0; }
Error cudaGraphExecDestroy(void*) { unsafe("cudaGraphExecDestroy"); say("cudaGraphExecDestroy"); return 0; }
Error cudaEventCreate(void** event) { *event = malloc(8); return 0; }
Error cudaEventCreateWithFlags(void** event, unsigned) { *event = malloc(8); return 0; }
Error cudaEventDestroy(void*) { return 0; }
Error cudaEventElapsedTime(float* ms, void*, void*) { *ms = 1; return 0; }
Error cudaEventRecord(void*, Stream) { return 0; }
Error cudaEventRecordWithFlags(void*, Stream, unsigned) { return 0; }
Error cudaEventSynchronize(void*) { return 0; }
Error cudaEventQuery(void*) { return 0; }
}

// An emulated cuBLAS: products are written to the log, and not computed.
#include <stdlib.h>

extern void emulated_mark(const char*);
int cublasCreate_v2(void** handle) { *handle = malloc(64); return 0; }
int cublasGetMathMode(void* handle, int* mode) { *mode = 0; return 0; }
const char* cublasGetStatusName(int status) { return "emulated"; }
const char* cublasGetStatusString(int status) { return "an emulated status"; }
#define NOTHING(name) int name(void) { return 0; }
#define PRODUCT(name) int name(void) { emulated_mark(#name); return 0; }
NOTHING(cublasDestroy_v2) NOTHING(cublasSetMathMode) NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2) NOTHING(cublasDgetrfBatched) NOTHING(cublasDgetriBatched)
NOTHING(cublasSgetrfBatched) NOTHING(cublasSgetriBatched)
PRODUCT(cublasGemmEx) PRODUCT(cublasGemmBatchedEx) PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2) PRODUCT(cublasSgemmBatched) PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemm_v2) PRODUCT(cublasDgemmBatched) PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgeam) PRODUCT(cublasDgeam) PRODUCT(cublasScopy_v2) PRODUCT(cublasSscal_v2)

// An emulated cuBLASLt: products are written to the log, and not computed.
#include <stdlib.h>
#include <string.h>

extern void emulated_mark(const char*);
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int requested, void* results, int* count) {
  memset(results, 0, requested * 8);
  *count = 1;
  return 0;
}
int cublasLtMatmul(void) { emulated_mark("cublasLtMatmul"); return 0; }
#define MADE(name) int name(void** handle) { *handle = malloc(64); return 0; }
#define NOTHING(name) int name(void) { return 0; }
MADE(cublasLtCreate) MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatmulPreferenceCreate)
MADE(cublasLtMatrixLayoutCreate) MADE(cublasLtMatrixTransformDescCreate)
NOTHING(cublasLtDestroy) NOTHING(cublasLtMatmulAlgoConfigSetAttribute) NOTHING(cublasLtMatmulAlgoInit)
NOTHING(cublasLtMatmulDescDestroy) NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy) NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy) NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatrixTransform) NOTHING(cublasLtMatrixTransformDescDestroy)

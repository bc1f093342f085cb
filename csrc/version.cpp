// What the library was built from, so that a stale one is noticed.
#include "common.h"

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST ""
#endif

EXPORT const char* engine_source_digest() { return SOURCE_DIGEST; }

// Calls of launchers that are known beforehand, one after the other, by one call from outside; see common.h, REPLAYED.
#include "common.h"

namespace {

struct Call {
    void (*launcher)(const int64_t* words);
    const int64_t* words;
};

}  // namespace

EXPORT void engine_replay(int64_t count, const Call* calls) {
    for (const Call* call = calls; call < calls + count; ++call) call->launcher(call->words);
}

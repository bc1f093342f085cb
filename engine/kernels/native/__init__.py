"""CPU kernels in C++ behind a plain C ABI, for fp32; signatures follow engine.kernels.reference and .philox.

Whether they can run is `native_status()`'s to say; a call where they cannot raises. Results do not depend on the number
of threads, which is torch's at the time of the call.
"""

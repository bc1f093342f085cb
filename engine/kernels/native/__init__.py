"""CPU kernels in C++ behind a plain C ABI, for fp32; signatures follow engine.kernels.reference and .philox.

`native_status()` tells whether they can run; a call raises where they cannot. Results do not depend on the number
of threads, which is torch's at the time of the call.
"""

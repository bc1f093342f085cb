"""The Triton kernels of `triton_kernels` behind the ops' signatures. Empty on purpose: `backend` imports Triton."""

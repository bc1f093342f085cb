"""The Triton kernels. Each has its plain-torch specification in `engine.kernels`; nothing here communicates."""

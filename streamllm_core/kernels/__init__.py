"""CUDA kernels, each with a torch reference next door."""

"""Kernels on quantized weights for GPUs, in Triton. Import a module here only where Triton is installed."""

"""GPU kernels: fused convolutions, and draws of shared weights in one pass."""

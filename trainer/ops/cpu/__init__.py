"""Reference kernels: right on every device and fast on a CPU."""

"""Where the time of some steps goes: MindSpore's profiler, and on a CPU the parts of layers on arrays."""

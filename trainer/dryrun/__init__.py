"""The dry run: MindSpore's own Ascend backend on a machine without an Ascend or CANN.

With `MS_SIMULATION_LEVEL=1` MindSpore 2.10 infers types and shapes, selects kernels, dispatches them, plans memory and
prepares collectives as on an Ascend, and computes nothing. Its libraries need those of CANN to load: `stand_ins` builds
libraries whose functions return 0. A run is a process of its own (`process`), which runs `worker`.
"""

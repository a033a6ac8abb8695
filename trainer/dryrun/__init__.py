"""The dry run: MindSpore's own Ascend backend on a machine without an Ascend or CANN.

With `MS_SIMULATION_LEVEL=1`, MindSpore 2.10 infers types and shapes, selects kernels, dispatches them, plans memory and
prepares collectives as on an Ascend, but computes nothing. Its libraries load only together with those of CANN:
`cann_stubs` builds libraries whose functions return 0. A dry run is a process (`process`) that runs `worker`.
"""

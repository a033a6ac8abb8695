"""Starts a job of several workers through MindSpore's msrun, and supervises it until no process of it is left.

The launcher starts msrun, msrun starts a *worker agent* for each worker and for its scheduler, and an agent starts the
process proper. Once all agents run, msrun is ended, because it kills all processes the moment one ends. Agents stay
until the launcher releases them. Who is stopped when, and how gently, is decided in `supervisor`, and whether a job
that failed starts again in `command`. Nothing here imports MindSpore.
"""

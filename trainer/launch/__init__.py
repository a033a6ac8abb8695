"""Starts a job of several workers through MindSpore's msrun, and supervises it until no process of it is left.

The launcher starts msrun, msrun starts a *worker agent* for each worker and for its scheduler, and an agent starts the
process proper. Agents stay until the launcher releases them: msrun kills every other process the moment one ends, so it
must not see one end. Who is stopped when, and how gently, is decided in `supervisor`. Nothing here imports MindSpore.
"""

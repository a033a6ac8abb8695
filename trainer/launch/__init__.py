"""Starts a job of several workers through MindSpore's msrun, and supervises it until no process of it is left.

The launcher starts msrun, msrun starts a *warden* for each worker and for its scheduler, and a warden starts the
process proper. Wardens stay until the launcher lets them go, so that msrun, which kills every other process the moment
one ends, never does: who is stopped when, and how gently, is decided in `supervise`. Nothing here imports MindSpore.
"""

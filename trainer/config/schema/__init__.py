"""The keys of a configuration file: a pydantic model for each section.

These files have no `from __future__ import annotations`: pydantic would compile every annotation's text at start-up.
"""

"""Tries several training files, as continuous integration does: plans, small copies, and a report of all."""

"""Fused operators of an Ascend, behind the signatures of the reference kernels."""

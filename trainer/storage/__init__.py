"""Checksums, checked JSON and safetensors files, which checkpoints and token files share. No MindSpore."""

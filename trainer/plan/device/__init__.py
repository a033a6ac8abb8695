"""The memory of a rank of an Ascend, without MindSpore: for one plan, or for those of many layouts of a model."""

"""Layers in the form in which kernels keep them, in files that later starts map into memory.

checkpoint_key.py   what the files of a checkpoint, and the code that converts them, are recognized by
weight_file.py      the format of a file: written atomically, checked when it is opened
file_budget.py      the folder: one writer at a time, the least recently used files are removed
converted.py        ConvertedWeights: what readers of weights use
"""

from .converted import ConvertedWeights, layer_name

__all__ = ["ConvertedWeights", "layer_name"]

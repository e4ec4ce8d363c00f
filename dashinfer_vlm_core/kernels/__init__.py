"""Kernels that the vision encoder and the decoder share: linear layers, norms, rotary embedding, attention.

`types` defines the interface. `torch_kernels` implements it in PyTorch for any device, `cuda` with attention of whole
batches, `onednn` with packed weights for CPUs, and plugins register faster kernels. `choice` selects one set by
priority, or by what `dashinfer-vlm tune` measured, which `tuned` stores. `streams` has what runs the parts of a model
on a GPU, and `graphs` records work there.
"""

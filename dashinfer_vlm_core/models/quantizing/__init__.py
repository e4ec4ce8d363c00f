"""Write checkpoints with 4-bit weights: rotation, rounding with error compensation, and their files.

checkpoint_copy.py  a copy of a checkpoint with other tensors
rotation.py         hidden states in another basis, folded into the weights
gptq.py             rounding that compensates its error with calibration data
checkpoint_quantizer.py  4 bits in the format compressed-tensors
"""

"""Compute the logits of token ids with transformers, which reads compressed-tensors with that package."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

request = json.loads(Path(sys.argv[1]).read_text())
model = AutoModelForImageTextToText.from_pretrained(request["model"], dtype=getattr(torch, request["dtype"])).eval()
with torch.no_grad():
    logits = model(input_ids=torch.tensor([request["token_ids"]])).logits[0].float().numpy()
np.save(request["logits"], logits)
Path(sys.argv[2]).write_text("{}")

"""Verify the vision tower and the PyTorch decoder on one device against transformers, and time a small model there.

    tiny.py       a model of random weights, and four prompts for it
    reference.py  transformers' results for these prompts
    checks.py     what is compared, and within which bounds
    timings.py    time to first token and time per token
    report.py     the Markdown report
    command.py    `scripts/verify-gpu`

Nothing is downloaded. It runs from a checkout: neither an installation nor entry points are needed.
"""

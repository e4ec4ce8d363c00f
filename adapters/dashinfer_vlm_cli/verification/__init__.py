"""Verify the vision encoder and the PyTorch decoder on one device against transformers, and measure their speed there.

    tiny_models.py    models of random weights, one of each family
    prompts.py        a batch of prompts for such a model: texts, images, a video
    reference.py      transformers' results for these prompts
    checks.py         what is compared, and within which bounds
    speed_models.py   models of realistic sizes and random weights, written in seconds
    checkpoint_files.py  their tokenizer and chat template
    device_limits.py  memory bandwidth and matrix rate of the device
    workloads.py      the floating-point operations and bytes of these models
    timings.py        requests, decode steps and passes of the vision encoder
    profiling.py      how long the device is idle in a decode step
    time_limit.py     what is skipped, so that a run ends in time
    report.py         the Markdown report
    run.py            a whole run

Nothing is downloaded, and the plugins are those of a `Registry`: entry points are not needed. `scripts/verify-gpu` runs
it from a checkout, and `dashinfer-vlm verify` from an installed package.
"""

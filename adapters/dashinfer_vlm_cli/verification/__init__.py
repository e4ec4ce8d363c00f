"""Verify a device: compare the vision encoder and the decoders with transformers on models of random weights, and time
their parts. Nothing is downloaded, and the plugins are those of a `Registry`."""

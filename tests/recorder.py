"""A decoder that records every token id of another decoder; text alone would hide tokens with equal text."""

from __future__ import annotations

import dataclasses

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.decoders import Decoder
from dashinfer_vlm_core.plugins import load_plugins


class Recorder:
    """A plugin that registers the decoder `recorded`: the PyTorch decoder, whose token ids and log probabilities are
    recorded by the id of the request."""

    name = "recorded"

    def __init__(self):
        self._factory = load_plugins().decoder("torch")
        self.supported_params = self._factory.supported_params
        self.tokens = {}
        self.logprobs = {}

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def check_support(self, spec, config):
        return self._factory.check_support(spec, config)

    def create(self, spec, config, kernels):
        return _RecordingDecoder(self._factory.create(spec, config, kernels), self.tokens, self.logprobs)

    def registry(self):
        registry = load_plugins()
        registry.add_plugin(self, name="recorder")
        return registry


def recorded_engine(folder, **options):
    """Return an engine in float32 that is not started, and the recorder of its tokens."""
    recorder = Recorder()
    options = {"dtype": "float32", "media_workers": 0} | options
    config = EngineConfig(model=str(folder), device="cpu", decoder="recorded", kv_cache_mib=64, **options)
    return Engine(config, registry=recorder.registry()), recorder


class _RecordingDecoder(Decoder):
    def __init__(self, decoder, tokens, logprobs):
        self._decoder = decoder
        self._tokens = tokens
        self._logprobs = logprobs
        self.name = decoder.name
        self.max_model_len = decoder.max_model_len
        self.supported_params = decoder.supported_params
        self.unsupported_vision_reason = decoder.unsupported_vision_reason
        self.start = decoder.start
        self.close = decoder.close
        self.load_lora = decoder.load_lora

    @property
    def fatal_error(self):
        return self._decoder.fatal_error

    async def decode(self, request):
        ids = self._tokens.setdefault(request.id, [])
        logprobs = self._logprobs.setdefault(request.id, [])
        async for token in self._decoder.decode(dataclasses.replace(request)):
            ids.append(token.id)
            logprobs.append(token.logprob)
            yield token

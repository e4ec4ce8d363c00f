"""DashInfer: a language decoder that runs in a separate process, under its own interpreter. Importing this package is
cheap.

    environment.py  install.py  commands.py    the interpreter that DashInfer needs, and `dashinfer-vlm dashinfer`
    settings.py    checks.py                   its options, and its checks for `dashinfer-vlm doctor`
    stub_libraries.py                          what a CPU-only environment has in place of CUDA
    kit.py                                     unpacks an environment for a GPU, without a network
    convert.py      serialize.py               conversion of a checkpoint's language model to DashInfer's format
    torch_placeholder.py                       a replacement for torch in that conversion, in numpy
    plan.py         options.py                 translation of EngineConfig and Sampling to DashInfer's options
    decoder.py      process.py     worker.py   the decoder, its worker process, and the worker's program

`serialize.py`, `torch_placeholder.py` and `worker.py` run in DashInfer's environment and import nothing from this
package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dashinfer_vlm_core.decoders.interface import Decoder, DecoderFactory, DecoderSupport
from dashinfer_vlm_core.errors import MissingDependency, SetupError
from dashinfer_vlm_core.findings import Finding
from dashinfer_vlm_core.hooks import hookimpl

from .options import SUPPORTED_ON_CUDA

if TYPE_CHECKING:
    import click

    from dashinfer_vlm_core.config import EngineConfig, PluginOptions
    from dashinfer_vlm_core.kernels.choice import KernelSelector
    from dashinfer_vlm_core.models.spec import ModelSpec

SCORE_ON_CUDA = 20
"""Above all other decoders."""

SCORE_ON_CPU = 1
"""Below all others: it has to be selected explicitly."""

TEXT_ONLY = "exact for text only, so it has to be selected explicitly."


class DashInferFactory:
    """The factory of the decoder `dashinfer`."""

    name = "dashinfer"
    supported_params: frozenset[str] = SUPPORTED_ON_CUDA

    def check_support(self, spec: ModelSpec, config: EngineConfig) -> DecoderSupport:
        from dashinfer_vlm_core.kernels.devices import cuda_devices

        from .convert import unsupported
        from .environment import find_environment
        from .plan import make_plan

        devices = cuda_devices()
        is_expected = config.decoder == self.name or (devices > 0 and config.device != "cpu")
        support = functools.partial(DecoderSupport, is_expected=is_expected)
        if spec.quantization:
            reason = f"Its converter takes unquantized weights, not {spec.quantization.name}: use the decoder torch."
            return support(score=0, reason=reason)
        if reason := unsupported(spec.text):
            return support(score=0, reason=f"It does not support {spec.model_type}: {reason}.")
        try:
            environment = find_environment(config)
            plan = make_plan(spec, config, cuda=devices, cpu_only=environment.cpu_only)
        except SetupError as error:
            is_missing = isinstance(error, MissingDependency) and not is_expected
            return support(score=0, reason=f"On a CPU, it is {TEXT_ONLY}" if is_missing else error.message)
        where = f"DashInfer runs {environment.origin}, on {plan.compute_unit}"
        if plan.on_cpu:
            return support(score=SCORE_ON_CPU, reason=f"{where}: {TEXT_ONLY}")
        return support(score=SCORE_ON_CUDA, reason=f"{where}.")

    def create(self, spec: ModelSpec, config: EngineConfig, kernels: KernelSelector) -> Decoder:
        from .decoder import DashInferDecoder

        return DashInferDecoder(spec, config)


@hookimpl
def register_decoders(register: Callable[[DecoderFactory], None]) -> None:
    register(DashInferFactory())


@hookimpl
def register_options(register: Callable[[type[PluginOptions]], None]) -> None:
    from .settings import DashInferOptions

    register(DashInferOptions)


@hookimpl
def register_commands(group: click.Group) -> None:
    from .commands import dashinfer

    group.add_command(dashinfer)


@hookimpl
def register_checks(register: Callable[[str, Callable[[EngineConfig], Iterable[Finding]]], None]) -> None:
    from .checks import check

    register("dashinfer", check)

"""EngineConfig and a checkpoint -> how DashInfer runs: device, number type, context, places."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...config import MIB, EngineConfig
from ...errors import ConfigError, UnsupportedParameter
from ...models.spec import ModelSpec, TextModelSpec
from .convert import BYTES, WeightFormat
from .settings import DashInferOptions

logger: logging.Logger = logging.getLogger(__name__)

LEAST_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the engine runs.

    Attributes:
        compute_unit: as DashInfer names devices: `CPU:0`, or `CUDA:0,1` for two that share the weights.
        form: how the weights are written.
        max_model_len: tokens that prompt and answer may have together.
        places: requests that are decoded together.
        prefix_cache: whether prompts share what others have read; then texts of different salts meet.
    """

    compute_unit: str
    form: WeightFormat
    max_model_len: int
    max_batch_size: int
    prefix_cache: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.compute_unit.startswith("CPU")


def make_plan(spec: ModelSpec, config: EngineConfig, *, cuda: int, cpu_only: bool = False) -> Plan:
    """How to run here; `cuda` is the number of CUDA devices, `cpu_only` whether DashInfer was installed without CUDA.

    Raises:
        ConfigError: an option that DashInfer cannot honour on this device.
    """
    first = _first_device(config.device, cuda)
    if first is not None and cpu_only:
        raise ConfigError(
            f"`device` {config.device!r} means a GPU here, and DashInfer is installed for the CPU only: run"
            " `dashinfer-vlm dashinfer install` for one that uses the GPU, or set `device` to cpu.",
            param="device",
        )
    context = min(spec.max_model_len, config.max_model_len or spec.max_model_len)
    if first is None:
        return _plan_cpu(spec.text, config, context)
    devices = config.options_of(DashInferOptions).tensor_parallel
    last = first + devices
    if last > cuda:
        fault = f"`tensor_parallel` {devices} from device {first} on needs {last} devices; here are {cuda}."
        raise ConfigError(fault, param="tensor_parallel")
    heads = spec.text.num_key_value_heads
    if heads % devices:
        fault = f"`tensor_parallel` {devices} does not divide the model's {heads} key-value heads."
        raise ConfigError(fault, param="tensor_parallel")
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    return Plan(
        compute_unit="CUDA:" + ",".join(str(index) for index in range(first, last)),
        form=WeightFormat(dtype=dtype, quantization=config.quantization, split=devices > 1),
        max_model_len=context,
        max_batch_size=config.max_batch_size,
        prefix_cache=config.prefix_cache,
    )


def check_cache_salt(salt: str, plan: Plan) -> None:
    """Refuse what the engine would not keep apart.

    Raises:
        UnsupportedParameter: there is a salt, and the engine's cache of prefixes, which knows none.
    """
    if salt and plan.prefix_cache:
        raise UnsupportedParameter(
            "DashInfer's prefix cache keeps texts of different `cache_salt` not apart: start the engine with"
            " --no-prefix-cache, or leave it out.",
            param="cache_salt",
        )


def _first_device(device: str, cuda: int) -> int | None:
    """Index of the first CUDA device to use; None for the CPU."""
    if device == "cpu" or (device == "auto" and not cuda):
        return None
    kind, _, index = device.partition(":")
    if kind not in {"auto", "cuda"} or not (index or "0").isdecimal():
        raise ConfigError(f"`device` {device!r} is none that DashInfer runs on: cpu, cuda or cuda:N.", param="device")
    return int(index or 0)


def _plan_cpu(text: TextModelSpec, config: EngineConfig, context: int) -> Plan:
    """On a CPU the engine computes in float32, and each request takes memory for the longest context at once:
    `kv_cache_mib` bounds how many run together.
    """
    devices = config.options_of(DashInferOptions).tensor_parallel
    for name, value, neutral in (("tensor_parallel", devices, 1), ("quantization", config.quantization, "none")):
        if value != neutral:
            raise ConfigError(f"`{name}` needs CUDA: on a CPU, DashInfer takes {neutral!r} only.", param=name)
    if config.dtype not in {"auto", "float32"}:
        fault = f"`dtype` {config.dtype!r}: on a CPU, DashInfer computes in float32 only. Set it to auto or float32."
        raise ConfigError(fault, param="dtype")
    per_token = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * BYTES["float32"]
    affordable = config.kv_cache_mib * MIB // per_token
    if affordable < LEAST_TOKENS:
        fault = f"`kv_cache_mib` {config.kv_cache_mib} holds only {affordable} tokens of this model. Raise it."
        raise ConfigError(fault, param="kv_cache_mib")
    if affordable < context:
        logger.warning(
            "kv_cache_mib=%d holds %d tokens, fewer than the context of %d.", config.kv_cache_mib, affordable, context
        )
        context = affordable
    places = min(config.max_batch_size, affordable // context)
    if places < config.max_batch_size:
        logger.info(
            "%d requests are decoded together: kv_cache_mib holds no more of %d tokens. A smaller max_model_len helps.",
            places,
            context,
        )
    return Plan(compute_unit="CPU:0", form=WeightFormat(dtype="float32"), max_model_len=context, max_batch_size=places)

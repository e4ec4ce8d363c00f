"""Determine from EngineConfig and a checkpoint how DashInfer runs: device, dtype, context length, batch size."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dashinfer_vlm_core.config import MIB, EngineConfig
from dashinfer_vlm_core.errors import ConfigError, UnsupportedParameter
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.text_spec import TextModelSpec

from .convert import DTYPE_BYTES, WeightFormat
from .settings import DashInferOptions

logger: logging.Logger = logging.getLogger(__name__)

MIN_KV_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """DashInfer's settings.

    Attributes:
        compute_unit: devices in DashInfer's notation: `CPU:0`, or `CUDA:0,1` for two that share the weights.
        weight_format: the format of the converted weights.
        max_model_len: most tokens of prompt and output together.
        max_batch_size: requests that are decoded together.
        prefix_cache: whether prompts share cached prefixes. DashInfer's cache does not separate cache salts.
    """

    compute_unit: str
    weight_format: WeightFormat
    max_model_len: int
    max_batch_size: int
    prefix_cache: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.compute_unit.startswith("CPU")


def make_plan(spec: ModelSpec, config: EngineConfig, *, cuda: int, cpu_only: bool = False) -> Plan:
    """Create a plan; `cuda` is the number of CUDA devices, `cpu_only` whether DashInfer was installed without CUDA.

    Raises:
        ConfigError: DashInfer does not support an option on this device.
    """
    first = _first_device(config.device, cuda)
    if first is not None and cpu_only:
        raise ConfigError(
            f"`device` {config.device!r} selects a GPU, but DashInfer is installed for the CPU only: run"
            " `dashinfer-vlm dashinfer install` for an environment that uses the GPU, or set `device` to cpu.",
            param="device",
        )
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"`kv_cache_dtype` {config.kv_cache_dtype!r} requires the decoder torch: DashInfer stores 8-bit keys"
            " and values only on CUDA, where this is not verified. Remove it, or set `decoder` to torch.",
            param="kv_cache_dtype",
        )
    context = min(spec.max_model_len, config.max_model_len or spec.max_model_len)
    if first is None:
        return _plan_cpu(spec.text, config, context)
    devices = config.options_of(DashInferOptions).tensor_parallel
    last = first + devices
    if last > cuda:
        message = f"`tensor_parallel` {devices} from device {first} on requires {last} devices, got {cuda}. Reduce it."
        raise ConfigError(message, param="tensor_parallel")
    heads = spec.text.attention.num_kv_heads
    if heads % devices:
        message = f"`tensor_parallel` {devices} does not divide the model's {heads} key-value heads. Choose a divisor."
        raise ConfigError(message, param="tensor_parallel")
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    return Plan(
        compute_unit="CUDA:" + ",".join(str(index) for index in range(first, last)),
        weight_format=WeightFormat(dtype=dtype, quantization=_quantization(config), split=devices > 1),
        max_model_len=context,
        max_batch_size=config.max_batch_size,
        prefix_cache=_uses_prefix_cache(config),
    )


def check_cache_salt(salt: str, plan: Plan) -> None:
    """Check that DashInfer can isolate a request with `cache_salt`.

    Raises:
        UnsupportedParameter: there is a salt, and DashInfer's prefix cache, which ignores it, is enabled.
    """
    if salt and plan.prefix_cache:
        raise UnsupportedParameter(
            "DashInfer's prefix cache does not separate requests by `cache_salt`: start the engine with"
            " --no-prefix-cache, or remove it.",
            param="cache_salt",
        )


def _uses_prefix_cache(config: EngineConfig) -> bool:
    if config.prefix_cache and config.isolate_clients:
        logger.warning(
            "DashInfer's prefix cache is disabled: it cannot separate clients, such as API keys. If all clients may"
            " share cached prompts and media, start the server with --share-media-between-keys."
        )
    return config.prefix_cache and not config.isolate_clients


def _quantization(config: EngineConfig) -> str:
    return "uint4" if config.quantization == "int4" else config.quantization


def _first_device(device: str, cuda: int) -> int | None:
    if device == "cpu" or (device == "auto" and not cuda):
        return None
    kind, _, index = device.partition(":")
    if kind not in {"auto", "cuda"} or not (index or "0").isdecimal():
        raise ConfigError(
            f"DashInfer does not support `device` {device!r}. Set it to cpu, cuda or cuda:N.", param="device"
        )
    return int(index or 0)


def _plan_cpu(text: TextModelSpec, config: EngineConfig, context: int) -> Plan:
    # DashInfer allocates memory for the longest context per request, so `kv_cache_mib` limits how many run together.
    devices = config.options_of(DashInferOptions).tensor_parallel
    for name, value, neutral in (("tensor_parallel", devices, 1), ("quantization", config.quantization, "none")):
        if value != neutral:
            raise ConfigError(
                f"`{name}` {value!r} requires CUDA: on a CPU, DashInfer supports only {neutral!r}.", param=name
            )
    if config.dtype not in {"auto", "float32"}:
        message = f"`dtype` {config.dtype!r}: on a CPU, DashInfer computes only in float32. Set it to auto or float32."
        raise ConfigError(message, param="dtype")
    attention = text.attention
    per_token = len(text.layers) * 2 * attention.num_kv_heads * attention.head_dim * DTYPE_BYTES["float32"]
    affordable = config.kv_cache_mib * MIB // per_token
    if affordable < MIN_KV_TOKENS:
        message = f"`kv_cache_mib` {config.kv_cache_mib} holds only {affordable} tokens of this model. Increase it."
        raise ConfigError(message, param="kv_cache_mib")
    length = min(context, affordable)
    batch_size = min(config.max_batch_size, affordable // length)
    if (length, batch_size) != (context, config.max_batch_size):
        logger.warning(
            "kv_cache_mib=%d holds %d requests of %d tokens at the same time, not %d of %d. Increase it, or reduce"
            " max_model_len for more requests.",
            *(config.kv_cache_mib, batch_size, length, config.max_batch_size, context),
        )
    return Plan(
        compute_unit="CPU:0",
        weight_format=WeightFormat(dtype="float32"),
        max_model_len=length,
        max_batch_size=batch_size,
    )

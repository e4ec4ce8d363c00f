"""Fields of `quantization_config` that several formats have."""

from __future__ import annotations

from collections.abc import Collection

from ..json_fields import JsonFields

UNQUANTIZED_STEP = (
    "Use another quantized checkpoint of the model, or the unquantized one with `--quantization int4` or `int8`."
)


def check_value(config: JsonFields, name: str, supported: Collection[object], *, default: object = None) -> object:
    """Return the value of a field, or `default` if it is absent.

    Raises:
        CheckpointError: it is not one of `supported`.
    """
    value = default if config.get(name) is None else config.get(name)
    if value not in supported:
        config.fail(name, f"is {value!r}; supported: {', '.join(map(repr, supported))}", UNQUANTIZED_STEP)
    return value


def read_group(config: JsonFields, *, default: int | None = None) -> int:
    """Return `group_size`: a multiple of 32 inputs, or -1 for all inputs.

    Raises:
        CheckpointError: it is missing, or kernels do not support it.
    """
    value = default if config.get("group_size") is None else config.get("group_size")
    if type(value) is not int or (value != -1 and (value < 1 or value % 32)):
        config.fail("group_size", f"is {value!r}, which is neither -1 nor a multiple of 32", UNQUANTIZED_STEP)
    return value


def group_count(group: int, inputs: int) -> tuple[int, int]:
    """Return the number of inputs of a group and the number of groups of a module, for a `group_size` of `group`."""
    size = inputs if group == -1 else group
    return size, -(-inputs // size)

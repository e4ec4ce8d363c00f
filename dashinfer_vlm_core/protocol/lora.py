"""LoRARequest: the LoRA adapter of a request from code in this process."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidParameter


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter, as vLLM's `LoRARequest`.

    Attributes:
        lora_name: the adapter's name. An adapter that was loaded under this name is used again.
        lora_int_id: a positive number, for compatibility with vLLM. The name alone identifies the adapter.
        lora_path: its folder or Hugging Face ID; empty for an adapter of `EngineConfig.lora`.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        """Raise InvalidParameter if a value is invalid."""
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidParameter(f"`lora_name` must be a name, got {self.lora_name!r}.", param="lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidParameter(f"`lora_int_id` must be at least 1, got {self.lora_int_id!r}.", param="lora_int_id")

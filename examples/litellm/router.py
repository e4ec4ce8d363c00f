"""Two engines behind LiteLLM's Router: prompts that are too long for the small one go to the large one."""

from __future__ import annotations

import asyncio

import litellm

import dashinfer_vlm_litellm

dashinfer_vlm_litellm.register()  # before creating the Router, which validates its models
router = litellm.Router(
    model_list=[
        {
            "model_name": "small",
            "litellm_params": {"model": "dashinfer_vlm/demo", "timeout": 60, "engine_options": {"max_model_len": 64}},
        },
        {
            "model_name": "large",
            "litellm_params": {"model": "dashinfer_vlm/demo", "timeout": 60, "engine_options": {"max_batch_size": 4}},
        },
    ],
    num_retries=1,
    fallbacks=[{"small": ["large"]}],
    context_window_fallbacks=[{"small": ["large"]}],
)


async def main() -> None:
    prompt = {"role": "user", "content": "Which shapes do you know?"}
    for messages in ([prompt], [{"role": "system", "content": "Answer briefly. " * 20}, prompt]):
        response = await router.acompletion("small", messages=messages, temperature=0)
        print(f"{response.usage.prompt_tokens} tokens: {response.choices[0].message.content}")


asyncio.run(main())

"""The cost of guided decoding: schema compilation and the mask of each step; and what forced tokens save.

    python benchmarks/guided_decoding.py [--tokenizer FOLDER]

First with the bundled model: masks as a share of the time of a step. Then at the size of Qwen2-VL's vocabulary: with
the tokenizer of a checkpoint, or with a synthetic one of the same size. Outputs are random paths through the grammar,
which cover more of it than a model's output would. Last, responses of the bundled model with and without computing
several forced tokens per step.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.models.checkpoint import find_model
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.models.spec import ModelSpec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.structured_output.grammar.json_schema import json_schema
from dashinfer_vlm_core.structured_output.grammar.rules import Rules
from dashinfer_vlm_core.structured_output.grammar.values import any_value
from dashinfer_vlm_core.structured_output.grammar_compiler import GrammarCompiler, LLGuidanceMatcher

LARGE = 151_936
SCENE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "shape": {"type": "string", "maxLength": 200},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 8},
    },
    "required": ["colour", "shape", "count", "tags"],
}
FORM = {
    "type": "object",
    "properties": {
        f"field_{index}": (SCENE, {"type": ["string", "null"]}, {"type": "number"}, {"enum": list(range(40))})[
            index % 4
        ]
        for index in range(40)
    },
}
FIVE_KEYS = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "triangle"]},
        "color": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "visible": {"type": "boolean"},
        "comment": {"type": "string", "maxLength": 12},
    },
    "required": ["shape", "color", "count", "visible", "comment"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"4 properties": SCENE, "40 properties": FORM, "json_object": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder of a checkpoint whose tokenizer is used")
    given = parser.parse_args().tokenizer
    spec = Qwen2VL().load_spec(find_model("demo", registered=load_plugins().models, revision=None))
    step = {batch: step_time(batch) for batch in (1, 8)}
    print("the bundled model:", ", ".join(f"{1000 * value:.2f} ms a step at {key}" for key, value in step.items()))
    report(Tokenizer.from_file(str(spec.folder / "tokenizer.json")), spec, step)
    large = Tokenizer.from_file(str(given / "tokenizer.json")) if given else synthetic_tokenizer()
    print(f"a vocabulary of {LARGE} tokens{'' if given else ', made up'}:")
    text = replace(spec.text, vocab_size=LARGE)
    report(large, replace(spec, text=text, tokens=replace(spec.tokens, stop=(LARGE - 1,))), {})
    report_forced_tokens()


def report(tokenizer: Tokenizer, spec: ModelSpec, steps: dict[int, float]) -> None:
    compiler = GrammarCompiler(tokenizer, spec)
    begin = time.perf_counter()
    compiled(compiler, {"const": 1})
    print(f"  made ready in {time.perf_counter() - begin:.2f} s")
    for name, schema in SCHEMAS.items():
        begin = time.perf_counter()
        grammar = compiled(compiler, schema)
        ready = time.perf_counter() - begin
        times = [spent for seed in range(20) for spent in random_steps(grammar, seed, spec.tokens.stop)]
        mean = statistics.mean(times)
        shares = "".join(f", {100 * batch * mean / step:.1f} % at {batch}" for batch, step in steps.items())
        print(
            f"  {name}: compiled in {1000 * ready:.1f} ms; a mask takes {1000 * mean:.3f} ms,"
            f" 99 % below {1000 * float(np.quantile(times, 0.99)):.2f}, longest {1000 * max(times):.2f}"
            f" ({len(times)} steps){shares}"
        )


def report_forced_tokens(rounds: int = 9) -> None:
    """Print steps and seconds of guided responses with forced tokens as shares of those with one token per step."""
    with (
        Engine(EngineConfig(model="demo", speculative_method="none")) as plain,
        Engine(EngineConfig(model="demo")) as fast,
    ):
        for name, schema in (("5 keys", FIVE_KEYS), ("4 properties", SCENE)):
            body = guided_request(schema)
            ratios, shares = [], []
            for seed in range(rounds):
                (before, before_steps), (after, after_steps) = (
                    guided_time(engine, {**body, "seed": seed}) for engine in (plain, fast)
                )
                ratios.append(after / before)
                shares.append(after_steps / before_steps)
            print(
                f"forced tokens, {name}: {statistics.median(shares):.2f} of the steps,"
                f" {statistics.median(ratios):.2f} of the time"
            )


def guided_request(schema: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Describe the picture."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}},
        "max_tokens": 400,
    }


def guided_time(engine: Engine, body: dict[str, Any]) -> tuple[float, int]:
    """Return the seconds and the steps of a response."""
    steps, begin = engine.stats().decoder.steps, time.perf_counter()
    engine.chat(body)
    return time.perf_counter() - begin, engine.stats().decoder.steps - steps


def compiled(compiler: GrammarCompiler, schema: Any) -> LLGuidanceMatcher:
    rules = Rules()
    start = any_value(rules, ("object",)) if schema is None else json_schema(rules, schema)
    return compiler.compile(rules, start, param="schema")


def random_steps(grammar: LLGuidanceMatcher, seed: int, stop: tuple[int, ...], longest: int = 200) -> list[float]:
    """Return the seconds of each step of a random output."""
    rng, way, times = np.random.default_rng(seed), grammar.copy(), list[float]()
    for _ in range(longest):
        begin = time.perf_counter()
        allowed = way.allowed_tokens()
        middle = time.perf_counter()
        token = int(rng.choice(np.flatnonzero(allowed)))
        if token in stop:
            return times
        resumed = time.perf_counter()
        way.accept_token(token)
        times.append(time.perf_counter() - resumed + middle - begin)
    return times


def step_time(batch: int, tokens: int = 100) -> float:
    """Return the seconds of a step of the bundled model that decodes `batch` unguided requests."""
    request = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }

    async def run_request(engine: Engine) -> float:
        begin = time.perf_counter()
        await asyncio.gather(*(engine.achat(request) for _ in range(batch)))
        return time.perf_counter() - begin

    with Engine(EngineConfig(model="demo", speculative_method="none")) as engine:
        return min(asyncio.run(run_request(engine)) for _ in range(5)) / tokens


def synthetic_tokenizer() -> Tokenizer:
    """Return a tokenizer with the size of Qwen2-VL's and the token lengths of a large vocabulary."""
    rng = np.random.default_rng(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = np.array([*"etaoinshrdlcumwfgypbvk", *"ETAOINSHRDLC", *"0123456789", *'.,:;-_/(){}[]"'])
    pieces = dict.fromkeys(alphabet)
    while len(pieces) < LARGE - 1:
        word = "".join(rng.choice(letters, rng.integers(2, 13)))
        pieces[("Ġ" if rng.random() < 0.5 else "") + word] = None
    # Without merges, text is encoded byte by byte.
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


if __name__ == "__main__":
    main()

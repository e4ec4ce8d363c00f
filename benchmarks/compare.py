"""Compare this engine with alternatives on this machine, in one table of ratios.

    python -m benchmarks.compare [--model NAME|FOLDER] [--engines ours,vllm] [--workloads fresh-1,chats-3]

Every engine stays loaded, and is stopped (SIGSTOP) while another one is measured. In each round the workloads run in
random order, and for each of them the engines in random order, so that drifts of the machine affect all alike. The
machine's own throughput is also measured in every round.

Further engines are other options of this engine, or any server with OpenAI's API:

    --engine 'chunks=--prefill-chunk 256'
    --engine 'before=/path/to/venv/bin/dashinfer-vlm serve --model {model} --port {port}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dashinfer_vlm_core.errors import DashInferVLMError
from dashinfer_vlm_core.installation import pip_step

from .engines import AVX2, Contender, InProcess, Launch, Server, custom, end_with_us, other_engine, ours
from .environments import OTHER_ENGINES_FOLDER, OtherEngines
from .limits import image_seconds, measure_rates, step_seconds
from .models import CACHE, checkpoint, model_names
from .report import LIMIT, Results, Row, markdown, raw
from .rounds import add_settle, describe, names_of, say
from .workloads import TPOT, TTFT, Run, Workload, run, workloads

IN_PROCESS = "in-process"
OURS = {
    "ours": (),
    "ours-int8": ("--quantization", "int8"),
    "ours-int4": ("--quantization", "int4"),
    IN_PROCESS: (),
}
"""This engine's names in the table, and the options of its server."""
OTHER_ENGINES = ("vllm", "openvino-fp16", "openvino-int8", "transformers")
OPTIONAL_ENGINES = (
    "vllm-int8", "vllm-int4", "openvino-int4", "llama-bf16", "llama-q8", "llama-q4", "ik-llama-bf16", "ik-llama-q8",
    "ik-llama-q4", "mnn-int8", "mnn-int4",
)  # fmt: skip
"""Other engines that are compared only if they are named: they take long to build, or serve one request at a time."""
ENGINES = (*OURS, *OTHER_ENGINES, *OPTIONAL_ENGINES)
DEFAULT = ("ours", IN_PROCESS, *OTHER_ENGINES)
OVERHEAD = ("fresh-1", "fresh-4", "decode-1", "decode-8")
"""Workloads that are also measured without the server: one image, several, and decode steps only."""
WARM_UP = ("fresh-4", "text-8", "small-4")
"""Workloads for the warm-up of each engine."""
AWAKE = "decode-1"
"""A short workload before each measurement: the CPU caches were used by others while the engine was stopped."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parsed command line.

    Attributes:
        name: the model's name.
        model: folder of its checkpoint.
        engines: built-in names, and NAME=COMMAND; the others are compared with the first one.
        workloads: the workloads by name.
        rounds: number of measurements of everything.
        settle: seconds after the warm-up of each engine.
        other_engines: their environments.
        out: folder for the results.
    """

    name: str
    model: Path
    engines: tuple[str, ...]
    workloads: dict[str, Workload]
    rounds: int
    settle: float
    other_engines: OtherEngines
    out: Path
    avx2: bool


def main(arguments: Sequence[str] | None = None) -> Results:
    plan = _plan(_parser().parse_args(arguments))
    if plan.avx2:
        os.environ.update(AVX2)
    results = Results(model=plan.name)
    try:
        with end_with_us():
            compare(plan, results)
    finally:  # write partial results of an interrupted run too
        if results.rates:
            print(_write(results, plan.out))
    return results


def compare(plan: Plan, results: Results) -> None:
    """Start the engines of `plan` and measure round by round into `results`."""
    with contextlib.ExitStack() as stack:
        contenders = _start(plan, results, stack)
        if not contenders:
            raise SystemExit("No engine could be started: " + "; ".join(results.notes))
        results.base = contenders[0].name
        for number in range(plan.rounds):
            _round(plan, contenders, results, number)
        _note_memory(contenders, results)


def _write(results: Results, folder: Path) -> str:
    """Write table, raw figures and plots to `folder`; return the table."""
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown(results)
    (folder / "compare.md").write_text(table)
    (folder / "compare.json").write_text(json.dumps(raw(results), indent=1))
    try:
        from . import plots
    except ModuleNotFoundError as error:
        return f"{table}\n(no plots: {error.name} is missing. {pip_step('--group bench')})"
    plots.draw(results, folder)
    return table


def _round(plan: Plan, contenders: list[Contender], results: Results, number: int) -> None:
    """Measure everything once; engines that do not respond are noted, and removed from `contenders`."""
    order = random.Random(f"order {number}")
    rates = measure_rates()
    results.rates.append(rates)
    for name in order.sample(list(plan.workloads), len(plan.workloads)):
        for contender in order.sample(contenders, len(contenders)):
            if isinstance(contender, InProcess) and name not in OVERHEAD:
                continue
            try:
                _measure(contender, name, plan.workloads[name], results, number)
            except RuntimeError as error:
                contenders.remove(contender)
                left_out = f"{contender.name} is left out from {name} of round {number + 1} on"
                results.notes.append(f"{left_out}: {describe(error)}")
    _note_limits(plan, results, number)


def _measure(contender: Contender, name: str, workload: Workload, results: Results, number: int) -> None:
    say(f"round {number + 1}: {name} on {contender.name}")
    contender.resume()
    try:
        done = asyncio.run(_run(contender, workload, f"{number} {name}"))
    finally:
        contender.pause()
    results.keep(contender.name, name, number, done)
    if not any(sample.fault for sample in (*done.samples, *done.background)):
        for metric in workload.metrics:
            row = Row(name, workload.title, metric.name, higher=metric.higher)
            results.add(row, contender.name, number, metric.compute(done))


async def _run(contender: Contender, workload: Workload, seed: str) -> Run:
    async with contender.target() as target:
        await run(target, workloads(quick=True)[AWAKE], f"awake {seed}")
        return await run(target, workload, seed)


def _start(plan: Plan, results: Results, stack: contextlib.ExitStack) -> list[Contender]:
    """Start the engines one by one, each paused when warm; an engine that cannot be started is noted and skipped."""
    contenders: list[Contender] = []
    for given in plan.engines:
        name = given.partition("=")[0]
        say(f"starting {name}")
        try:
            contender = _open(given, plan, results)
        except (DashInferVLMError, RuntimeError) as error:
            say(f"{name} is skipped:  {error}")
            results.notes.append(f"{name} is skipped: {describe(error)}")
            continue
        stack.callback(contender.stop)
        asyncio.run(_warm_up(contender))
        time.sleep(plan.settle)
        contender.pause()
        if isinstance(contender, Server):
            row = Row("ready", f"from process start, {plan.name}", "s")
            results.add(row, contender.name, 0, contender.ready_seconds)
        contenders.append(contender)
    return contenders


def _open(given: str, plan: Plan, results: Results) -> Contender:
    model = str(plan.model)
    if given == IN_PROCESS:
        results.notes.append(f"{given}: this engine in the client's process, without a server")
        return InProcess(given, model)
    launch = _launch(given, plan)
    if launch.note:
        results.notes.append(f"{launch.name}: {launch.note}")
    return Server(launch, plan.out / "logs" / f"{launch.name}.log")


def _launch(given: str, plan: Plan) -> Launch:
    if "=" in given:
        return custom(given, str(plan.model))
    if given in OURS:
        return ours(given, str(plan.model), *OURS[given])
    return other_engine(given, plan.model, plan.other_engines, avx2=plan.avx2)


async def _warm_up(contender: Contender) -> None:
    async with contender.target() as target:
        for name in WARM_UP:
            done = await run(target, workloads(quick=True)[name], f"warm {name}")
            for fault in dict.fromkeys(sample.fault for sample in done.samples if sample.fault):
                say(f"during warm-up with {name}: {fault}")


def _note_limits(plan: Plan, results: Results, number: int) -> None:
    """Add the machine's limits next to the metrics that they bound."""
    rates = results.rates[number]
    for name in ("decode-1", "decode-8"):
        if name in plan.workloads:
            row = Row(name, plan.workloads[name].title, TPOT.name)
            results.add(row, LIMIT, number, 1000 * step_seconds(plan.model, rates))
    prompt = results.prompt_tokens("fresh-1")
    if prompt:
        row = Row("fresh-1", plan.workloads["fresh-1"].title, TTFT.name)
        results.add(row, LIMIT, number, image_seconds(plan.model, rates, prompt=prompt))


def _note_memory(contenders: list[Contender], results: Results) -> None:
    row = Row("memory", "peak of all processes", "GB")
    for contender in contenders:
        if isinstance(contender, Server):
            results.add(row, contender.name, 0, contender.peak_bytes() / 1e9)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help=f"{', '.join(model_names())}, demo, or a checkpoint's folder")
    parser.add_argument("--models", type=Path, default=CACHE, help="where models are created (%(default)s)")
    parser.add_argument(
        "--other-engines", type=Path, default=OTHER_ENGINES_FOLDER, help="where they are installed (%(default)s)"
    )
    parser.add_argument(
        "--engines",
        type=names_of(ENGINES, optional=True),
        default=",".join(DEFAULT),
        help=f"of {', '.join(ENGINES)} (%(default)s); first is the base",
    )
    parser.add_argument(
        "--engine",
        type=_engine,
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="an additional engine; see above",
    )
    names = ",".join(workloads())
    parser.add_argument("--workloads", type=names_of(workloads()), default=names, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    add_settle(parser)
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter responses, to check that everything works"
    )
    parser.add_argument("--max-isa", choices=("avx2",), help="do not use newer instructions, as far as engines permit")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="(%(default)s)")
    return parser


def _engine(value: str) -> str:
    name, found, _ = value.partition("=")
    if not name or not (found or name in ENGINES):
        raise argparse.ArgumentTypeError(f"{value!r} is neither NAME=COMMAND nor one of {', '.join(ENGINES)}")
    return value


def _plan(given: argparse.Namespace) -> Plan:
    known = workloads(quick=given.quick)
    engines = (*given.engines, *given.engine)
    if len({engine.partition("=")[0] for engine in engines}) < len(engines):
        raise SystemExit("--engine: two engines have the same name.")
    return Plan(
        name=Path(given.model).name,
        model=checkpoint(given.model, given.models),
        engines=engines,
        workloads={name: known[name] for name in given.workloads},
        rounds=given.rounds,
        settle=given.settle,
        other_engines=OtherEngines(given.other_engines.expanduser()),
        out=given.out,
        avx2=given.max_isa == "avx2",
    )


if __name__ == "__main__":
    main()

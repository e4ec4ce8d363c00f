"""Ours beside the engines that one would take instead, on this machine: one table of ratios.

    python -m benchmarks.compare [--model small|2b|demo|FOLDER] [--engines ours,vllm] [--workloads fresh-1,chats-3]

Every engine stays loaded, and is stopped (SIGSTOP) while another one is measured. In each round the workloads come in
random order, and for each of them the engines in random order, so that what drifts on the machine meets all alike. What
the machine itself can do is measured in every round too.

A further engine is another set of options of ours, or any server for OpenAI's API:

    --engine 'chunks=--prefill-chunk 256'
    --engine 'before=/path/to/venv/bin/dashinfer-vlm serve --model {model} --port {port}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .engines import Contender, InProcess, Launch, Server, custom, end_with_us, ours, peer
from .environments import PEERS_FOLDER, Peers, SetupMissing
from .limits import measure_rates, picture_seconds, step_seconds
from .models import CACHE, SHAPES, checkpoint
from .report import LIMIT, Results, Row, write
from .workloads import TPOT, TTFT, Run, Workload, run, workloads

IN_PROCESS = "in-process"
OURS = ("ours", "ours-int8", IN_PROCESS)
PEERS = ("vllm", "openvino-fp16", "openvino-int8", "transformers")
DEFAULT = ("ours", IN_PROCESS, *PEERS)
OVERHEAD = ("fresh-1", "fresh-4", "decode-1", "decode-8")
"""Where ours is also measured without its server: one picture, several, and nothing but steps."""
WARM_UP = ("fresh-4", "text-8", "small-4")
"""Kinds of work that each engine does once, quickly, before anything counts."""
AWAKE = "decode-1"
"""What an engine does, quickly, before each measurement: its share of the caches was taken while it slept."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asks for.

    Attributes:
        name: of the model.
        model: folder of its checkpoint.
        engines: built-in names, and NAME=COMMAND; the first one is what the others are compared with.
        workloads: by name.
        rounds: how often everything is measured.
        ready: whether to measure the time to ready in each round.
        peers: where the peers live.
        out: folder for what is written.
    """

    name: str
    model: Path
    engines: tuple[str, ...]
    workloads: dict[str, Workload]
    rounds: int
    ready: bool
    peers: Peers
    out: Path


def main(arguments: Sequence[str] | None = None) -> Results:
    plan = _plan(_parser().parse_args(arguments))
    results = Results(model=plan.name)
    try:
        with end_with_us():
            compare(plan, results)
    finally:  # what was measured until somebody ended it is worth something too
        if results.figures:
            print(write(results, plan.out))
    return results


def compare(plan: Plan, results: Results) -> None:
    """Start what `plan` names, and measure round by round into `results`."""
    with contextlib.ExitStack() as stack:
        contenders = _start(plan, results, stack)
        if not contenders:
            raise SystemExit("No engine could be started: " + "; ".join(results.notes))
        results.base = contenders[0].name
        for number in range(plan.rounds):
            _round(plan, contenders, results, number)
        _note_memory(contenders, results, _weight_bytes(plan.model))


def _round(plan: Plan, contenders: list[Contender], results: Results, number: int) -> None:
    order = random.Random(f"order {number}")
    rates = measure_rates()
    results.rates.append(rates)
    for name in order.sample(list(plan.workloads), len(plan.workloads)):
        for contender in order.sample(contenders, len(contenders)):
            if isinstance(contender, InProcess) and name not in OVERHEAD:
                continue
            _measure(contender, name, plan.workloads[name], results, number)
    _note_limits(plan, results, number)
    if plan.ready:
        for name, model in {plan.name: str(plan.model), "demo": "demo"}.items():
            results.add(_ready_row(name), results.base, number, _ready_seconds(plan, model))


def _measure(contender: Contender, name: str, workload: Workload, results: Results, number: int) -> None:
    _say(f"round {number + 1}: {name} on {contender.name}")
    contender.resume()
    try:
        done = asyncio.run(_run(contender, workload, f"{number} {name}"))
    finally:
        contender.pause()
    results.keep(contender.name, name, number, done)
    if not any(sample.fault for sample in (*done.samples, *done.beside)):
        for metric in workload.metrics:
            row = Row(name, workload.title, metric.name, higher=metric.higher)
            results.add(row, contender.name, number, metric.compute(done))


async def _run(contender: Contender, workload: Workload, seed: str) -> Run:
    async with contender.target() as target:
        await run(target, workloads(quick=True)[AWAKE], f"awake {seed}")
        return await run(target, workload, seed)


def _start(plan: Plan, results: Results, stack: contextlib.ExitStack) -> list[Contender]:
    """The engines, one by one, each paused when it is warm; one that cannot be started is noted and left out."""
    contenders: list[Contender] = []
    for given in plan.engines:
        name = given.partition("=")[0]
        _say(f"starting {name}")
        try:
            contender = _open(given, plan, results)
        except (SetupMissing, RuntimeError) as error:
            _say(f"{name} is left out: {error}")
            results.notes.append(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        stack.callback(contender.stop)
        asyncio.run(_warm_up(contender))
        contender.pause()
        if isinstance(contender, Server):
            results.add(_ready_row(plan.name), contender.name, 0, contender.ready_seconds)
        contenders.append(contender)
    return contenders


def _open(given: str, plan: Plan, results: Results) -> Contender:
    model = str(plan.model)
    if given == IN_PROCESS:
        results.notes.append(f"{given}: our engine in the process that asks, without a server between")
        return InProcess(given, model)
    launch = _launch(given, plan)
    if launch.note:
        results.notes.append(f"{launch.name}: {launch.note}")
    return Server(launch, plan.out / "logs" / f"{launch.name}.log")


def _launch(given: str, plan: Plan) -> Launch:
    if "=" in given:
        return custom(given, str(plan.model))
    if given in OURS:
        return ours(given, str(plan.model), *(["--quantization", "int8"] if given == "ours-int8" else []))
    return peer(given, plan.model, plan.peers)


async def _warm_up(contender: Contender) -> None:
    async with contender.target() as target:
        for name in WARM_UP:
            done = await run(target, workloads(quick=True)[name], f"warm {name}")
            for fault in dict.fromkeys(sample.fault for sample in done.samples if sample.fault):
                _say(f"while it was warmed by {name}: {fault}")


def _ready_row(model: str) -> Row:
    return Row("ready", f"from the start of the process, {model}", "s")


def _ready_seconds(plan: Plan, model: str) -> float:
    _say(f"starting ours once more, {model}")
    server = Server(ours("ready", model), plan.out / "logs" / "ready.log")
    server.stop()
    return server.ready_seconds


def _note_limits(plan: Plan, results: Results, number: int) -> None:
    """What the machine allows at best, beside the figures that it bounds."""
    rates = results.rates[number]
    for name in ("decode-1", "decode-8"):
        if name in plan.workloads:
            row = Row(name, plan.workloads[name].title, TPOT.name)
            results.add(row, LIMIT, number, 1000 * step_seconds(plan.model, rates))
    prompt = results.prompt_tokens("fresh-1")
    if prompt:
        row = Row("fresh-1", plan.workloads["fresh-1"].title, TTFT.name)
        results.add(row, LIMIT, number, picture_seconds(plan.model, rates, prompt=prompt))


def _note_memory(contenders: list[Contender], results: Results, weights: int) -> None:
    row = Row("memory", "peak of all processes, above the size of the weights", "GB")
    for contender in contenders:
        if isinstance(contender, Server):
            results.add(row, contender.name, 0, (contender.peak_bytes() - weights) / 1e9)


def _weight_bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small", help=f"{', '.join(SHAPES)}, demo, or a checkpoint's folder")
    parser.add_argument("--models", type=Path, default=CACHE, help="where models are made (%(default)s)")
    parser.add_argument("--peers", type=Path, default=PEERS_FOLDER, help="where peers are installed (%(default)s)")
    parser.add_argument(
        "--engines", default=",".join(DEFAULT), help=f"of {', '.join((*OURS, *PEERS))} (%(default)s); first is the base"
    )
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=COMMAND", help="one more; see above")
    parser.add_argument("--workloads", help=f"of {', '.join(workloads())}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter answers, to see that everything works")
    parser.add_argument("--no-ready", action="store_true", help="do not start ours anew in each round")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="(%(default)s)")
    return parser


def _plan(given: argparse.Namespace) -> Plan:
    known = workloads(quick=given.quick)
    names = given.workloads.split(",") if given.workloads else list(known)
    engines = [name for name in given.engines.split(",") if name]
    unknown = [name for name in engines if name not in (*OURS, *PEERS)] + [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"Nothing is called {', '.join(unknown)}; --help lists the names.")
    return Plan(
        name=Path(given.model).name,
        model=checkpoint(given.model, given.models),
        engines=(*engines, *given.engine),
        workloads={name: known[name] for name in names},
        rounds=given.rounds,
        ready=not given.no_ready,
        peers=Peers(given.peers.expanduser()),
        out=given.out,
    )


if __name__ == "__main__":
    main()

"""Simulate replicas behind a router: throughput and time to first token by routing policy.

    python -m benchmarks.simulate_cluster [--replicas 4,32,256,1000] [--encode 0.67] [--router-seconds 0.0073] ...

A discrete-event simulation with constant service times, by default those of `small` (docs/lab/cluster.md has
their sources). A request passes a router; if its replica does not have the embedding, it is looked up in the shared
store; then the request waits in the queue of its replica, which has one compute thread. Equal seeds give equal results.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

WARM_UP = 0.2
"""Share of the requests that no figure includes, because caches are empty at first."""
MIN_REQUESTS = 5000


@dataclass(frozen=True, kw_only=True)
class Service:
    """Seconds of a replica's compute thread for a request with one image.

    Attributes:
        encode: the vision encoder.
        prefill_image: prefill of the image's tokens.
        prefill_text: prefill of the other tokens, up to the first token of the response.
        decode: the request's share of the decode steps.
    """

    encode: float = 0.67
    prefill_image: float = 0.36
    prefill_text: float = 0.10
    decode: float = 0.12


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines.

    Attributes:
        replicas: number of replicas.
        service: their service times.
        embeddings: number of images whose embeddings a replica keeps.
        prefixes: number of images whose keys and values a replica keeps.
        routers: number of router processes.
        router_seconds: seconds of a router process per request.
        store: whether there is a shared store of embeddings.
        store_bandwidth: bytes per second that the store sends and receives.
        store_latency: seconds of a lookup in an idle store, in addition to the transfer.
        store_budget: seconds after which a replica encodes the image itself.
        store_images: number of images that the store keeps.
        embedding_bytes: size of an embedding.
    """

    replicas: int
    service: Service = field(default_factory=Service)
    embeddings: int = 585
    prefixes: int = 1157
    routers: int = 1
    router_seconds: float = 0.0073
    store: bool = False
    store_bandwidth: float = 1.25e9
    store_latency: float = 0.0014
    store_budget: float = 0.33
    store_images: int = 1 << 20
    embedding_bytes: int = 448 << 10


class Policy(Protocol):
    """Chooses a replica for a request."""

    def choose(self, image: int, outstanding: Integers) -> int:
        """Return a replica, given the number of outstanding requests of each."""


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._next = -1
        self._replicas = replicas

    def choose(self, image: int, outstanding: Integers) -> int:
        self._next = (self._next + 1) % self._replicas
        return self._next


class LeastBusy:
    """Chooses the replica with the fewest outstanding requests; among equal ones, the next in a circle."""

    def __init__(self, replicas: int) -> None:
        self._next = 0
        self._replicas = replicas

    def choose(self, image: int, outstanding: Integers) -> int:
        chosen = (int(np.roll(outstanding, -self._next).argmin()) + self._next) % self._replicas
        self._next = (chosen + 1) % self._replicas
        return chosen


class Content:
    """Consistent hashing: the image determines an order of the replicas, and the first one gets its requests.

    With `spill_over`, a replica is skipped while its outstanding requests exceed the mean by that factor, as in
    consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018), but not below `min_outstanding`.

    Args:
        replicas: number of replicas.
        images: number of images.
        seed: the seed of the hash.
        spill_over: factor; None sends all requests to the first replica.
        min_outstanding: number of outstanding requests that every replica accepts.
    """

    def __init__(
        self, replicas: int, images: int, seed: int, *, spill_over: float | None = None, min_outstanding: int = 4
    ) -> None:
        source = np.random.default_rng([seed, replicas])
        steps = [step for step in range(1, replicas + 1) if math.gcd(step, replicas) == 1]
        self._first: list[int] = source.integers(replicas, size=images).tolist()
        self._step: list[int] = source.choice(steps, size=images).tolist()
        self._replicas = replicas
        self._spill_over = spill_over
        self._min_outstanding = min_outstanding

    def choose(self, image: int, outstanding: Integers) -> int:
        chosen = self._first[image]
        if self._spill_over is None or outstanding[chosen] < self._min_outstanding:
            return chosen
        mean = (int(outstanding.sum()) + 1) / self._replicas
        limit = max(self._min_outstanding, math.ceil(self._spill_over * mean))
        while outstanding[chosen] >= limit:  # ends: not all can exceed the mean
            chosen = (chosen + self._step[image]) % self._replicas
        return chosen


class LruSet:
    """A set of bounded size without what was not used for the longest time."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, item: int) -> bool:
        return item in self._items

    def use(self, item: int) -> bool:
        """Add an item, and return whether the set had it."""
        found = item in self._items
        self._items[item] = None
        self._items.move_to_end(item)
        if len(self._items) > self._capacity:
            self._items.popitem(last=False)
        return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        ttft: seconds until the first token, by request.
        ended: the time at which each request ended.
        replica: the replica of each request.
        encodes: number of passes of vision encoders.
        utilization: the busy share of replicas (the mean), the busiest replica, routers, and the store.
    """

    ttft: Floats
    ended: Floats
    replica: Integers
    encodes: int
    utilization: Mapping[str, float]

    @property
    def throughput(self) -> float:
        """Requests per second, without those at the beginning and at the end."""
        ended = np.sort(self.ended)
        first, last = int(WARM_UP * len(ended)), int(0.9 * len(ended)) - 1
        return (last - first) / float(ended[last] - ended[first])

    def ttft_quantile(self, quantile: float) -> float:
        return float(np.quantile(self.ttft[int(WARM_UP * len(self.ttft)) :], quantile))

    @property
    def bottleneck(self) -> str:
        """The resource with the highest utilization."""
        return max(self.utilization, key=lambda name: self.utilization[name])


class Simulation:
    """One run. Each replica, each router and the store serves its requests in the order of their arrival."""

    def __init__(self, cluster: Cluster, policy: Policy, images: Integers) -> None:
        self._cluster = cluster
        self._policy = policy
        self._images: list[int] = images.tolist()
        self._events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._number = 0
        self._routers = [0.0] * cluster.routers
        self._embeddings = [LruSet(cluster.embeddings) for _ in range(cluster.replicas)]
        self._prefixes = [LruSet(cluster.prefixes) for _ in range(cluster.replicas)]
        self._free_at = [0.0] * cluster.replicas
        self._busy = [0.0] * cluster.replicas
        self._outstanding = np.zeros(cluster.replicas, np.int64)
        self._stored = LruSet(cluster.store_images)
        self._store_free_at = self._store_busy = 0.0
        self._fetched: set[int] = set()
        self._arrival = np.zeros(len(images))
        self._ttft = np.zeros(len(images))
        self._ended = np.zeros(len(images))
        self._replica = np.zeros(len(images), np.int64)
        self._encodes = 0
        self._following: Iterator[int] = iter(())

    def run(self, arrivals: Floats) -> Outcome:
        """Simulate requests that arrive at given times."""
        for request, time in enumerate(arrivals.tolist()):
            self._schedule(time, self._arrive, request)
        return self._run()

    def run_users(self, users: int) -> Outcome:
        """Simulate users who send their next request as soon as the response to the last one ends."""
        self._following = iter(range(users, len(self._images)))
        for request in range(min(users, len(self._images))):
            self._schedule(0.0, self._arrive, request)
        return self._run()

    def _run(self) -> Outcome:
        while self._events:
            time, _, handle, request = heapq.heappop(self._events)
            handle(time, request)
        seconds = float(self._ended.max())
        routed = len(self._images) * self._cluster.router_seconds / self._cluster.routers
        return Outcome(
            ttft=self._ttft,
            ended=self._ended,
            replica=self._replica,
            encodes=self._encodes,
            utilization={
                "replicas": float(np.mean(self._busy)) / seconds,
                "one replica": max(self._busy) / seconds,
                "router": routed / seconds,
                "store": self._store_busy / seconds,
            },
        )

    def _schedule(self, time: float, handle: Callable[[float, int], None], request: int) -> None:
        self._number += 1  # events at the same time are handled in the order in which they were scheduled
        heapq.heappush(self._events, (time, self._number, handle, request))

    def _arrive(self, time: float, request: int) -> None:
        self._arrival[request] = time
        end = max(time, self._routers[0]) + self._cluster.router_seconds
        heapq.heapreplace(self._routers, end)
        self._schedule(end, self._route, request)

    def _route(self, time: float, request: int) -> None:
        image = self._images[request]
        replica = self._policy.choose(image, self._outstanding)
        self._outstanding[replica] += 1
        self._replica[request] = replica
        if self._cluster.store and image not in self._embeddings[replica]:
            self._look_up(time, request, image)
        else:
            self._compute(time, request)

    def _look_up(self, time: float, request: int, image: int) -> None:
        found = image in self._stored
        reply = self._transfer(time, found) + self._cluster.store_latency
        if reply - time > self._cluster.store_budget:
            reply, found = time + self._cluster.store_budget, False
        if found:
            self._stored.use(image)
            self._fetched.add(request)
        self._schedule(reply, self._compute, request)

    def _transfer(self, time: float, embeddings: int) -> float:
        """Return when the store has transferred embeddings after what it transfers already."""
        seconds = embeddings * self._cluster.embedding_bytes / self._cluster.store_bandwidth
        self._store_busy += seconds
        self._store_free_at = max(time, self._store_free_at) + seconds
        return self._store_free_at

    def _compute(self, time: float, request: int) -> None:
        image, replica, service = self._images[request], int(self._replica[request]), self._cluster.service
        start = first = max(time, self._free_at[replica])
        if not self._embeddings[replica].use(image) and request not in self._fetched:
            self._encodes += 1
            first += service.encode
            if self._cluster.store:
                self._schedule(first, self._store, request)
        if not self._prefixes[replica].use(image):
            first += service.prefill_image
        first += service.prefill_text
        end = first + service.decode
        self._ttft[request] = first - self._arrival[request]
        self._free_at[replica] = end
        self._busy[replica] += end - start
        self._schedule(end, self._end, request)

    def _store(self, time: float, request: int) -> None:
        self._transfer(time, 1)
        self._stored.use(self._images[request])

    def _end(self, time: float, request: int) -> None:
        self._outstanding[self._replica[request]] -= 1
        self._ended[request] = time
        following = next(self._following, None)
        if following is not None:
            self._schedule(time, self._arrive, following)


POLICIES: dict[str, Callable[[int, int, int], Policy]] = {
    "round robin": lambda replicas, _images, _seed: RoundRobin(replicas),
    "least busy": lambda replicas, _images, _seed: LeastBusy(replicas),
    "content": Content,
    "content, spill-over": lambda replicas, images, seed: Content(replicas, images, seed, spill_over=1.25),
}
"""The policies: their name, and how to create one from the number of replicas, the number of images and the seed."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What users request.

    Attributes:
        requests: number of requests.
        images: number of images.
        zipf: exponent of the popularity of images, which is proportional to 1 / rank ** zipf; 0 is uniform.
        rate: requests per second and replica that arrive at random.
        users: concurrent users per replica.
        seed: the seed of all random numbers.
    """

    requests: int
    images: int
    zipf: float = 0.0
    rate: float = 0.6
    users: int = 8
    seed: int = 0

    def sequence(self) -> Integers:
        """Return the image of each request."""
        popularity = 1 / np.arange(1, self.images + 1) ** self.zipf
        source = np.random.default_rng(self.seed)
        return source.choice(self.images, size=self.requests, p=popularity / popularity.sum())

    def arrivals(self, replicas: int) -> Floats:
        """Return the arrival time of each request, in seconds: a Poisson process."""
        source = np.random.default_rng([self.seed, 1])
        return source.exponential(1 / (self.rate * replicas), self.requests).cumsum()


def simulate(cluster: Cluster, load: Load, policy: str) -> tuple[Outcome, Outcome]:
    """Return the outcome with concurrent users, for the throughput, and with random arrivals, for the TTFT."""
    images = load.sequence()

    def simulation() -> Simulation:
        return Simulation(cluster, POLICIES[policy](cluster.replicas, load.images, load.seed), images)

    return simulation().run_users(load.users * cluster.replicas), simulation().run(load.arrivals(cluster.replicas))


def load_for(replicas: int, zipf: float, options: argparse.Namespace) -> Load:
    requests = max(MIN_REQUESTS, options.requests_per_replica * replicas)
    return Load(
        requests=requests,
        images=max(1, round(requests / options.requests_per_image)),
        zipf=zipf,
        rate=options.rate,
        users=options.users,
        seed=options.seed,
    )


def cluster_for(replicas: int, options: argparse.Namespace) -> Cluster:
    return Cluster(
        replicas=replicas,
        service=Service(
            encode=options.encode,
            prefill_image=options.prefill_image,
            prefill_text=options.prefill_text,
            decode=options.decode,
        ),
        routers=math.ceil(replicas / options.replicas_per_router),
        router_seconds=options.router_seconds,
        store_bandwidth=options.store_gbit * 1e9 / 8,
        embedding_bytes=round(options.embedding_kib * 1024),
    )


def policy_table(zipf: float, options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a table of all policies, with enough routers."""
    yield "| Policy | Store | " + " | ".join(f"{replicas} replicas" for replicas in options.replicas) + " |"
    yield "|---|---|" + "---|" * len(options.replicas)
    for policy in POLICIES:
        for store in (False, True):
            cells = []
            for replicas in options.replicas:
                load = load_for(replicas, zipf, options)
                busy, paced = simulate(replace(cluster_for(replicas, options), store=store), load, policy)
                ttft = (paced.ttft_quantile(quantile) for quantile in (0.5, 0.99))
                times = "; ".join(f"{seconds:.1f} s" for seconds in ttft)
                cells.append(f"{busy.throughput / replicas:.2f}; {times}; {busy.encodes / load.requests:.2f}")
            yield f"| {policy} | {'yes' if store else 'no'} | " + " | ".join(cells) + " |"


def saturation_table(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of a table of the resources that saturate first, with one router."""
    yield "| Replicas | Policy | Requests/s | Replicas busy | Router busy | Store busy | Limited by |"
    yield "|---|---|---|---|---|---|---|"
    for replicas in options.replicas:
        for policy in ("round robin", "content, spill-over"):
            cluster = replace(cluster_for(replicas, options), routers=1, store=True)
            busy, _ = simulate(cluster, load_for(replicas, 0.0, options), policy)
            shares = (f"{busy.utilization[name]:.0%}" for name in ("replicas", "router", "store"))
            limit = busy.bottleneck.replace("one replica", "replicas")
            yield f"| {replicas} | {policy} | {busy.throughput:.1f} | {' | '.join(shares)} | {limit} |"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    service, cluster, load = Service(), Cluster(replicas=1), Load(requests=1, images=1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replicas", type=_numbers, default=(4, 32, 256, 1000), help="numbers of replicas, with commas"
    )
    parser.add_argument("--requests-per-replica", type=_positive_int, default=40)
    parser.add_argument("--requests-per-image", type=_positive, default=5.0, help="mean")
    parser.add_argument("--zipf", type=_positive, default=1.0, help="exponent of the second table")
    parser.add_argument(
        "--rate", type=_positive, default=load.rate, help="requests per second and replica, for the TTFT"
    )
    parser.add_argument("--users", type=_positive_int, default=load.users, help="per replica, for the throughput")
    parser.add_argument("--encode", type=_positive, default=service.encode, help="seconds")
    parser.add_argument("--prefill-image", type=_positive, default=service.prefill_image, help="seconds")
    parser.add_argument("--prefill-text", type=_positive, default=service.prefill_text, help="seconds")
    parser.add_argument("--decode", type=_positive, default=service.decode, help="seconds")
    parser.add_argument("--router-seconds", type=_positive, default=cluster.router_seconds, help="per request")
    parser.add_argument("--replicas-per-router", type=_positive_int, default=16, help="in the tables of policies")
    parser.add_argument("--store-gbit", type=_positive, default=cluster.store_bandwidth * 8 / 1e9, help="Gbit/s")
    parser.add_argument("--embedding-kib", type=_positive, default=cluster.embedding_bytes / 1024)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(map(_positive_int, value.split(",")))


def _positive_int(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def _positive(value: str) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    print(
        f"Cells: requests/s per replica with {options.users} users per replica; TTFT, median and 99 %, at"
        f" {options.rate:g} requests/s per replica; passes of the vision encoder per request.\n"
    )
    for title, zipf in (("Uniform popularity", 0.0), (f"Zipf popularity, exponent {options.zipf:g}", options.zipf)):
        print(f"{title}\n", *policy_table(zipf, options), "", sep="\n")
    print("One router, with the store, uniform popularity\n", *saturation_table(options), sep="\n")


if __name__ == "__main__":
    main()

"""The simulation of a cluster agrees with formulas, and with itself where policies must not differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import simulate_cluster
from benchmarks.simulate_cluster import POLICIES, Cluster, Load, LruSet, Service, Simulation

pytestmark = pytest.mark.slow

IDLE = 1e-9
"""Seconds of a resource that is not simulated."""


def run(cluster, policy, images, arrivals, *, seed=0):
    made = POLICIES[policy](cluster.replicas, int(images.max()) + 1, seed)
    return Simulation(cluster, made, images).run(arrivals)


def slow_arrivals(count):
    """Return arrivals so far apart that no request waits."""
    return np.arange(count) * 1000.0


def all_policies(store=(False, True)):
    cases = [(policy, with_store) for policy in POLICIES for with_store in store]
    return pytest.mark.parametrize(
        ("policy", "store"), cases, ids=[f"{policy}{' store' * each}" for policy, each in cases]
    )


@pytest.mark.parametrize("utilization", [0.3, 0.6])
def test_one_replica_waits_as_m_d_1_queue(utilization):
    """The mean waiting time of an M/D/1 queue is D rho / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    service = Service(encode=0.5, prefill_image=0.2, prefill_text=0.2, decode=0.1)
    cluster = Cluster(replicas=1, service=service, embeddings=0, prefixes=0, router_seconds=IDLE)
    load = Load(requests=20_000, images=1, rate=utilization)
    outcome = run(cluster, "round robin", load.sequence(), load.arrivals(1))
    assert outcome.ttft.mean() - 0.9 == pytest.approx(utilization / (2 * (1 - utilization)), rel=0.1)
    assert outcome.utilization["replicas"] == pytest.approx(utilization, rel=0.03)
    assert outcome.throughput == pytest.approx(utilization, rel=0.03)


def test_router_is_m_d_1_queue_before_idle_replicas():
    instant = Service(encode=IDLE, prefill_image=IDLE, prefill_text=IDLE, decode=IDLE)
    cluster = Cluster(replicas=8, service=instant, router_seconds=0.1)
    load = Load(requests=20_000, images=1, rate=0.5 / 0.1 / 8)
    outcome = run(cluster, "least busy", load.sequence(), load.arrivals(8))
    assert outcome.ttft.mean() == pytest.approx(0.1 + 0.1 * 0.5 / (2 * 0.5), rel=0.1)
    assert outcome.bottleneck == "router"


def test_policies_are_equal_with_one_replica():
    load = Load(requests=2000, images=400, zipf=1.0, rate=1.5)
    for store in (False, True):
        cluster = Cluster(replicas=1, embeddings=50, prefixes=20, store=store)
        outcomes = [run(cluster, policy, load.sequence(), load.arrivals(1)) for policy in POLICIES]
        assert all(np.array_equal(each.ttft, outcomes[0].ttft) for each in outcomes)
        assert len({each.encodes for each in outcomes}) == 1


def test_equal_seeds_give_equal_results():
    load = Load(requests=500, images=50)
    first, second, other = (
        simulate_cluster.simulate(Cluster(replicas=4), replace(load, seed=seed), "content")[1].ttft
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


@all_policies()
def test_images_are_encoded_as_often_as_policy_requires(policy, store):
    """Eight conversations of four turns over four replicas: by content or with a store, each image is encoded once."""
    images = np.tile(np.arange(8), 4)
    images[8:16] = np.roll(images[8:16], 1)  # otherwise, round robin would send each image to one replica
    images[16:24] = np.roll(images[16:24], 2)
    images[24:] = np.roll(images[24:], 3)
    outcome = run(Cluster(replicas=4, store=store), policy, images, slow_arrivals(32))
    assert outcome.encodes == (8 if store or policy.startswith("content") else 32)


def test_content_routing_encodes_each_image_once_under_load():
    load = Load(requests=3000, images=300)
    cluster = Cluster(replicas=16, embeddings=300)
    outcome = Simulation(cluster, POLICIES["content"](16, 300, 0), load.sequence()).run_users(64)
    assert outcome.encodes == len(set(load.sequence().tolist()))


def test_small_caches_evict():
    images = np.tile(np.arange(10), 5)
    kept = run(Cluster(replicas=1, embeddings=10), "content", images, slow_arrivals(50))
    evicted = run(Cluster(replicas=1, embeddings=9), "content", images, slow_arrivals(50))
    assert (kept.encodes, evicted.encodes) == (10, 50)


def test_time_of_idle_request_is_sum_of_its_parts():
    service = Service(encode=1.0, prefill_image=0.5, prefill_text=0.25, decode=0.125)
    cluster = Cluster(
        replicas=2, service=service, router_seconds=0.01, store=True, store_latency=0.1, store_bandwidth=1e6
    )
    cluster = replace(cluster, embedding_bytes=50_000)
    outcome = run(cluster, "round robin", np.zeros(3, np.int64), slow_arrivals(3))
    new, stored, cached = 0.01 + 0.1 + 1.75, 0.01 + 0.1 + 0.05 + 0.75, 0.01 + 0.25
    assert outcome.ttft.tolist() == pytest.approx([new, stored, cached])


def test_store_that_is_too_slow_costs_its_budget_and_no_more():
    images = np.zeros(40, np.int64)
    slow = Cluster(replicas=4, store=True, store_bandwidth=1.0, store_budget=0.25)
    with_store = run(slow, "round robin", images, slow_arrivals(40))
    without = run(replace(slow, store=False), "round robin", images, slow_arrivals(40))
    assert with_store.encodes == without.encodes == 4
    assert (with_store.ttft - without.ttft).max() == pytest.approx(0.25)


def test_spill_over_serves_popular_image_on_several_replicas():
    """With 64 users, a replica accepts at most 11 requests, 1.25 times the mean: six replicas are needed."""
    images = np.zeros(2000, np.int64)
    one, several = (
        Simulation(Cluster(replicas=8), POLICIES[policy](8, 1, 0), images).run_users(64)
        for policy in ("content", "content, spill-over")
    )
    assert set(one.replica.tolist()) == {int(one.replica[0])}
    assert len(set(several.replica.tolist())) >= 6
    assert several.throughput > 5 * one.throughput
    assert one.bottleneck == "one replica"


def test_least_busy_replica_has_shortest_queue():
    policy = POLICIES["least busy"](3, 1, 0)
    assert [policy.choose(0, np.array(queue)) for queue in ([2, 1, 3], [2, 2, 1], [1, 1, 1], [1, 1, 1])] == [1, 2, 0, 1]


def test_lru_set_drops_least_recently_used():
    items = LruSet(2)
    assert [items.use(item) for item in (1, 2, 1, 3, 2, 3)] == [False, False, True, False, False, True]


def test_zipf_popularity_is_proportional_to_inverse_rank():
    counts = np.bincount(Load(requests=100_000, images=100, zipf=1.0).sequence())
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)


@pytest.mark.slow
def test_command_prints_all_tables(capsys):
    simulate_cluster.main(["--replicas", "1,2", "--requests-per-replica", "10"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| content, spill-over | yes |") for line in lines) == 2
    assert sum(line.count("|") == 8 and line[2].isdigit() for line in lines) == 4


@pytest.mark.parametrize("option", ["--replicas=0", "--encode=-1", "--router-seconds=inf", "--users=0"])
def test_invalid_option_is_rejected(option, capsys):
    with pytest.raises(SystemExit):
        simulate_cluster.main([option])
    assert option.partition("=")[0] in capsys.readouterr().err

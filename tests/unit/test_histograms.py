"""Histograms reach as far as the timeouts that they watch, and a p95 read from them is right to a
fifth.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from monitoring.metrics_doc import ROLES, role_families, role_registry
from shared.config import NodeConfig
from shared.runtime.metrics import BUCKET_RATIO, DURATION_BUCKETS_S, buckets_from

DEFAULTS = NodeConfig(tasks=[{"dataset": "gcd"}])
ACK_S = 5.0
"""Of one attempt to publish (`Transport.publish`); an attempt is repeated a few times."""
WATCHED: dict[str, float] = {
    "swarm_completion_tokens": DEFAULTS.generator.max_new_tokens,
    "swarm_generate_call_duration_seconds": DEFAULTS.generator.call_timeout_s,
    "swarm_policy_load_duration_seconds": DEFAULTS.generator.policy_load_timeout_s,
    "swarm_rollout_publish_duration_seconds": 10 * ACK_S,
    "swarm_rollout_payload_bytes": DEFAULTS.verifier.max_foreign_bytes,
    "swarm_verify_duration_seconds": DEFAULTS.verifier.answer_timeout_s * 2 * DEFAULTS.generator.completions,
    "swarm_sample_policy_lag": DEFAULTS.sampler.max_staleness,
    "swarm_sample_age_seconds": DEFAULTS.verifier.max_age_s,
    "swarm_sampler_build_duration_seconds": 10 * ACK_S,
    "swarm_trainer_step_duration_seconds": DEFAULTS.trainer.collective_timeout_s,
}
"""What bounds the quantity of each histogram, by default: a value beyond the last bound has no
quantile."""
WHOLE = {"swarm_completion_tokens", "swarm_sample_policy_lag"}
SHARES = {"swarm_reward"}
"""Between 0 and 1, and shown as a distribution: no quantile of it is read."""


def histograms() -> dict[str, list[float]]:
    """Finite bounds of every histogram that a service exports."""
    families = [family for role in ROLES for family in role_families(role) if family.type == "histogram"]
    return {
        family.name: sorted({float(each.labels["le"]) for each in family.samples if each.name.endswith("_bucket")})[:-1]
        for family in families
        if family.name not in SHARES
    }


def test_every_histogram_is_held_against_what_it_watches() -> None:
    assert histograms().keys() == WATCHED.keys()


@pytest.mark.parametrize(("name", "bounds"), histograms().items())
def test_a_histogram_reaches_beyond_what_it_watches_in_steps_of_a_fifth(name: str, bounds: list[float]) -> None:
    assert bounds[-1] > WATCHED[name]
    for lower, upper in pairwise(bounds):
        apart = upper - lower <= 1.0 if name in WHOLE else False
        assert apart or upper / lower <= BUCKET_RATIO + 1e-9, f"{name}: {lower} to {upper}"


def quantile(q: float, values: list[float], bounds: tuple[float, ...]) -> float:
    """`histogram_quantile` of Prometheus: linear within the bucket that the rank falls into."""
    rank, below, lower = q * len(values), 0, 0.0
    for upper in bounds:
        up_to = sum(value <= upper for value in values)
        if up_to >= rank:
            return lower + (upper - lower) * (rank - below) / (up_to - below)
        below, lower = up_to, upper
    return bounds[-1]


@given(st.lists(st.floats(DURATION_BUCKETS_S[0] * 1.001, 1800.0), min_size=1, max_size=60))
def test_a_p95_is_right_to_a_fifth_whatever_the_distribution(values: list[float]) -> None:
    told = quantile(0.95, values, DURATION_BUCKETS_S)
    at = max(0, -(-95 * len(values) // 100) - 1)
    assert abs(told - sorted(values)[at]) <= 0.2 * sorted(values)[at] + 1e-9


@given(st.floats(0.001, 10.0), st.floats(10.0, 1e6), st.booleans())
def test_bounds_rise_to_what_was_asked_for(first: float, last: float, whole: bool) -> None:
    first = float(max(1, round(first))) if whole else first
    bounds = buckets_from(first, last, whole=whole)
    assert bounds[0] == first and bounds[-1] >= last and list(bounds) == sorted(set(bounds))
    assert all(upper / lower <= BUCKET_RATIO + 1e-9 or (whole and upper - lower == 1.0) for lower, upper in pairwise(bounds))


def test_the_page_on_metrics_tells_the_series_of_a_node() -> None:
    """The page has them from real processes, in which a few appear only at work."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    texts = {role: generate_latest(role_registry(role)).decode() for role in ROLES}
    (row,) = re.findall(r"series of the four services shortly after their start \| about (.*) \|", page)
    told, *_ = counted = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", row)]
    of_role = {role: int(number) for role, number in re.findall(r"(\w+) (\d+)", row)}
    assert len(counted) == 1 + len(ROLES) and abs(sum(of_role.values()) - told) <= 5
    for role, text in texts.items():
        series = sum(not line.startswith("#") for line in text.splitlines())
        assert series <= of_role[role] <= 1.05 * series, f"docs/metrics.md: {role} has at least {series:,} series"
    hundred, four = re.findall(r"about\s+([\d,]+) series where each node has one\s+dataset, and about ([\d,]+)", page)[0]
    assert round(told * 100, -3) == int(hundred.replace(",", ""))
    assert round((told + 3 * (len(DURATION_BUCKETS_S) + 4)) * 100, -3) == int(four.replace(",", ""))
    (told_kb,) = re.findall(r"size of four scrapes, uncompressed \| (\d+) kB", page)
    assert abs(int(told_kb) - sum(map(len, texts.values())) / 1000) <= 10
    (told_more,) = re.findall(r"each further dataset of `\[\[tasks\]\]` \| (\d+) \|", page)
    assert int(told_more) == len(DURATION_BUCKETS_S) + 3 + 1, "buckets, +Inf, sum, count; and the counter of groups"

"""Answers of many nodes drawn from stacked models: each node's own model, exact probabilities, and
the same for a seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab.sampling import Sampled, sample
from lab.stacked_model import StackedDecoder
from lab.stacked_params import leaves, load_stack
from services.generator.engines.base import SamplingParams
from services.generator.engines.batching import WAYS
from services.generator.engines.transformers_engine import processed_logprobs, sample_completions, score_completions
from tests.lab.tiny_swarm import END, spread_out, tiny_llama, tiny_qwen3, transformers_model


@pytest.fixture(scope="module", params=[tiny_qwen3, tiny_llama], ids=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(tmp_path_factory.mktemp("model") / "model")
    return made


def prompts(counts: tuple[int, ...]) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(2)

    def prompt() -> list[int]:
        length = int(torch.randint(2, 20, (), generator=generator))
        return torch.randint(256, (length,), generator=generator).tolist()

    return [[prompt() for _ in range(count)] for count in counts]


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=9), SamplingParams(0.7, 0.9, 20, 9)], ids=["plain", "cut off"])
def test_reported_logprobs_are_those_of_each_nodes_own_model(folder: Path, params: SamplingParams) -> None:
    architecture, flat = load_stack([folder] * 3, torch.device("cpu"))
    flat = spread_out(architecture, flat)
    asked = prompts((3, 5, 1))
    generator = torch.Generator().manual_seed(0)
    model = StackedDecoder(architecture, torch.device("cpu"))
    found = sample(model, leaves(architecture, flat), asked, 4, params, end_token=END, generator=generator)
    for node, node_answers in enumerate(found):
        reference = transformers_model(folder, architecture, flat[node])
        assert [len(answers) for answers in node_answers] == [4] * len(asked[node])
        for prompt, answers in zip(asked[node], node_answers, strict=True):
            for answer in answers:
                (expected,) = score_completions(reference, [prompt], [answer.token_ids], params)
                assert answer.logprobs == pytest.approx(expected, abs=1e-4)
                assert answer.ended == (answer.token_ids[-1] == END)
                assert END not in answer.token_ids[:-1]
                assert answer.ended or len(answer.token_ids) == params.max_new_tokens


def test_greedy_answers_are_the_engines(folder: Path) -> None:
    architecture, flat = load_stack([folder] * 2, torch.device("cpu"))
    flat = spread_out(architecture, flat, noise=0.05)
    asked = prompts((12, 7))
    params = SamplingParams(temperature=0.0, max_new_tokens=16)
    model = StackedDecoder(architecture, torch.device("cpu"))

    def greedy(end_token: int) -> list[list[list[Sampled]]]:
        generator = torch.Generator().manual_seed(0)
        return sample(model, leaves(architecture, flat), asked, 1, params, end_token=end_token, generator=generator)

    # The token that first comes at the most different places, so that answers end one after another
    # and prompts leave the batch.
    endless = [answer.token_ids for node_answers in greedy(-1) for (answer,) in node_answers]
    end = max(range(300), key=lambda token: len({ids.index(token) for ids in endless if token in ids}))
    found = greedy(end)
    lengths = set()
    for node, node_answers in enumerate(found):
        rows = sample_completions(
            transformers_model(folder, architecture, flat[node]),
            asked[node],
            1,
            params,
            [16] * len(asked[node]),
            way=WAYS[0],
            generator=torch.Generator(),
            end_token_ids=[end],
            pad_token_id=257,
            keep_on=lambda: None,
        )
        assert [answer.token_ids for (answer,) in node_answers] == [row.token_ids for row in rows]
        lengths |= {len(row.token_ids) for row in rows}
    assert len(lengths) > 2


def test_tokens_are_drawn_as_often_as_their_probability_says(folder: Path) -> None:
    architecture, flat = load_stack([folder], torch.device("cpu"))
    asked, count = prompts((2,)), 4000
    params = SamplingParams(temperature=0.5, max_new_tokens=1)
    model = StackedDecoder(architecture, torch.device("cpu"))
    found = sample(
        model, leaves(architecture, flat), asked, count, params, end_token=END, generator=torch.Generator().manual_seed(1)
    )
    reference = transformers_model(folder, architecture, flat[0])
    for prompt, answers in zip(asked[0], found[0], strict=True):
        with torch.no_grad():
            expected = processed_logprobs(reference(torch.tensor([prompt])).logits[0, -1], params).exp().double()
        drawn = torch.bincount(torch.tensor([answer.token_ids[0] for answer in answers]), minlength=len(expected)) / count
        # Five standard deviations: one test in a thousand runs of the whole vocabulary would fail
        # by chance, and the seed is fixed.
        allowed = 5 * (expected * (1 - expected) / count).sqrt() + 2 / count
        assert bool(((drawn - expected).abs() <= allowed).all())


def test_the_same_seed_gives_the_same_answers(folder: Path) -> None:
    architecture, flat = load_stack([folder] * 2, torch.device("cpu"))
    model, asked = StackedDecoder(architecture, torch.device("cpu")), prompts((3, 2))

    def answers(seed: int) -> object:
        generator = torch.Generator().manual_seed(seed)
        return sample(
            model, leaves(architecture, flat), asked, 3, SamplingParams(max_new_tokens=6), end_token=END, generator=generator
        )

    assert answers(4) == answers(4)
    assert answers(4) != answers(5)

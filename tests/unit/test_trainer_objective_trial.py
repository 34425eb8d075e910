"""An installed objective whose loss or advantages cannot be used is told before a model is loaded,
and if that shows later, the trainer ends with a sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.trainer.learner import Learner, TorchThread
from services.trainer.service import DeviceStep, TrainerService
from services.trainer.torchrun import Command, _do
from shared.config import NodeConfig, load_config
from shared.contracts.codec import encode
from shared.runtime import FatalError
from swarm_cli.config_checks import check_objective, objective_problem
from tests.installed_packages import forget, install
from tests.integration.trainer_life import mixed_batch, node_config, tiny_policy

CODE = """
from services.trainer.objectives.base import Loss, Objective
from services.trainer.objectives.base import plain_loss

def loss(terms):
    plain = plain_loss(terms)
    {does}

mine = Objective(name="mine", loss=loss, aggregation="token_mean")
"""
ADVANTAGES = """
from services.trainer.objectives.base import Objective
from services.trainer.objectives.base import plain_loss

calls = []

def advantages(rewards):
    calls.append(rewards)
    {does}

mine = Objective(name="mine", loss=plain_loss, aggregation="token_mean", advantages=advantages)
"""
NAMED = "objective mine of the package my-package"


@pytest.fixture(autouse=True)
def _forget_packages() -> Iterator[None]:
    yield
    forget()


def chosen() -> NodeConfig:
    return load_config(None, {"tasks": [{"dataset": "gcd"}], "trainer": {"objective": "mine"}})


def check_told(part: str, words: str) -> None:
    """The trainer ends at its start with a sentence of these words, and `config check` says it."""
    wanted = f"the {part} of {NAMED} {words}.*: correct it, or change trainer.objective"
    with pytest.raises(FatalError, match=wanted):
        TrainerService(chosen())
    with pytest.raises(FatalError, match=wanted):
        raise FatalError(objective_problem(chosen()))


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("return None", "returned a NoneType, and must return a Loss of loss, ratio, clipped"),
        ("return plain.loss", "returned a Tensor, and must return a Loss"),
        ("return plain._replace(ratio=1.0)", "returned a float as ratio, and must return a tensor"),
        ("return plain._replace(loss=plain.loss.sum(1))", r"returned loss of shape \(2,\), and must have .* \(2, 3\)"),
        ("return plain._replace(clipped=plain.ratio)", "returned clipped of torch.float32, and it must be of torch.bool"),
        ("return plain._replace(loss=plain.loss / 0)", r"is not finite on two short answers \(\[\["),
        ("return plain._replace(loss=plain.loss.detach())", "does not depend on the logprobs of the policy"),
        ("return plain._replace(loss=(plain.loss * 0).sqrt())", "has a gradient that is not finite on two short answers"),
        ("return plain._replace(loss=-plain.ratio.log().log())", "is not finite on two short answers"),
        ("return plain._replace(loss=-plain.ratio.log().abs().sqrt())", "has a gradient that is not finite on two short answers"),
        ("return palin", r"fails on two short answers \(NameError: .*palin"),
        ("raise SystemExit(3)", r"fails on two short answers \(SystemExit: 3\)"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told_by_config_check_and_ends_the_trainer_before_it_loads_a_model(
    does: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", CODE.format(does=does))
    check_told("loss", words)
    check_objective(chosen())  # by `swarm up`, which does not import torch for it


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("return [1.0]", r"returned, for the rewards \[1.0, .*\], 1 numbers where 4 are needed"),
        ("return [1.0] * 4", r"returned, for the rewards \[.*\], 4 numbers where 8 are needed"),
        ("return [float('nan')] * len(rewards)", "returned, .*, the number nan, which is not finite"),
        ("return None", "returned, .*, a NoneType, which is no list of numbers"),
        ("return [rewards] * len(rewards)", "returned, .*, a list, which is no list of numbers"),
        ("return rewords", r"fails on the rewards of two groups \(NameError: .*rewords"),
    ],
)
def test_advantages_that_cannot_be_used_are_told_by_config_check_and_by_the_trainer(
    does: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", ADVANTAGES.format(does=does))
    check_told("function advantages", words)


def test_advantages_that_can_be_used_are_accepted_of_any_kind_of_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    does = "import torch; return torch.tensor(rewards) - 0.5"
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", ADVANTAGES.format(does=does))
    TrainerService(chosen())
    assert objective_problem(chosen()) == ""


def test_a_loss_that_can_be_used_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", CODE.format(does="return plain"))
    TrainerService(chosen())
    assert objective_problem(chosen()) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (CODE.format(does="return plain if plain.loss.numel() < 9 else None"), f"the loss of {NAMED} returned a NoneType"),
        (
            ADVANTAGES.format(does="return rewards if len(calls) < 3 else [1.0]"),
            rf"the function advantages of {NAMED} returned, for the rewards \[.*\], 1 numbers where",
        ),
    ],
    ids=["loss", "advantages"],
)
async def test_an_objective_that_fails_in_a_later_step_ends_every_process_of_the_trainer_with_a_sentence(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "swarm.objectives", "mine", code)
    assert objective_problem(chosen()) == ""
    config = node_config(tiny_policy(tmp_path / "tiny"), tmp_path, trainer={"objective": "mine"})
    learner, worker = Learner(config), TorchThread()
    batch = mixed_batch(learner.tokenizer, 1)
    with pytest.raises(FatalError, match=words):
        await DeviceStep(config, learner, worker, asyncio.Event()).train(batch)
    worker.shutdown()
    with pytest.raises(FatalError, match=words):
        _do(learner, config, 1, Command.STEP, encode(batch))
    assert all(torch.isfinite(each).all() for each in learner.policy().values())

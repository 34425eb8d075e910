"""What TRL gives to a reward and Swarm does not, told without running its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.reward_files import not_given

GIVEN_BY_TRL = """
import functools
def read(completions, answer, **kwargs):
    return [kwargs["trainer_state"].global_step, kwargs.get("completion_ids")]
def told(completions, log_metric=None, trainer_state=0, **kwargs): return []
@functools.wraps(told)
def decorated(*, completions, completion_ids=(), **kwargs): return []
part = functools.partial(told, scale=2)
short = lambda completions, trainer_state=None, **kwargs: []
class Judge:
    def __call__(self, completions, trainer_state=None): return []
judge = Judge()
def plain(answer, reference, trainer_state=None): return 1.0
def without(completions, environments=None, note=None, **kwargs): return kwargs["answer"]
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("read", ["completion_ids", "trainer_state"]),
        ("told", ["trainer_state", "log_metric"]),
        ("decorated", ["completion_ids"]),
        ("part", ["trainer_state", "log_metric"]),
        ("short", ["trainer_state"]),
        ("judge", ["trainer_state"]),
        ("plain", []),
        ("without", []),
    ],
)
def test_what_trl_gives_a_reward_and_is_not_here_is_told(tmp_path: Path, name: str, words: list[str]) -> None:
    (tmp_path / "r.py").write_text(GIVEN_BY_TRL)
    told = list(not_given(f"{tmp_path}/r.py:{name}"))
    assert len(told) == len(words)
    assert all(word in sentence for word, sentence in zip(words, told, strict=True))

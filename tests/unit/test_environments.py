"""Environments and tools: how calls are read, what a schema is made of, and how episodes are played
again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.task_sections import TaskSpec, rewards_from
from shared.environment_files import EnvironmentSpec
from shared.rewards import Mark
from shared.tasks.derive import Item, TaskError, derive_item, task_ref
from shared.tasks.environments import Played, play, read_calls
from shared.tasks.scoring import score_texts
from shared.tasks.verifiers import VerifierChoice

GAME = '''
class Game:
    """A number between 1 and 16."""

    def reset(self, answer, **row):
        self.secret, self.won = len(answer), False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: from 1 to 16.
        """
        self.won = number == self.secret
        return "right" if self.won else "higher" if number < self.secret else "lower"

    def get_reward(self):
        return (1.0, True) if self.won else (0.0, False)
'''
DOOR = """
class Echo:
    def reply(self, task, turns):
        return None if turns[-1] == task.task.answer else f"no, not {turns[-1]}"

    def score(self, task, turns):
        return 1.0 if turns[-1] == task.task.answer else 0.0
"""
ALWAYS = """
class E:
    def reply(self, task, turns):
        {}

    def score(self, task, turns):
        return 1.0
"""


def item() -> Item:
    return derive_item(task_ref("gcd", seed=1, index=0))


def in_file(folder: Path, text: str, name: str = "game.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def spec_of(folder: Path, **entry: Any) -> TaskSpec:
    (found,) = rewards_from([{"dataset": "gcd", **entry}], folder)
    return TaskSpec.model_validate(found)


def played(spec: TaskSpec, *answers: list[str] | str) -> Played:
    return Played(*play(item(), spec.scorer_name, answers, [0], 0, score_texts))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(a: int, b: int = 1) -> int:
    return a + b


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (call("add", a=2, b=3), {"a": 2, "b": 3}),
        ("<think>\nadd(a=9)\n</think>\n\n" + call("add", a=2), {"a": 2}),
        ("I compute it. " + call("add", a=2), {"a": 2}),
        ('{"name": "add", "parameters": {"a": 2}}', {"a": 2}),
        ('[{"name": "add", "arguments": {"a": 2}}]', {"a": 2}),
        ('{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 2}"}}', {"a": 2}),
        ("add(2, b=-3)", {"a": 2, "b": -3}),
        ("[add(a=2)]", {"a": 2}),
        ("```tool_code\nadd(a=2)\n```", {"a": 2}),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}', {"a": 2}),
    ],
)
def test_a_call_is_read_in_each_form_that_templates_teach(turn: str, expected: dict[str, Any]) -> None:
    (found,) = read_calls(turn, {"add": add})
    assert (found.tool, found.arguments, found.problem) == ("add", expected, "")


@pytest.mark.parametrize(
    "turn", ["", "5", "add", "the sum add(2) is 3", "sub(2)", '{"a": 2}', "[1, 2]", "{", "add(2) + 1", "lambda: add(2)", "[]"]
)
def test_an_answer_is_no_call(turn: str) -> None:
    assert read_calls(turn, {"add": add}) == []


@pytest.mark.parametrize(
    "turn",
    [
        "<tool_call>add two</tool_call>",
        call("sub", a=2),
        '<tool_call>{"name": "add", "arguments": [2]}</tool_call>',
        "add(1, 2, 3)",
        "add(a=x)",
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_policy(turn: str) -> None:
    (found,) = read_calls(turn, {"add": add})
    assert found.problem


@given(st.text(max_size=300) | st.text(alphabet='{}[]()"<>/,:tool_callnameargumentsadd12=\\', max_size=300))
def test_no_text_breaks_the_parser(turn: str) -> None:
    read_calls(turn, {"add": add})


def test_type_hints_and_docstring_are_the_schema(tmp_path: Path) -> None:
    in_file(
        tmp_path,
        '''
from typing import Literal

def look(word: str, most: int = 3, kind: Literal["noun", "verb"] = "noun", places: list[int] | None = None) -> list:
    """Look a word up
    in a book.

    Args:
        word: which one.
        most (int): at most so many.

    Returns:
        pages.
    """
''',
        "tools.py",
    )
    spec = spec_of(tmp_path, tools=["tools.py:look"])
    assert spec.turns is not None
    assert spec.turns.schemas() == [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Look a word up in a book.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "word": {"type": "string", "description": "which one."},
                        "most": {"type": "integer", "description": "at most so many."},
                        "kind": {"type": "string", "enum": ["noun", "verb"]},
                        "places": {"type": "array", "items": {"type": "integer"}},
                    },
                    "required": ["word"],
                },
            },
        }
    ]


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ('def f(a):\n    """D."""', "a has no type"),
        ('def f(a: set):\n    """D."""', "type set"),
        ("def f(a: int): ...", "docstring"),
        ('def f(*a: int):\n    """D."""', "*args"),
        ('async def f(a: int):\n    """D."""', "async"),
        ("f = 3", "no plain function"),
        ("def g(): ...", "no function f"),
        ("def f(:", "not Python"),
    ],
)
def test_a_tool_with_a_wrong_signature_is_told(tmp_path: Path, code: str, named: str) -> None:
    in_file(tmp_path, code, "tools.py")
    turns = spec_of(tmp_path, tools=["tools.py:f"]).turns
    assert turns is not None
    (problem,) = turns.problems()
    assert named in problem and "tools.py" in problem


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"environment": "game.py:Game", "tools": ["calculator"]}, "tools"),
        ({"environment": "game.py:Game", "verifier": "exact"}, "environment"),
        ({"environment": "game.py:Game", "reward": "r.py:f"}, "environment"),
        ({"environment": "game.py:Game", "sandbox": False}, "sandbox"),
        ({"environment": "Game!"}, "Game!"),
        ({"tools": ["calculater"]}, "calculator"),
        ({"max_turns": 3}, "max_turns"),
        ({"tools": ["calculator"], "max_turns": 65}, "max_turns"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, entry: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        spec_of(tmp_path, **entry)


def test_a_calculator_replies_and_the_last_turn_is_scored(tmp_path: Path) -> None:
    spec, answer = spec_of(tmp_path, tools=["calculator"]), item().task.answer
    assert answer is not None
    found = played(spec, [call("calculator", expression="12*34"), answer], [answer], ["calculator('1/0')"], ["calculator(", "5"])
    assert found.replies == [["408"], [], ["error: division by zero"], []]
    assert found.rewards[:2] == [1.0, 1.0] and (found.rewards[2] or 0.0) < 1.0


def test_a_class_with_tools_is_played_from_the_task(tmp_path: Path) -> None:
    in_file(tmp_path, GAME)
    spec, secret = spec_of(tmp_path, environment="game.py:Game"), len(item().task.answer or "")
    found = played(
        spec,
        [call("guess", number=secret + 1), call("guess", number=secret), "done"],
        ["I give up"],
        [call("guess", number=secret)],
    )
    assert found.replies == [["lower", "right"], [], ["right"]]
    assert found.rewards == [1.0, 0.0, 1.0] and found.marks == [Mark.PASSED, Mark.FAILED, Mark.PASSED]


def test_a_class_with_reply_and_score_is_played(tmp_path: Path) -> None:
    in_file(tmp_path, DOOR)
    answer = item().task.answer or ""
    found = played(spec_of(tmp_path, environment="game.py:Echo"), ["7x", answer], "8x")
    assert found.replies == [["no, not 7x"], ["no, not 8x"]] and found.rewards == [1.0, 0.0]


def test_a_turn_after_the_end_gets_no_reply(tmp_path: Path) -> None:
    in_file(tmp_path, DOOR)
    answer = item().task.answer or ""
    assert played(spec_of(tmp_path, environment="game.py:Echo"), [answer, "and more", "and more"]).replies == [[]]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return 3", "replied int"),
        ("return 'x' * 8193", "8,193 characters"),
        ("raise KeyError('gone')", "KeyError"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_an_environment_that_fails_makes_the_reward_unknown(tmp_path: Path, body: str, told: str) -> None:
    in_file(tmp_path, ALWAYS.format(body))
    problems: list[str] = []
    spec = spec_of(tmp_path, environment="game.py:E")
    found = play(item(), spec.scorer_name, [["a"], ["b"]], [0], 0, score_texts, problems)
    assert found.rewards == [None, None] and found.marks == [Mark.RAISED] * 2 and found.replies == [[], []]
    assert len(problems) == 1 and told in problems[0]


def test_one_that_floods_a_group_is_refused(tmp_path: Path) -> None:
    in_file(tmp_path, ALWAYS.format("return 'x' * 8000"))
    with pytest.raises(TaskError, match="1,000,000"):
        played(spec_of(tmp_path, environment="game.py:E"), *[["a"] * 8] * 20)


def test_episodes_that_draw_at_random_repeat(tmp_path: Path) -> None:
    in_file(tmp_path, "import random\n" + ALWAYS.format("return str(random.random())"))
    spec = spec_of(tmp_path, environment="game.py:E")
    assert played(spec, ["a"], ["b"]).replies == [played(spec, ["c"]).replies[0]] * 2


def test_the_identity_is_that_of_the_code_and_not_of_its_place(tmp_path: Path) -> None:
    ids = []
    for number, (code, turns) in enumerate([(GAME, 8), (GAME, 8), (GAME + "\n", 8), (GAME, 4)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        in_file(folder, code)
        spec = spec_of(folder, environment="game.py:Game", max_turns=turns)
        assert spec.turns is not None
        ids.append((spec.turns.id, spec.scorer_id))
    assert ids[0] == ids[1] and len({one for one, _ in ids}) == 3 and len({other for _, other in ids}) == 3


def test_a_name_says_all_of_it(tmp_path: Path) -> None:
    in_file(tmp_path, GAME)
    for entry in ({"environment": "game.py:Game", "max_turns": 3}, {"tools": ["calculator"], "verifier": "final_number"}):
        spec = spec_of(tmp_path, **entry)
        assert EnvironmentSpec.of(spec.scorer_name) == spec.turns
        assert VerifierChoice([spec]).name_for(task_ref("gcd", seed=1, index=0)) == spec.scorer_name
        assert TaskSpec.model_validate(spec.model_dump()).scorer_name == spec.scorer_name
    assert EnvironmentSpec.of("exact") is None

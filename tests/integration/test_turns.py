"""Answers of several turns from end to end, on a real engine and in the real sandbox: what the
policy said is what the trainer trains on, every node derives what the environment said, and turns
that no policy can have said are refused and blamed.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoTokenizer
from typer.testing import CliRunner

from services.generator.engines.base import SamplingParams, WrongSetting
from services.generator.engines.openai_engine import OpenAiEngine
from services.generator.engines.transformers_engine import TransformersEngine
from services.generator.episodes import Episodes
from services.generator.groups import rollout_group
from services.generator.tasks import PromptedTask
from services.trainer.selection.group_tokens import Said, TokenRules, foreign_tokens, local_tokens
from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.border_rules import BorderRules
from services.verifier.copies import ReplayMemory
from services.verifier.episodes import answers_of, turns_problem, with_replies
from services.verifier.sharing import sign
from services.verifier.trust import KnownKeys
from shared.config import NodeConfig, TaskSpec, load_config
from shared.config.task_sections import rewards_from
from shared.contracts import subjects
from shared.contracts.codec import encode, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from shared.contracts.messages import Completion, RolloutGroup, Sampling, ScoredGroup, Task
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.model.prompts import encode_answer, render_prompt, tokenizer_hash
from shared.model.reading import end_tokens
from shared.tasks.derive import derive_task, task_ref
from shared.tasks.evaluation import PassRules
from shared.tasks.held_out import HeldOut
from shared.tasks.reference_checks import try_rewards
from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob
from swarm_cli.app import app
from tests.long_forms import FULL

BASE = Path(__file__).resolve().parents[2] / "models" / "base"
NOW_S = 1_000_000.0
GAME = '''
class Guess:
    """Says whether the number is higher or lower, whatever the policy says, and never ends without it."""

    def reply(self, task, turns):
        if turns[-1].strip() == task.task.answer:
            return None
        return "higher" if len(turns[-1]) % 2 else "lower"

    def score(self, task, turns):
        return 1.0 if turns[-1].strip() == task.task.answer else 0.0
'''
FORGERIES = 1000 if FULL else 60


def source(folder: Path, **entry: object) -> TaskSpec:
    (folder / "game.py").write_text(GAME)
    (found,) = rewards_from([{"dataset": "gcd", **entry}], folder)
    return TaskSpec.model_validate(found)


def config_of(spec: TaskSpec, node: str = "beta") -> NodeConfig:
    return NodeConfig.model_validate({"node": {"id": node}, "model": {"path": str(BASE)}, "tasks": [spec.model_dump()]})


def task_of(index: int) -> Task:
    return derive_task(task_ref("gcd", seed=1 + 1000 * (index // 400), index=index % 400))


def rules_of(tokenizer: object) -> TokenRules:
    ends = end_tokens(config_of(TaskSpec(dataset="gcd")).model, tokenizer)
    return TokenRules(
        tokenizer=tokenizer,
        tokenizer_hash=tokenizer_hash(tokenizer),
        end_token_id=ends[0],
        end_token_ids=ends,
        vocabulary_size=776,
        max_length=1024,
    )


@pytest.mark.slow
@pytest.mark.deadline(200)
async def test_the_trainer_trains_on_the_tokens_that_the_policy_sampled(tmp_path: Path) -> None:
    spec = source(tmp_path, environment="game.py:Guess", max_turns=3)
    config, tokenizer = config_of(spec), AutoTokenizer.from_pretrained(BASE)
    engine = TransformersEngine(str(BASE), device="cpu", threads=1, max_model_len=1024)
    await engine.start()
    episodes = Episodes(engine, config, config.tasks)
    params = SamplingParams(max_new_tokens=60)
    prompted = [PromptedTask(task_of(n), render_prompt(tokenizer, task_of(n).prompt), spec.turns) for n in range(3)]
    try:
        samples = await episodes.sampled(prompted, 4, params, seed=7, limit_s=100)
        again = await episodes.sampled(prompted, 4, params, seed=7, limit_s=100)
        assert samples == again
        short = await episodes.sampled(prompted, 4, replace(params, max_new_tokens=9), seed=7, limit_s=100)
        assert all(len(each.token_ids) <= 9 for of_task in short for each in of_task)
        assert max(len(each.turns) for of_task in samples for each in of_task) == 3  # max_turns: the game goes on
        several = 0
        async with ScorerPool.from_config(config.verifier, tasks=config.tasks, workers=1) as pool:
            for task, of_task in zip(prompted, samples, strict=True):
                group = rollout_group(
                    task,
                    of_task,
                    node="beta",
                    draw=0,
                    model=ModelIdentity(name="toy", tokenizer_hash=tokenizer_hash(tokenizer)),
                    params=params,
                    created_at=NOW_S,
                )
                (result,) = await pool.run(
                    [ScoringJob(ref=group.task.ref, texts=answers_of(group, spec.turns), expected=group.task)]
                )
                assert turns_problem(group, result, spec.turns) == ""
                scored = replies_of(group, result, spec)
                assert scored.replies == [list(each.replies) for each in of_task]
                tokens = local_tokens(group, rules_of(tokenizer), Said.of(scored))
                if not any(len(each.replies) for each in of_task):
                    continue
                foreign = foreign_tokens(group, rules_of(tokenizer), Said.of(scored))
                assert (foreign.completions, foreign.sampled) == (tokens.completions, tokens.sampled)
                logprobs = await engine.score([task.prompt_ids] * 4, tokens.completions, params)
                for place, sample in enumerate(of_task):
                    marks = tokens.sampled[place]
                    assert marks is not None
                    said = [token for token, ours in zip(tokens.completions[place], marks, strict=True) if ours]
                    assert said == list(sample.token_ids)
                    found = [logprob for logprob, ours in zip(logprobs[place], marks, strict=True) if ours]
                    torch.testing.assert_close(torch.tensor(found), torch.tensor(sample.logprobs), atol=1e-4, rtol=0)
                    behaviour = tokens.behaviour_logprobs[place] or []
                    assert [math.isfinite(value) for value in behaviour] == list(marks)
                    rendered = written(tokenizer, task, sample.turns, sample.replies)
                    assert [*task.prompt_ids, *tokens.completions[place]] == rendered[: len(task.prompt_ids) + len(marks)]
                    several += len(sample.replies) > 0
        assert several >= 6
    finally:
        await episodes.close()
        await engine.close()


def written(tokenizer: object, task: PromptedTask, turns: list[str], replies: tuple[str, ...]) -> list[int]:
    """The conversation as the model's template writes it as a whole, from the sampled text."""
    messages = [{"role": "user", "content": task.task.text}]
    for turn, reply in zip(turns, [*replies, ""], strict=False):
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": reply}]
    text = tokenizer.apply_chat_template(messages[: 2 * len(turns)], tokenize=False)  # type: ignore[attr-defined]
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]  # type: ignore[operator]


def replies_of(group: RolloutGroup, result: JobResult, spec: TaskSpec) -> ScoredGroup:
    assert spec.turns is not None
    scored = ScoredGroup(
        group_id="0" * 64,
        origin="local",
        group=group,
        rewards=[reward or 0.0 for reward in result.rewards],
        scored_by="beta",
        score_seconds=0.0,
        scored_at=NOW_S,
    )
    return with_replies(scored, result, spec.turns)


def call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def said(tokenizer: object, turns: list[str], *, ends: list[tuple[int, int]] | None = None, finish: str = "stop") -> Completion:
    """An answer of these turns, as a generator makes it."""
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    for turn in turns:
        ids += encode_answer(tokenizer, turn, ended=True, end_token_id=2)
        places.append((len(ids), sum(map(len, turns[: len(places) + 1]))))
    places = places if ends is None else ends
    return Completion(
        text="".join(turns),
        finish_reason=finish,  # type: ignore[arg-type]
        token_count=len(ids),
        token_ids=pack_ids(ids),
        behaviour_logprobs=pack_logprobs([-0.5] * len(ids)),
        turn_tokens=pack_ids([tokens for tokens, _ in places]) if len(places) > 1 else None,
        turn_chars=pack_ids([chars for _, chars in places]) if len(places) > 1 else None,
    )


def honest(tokenizer: object, spec: TaskSpec, draw: int, chance: random.Random) -> RolloutGroup:
    """Four answers of one to four turns, with calls and texts that nobody else has."""
    completions = []
    for _ in range(4):
        calls = [call(f"{chance.randrange(10**6)}*{chance.randrange(10**6)}") for _ in range(chance.randrange(4))]
        completions.append(said(tokenizer, [*calls, f"It is {chance.randrange(10**9)}, as far as I see."]))
    return group_of(spec, draw, completions)


def group_of(spec: TaskSpec, draw: int, completions: list[Completion]) -> RolloutGroup:
    return RolloutGroup(
        node="beta",
        created_at=NOW_S - 5,
        draw=draw,
        task=task_of(draw),
        completions=completions,
        model=ModelIdentity(name="m", tokenizer_hash="a" * 64),
        policy_version=0,
        sampling=Sampling(max_new_tokens=512),
        environment=msgspec.UNSET if spec.turns is None else spec.turns.id,
    )


def with_first(group: RolloutGroup, first: Completion) -> RolloutGroup:
    return msgspec.structs.replace(group, completions=[first, *group.completions[1:]])


def merged(tokenizer: object) -> Completion:
    return said(tokenizer, [call("1+1"), "2"], ends=[])


def missing(tokenizer: object) -> Completion:
    return said(tokenizer, [call("1+1"), call("2+2")])


def split(tokenizer: object) -> Completion:
    return said(tokenizer, [call("1+1"), "It is", " 2"])


def after_the_end(tokenizer: object) -> Completion:
    return said(tokenizer, ["It is 2", call("1+1"), "2"])


def too_many(tokenizer: object) -> Completion:
    return said(tokenizer, [*[call("1+1")] * 4, "2"])


def beyond_the_text(tokenizer: object) -> Completion:
    made = said(tokenizer, [call("1+1"), "2"])
    # A sender writes bytes, and is held by no check of this type.
    msgspec.structs.force_setattr(made, "turn_chars", pack_ids([len(made.text) - 1, len(made.text) + 1]))
    return made


def beyond_the_tokens(tokenizer: object) -> Completion:
    made = said(tokenizer, [call("1+1"), "2"])
    msgspec.structs.force_setattr(made, "turn_tokens", pack_ids([3, made.token_count + 1]))
    return made


FORGED: list[tuple[Callable[[object], Completion], Refusal]] = [
    (merged, Refusal.TURNS),
    (missing, Refusal.TURNS),
    (split, Refusal.TURNS),
    (after_the_end, Refusal.TURNS),
    (too_many, Refusal.TURNS),
    (beyond_the_text, Refusal.MALFORMED),
    (beyond_the_tokens, Refusal.MALFORMED),
]


def other_ids(tokenizer: object) -> Completion:
    """Tokens that say something else than the text."""
    other = said(tokenizer, [call("1+2"), "2"])
    return msgspec.structs.replace(said(tokenizer, [call("1+1"), "2"]), token_ids=other.token_ids)


def shifted_ids(tokenizer: object) -> Completion:
    """Tokens that say the text, of which the first turn has one too many."""
    made = said(tokenizer, [call("1+1"), "2"])
    first, last = unpack_ids(made.turn_tokens or b"")
    return msgspec.structs.replace(made, turn_tokens=pack_ids([first + 1, last]))


class Gate:
    """The border of alpha with its real scorers."""

    def __init__(self, folder: Path, spec: TaskSpec, pool: ScorerPool) -> None:
        config = config_of(spec, "alpha")
        rules = replace(BorderRules.of(config, "dataset"), max_tokens=2000, max_answer_chars=16_000)
        known = KnownKeys(folder / "known_keys.txt", ("alpha", SigningKey(new_seed()).public_key))
        self.border = Border(rules, known, ReplayMemory(10_000, folder / "accepted.txt"), HeldOut([]))
        self._spec, self._pool, self._seq = spec, pool, 0

    async def verdict(self, group: RolloutGroup, key: SigningKey, node: str = "beta") -> JobResult | Refused:
        self._seq += 1
        group = msgspec.structs.replace(group, node=node)
        found = self.border.examine(subjects.rollouts(node), encode(sign(group, key)), NOW_S, self._seq)
        if not isinstance(found, Candidate):
            return found
        job = ScoringJob(
            ref=group.task.ref,
            texts=answers_of(found.group, self._spec.turns),
            expected=group.task,
            sender=key.public_key,
            established=True,
        )
        (result,) = await self._pool.run([job])
        return self.border.conclude(found, result, NOW_S) or result


@pytest.mark.slow
@pytest.mark.deadline(1500 if FULL else 200)
async def test_honest_turns_are_taken_and_forged_ones_refused_and_blamed(tmp_path: Path) -> None:
    spec, tokenizer = source(tmp_path, tools=["calculator"], max_turns=4), AutoTokenizer.from_pretrained(BASE)
    chance, key = random.Random(3), SigningKey(new_seed())
    async with ScorerPool(workers=1, answer_timeout_s=10, memory_mb=2048, tasks=[spec], foreign_workers=1) as pool:
        gate = Gate(tmp_path, spec, pool)
        for draw in range(FORGERIES):
            made = honest(tokenizer, spec, draw, chance)
            found = await gate.verdict(made, key)
            assert isinstance(found, JobResult), found
            assert [len(each) for each in found.said] == [len(each.turns) - 1 for each in made.completions]
        for number in range(FORGERIES):
            (forge, reason), sender = FORGED[number % len(FORGED)], SigningKey(new_seed())
            made = with_first(honest(tokenizer, spec, FORGERIES + number, chance), forge(tokenizer))
            refused = await gate.verdict(made, sender, f"gamma{number}")
            assert isinstance(refused, Refused) and refused.reason is reason, (forge.__name__, refused)
            assert refused.blamed == sender.public_key


@pytest.mark.parametrize("forge", [other_ids, shifted_ids])
def test_tokens_that_do_not_say_a_turn_are_never_trained_on(forge: Callable[[object], Completion], tmp_path: Path) -> None:
    """Only the learner knows its tokenizer. It encodes the text that was scored, without the
    sender's logprobs.
    """
    spec, tokenizer = source(tmp_path, tools=["calculator"]), AutoTokenizer.from_pretrained(BASE)
    expected, found = [
        foreign_tokens(
            replace_model(group_of(spec, 0, [first, said(tokenizer, ["3"])]), tokenizer),
            rules_of(tokenizer),
            Said([["2"], []], spec.turns.tools_json if spec.turns else ""),
        )
        for first in (said(tokenizer, [call("1+1"), "2"]), forge(tokenizer))
    ]
    assert (found.completions, found.sampled) == (expected.completions, expected.sampled)
    assert found.reencoded and not expected.reencoded
    assert found.behaviour_logprobs[0] is None and expected.behaviour_logprobs[0] is not None


def replace_model(group: RolloutGroup, tokenizer: object) -> RolloutGroup:
    """The group as a node with this tokenizer sends it."""
    return msgspec.structs.replace(group, model=ModelIdentity(name="m", tokenizer_hash=tokenizer_hash(tokenizer)))


@pytest.mark.deadline(120)
async def test_another_version_is_not_taken_in_and_nobody_is_blamed(tmp_path: Path) -> None:
    spec, tokenizer = source(tmp_path, tools=["calculator"], max_turns=4), AutoTokenizer.from_pretrained(BASE)
    other = spec.model_copy(update={"max_turns": 3})
    async with ScorerPool(workers=1, answer_timeout_s=10, memory_mb=2048, tasks=[spec], foreign_workers=1) as pool:
        gate, chance, key = Gate(tmp_path, spec, pool), random.Random(5), SigningKey(new_seed())
        for draw, made in enumerate((honest(tokenizer, other, 0, chance), honest(tokenizer, spec, 1, chance))):
            if draw:
                made = msgspec.structs.replace(made, environment=msgspec.UNSET, completions=[said(tokenizer, ["5"])] * 2)
            refused = await gate.verdict(made, key)
            assert isinstance(refused, Refused) and refused.reason is Refusal.TASK_NOT_ALLOWED and refused.blamed is None
        # What the policy wrote as if the environment had said it is an answer like any other.
        text = "calculator(expression='1+1')\nuser\n2\nassistant\n2"
        taken = await gate.verdict(
            group_of(spec, 2, [said(tokenizer, [text]), said(tokenizer, ["No, I do not know it at all."])]), key
        )
        assert isinstance(taken, JobResult) and taken.said == [[], []]


@pytest.mark.deadline(200)
async def test_environments_that_cannot_be_played_are_told_and_block_nothing(tmp_path: Path) -> None:
    codes = {
        "Hangs": "while True: pass",
        "Raises": "raise RuntimeError('broken')",
        "Differs": "import time; return str(time.perf_counter_ns())",
        "Floods": "return 'x' * 1_000_000",
        "Leaves": "import os; os._exit(3)",
    }
    bodies = [
        f"class {name}:\n    def reply(self, task, turns):\n        {code}\n    def score(self, task, turns): return 1.0\n"
        for name, code in codes.items()
    ]
    bodies.append("class Talks:\n    def reset(self, **row): return 'Hello'\n    def go(self) -> str:\n        'Go.'\n")
    bodies[-1] += "    def get_reward(self): return 1"
    (tmp_path / "bad.py").write_text("\n".join(bodies))
    told = {}
    for name in [*codes, "Talks"]:
        (found,) = rewards_from([{"dataset": "gcd", "environment": f"bad.py:{name}"}], tmp_path)
        spec = TaskSpec.model_validate(found)
        async with ScorerPool(workers=1, answer_timeout_s=1, memory_mb=2048, tasks=[spec]) as pool:
            (trial,) = await try_rewards(pool, [spec], PassRules([spec]))
            assert trial.unusable
            told[name] = trial.problem
            (alive,) = await pool.run([ScoringJob(ref=task_ref("gcd", seed=1, index=0), want_task=True)])
            assert alive.task is not None
    assert "broken" in told["Raises"] and "played again" in told["Differs"] and "8,192" in told["Floods"]
    assert "reset" in told["Talks"] and len(set(told.values())) == len(told)


@pytest.mark.slow
async def test_tools_that_no_answer_calls_are_told_once(tmp_path: Path) -> None:
    spec, tokenizer = source(tmp_path, tools=["calculator"]), AutoTokenizer.from_pretrained(BASE)
    engine = TransformersEngine(str(BASE), device="cpu", threads=1, max_model_len=1024)
    await engine.start()
    episodes = Episodes(engine, config_of(spec), [spec])
    task = PromptedTask(task_of(0), render_prompt(tokenizer, task_of(0).prompt), spec.turns)
    try:
        with capture_logs() as logs:
            for _ in range(3):
                await episodes.sampled([task], 128, SamplingParams(max_new_tokens=2), seed=7, limit_s=100)
    finally:
        await episodes.close()
        await engine.close()
    assert [(line["task"], line["answers"]) for line in logs if line["event"] == "no_tool_calls"] == [("gcd", 256)]


async def test_a_server_that_keeps_no_tokens_is_refused(tmp_path: Path) -> None:
    spec = source(tmp_path, environment="game.py:Guess")
    engine = OpenAiEngine(str(BASE), base_url="http://127.0.0.1:9/v1", served_model="m")
    with pytest.raises(WrongSetting, match="transformers"):
        Episodes(engine, config_of(spec), [spec])
    await engine.close()


def test_shown_text_has_what_the_environment_said(tmp_path: Path) -> None:
    spec, tokenizer = source(tmp_path, tools=["calculator"]), AutoTokenizer.from_pretrained(BASE)
    group = group_of(spec, 0, [said(tokenizer, [call("6*7"), "42"]), said(tokenizer, ["41"])])
    found = JobResult([1.0, 0.0], None, None, "", 0, 0.0, said=[["42"], []])
    scored = replies_of(group, found, spec)
    assert scored.shown(0).splitlines() == [call("6*7"), "[environment] 42", "42"] and scored.shown(1) == "41"
    assert json.loads(scored.tools or "")[0]["function"]["name"] == "calculator"
    assert unpack_logprobs(group.completions[0].behaviour_logprobs or b"")


@pytest.mark.deadline(120)
async def test_tools_and_environments_of_the_page_work_as_they_are_printed(tmp_path: Path) -> None:
    page = (BASE.parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")
    page = page[page.index("## Tools and environments") : page.index("## A reward of your own")]
    (search, game), entries = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "toml"))
    (tmp_path / "tools.py").write_text(search)
    (tmp_path / "game.py").write_text(game)
    (tmp_path / "node.toml").write_text("\n".join([*entries, entries[0].replace('["calculator"]', '["tools.py:search"]')]))
    tasks = load_config(tmp_path / "node.toml", environment={}).tasks
    assert [spec.turns.title for spec in tasks if spec.turns] == ["tools calculator", "environment game.py:Game", "tools search"]
    turns = [call("6*7"), "guess(number=0)", 'search(word="group")']
    for spec, turn, reply in zip(tasks, turns, ["42", "higher", '["group: all answers to one task"]'], strict=True):
        async with ScorerPool(workers=1, answer_timeout_s=10, memory_mb=2048, tasks=[spec]) as pool:
            assert [trial.problem for trial in await try_rewards(pool, [spec], PassRules([spec]))] in ([], [""])
            ref = task_ref(spec.dataset, spec.canonical_config, seed=1, index=0)
            (result,) = await pool.run([ScoringJob(ref=ref, texts=[[turn, "I do not know."]])])
            assert result.said == [[reply]]


@pytest.mark.slow
def test_swarm_eval_plays_several_turns_and_counts_them() -> None:
    model = ["experiments/models/calculator", "--config", "experiments/turns/calculator.toml", "--n", "8", "--k", "4"]
    found = CliRunner().invoke(app, ["eval", *model, "--answers", "8", "--json"])
    assert found.exit_code == 0, found.output
    answers = json.loads(found.stdout)["answers"]
    assert len(answers) == 32 and {each["turns"] for each in answers} > {1}
    for each in answers:
        assert ("[environment]" in each["answer"]) == (each["turns"] > 1)
        assert not each["passed"] or each["reference"] in each["answer"].splitlines()[-1]

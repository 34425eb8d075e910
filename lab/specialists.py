"""Asks whether a skill crosses over: four policies, each with one skill and only the form of the
others' answers, share what they solve, or spend as many completions in another way.

    python -m lab.specialists run experiments/specialists/q19-specialists.toml var/q19 --seeds 231
    python -m lab.specialists report experiments/results/q19-specialists

A skill is a substitution code: each of six digits stands for another, and a question says only the
code's name. A last digit tells whether their sum is odd, which a policy this small can only guess.
So half of the answers of a node that has the skill are right, and it always has groups to share.

The common base was taught twelve other codes, and of the skills that an answer has seven digits.
From it each seed teaches four specialists. A guess at a lacking skill is right once in two million.

The runs are those of the simulator, with the services' own code. `Study` has what three arms
change.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from reasoning_gym.factory import DATASETS, ProceduralDataset, register_dataset

from lab.arms import plan_run
from lab.floors import screen, write_floors
from lab.jobs import make_run
from lab.measures import Point
from lab.plots import draw_panels
from lab.records import RecordWriter, read_records
from lab.runs import finished_runs, read_manifest, runs_to_make, write_manifest
from lab.sim_node import SimNode
from lab.simulate import Progress, Simulation
from lab.spec import load_spec
from lab.statistics import holm, paired_differences, sign_flip_p
from lab.task_desk import Shared
from shared.config import TaskSpec
from shared.contracts.messages import Batch, BatchItem, Completion, user_prompt
from shared.intervals import estimate
from shared.model.base_policy import BasePolicyRecipe, answer_loss, new_model, replace_policy, train_tokenizer
from shared.model.prompts import render_prompt
from shared.tasks.sandbox import ScorerPool, ScoringJob


def _code(name: str) -> Callable[[str], str]:
    """The substitution code of this name, and whether the sum of the digits is odd."""
    table = str.maketrans("0123456789", "".join(random.Random(f"code {name}").sample("0123456789", 10)))
    return lambda digits: digits.translate(table) + str(sum(map(int, digits)) % 2)


SKILLS = {name: _code(name) for name in ("amber", "birch", "cedar", "denim")}
TAUGHT_BEFORE = {name: _code(name) for name in (f"code{letter}" for letter in "abcdefghijkl")}


def draw(name: str, rng: random.Random, *, form_only: bool = False) -> tuple[str, str]:
    """A question and its answer; `form_only`: six random digits, and 0 or 1."""
    digits, others = ("".join(rng.choices("0123456789", k=6)) for _ in range(2))
    right = (SKILLS.get(name) or TAUGHT_BEFORE[name])(digits)
    return f"{name} {digits}", others + rng.choice("01") if form_only else right


@dataclass
class SkillConfig:
    """A skill's dataset has no settings but these, which reasoning-gym requires."""

    seed: int | None = None
    size: int = 1 << 20

    def validate(self) -> None:
        """Accept all."""


class _Skill(ProceduralDataset):  # type: ignore[misc]  # reasoning-gym has no types
    skill: str

    def __init__(self, config: SkillConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        asked, answer = draw(self.skill, random.Random(self.seed + index))
        return {"question": asked, "answer": answer, "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return 1 for the right answer, or else 0."""
        return float(answer == entry["answer"])


def register_skills() -> None:
    """Let tasks name the skills as datasets, in this process."""
    for name in SKILLS:
        if name not in DATASETS:
            register_dataset(name, type(name, (_Skill,), {"skill": name}), SkillConfig)


# The policies

_RECIPE = BasePolicyRecipe(hidden_size=128, intermediate_size=512, layers=1, heads=4, kv_heads=4, vocab_size=512)
BASE_STEPS = 500
MOST_STEPS = 200
"""Of teaching a specialist."""
TAUGHT_TO = 0.47
"""Pass rate of its sampled answers; the most is 0.5."""
_OWN_SHARE = 0.7
"""Part of its lessons that is its own skill; answers to the others' questions are random."""


class Pupil:
    """A policy being taught, on questions that no run asks: they come from seeds of its own."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.tokenizer, self.model = tokenizer, model
        self._prompts: dict[str, list[int]] = {}  # by name, because rendering takes longer than a step
        self._digits = {digit: int(tokenizer.convert_tokens_to_ids(digit)) for digit in "0123456789"}

    def teach(self, drawn: Callable[[], tuple[str, str]], steps: int, rate: float, until: str | None = None) -> int:
        """Train on 32 questions a step, for so many steps or until it has a skill. Return the
        number of steps.
        """
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / 20)
            optimizer.zero_grad(set_to_none=True)
            rows = [self._row(*drawn()) for _ in range(32)]
            answer_loss(self.model, rows, int(self.tokenizer.pad_token_id)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            if until is not None and step % 2 == 0 and self.passed(until) >= TAUGHT_TO:
                return step
        return steps

    @torch.no_grad()
    def passed(self, name: str, questions: int = 100) -> float:
        """Return the mean probability of the right answers to a skill's questions: the pass rate of
        answers that are sampled at temperature 1.
        """
        rng = random.Random(f"check {name}")
        rows = [self._row(*draw(name, rng)) for _ in range(questions)]
        ids = torch.tensor([prompt + answer for prompt, answer in rows])
        first = len(rows[0][0])
        logprobs = self.model(input_ids=ids, use_cache=False).logits[:, first - 1 : -1].log_softmax(-1)
        return float(logprobs.gather(-1, ids[:, first:, None]).sum((1, 2)).exp().mean())

    def _row(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        name, digits = question.split()
        if name not in self._prompts:
            self._prompts[name] = render_prompt(self.tokenizer, user_prompt(f"{name} 000000"))
        prompt, six = self._prompts[name], iter(digits)
        return (
            [self._digits[next(six)] if each == self._digits["0"] else each for each in prompt],
            [*(self._digits[each] for each in answer), int(self.tokenizer.eos_token_id)],
        )


def base_policy() -> Pupil:
    """The common base: three quarters of what it is taught are the other codes, the rest are the
    skills' questions with random digits as answers.
    """
    names, skills, rng = list(TAUGHT_BEFORE), list(SKILLS), random.Random("base")
    tokenizer = train_tokenizer((draw(name, rng)[0] for name in (*names, *skills) for _ in range(20)), _RECIPE.vocab_size)
    pupil = Pupil(tokenizer, new_model(_RECIPE, tokenizer))
    pupil.teach(
        lambda: draw(rng.choice(names), rng) if rng.random() < 0.75 else draw(rng.choice(skills), rng, form_only=True),
        BASE_STEPS,
        rate=2e-3,
    )
    return pupil


def teach_specialists(base: Pupil, folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Write the four specialists, each in a folder named after its skill, and `all`, one policy
    that is taught all four from as many right answers. Return by policy its steps and its pass rate
    on each skill; also of the base (`form`), and of a policy of the specialists' mean weights.
    """
    pupils = {name: Pupil(base.tokenizer, copy.deepcopy(base.model)) for name in (*SKILLS, "all", "mean", "form")}
    steps = dict.fromkeys(pupils, 0)
    for skill in SKILLS:
        others, rng = [name for name in SKILLS if name != skill], random.Random(f"{skill} {seed}")

        def drawn(skill: str = skill, others: Sequence[str] = others, rng: random.Random = rng) -> tuple[str, str]:
            return draw(skill, rng) if rng.random() < _OWN_SHARE else draw(rng.choice(others), rng, form_only=True)

        steps[skill] = pupils[skill].teach(drawn, MOST_STEPS, rate=1e-3, until=skill)
    rng = random.Random(f"all {seed}")
    steps["all"] = round(_OWN_SHARE * sum(steps.values()))
    pupils["all"].teach(lambda: draw(rng.choice(list(SKILLS)), rng), steps["all"], rate=1e-3)
    pupils["mean"].model.load_state_dict(mean_weights([pupils[skill].model.state_dict() for skill in SKILLS]))
    for name in (*SKILLS, "all"):
        replace_policy(folder / name, pupils[name].model, base.tokenizer, {"skill": name, "seed": seed})
    return {name: {"steps": steps[name]} | {skill: pupil.passed(skill) for skill in SKILLS} for name, pupil in pupils.items()}


def mean_weights(weights: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of several policies' weights, by name."""
    return {name: torch.stack([each[name] for each in weights]).mean(0) for name in weights[0]}


# The runs

AVERAGED_EVERY = 10


class Study(Simulation):
    """A simulated run, with what three arms change."""

    def run(self, records: RecordWriter, progress: Progress | None = None) -> None:
        """Run all rounds. Record the CPU seconds, each node's own skill, and its pass rate there
        before and after, as the probability of the right answers.
        """
        skills = {node.name: [skill] if (skill := _own_skill(node)) in SKILLS else list(SKILLS) for node in self.honest}

        def passed() -> dict[str, float]:
            pupils = {node.name: Pupil(node.desk.tokenizer, node.policy.learner.model) for node in self.honest}
            return {name: fmean(pupil.passed(skill, 300) for skill in skills[name]) for name, pupil in pupils.items()}

        before, started = passed(), time.process_time()
        super().run(records, progress)
        cpu_s = time.process_time() - started
        own = {name: mine[0] for name, mine in skills.items() if len(mine) == 1}
        records.write("cost", cpu_s=cpu_s, own=own, passed=[before, passed()])

    def batch_of(self, node: SimNode, now_s: float) -> Batch | None:
        """The node's next batch. Without defences the first J foreign groups of the draw have a
        place; to imitate, all right answers are taken for another node's.
        """
        batch, arm = node.batch(now_s), self.run_plan.arm
        if batch is None or batch.places is None or arm not in {"uniform", "imitation"}:
            return batch
        foreign = [item for item in batch.items if item.scored.origin == "external"][: batch.places.keep]
        items = [*(item for item in batch.items if item.scored.origin == "local"), *foreign]
        if arm == "imitation":
            items = [_imitated(item) for item in items if any(item.scored.passed or ())] or items
        return msgspec.structs.replace(batch, items=items, places=None)

    def round(self, number: int, records: RecordWriter) -> None:
        """Run one round, and average all weights where the arm does."""
        super().round(number, records)
        if self.run_plan.arm == "averaging" and number % AVERAGED_EVERY == 0:
            models = [node.policy.learner.model for node in self.honest]
            mean = mean_weights([model.state_dict() for model in models])
            for model in models:
                model.load_state_dict(mean)


def _own_skill(node: SimNode) -> str:
    return Path(node.config.model.path).name


def _imitated(item: BatchItem) -> BatchItem:
    """The item with its right answer, and a wrong one that is never trained on. So each right
    answer has the same weight, which makes a step one of cross-entropy.
    """
    group = item.scored.group
    answers = [Completion(text=text, finish_reason="stop", token_count=1) for text in (group.task.answer or "", "no")]
    group = msgspec.structs.replace(group, completions=answers, prompt_ids=None)
    scored = msgspec.structs.replace(item.scored, origin="external", group=group, rewards=[1.0, 0.0], passed=[True, False])
    return msgspec.structs.replace(item, scored=scored, staleness=None)


def found_by_sampling(simulation: Simulation, questions: int = 10, answers: int = 64) -> float:
    """The share of questions of lacking skills of which one of so many answers is right before any
    training; so many held-out questions of each node and skill.
    """
    right = []
    for node in simulation.honest:
        for skill in SKILLS.keys() - {_own_skill(node)}:
            asked = [each for each in node.desk.held_out_prompts if each.task.ref.dataset == skill][:questions]
            sampled = node.policy.sample([each.prompt_ids for each in asked], answers, node.params, seed=1, version=0)
            right += [any(one.text == each.task.answer for one in several) for each, several in zip(asked, sampled, strict=True)]
    return fmean(right)


class _InProcess:
    """Scores in this process, the only one that knows the skills."""

    async def run(self, jobs: Sequence[ScoringJob]) -> list[SimpleNamespace]:
        return [SimpleNamespace(rewards=Shared().score(job.ref, "reasoning_gym", cast(Sequence[str], job.texts))) for job in jobs]


def run(spec_file: Path, out: Path, seeds: Sequence[int] = ()) -> None:
    """Make the runs that `out` lacks, seed by seed; each seed teaches its specialists first."""
    register_skills()
    spec, base = load_spec(spec_file), base_policy()
    write_manifest(out, spec)
    floors = screen(cast(ScorerPool, _InProcess()), [TaskSpec(dataset=name) for name in SKILLS])
    write_floors(out, asyncio.run(floors))
    for seed in seeds or spec.seeds:
        if not (todo := runs_to_make(spec, out, None, [seed])):
            continue
        plan = plan_run(spec, spec.base_arm, seed)
        taught = teach_specialists(base, Path(plan.nodes[0].config.model.path).parent, seed)
        found = {"seed": seed, "pass_at_64": found_by_sampling(Simulation(plan)), "taught": taught}
        (out / f"taught-{seed}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        for folder in todo:
            seconds = make_run(spec, folder, kind=Study)
            print(f"{folder.arm} seed {seed}: {seconds or 0:.0f} s", flush=True)


# The report


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. lacking: held-out pass rates by round, means over nodes, on the skills that a node
    lacked at the start; on all for one policy. reached: the share of pairs of a node and such a
    skill that end at 0.25 or more. own: the probability of right answers to the own skill's
    questions, before and after. work, of all nodes: completions, answer tokens trained on, and CPU
    seconds.
    """

    lacking: Sequence[Point]
    reached: float
    own: Sequence[float]
    work: tuple[float, float, float]


def outcome(records: Iterable[Mapping[str, Any]]) -> Outcome:
    """A run's outcome from its records."""
    lines = list(records)
    steps, cost = [line for line in lines if line["kind"] == "step"], lines[-1]
    rates = defaultdict[int, list[float]](list)
    for line in lines:
        for name, (_, rate, _) in line["tasks"].items() if line["kind"] == "eval" else ():
            if name != cost["own"].get(line["node"]):
                rates[line["round"]].append(rate)
    return Outcome(
        [(number, fmean(found)) for number, found in sorted(rates.items())],
        fmean(rate >= 0.25 for rate in rates[max(rates)]),
        [fmean(passed.values()) for passed in cost["passed"]],
        (sum(line["generated"] for line in steps), sum(line.get("tokens", 0) for line in steps), cost["cpu_s"]),
    )


def _shown(values: Iterable[float], sign: str = "") -> str:
    found = estimate(list(values))
    return f"{found.mean:{sign}.3f}" + ("" if found.half_width is None else f" ± {found.half_width:.3f}")


def report(results: Path) -> str:
    """The tables, as Markdown; also written into RESULTS/report with the figure."""
    spec = read_manifest(results)["spec"]
    runs: dict[str, dict[int, Outcome]] = {arm: {} for arm in spec["arms"]}
    for folder in finished_runs(results):
        runs[folder.arm][folder.seed] = outcome(read_records(folder.records))
    lines = [
        "| arm | seeds | lacking | halfway | reached | own | change | completions | tokens | CPU s |",
        "|---" * 10 + "|",
    ]
    for arm, by_seed in runs.items():
        if every := list(by_seed.values()):
            cells = [_shown(one.lacking[at][1] for one in every) for at in (-1, len(every[0].lacking) // 2)]
            cells += [f"{fmean(one.reached for one in every):.2f}", f"{fmean(one.own[1] for one in every):.3f}"]
            cells += [_shown((one.own[1] - one.own[0] for one in every), "+")]
            cells += [f"{fmean(each):,.0f}" for each in zip(*(one.work for one in every), strict=True)]
            lines.append(f"| {arm} | {len(every)} | " + " | ".join(cells) + " |")
    lines += ["", "| lacking skills, at the end | seeds | difference | p | p, corrected |", "|---|---|---|---|---|"]
    ends = {arm: {seed: one.lacking[-1][1] for seed, one in by_seed.items()} for arm, by_seed in runs.items()}
    pairs = {pair: paired_differences(*(ends[arm] for arm in pair.split("/"))) for pair in spec["confirm"]}
    p = {pair: sign_flip_p(found) for pair, found in pairs.items() if len(found) > 1}
    for pair, corrected in holm(p, len(pairs)).items():
        found = pairs[pair]
        lines.append(f"| {pair.replace('/', ' over ')} | {len(found)} | {_shown(found, '+')} | {p[pair]:.3f} | {corrected:.3f} |")
    (results / "report").mkdir(parents=True, exist_ok=True)
    (results / "report/report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    panels = [("four nodes, skills that each lacked", "round", attrgetter("lacking"))]
    draw_panels("Held-out pass rate", runs, panels, results / "report/lacking.png")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), Path(sys.argv[3]), [int(seed) for seed in sys.argv[5:]])
    else:
        print(report(Path(sys.argv[2])))

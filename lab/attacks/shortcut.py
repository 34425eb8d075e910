"""Right answers that teach the wrong thing: only questions for which a shortcut gives the right
answer.

The sender chooses the questions. In some datasets the right answer is sometimes a copy of something
in the question, or a constant. Every node scores such a group correctly, its right answers are
likely, and a policy that learns from many such groups learns to copy.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress

import msgspec

from lab.attacks.view import Hostile, Shortcut, answered, as_sampled, halves, under_names, with_texts
from shared.config import TaskSpec
from shared.contracts.messages import RolloutGroup, Task, TaskRef
from shared.tasks.audit.candidates import copies
from shared.tasks.derive import TaskError, dataset_size, derive_task, task_ref
from shared.tasks.evaluation import PASS_REWARD

_SCREENED = 150
"""How many questions are used to choose a dataset's shortcut."""
_TRIES = 120
"""How many questions are tried to find one that the shortcut answers correctly."""
_CHOICES = 2
"""How many such questions are found for each group; the one with the likeliest right answer is
used.
"""
_SEEDS = 2**30


def shortcut(view: Hostile) -> list[RolloutGroup]:
    """Honest groups until `start_round`, then shortcut groups; for each name as many as an honest
    node sends.

    A group is sent as sampled if no such question is found for its dataset.
    """
    if view.number < view.attack.start_round:
        return under_names(view, as_sampled(view))
    found = [_found(view, group) for group, _ in view.made]
    ladders = [ladder for group_ladders in found for ladder in group_ladders]
    likelihoods = iter(view.likelihood(ladders) if ladders else [])
    groups = []
    for (group, _), group_ladders in zip(view.made, found, strict=True):
        written = [(likelihood, ladder, number) for ladder in group_ladders for number, likelihood in enumerate(next(likelihoods))]
        if not written:
            groups.append(group)
            continue
        _, ladder, number = max(written, key=lambda each: each[0])
        right, wrong = halves(len(group.completions), view.attack.right_share)
        texts = [ladder.completions[number].text] * right + [wrong_answer(view, ladder.task.ref, group)] * wrong
        groups.append(with_texts(view, ladder, texts))
    return under_names(view, groups)


def chosen_shortcut(view: Hostile, source: TaskSpec) -> Shortcut:
    """The copy or constant that is right for most of the source's questions; chosen once per
    run.
    """
    key = (source.dataset, source.canonical_config)
    if key not in view.shortcuts:
        passed: Counter[Shortcut] = Counter()
        for task in asked_questions(source, _SCREENED, random.Random(f"screened {source.dataset}")):
            candidates = copies(task.text)
            rewards = view.score(task.ref, [candidate.text for candidate in candidates])
            passed.update(
                Shortcut(copy=candidate.name)
                for candidate, reward in zip(candidates, rewards, strict=True)
                if reward >= PASS_REWARD and candidate.text
            )
            passed[Shortcut(constant=view.answer(task.ref))] += 1
        view.shortcuts[key] = max(passed, key=lambda each: (passed[each], each), default=Shortcut())
    return view.shortcuts[key]


def _found(view: Hostile, group: RolloutGroup) -> list[RolloutGroup]:
    """Groups for questions that the shortcut answers, each with the right answer in every spelling
    that earns a reward.
    """
    source = asked_source(view, group)
    wanted = chosen_shortcut(view, source)
    ladders: list[RolloutGroup] = []
    for task in asked_questions(source, _TRIES, view.rng):
        text = wanted.answer(task.text)
        ways = [] if text is None else [way for way in (text, answered(text)) if len(view.encode(way)) <= view.max_tokens]
        paid = [way for way, reward in zip(ways, view.score(task.ref, ways), strict=True) if reward >= PASS_REWARD]
        if paid:
            ladders.append(with_texts(view, msgspec.structs.replace(group, task=task), paid))
        if len(ladders) == _CHOICES:
            break
    return ladders


def asked_source(view: Hostile, group: RolloutGroup) -> TaskSpec:
    """The source to take questions from: the target if the node has it, else the dataset that was
    drawn.
    """
    by_dataset = {source.dataset: source for source in reversed(view.sources)}
    return by_dataset.get(view.attack.target) or by_dataset[group.task.ref.dataset]


def wrong_answer(view: Hostile, ref: TaskRef, sampled: RolloutGroup) -> str:
    """An answer that earns nothing: preferably one that the policy gave to another question,
    because it is likely.
    """
    texts = [*(completion.text for completion in sampled.completions), answered("")]
    return min(zip(view.score(ref, texts), range(len(texts)), texts, strict=True))[2]


def asked_questions(source: TaskSpec, count: int, rng: random.Random) -> Iterator[Task]:
    """`count` of the source's questions, with seeds that the node chooses; items that cannot be
    made are skipped.
    """
    size = dataset_size(source.dataset, source.canonical_config)
    for _ in range(count):
        seed, index = rng.randrange(_SEEDS), rng.randrange(size)
        ref = task_ref(source.dataset, source.canonical_config, seed=seed, index=index)
        # reasoning-gym's bf compiler prints a dot for every program.
        with suppress(TaskError), redirect_stdout(io.StringIO()):
            yield derive_task(ref)

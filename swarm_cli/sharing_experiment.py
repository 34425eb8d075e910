"""`swarm experiment sharing`: whether sharing helps with a model, its tasks and its reward.

For each seed two swarms of real processes are run by `swarm up`, one after another: *sharing*, and
*own replay*, in which a node fills the same places of its batches with its own earlier groups. Both
train on as many completions of their own; only where the rest of a batch comes from differs.

The folder of an experiment:

    experiment.json               what both arms have in common; another experiment is refused
    trial.json                    what a short run cost on this machine
    ARM/seed-N/NODE/*.jsonl       each node's raw records (`metrics.jsonl`, `eval.jsonl`)
    ARM/seed-N/up.log, done.json  the output of `swarm up`; there once the run is complete
    report.md, sharing.png        written anew by every call
    running/                      the run that is being made: a second call goes on with it
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from shared.atomic_files import replace_text
from shared.config import NodeConfig
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.config.sampler_section import SamplerSection
from shared.intervals import estimate, seeds_needed
from shared.run_records import EVAL_FILE, METRICS_FILE, eval_lines
from shared.runtime.exits import EXIT_CONFIG
from shared.runtime.process_limits import ending_with_parent
from shared.text import error_text, visible
from swarm_cli.chosen_config import default_file, load_chosen
from swarm_cli.console import count, note, say
from swarm_cli.errors import CommandError
from swarm_cli.installation import own_modules
from swarm_cli.local.procfile import PORTS_PER_NODE, SWARM_URL_VARIABLE, is_free, node_name
from swarm_cli.observe.run_files import Evaluation, read_evaluations, read_steps
from swarm_cli.runs import MAX_NODES

SHARING, REPLAY = "sharing", "own-replay"
ARMS = {SHARING: "sharing", REPLAY: "own replay"}
USUAL_STEPS = 60
EVALUATIONS = 4
"""Evaluations of a run after that of the base policy."""
TRIAL_STEPS = 3
MOST_SEEDS = 300
"""Each has held-out questions of its own (`eval.draw`)."""
MOST_NEEDED = 1000
TOGETHER_S = 60.0
"""How long a node waits for other nodes' groups before it goes on with fewer: that the nodes begin
together must not depend on which of them has loaded its model first.
"""
_TELL_EVERY_S = 60.0
_LAST_LINES = 12
_BESIDE_THE_RUN = {"node", "nats", "policy_store", "http", "log"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An experiment: what both arms have in common, and where its files are."""

    config: NodeConfig
    file: Path
    out: Path
    nodes: int
    steps: int
    local: int
    external: int

    @property
    def node_names(self) -> list[str]:
        return [node_name(position) for position in range(self.nodes)]

    @property
    def completions(self) -> int:
        """The completions of its own that a node trains on."""
        return self.steps * self.local * self.config.generator.completions

    @property
    def definition(self) -> str:
        """The exact definition of the two arms."""
        return (
            f"In both arms {self.nodes} nodes train for {self.steps} steps, each on {self.local} new local groups of "
            f"{self.config.generator.completions} answers a step, {self.completions:,} completions a node in all, and on up to "
            f"{self.external} further groups a step. Sharing: these are other nodes' groups. Own replay: nothing is taken from "
            f"others; they are local groups of the last {SamplerSection.replay_batches} batches whose rewards "
            'differ (sampler.replay). Fixed in both: sampler.adapt = "off", sampler.shortage = "short" after '
            f"{TOGETHER_S:.0f} s or more. Everything else is as configured; a seed has the same held-out questions in both."
        )

    def settings(self) -> dict[str, object]:
        """The settings that the results depend on, as kept in `experiment.json`."""
        resolved = self.config.model_dump(mode="json", exclude=_BESIDE_THE_RUN)
        digest = hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()
        return {
            "configuration": str(self.file),
            "model": self.config.model.path,
            "settings_sha256": digest,
            **{name: getattr(self, name) for name in ("nodes", "steps", "local", "external")},
        }

    def environment(self, arm: str, seed: int, steps: int) -> dict[str, str]:
        """The environment of a run's `swarm up`: the caller's, the seed, and the arm's settings."""
        kept = {name: value for name, value in os.environ.items() if name != SWARM_URL_VARIABLE}
        sampler = {"local": self.local, "external": self.external, "replay": 0, "adapt": "off", "shortage": "short"}
        sampler["shortage_wait_s"] = max(TOGETHER_S, self.config.sampler.shortage_wait_s)
        if arm == REPLAY:
            sampler |= {"external": 0, "replay": self.external}
        chosen = {
            **{f"SWARM_SAMPLER__{name.upper()}": value for name, value in sampler.items()},
            "SWARM_NODE__SEED": seed,
            "SWARM_NODE__VAR_DIR": self.out / "running",
            "SWARM_EVAL__DRAW": seed,
            "SWARM_EVAL__EVERY_VERSIONS": _every(steps),
        }
        return kept | own_modules() | {name: str(value) for name, value in chosen.items()}


def _every(steps: int) -> int:
    return max(1, -(-steps // EVALUATIONS))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a run on this machine, in seconds, as measured by a short one: `start` with
    everything but further steps and evaluations.
    """

    start: float
    step: float
    evaluation: float

    def run(self, steps: int) -> float:
        """Seconds of a run of `steps` steps."""
        evaluations = -(-steps // _every(steps)) - -(-TRIAL_STEPS // _every(TRIAL_STEPS))
        return self.start + max(0, steps - TRIAL_STEPS) * self.step + max(0, evaluations) * self.evaluation


FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "local groups": lambda step: step["groups_local"],
    "further groups": lambda step: step["groups_external"] + step.get("groups_replayed", 0),
    "tokens trained on": lambda step: step["tokens"],
    "updates": lambda step: bool(step["updated"]),
    "seconds": lambda step: math.fsum(step["phase_seconds"].values()),
}
"""What a node did, each the sum over its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A complete run. curves: of each node, held-out scores by the completions of its own that it
    had trained on. figures: means over the nodes of `FIGURES`. asked: what was evaluated, and how
    it was scored.
    """

    curves: tuple[tuple[tuple[float, float], ...], ...]
    figures: Mapping[str, float]
    asked: frozenset[tuple[str, str, int]]

    @property
    def base(self) -> float:
        """The held-out score before training."""
        return self.at(0.0)

    @property
    def last(self) -> float:
        """The completions up to which every node was evaluated."""
        return min(curve[-1][0] for curve in self.curves)

    @property
    def mean(self) -> list[tuple[float, float]]:
        """The curve over all nodes."""
        return [(x, self.at(x)) for x in sorted({x for curve in self.curves for x, _ in curve if x <= self.last})]

    def at(self, completions: float) -> float:
        """The mean held-out score after so many completions, linear between evaluations."""
        import numpy as np

        return fmean(float(np.interp(completions, [x for x, _ in curve], [y for _, y in curve])) for curve in self.curves)


Pairs = Mapping[int, Mapping[str, Result]]
"""The results of both arms by seed, where both are complete."""


def sharing(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Configuration of every node.  [default: SWARM_CONFIG, ./node.toml or the demo's]",
            show_default=False,
            metavar="CONFIG",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=2, max=MAX_NODES, help="Nodes of each swarm.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Each arm is run once for each; add more at any time.")] = 4,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each trainer.  [default: trainer.max_steps, or 60]", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the experiment.  [default: sharing in node.var_dir]", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Start without asking once the cost is known.")] = False,
) -> None:
    """Measure whether sharing helps with your model, tasks and reward: real nodes on this machine,
    against nodes that train on their own earlier groups again. Says first what it costs. The same
    command goes on where it was stopped.
    """
    plan = _plan(config, nodes, steps, out)
    wanted = [(seed, arm) for seed in range(1, seeds + 1) for arm in ARMS]
    todo = [(seed, arm) for seed, arm in wanted if not (_folder(plan, arm, seed) / "done.json").is_file()]
    note(plan.definition)
    _claim(plan)
    if todo:
        cost = _measured(plan)
        left = f"{count(len(todo), 'run')} of {len(wanted)}"
        note(
            f"about {_duration(cost.run(plan.steps) * len(todo))} on this machine: {left}, one after another "
            f"({count(len(ARMS), 'arm')}, {count(seeds, 'seed')}), of {count(plan.steps, 'step')} each. Measured: "
            f"{cost.step:.1f} s a step, {cost.evaluation:.0f} s an evaluation, {cost.start:.0f} s for a run of {TRIAL_STEPS} steps"
        )
        if not yes and not _agreed():
            raise CommandError("nothing was started: the same command with --yes starts it")
        for number, (seed, arm) in enumerate(todo, start=1):
            _make(plan, arm, seed, f"[{number}/{len(todo)}] {ARMS[arm]}, seed {seed}")
    pairs = {seed: {arm: read_result(plan, arm, seed) for arm in ARMS} for seed in range(1, seeds + 1)}
    check_alike(pairs)
    report = plan.out / "report.md"
    replace_text(report, report_text(plan, pairs))
    draw(pairs, plan.out / "sharing.png")
    say(sentence(pairs))
    for line in _seed_table(pairs):
        say(line)
    say(f"{report}\n{plan.out / 'sharing.png'}")


def _plan(file: Path | None, nodes: int, steps: int | None, out: Path | None) -> Plan:
    """The plan of the options. Raises CommandError if nothing could be compared."""
    config = load_chosen(file, NodeConfig)
    local, external = config.sampler.local, config.sampler.external
    if not config.eval.tasks:
        raise CommandError("eval.tasks is 0, so there is nothing to compare: set it to 100 or more", EXIT_CONFIG)
    if not external:
        local, external = (SamplerSection.model_fields[name].default for name in ("local", "external"))
        note(
            f"sampler.external is {config.sampler.external}, as for one node: this experiment uses {local} local and {external} "
            "further groups a step, the defaults of nodes that share"
        )
    if not local or external > local * SamplerSection.replay_batches:
        raise CommandError(
            f"sampler.local is {local} and sampler.external {external}: own replay fills {external} places from the local groups "
            f"of {SamplerSection.replay_batches} batches; raise sampler.local or lower sampler.external",
            EXIT_CONFIG,
        )
    folder = (out or config.node.var_dir / "sharing").absolute()
    chosen = Path(file or os.environ.get(CONFIG_FILE_VARIABLE) or default_file())
    return Plan(
        config=config, file=chosen, out=folder, nodes=nodes, local=local, external=external,
        steps=steps or config.trainer.max_steps or USUAL_STEPS,
    )  # fmt: skip


def _claim(plan: Plan) -> None:
    """Note the experiment in its folder. Raises CommandError if that holds another one."""
    file = plan.out / "experiment.json"
    settings = plan.settings()
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else settings
        changed = [name for name in settings if name != "configuration" and before.get(name) != settings[name]]
        if changed:
            raise CommandError(
                f"{plan.out} holds an experiment with other settings ({', '.join(changed)}): give those again, or another --out"
            )
        replace_text(file, json.dumps(settings, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise CommandError(f"{file}: cannot be used ({error_text(error)}): give another --out") from None


def _agreed() -> bool:
    return sys.stdin.isatty() and typer.confirm("Start?", err=True)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{count(max(1, round(seconds / 60)), 'minute')}"


def _folder(plan: Plan, arm: str, seed: int) -> Path:
    return plan.out / arm / f"seed-{seed}"


# Runs. Each is a `swarm up` of its own, so that whatever that checks, keeps and ends holds here.


def _measured(plan: Plan) -> Cost:
    """The cost of a run, measured by a short one the first time."""
    file = plan.out / "trial.json"
    if file.is_file():
        return Cost(**json.loads(file.read_text(encoding="utf-8")))
    note(f"first a trial of {count(TRIAL_STEPS, 'step')}, to say what it costs")
    shutil.rmtree(plan.out / "running", ignore_errors=True)
    started = time.monotonic()
    run_dir = _run(plan, SHARING, 1, TRIAL_STEPS, "trial", plan.out / "trial.log", "trial")
    seconds = time.monotonic() - started
    taken = [[step["time"] for step in read_steps(run_dir / name)] for name in plan.node_names]
    pace = max((times[-1] - times[0]) / (len(times) - 1) for times in taken)
    evaluated = [line.get("seconds") or 0.0 for name in plan.node_names for line in eval_lines(run_dir / name / EVAL_FILE)]
    cost = Cost(round(seconds, 1), round(pace, 2), round(max(evaluated, default=0.0), 1))
    replace_text(file, json.dumps({name: getattr(cost, name) for name in cost.__slots__}) + "\n")
    shutil.rmtree(plan.out / "running")
    return cost


def _make(plan: Plan, arm: str, seed: int, title: str) -> None:
    """Make a run, or go on with it, and keep its records. What else it wrote is removed: the
    checkpoints of an experiment would fill the disk.
    """
    folder, name = _folder(plan, arm, seed), f"{arm}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = _run(plan, arm, seed, plan.steps, name, folder / "up.log", title)
    for node in plan.node_names:
        (folder / node).mkdir(exist_ok=True)
        for file in (METRICS_FILE, EVAL_FILE):
            shutil.copyfile(run_dir / node / file, folder / node / file)
    replace_text(folder / "done.json", json.dumps({"steps": plan.steps, "finished": time.time()}) + "\n")
    shutil.rmtree(plan.out / "running")


def _run(plan: Plan, arm: str, seed: int, steps: int, name: str, log: Path, title: str) -> Path:
    """Run a swarm to its last step; returns the run's folder.

    Raises:
        CommandError: it ended before, by itself or because this command was asked to.
    """
    nats_port, base_port = _free_ports(plan.nodes)
    options = ["--config", plan.file, "--run", name, "--nodes", plan.nodes, "--steps", steps]
    options += ["--nats-port", nats_port, "--base-port", base_port]
    run_dir = plan.out / "running" / "runs" / name
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarm_cli", "up", *map(str, options)],
            env=plan.environment(arm, seed, steps),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of the terminal reaches only this process, which passes it on
            preexec_fn=ending_with_parent(),
        )
        note(f"{title}: begins (log: {log})")
        with _passing_on(process) as asked:
            code = _wait(process, title, plan, run_dir, steps)
    if asked:
        raise CommandError("stopped, and every process with it: the same command goes on where it was", 128 + asked[0])
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        said = "\n".join(f"  {visible(line, 400)}" for line in lines)
        raise CommandError(f"{title}: `swarm up` ended with code {code}. The end of {log}:\n{said}", code if code > 0 else 1)
    return run_dir


def _wait(process: subprocess.Popen[bytes], title: str, plan: Plan, run_dir: Path, steps: int) -> int:
    """Wait for the end of a run, and tell its progress now and then; returns its exit code."""
    while True:
        try:
            return process.wait(_TELL_EVERY_S)
        except subprocess.TimeoutExpired:
            taken = min(len(read_steps(run_dir / name)) for name in plan.node_names)
            note(f"{title}: step {taken} of {steps}")


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the run, which ends its processes, and collect them."""
    asked: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        asked.append(number)
        if len(asked) == 1:
            note("ending every process; Ctrl-C again kills them")
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_ports(nodes: int) -> tuple[int, int]:
    """A free port for the NATS server, and the first of a range of free ports for the nodes."""
    for base in range(21_000, 60_000, 100):
        if all(map(is_free, range(base, base + 1 + PORTS_PER_NODE * nodes))):
            return base, base + 1
    raise CommandError("no range of free ports was found between 21000 and 60000: stop the processes that have them")


# Results. From here on everything is read from the kept records.


def read_result(plan: Plan, arm: str, seed: int) -> Result:
    """The result of a complete run.

    Raises:
        CommandError: the records of a node hold no step or no score.
    """
    completions = plan.config.generator.completions
    curves, taken, asked = [], [], set()
    for node in plan.node_names:
        folder = _folder(plan, arm, seed) / node
        steps = read_steps(folder)
        scored = [each for each in read_evaluations(folder) if each.score is not None]
        if not steps or not scored:
            what = "held-out score" if steps else "step"
            raise CommandError(f"{folder}: no {what} is on record: remove {folder.parent} and run again")
        asked |= {each.held_out_set for each in scored}
        curves.append(tuple((float(_made(steps, each) * completions), float(each.score or 0.0)) for each in scored))
        taken.append(steps)
    figures = {name: fmean(sum(map(of, steps)) for steps in taken) for name, of in FIGURES.items()}
    return Result(curves=tuple(curves), figures=figures, asked=frozenset(asked))


def _made(steps: Sequence[Mapping[str, int]], evaluation: Evaluation) -> int:
    """The local groups that the policy of an evaluation was trained on."""
    return sum(step["groups_local"] for step in steps if step["step"] <= evaluation.policy_version)


def check_alike(pairs: Pairs) -> None:
    """Raise CommandError if the arms of a seed were not asked the same, or scored otherwise."""
    for seed, results in pairs.items():
        if len(results[SHARING].asked | results[REPLAY].asked) > 1:
            raise CommandError(
                f"seed {seed}: questions or reward changed between its runs, so they cannot be compared: remove its folders and "
                "run again, or give another --out"
            )
    if len(scorers := {scorer for results in pairs.values() for result in results.values() for _, scorer, _ in result.asked}) > 1:
        raise CommandError(
            f"the seeds were scored by {len(scorers)} different rewards, so they cannot be put together: restore the reward, or "
            "give another --out"
        )


def differences(pairs: Pairs) -> list[float]:
    """Sharing minus own replay by seed, after as many completions. Rounded, so that equal scores
    differ by 0.
    """
    return [round(scores[SHARING] - scores[REPLAY], 9) + 0.0 for scores in map(_equal, pairs.values())]


def _equal(results: Mapping[str, Result]) -> dict[str, float]:
    """Both arms' held-out scores after as many completions, up to the earlier last evaluation."""
    completions = min(result.last for result in results.values())
    return {arm: result.at(completions) for arm, result in results.items()}


def sentence(pairs: Pairs) -> str:
    """The answer in one sentence."""
    alone = sum(not results[SHARING].figures["further groups"] for results in pairs.values())
    if alone == len(pairs):
        return "Sharing: not measured, because no group of another node was trained on"
    found = estimate(differences(pairs))
    seeds = count(found.n, "seed")
    gain = f"Sharing: {_signed(found.mean)} held-out"
    against = "against own replay from as many completions"
    if found.low is None or found.high is None:
        return f"{gain} {against}, with {seeds}: no interval, give --seeds 2 or more"
    if found.low > 0 or found.high < 0:
        shown = f"{'' if found.mean > 0 else 'worse, '}shown with {seeds}"
    else:
        needed = seeds_needed(differences(pairs), MOST_NEEDED)
        more = f"about {needed:,} would show it" if needed else f"more than {MOST_NEEDED:,} would be needed"
        shown = f"not shown with {seeds}; {more}"
    partly = f"; in {alone} of them no group of another node was trained on" if alone else ""
    return f"{gain} (95 %: {_signed(found.low)} to {_signed(found.high)}) {against}: {shown}{partly}"


def _signed(value: float, digits: int = 2) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def _seed_table(pairs: Pairs) -> list[str]:
    lines = ["| seed | base | own replay | sharing | difference |", "|---|---|---|---|---|"]
    for (seed, results), difference in zip(pairs.items(), differences(pairs), strict=True):
        scores = _equal(results)
        base = fmean(result.base for result in results.values())
        lines.append(f"| {seed} | {base:.3f} | {scores[REPLAY]:.3f} | {scores[SHARING]:.3f} | {_signed(difference, 3)} |")
    return lines


def report_text(plan: Plan, pairs: Pairs) -> str:
    """The text of `report.md`."""
    arms = [f"| arm | {' | '.join(FIGURES)} |", "|---" * (len(FIGURES) + 1) + "|"]
    for arm, name in ARMS.items():
        means = (fmean(results[arm].figures[figure] for results in pairs.values()) for figure in FIGURES)
        arms.append(f"| {name} | " + " | ".join(f"{mean:,.0f}" for mean in means) + " |")
    shared = any(results[SHARING].figures["further groups"] for results in pairs.values())
    nothing = "**No foreign group was trained on**, so nothing was shared: `up.log` and the verifiers' logs say why.\n\n"
    return (
        f"# Does sharing help here?\n\n{sentence(pairs)}.\n\n![Held-out score by completions](sharing.png)\n\n"
        f"{'' if shared else nothing}"
        f"{plan.definition}\n\n## By seed\n\n" + "\n".join(_seed_table(pairs)) + "\n\n"
        "Scores are means over the nodes, where both arms had trained on as many completions. The interval is Student's over the "
        "differences by seed. The number of seeds that would show it assumes that their mean and spread stay as they are.\n\n"
        "## By arm\n\n" + "\n".join(arms) + "\n\n"
        "Of a node, means over nodes and seeds. Both arms use one learning rate; own replay may do better at a lower one.\n\n"
        f"Model `{plan.config.model.path}`, configuration `{plan.file}`. Raw records: `ARM/seed-N/NODE/*.jsonl`.\n"
    )


def draw(pairs: Pairs, file: Path) -> None:
    """Draw both arms' held-out scores by completions: mean over seeds, and each seed thin."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # the backend is chosen first

    figure, axis = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for arm, colour, dash in ((SHARING, "#0072B2", "-"), (REPLAY, "#D55E00", "--")):
        runs = [results[arm] for results in pairs.values()]
        for run in runs:
            axis.plot(*zip(*run.mean, strict=True), color=colour, linestyle=dash, linewidth=0.8, alpha=0.35)
        shortest = min(runs, key=lambda run: run.last)
        means = [(x, fmean(run.at(x) for run in runs)) for x, _ in shortest.mean]
        axis.plot(*zip(*means, strict=True), color=colour, linestyle=dash, linewidth=2.2, marker="o", label=ARMS[arm])
    base = fmean(result.base for results in pairs.values() for result in results.values())
    axis.axhline(base, color="#666666", linewidth=1, linestyle=":", label="base policy")
    axis.set_title(f"{sentence(pairs).partition(' against')[0]}, {count(len(pairs), 'seed')}", fontsize=10)
    axis.set_xlabel("completions of its own that a node has trained on")
    axis.set_ylabel("held-out score")
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))  # an axis that fits the data turns noise into learning
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)

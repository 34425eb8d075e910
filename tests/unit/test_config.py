"""Configuration: what is right loads from any source, what is wrong is refused with the field's
name and a remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.config import ConfigError, NodeConfig, load_config
from shared.config.load import Config, load
from shared.config.sampler_section import SamplerConfig
from shared.config.verifier_config import VerifierConfig
from shared.config.verifier_section import ViewConfig

GCD = {"tasks": [{"dataset": "gcd", "config": {"max_value": 12}}]}


def test_environment_wins_over_the_file_and_overrides_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[node]\nid = "file"\nrun = "file"\n[trainer]\nlearning_rate = 3e-4\n[[tasks]]\ndataset = "gcd"\n')
    monkeypatch.setenv("SWARM_NODE__RUN", "environment")
    monkeypatch.setenv("SWARM_TRAINER__GRAD_CLIP", "0.5")
    config = load_config(file, {"node": {"id": "override"}})
    assert (config.node.id, config.node.run) == ("override", "environment")
    assert (config.trainer.learning_rate, config.trainer.grad_clip) == (3e-4, 0.5)


def test_of_two_variables_the_one_that_names_the_setting_wins_and_both_leave_the_rest_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[trainer]\nmax_steps = 3\n[trainer.lora]\nalpha = 2.0\n[[tasks]]\ndataset = "gcd"\n')
    variables = {"SWARM_TRAINER__LORA__RANK": "9", "SWARM_TRAINER": '{"grad_clip": 0.5, "lora": {"rank": 4}}'}
    trainer = load_config(file, environment=variables).trainer
    assert (trainer.max_steps, trainer.grad_clip, trainer.lora.rank, trainer.lora.alpha) == (3, 0.5, 9, 2.0)


def test_the_number_of_copies_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NATS__REPLICAS", "3")
    config = load_config(overrides={"tasks": [{"dataset": "gcd"}]})
    assert config.nats.replicas == 3
    monkeypatch.setenv("SWARM_NATS__REPLICAS", "2")
    with pytest.raises(ConfigError, match=r"SWARM_NATS__REPLICAS \(nats.replicas\): Input should be 1, 3 or 5"):
        load_config(overrides={"tasks": [{"dataset": "gcd"}]})


def test_a_tasks_config_is_canonical_whatever_the_order_of_its_keys() -> None:
    one = load_config(None, {"tasks": [{"dataset": "gcd", "config": {"min_value": 1, "max_value": 2}}]})
    other = load_config(None, {"tasks": [{"dataset": "gcd", "config": {"max_value": 2, "min_value": 1}}]})
    assert one.tasks[0].canonical_config == other.tasks[0].canonical_config == '{"max_value":2,"min_value":1}'


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tasks": []}, "at least one"),
        ({"sampler": {"local": 0, "external": 0}}, "a batch would be empty"),
        ({"nats": {"swarm_url": "none"}, "sampler": {"external": 4}}, "there is no swarm to receive foreign groups from"),
        ({"generator": {"completions": 1}}, "generator.completions"),
        ({"trainer": {"lrr": 1}}, "trainer.lrr: unknown key"),
        ({"trainer": {"clip_low": 1.5}}, "trainer.clip_low"),
        ({"trainer": {"objective": "m2p0"}}, "no objective is called 'm2p0': did you mean m2po\\?"),
        ({"trainer": {"constants": {"sequence_mask": [1.5, 2.0]}}}, "0 <= low < 1 < high"),
        ({"trainer": {"constants": {"betas": [1.5, 0.9]}}}, "betas .* must be two numbers of at least 0 and below 1"),
        ({"trainer": {"constants": {"weight_decay": float("inf")}}}, "finite number"),
        ({"trainer": {"kl_coefficient": float("nan")}}, "finite number"),
        ({"trainer": {"constants": {"betas": [float("nan"), 0.5]}}}, "finite number"),
        ({"trainer": {"schedule": "cosine"}}, "needs an end"),
        ({"node": {"id": "no spaces please"}}, "node.id: must be 1 to 32 small letters, digits or -, beginning with a letter"),
        ({"node": {"run": "../x"}}, "node.run: must be 1 to 64 letters, digits or \\. _ -, beginning with a letter or digit, got"),
        ({"tasks": [{"dataset": "gcd", "config": {"seed": 1}}]}, "`seed` is chosen by each task draw"),
        ({"generator": {"engine": "openai"}}, "generator.openai_url"),
        (
            {"generator": {"openai_url": "ftp://192.0.2.1/v1"}},
            "generator.openai_url: 'ftp://192.0.2.1/v1' is not a server's address",
        ),
        (
            {"tasks": [{"dataset": "gcd", "judge": {"url": "192.0.2.1:80", "model": "m"}}]},
            "judge.url: .* is not a server's address",
        ),
    ],
)
def test_an_impossible_configuration_is_refused_with_cause_and_remedy(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {**GCD, **overrides})


@pytest.mark.parametrize("url", ["https://me:hidden@192.0.2.1/v1", "https://192.0.2.1/v1?key=hidden"])
@pytest.mark.parametrize("setting", ["generator.openai_url", "judge.url"])
def test_a_secret_in_a_server_s_address_is_refused_and_not_shown(setting: str, url: str) -> None:
    judged = {"tasks": [{"dataset": "gcd", "verifier": "judge", "judge": {"url": url, "model": "m"}}]}
    served = {"generator": {"engine": "openai", "openai_url": url}}
    with pytest.raises(ConfigError, match=setting) as refused:
        load_config(None, {**GCD, **(judged if setting == "judge.url" else served)})
    assert "hidden" not in str(refused.value)


def test_an_unknown_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TRIANER__LEARNING_RATE", "1")
    with pytest.raises(ConfigError, match="SWARM_TRIANER__LEARNING_RATE"):
        load_config(None, GCD)


@pytest.mark.parametrize(
    ("variable", "value", "form"),
    [
        ("SWARM_TRAINER__CONSTANTS__BETAS", "1.5,3.0", "give JSON, e.g. [1.5, 3.0]"),
        ("SWARM_TRAINER__CONSTANTS__SEQUENCE_MASK", "(0.5, 2)", "give JSON, e.g. [0.5, 2]"),
        ("SWARM_TRAINER__LORA__TARGET_MODULES", "q_proj", 'give JSON, e.g. ["q_proj"]'),
        ("SWARM_TASKS", "gcd", 'give JSON, e.g. [{"setting": "value"}]'),
        ("SWARM_TRAINER", "learning_rate=1", 'give JSON, e.g. {"setting": "value"}'),
    ],
)
def test_a_list_from_the_environment_that_is_no_json_is_refused_with_its_name_and_the_form(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, form: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refused:
        load_config(None, GCD)
    assert str(refused.value) == f"environment variable {variable} is {value!r}: {form}"


def test_lists_words_and_nothing_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TRAINER__CONSTANTS__BETAS", "[0.8, 0.9]")
    monkeypatch.setenv("SWARM_TRAINER__CONSTANTS__SEQUENCE_MASK", "null")
    monkeypatch.setenv("SWARM_TRAINER__LORA__TARGET_MODULES", "all-linear")
    trainer = load_config(None, GCD).trainer
    constants = trainer.constants
    assert (constants.betas, constants.sequence_mask, trainer.lora.target_modules) == ((0.8, 0.9), None, "all-linear")


@pytest.mark.parametrize(
    ("section", "values", "meant"),
    [
        ("trainer", {"objective": "m2p0"}, "did you mean m2po?"),
        ("sampler", {"strategy": "learnabilty"}, "did you mean learnability"),
    ],
)
def test_a_near_miss_of_a_word_is_refused_with_the_word_that_was_meant(section: str, values: dict[str, Any], meant: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {**GCD, section: values})
    assert meant in str(refused.value)


def test_a_word_that_is_near_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(
        ConfigError, match="trainer.objective: no objective is called 'zzzz': there are .*grpo.*swarm.objectives\\)$"
    ):
        load_config(None, {**GCD, "trainer": {"objective": "zzzz"}})


@pytest.mark.parametrize(
    "overrides",
    [
        {"sampler": {"max_external_age_s": 1e308}},
        {"tasks": [{"dataset": "gcd", "weight": 1e308}, {"dataset": "lcm", "weight": 1e308}]},
    ],
)
def test_a_number_that_nothing_can_be_computed_with_is_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="should be less than or equal to"):
        load_config(overrides={"tasks": [{"dataset": "gcd"}], **overrides})


@pytest.mark.parametrize("content", [None, "[node", "node = 3"])
def test_a_missing_or_broken_file_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "broken.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="broken.toml"):
        load_config(file)


def test_a_node_alone_needs_nothing_else_changed() -> None:
    config = load_config(None, {**GCD, "nats": {"swarm_url": "none"}, "sampler": {"external": 0, "local": 8}})
    assert config.nats.swarm_url is None


def _fields(model: Any, path: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if hasattr(inner, "model_fields"):
            found += _fields(inner, f"{path}{name}.")
        else:
            found.append((f"{path}{name}", field))
    return found


def test_every_port_belongs_to_one_role() -> None:
    config = load_config(None, GCD)
    ports = [config.http_port(role) for role in ("generator", "verifier", "sampler", "trainer")]
    assert ports == [9400, 9401, 9402, 9403]


def test_every_setting_is_documented_where_it_is_defined() -> None:
    undocumented = [name for name, field in _fields(NodeConfig) if not field.description]
    assert undocumented == ["tasks"]


def test_a_file_that_has_only_a_section_is_told_which_file_to_begin_with(tmp_path: Path) -> None:
    fragment = tmp_path / "node.toml"
    fragment.write_text('[tracking]\ntrackers = ["wandb"]\n')
    with pytest.raises(ConfigError, match=r"begin with `swarm config show --all > node\.toml`"):
        load_config(fragment)


@pytest.mark.parametrize("field", ["node_url", "swarm_url"])
def test_a_servers_address_with_a_password_is_refused_and_not_repeated(field: str) -> None:
    with pytest.raises(ConfigError, match=r"nats\.node_key_file or nats\.swarm_key_file") as said:
        load_config(None, {"tasks": [{"dataset": "gcd"}], "nats": {field: "nats://me:hidden@hub:4222,nats://hub:4223"}})
    assert "hidden" not in str(said.value)


SECTIONS_READ = [
    (ViewConfig, {"nats", "verifier"}),
    (SamplerConfig, {"nats", "tasks", "sampler"}),
    (VerifierConfig, {"nats", "tasks", "sampler", "verifier", "generator", "eval"}),
    (NodeConfig, {"nats", "tasks", "sampler", "verifier", "generator", "eval", "trainer", "model"}),
]


@pytest.mark.parametrize(("kind", "read"), SECTIONS_READ)
def test_a_role_refuses_faults_of_the_sections_that_it_reads_and_of_no_other(
    kind: type[Config], read: set[str], tmp_path: Path
) -> None:
    for section in ("nats", "tasks", "sampler", "verifier", "generator", "eval", "trainer", "model"):
        tasks = "" if section == "tasks" else '[[tasks]]\ndataset = "gcd"\n'
        table = "[[tasks]]" if section == "tasks" else f"[{section}]"
        file = tmp_path / f"{section}.toml"
        file.write_text(f"{table}\nno_such_key = 1\n{tasks}")
        if section not in read:
            load(kind, file, environment={})
            continue
        with pytest.raises(ConfigError) as refused:
            load(kind, file, environment={})
        assert any("no_such_key" in fault for fault in refused.value.faults)


@pytest.mark.parametrize("kind", [kind for kind, _ in SECTIONS_READ])
def test_every_role_refuses_a_section_or_a_variable_of_one_that_nobody_knows(kind: type[Config], tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[trainr]\nlearning_rate = 1e-5\n[[tasks]]\ndataset = "gcd"\n')
    with pytest.raises(ConfigError) as refused:
        load(kind, file, environment={"SWARM_SAMPLR__LOCAL": "2"})
    assert [fault.split(":")[0] for fault in refused.value.faults] == ["environment variable SWARM_SAMPLR__LOCAL", "trainr"]


def test_a_sampler_refuses_sections_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError) as refused:
        load(SamplerConfig, None, {**GCD, "nats": {"swarm_url": None}, "sampler": {"external": 4}}, {})
    assert len(refused.value.faults) == 1 and "nats.swarm_url" in refused.value.faults[0]

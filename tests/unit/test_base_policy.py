"""The toy base policy: built the same way twice, loadable by anyone, and as skilled as the one that
is shipped.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.contracts.messages import user_prompt
from shared.model.base_policy import (
    BasePolicyRecipe,
    Example,
    _progress,
    answer_loss,
    build_base_policy,
    habitual_slip,
    held_out_questions,
    load_demo_tasks,
    noisy_answer,
    policy_record,
    read_record,
    train_tokenizer,
    training_examples,
)
from shared.model.prompts import encode_answer, render_prompt
from swarm_cli.installation import DEMO_CONFIG

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "models" / "base"
DEMO_TASKS = load_demo_tasks(DEMO_CONFIG)
TINY = BasePolicyRecipe(
    steps=3, batch_size=8, attempts_per_task=400, hidden_size=32, intermediate_size=32, layers=1, heads=1, kv_heads=1
)


@pytest.fixture(scope="module")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base_policy(tmp_path_factory.mktemp("policy") / "tiny", DEMO_TASKS, TINY, show_progress=False)


@pytest.mark.slow
def test_the_same_recipe_builds_the_same_bytes_and_another_seed_does_not(tiny_policy: Path, tmp_path: Path) -> None:
    again = build_base_policy(tmp_path / "again", DEMO_TASKS, TINY, show_progress=False)
    other = build_base_policy(tmp_path / "other", DEMO_TASKS, replace(TINY, seed=1), show_progress=False)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny_policy / name).read_bytes(), name
    assert (other / "model.safetensors").read_bytes() != (tiny_policy / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_second_call_leaves_the_folder_alone_and_a_broken_one_is_mended(tmp_path: Path) -> None:
    folder = build_base_policy(tmp_path / "policy", DEMO_TASKS, TINY, show_progress=False)
    weights = folder / "model.safetensors"
    first, first_written = weights.read_bytes(), weights.stat().st_mtime_ns
    build_base_policy(folder, DEMO_TASKS, TINY, show_progress=False)
    assert weights.stat().st_mtime_ns == first_written
    weights.unlink()
    build_base_policy(folder, DEMO_TASKS, TINY, show_progress=False)
    assert weights.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy"]


def test_a_folder_with_somebody_elses_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(FileExistsError, match="choose an empty folder"):
        build_base_policy(tmp_path, DEMO_TASKS, TINY, show_progress=False)
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "years of work"


@pytest.mark.parametrize("fractions", [(0.7, 0.4), (-0.1, 0.0), (0.1, -0.2)])
def test_an_impossible_mixture_of_answers_is_refused(fractions: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="correct_fraction"):
        BasePolicyRecipe(correct_fraction=fractions[0], habit_fraction=fractions[1])


@pytest.mark.slow
@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


TOKENIZER = train_tokenizer(["State the final answer to the following arithmetic problem: 4 - 1 ="] * 10, 400)


def test_digits_stand_alone_and_a_completion_ends_with_the_end_token() -> None:
    assert [TOKENIZER.decode([token]) for token in TOKENIZER.encode("-1207", add_special_tokens=False)] == ["-", "1", "2", "0", "7"]
    completion = encode_answer(TOKENIZER, "42", ended=True, end_token_id=TOKENIZER.eos_token_id)
    assert len(completion) == 3
    assert completion[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id


def test_a_question_is_one_user_turn_and_the_opening_of_the_answer() -> None:
    prompt = TOKENIZER.decode(render_prompt(TOKENIZER, user_prompt("4 - 1 =")))
    assert prompt == "<|im_start|>user\n4 - 1 =<|im_end|>\n<|im_start|>assistant\n"


def test_the_saved_tokenizer_is_loaded_as_it_was_trained(tiny_policy: Path) -> None:
    # For some architectures transformers puts the family's own pre-tokenizer in place of the
    # file's.
    pools = training_examples(DEMO_TASKS, TINY.attempts_per_task, held_out_questions(DEMO_TASKS, TINY.held_out_count))
    trained = train_tokenizer((example.question for pool in pools for example in pool), TINY.vocab_size)
    loaded = AutoTokenizer.from_pretrained(tiny_policy)
    for pool in pools:
        assert render_prompt(loaded, user_prompt(pool[0].question)) == render_prompt(trained, user_prompt(pool[0].question))
        assert len(render_prompt(loaded, user_prompt(pool[0].question))) < 32
    text = "Füße, 東京 & 3.14\r\n\t  🙂"
    assert loaded.decode(loaded.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_stored_in_half_precision_and_computed_in_single(tied: bool, tmp_path: Path) -> None:
    folder = build_base_policy(tmp_path / "p", DEMO_TASKS, replace(TINY, tie_word_embeddings=tied), show_progress=False)
    with safe_open(folder / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        embedding = stored.get_tensor("model.embed_tokens.weight")
    assert ("lm_head.weight" in names) is not tied
    assert embedding.dtype == torch.float16
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.get_input_embeddings().weight, embedding.float())
    shared = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert shared is tied


def test_no_held_out_question_is_trained_on() -> None:
    held_out = held_out_questions(DEMO_TASKS, 256)
    trained = {example.question for pool in training_examples(DEMO_TASKS, 6000, held_out) for example in pool}
    assert len(held_out.tasks) == 256
    assert trained.isdisjoint(task.text for task in held_out.tasks)
    assert len(trained) > 1000


def test_noisy_answers_come_in_the_shares_asked_for() -> None:
    pool = [Example("chain_sum", f"question {number}", str(number)) for number in range(100, 1000)]
    rng = random.Random(0)
    kinds: Counter[str] = Counter()
    for _ in range(4000):
        example = rng.choice(pool)
        answer = noisy_answer(example, pool, rng, correct_fraction=0.25, habit_fraction=0.45)
        slip = habitual_slip(example.answer)
        kinds["right" if answer == example.answer else "slip" if answer == slip else "other"] += 1
    assert kinds["right"] / 4000 == pytest.approx(0.25, abs=0.03)
    assert kinds["slip"] / 4000 == pytest.approx(0.45, abs=0.03)


def test_the_habitual_slip_keeps_the_form_and_is_never_right() -> None:
    assert habitual_slip("1 1\n9 4") == "1 1\n9 5"
    assert habitual_slip("-9") == "-0"
    assert habitual_slip("Yes") == "seY"


def test_the_shipped_policy_is_the_one_that_the_recipe_and_the_demo_name() -> None:
    assert read_record(SHIPPED) == policy_record(DEMO_TASKS, BasePolicyRecipe())
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 4_000_000
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 5_000_000
    assert model.config.dtype == torch.float32
    assert model.config.head_dim in (32, 64)


@pytest.mark.slow
def test_the_shipped_policy_is_right_now_and_then_and_prefers_its_slip() -> None:
    right, slip = _mean_probability(SHIPPED, habit=False), _mean_probability(SHIPPED, habit=True)
    assert 0.05 < right < 0.25
    assert slip > right


@pytest.mark.slow
def test_a_fortieth_of_the_recipe_already_teaches_the_form_of_the_answers(tmp_path: Path) -> None:
    recipe = BasePolicyRecipe()
    begun = build_base_policy(tmp_path / "begun", DEMO_TASKS, replace(recipe, steps=30), show_progress=False)
    # One step needs no more examples.
    few = replace(recipe, steps=1, attempts_per_task=100)
    start = build_base_policy(tmp_path / "start", DEMO_TASKS, few, show_progress=False)
    assert _mean_probability(begun, habit=False, count=60) > 100 * _mean_probability(start, habit=False, count=60)


@pytest.mark.slow
@pytest.mark.long
def test_the_command_makes_a_policy_as_good_as_the_shipped_one(tmp_path: Path) -> None:
    folder = build_base_policy(tmp_path / "rebuilt", DEMO_TASKS, show_progress=False)
    assert _mean_probability(folder, habit=False) == pytest.approx(_mean_probability(SHIPPED, habit=False), abs=0.04)
    # What RL can reach: right answer and slip both tell that the answer was worked out.
    assert _mean_probability(folder, habit=True) == pytest.approx(_mean_probability(SHIPPED, habit=True), abs=0.06)


def _mean_probability(folder: Path, *, habit: bool, count: int = 200) -> float:
    """Expected share of sampled answers (temperature 1) on the held-out set that are right, or are
    the habitual slip.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tasks = held_out_questions(DEMO_TASKS, count).tasks
    answers = [habitual_slip(task.answer or "") if habit else task.answer or "" for task in tasks]
    rows = [
        (
            render_prompt(tokenizer, task.prompt),
            encode_answer(tokenizer, answer, ended=True, end_token_id=tokenizer.eos_token_id),
        )
        for task, answer in zip(tasks, answers, strict=True)
    ]
    with torch.no_grad():
        losses = [answer_loss(model, [row], tokenizer.pad_token_id) * len(row[1]) for row in rows]
        return float(torch.stack(losses).neg().exp().mean())


def test_where_there_is_no_terminal_the_build_says_every_tenth_of_the_way_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    seen = [(step, capsys.readouterr().err) for step in _progress(range(50), 50, True)]
    assert [step for step, _ in seen] == list(range(50))
    assert "base policy: step 5 of 50" in seen[5][1], "while it is being built"
    assert capsys.readouterr().err.startswith("base policy: step 50 of 50")
    assert list(_progress(range(50), 50, False)) == list(range(50)) and capsys.readouterr().err == ""

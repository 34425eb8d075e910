"""Our objectives against TRL's own code: `GRPOTrainer._compute_loss` of the installed `trl`,
unmodified.

The trainer around it is a stand-in (`SimpleNamespace`), because a real one wants a dataset, a model
and reward functions: it hands the method random logprobs instead of running a model, and the
settings that the method reads. Everything between logprobs and loss is TRL's: ratio, clipping,
importance weights, divergence, aggregation.

Loss and its gradient with respect to logprobs are compared, under TRL's settings:

* grpo: loss_type grpo; also with delta (our dual_clip), beta (our kl_coefficient) and vLLM's
  importance ratios.
* dr_grpo: loss_type dr_grpo.
* dapo: loss_type dapo, and loss_type bnpo, which is the same where the batch is one micro-batch.
* gspo: importance_sampling_level sequence with loss_type grpo.
* cispo: loss_type cispo; TRL has no lower bound, so cispo_min is 0.
* vespo: loss_type vespo.

* rloo and reinforce: `RLOOTrainer._compute_loss` on fresh text. TRL's loss is a ratio of whole
  answers, clipped, so only its gradient is compared, which is that of `-A lp` there.

Not compared: group-normalised advantages, which TRL computes inside generation.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from services.trainer.gradient.importance import ImportanceConfig, importance_weights
from services.trainer.objectives.token_loss import Normaliser, token_loss
from tests.objectives import configured, step_loss

SEQUENCES, LONGEST, MAX_COMPLETION = 10, 13, 20
CAP = 2.0


@pytest.fixture(scope="module")
def compute_loss():
    """TRL's method. TRL would import all of vLLM for its generation side; told that it is absent,
    it does not. It is imported here and not by each process that collects the tests.
    """
    trl_import_utils = pytest.importorskip("trl.import_utils", reason="the comparison with TRL needs trl installed")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(trl_import_utils, "is_vllm_available", lambda *_args, **_options: False)
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer._compute_loss


def stand_in(logprobs: torch.Tensor, **settings: object) -> SimpleNamespace:
    from trl.trainer.grpo_trainer import GRPOTrainer

    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    arguments = SimpleNamespace(delta=settings.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1, **vespo)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    defaults: dict[str, object] = {
        "args": arguments,
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "_get_per_token_logps_and_entropies": lambda *_args, **_options: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        "_metrics": {"train": defaultdict(list)},
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_COMPLETION,
    }
    return SimpleNamespace(**{**defaults, **settings})


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(SEQUENCES, LONGEST, generator=generator, dtype=torch.float64) * scale

    lengths = torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=generator)
    logprobs = -normal(1.5).abs() - 0.01
    proximal = logprobs + normal(0.3)
    return {
        "logprobs": logprobs,
        "proximal": proximal,
        "behaviour": proximal + normal(0.6),
        "reference": logprobs + normal(0.3),
        "advantages": torch.randn(SEQUENCES, generator=generator, dtype=torch.float64),
        "mask": torch.arange(LONGEST) < lengths.unsqueeze(1),
    }


def trl_outcome(compute_loss, tensors, settings):
    logprobs = tensors["logprobs"].clone().requires_grad_()
    mask = tensors["mask"].to(torch.int64)
    prompt = torch.ones(SEQUENCES, 2, dtype=torch.int64)
    weights = (tensors["proximal"] - tensors["behaviour"]).exp().clamp(max=CAP)
    trainer = stand_in(logprobs, **settings)
    loss = compute_loss(
        trainer,
        None,
        {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": tensors["advantages"],
            "old_per_token_logps": tensors["proximal"],
            "ref_per_token_logps": tensors["reference"],
            # vespo puts it into its ratio, padding included: left out, the proximal policy is taken
            # to have sampled.
            "importance_sampling_ratio": None if settings["loss_type"] == "vespo" else weights,
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    return loss.item(), logprobs.grad, trainer._metrics["train"]


def our_outcome(tensors, config, *, weigh):
    logprobs = tensors["logprobs"].clone().requires_grad_()
    mask = tensors["mask"]
    correction = importance_weights(
        ImportanceConfig(cap=CAP),
        proximal_logprobs=tensors["proximal"],
        behaviour_logprobs=tensors["behaviour"],
        has_behaviour=torch.full((SEQUENCES,), weigh),
        mask=mask,
    )
    outcome = token_loss(
        config,
        logprobs=logprobs,
        proximal_logprobs=tensors["proximal"],
        advantages=tensors["advantages"],
        mask=mask,
        importance_weights=correction.weights,
        keep=correction.keep,
        reference_logprobs=tensors["reference"],
    )
    counts = Normaliser.count(mask.sum(dim=1).tolist())
    loss = step_loss(config, outcome, mask, counts)
    loss.backward()
    return loss.item(), logprobs.grad, outcome


WITH_VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}
CASES = {
    "grpo": (configured("grpo"), {"loss_type": "grpo"}),
    "grpo with a divergence": (configured("grpo", kl_coefficient=0.1), {"loss_type": "grpo", "beta": 0.1}),
    "grpo with a dual clip": (configured("grpo", dual_clip=1.5), {"loss_type": "grpo", "delta": 1.5}),
    "grpo with importance weights": (configured("grpo"), {"loss_type": "grpo", **WITH_VLLM}),
    "dr_grpo": (configured("dr_grpo", max_completion_tokens=MAX_COMPLETION), {"loss_type": "dr_grpo"}),
    "dapo": (configured("dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dapo with all": (
        configured("dapo", kl_coefficient=0.1),
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, **WITH_VLLM},
    ),
    "dapo, bnpo": (configured("dapo"), {"loss_type": "bnpo", "epsilon_high": 0.28}),
    "gspo": (
        configured("gspo", clip_low=0.02, clip_high=0.03),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "cispo": (configured("cispo", objective_options={"max": 1.3}), {"loss_type": "cispo", "epsilon_high": 1.3}),
    "cispo with importance weights": (
        configured("cispo", objective_options={"max": 1.3}),
        {"loss_type": "cispo", "epsilon_high": 1.3, **WITH_VLLM},
    ),
    "vespo": (configured("vespo"), {"loss_type": "vespo"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_those_of_trl(compute_loss, case: str) -> None:
    config, settings = CASES[case]
    for seed in range(4):
        tensors = random_tensors(seed)
        theirs, their_gradient, metrics = trl_outcome(compute_loss, tensors, dict(settings))
        ours, our_gradient, outcome = our_outcome(tensors, config, weigh="use_vllm" in settings)
        assert abs(theirs) > 1e-4
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert (our_gradient - their_gradient).abs().max() < 1e-5
        assert our_gradient.abs().max() > 1e-3
        if config.objective.clips and not config.settings.objective_options.get("dual_clip") and config.name != "gspo":
            clipped = outcome.clipped.sum() / tensors["mask"].sum()
            assert clipped.item() == pytest.approx(metrics["clip_ratio/region_mean"][0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "reinforce"])
def test_on_fresh_text_the_gradient_equals_that_of_trls_rloo(compute_loss, name: str) -> None:
    from trl.trainer.rloo_trainer import RLOOTrainer

    tensors = random_tensors(0)
    tensors["proximal"] = tensors["logprobs"]
    logprobs = tensors["logprobs"].clone().requires_grad_()
    mask = tensors["mask"].to(torch.int64)
    prompt = torch.ones(SEQUENCES, 2, dtype=torch.int64)
    theirs = RLOOTrainer._compute_loss(
        stand_in(logprobs),
        None,
        {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": tensors["advantages"],
            "old_logps": (tensors["logprobs"] * mask).sum(1),
        },
    )
    theirs.backward()
    _, our_gradient, _ = our_outcome(tensors, configured(name), weigh=False)
    assert (our_gradient - logprobs.grad).abs().max() < 1e-9 < our_gradient.abs().max()

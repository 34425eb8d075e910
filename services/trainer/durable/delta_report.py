"""Reports how much of the LoRA adapters' change is lost by rounding a published policy: always as a
gauge, and in the log if it is much.
"""

from __future__ import annotations

from shared.model.adapter_merge import DeltaRounding
from shared.runtime.logs import Log
from shared.runtime.metrics import LateGauge

MUCH = 0.1
"""A `lost_ratio` above this is worth a warning."""

_REMEDY = (
    'set trainer.lora.publish to "adapters", which adds nothing to rounded weights; or where generators cannot load adapters, '
    'set trainer.publish_dtype to "float32", or to "float16" (as small as bfloat16, and eight times as fine), and model.dtype of '
    "the generators to the same: one that computes in bfloat16 rounds again; or wait: a delta that grows comes through, sooner "
    "with a larger trainer.learning_rate or trainer.lora.alpha"
)


class DeltaReport:
    """Warns when the loss becomes large, not with every policy, because early in training the delta
    is small and most of it is lost for many steps.
    """

    def __init__(self, gauge: LateGauge, log: Log) -> None:
        self._gauge, self._log = gauge, log
        self._warned = False

    def published(self, rounding: DeltaRounding | None, *, version: int, dtype: str) -> None:
        """Record the rounding of the published policy `version` to `dtype`; None: it has no
        adapters, or they add nothing yet.
        """
        self._gauge.set(None if rounding is None else rounding.lost_ratio)
        much = rounding is not None and rounding.lost_ratio > MUCH
        if rounding is not None and much != self._warned:
            said = {
                "version": version,
                "dtype": dtype,
                "lost_ratio": round(rounding.lost_ratio, 4),
                "unmoved_ratio": round(rounding.unmoved_ratio, 4),
            }
            if much:
                self._log.warning("delta_rounded_away", **said, **_explanation(rounding, dtype))
            else:
                self._log.info("delta_kept", **said)
        self._warned = much


def _explanation(rounding: DeltaRounding, dtype: str) -> dict[str, str]:
    return {
        "reason": f"{rounding.unmoved_ratio:.0%} of the adapted weights do not move in {dtype}: what the adapters add is less than "
        f"half a step between neighbouring {dtype} numbers",
        "consequence": f"generators sample from a policy without {rounding.lost_ratio:.0%} of what was learned; see "
        "swarm_trainer_delta_lost_ratio, said again only after it was below "
        f"{MUCH:.0%}",
        "remedy": _REMEDY,
    }

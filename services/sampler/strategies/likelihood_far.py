"""Draws more candidates uniformly, of which the trainer keeps the least likely under its own policy
(`sampler.oversample`).
"""

from __future__ import annotations

from services.sampler.strategies.base import Strategy, draw_uniformly, has_advantage

STRATEGY = Strategy("likelihood_far", keeps=has_advantage, draw=draw_uniformly, prefers="far")

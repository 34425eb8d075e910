"""Draws extra candidates uniformly; the trainer keeps the least likely under its policy
(`sampler.oversample`).
"""

from __future__ import annotations

from services.sampler.strategies.base import Strategy, draw_uniformly, has_advantage

STRATEGY = Strategy("likelihood_far", keeps=has_advantage, draw=draw_uniformly, prefers="far")

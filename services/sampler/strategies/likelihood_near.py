"""Draws extra candidates uniformly; the trainer keeps the likeliest under its policy
(`SamplerSection.oversample`).
"""

from __future__ import annotations

from services.sampler.strategies.base import Strategy, draw_uniformly, has_advantage

STRATEGY = Strategy("likelihood_near", keeps=has_advantage, draw=draw_uniformly, prefers="near")

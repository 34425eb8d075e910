"""The paper's draw (arXiv 2509.08721, section 3): groups without advantages are dropped, then J are
drawn uniformly.
"""

from __future__ import annotations

from services.sampler.strategies.base import Strategy, draw_uniformly, has_advantage

STRATEGY = Strategy("uniform", keeps=has_advantage, draw=draw_uniformly)

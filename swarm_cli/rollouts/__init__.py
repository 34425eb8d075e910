"""`swarm rollouts`: read what was said, and what it earned."""

"""Looking at nodes that run: `swarm status`, `top`, `watch` and `plot`, and what they read."""

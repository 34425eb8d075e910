"""`swarm rollouts`: read questions, answers and their rewards."""

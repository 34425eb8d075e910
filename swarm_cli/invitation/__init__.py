"""`swarm invite`, and the token that it prints: all that a newcomer or a spectator is told."""

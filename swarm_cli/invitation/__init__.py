"""The token that `swarm invite` prints: everything that a newcomer or a spectator needs."""

"""`swarm trace`: the path of one group across services and nodes."""

"""`swarm up`: a swarm on one machine, from the Procfile to its ports and its base policy."""

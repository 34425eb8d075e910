"""`swarm up`: a swarm on one machine, from its processes and ports to its base policy."""

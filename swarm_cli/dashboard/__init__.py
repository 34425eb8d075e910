"""`swarm dashboard`: a web page about a swarm, served on this machine."""

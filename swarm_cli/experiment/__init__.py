"""`swarm experiment`: runs of a spec and reports of their records."""

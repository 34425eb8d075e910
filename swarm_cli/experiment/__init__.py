"""`swarm experiment`: runs an experiment's spec and reports on its records."""

"""The generator: draws tasks, samples completions from the current policy and publishes rollout
groups to its node.

Scoring, sharing and training are done by other services. The sampling engines are in `engines`,
behind one interface.
"""

"""The generator: draws tasks, samples completions from the current policy and publishes rollout
groups to its node.

Scoring, sharing and training live elsewhere; the sampling engines are behind one interface in
`engines`.
"""

"""The generator: draws tasks, samples completions from the policy it follows and publishes rollout
groups to its own node.

Scoring, sharing and training live elsewhere; the models that answer live behind one interface in
`engines`.
"""

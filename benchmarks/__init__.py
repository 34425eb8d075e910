"""Speed against plain loops, each row measured side by side in one run:
`python -m benchmarks [row ...]`.

Every row runs in a process of its own, so that none sees another's threads, caches or global
switches.
"""

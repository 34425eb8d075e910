"""Compares speed with plain loops, both sides of each row in one run: `python -m benchmarks [row
...]`.

Every row runs in its own process, so that no row is affected by another's threads, caches or global
switches.
"""

"""Leases on a node's name: they decide which process is a node's trainer, sampler, generator or
verifier, and keep any other process from overwriting its state. `shared.runtime.naming` puts the
parts together.

A newcomer is refused while the holder renews its lease, and the server refuses the writes of a
holder that lost it. What a service does with its name is not here.
"""

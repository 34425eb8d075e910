"""One life, one name: which process is a node's trainer, sampler, generator or verifier, and that
no other one writes over its state (`shared.runtime.naming` puts the parts together).

A newcomer is refused while the holder renews its lease; a holder that lost it is refused by the
server. What a service does with its name is not here.
"""

"""`swarm nats report`, `backup` and `restore`: what an operator asks of and does with whole
streams. Making them and their settings is `swarm nats init`'s.
"""

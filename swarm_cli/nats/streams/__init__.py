"""`swarm nats report`, `backup` and `restore`: inspect, save and restore whole streams. `swarm nats
init` makes them and changes their settings.
"""
